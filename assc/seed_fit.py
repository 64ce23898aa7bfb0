"""Can one acceptance process explain the waste rates of the seed table? Exact waste of static K on two regimes.

Each position of the text has a hidden regime, kept with probability `stay` and else drawn anew by the `weights`; given
the regime, the draft agrees independently of other positions. With two regimes this is every two-state Markov chain
that tends to stay where it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.optimize
from numpy.typing import NDArray

from assc.markov import MarkovSource, Regime

Floats = NDArray[np.float64]
optimize: Any = scipy.optimize  # its types leave this function out


@dataclass(frozen=True)
class TwoStates:
    """Agreement `alphas` per regime, `weight` of the first one where a regime is drawn, probability to `stay`."""

    alphas: tuple[float, float]
    weight: float
    stay: float

    @property
    def transition(self) -> Floats:
        """[2, 2], row: regime of a position, column: of the next one."""
        drawn = np.array([self.weight, 1 - self.weight])
        rows: Floats = self.stay * np.eye(2) + (1 - self.stay) * np.stack([drawn, drawn])
        return rows

    def accepted(self, k: int) -> float:
        """Mean accepted tokens per round of static `k`, in the long run.

        A round accepts the leading run of agreements among k positions and commits one token more, so the regime at
        which the next round starts depends on where this one ended. Both are linear in the distribution over regimes
        at the start, whose stationary value is solved for.
        """
        alpha, step = np.array(self.alphas), self.transition
        reached = np.eye(2)  # row: regime at the start; column: regime at draft position j, all before it accepted
        following, accepted = np.zeros((2, 2)), np.zeros(2)
        for _ in range(k):
            following += reached * (1 - alpha) @ step
            accepted += (reached * alpha).sum(1)
            reached = reached * alpha @ step
        following += reached @ step
        start = following[1, 0] / (following[0, 1] + following[1, 0]) if following[0, 1] + following[1, 0] > 0 else 0.5
        return float(np.array([start, 1 - start]) @ accepted)

    def waste(self, k: int) -> float:
        """Waste rate of static `k` where every round drafts all k tokens."""
        return 1 - self.accepted(k) / k

    def source(self) -> MarkovSource:
        """The same as a source that can be played; texts end with their budget, the lookup never proposes."""
        regimes = tuple(Regime(alpha=a, ngram=0.0, hit=0.0, entropy=1.0) for a in self.alphas)
        return MarkovSource(regimes, stay=self.stay, eos=0.0, weights=(self.weight, 1 - self.weight))


def fit(wastes: Mapping[int, float], stay: float | None = None) -> TwoStates:
    """The two-state process whose waste rates are closest (least squares) to those of static K; deterministic.

    `stay` fixes that probability, on which the waste rates depend little.
    """
    kept = (0.0, 0.995) if stay is None else (stay, stay)

    def error(x: Sequence[float]) -> float:
        return sum((_process(x).waste(k) - waste) ** 2 for k, waste in wastes.items())

    bounds = [(0.0, 1.0), (0.0, 1.0), (0.01, 0.99), kept]
    rng = np.random.default_rng(0)
    return _process(optimize.differential_evolution(error, bounds, rng=rng, tol=1e-8, maxiter=60, popsize=8).x)


def _process(x: Sequence[float]) -> TwoStates:
    return TwoStates((float(x[0]), float(x[1])), float(x[2]), float(x[3]))
