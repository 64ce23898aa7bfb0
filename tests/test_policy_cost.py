"""What a decision costs: the best of many repeats, which a busy machine disturbs least."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from timeit import repeat

import numpy as np
import pytest
from fakes import FakeBackend, fake_requests

from assc.actions import DEFAULT_K_VALUES, ActionTable
from assc.core import Observation, Policy, RoundRecord
from assc.observe import Featurizer
from assc.registry import make_policy
from assc.run import run_request
from policies.artefact import save_network
from policies.learned import Network, Normaliser

TABLE = ActionTable.build(["ngram", "model"], DEFAULT_K_VALUES)


def rounds_so_far(n: int) -> tuple[RoundRecord, ...]:
    engine = FakeBackend(drafters=TABLE.drafters, alpha=0.2)
    return run_request(engine, fake_requests(1, max_new_tokens=4 * n)[0], make_policy("static:4")).rounds[:n]


def microseconds(policy: Policy, past: tuple[RoundRecord, ...]) -> float:
    """Of one `act` and one `update`, in the middle of a request."""
    policy.begin(TABLE)
    for record in past:
        policy.update(record)
    seen = Observation(200, 50, 100, 16, 0.5, past, 0.1, target_entropy=1.0, target_top1=0.5, ngram_match=3)

    def decide() -> None:
        policy.act(seen)
        policy.update(past[-1])

    return min(repeat(decide, number=100, repeat=30)) / 100 * 1e6


@pytest.mark.parametrize("spec", ["ar", "static:4", "random", "assc", "assc:variant=diagram", "threshold"])
def test_rules_decide_within_10_microseconds(spec: str) -> None:
    assert microseconds(make_policy(spec), rounds_so_far(50)) < 10


@pytest.mark.parametrize("spec", ["bandit:ucb", "bandit:ts", "bandit:ucb,discount=0.98", "bandit:ts,window=200"])
def test_learners_decide_within_100_microseconds(spec: str) -> None:
    policy = make_policy(spec)
    for request in fake_requests(20):
        run_request(FakeBackend(drafters=TABLE.drafters, k_values=DEFAULT_K_VALUES), request, policy)
    assert microseconds(policy, rounds_so_far(50)) < 100


@pytest.mark.parametrize("length", [5, 1000])
def test_a_deployed_network_decides_within_100_microseconds(length: int, tmp_path: Path) -> None:
    """Default fields, two hidden layers of 64, with observation scaling; the length of the request does not matter."""
    featurizer, rng = Featurizer(), np.random.default_rng(0)
    sizes = [featurizer.size, 64, 64, len(TABLE)]
    layers = [(rng.normal(0, 0.1, (b, a)).astype(np.float32), np.zeros(b, np.float32)) for a, b in pairwise(sizes)]
    scaling = Normaliser(np.zeros(featurizer.size), np.ones(featurizer.size), 1e-8, 10.0)
    network = Network(layers, "tanh", scaling)
    path = save_network(tmp_path / "p.zip", network, kind="ppo", featurizer=featurizer, table=TABLE)
    assert microseconds(make_policy(str(path)), rounds_so_far(length)) < 100
