"""Curves of a training run against its baselines, read back by TensorBoard's own reader."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from test_tb import reader, scalars
from test_train_replay import config, files, weights

from assc.core import Totals
from assc.registry import make_policy
from assc.rounds_json import spread
from assc.run import run_request
from envs.lanes import ReplayLanes
from policies.training import sb3 as train_sb3
from policies.training.job import train
from policies.training.setup import replay_problem

__all__ = ["files"]  # the fixture

BASELINES = ("ar", "static-tuned", "assc", "oracle")


@pytest.fixture(autouse=True)
def small_rollouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_sb3, "LANES_ROLLOUT", {"ppo": 64, "a2c": 64, "dqn": 32})
    monkeypatch.setattr(train_sb3, "CLONED_ROLLOUT", 1)
    torch.set_num_threads(1)


def test_baselines_are_horizontal_lines_under_the_same_tags(files: tuple[Path, Path], tmp_path: Path) -> None:
    made = config(files, tmp_path / "run", curve_every=100, curve_requests=3, eval_requests=2)
    assert train(made) == 0
    curves = {p.name: scalars(p) for p in (tmp_path / "run" / "tb").iterdir()}
    mine = curves["ppo"]
    tags = {tag for tag in mine if tag.startswith("eval/")}
    assert {"eval/speedup", "eval/tokens_per_gpu_second", "eval/mean_k", "eval/waste_rate"} <= tags
    for name in BASELINES:
        its = {tag: points for tag, points in curves[name].items() if tag.startswith("eval/")}
        assert set(its) == tags or (name == "ar" and set(its) < tags)
        for tag, points in its.items():
            assert [step for step, _ in points] == [0, 128, 256], "rollouts of 64; every 100 rounds and at the end"
            assert len({value for _, value in points}) == 1, (name, tag)
    assert [step for step, _ in mine["eval/speedup"]] == [0, 128, 256]
    assert curves["ar"]["eval/speedup"][0][1] == 1.0
    best = curves["oracle"]["eval/speedup"][0][1]
    assert all(value <= best + 1e-6 for curve in curves.values() for _, value in curve.get("eval/speedup", ()))
    # the last point is the saved policy on the same requests
    problem = replay_problem(made)
    requests = [problem.train[i] for i in spread(problem.train, 3)]
    policy = make_policy(str(tmp_path / "run" / "policy.zip"))
    rounds = [r for q in requests for r in run_request(problem.backend, q, policy).rounds]
    assert mine["eval/mean_k"][-1][1] == pytest.approx(Totals.of(rounds).mean_k, rel=1e-5)
    assert mine["eval/tokens_per_gpu_second"][-1][1] == pytest.approx(Totals.of(rounds).tokens_per_second, rel=1e-5)
    # the comparison on held-out requests stands beside them
    rows = json.loads((tmp_path / "run" / "eval.json").read_text())["rows"]
    named = {"ar": "ar", "static:tuned": "static-tuned", "oracle": "oracle", rows[-2]["policy"]: "ppo"}
    for row in rows:
        if row["policy"] in named:
            points = curves[named[row["policy"]]]["held_out/speedup"]
            assert points == [(256, pytest.approx(row["speedup"], rel=1e-5))]
    assert "custom_scalars__config__" in reader(tmp_path / "run" / "tb" / "ppo").Tags()["tensors"]


def test_curves_change_nothing_that_is_learned_and_go_on_when_resumed(
    files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal in the middle: readable files at once, and after resuming every step once."""
    train(config(files, tmp_path / "without", curve_every=0))
    assert [p.name for p in (tmp_path / "without" / "tb").iterdir()] == ["ppo"]
    cut = tmp_path / "cut"
    step, played = ReplayLanes.step, 0

    def interrupted(lanes: ReplayLanes, actions: Any) -> Any:
        nonlocal played
        played += lanes.num_envs
        if 140 < played <= 140 + lanes.num_envs:
            os.kill(os.getpid(), signal.SIGINT)
        return step(lanes, actions)

    with monkeypatch.context() as patch:
        patch.setattr(ReplayLanes, "step", interrupted)
        assert train(config(files, cut, curve_every=64, curve_requests=2)) == 130
    before = scalars(cut / "tb" / "ppo")["eval/speedup"]
    assert [s for s, _ in before] == [0, 64, 128]
    assert train(config(files, None, resume=cut, curve_every=64, curve_requests=2)) == 0
    for name in ("ppo", *BASELINES):
        points = scalars(cut / "tb" / name)["eval/speedup"]
        assert [s for s, _ in points] == [0, 64, 128, 192, 256], name
    assert scalars(cut / "tb" / "ppo")["eval/speedup"][:3] == before
    assert weights(cut) == weights(tmp_path / "without")


def test_an_online_learner_is_drawn_apart_from_the_untrained_one(files: tuple[Path, Path], tmp_path: Path) -> None:
    made = config(files, tmp_path / "run", algo="bandit:ucb", total_timesteps=100, curve_every=50, curve_requests=2)
    assert train(made) == 0
    points = scalars(tmp_path / "run" / "tb" / "bandit-ucb-trained")["eval/speedup"]
    steps = [s for s, _ in points]
    assert steps[0] == 0 and steps[-1] >= 100 and steps == sorted(set(steps)) and len(steps) >= 3
    state = make_policy(str(tmp_path / "run" / "policy.zip")).state_dict()
    train(config(files, tmp_path / "plain", algo="bandit:ucb", total_timesteps=100, curve_every=0))
    assert state == make_policy(str(tmp_path / "plain" / "policy.zip")).state_dict()
