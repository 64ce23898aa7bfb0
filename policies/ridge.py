"""Ridge regressions, one per arm, of what a draft gains and of what is drafted, on the same vector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assc.errors import ArtefactError

Places = slice | NDArray[np.int64]
"""places of arms in `names`"""
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
    ...     arms.add(slice(0, 1), np.ones(1), np.array([[1.0], [2.0]]))
    >>> means, variances = arms.estimate(np.ones(1), price=np.array([0.25]))
    >>> means.tolist(), variances.tolist()  # 3 rounds of reward 0.5 and one of 0 as the prior
    ([0.375], [0.25])
    """

    def __init__(self, size: int, ridge: float, discount: float = 1.0) -> None:
        self.size, self.ridge, self.discount = size, ridge, discount
        self.names: list[str] = []
        self.inverse: NDArray[np.float64] = np.empty((0, size, size))
        self.sums: NDArray[np.float64] = np.empty((2, 0, size))
        """Σ gain·x and Σ drafted·x"""
        self._column: NDArray[np.float64] = np.empty((2, 0, size, 1))
        self.gram: NDArray[np.float64] = np.empty((0, size, size))
        """Σ xxᵀ; kept only where it is discounted"""
        self.since = 0
        """rounds since sums were discounted"""

    @property
    def solved(self) -> NDArray[np.float64]:
        """Coefficients of gain and of drafted tokens, the inverse times the sums, [2, arms, size]."""
        return self._column[..., 0]

    def extend(self, names: Sequence[str]) -> None:
        """Know these arms from now on."""
        new = [n for n in names if n not in self.names]
        if new:
            self.names += new
            fresh = np.repeat(np.eye(self.size)[None] / self.ridge, len(new), axis=0)
            self.inverse = np.concatenate([self.inverse, fresh])
            self.gram = np.concatenate([self.gram, 0.0 * fresh])
            self.sums = np.concatenate([self.sums, np.zeros((2, len(new), self.size))], axis=1)
            self._solve()

    def add(self, arms: Places, x: NDArray[np.float64], outcomes: NDArray[np.float64]) -> None:
        """Learn one round at `x` for each of these arms; `outcomes` [2, arms] are their gains and drafted tokens."""
        inverse, sums = self.inverse[arms], self.sums[:, arms]
        v = inverse @ x
        inverse -= (v / (1.0 + v @ x)[:, None])[:, :, None] * v[:, None, :]
        sums += outcomes[:, :, None] * x
        if not isinstance(arms, slice):  # copies, not views
            self.inverse[arms], self.sums[:, arms] = inverse, sums
        self._column[:, arms] = np.matmul(inverse, sums[..., None])
        if self.discount < 1.0:
            self.gram[arms] += x[:, None] * x
            self.since += 1
            if self.since >= BLOCK:
                self._forget()

    def _forget(self) -> None:
        kept = self.discount**self.since
        self.gram *= kept
        self.sums *= kept
        self.inverse = np.asarray(np.linalg.inv(self.gram + self.ridge * np.eye(self.size)), np.float64)
        self._solve()
        self.since = 0

    def forget(self, arms: Places) -> None:
        """Let these arms know nothing."""
        self.inverse[arms] = np.eye(self.size) / self.ridge
        self.gram[arms] = 0.0
        self.sums[:, arms] = 0.0
        self._column[:, arms] = 0.0

    def _solve(self) -> None:
        self._column = np.matmul(self.inverse, self.sums[..., None])

    def estimate(
        self, x: NDArray[np.float64], price: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Mean of gain − price·drafted, and xᵀA⁻¹x, of every arm at `x`; `price` is one per arm."""
        gains, drafted = (self._column.reshape(-1, self.size) @ x).reshape(2, -1)
        drafted *= price
        gains -= drafted
        return gains, self.inverse.reshape(-1, self.size * self.size) @ (x[:, None] * x).ravel()

    def to_json(self) -> dict[str, Any]:
        arrays = {"inverse": self.inverse.tolist(), "gains": self.sums[0].tolist(), "drafted": self.sums[1].tolist()}
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
        self.inverse, self.sums = arrays["inverse"], np.stack([arrays["gains"], arrays["drafted"]])
        self._solve()
