"""Microseconds per decision (`act` + `update`) of every policy, and of a deployed network with its featurizer.

    python benchmarks/decisions.py

Median of many repeats on one thread; limits are 10 µs for rules and 100 µs for the network.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from timeit import repeat

import numpy as np
import tyro

from assc.actions import ActionTable
from assc.core import Action, Observation, Policy, RoundRecord
from assc.observe import Featurizer
from assc.registry import make_policy
from policies.artefact import save_network
from policies.learned import Network, Normaliser

TABLE = ActionTable.build(["ngram", "model"])
SPECS = ("ar", "static:4", "random", "assc", "assc:variant=diagram", "threshold", "bandit:ucb", "bandit:ts")


@dataclass
class Config:
    """How much to repeat."""

    rounds: int = 50
    """rounds of the request so far"""
    number: int = 200
    repeats: int = 50


def rounds_so_far(n: int) -> tuple[RoundRecord, ...]:
    """Rounds with every accepted length from 0 to 4."""
    first = RoundRecord(0, 0, Action("ngram", 4), 4, 0, 1, (7,), 0.06, 0.001, 0.058)
    return tuple(replace(first, index=i, position=3 * i, accepted=i % 5, emitted=i % 5 + 1) for i in range(n))


def microseconds(policy: Policy, config: Config) -> float:
    """Median of one `act` and one `update`, in the middle of a request."""
    past = rounds_so_far(config.rounds)
    policy.begin(TABLE)
    for record in past:
        policy.update(record)
    seen = Observation(200, 50, 100, 16, 0.5, past, 0.1, target_entropy=1.0, target_top1=0.5, ngram_match=3)

    def decide() -> None:
        policy.act(seen)
        policy.update(past[-1])

    return median(repeat(decide, number=config.number, repeat=config.repeats)) / config.number * 1e6


def network(folder: Path) -> Path:
    """A saved 64x64 actor over the default fields, with observation scaling and random weights."""
    featurizer, rng = Featurizer(), np.random.default_rng(0)
    sizes = [featurizer.size, 64, 64, len(TABLE)]
    layers = [(rng.normal(0, 0.1, (b, a)).astype(np.float32), np.zeros(b, np.float32)) for a, b in pairwise(sizes)]
    scaling = Normaliser(np.zeros(featurizer.size), np.ones(featurizer.size), 1e-8, 10.0)
    net = Network(layers, "tanh", scaling)
    return save_network(folder / "policy.zip", net, kind="ppo", featurizer=featurizer, table=TABLE)


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    with tempfile.TemporaryDirectory() as folder:
        for spec in (*SPECS, str(network(Path(folder)))):
            name = "deployed network 64x64" if spec.endswith(".zip") else spec
            print(f"{name:26s} {microseconds(make_policy(spec), config):8.2f} µs")


if __name__ == "__main__":
    main()
