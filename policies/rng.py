"""A random stream whose whole state is one integer, so that `state_dict` stays plain JSON."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_NORMAL = NormalDist()


def seed_state(seed: int) -> int:
    """Start of the stream of `seed`; neighbouring seeds give unrelated streams.

    >>> seed_state(0) != seed_state(1)
    True
    """
    return _mix((seed & _MASK) ^ 0xA55C)


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def uniform(state: int) -> tuple[int, float]:
    """The next state and a number in the open interval (0, 1): SplitMix64 (Steele et al. 2014, OOPSLA).

    >>> state, u = uniform(seed_state(0))
    >>> 0.0 < u < 1.0
    True
    """
    state = (state + _GAMMA) & _MASK
    return state, ((_mix(state) >> 11) + 0.5) / (1 << 53)


def normal(state: int) -> tuple[int, float]:
    """The next state and a standard normal number."""
    state, u = uniform(state)
    return state, _NORMAL.inv_cdf(u)


BLOCK = 128
"""numbers that are made at once"""


def _uniforms(state: int, n: int) -> NDArray[np.float64]:
    """The next `n` numbers of `uniform`, [n]."""
    z = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(_GAMMA) + np.uint64(state)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    numbers: NDArray[np.float64] = ((z >> np.uint64(11)).astype(np.float64) + 0.5) / (1 << 53)
    return numbers


class NormalStream:
    """Many standard normal numbers of one state at once: SplitMix64 and Box–Muller in arrays.

    It keeps a block of numbers ahead; what it returns depends on the state alone, two steps of it per number.

    >>> state, z = NormalStream().take(seed_state(0), 3)
    >>> _, again = NormalStream().take(seed_state(0), 2)
    >>> len(z), bool((z[:2] == again).all())
    (3, True)
    """

    def __init__(self) -> None:
        self._next, self._at = -1, 0
        self._ready: NDArray[np.float64] = np.empty(0)

    def take(self, state: int, n: int) -> tuple[int, NDArray[np.float64]]:
        """The next state and `n` numbers."""
        if state != self._next or self._at + n > len(self._ready):
            self._ready, self._at = self._fill(state, max(n, BLOCK)), 0
        z = self._ready[self._at : self._at + n]
        self._at += n
        self._next = (state + 2 * n * _GAMMA) & _MASK
        return self._next, z

    @staticmethod
    def _fill(state: int, n: int) -> NDArray[np.float64]:
        u = _uniforms(state, 2 * n)
        normals: NDArray[np.float64] = np.sqrt(-2.0 * np.log(u[::2])) * np.cos(2.0 * np.pi * u[1::2])
        return normals


class InverseNormals:
    """The numbers of `normal`, many at once and as plain floats; one step of the state per number.

    >>> state, z = InverseNormals().take(seed_state(0), 3)
    >>> one, first = normal(seed_state(0))
    >>> normal(normal(one)[0])[0] == state, abs(first - z[0]) < 1e-12
    (True, True)
    """

    def __init__(self) -> None:
        self._next, self._at = -1, 0
        self._ready: list[float] = []

    def take(self, state: int, n: int) -> tuple[int, list[float]]:
        """The next state and `n` numbers."""
        if state != self._next or self._at + n > len(self._ready):
            from scipy.special import ndtri  # slow to import, and only Thompson sampling needs it

            self._ready, self._at = ndtri(_uniforms(state, max(n, 8 * BLOCK))).tolist(), 0
        z = self._ready[self._at : self._at + n]
        self._at += n
        self._next = (state + n * _GAMMA) & _MASK
        return self._next, z
