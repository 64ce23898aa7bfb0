"""When does chunked verification pay? A modelled map from a recorded trace, or a live measurement.

    python benchmarks/chunks.py
    python benchmarks/chunks.py --live --dtype float32 --threads 1 --requests 6

The map prices the recorded rounds of static actions with a target whose verified token costs `slope` of its fixed part
(one forward without any token, buffers read included), in 1, 2 and 4 groups. Each line of the first table is one
drafter at one temperature, hence one acceptance; each entry is the best number of groups and what it gains over one
forward at the same K. The second table lets K be the best for each number of groups.

Live, every request is decoded by every contender before the next one, in turns; seconds are the wall clock's, or with
`--clock cpu` this process' own (one thread on a CPU that others use too).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
import tyro

from assc.core import Episode, Request
from assc.costs import CostModel
from assc.live import LiveBackend
from assc.loading import build_engine
from assc.pairs import load_pair
from assc.registry import make_policy
from assc.run import run_request
from assc.shipped import shipped_costs, shipped_trace
from assc.stats import speedup_interval
from assc.timing import CLOCKS
from assc.vector_replay import FlatTrace, static_seconds
from assc.workloads import load_workload, select


@dataclass
class Config:
    """What to model or to time."""

    slopes: tuple[float, ...] = (0.0, 0.01, 0.03, 0.1, 0.3)
    """seconds per verified token / seconds of a forward without tokens"""
    k_values: tuple[int, ...] = (1, 2, 4, 8, 16)
    chunks: tuple[int, ...] = (1, 2, 4)
    live: bool = False
    pair: str = "smollm2"
    dtype: str = "float32"
    threads: int = 1
    requests: int = 6
    max_new_tokens: int = 32
    plays: tuple[str, ...] = ("ngram:16", "hidden:8")
    """drafter:K of the live contenders, each with every number of groups"""
    clock: Literal["wall", "cpu"] = "wall"


def sloped(costs: CostModel, slope: float, kv: float) -> CostModel:
    """The same target with `slope` for its cost per token, and no other dependence on the width of a block."""
    empty = costs.target_fixed + costs.target_per_kv * kv
    return replace(costs, target_per_token=slope * empty, target_per_tile=0.0, target_curve=())


def seconds_of(
    config: Config, costs: CostModel, rows: list[int], drafter: str, slope: float
) -> dict[tuple[int, int], float]:
    """Modelled seconds by (K, groups)."""
    trace = shipped_trace()
    model = sloped(costs, slope, float(np.median(FlatTrace(trace, costs).slots)))
    found = {}
    for chunks in config.chunks:
        flat = FlatTrace(trace, model, chunks=chunks)
        for k in config.k_values:
            found[k, chunks] = float(static_seconds(flat, rows, drafter, k)[0].sum())
    return found


def print_map(config: Config) -> None:
    trace, costs = shipped_trace(), shipped_costs()
    heats = sorted(set(trace.columns["temperature"].tolist()))
    same_k, best_k = [], []
    for drafter in trace.drafters:
        for heat in heats:
            rows = trace.where(split="held-out", temperatures=(heat,))
            flat = FlatTrace(trace, costs)
            rates = {}
            for k in config.k_values:
                _, _, _, drafted, accepted = static_seconds(flat, rows, drafter, k)
                rates[k] = accepted.sum() / max(1, drafted.sum())
            table = {slope: seconds_of(config, costs, rows, drafter, slope) for slope in config.slopes}
            plain = {s: _plain(sloped(costs, s, float(np.median(flat.slots))), rows) for s in config.slopes}
            for k in (k for k in config.k_values if k > 2):
                cells = []
                for slope in config.slopes:
                    one = table[slope][k, 1]
                    best = min(config.chunks, key=lambda m, s=slope: table[s][k, m])
                    cells.append("1" if best == 1 else f"{best}: {one / table[slope][k, best] - 1:+.1%}")
                same_k.append([drafter, f"{heat:g}", str(k), f"{rates[k]:.1%}", *cells])
            cells = []
            for slope in config.slopes:
                by = {m: min((table[slope][k, m], k) for k in config.k_values) for m in config.chunks}
                one, best = by[1], min(config.chunks, key=lambda m: by[m][0])
                cells.append(
                    f"K={one[1]} {plain[slope] / one[0]:.3f}x"
                    + ("" if best == 1 else f", {best} groups K={by[best][1]} {plain[slope] / by[best][0]:.3f}x")
                )
            best_k.append([drafter, f"{heat:g}", *cells])
    slopes = [f"slope {s:g}" for s in config.slopes]
    print("Best number of groups at a fixed K, and what it gains over one forward (modelled):\n")
    _table(["drafter", "temperature", "K", "accepted", *slopes], same_k)
    print("\nSpeed-up over plain decoding of the best K in one forward, and in groups where better (modelled):\n")
    _table(["drafter", "temperature", *slopes], best_k)


def _plain(costs: CostModel, rows: list[int]) -> float:
    return float(static_seconds(FlatTrace(shipped_trace(), costs), rows, None, 0)[0].sum())


def _table(head: list[str], rows: list[list[str]]) -> None:
    for line in (head, ["---"] * len(head), *rows):
        print("| " + " | ".join(line) + " |")


def measure(config: Config) -> None:
    pair = load_pair(config.pair, dtype=config.dtype, threads=config.threads)
    engine = build_engine(pair)
    backend = LiveBackend(engine, clock=CLOCKS[config.clock])
    contenders = [("ar", 1)]
    for play in config.plays:
        drafter, _, k = play.partition(":")
        contenders += [(f"static:drafter={drafter},k={k}", m) for m in config.chunks]
    prompts = select(load_workload("mixed", split="held-out"), config.requests, seed=0)
    played: dict[tuple[str, int], list[Episode]] = {c: [] for c in contenders}
    policies = {spec: make_policy(spec) for spec, _ in contenders}
    run_request(backend, Request(pair.encode(prompts[0].prompt), 8), policies[contenders[-1][0]])  # a warm-up
    for number, prompt in enumerate(prompts):
        request = Request(pair.encode(prompt.prompt), config.max_new_tokens, id=prompt.id)
        for i in np.random.default_rng(number).permutation(len(contenders)):
            spec, engine.chunks = contenders[i]
            played[contenders[i]].append(run_request(backend, request, policies[spec]))
    texts = [[e.tokens for e in episodes] for episodes in played.values()]
    where = f"{pair.name}, {pair.device}, {pair.dtype}, {torch.get_num_threads()} threads, greedy"
    same = all(t == texts[0] for t in texts)
    size = f"{config.requests} requests of {config.max_new_tokens} tokens"
    print(f"{where}, {size}, {config.clock} clock, same text: {same}")
    widths = _seconds_by_width(played)
    print("target forward by width, median ms: " + ", ".join(f"{w}: {1e3 * s:.1f}" for w, s in widths.items()))
    rows = []
    for (spec, m), episodes in played.items():
        one = played[spec, 1]
        tokens, mine = [float(len(e.tokens)) for e in episodes], [e.seconds for e in episodes]
        plain = [e.seconds for e in played["ar", 1]]
        rounds = [r for e in episodes for r in e.rounds]
        drafted = sum(r.drafted + r.discarded for r in rounds)
        low, high = speedup_interval(tokens, mine, tokens, [e.seconds for e in one], rng=np.random.default_rng(0))
        gain = sum(e.seconds for e in one) / sum(mine)
        interval = "" if m == 1 or low is None else f" ({low:.2f} to {high:.2f})"
        accepted = f"{sum(r.accepted for r in rounds) / drafted:.1%}" if drafted else "n/a"
        forwards = sum(r.forwards for r in rounds) / len(rounds)
        rows.append(
            [spec, str(m), f"{sum(plain) / sum(mine):.2f}x", f"{gain:.2f}x{interval}", accepted, f"{forwards:.2f}"]
        )
    _table(["policy", "groups", "speed-up", "against one forward", "accepted of proposed", "forwards/round"], rows)


def _seconds_by_width(played: dict[tuple[str, int], list[Episode]]) -> dict[int, float]:
    """Median verification seconds of rounds with one forward, by its columns, where there are five or more."""
    found: dict[int, list[float]] = {}
    for episodes in played.values():
        for record in (r for e in episodes for r in e.rounds if r.forwards == 1):
            width = record.groups[0] if record.groups else record.drafted + 1
            found.setdefault(width, []).append(record.verify_seconds)
    return {width: float(np.median(found[width])) for width in sorted(found) if len(found[width]) >= 5}


if __name__ == "__main__":
    settings = tyro.cli(Config, description=__doc__)
    measure(settings) if settings.live else print_map(settings)
