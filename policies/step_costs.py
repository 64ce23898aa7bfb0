"""The seconds of a round by its parts, learned from finished rounds: what one more drafted token costs.

Non-negative coefficients by discounted least squares, held near a prior until rounds of several shapes were seen:

    draft seconds = call + step · forwards + catch · tokens caught up        (per drafter)
    other seconds = plain + column · tokens verified + tile · [16 or more]

Where nothing was measured, a target step is 1 and a draft forward c of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from assc.core import RoundRecord
from policies.arms import LONGEST

TILE = 16
"""columns of a block (`assc.costs.TILE`)"""
MEMORY = 0.995
RIDGE = 1e-3
"""rounds that the prior counts for"""
Sums = dict[str, list[float]]
"""what was measured -> the upper triangle of Σ x xᵀ (6 numbers), then Σ x·seconds (3)"""
TARGET = "target"
_I, _J = np.triu_indices(3)
PARTS = [[0, 1, 2], [0, 1], [0, 2], [0], [1, 2], [1], [2]]
"""subsets of the coefficients that may be above 0"""
WITH_PLAIN = PARTS[:4]
LEAST = 0.1
"""of the mean seconds of a round outside drafting: a plain step takes that at least"""


def add_round(sums: Sums, record: RoundRecord) -> bool:
    """Count one round; False where its seconds are no usable number."""
    if not 0.0 < record.seconds <= LONGEST or not 0.0 <= record.draft_seconds <= record.seconds:
        return False
    rest = record.seconds - record.draft_seconds - record.policy_seconds
    _add(sums, TARGET, (1.0, float(record.drafted), float(record.drafted >= TILE)), max(rest, 0.0))
    name = record.action.drafter
    if name is not None and (record.drafted or record.discarded):
        _add(sums, name, (1.0, float(record.draft_steps), float(record.catch_up)), record.draft_seconds)
    return True


def _add(sums: Sums, key: str, x: tuple[float, float, float], seconds: float) -> None:
    a, b, c = x
    new = (a * a, a * b, a * c, b * b, b * c, c * c, a * seconds, b * seconds, c * seconds)
    old = sums.get(key)
    sums[key] = list(new) if old is None else [MEMORY * o + n for o, n in zip(old, new, strict=True)]


def rescaled(sums: Sums, key: str | None, factor: float) -> None:
    """Take all seconds measured so far of `key` times `factor`."""
    if key in sums:
        sums[key] = [*sums[key][:6], *(factor * v for v in sums[key][6:])]


def fitted(sums: Sums, key: str, prior: Sequence[float] | None) -> tuple[float, float, float]:
    """The three coefficients, none below 0; without a `prior` it is the mean of all seconds, 1 before there are any.

    Without a `prior` the first coefficient, a plain step, is above 0: others are reckoned in shares of it.

    >>> fitted({}, "model", (0.0, 0.1, 0.0))
    (0.0, 0.1, 0.0)
    """
    own = sums.get(key)
    parts, least = PARTS, 0.0
    if prior is None:
        mean = own[6] / own[0] if own is not None and own[6] > 0.0 else 1.0
        prior, parts, least = (mean, 0.0, 0.0), WITH_PLAIN, LEAST * mean
    if own is None:
        return prior[0], prior[1], prior[2]
    a = np.zeros((3, 3))
    a[_I, _J] = a[_J, _I] = own[:6]
    a += RIDGE * np.eye(3)
    b = np.array(own[6:]) + RIDGE * np.array(prior)
    best, found = 0.0, [0.0, 0.0, 0.0]
    for part in parts:  # the least squares without negative coefficients: of all subsets that have none, the best
        x = np.linalg.solve(a[np.ix_(part, part)], b[part])
        if (x >= 0.0).all() and float(b[part] @ x) > best:
            best, found = float(b[part] @ x), [0.0, 0.0, 0.0]
            for i, value in zip(part, x.tolist(), strict=True):
                found[i] = value
    return max(found[0], least), found[1], found[2]


def check_sums(value: Any) -> bool:
    """Whether a saved value is what `add_round` makes."""
    return isinstance(value, dict) and all(
        isinstance(v, list) and len(v) == 9 and all(isinstance(n, int | float) for n in v) and v[0] > 0.0
        for v in value.values()
    )
