"""Hindsight: the least Σseconds that any schedule of (drafter, K) reaches on a trace, and the best static actions.

The minimum is exact. What makes that more than one recursion over positions is the catch-up: a draft that was left
alone must read the tokens it missed, so a call's cost depends on when the last one was. Over a whole request the
tokens caught up of one drafter, called at lengths L_1 < ... < L_m, telescope:

    Σ (L_i - fed_{i-1} - 1) = L_m - Σ_{i<m} run_i - m

(fed_i = L_i + run_i: after call i it has read the text and the `run_i` accepted drafts that it fed itself). A call
thus costs -1 token, plus L_i if it is the last, less run_i if it is not: all that must be known besides the position
is, per drafter, whether it is called again. Going backwards that is one bit per drafter.

A peek that is not followed by a draft of the same drafter only ever adds cost as long as catching a token up is no
dearer than a call of its own, which is required here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assc.actions import ActionTable
from assc.core import ROLLBACK, Action
from assc.vector_replay import FlatTrace, Floats, Ints, static_seconds

TIE = 1e-9
"""relative difference below which two speeds are the same"""


@dataclass(frozen=True)
class Optimum:
    """Least seconds [R] of each request, and what to play at each decision point to reach them."""

    seconds: Floats
    plans: tuple[dict[int, Action], ...]
    """per request: committed new tokens -> action"""


def _remembered(flat: FlatTrace) -> list[int]:
    """The drafters whose past calls change what the next one costs."""
    for d, name in enumerate(flat.drafters):
        if flat.feeds[d] and flat.per_catch_up[d] > flat.per_step[d] + flat.per_call[d]:
            raise ValueError(
                f"drafter {name!r} catches a token up for more than one of its steps costs, so idle peeks could pay "
                "and the optimum over drafts alone would not be the optimum"
            )
    return [d for d in range(len(flat.drafters)) if flat.feeds[d] and flat.per_catch_up[d] > 0]


@dataclass
class _Options:
    """The rounds that can be played at position n of each request: arrays [R, A], option 0 is rollback."""

    seconds: Floats
    """without the catch-up"""
    following: Ints
    """position after the round"""
    active: NDArray[np.bool_]
    """the drafter reads"""
    run: Ints


def _options(flat: FlatTrace, rows: Ints, n: int, drafter: Ints, k: Ints) -> _Options:
    size = flat.size
    at = (flat.start[rows] + n)[:, None] + np.maximum(drafter, 0)[None] * size
    planned = np.minimum(k[None], (flat.budget[rows] - n - 1)[:, None])
    asked = planned > 0
    drafted = np.minimum(planned, flat.avail[at])
    accepted = np.minimum(drafted, flat.acc[at])
    d = np.maximum(drafter, 0)
    active = asked & flat.feeds[d][None] & (drafted > 0)
    draft = asked * (flat.per_call[d] + flat.per_step[d] * np.where(active, drafted, 0))
    following = np.minimum(n + accepted + 1, flat.end[rows][:, None])
    length = (flat.prompt[rows] + n)[:, None]
    verify, overhead = flat.verify(drafted, following - n, flat.slots[rows][:, None], length)
    return _Options(
        seconds=draft + verify + overhead,
        following=following,
        active=active,
        run=np.where(flat.keeps_drafts[d], np.maximum(np.minimum(drafted - 1, accepted), 0), 0),
    )


def optimum(flat: FlatTrace, rows: Sequence[int] | None = None) -> Optimum:
    """The exact minimum of Σseconds over every schedule of (drafter, K <= K_max), rollbacks included.

    Raises `ValueError` for a cost model under which idle peeks could pay, and for costs that change within a request.
    """
    if flat.load is not None:
        raise ValueError("the optimum is for one cost model, not for loads that switch within a request")
    remembered = _remembered(flat)
    chosen = np.arange(len(flat.start)) if rows is None else np.array(rows, np.int64)
    k_values = np.arange(1, flat.k_max + 1)
    drafter = np.concatenate([[-1], np.repeat(np.arange(len(flat.drafters)), flat.k_max)])
    k = np.concatenate([[0], np.tile(k_values, len(flat.drafters))])
    bit = np.array([1 << remembered.index(d) if d in remembered else 0 for d in drafter])
    sets, longest = 1 << len(remembered), int(flat.end[chosen].max())
    least = np.full((sets, len(chosen), longest + 1), np.inf)
    """[S, R, n]: least seconds from position n on, if exactly the drafters of S are called there"""
    pick = np.zeros((sets, len(chosen), longest + 1), np.int32)
    least[0, np.arange(len(chosen)), flat.end[chosen]] = 0.0
    for n in range(longest - 1, -1, -1):
        here = np.flatnonzero(flat.end[chosen] > n)
        options = _options(flat, chosen[here], n, drafter, k)
        _improve(flat, chosen[here], here, n, options, bit, np.maximum(drafter, 0), least, pick)
    best = least[:, :, 0].argmin(0)
    plans = tuple(_plan(flat, int(row), i, int(best[i]), pick, drafter, k, len(k), bit) for i, row in enumerate(chosen))
    return Optimum(least[best, np.arange(len(chosen)), 0], plans)


def _improve(
    flat: FlatTrace,
    rows: Ints,
    here: Ints,
    n: int,
    options: _Options,
    bit: Ints,
    d: Ints,
    least: Floats,
    pick: NDArray[np.int32],
) -> None:
    """Fill `least` and `pick` at position n from the positions behind it."""
    length = (flat.prompt[rows] + n)[:, None]
    weight = flat.per_catch_up[d][None] * options.active
    flags = np.where(options.active, bit[None], 0)
    lane = np.arange(len(here))
    for after in range(len(least)):
        again = (after & flags) > 0
        caught = np.where(again, -options.run, length) - 1
        total = options.seconds + weight * caught + least[after, here[:, None], options.following]
        result = after | flags
        for now in np.unique(result):
            masked = np.where(result == now, total, np.inf)
            option = masked.argmin(1)
            value = masked[lane, option]
            better = value < least[now, here, n]
            least[now, here[better], n] = value[better]
            pick[now, here[better], n] = after * total.shape[1] + option[better]


def _plan(
    flat: FlatTrace, row: int, i: int, state: int, pick: NDArray[np.int32], drafter: Ints, k: Ints, a: int, bit: Ints
) -> dict[int, Action]:
    """Follow the picks of one request from its first position."""
    plan: dict[int, Action] = {}
    n = 0
    while n < flat.end[row]:
        state, option = divmod(int(pick[state, i, n]), a)
        d = int(drafter[option])
        plan[n] = ROLLBACK if d < 0 else Action(flat.drafters[d], int(k[option]))
        n = int(_options(flat, np.array([row]), n, drafter[[option]], k[[option]]).following[0, 0])
    return plan


# -- static actions --------------------------------------------------------------------------------------------------


def static_table(flat: FlatTrace, rows: Sequence[int], table: ActionTable) -> Floats:
    """Σseconds [R, A] of every request under every action of the table, played in all its rounds."""
    return np.stack([static_seconds(flat, rows, a.drafter, a.k)[0] for a in table], axis=1)


def tuned_static(flat: FlatTrace, train: Sequence[int], table: ActionTable) -> Action:
    """`static:tuned`: the action with the best Σtokens/Σseconds on the `train` requests (their text is fixed)."""
    return table[int(static_table(flat, train, table).sum(0).argmin())]


@dataclass(frozen=True)
class Ladder:
    """Σseconds [R] of the rungs that need no policy, for the same requests, and their tokens [R]."""

    plain: Floats
    tuned: Floats | None
    """None where there was no other request to tune on"""
    tuned_action: Action | None
    best_static: Floats
    """each request with its own best action"""
    oracle: Floats
    lengths: Ints

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    def at(self, requests: Sequence[int]) -> Ladder:
        """The ladder of some of the requests, which may be listed more than once."""
        at = list(requests)
        return Ladder(
            plain=self.plain[at],
            tuned=None if self.tuned is None else self.tuned[at],
            tuned_action=self.tuned_action,
            best_static=self.best_static[at],
            oracle=self.oracle[at],
            lengths=self.lengths[at],
        )

    def fraction(self, seconds: float) -> float | None:
        """(policy - static) / (oracle - static) in tokens/s; None where the oracle gains nothing."""
        if self.tuned is None or seconds <= 0:
            return None
        policy, static, oracle = (self.tokens / s for s in (seconds, float(self.tuned.sum()), float(self.oracle.sum())))
        return None if oracle <= static * (1 + TIE) else (policy - static) / (oracle - static)

    def to_json(self) -> dict[str, Any]:
        """Seconds, tokens, tokens/s, speed-up and `oracle_fraction` of each rung; null for one that is unknown."""
        plain = float(self.plain.sum())

        def rung(own: Floats) -> dict[str, Any]:
            seconds = float(own.sum())
            speeds = {"tokens_per_second": self.tokens / seconds, "speedup": plain / seconds}
            return {"seconds": seconds, "tokens": self.tokens, **speeds, "oracle_fraction": self.fraction(seconds)}

        return {
            "plain": rung(self.plain),
            "tuned": None if self.tuned is None else {**rung(self.tuned), "action": str(self.tuned_action)},
            "best_static_per_request": rung(self.best_static),
            "oracle": rung(self.oracle),
        }


def ladder(
    flat: FlatTrace, train: Sequence[int], held_out: Sequence[int], table: ActionTable, *, best: Optimum | None = None
) -> Ladder:
    """Rungs on the `held_out` requests; the static action is tuned on `train`, if there are such requests.

    `best` is the optimum of the `held_out` requests where it is known already.
    """
    action = tuned_static(flat, train, table) if len(train) else None
    seconds = static_table(flat, held_out, table)
    return Ladder(
        plain=seconds[:, 0],
        tuned=None if action is None else seconds[:, table.index(action)],
        tuned_action=action,
        best_static=seconds.min(1),
        oracle=(best or optimum(flat, held_out)).seconds,
        lengths=flat.end[list(held_out)],
    )
