"""Training on decisions per draft token: it learns, resumes to the bit, its artefact decides as the environment did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import FakeBackend, fake_requests
from tiny_traces import COSTS, tiny_engine, tiny_trace

import eval as eval_script
from assc.core import Totals
from assc.costs_io import CostFile, write_costs
from assc.errors import ArtefactError, RequestError
from assc.live import LiveBackend
from assc.registry import make_policy
from assc.replay import ReplayBackend
from assc.run import run_request
from assc.step_features import Opening
from assc.trace_io import write_trace
from envs import DraftStepEnv
from policies.artefact import read_artefact, save_network
from policies.learned_steps import LearnedStepPolicy
from policies.training import sb3 as train_sb3
from policies.training.config import TrainConfig
from policies.training.job import train
from policies.training.setup import Problem


@pytest.fixture(autouse=True)
def small_rollouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_sb3, "LANES_ROLLOUT", {"ppo": 64, "a2c": 64, "dqn": 32})
    torch.set_num_threads(1)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    trace, costs = tmp_path / "trace.npz", tmp_path / "costs.json"
    write_trace(tiny_trace(), trace)
    write_costs(CostFile(COSTS), costs)
    return trace, costs


def config(files: tuple[Path, Path], run_dir: Path | None, **options: Any) -> TrainConfig:
    fixed = {"eval_requests": 0, "progress": False, "live_requests": 0, "total_timesteps": 192, "checkpoint_every": 64}
    named = {"traces": str(files[0]), "cost": files[1], "run_dir": run_dir, "granularity": "step", **fixed}
    return TrainConfig(**{**named, **options})


def weights(run_dir: Path) -> list[Any]:
    policy: Any = make_policy(str(run_dir / "policy.zip"))
    return [array.tolist() for layer in policy.network.layers for array in layer]


def test_the_artefact_decides_as_the_environment_and_live_as_in_replay(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert train(config(files, run, copy_from=2)) == 0
    policy, trace = make_policy(str(run / "policy.zip")), tiny_trace()
    assert isinstance(policy, LearnedStepPolicy) and policy.opening == Opening("model", 16, "ngram", 2, 10)
    env = DraftStepEnv(ReplayBackend(trace, COSTS), trace.requests(), m=2)
    live = LiveBackend(tiny_engine(), mode="gumbel", cost_model=COSTS, time_source="modelled")
    played = []
    for asked in trace.requests()[:4]:
        vector, _ = env.reset(options={"request": asked})
        records, done = [], False
        while not done:
            vector, _, terminated, truncated, info = env.step(policy.choose(policy.network(vector)))
            done = terminated or truncated
            records += [info["record"]] if "record" in info else []
        replayed = run_request(ReplayBackend(trace, COSTS), asked, policy).rounds
        assert [(r.action, r.drafted, r.discarded, r.tokens) for r in records] == [
            (r.action, r.drafted, r.discarded, r.tokens) for r in replayed
        ]
        counts = [(r.action, r.drafted, r.discarded, r.tokens) for r in run_request(live, asked, policy).rounds]
        assert counts == [(r.action, r.drafted, r.discarded, r.tokens) for r in replayed]
        played += replayed
    assert any(r.drafted for r in played)
    out = tmp_path / "out.json"
    words = f"--backend replay --traces {files[0]} --cost {files[1]} --json {out} --allow-leakage"
    words += " --policies ar static:4 hf_confidence"
    assert eval_script.main([*words.split(), str(run / "policy.zip"), "oracle"]) == 0
    result = json.loads(out.read_text())
    assert [row["policy"] for row in result["rows"]][2:4] == ["hf_confidence", str(run / "policy.zip")]
    assert result["same_text"] and max(row["speedup"] for row in result["rows"]) == result["rows"][-1]["speedup"]


def test_a_resumed_run_equals_one_that_never_stopped(files: tuple[Path, Path], tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert train(config(files, whole, seed=3)) == 0
    assert train(config(files, cut, seed=3, total_timesteps=64)) == 0
    assert train(config(files, None, seed=3, resume=cut)) == 0
    assert weights(cut) == weights(whole)


@pytest.mark.timeout(300)
def test_ppo_learns_to_stop_where_the_draft_is_unsure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake draft's confidence tells whether a token will be accepted: no static K can use that, decisions can."""
    backend = FakeBackend(drafters=("model",), k_values=range(1, 9), alpha=0.6, c=0.4)
    requests = fake_requests(24, max_new_tokens=48)
    problem = Problem(backend, backend, requests[:16], requests[16:], description={"pair": "fake"})
    monkeypatch.setattr(train_sb3, "ROLLOUT", 512)
    asked = {"backend": "live", "traces": None, "cost": None, "total_timesteps": 4096, "checkpoint_every": 4096}
    assert train(config((Path(), Path()), tmp_path / "run", **asked), problem) == 0

    def speed(spec: str) -> float:
        rounds = [r for q in requests[16:] for r in run_request(backend, q, make_policy(spec)).rounds]
        return Totals.of(rounds).tokens_per_second or 0.0

    best = max(speed(f"static:{k}") for k in range(9))
    assert speed(str(tmp_path / "run" / "policy.zip")) > 1.05 * best


def test_an_artefact_that_does_not_fit_is_one_sentence(tmp_path: Path) -> None:
    from policies.learned import Network

    opening = Opening("model", 8)
    featurizer = DraftStepEnv(FakeBackend(drafters=("model",)), fake_requests(1)).featurizer
    wide = Network([(np.zeros((3, 30), np.float32), np.zeros(3, np.float32))], "tanh")
    path = save_network(
        tmp_path / "a.zip", wide, kind="ppo", featurizer=featurizer, table=opening.table, opening=opening
    )
    assert read_artefact(path).opening == opening
    with pytest.raises(ArtefactError, match="layer 0"):
        narrow = Network([(np.zeros((3, 22), np.float32), np.zeros(3, np.float32))], "tanh")
        save_network(path, narrow, kind="ppo", featurizer=featurizer, table=opening.table, opening=opening)
    with pytest.raises(ArtefactError, match=r"plays .*model"):
        make_policy(str(path)).begin(FakeBackend(drafters=("ngram",)).table)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"algo": "bandit:ucb"}, "--granularity step is for ppo, dqn, a2c"),
        ({"algo": "recurrent_ppo"}, "recurrent_ppo decides per round"),
        ({"granularity": "round", "copy_from": 2}, "--copy-from"),
        ({"copy_from": -1}, "--copy-from"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        TrainConfig(**{"granularity": "step", **options}).check()
