"""Statistics of paired comparisons: ratios of totals, and their intervals by a bootstrap over requests.

The figure of merit is Σtokens/Σseconds; a speed-up is the ratio of two of them. Rounds of one request depend on each
other, so the unit that is resampled is the request, with everything that was measured on it (both policies, all
repeats).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtri, stdtrit

RESAMPLES = 4000
_CHUNK = 1 << 22
"""largest number of resampling weights held at a time"""

Interval = tuple[float | None, float | None]
NO_INTERVAL: Interval = (None, None)

Floats = NDArray[np.float64]


def ratio_of_totals(numerator: ArrayLike, denominator: ArrayLike) -> float | None:
    """Σnumerator / Σdenominator, None when the denominator adds up to nothing.

    >>> ratio_of_totals([5, 200], [1.0, 10.0])
    18.636363636363637
    """
    below = float(np.sum(np.asarray(denominator, float)))
    return float(np.sum(np.asarray(numerator, float))) / below if below > 0 else None


def mean_of_ratios(numerator: ArrayLike, denominator: ArrayLike) -> float | None:
    """Mean of the per-request ratios, a different quantity; requests with a zero denominator are left out.

    >>> mean_of_ratios([5, 200], [1.0, 10.0])
    12.5
    """
    above, below = np.asarray(numerator, float), np.asarray(denominator, float)
    kept = below > 0
    return float(np.mean(above[kept] / below[kept])) if kept.any() else None


def speedup(tokens: ArrayLike, seconds: ArrayLike, base_tokens: ArrayLike, base_seconds: ArrayLike) -> float | None:
    """(Σtokens/Σseconds) / (Σbase_tokens/Σbase_seconds), None when one of the sums is zero."""
    rate, base = ratio_of_totals(tokens, seconds), ratio_of_totals(base_tokens, base_seconds)
    return rate / base if rate and base else None


def _effective(shares: Floats) -> float:
    """Number of equally large requests that weigh as unevenly as these (Kish 1965), at least 2."""
    return max(2.0, float(shares.sum() ** 2 / np.square(shares).sum()))


def _log_ratios(columns: Floats, rng: np.random.Generator, resamples: int) -> Floats:
    """Logarithm of the speed-up in each resample of the rows of `columns` [n, 4]."""
    n = len(columns)
    parts: list[Floats] = []
    step = max(1, _CHUNK // n)
    for start in range(0, resamples, step):
        weights = rng.multinomial(n, np.full(n, 1 / n), size=min(step, resamples - start))
        sums = weights @ columns
        sums = sums[(sums > 0).all(axis=1)]
        logs = np.log(sums)
        # this order of the differences makes two equal policies cancel exactly
        parts.append((logs[:, 0] - logs[:, 2]) - (logs[:, 1] - logs[:, 3]))
    return np.concatenate(parts)


def speedup_interval(
    tokens: ArrayLike,
    seconds: ArrayLike,
    base_tokens: ArrayLike,
    base_seconds: ArrayLike,
    *,
    rng: np.random.Generator,
    level: float = 0.95,
    resamples: int = RESAMPLES,
) -> Interval:
    """Confidence interval of `speedup` by the paired bootstrap; one entry of each array per request.

    Percentiles of the logarithm, whose distances from the estimate are widened by t/z · √(m/(m−1)), m being the
    effective number of requests. In simulations the plain percentile interval, and BCa of `scipy.stats.bootstrap`
    alike, covered the truth in 82–87 % of comparisons of 6 requests and 87–90 % of 12; this one in 90–98 % for any
    number from 3 to 96 (`benchmarks/interval_coverage.py`).

    Defined for the degenerate cases: (None, None) for no or one request, since one cannot show a spread, and when
    the speed-up itself is undefined; [x, x] when every request has the same ratio. ValueError for unequal lengths.
    """
    columns = np.stack([np.asarray(a, float) for a in (tokens, seconds, base_tokens, base_seconds)], axis=1)
    estimate = speedup(*columns.T)
    if len(columns) < 2 or estimate is None:
        return NO_INTERVAL
    logs = _log_ratios(columns, rng, resamples)
    if not len(logs):
        return NO_INTERVAL
    center, tail = math.log(estimate), (1 - level) / 2
    low, high = np.quantile(logs, [tail, 1 - tail]) - center
    effective = _effective(columns[:, 2])
    widen = float(stdtrit(effective - 1, 1 - tail) / ndtri(1 - tail)) * math.sqrt(effective / (effective - 1))
    # rounding may put the ends of an interval of no width on the wrong side of the estimate
    return estimate * math.exp(min(low, 0.0) * widen), estimate * math.exp(max(high, 0.0) * widen)
