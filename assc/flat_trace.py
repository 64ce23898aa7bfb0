"""A trace and its costs as flat numpy arrays, ready to be gathered for many requests at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from assc.actions import ActionTable
from assc.costs import CostModel
from assc.errors import RequestError
from assc.groups import check_chunks
from assc.loads import STAY, Load, check_loads, load_schedule
from assc.text_memory import TEXT, text_columns
from assc.trace import CONFIDENCE, FINISHES, Trace
from assc.trace_rules import check_replayable, kv_slots, peek_drafter

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


LENGTH, CONTEXT = FINISHES.index("length"), FINISHES.index("context")


class FlatTrace:
    """Columns [P] of all positions and facts [R] of all requests of a trace, ready to be gathered.

    With `loads` the costs follow the position as in `assc.loads.LoadedBackend`, and `costs` is not used. `chunks` is
    the number of groups in which drafted tokens are verified (`assc.groups`).
    """

    def __init__(
        self,
        trace: Trace,
        costs: CostModel,
        *,
        max_new_tokens: int | None = None,
        approximate: bool = False,
        loads: Sequence[Load] = (),
        stay: float = STAY,
        chunks: int = 1,
    ) -> None:
        priced = [load.costs for load in loads] or [costs]
        for model in priced:
            check_replayable(trace.header, model, approximate=approximate, name=trace.name)
        if max_new_tokens is not None and max_new_tokens < 1:
            raise RequestError(f"max_new_tokens is {max_new_tokens}, allowed is 1 or more")
        c, header = trace.columns, trace.header
        check_chunks(chunks, header.k_max)
        self.chunks = chunks
        tables = [model.verify_tables(header.k_max, chunks) for model in priced]
        self.verify_seconds: Floats = np.stack([t.seconds for t in tables])
        """[L, K_max + 1, K_max + 2]: `VerifyTables.seconds` under each load"""
        self.forwards, self.judged = tables[0].forwards, tables[0].judged
        self.trace, self.costs, self.k_max = trace, costs, header.k_max
        self.drafters = trace.drafters
        self.start: Ints = np.asarray(c["offsets"][:-1], np.int64)
        recorded = np.diff(c["offsets"]).astype(np.int64)
        self.prompt: Ints = np.diff(c["prompt_offsets"]).astype(np.int64)
        asked = c["budget"].astype(np.int64)
        if max_new_tokens is not None:
            asked = np.minimum(asked, max_new_tokens)
        room = asked if header.max_positions is None else np.minimum(asked, header.max_positions - self.prompt)
        self.budget: Ints = room
        self.cut: Ints = np.where(room < asked, CONTEXT, LENGTH)
        self.end: Ints = np.minimum(recorded, room)
        """tokens after which a request is finished"""
        natural = (c["finish"] != LENGTH) & (c["finish"] != CONTEXT) & (recorded <= room)
        self.finish: Ints = np.where(natural, c["finish"], self.cut)
        self.temperature: Floats = c["temperature"].astype(np.float64)
        self.slots: Ints = np.array([kv_slots(int(t)) for t in self.prompt + room], np.int64)
        size = trace.positions
        self.acc: Ints = np.concatenate([c[f"acc/{d}"] for d in self.drafters]).astype(np.int64)
        """[D·P], drafter d's part begins at d·P"""
        self.avail: Ints = np.concatenate([c[f"avail/{d}"] for d in self.drafters]).astype(np.int64)
        self.size = size
        self.entropy: Floats = c["target_entropy"].astype(np.float64)
        self.top1: Floats = c["target_top1"].astype(np.float64)
        self.match: Ints = c["match"].astype(np.int64)
        self.matches = bool((self.match >= 0).any())
        self.peeker = peek_drafter(header)
        self.peek: list[Floats] = (
            [c[f"{name}/{self.peeker}"].astype(np.float64) for name in CONFIDENCE] if self.peeker is not None else []
        )
        self.loads = tuple(loads)
        self.load: Ints | None = self._schedule(stay) if loads else None
        """[P] number of the load, None without changing loads"""
        self.target = np.array([_target(model) for model in priced]).T.copy()
        """[4, L] what the tables leave out, under each load, in the order of `_target`"""
        own = [model.drafters[d] for model in priced for d in self.drafters]
        self.per_call: Floats = np.array([d.per_call for d in own])
        """[L·D], load l's part begins at l·D; L is 1 without changing loads"""
        self.per_step: Floats = np.array([d.per_step for d in own])
        self.per_catch_up: Floats = np.array([d.per_catch_up for d in own])
        self.feeds = np.array([d.keeps != "nothing" for d in header.drafters])
        self.keeps_drafts = np.array([d.keeps == "drafts" for d in header.drafters])
        self._text: Floats = np.full((0, TEXT), np.nan)
        self._text_known = np.zeros(len(trace), bool)

    def text_numbers(self, rows: Ints) -> Floats:
        """`assc.text_memory` numbers [P, TEXT] of all positions; those of other rows than `rows` may be missing."""
        if not len(self._text):
            self._text = np.full((self.size, TEXT), np.nan)
        for row in np.unique(rows[~self._text_known[rows]]).tolist():
            c, part = self.trace.columns, slice(*self.trace.columns["offsets"][row : row + 2])
            prompt = c["prompt_ids"][slice(*c["prompt_offsets"][row : row + 2])].tolist()
            self._text[part] = text_columns(prompt, c["tokens"][part].tolist())
            self._text_known[row] = True
        return self._text

    def _schedule(self, stay: float) -> Ints:
        check_loads(self.loads, stay)
        columns = self.trace.columns
        sizes = np.diff(columns["offsets"]).tolist()
        parts = [load_schedule(int(s), n, len(self.loads), stay) for s, n in zip(columns["seed"], sizes, strict=True)]
        return np.concatenate(parts)

    def verify(
        self, drafted: Ints, emitted: Ints, slots: Ints, length: Ints, load: Ints | None = None
    ) -> tuple[Floats, Floats | float]:
        """Seconds of verifying and committing, and of the overhead, as `CostModel` prices them.

        Of rounds that proposed `drafted` tokens behind `length` in buffers of `slots`, under the load of number `load`.
        """
        if load is None:
            per_kv, per_emitted, overhead, static_kv = self.target[:, 0].tolist()
            kv, forwards = slots if static_kv else length, self.verify_seconds[0, drafted, emitted]
        else:
            per_kv, per_emitted, overhead, static_kv = self.target[:, load]
            kv, forwards = np.where(static_kv > 0, slots, length), self.verify_seconds[load, drafted, emitted]
        reading = per_kv * kv
        if self.chunks > 1:
            reading = reading * self.forwards[drafted, emitted]
        seconds: Floats = forwards + reading + per_emitted * emitted
        return seconds, overhead

    def actions(self, table: ActionTable) -> tuple[Ints, Ints]:
        """Drafter number (-1 for rollback) and K of each action of a table. `RequestError` for one it cannot play."""
        numbers = {name: i for i, name in enumerate(self.drafters)}
        for action in table:
            if (action.drafter is not None and action.drafter not in numbers) or action.k > self.k_max:
                raise RequestError(f"the trace cannot play {action}: it has {numbers} and K_max={self.k_max}")
        drafter = [-1 if a.drafter is None else numbers[a.drafter] for a in table]
        return np.array(drafter, np.int64), np.array([a.k for a in table], np.int64)


def _target(costs: CostModel) -> tuple[float, ...]:
    return costs.target_per_kv, costs.per_emitted, costs.overhead, float(costs.static_kv)
