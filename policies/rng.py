"""A random stream whose whole state is one integer, so that `state_dict` stays plain JSON."""

from __future__ import annotations

from statistics import NormalDist

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
