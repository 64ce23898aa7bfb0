"""How often the 95 % intervals of a speed-up cover the truth: plain percentile bootstrap against `assc.stats`.

python benchmarks/interval_coverage.py [SEEDS]

Simulated requests: 64, 30 or 10 tokens, each policy's seconds with 3 % noise of their own, and a speed-up that
differs between requests (none, normal or skewed on the log scale). Prints coverage per number of requests.
"""

from __future__ import annotations

import sys

import numpy as np
from numpy.typing import NDArray

from assc.stats import speedup, speedup_interval

KINDS = ("same", "normal", "skewed")
Floats = NDArray[np.float64]


def simulate(kind: str, n: int, rng: np.random.Generator) -> tuple[Floats, Floats, Floats, Floats]:
    tokens = rng.choice([64.0, 64.0, 64.0, 30.0, 10.0], n)
    effects = {"same": np.zeros(n), "normal": rng.normal(0, 0.3, n), "skewed": 0.3 * rng.standard_exponential(n)}
    base = tokens * np.exp(rng.normal(0, 0.03, n))
    return tokens, base / np.exp(effects[kind]) * np.exp(rng.normal(0, 0.03, n)), tokens, base


def percentile(data: tuple[Floats, ...], rng: np.random.Generator) -> tuple[float, float]:
    n = len(data[0])
    weights = rng.multinomial(n, np.full(n, 1 / n), size=1000)
    sums = [weights @ column for column in data]
    low, high = np.quantile(sums[0] / sums[1] / (sums[2] / sums[3]), [0.025, 0.975])
    return float(low), float(high)


def main(seeds: int) -> None:
    print(f"{'effects':<8} {'requests':>8} {'percentile':>10} {'assc.stats':>10}   ({seeds} seeds)")
    for kind in KINDS:
        truth = speedup(*simulate(kind, 2_000_000, np.random.default_rng(9))) or 0.0
        for n in (3, 4, 6, 12, 24, 96):
            hits = np.zeros(2)
            for seed in range(seeds):
                data = simulate(kind, n, np.random.default_rng([seed, n]))
                low, high = percentile(data, np.random.default_rng(seed))
                hits[0] += low <= truth <= high
                ours = speedup_interval(*data, rng=np.random.default_rng(seed), resamples=1000)
                hits[1] += ours[0] is not None and ours[1] is not None and ours[0] <= truth <= ours[1]
            print(f"{kind:<8} {n:>8} {hits[0] / seeds:>10.3f} {hits[1] / seeds:>10.3f}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
