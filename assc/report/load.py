"""Result files in, checked: what `eval.py --json` and `train_policy.py` wrote, old files included, and nothing else."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from assc.metrics import ROW_KEYS
from assc.report.checked import Checked, ResultError, read_object
from assc.report.nouns import PHASES, Bin, Entry, Played, Reliability, Result, RoundsOf, Row, View
from assc.rounds_json import COLUMNS

EVAL_FILE, CONFIG_FILE, LIVE_FILE, CURVES = "eval.json", "config.json", "live.json", "tb"
"""what a run directory holds"""
NUMBERS = tuple(k for k in ROW_KEYS if k not in ("policy", "speedup_ci95", "action", "time_source", "rung"))


def read_result(path: Path) -> Result:
    """A run directory or a JSON file. `ResultError` with one sentence for anything that is not a result."""
    if path.is_dir():
        file = path / EVAL_FILE
        if not file.is_file():
            raise ResultError(f"{path} has no {EVAL_FILE}: it is no finished run of train_policy.py")
        config, live, curves = path / CONFIG_FILE, path / LIVE_FILE, path / CURVES
        return _Reader(file).result(
            str(path),
            training=read_object(config) if config.is_file() else {},
            live=_Reader(live).live() if live.is_file() else None,
            curves=str(curves) if curves.is_dir() else None,
        )
    return _Reader(path).result(str(path))


def result_of(data: Mapping[str, Any], name: str) -> Result:
    """A result that is not in a file: what `Evaluation.to_json` gives."""
    return _Reader(Path(name), json.loads(json.dumps(data, allow_nan=False))).result(name)


class _Reader(Checked):
    """The parts of a result."""

    def result(
        self,
        name: str,
        *,
        training: Mapping[str, Any] | None = None,
        live: Mapping[str, Any] | None = None,
        curves: str | None = None,
    ) -> Result:
        meta = self.get(self.data, "meta", dict, "it")
        for key in ("mode", "time_source"):
            self.get(meta, key, str, "'meta'")
        same = self.data.get("same_text")
        return Result(
            name=name,
            meta=meta,
            entries=self.entries(),
            ladder=self.ladder(),
            same_text=same if isinstance(same, bool) else None,
            complete=self.data.get("complete") is not False,
            views=self.views(),
            training=training or {},
            live=live,
            curves=curves,
        )

    def row(self, raw: Any, where: str) -> Row:
        policy = self.get(raw, "policy", str, where)
        numbers = {key: self.number(raw, key, f"the row of {policy!r}") for key in NUMBERS}
        for key in ("tokens", "seconds", "rounds"):
            self.needed(raw, key, f"the row of {policy!r}")
        texts = {key: None if raw.get(key) is None else str(raw[key]) for key in ("action", "time_source", "rung")}
        values: dict[str, Any] = {
            **numbers,
            "policy": policy,
            "speedup_ci95": self.interval(raw, "speedup_ci95", where),
            **texts,
        }
        return {key: values[key] for key in ROW_KEYS}

    def entries(self) -> tuple[Entry, ...]:
        rows = self.get(self.data, "rows", list, "it")
        if not rows:
            raise self.refuse("it has no rows")
        details = self.data.get("details") or [{}] * len(rows)
        by_category = self.data.get("by_category") or {}
        if not isinstance(details, list) or len(details) != len(rows) or not isinstance(by_category, dict):
            raise self.refuse("'details' and 'by_category' do not fit the rows")
        for category, its_rows in by_category.items():
            if not isinstance(its_rows, list) or len(its_rows) != len(rows):
                raise self.refuse(f"the rows of category {category!r} are not those of the table")
        found = []
        for i, (raw, detail) in enumerate(zip(rows, details, strict=True)):
            row = self.row(raw, f"row {i + 1}")
            where = f"the details of {row['policy']!r}"
            if not isinstance(detail, dict):
                raise self.refuse(f"{where} are missing")
            found.append(
                Entry(
                    label=str(detail.get("label") or row["policy"]),
                    result=0,
                    row=row,
                    phases={phase: self.number(detail, f"{phase}_seconds", where) for phase in PHASES},
                    categories={c: self.row(r[i], f"category {c!r}") for c, r in by_category.items()},
                    played=self.played(detail, where),
                    reliability=self.reliability(detail.get("accept_reliability"), where),
                )
            )
        if len({e.label for e in found}) < len(found):
            raise self.refuse("two of its policies have the same label")
        if len({tuple(p.key for p in e.played) for e in found}) > 1:
            raise self.refuse("its policies have not played the same requests")
        return tuple(found)

    def played(self, detail: Mapping[str, Any], where: str) -> tuple[Played, ...]:
        raw = detail.get("requests") or []
        if not isinstance(raw, list):
            raise self.refuse(f"{where} have no proper 'requests'")
        seen: Counter[int] = Counter()
        found = []
        for one in raw:
            what = f"a request in {where}"
            repeat = int(self.number(one, "repeat", what) or 0)
            found.append(
                Played(
                    seen[repeat],
                    self.get(one, "id", str, what),
                    self.get(one, "category", str, what),
                    self.number(one, "temperature", what),
                    repeat,
                    self.needed(one, "tokens", what),
                    self.needed(one, "seconds", what),
                    self.needed(one, "baseline_tokens", what),
                    self.needed(one, "baseline_seconds", what),
                )
            )
            seen[repeat] += 1
        return tuple(found)

    def reliability(self, raw: Any, where: str) -> Reliability | None:
        if raw is None:
            return None
        what = f"'accept_reliability' in {where}"
        names = ("judged", "accepted_share", "brier", "brier_constant", "calibration_error")
        numbers = {name: self.needed(raw, name, what) for name in names}
        bins = [
            Bin(
                judged=self.needed(one, "judged", what),
                predicted=self.needed(one, "predicted", what),
                accepted=self.needed(one, "accepted", what),
                interval=self.interval(one, "accepted_ci95", what),
            )
            for one in self.get(raw, "bins", list, what)
        ]
        return Reliability(**numbers, bins=tuple(bins))

    def interval(self, holder: Any, key: str, where: str) -> tuple[float | None, float | None]:
        """Both ends of an interval, each a finite number or None."""
        ends = (holder.get(key) if isinstance(holder, Mapping) else None) or [None, None]
        if not isinstance(ends, list) or len(ends) != 2:
            raise self.refuse(f"{where} has no proper {key!r}")
        low, high = (self.number({"end": end}, "end", f"the interval of {where}") for end in ends)
        return low, high

    def ladder(self) -> Mapping[str, Row | None] | None:
        raw = self.data.get("ladder")
        if raw is None:
            return None
        rungs: dict[str, Row | None] = {}
        for key in ("plain", "tuned", "best_static_per_request", "oracle"):
            rung = raw.get(key) if isinstance(raw, dict) else None
            where = f"the rung {key!r} of the ladder"
            if rung is None and key == "tuned":
                rungs[key] = None
                continue
            names = ("tokens_per_second", "speedup", "seconds", "tokens")
            if not isinstance(rung, dict):
                raise self.refuse(f"{where} is missing")
            numbers = {name: self.needed(rung, name, where) for name in names}
            fraction = self.number(rung, "oracle_fraction", where)
            rungs[key] = {**numbers, "oracle_fraction": fraction, "action": rung.get("action") and str(rung["action"])}
        return rungs

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

    def live(self) -> Mapping[str, Any]:
        """The check on the live decoder: counts, and the row of the policy live and in replay."""
        found: dict[str, Any] = {"policy": self.get(self.data, "policy", str, "it")}
        for key in ("requests", "same_text", "rounds", "same_rounds"):
            found[key] = self.needed(self.data, key, "it")
        for key in ("live", "replay"):
            row = self.get(self.data, key, dict, "it")
            names = ("speedup", "acceptance_rate", "mean_k", "rounds", "seconds", "tokens")
            interval = self.interval(row, "speedup_ci95", repr(key))
            found[key] = {**{n: self.number(row, n, f"{key!r}") for n in names}, "speedup_ci95": interval}
        meta = self.data.get("meta")
        found["meta"] = meta if isinstance(meta, dict) else {}
        return found
