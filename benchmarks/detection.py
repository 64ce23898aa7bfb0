"""What an evaluation says of a policy against itself, and of planted differences: false alarms and detections.

python benchmarks/detection.py [SEEDS]

The texts are the 144 held-out requests of the packaged trace (48 prompts at three temperatures), played by static:4. A
measurement multiplies the seconds of each request by a noise of its own, log-normal with the given standard deviation.
Two measurements of the same policy are compared as eval.py does (`assc.stats.compare`, prompts as units), with nothing
planted, with the second policy 3 % faster, and with it faster by the effect that eval.py prints as detectable. The
second table is of simulated requests (`interval_coverage.simulate`) whose true ratio is 1: how often p is below a
level.
"""

from __future__ import annotations

import sys

import numpy as np
from interval_coverage import KINDS, Floats, simulate

from assc.registry import make_policy
from assc.replay import ReplayBackend
from assc.run import run_request
from assc.shipped import shipped_costs, shipped_trace
from assc.stats import Paired, compare, speedup

NOISES = (0.02, 0.05, 0.10)
LEVELS = (0.05, 0.01, 0.001)


def played() -> tuple[Floats, Floats, list[str]]:
    """Tokens, modelled seconds and prompt of every held-out request under static:4."""
    trace = shipped_trace()
    backend, policy = ReplayBackend(trace, shipped_costs()), make_policy("static:4")
    requests = trace.requests(trace.where(split="held-out"))
    totals = [run_request(backend, request, policy) for request in requests]
    tokens = [float(len(episode.tokens)) for episode in totals]
    seconds = [sum(r.seconds for r in episode.rounds) for episode in totals]
    return np.array(tokens), np.array(seconds), [request.id for request in requests]


def by_prompt(values: Floats, prompts: list[str]) -> list[float]:
    sums: dict[str, float] = {}
    for prompt, value in zip(prompts, values, strict=True):
        sums[prompt] = sums.get(prompt, 0.0) + float(value)
    return list(sums.values())


def measured(work: tuple[Floats, Floats, list[str]], effect: float, noise: float, seed: int) -> Paired:
    """The policy against itself, one of the two made `effect` times as fast."""
    tokens, seconds, prompts = work
    draw = np.random.default_rng([seed, 7])
    mine, its = (seconds / e * np.exp(draw.normal(0, noise, len(seconds))) for e in (effect, 1.0))
    columns = (by_prompt(c, prompts) for c in (tokens, mine, tokens, its))
    return compare(*columns, rng=np.random.default_rng(seed))


def shares(work: tuple[Floats, Floats, list[str]], effect: float, noise: float, seeds: range) -> tuple[int, float]:
    """How often p < 0.05, and the mean printed detectable effect."""
    found = [measured(work, effect, noise, seed) for seed in seeds]
    sizes = [f.detectable for f in found if f.detectable is not None]
    return sum(f.p_value is not None and f.p_value < 0.05 for f in found), float(np.mean(sizes))


def false_alarm(kind: str, n: int, truth: float, seed: int) -> float:
    """p of a comparison of simulated requests whose true ratio is 1."""
    tokens, seconds, base_tokens, base = simulate(kind, n, np.random.default_rng([seed, n, 1]))
    rng = np.random.default_rng(seed)
    found = compare(tokens, seconds * truth, base_tokens, base, rng=rng, resamples=1000)
    return found.p_value if found.p_value is not None else 1.0


def main(seeds: int) -> None:
    work = played()
    heads = f"{'noise':>6} {'A/A: 1 inside':>14} {'detectable':>11} {'+3 % found':>11} {'+detectable found':>18}"
    print(f"{heads}   ({seeds} seeds)")
    for noise in NOISES:
        alarms, size = shares(work, 1.0, noise, range(seeds))
        three, _ = shares(work, 1.03, noise, range(seeds, 2 * seeds))
        own, _ = shares(work, 1 + size, noise, range(2 * seeds, 3 * seeds))
        print(f"{noise:>6.2f} {seeds - alarms:>14} {100 * size:>9.2f} % {three:>11} {own:>18}", flush=True)
    print(f"\n{'effects':<8} {'prompts':>8} " + " ".join(f"{f'p < {level:g}':>10}" for level in LEVELS))
    for kind in KINDS:
        truth = speedup(*simulate(kind, 2_000_000, np.random.default_rng(9))) or 1.0
        for n in (6, 48):
            values = np.array([false_alarm(kind, n, truth, seed) for seed in range(20 * seeds)])
            rates = (float(np.mean(values < level)) for level in LEVELS)
            print(f"{kind:<8} {n:>8} " + " ".join(f"{rate:>10.4f}" for rate in rates), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
