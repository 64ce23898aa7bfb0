"""What `guard` costs a healthy policy, and what it saves where a draft model goes bad (packaged trace, modelled).

    python benchmarks/guard.py

Speed-up over plain decoding on the held-out requests of every policy alone and in `guard`: as recorded; with the model
drafts of every second text spoiled (`assc.drift.scenarios.spoiled`: nothing accepted, at the same cost); and the same
with a draft that takes `factor` times as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import tyro

from assc.costs import CostModel
from assc.drift.scenarios import spoiled
from assc.kinds import is_lookup
from assc.registry import make_policy
from assc.replay import ReplayBackend
from assc.run import run_request
from assc.shipped import shipped_costs, shipped_trace
from assc.trace import Trace


@dataclass
class Config:
    """What is played."""

    policies: tuple[str, ...] = ("static:4", "static:8", "cascade")
    factor: float = 3.0
    """times the seconds of a draft forward, in the last two columns"""
    requests: int = 0
    """held-out requests; 0: all"""


def dearer(costs: CostModel, factor: float) -> CostModel:
    """The same costs with all seconds of the model drafters times `factor`."""
    drafters = {
        d: c if is_lookup(d) else replace(c, per_step=factor * c.per_step, per_catch_up=factor * c.per_catch_up)
        for d, c in costs.drafters.items()
    }
    return replace(costs, drafters=drafters)


def seconds(spec: str, parts: Sequence[tuple[Trace, list[int]]], costs: CostModel) -> float:
    """Σ seconds of one policy, which learns nothing from part to part, over rows of traces taken in turn."""
    policy = make_policy(spec)
    backends = [ReplayBackend(trace, costs) for trace, _ in parts]
    requests = [trace.requests(rows) for trace, rows in parts]
    total = 0.0
    for group in zip(*requests, strict=True):
        total += sum(
            run_request(backend, request, policy).seconds for backend, request in zip(backends, group, strict=True)
        )
    return total


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    trace, costs = shipped_trace(), shipped_costs()
    rows = trace.where(split="held-out")
    rows = rows[: 2 * ((config.requests or len(rows)) // 2)]
    bad = trace
    for drafter in trace.drafters:
        bad = bad if is_lookup(drafter) else spoiled(bad, drafter)
    halves = [(trace, rows[::2]), (bad, rows[1::2])]
    cases = [
        ("healthy", [(trace, rows)], costs),
        ("half broken", halves, costs),
        (f"half broken, {config.factor:g}c", halves, dearer(costs, config.factor)),
    ]
    plain = seconds("ar", [(trace, rows)], costs)
    print(f"{len(rows)} held-out requests, c = {ReplayBackend(trace, costs).cost_ratio:.3f}, modelled time")
    print("| policy | " + " | ".join(f"{name} | with guard" for name, _, _ in cases) + " |")
    print("|---|" + "---:|" * (2 * len(cases)))
    for spec in config.policies:
        found = [plain / seconds(s, parts, c) for _, parts, c in cases for s in (spec, f"guard({spec})")]
        print(f"| `{spec}` | " + " | ".join(f"{value:.3f}x" for value in found) + " |")


if __name__ == "__main__":
    main()
