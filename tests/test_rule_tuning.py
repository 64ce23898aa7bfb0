"""`NAME:tuned` in replay: a rule with the parameters that are best on train requests."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from assc.core import Request, Totals
from assc.costs import CostModel, DrafterCost
from assc.errors import AsscError, SpecError
from assc.eval_config import Config
from assc.eval_live import live_job
from assc.eval_replay import replay_job
from assc.registry import make_policy, policy_names
from assc.replay import ReplayBackend
from assc.rule_tuning import grid_of, is_tuned_rule, tuned_rule
from assc.run import run_request
from assc.shipped import shipped_costs, shipped_trace


def speed(backend: ReplayBackend, requests: Sequence[Request], spec: str) -> float:
    policy, total = make_policy(spec), Totals()
    for request in requests:
        total = total + Totals.of(run_request(backend, request, policy).rounds)
    assert total.tokens_per_second is not None
    return total.tokens_per_second


@pytest.fixture(scope="module")
def backend() -> ReplayBackend:
    return ReplayBackend(shipped_trace(), shipped_costs())


@pytest.fixture(scope="module")
def train(backend: ReplayBackend) -> list[Request]:
    return backend.trace.requests(backend.trace.where(split="train")[::12])


@pytest.mark.parametrize("name", ["cascade", "assc"])
def test_the_tuned_rule_is_the_best_of_its_neighbours(backend: ReplayBackend, train: list[Request], name: str) -> None:
    """No single parameter changed to another value of the grid is faster, and it is never slower than the default."""
    spec = tuned_rule(f"{name}:tuned", backend, train)
    best = speed(backend, train, spec)
    assert best >= speed(backend, train, name)
    chosen = dict(part.split("=") for part in spec.partition(":")[2].split(","))
    for key, values in grid_of(f"{name}:tuned", backend.table.drafters, backend.table.k_max).items():
        for value in values:
            other = ",".join(f"{k}={v}" for k, v in {**chosen, key: value}.items())
            try:
                make_policy(f"{name}:{other}")
            except SpecError:
                continue
            assert speed(backend, train, f"{name}:{other}") <= best * (1 + 1e-12)


def test_a_costly_model_is_left_out_of_the_cascade(backend: ReplayBackend, train: list[Request]) -> None:
    costs = shipped_costs()
    dear = {**costs.drafters, "hidden": DrafterCost(per_step=10 * costs.verify(0, 512), per_call=0.0)}
    other = ReplayBackend(shipped_trace(), CostModel(**{**vars(costs), "drafters": dear}))
    assert "k_model=0" in tuned_rule("cascade:tuned", other, train)


def test_what_can_be_tuned() -> None:
    assert not is_tuned_rule("static:tuned") and not is_tuned_rule("guard(assc):tuned=1")
    with pytest.raises(SpecError, match=r"'ar' has nothing to tune; policies that have: .*cascade"):
        grid_of("ar:tuned")
    with pytest.raises(SpecError, match="unknown policy 'nobody'"):
        grid_of("nobody:tuned")
    tried = [name for name in policy_names() if name not in ("static", "oracle")]
    able = 0
    for name in tried:
        try:
            able += bool(grid_of(f"{name}:tuned", ["ngram"], 16))
        except SpecError:
            continue
    assert able > 5


def test_it_is_tuned_on_train_requests_only() -> None:
    job = replay_job(Config(backend="replay", policies=("ar", "cascade:tuned"), categories=("code",), requests=2))
    assert job.actions["cascade:tuned"].startswith("k_model=") or job.actions["cascade:tuned"].startswith("k_ngram=")
    with pytest.raises(AsscError, match="cascade:tuned is tuned on requests of the split 'train', but --split train"):
        replay_job(Config(backend="replay", policies=("ar", "cascade:tuned"), split="train"))
    with pytest.raises(AsscError, match="is tuned on a recorded trace"):
        live_job(Config(policies=("ar", "cascade:tuned")))
