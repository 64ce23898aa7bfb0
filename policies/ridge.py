"""Ridge regressions, one per arm, of what a draft gains and of what is drafted, on the same vector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assc.errors import ArtefactError

BLOCK = 32
"""rounds after which discounted sums are discounted, all at once"""


class RidgeArms:
    """For each arm a: (λI + Σ x xᵀ)⁻¹, Σ gain·x and Σ drafted·x, kept by Sherman and Morrison's rank-1 formula.

    The gain of a round is its tokens less the one that plain decoding would have emitted. The reward of an arm, gain −
    price·drafted, is linear in both sums, so its estimate follows from them under the price of now; rewards are never
    stored.

    With `discount` γ < 1 every BLOCK rounds all sums, those of xxᵀ too, are multiplied by γ^BLOCK and the inverses made
    anew, so that what is old counts less and what was not tried lately becomes uncertain again. λI is not discounted.

    >>> arms = RidgeArms(1, ridge=1.0)
    >>> arms.extend(["ngram:2"])
    >>> for _ in range(3):
    ...     arms.add(0, np.ones(1), 1.0, 2.0)
    >>> means, variances = arms.estimate(np.ones(1), price=np.array([0.25]))
    >>> means.tolist(), variances.tolist()  # 3 rounds of reward 0.5 and one of 0 as the prior
    ([0.375], [0.25])
    """

    def __init__(self, size: int, ridge: float, discount: float = 1.0) -> None:
        self.size, self.ridge, self.discount = size, ridge, discount
        self.names: list[str] = []
        self.inverse: NDArray[np.float64] = np.empty((0, size, size))
        self.gains: NDArray[np.float64] = np.empty((0, size))
        self.drafted: NDArray[np.float64] = np.empty((0, size))
        self.solved: NDArray[np.float64] = np.empty((2, 0, size))
        """coefficients of gain and of drafted tokens: the inverse times the sums"""
        self.gram: NDArray[np.float64] = np.empty((0, size, size))
        """Σ xxᵀ; kept only where it is discounted"""
        self.since = 0
        """rounds since sums were discounted"""
        self._look()

    def _look(self) -> None:
        """Views that a decision needs, made once: making one takes as long as using it."""
        self._inverses = self.inverse.reshape(-1, self.size * self.size)
        self._coefficients = self.solved.reshape(-1, self.size)
        self._of_arms = [
            (self.inverse[i], self.gains[i], self.drafted[i], self.solved[0, i], self.solved[1, i])
            for i in range(len(self.names))
        ]
        self._outer = np.empty((self.size, self.size))
        self._squares = self._outer.reshape(-1)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if not k.startswith("_")}  # views are of the original's arrays

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._look()

    def extend(self, names: Sequence[str]) -> None:
        """Know these arms from now on."""
        new = [n for n in names if n not in self.names]
        if new:
            self.names += new
            fresh = np.repeat(np.eye(self.size)[None] / self.ridge, len(new), axis=0)
            self.inverse = np.concatenate([self.inverse, fresh])
            self.gram = np.concatenate([self.gram, 0.0 * fresh])
            self.gains = np.concatenate([self.gains, np.zeros((len(new), self.size))])
            self.drafted = np.concatenate([self.drafted, np.zeros((len(new), self.size))])
            self._solve()

    def add(self, arm: int, x: NDArray[np.float64], gain: float, drafted: float) -> None:
        """Learn one round of the arm at this place of `names`."""
        inverse, gains, drafts, of_gain, of_drafted = self._of_arms[arm]
        v = inverse.dot(x)
        inverse -= np.multiply((v / (1.0 + float(x.dot(v))))[:, None], v, out=self._outer)
        gains += gain * x
        drafts += drafted * x
        inverse.dot(gains, out=of_gain)
        inverse.dot(drafts, out=of_drafted)
        if self.discount < 1.0:
            self.gram[arm] += x[:, None] * x
            self.since += 1
            if self.since >= BLOCK:
                self._forget()

    def _forget(self) -> None:
        kept = self.discount**self.since
        for sums in (self.gram, self.gains, self.drafted):
            sums *= kept
        self.inverse = np.asarray(np.linalg.inv(self.gram + self.ridge * np.eye(self.size)), np.float64)
        self._solve()
        self.since = 0

    def _solve(self) -> None:
        self.solved = np.empty((2, len(self.names), self.size))
        for i, inverse in enumerate(self.inverse):  # one by one, as `add` does it: the same to the last bit
            self.solved[0, i] = inverse.dot(self.gains[i])
            self.solved[1, i] = inverse.dot(self.drafted[i])
        self._look()

    def estimate(
        self, x: NDArray[np.float64], price: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Mean of gain − price·drafted, and xᵀA⁻¹x, of every arm at `x`; `price` is one per arm."""
        both, n = self._coefficients.dot(x), len(self.names)
        gains, drafted = both[:n], both[n:]
        drafted *= price
        gains -= drafted
        np.multiply(x[:, None], x, out=self._outer)
        return gains, self._inverses.dot(self._squares)

    def to_json(self) -> dict[str, Any]:
        arrays = {n: getattr(self, n).tolist() for n in ("inverse", "gains", "drafted")}
        forgetting = {"gram": self.gram.tolist(), "since": self.since} if self.discount < 1.0 else {}
        return {"names": list(self.names), **arrays, **forgetting}

    def from_json(self, state: Mapping[str, Any]) -> None:
        """Take over what `to_json` wrote. Raises `ArtefactError` where it does not fit, and changes nothing then."""
        try:
            names = [str(n) for n in state["names"]]
            shapes = {"inverse": (self.size, self.size), "gains": (self.size,), "drafted": (self.size,)}
            arrays = {
                n: np.array(state[n], dtype=np.float64).reshape(len(names), *shape) for n, shape in shapes.items()
            }
            square, since = shapes["inverse"], int(state.get("since", 0))
            if "gram" in state:
                gram = np.array(state["gram"], dtype=np.float64).reshape(len(names), *square)
            else:  # saved by a learner that did not forget
                gram = np.linalg.inv(arrays["inverse"]) - self.ridge * np.eye(self.size)
            good = 0 <= since < BLOCK and all(np.isfinite(a).all() for a in (*arrays.values(), gram))
        except (KeyError, TypeError, ValueError, np.linalg.LinAlgError):
            good = False
        if not good:
            raise ArtefactError("the saved state of a linear bandit is damaged or was made for other fields")
        self.names = names
        self.gram, self.since = gram, since
        self.inverse, self.gains, self.drafted = arrays["inverse"], arrays["gains"], arrays["drafted"]
        self._solve()
