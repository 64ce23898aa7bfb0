"""Ridge regressions, per drafter and K, of what a draft gains and of what is drafted, on the same vector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assc.errors import ArtefactError

Floats = NDArray[np.float64]
BLOCK = 32
"""rounds after which discounted sums are discounted, all at once"""


class Ridges:
    """Per drafter (λI + Σ x xᵀ)⁻¹, by Sherman and Morrison's formula, and for each of its K Σ gain·x and Σ drafted·x.

    A round teaches all K of its drafter at once, so they share one inverse. The gain of a round is its tokens less the
    one that plain decoding would have emitted. What an arm is worth, gain − price·drafted, is linear in both sums, so
    its estimate follows from them under the price of now; rewards are never stored.

    With `discount` γ < 1 every BLOCK rounds all sums, those of xxᵀ too, are multiplied by γ^BLOCK and the inverses made
    anew, so that what is old counts less and what was not tried lately becomes uncertain again. λI is not discounted.

    >>> ridges = Ridges(1, ridge=1.0)
    >>> ridges.know("ngram", [2, 4])
    >>> for _ in range(3):
    ...     ridges.add("ngram", np.ones(1), np.array([1.0, 2.0, 2.0, 4.0]))
    >>> gains, drafted, variances = ridges.estimate(np.ones(1))  # three rounds, and one of 0 as the prior
    >>> gains.tolist(), drafted.tolist(), variances.tolist()
    ([0.75, 1.5], [1.5, 3.0], [0.25])
    """

    def __init__(self, size: int, ridge: float, discount: float = 1.0) -> None:
        self.size, self.ridge, self.discount = size, ridge, discount
        self.ks: dict[str, list[int]] = {}
        """drafter -> its K, ascending"""
        self.inverse: Floats = np.empty((0, size, size))
        """[drafters, size, size]"""
        self.gram: Floats = np.empty((0, size, size))
        """Σ xxᵀ; kept only where it is discounted"""
        self.sums: Floats = np.empty((0, size))
        """[rows, size]: Σ gain·x of every K of the first drafter, Σ drafted·x of every K, then the next one's"""
        self.since = 0
        """rounds since sums were discounted"""
        self._solve()

    def rows(self, drafter: str) -> slice:
        """The rows of a drafter in `sums`: gains, then drafted tokens, by rising K."""
        names = list(self.ks)
        before = sum(len(self.ks[n]) for n in names[: names.index(drafter)])
        return slice(2 * before, 2 * (before + len(self.ks[drafter])))

    def know(self, drafter: str, ks: Sequence[int]) -> None:
        """Regress for these K, ascending, from now on; a drafter that was known with others starts anew."""
        if self.ks.get(drafter) == list(ks):
            return
        if drafter in self.ks:
            gone, i = self.rows(drafter), list(self.ks).index(drafter)
            self.sums = np.delete(self.sums, gone, axis=0)
            self.inverse, self.gram = np.delete(self.inverse, i, axis=0), np.delete(self.gram, i, axis=0)
            del self.ks[drafter]
        self.ks[drafter] = list(ks)
        fresh = np.eye(self.size)[None] / self.ridge
        self.inverse, self.gram = np.concatenate([self.inverse, fresh]), np.concatenate([self.gram, 0.0 * fresh])
        self.sums = np.concatenate([self.sums, np.zeros((2 * len(ks), self.size))])
        self._solve()

    def add(self, drafter: str, x: Floats, outcomes: Floats) -> None:
        """Learn one round at `x`; `outcomes` are the gains of every K of the drafter, then the drafted tokens."""
        inverse, gram, sums, solved = self._of[drafter]
        v = inverse.dot(x)
        inverse -= np.multiply((v / (1.0 + float(x.dot(v))))[:, None], v, out=self._outer)
        sums += outcomes[:, None] * x
        sums.dot(inverse, out=solved)
        if self.discount < 1.0:
            gram += x[:, None] * x
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

    def forget(self, drafter: str) -> None:
        """Let it know nothing of this drafter."""
        inverse, gram, sums, solved = self._of[drafter]
        inverse[:] = np.eye(self.size) / self.ridge
        for part in (gram, sums, solved):
            part[:] = 0.0

    def _solve(self) -> None:
        """Coefficients, sums times inverse, in the order of `sums`; and the views that a decision needs, made once."""
        self._coefficients = np.empty(self.sums.shape)
        self._of = {
            d: (self.inverse[i], self.gram[i], self.sums[self.rows(d)], self._coefficients[self.rows(d)])
            for i, d in enumerate(self.ks)
        }
        for inverse, _, sums, solved in self._of.values():
            sums.dot(inverse, out=solved)
        sizes = [len(ks) for ks in self.ks.values()]
        starts = np.repeat(2 * np.cumsum([0, *sizes])[:-1], sizes) + np.concatenate([np.arange(n) for n in [0, *sizes]])
        self._gains, self._drafted = starts, starts + np.repeat(sizes, sizes)
        self._inverses = self.inverse.reshape(-1, self.size)
        self._outer = np.empty((self.size, self.size))

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if not k.startswith("_")}  # views are of the original's arrays

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._solve()

    def estimate(self, x: Floats) -> tuple[Floats, Floats, Floats]:
        """Mean gain and drafted tokens of every K of every drafter, and xᵀA⁻¹x of every drafter, at `x`."""
        both = self._coefficients.dot(x)
        return both[self._gains], both[self._drafted], self._inverses.dot(x).reshape(-1, self.size).dot(x)

    def to_json(self) -> dict[str, Any]:
        forgetting = {"gram": self.gram.tolist(), "since": self.since} if self.discount < 1.0 else {}
        ks = {d: list(known) for d, known in self.ks.items()}
        return {"ks": ks, "inverse": self.inverse.tolist(), "sums": self.sums.tolist(), **forgetting}

    def from_json(self, state: Mapping[str, Any]) -> None:
        """Take over what `to_json` wrote. Raises `ArtefactError` where it does not fit, and changes nothing then."""
        try:
            ks = {str(d): [int(k) for k in known] for d, known in state["ks"].items()}
            rows, square = sum(map(len, ks.values())), (len(ks), self.size, self.size)
            inverse = np.array(state["inverse"], np.float64).reshape(square)
            sums = np.array(state["sums"], np.float64).reshape(2 * rows, self.size)
            since = int(state.get("since", 0))
            if "gram" in state:
                gram = np.array(state["gram"], np.float64).reshape(square)
            else:  # saved by a learner that did not forget
                gram = np.linalg.inv(inverse) - self.ridge * np.eye(self.size)
            good = 0 <= since < BLOCK and all(np.isfinite(a).all() for a in (inverse, sums, gram))
        except (KeyError, TypeError, ValueError, AttributeError, np.linalg.LinAlgError):
            good = False
        if not good:
            raise ArtefactError("the saved state of a linear bandit is damaged or was made for other fields")
        self.ks, self.inverse, self.gram, self.sums, self.since = ks, inverse, gram, sums, since
        self._solve()
