"""Microseconds per decision (`act` + `update`) of every registered policy, and of a deployed network.

    python benchmarks/decisions.py

Each policy decodes requests of the packaged trace (17 actions, two drafters) and every decision is timed by itself,
so it meets real observations, arms that have all been tried, and its own learning. The first `warm` rounds are not
counted. Told are the median of act + update (what a round pays) and the mean (with the rounds that learn in blocks;
another process on the core adds to it), the time of the clock itself taken off. Limits of the project, of the median:
rules 5 µs, bandits 15 µs, linear contextual ones 30 µs, accept_model 150 µs, deployed networks 50 µs.
"""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, pairwise
from pathlib import Path
from time import perf_counter_ns as clock

import numpy as np
import tyro

from assc.actions import ActionTable
from assc.core import Policy
from assc.observe import Featurizer
from assc.registry import make_policy, policy_factory, policy_names
from assc.replay import ReplayBackend
from assc.shipped import shipped_costs, shipped_trace
from assc.steps import step_decider
from policies.artefact import save_network
from policies.learned import Network, Normaliser

VARIANTS: dict[str, tuple[str, ...]] = {
    "assc": ("assc", "assc:variant=diagram"),
    "bandit": (
        "bandit:ucb",
        "bandit:ucb,discount=0.98",
        "bandit:ucb,window=200",
        "bandit:ts",
        "bandit:ts,discount=0.98",
        "bandit:ts,window=200",
        "bandit:eps",
        "bandit:exp3",
    ),
    "linucb": ("linucb", "linucb:frozen=true"),
    "accept_model": ("accept_model", "accept_model:frozen=true"),
}
"""name -> specs to time, where the policy's example alone would not do"""


@dataclass
class Config:
    """How much to play."""

    rounds: int = 4000
    """rounds that are timed"""
    warm: int = 2000
    """rounds played before"""
    only: tuple[str, ...] = ()
    """specs to time instead of all"""


def specs() -> Iterator[str]:
    """One or more specs of every registered policy."""
    for name in policy_names():
        yield from VARIANTS.get(name, (getattr(policy_factory(name), "example", "") or name,))


def decision_times(policy: Policy, config: Config) -> np.ndarray:
    """Nanoseconds of act + update of each timed round, [rounds], the clock's own time taken off."""
    trace = shipped_trace()
    backend = ReplayBackend(trace, shipped_costs())
    order = np.random.default_rng(0).permutation(trace.where(split="train"))
    empty = np.median([-clock() + clock() for _ in range(2001)])
    spent: list[int] = []
    for request in cycle(trace.requests(order.tolist())):
        backend.reset(request)
        policy.begin(backend.table)
        while not backend.done:
            observation = backend.observe(policy.needs)
            start = clock()
            action = policy.act(observation)
            decided = clock() - start
            record = backend.step(action)
            start = clock()
            policy.update(record)
            spent.append(decided + clock() - start)
        if len(spent) >= config.warm + config.rounds:
            return np.array(spent[config.warm : config.warm + config.rounds]) - 2 * empty


def network(folder: Path) -> Path:
    """A saved 64x64 actor over the default fields, with observation scaling and random weights."""
    featurizer, rng = Featurizer(), np.random.default_rng(0)
    table = ReplayBackend(shipped_trace(), shipped_costs()).table
    sizes = [featurizer.size, 64, 64, len(table)]
    layers = [(rng.normal(0, 0.1, (b, a)).astype(np.float32), np.zeros(b, np.float32)) for a, b in pairwise(sizes)]
    scaling = Normaliser(np.zeros(featurizer.size), np.ones(featurizer.size), 1e-8, 10.0)
    net = Network(layers, "tanh", scaling)
    return save_network(folder / "policy.zip", net, kind="ppo", featurizer=featurizer, table=ActionTable(table.actions))


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    print(f"Python {platform.python_version()}, numpy {np.__version__}, µs of act + update over {config.rounds} rounds")
    print(f"{'policy':26s} {'median':>8s} {'mean':>8s}")
    with tempfile.TemporaryDirectory() as folder:
        saved = str(network(Path(folder)))
        for spec in config.only or (*specs(), saved):
            name = "deployed network 64x64" if spec == saved else spec
            policy = make_policy(spec)
            if step_decider(policy) is not None:
                print(f"{name:26s} decides per drafted token, not timed here")
                continue
            spent = decision_times(policy, config) / 1e3
            print(f"{name:26s} {np.median(spent):8.2f} {spent.mean():8.2f}", flush=True)


if __name__ == "__main__":
    main()
