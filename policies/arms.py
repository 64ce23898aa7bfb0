"""Running sums per arm, enough to recompute the mean reward of each arm under any price of time ρ."""

from __future__ import annotations

import math
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

    >>> arms = ArmSums()
    >>> arms.add("rollback", 1, 0.02), arms.add("ngram:4", 3, 0.03)
    (True, True)
    >>> round(arms.rho(), 6), [round(arms.mean(a, arms.rho()), 6) for a in ("rollback", "ngram:4")]
    (80.0, [-0.6, 0.6])
    """

    def __init__(self, discount: float = 1.0, window: int = 0) -> None:
        self.discount, self.window = discount, window
        self.sums: dict[str, list[float]] = {}
        self.recent: list[tuple[str, int, float]] = []
        self.weights: dict[str, float] = {}
        """logarithms of the weights of EXP3; empty for the others"""

    def add(self, arm: str, tokens: int, seconds: float) -> bool:
        """Count one round; False, and nothing is counted, when its seconds are not a usable number."""
        if not 0.0 <= seconds <= LONGEST:
            return False
        if self.discount < 1.0:
            for name, row in list(self.sums.items()):
                row[:] = [self.discount * v for v in row]
                if row[0] < FORGOTTEN:
                    del self.sums[name]
        self._accumulate(arm, tokens, seconds, 1.0)
        if self.window:
            self.recent.append((arm, tokens, seconds))
            if len(self.recent) > self.window:
                old, old_tokens, old_seconds = self.recent.pop(0)
                self._accumulate(old, old_tokens, old_seconds, -1.0)
                if self.sums[old][0] < 0.5:
                    del self.sums[old]
        return True

    def _accumulate(self, arm: str, tokens: int, seconds: float, sign: float) -> None:
        row = self.sums.setdefault(arm, [0.0] * SUMS)
        added = (1.0, tokens, seconds, tokens * tokens, tokens * seconds, seconds * seconds)
        row[:] = [max(0.0, v + sign * a) for v, a in zip(row, added, strict=True)]

    def count(self, arm: str) -> float:
        row = self.sums.get(arm)
        return row[0] if row else 0.0

    @property
    def total(self) -> float:
        return sum(row[0] for row in self.sums.values())

    def rho(self) -> float:
        """Tokens per second of everything counted; 0 while no time has passed (then rewards are plain tokens)."""
        seconds = sum(row[2] for row in self.sums.values())
        return sum(row[1] for row in self.sums.values()) / seconds if seconds > 0 else 0.0

    def mean(self, arm: str, rho: float) -> float:
        n, tokens, seconds = self.sums[arm][:3]
        return (tokens - rho * seconds) / n

    def spread(self, rho: float) -> float:
        """σ, in tokens: the variance of a reward within an arm of K is taken to be σ²·(K + 1), pooled over the arms.

        A round can emit K + 1 tokens, so the rewards of a large K scatter more. With one variance for all arms, many
        pulls of a small K would talk the learner out of trying a large one again after a single unlucky round.
        """
        squares, freedom = PRIOR_VARIANCE, 1.0
        for arm, (n, t, s, tt, ts, ss) in self.sums.items():
            total = t - rho * s
            squares += max(0.0, tt - 2 * rho * ts + rho * rho * ss - total * total / n) / (k_of(arm) + 1)
            freedom += max(0.0, n - 1.0)
        return math.sqrt(squares / freedom)

    def to_json(self) -> dict[str, Any]:
        weights = {"weights": dict(self.weights)} if self.weights else {}
        return {"sums": {k: list(v) for k, v in self.sums.items()}, "recent": [list(r) for r in self.recent], **weights}

    def from_json(self, state: Mapping[str, Any]) -> None:
        """Take over saved sums. Raises `ArtefactError` when they are not what `to_json` writes."""
        try:
            sums = {str(k): [float(v) for v in row] for k, row in state["sums"].items()}
            recent = [(str(a), int(t), float(s)) for a, t, s in state["recent"]]
            weights = {str(k): float(v) for k, v in state.get("weights", {}).items()}
            numbers = [v for row in sums.values() for v in row] + [s for _, _, s in recent]
            good = all(len(row) == SUMS and row[0] > 0 for row in sums.values())
            good = good and all(0.0 <= v < math.inf for v in numbers) and all(k_of(arm) >= 0 for arm in sums)
            good = good and all(arm in sums for arm, _, _ in recent) and all(map(math.isfinite, weights.values()))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            good = False
        if not good:
            raise ArtefactError("the saved state of a bandit is damaged: its sums per arm are not finite numbers")
        if self.window and sums and not recent:
            raise ArtefactError("the saved state of a bandit without a window cannot be continued with a window")
        self.sums, self.recent, self.weights = sums, recent if self.window else [], weights
        if self.window and (len(recent) > self.window or self.total != len(recent)):
            self.sums, self.recent = {}, recent[-self.window :]  # saved under another window: count its end again
            for arm, tokens, seconds in self.recent:
                self._accumulate(arm, tokens, seconds, 1.0)
