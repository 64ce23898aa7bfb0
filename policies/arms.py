"""Running sums per arm, enough to recompute the mean reward of each arm under any price of time ρ."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from assc.core import ROLLBACK
from assc.errors import ArtefactError

SUMS = 6
PRIOR_VARIANCE = 0.25
"""tokens² per possible token, one pseudo-observation of the spread: decides only the first few rounds"""

LONGEST = 1e6
"""seconds; a round that claims more is a fault of the clock"""

FORGOTTEN = 1e-6
"""discounted count below which an arm counts as never tried"""

HEAVIEST = 1e9
"""weight of a round at which discounted columns are scaled back"""


@lru_cache(maxsize=4096)
def k_of(arm: str) -> int:
    """K of an arm named like its action (`str(Action)`).

    >>> k_of("rollback"), k_of("ngram:4")
    (0, 4)
    """
    return 0 if arm == str(ROLLBACK) else int(arm.rpartition(":")[2])


class ArmSums:
    """Per arm: Σ1, Σtokens, Σseconds, Σtokens², Σtokens·seconds, Σseconds² (discounted or windowed if asked).

    The reward of a round is tokens − ρ·seconds with ρ = Σtokens / Σseconds over all arms, the learner's own
    throughput. Since ρ moves, rewards are never stored: means and variances follow from the sums under the ρ of now.
    The unit of a reward is a token of a round that runs at the learner's own pace; a plain step emits exactly one.

    The sums are kept as columns, one entry per arm. Discounting all of them in every round would cost most of a
    decision, so the round of now gets a growing `weight` instead: divided by it the columns are the discounted sums.

    >>> arms = ArmSums()
    >>> arms.add("rollback", 1, 0.02), arms.add("ngram:4", 3, 0.03)
    (True, True)
    >>> round(arms.rho(), 6), [round(arms.mean(a, arms.rho()), 6) for a in ("rollback", "ngram:4")]
    (80.0, [-0.6, 0.6])
    """

    def __init__(self, discount: float = 1.0, window: int = 0) -> None:
        self.discount, self.window = discount, window
        self.names: list[str] = []
        self._slots: dict[str, int] = {}
        self.columns: tuple[list[float], ...] = tuple([] for _ in range(SUMS))
        self.n, self.tokens, self.seconds = self.columns[:3]
        self._span: list[float] = []
        """K + 1 of each arm"""
        self._within: tuple[list[float], list[float], list[float]] = ([], [], [])
        """per arm the parts of its squared deviations that are constant, linear and quadratic in ρ, over K + 1"""
        self.weight = 1.0
        self.recent: deque[tuple[str, int, float]] = deque()
        self.weights: dict[str, float] = {}
        """logarithms of the weights of EXP3; empty for the others"""

    def slot(self, arm: str) -> int:
        """Place of an arm in the columns, made if it has none; `n` is 0 where nothing is known."""
        found = self._slots.get(arm)
        if found is None:
            found = self._slots[arm] = len(self.names)
            self.names.append(arm)
            self._span.append(k_of(arm) + 1.0)
            for column in (*self.columns, *self._within):
                column.append(0.0)
        return found

    @property
    def floor(self) -> float:
        """An `n` up to this counts as never tried."""
        return FORGOTTEN * self.weight if self.discount < 1.0 else 0.0

    @property
    def sums(self) -> dict[str, list[float]]:
        """The sums of every arm that has been tried and is not forgotten."""
        floor, weight = self.floor, self.weight
        rows = zip(self.names, *self.columns, strict=True)
        return {name: [v / weight for v in row] for name, *row in rows if row[0] > floor}

    def add(self, arm: str, tokens: int, seconds: float) -> bool:
        """Count one round; False, and nothing is counted, when its seconds are not a usable number."""
        if not 0.0 <= seconds <= LONGEST:
            return False
        i = self.slot(arm)
        if self.discount < 1.0:
            self.weight /= self.discount
            if self.weight > HEAVIEST:
                self._scale_back()
            if self.n[i] <= self.floor:
                self._clear(i)
        self._accumulate(i, tokens, seconds, self.weight)
        if self.window:
            self.recent.append((arm, tokens, seconds))
            if len(self.recent) > self.window:
                old, old_tokens, old_seconds = self.recent.popleft()
                i = self._slots[old]
                self._accumulate(i, old_tokens, old_seconds, -1.0)
                if self.n[i] < 0.5:
                    self._clear(i)
        return True

    def _accumulate(self, i: int, tokens: int, seconds: float, amount: float) -> None:
        counts, all_tokens, all_seconds, tt, ts, ss = self.columns
        each = amount * tokens
        counts[i] += amount
        all_tokens[i] += each
        all_seconds[i] += amount * seconds
        tt[i] += each * tokens
        ts[i] += each * seconds
        ss[i] += amount * seconds * seconds
        if amount < 0.0:  # what is left of a difference may be below zero by rounding
            for column in self.columns:
                column[i] = max(0.0, column[i])
        n, t, s, span = counts[i], all_tokens[i], all_seconds[i], self._span[i]
        if n > 0.0:
            constant, linear, quadratic = self._within
            constant[i] = (tt[i] - t * t / n) / span
            linear[i] = (ts[i] - t * s / n) / span
            quadratic[i] = (ss[i] - s * s / n) / span

    def _clear(self, i: int) -> None:
        for column in (*self.columns, *self._within):
            column[i] = 0.0

    def _scale_back(self) -> None:
        for column in (*self.columns, *self._within):
            column[:] = [v / self.weight for v in column]
        self.weight = 1.0

    def count(self, arm: str) -> float:
        i = self._slots.get(arm)
        return 0.0 if i is None or self.n[i] <= self.floor else self.n[i] / self.weight

    @property
    def total(self) -> float:
        return sum(self.n) / self.weight

    def rho(self) -> float:
        """Tokens per second of everything counted; 0 while no time has passed (then rewards are plain tokens)."""
        seconds = sum(self.seconds)
        return sum(self.tokens) / seconds if seconds > 0 else 0.0

    def mean(self, arm: str, rho: float) -> float:
        i = self._slots[arm]
        return (self.tokens[i] - rho * self.seconds[i]) / self.n[i]

    def spread(self, rho: float) -> float:
        """σ, in tokens: the variance of a reward within an arm of K is taken to be σ²·(K + 1), pooled over the arms.

        A round can emit K + 1 tokens, so the rewards of a large K scatter more. With one variance for all arms, many
        pulls of a small K would talk the learner out of trying a large one again after a single unlucky round.
        """
        weight = self.weight
        constant, linear, quadratic = self._within
        squares = (sum(constant) - 2.0 * rho * sum(linear) + rho * rho * sum(quadratic)) / weight
        freedom = 1.0 + sum([n - weight for n in self.n if n > weight]) / weight
        return math.sqrt((PRIOR_VARIANCE + max(0.0, squares)) / freedom)

    def to_json(self) -> dict[str, Any]:
        """All that the next decision depends on. `order` and `weight` keep sums the same to the last bit."""
        rows = zip(self.names, *self.columns, strict=True)
        floor = self.floor
        state: dict[str, Any] = {"sums": {name: row for name, *row in rows if row[0] > floor}}
        state |= {"recent": [list(r) for r in self.recent], "order": list(self.names), "weight": self.weight}
        return state | ({"weights": dict(self.weights)} if self.weights else {})

    def from_json(self, state: Mapping[str, Any]) -> None:
        """Take over saved sums. Raises `ArtefactError` when they are not what `to_json` writes."""
        try:
            sums = {str(k): [float(v) for v in row] for k, row in state["sums"].items()}
            recent = [(str(a), int(t), float(s)) for a, t, s in state["recent"]]
            weights = {str(k): float(v) for k, v in state.get("weights", {}).items()}
            order, weight = [str(name) for name in state.get("order", sums)], float(state.get("weight", 1.0))
            numbers = [v for row in sums.values() for v in row] + [s for _, _, s in recent]
            good = all(len(row) == SUMS and row[0] > 0 for row in sums.values()) and 1.0 <= weight < math.inf
            good = good and all(0.0 <= v < math.inf for v in numbers) and all(k_of(arm) >= 0 for arm in (*sums, *order))
            good = good and all(arm in sums for arm, _, _ in recent) and all(map(math.isfinite, weights.values()))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            good = False
        if not good:
            raise ArtefactError("the saved state of a bandit is damaged: its sums per arm are not finite numbers")
        if self.window and sums and not recent:
            raise ArtefactError("the saved state of a bandit without a window cannot be continued with a window")
        if self.discount == 1.0 and weight != 1.0:
            sums, weight = {arm: [v / weight for v in row] for arm, row in sums.items()}, 1.0
        counted = sum(row[0] for row in sums.values())
        if self.window and (len(recent) > self.window or counted != len(recent)):
            self._fill({}, order, 1.0)  # saved under another window: count its end again
            self.recent = deque(recent[-self.window :])
            for arm, tokens, seconds in self.recent:
                self._accumulate(self.slot(arm), tokens, seconds, 1.0)
        else:
            self._fill(sums, order, weight)
            self.recent = deque(recent if self.window else [])
        self.weights = weights

    def _fill(self, sums: Mapping[str, list[float]], order: list[str], weight: float) -> None:
        self.names, self._slots, self._span, self.weight = [], {}, [], weight
        for column in (*self.columns, *self._within):
            column.clear()
        for arm in dict.fromkeys((*order, *sums)):
            i = self.slot(arm)
            for column, value in zip(self.columns, sums.get(arm, [0.0] * SUMS), strict=True):
                column[i] = value
            self._accumulate(i, 0, 0.0, 0.0)
