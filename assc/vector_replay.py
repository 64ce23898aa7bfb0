"""Replay of many requests at once in numpy: the same rounds as `ReplayBackend`, hundreds of thousands per second.

`FlatTrace` holds the columns of a trace and the costs as flat arrays, `Rounds` the state of N requests. All arrays
are [N] unless said otherwise; D drafters are numbered in the order of the trace, -1 is rollback.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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

GOING = -1
"""finish code of a request that is not finished; others index `assc.trace.FINISHES`"""
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
        self._text: Floats = np.full((0, TEXT), np.nan)
        self._text_known = np.zeros(len(trace), bool)
        self.keeps_drafts = np.array([d.keeps == "drafts" for d in header.drafters])

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


@dataclass(frozen=True, slots=True)
class Played:
    """One round of each of N requests: counts in tokens, times in seconds, as in `RoundRecord`."""

    drafted: Ints
    """judged tokens, as in `RoundRecord`"""
    accepted: Ints
    emitted: Ints
    seconds: Floats
    draft_seconds: Floats
    verify_seconds: Floats
    steps: Ints
    catch_up: Ints
    finish: Ints
    """GOING, or an index into FINISHES"""


class Rounds:
    """N requests under way. Rows (request numbers of the trace) may repeat; each has its own state.

    `peek=True` lets the draft be asked before every decision, as a policy that reads draft fields does.
    """

    def __init__(self, flat: FlatTrace, rows: Sequence[int] | Ints, *, peek: bool = False) -> None:
        self.flat = flat
        self.peeker = flat.drafters.index(flat.peeker) if peek and flat.peeker is not None else None
        self.row: Ints = np.array(rows, np.int64)
        n = len(self.row)
        self._lanes = np.arange(n)
        self.position = np.zeros(n, np.int64)
        self.fed = np.zeros((len(flat.drafters), n), np.int64)
        """[D, N] tokens of the text that each drafter has read"""
        self._peeked = np.zeros(n, np.int64)
        self._gather(slice(None))

    def _gather(self, lanes: Any) -> None:
        """Copy the facts of the requests in `lanes` into per-lane arrays."""
        flat, row = self.flat, self.row
        if isinstance(lanes, slice):
            self.start, self.prompt = flat.start[row], flat.prompt[row]
            self.end, self.budget, self.slots = flat.end[row], flat.budget[row], flat.slots[row]
            self.code, self.temperature = flat.finish[row], flat.temperature[row]
            return
        chosen = row[lanes]
        for name in ("start", "prompt", "end", "budget", "slots", "temperature"):
            getattr(self, name)[lanes] = getattr(flat, name)[chosen]
        self.code[lanes] = flat.finish[chosen]

    def resume(self) -> None:
        """Take up the requests of `row` where `position` and `fed`, just set, say that they are."""
        self._gather(slice(None))

    def restart(self, lanes: Ints, rows: Ints) -> None:
        """Begin the requests `rows` in these lanes."""
        self.row[lanes] = rows
        self.position[lanes] = 0
        self.fed[:, lanes] = 0
        self._gather(lanes)

    def look(self, lanes: Any = slice(None)) -> None:
        """The peek of a decision point; must be called once per decision when `peek` is on."""
        if self.peeker is not None:
            fed, length = self.fed[self.peeker], (self.prompt + self.position)[lanes]
            self._peeked[lanes] = length - fed[lanes] - 1
            fed[lanes] = length

    def play(self, drafter: Ints, k: Ints) -> Played:
        """One round of every lane: drafter numbers (-1: rollback) and planned K. Finished lanes must be restarted."""
        flat, lanes, n = self.flat, self._lanes, self.position
        k = np.minimum(k, self.budget - n - 1)
        k[drafter < 0] = 0
        asked = k > 0
        d = np.maximum(drafter, 0)
        at = d * flat.size
        here = self.start + n
        at += here
        drafted = np.minimum(k, flat.avail[at])
        accepted = np.minimum(drafted, flat.acc[at])
        emitted = np.minimum(accepted + 1, self.end - n)
        length = self.prompt + n
        load = None if flat.load is None else flat.load[here]
        draft, steps, catch_up = self._work(d, asked, drafted, accepted, length, lanes, load)
        verify, overhead = flat.verify(drafted, emitted, self.slots, length, load)
        self.position = n + emitted
        return Played(
            drafted=drafted if flat.chunks == 1 else flat.judged[drafted, emitted],
            accepted=accepted,
            emitted=emitted,
            seconds=draft + verify + overhead,
            draft_seconds=draft,
            verify_seconds=verify,
            steps=steps,
            catch_up=catch_up,
            finish=np.where(self.position >= self.end, self.code, GOING),
        )

    def _work(
        self,
        d: Ints,
        asked: NDArray[np.bool_],
        drafted: Ints,
        accepted: Ints,
        length: Ints,
        lanes: Ints,
        load: Ints | None,
    ) -> tuple[Floats, Ints, Ints]:
        """Draft seconds, forwards and tokens caught up; moves `fed`."""
        flat = self.flat
        offset: Ints | int = 0 if load is None else load * len(flat.drafters)
        priced = d if load is None else d + offset
        active = asked & flat.feeds[d]
        fed = self.fed[d, lanes]
        if self.peeker is None:
            active &= drafted > 0
            catch_up = np.where(active, length - fed - 1, 0)
            steps = np.where(active, drafted, 0)
            draft = flat.per_call[priced] + flat.per_step[priced] * steps + flat.per_catch_up[priced] * catch_up
            draft *= asked
        else:
            own = asked & (d == self.peeker)
            active &= (drafted > 0) | own
            catch_up = np.where(own, self._peeked, np.where(active, length - fed - 1, 0))
            steps = np.where(active, np.maximum(drafted, 1), 0)
            cost = flat.per_call[priced] + flat.per_step[priced] * steps + flat.per_catch_up[priced] * catch_up
            p = self.peeker + offset
            idle = flat.per_call[p] + flat.per_step[p] * 1 + flat.per_catch_up[p] * self._peeked
            draft = idle * ~own + cost * asked
            steps = steps + ~own
            catch_up = catch_up + np.where(own, 0, self._peeked)
        run = np.where(flat.keeps_drafts[d], np.maximum(np.minimum(drafted - 1, accepted), 0), 0)
        self.fed[d, lanes] = np.where(active, length + run, fed)
        return draft, steps, catch_up


def static_seconds(
    flat: FlatTrace, rows: Sequence[int], drafter: str | None, k: int
) -> tuple[Floats, Ints, Ints, Ints, Ints]:
    """Play one action in every round of these requests.

    Returns seconds, tokens, rounds, drafted and accepted, each [len(rows)].
    """
    number = -1 if drafter is None else flat.drafters.index(drafter)
    sums: list[Floats] = [np.zeros(len(rows)) for _ in range(5)]
    index, going = np.arange(len(rows)), Rounds(flat, rows)
    while len(index):
        played = going.play(np.full(len(index), number), np.full(len(index), k))
        parts = (played.seconds, played.emitted, np.ones(len(index)), played.drafted, played.accepted)
        for total, part in zip(sums, parts, strict=True):
            total[index] = total[index] + part
        keep = played.finish == GOING
        index, going = index[keep], _kept(going, keep)
    seconds, *counts = sums
    tokens, rounds, drafted, accepted = (c.astype(np.int64) for c in counts)
    return seconds, tokens, rounds, drafted, accepted


def _kept(rounds: Rounds, keep: NDArray[np.bool_]) -> Rounds:
    """The lanes of `rounds` that are to go on."""
    rest = Rounds(rounds.flat, rounds.row[keep])
    rest.position, rest.fed = rounds.position[keep], rounds.fed[:, keep]
    return rest
