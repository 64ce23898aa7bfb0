"""PPO begins as a rule: what is cloned, when it is not, and that a wrong rule is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny_traces import COSTS, tiny_trace

from assc.actions import ActionTable
from assc.costs_io import CostFile, write_costs
from assc.errors import AsscError
from assc.registry import make_policy
from assc.replay import ReplayBackend
from assc.trace_io import write_trace
from policies.artefact import load_artefact
from policies.learned import LearnedPolicy
from policies.training.config import TrainConfig
from policies.training.imitate import demonstrations, rule_of
from policies.training.job import train

BOTH = ActionTable.build(["model", "ngram"], (1, 2, 4))


def test_only_ppo_per_round_on_a_trace_with_both_drafters_begins_as_a_rule() -> None:
    assert rule_of(TrainConfig(), BOTH) == "cascade:tuned"
    assert rule_of(TrainConfig(), ActionTable.build(["model"], (1, 2))) is None
    assert rule_of(TrainConfig(imitate="none"), BOTH) is None
    assert rule_of(TrainConfig(imitate="static:2"), BOTH) == "static:2"
    for other in (TrainConfig(algo="a2c"), TrainConfig(backend="live"), TrainConfig(granularity="step")):
        assert rule_of(other, BOTH) is None
    for wrong in (TrainConfig(algo="dqn", imitate="cascade"), TrainConfig(imitate="nonesuch")):
        with pytest.raises(AsscError, match=r"--imitate|unknown policy"):
            wrong.check()


def test_the_network_decides_as_the_rule_did(tmp_path: Path) -> None:
    """After cloning and a few rounds of PPO it decides nearly always as the rule does, without cloning it does not."""
    trace = tiny_trace(n=12)
    write_trace(trace, tmp_path / "trace.npz")
    write_costs(CostFile(COSTS), tmp_path / "costs.json")
    rule, agree = "cascade:k_model=2,k_ngram=8,m=2", {}
    for imitate in (rule, "none"):
        run = tmp_path / imitate.replace(":", "-")
        options = {"traces": str(tmp_path / "trace.npz"), "cost": tmp_path / "costs.json", "run_dir": run}
        config = TrainConfig(
            **options,  # type: ignore[arg-type]
            imitate=imitate,
            total_timesteps=64,
            eval_requests=0,
            curve_every=0,
            progress=False,
        )
        assert train(config) == 0
        policy, backend = load_artefact(run / "policy.zip"), ReplayBackend(trace, COSTS)
        assert isinstance(policy, LearnedPolicy)
        rng = np.random.default_rng(0)
        vectors, chosen = demonstrations(
            backend, trace.requests(), make_policy(rule), policy.featurizer, backend.table, rng
        )
        agree[imitate] = float(np.mean([policy.network(v).argmax() == c for v, c in zip(vectors, chosen, strict=True)]))
    assert agree[rule] > 0.9 > agree["none"]
