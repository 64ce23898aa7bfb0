"""The rounds of a result file (`eval.py --rounds`), checked."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from assc.report.checked import Checked
from assc.report.nouns import RoundsOf, View
from assc.rounds_json import COLUMNS


class RoundsReader(Checked):
    """The requests whose rounds were stored, and what each policy did with them."""

    def views(self) -> tuple[View, ...]:
        raw = self.data.get("rounds")
        if raw is None:
            return ()
        drafters = self.get(raw, "drafters", list, "'rounds'")
        texts = raw.get("token_texts")
        if texts is not None and not (isinstance(texts, dict) and all(isinstance(t, str) for t in texts.values())):
            raise self.refuse("'token_texts' of 'rounds' are no texts")
        found = []
        for request in self.get(raw, "requests", list, "'rounds'"):
            where = "a request in 'rounds'"
            runs = tuple(self.rounds(run, drafters) for run in self.get(request, "runs", list, where))
            found.append(
                View(
                    self.get(request, "id", str, where),
                    self.get(request, "category", str, where),
                    self.number(request, "temperature", where),
                    int(self.number(request, "prompt_tokens", where) or 0),
                    runs,
                    texts,
                    self.entropies(request, where),
                )
            )
        return tuple(found)

    def entropies(self, request: Any, where: str) -> tuple[float | None, ...]:
        """The target's at each token, empty where the file doesn't have them."""
        raw = request.get("token_entropy")
        if raw is None:
            return ()
        values = self.get(request, "token_entropy", list, where)
        return tuple(self.number({"token_entropy": h}, "token_entropy", where) for h in values)

    def chances(self, run: Any, planned: Sequence[int], where: str) -> tuple[tuple[float, ...], ...]:
        """Predicted chances of acceptance per round, at most as many as tokens were planned."""
        if run.get("accept_chances") is None:
            return ()
        raw = self.get(run, "accept_chances", list, where)
        fits = len(raw) == len(planned) and all(
            isinstance(r, list) and len(r) <= k for r, k in zip(raw, planned, strict=True)
        )
        if not fits:
            raise self.refuse(f"'accept_chances' of {where} do not fit its rounds")
        found = tuple(tuple(self.needed({"chance": p}, "chance", where) for p in chances) for chances in raw)
        if any(not 0 <= p <= 1 for chances in found for p in chances):
            raise self.refuse(f"'accept_chances' of {where} are no chances")
        return found

    def rounds(self, run: Any, drafters: Sequence[Any]) -> RoundsOf:
        policy = self.get(run, "policy", str, "a run in 'rounds'")
        where = f"the rounds of {policy!r}"
        columns: dict[str, list[Any]] = {name: self.get(run, name, list, where) for name in (*COLUMNS, "tokens")}
        for name, values in columns.items():
            for value in values:
                if not (value is None and name == "target_entropy"):
                    self.needed({name: value}, name, where)
        length = len(columns["position"])
        if any(len(columns[name]) != length for name in COLUMNS):
            raise self.refuse(f"the columns of {where} have different lengths")
        whole = {n: tuple(int(v) for v in columns[n]) for n in COLUMNS if n not in ("seconds", "target_entropy")}
        if [0, *accumulate(whole["emitted"])] != [*whole["position"], len(columns["tokens"])]:
            raise self.refuse(f"{where} do not add up to its tokens")
        if not all(0 <= a <= d <= k for a, d, k in zip(*(whole[n] for n in ("accepted", "drafted", "k")), strict=True)):
            raise self.refuse(f"{where} accept more than was drafted")
        if not all(-1 <= d < len(drafters) for d in whole["drafter"]) or any(e < 1 for e in whole["emitted"]):
            raise self.refuse(f"{where} name an unknown drafter or commit nothing")
        finish = run.get("finish")
        return RoundsOf(
            policy=policy,
            finish=None if finish is None else str(finish),
            tokens=tuple(int(t) for t in columns["tokens"]),
            drafter=tuple(None if d < 0 else str(drafters[d]) for d in whole["drafter"]),
            **{name: whole[name] for name in ("position", "k", "drafted", "accepted", "emitted")},
            seconds=tuple(float(s) for s in columns["seconds"]),
            entropy=tuple(None if h is None else float(h) for h in columns["target_entropy"]),
            chances=self.chances(run, whole["k"], where),
        )
