"""Replay of many requests at once in numpy: the same rounds as `ReplayBackend`, hundreds of thousands per second.

`FlatTrace` (`assc.flat_trace`) holds the columns of a trace and the costs, `Rounds` the state of N requests. All arrays
are [N] unless said otherwise; D drafters are numbered in the order of the trace, -1 is rollback.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assc.flat_trace import FlatTrace, Floats, Ints

__all__ = ["GOING", "FlatTrace", "Floats", "Ints", "Played", "Rounds", "static_seconds"]

GOING = -1
"""finish code of a request that is not finished; others index `assc.trace.FINISHES`"""


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
