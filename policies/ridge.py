"""Ridge regressions, one per arm, of a round's tokens and of its seconds on the same vector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assc.errors import ArtefactError
from policies.arms import LONGEST


class RidgeArms:
    """For each arm a: (λI + Σ x xᵀ)⁻¹, Σ tokens·x and Σ seconds·x, kept by Sherman and Morrison's rank-1 formula.

    The reward tokens − ρ·seconds is linear in both sums, so its estimate follows from them under the ρ of now, the
    learner's own Σtokens / Σseconds; rewards are never stored.

    >>> arms = RidgeArms(1, ridge=1.0)
    >>> arms.extend(["rollback"])
    >>> for _ in range(3):
    ...     _ = arms.add("rollback", np.ones(1), 1.0, 0.5)
    >>> means, variances = arms.estimate(np.ones(1), rho=1.0)
    >>> means.tolist(), variances.tolist()  # 3 rounds of reward 0.5 and one of 0 as the prior
    ([0.375], [0.25])
    """

    def __init__(self, size: int, ridge: float) -> None:
        self.size, self.ridge = size, ridge
        self.names: list[str] = []
        self._places: dict[str, int] = {}
        self.inverse: NDArray[np.float64] = np.empty((0, size, size))
        self.tokens: NDArray[np.float64] = np.empty((0, size))
        self.seconds: NDArray[np.float64] = np.empty((0, size))
        self.totals = [0.0, 0.0]

    def extend(self, names: Sequence[str]) -> None:
        """Know these arms from now on."""
        new = [n for n in names if n not in self.names]
        if new:
            self.names += new
            self._places = {name: i for i, name in enumerate(self.names)}
            fresh = np.repeat(np.eye(self.size)[None] / self.ridge, len(new), axis=0)
            self.inverse = np.concatenate([self.inverse, fresh])
            self.tokens = np.concatenate([self.tokens, np.zeros((len(new), self.size))])
            self.seconds = np.concatenate([self.seconds, np.zeros((len(new), self.size))])

    def rho(self) -> float:
        tokens, seconds = self.totals
        return tokens / seconds if seconds > 0 else 0.0

    def add(self, name: str, x: NDArray[np.float64], tokens: float, seconds: float) -> bool:
        """Learn one round; False, and nothing is learned, when its seconds are not a usable number."""
        i = self._places.get(name)
        if i is None or not 0.0 <= seconds <= LONGEST:
            return False
        inverse = self.inverse[i]
        v = inverse @ x
        step = v[:, None] * v
        step /= 1.0 + float(x @ v)
        inverse -= step
        self.tokens[i] += tokens * x
        self.seconds[i] += seconds * x
        self.totals = [self.totals[0] + tokens, self.totals[1] + seconds]
        return True

    def estimate(self, x: NDArray[np.float64], rho: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Mean reward, and xᵀA⁻¹x, of every arm at `x`."""
        v = (self.inverse.reshape(-1, self.size) @ x).reshape(-1, self.size)
        means: NDArray[np.float64] = ((self.tokens - rho * self.seconds) * v).sum(axis=1)
        return means, v @ x

    def to_json(self) -> dict[str, Any]:
        arrays = {n: getattr(self, n).tolist() for n in ("inverse", "tokens", "seconds")}
        return {"names": list(self.names), "totals": list(self.totals), **arrays}

    def from_json(self, state: Mapping[str, Any]) -> None:
        """Take over what `to_json` wrote. Raises `ArtefactError` where it does not fit, and changes nothing then."""
        try:
            names, totals = [str(n) for n in state["names"]], [float(v) for v in state["totals"]]
            shapes = {"inverse": (self.size, self.size), "tokens": (self.size,), "seconds": (self.size,)}
            arrays = {
                n: np.array(state[n], dtype=np.float64).reshape(len(names), *shape) for n, shape in shapes.items()
            }
            good = len(totals) == 2 and all(np.isfinite(a).all() for a in (*arrays.values(), np.array(totals)))
        except (KeyError, TypeError, ValueError):
            good = False
        if not good:
            raise ArtefactError("the saved state of a linear bandit is damaged or was made for other fields")
        self.names, self.totals = names, totals
        self._places = {name: i for i, name in enumerate(names)}
        self.inverse, self.tokens, self.seconds = arrays["inverse"], arrays["tokens"], arrays["seconds"]
