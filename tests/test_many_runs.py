"""Several seeds in processes, sweeps, and hyperparameters on the command line."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

import train_policy
from assc.costs_io import CostFile, write_costs
from assc.errors import AsscError, RequestError, SpecError
from assc.markov import MARKOV_COSTS, MarkovSource, markov_requests
from assc.trace_io import read_trace, write_trace
from assc.trace_rules import balanced_rows
from policies.training import seeds as seeds_module
from policies.training.config import TrainConfig
from policies.training.job import train
from policies.training.sb3 import Rollout, learner_settings
from policies.training.seeds import over_seeds, summarise, train_seeds
from policies.training.settings import SETTABLE, SPACES, parse_settings
from policies.training.setup import live_problem
from policies.training.sweep import inner_split, set_aside


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, ...]:
    """Words that name a synthetic trace and its costs, and a small run on it."""
    trace, costs = tmp_path / "trace.npz", tmp_path / "costs.json"
    write_trace(MarkovSource().trace(markov_requests(16, max_new_tokens=24)), trace)
    write_costs(CostFile(MARKOV_COSTS), costs)
    small = ("--total-timesteps", "64", "--eval-requests", "3", "--live-requests", "0", "--progress", "False")
    return ("--traces", str(trace), "--cost", str(costs), *small)


def config(files: tuple[str, ...], **options: Any) -> TrainConfig:
    fixed = {"algo": "bandit:ucb", "total_timesteps": 64, "eval_requests": 3, "live_requests": 0, "progress": False}
    return TrainConfig(**{"traces": files[1], "cost": Path(files[3]), **fixed, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seeds": (1, 1)}, "--seeds are different numbers"),
        ({"jobs": 2}, "--jobs is 1 or more and goes with --seeds"),
        ({"sweep": 0}, "--sweep is 1 or more"),
        ({"sweep": 2, "backend": "live"}, "needs --backend replay"),
        ({"sweep_timesteps": 9}, "goes with --sweep"),
        ({"set": ("gamma",)}, "is not NAME=VALUE with a name of: learning_rate, gamma"),
        ({"set": ("poem=1",)}, "is not NAME=VALUE"),
        ({"set": ("gamma=2",)}, "gamma is in 0 to 1"),
        ({"set": ("n_epochs=1.5",)}, "n_epochs is a whole number"),
        ({"set": ("net_arch=a",)}, "whole numbers with commas"),
        ({"set": ("learning_rate=nan",)}, "learning_rate is in"),
        ({"set": ("gamma=0.1",), "algo": "linucb"}, "the keys of 'linucb' are written into --algo"),
    ],
)
def test_bad_options_are_one_sentence(options: dict[str, Any], message: str) -> None:
    with pytest.raises(AsscError, match=message):
        TrainConfig(**options).check()


def test_settings_reach_the_learner() -> None:
    words = ("gamma=0.3", "net_arch=16,8", "ent_coef=0.05", "batch_size=100")
    found = learner_settings(TrainConfig(set=words), Rollout(4096, 64))
    assert found["gamma"] == 0.3 and found["ent_coef"] == 0.05 and found["policy_kwargs"]["net_arch"] == [16, 8]
    assert found["batch_size"] == 64, "a divisor of the rollout"
    recurrent = TrainConfig(algo="recurrent_ppo", set=("lstm_hidden_size=8",))
    assert learner_settings(recurrent, Rollout(4096, 64))["policy_kwargs"]["lstm_hidden_size"] == 8


@pytest.mark.parametrize("learner", SPACES)
def test_every_space_gives_settings_that_its_learner_takes(learner: str) -> None:
    optuna = pytest.importorskip("optuna")
    from policies.training.settings import with_settings

    algo = "bandit:ts" if learner == "bandit" else learner
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    for _ in range(10):
        name, words = with_settings(algo, (), SPACES[learner](study.ask()))
        TrainConfig(algo=name, set=words).check()
        assert set(parse_settings(name, words)) <= set(SETTABLE.get(name, ()))


def test_the_inner_split_shares_no_prompt(files: tuple[str, ...]) -> None:
    trace = read_trace(files[1])
    requests = trace.requests(trace.where(split="train"))
    requests += [replace(r, seed=r.seed + 1000) for r in requests]
    inner, validation = inner_split(requests, 0)
    assert len(inner) + len(validation) == len(requests) and validation
    assert not {r.id for r in inner} & {r.id for r in validation}
    assert inner_split(requests, 0) == (inner, validation)
    with pytest.raises(RequestError, match="at least 2 different train prompts"):
        inner_split([r for r in requests if r.id == requests[0].id], 0)


def test_a_sweep_is_resumable_and_its_best_is_trained_anew(
    files: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("optuna")
    folder = tmp_path / "sweep"
    words = [*files, "--algo", "bandit:ucb", "--run-dir", str(folder), "--sweep", "2"]
    assert train_policy.main(words) == 0
    first = json.loads((folder / "sweep.json").read_text())
    assert [t["state"] for t in first["trials"]] == ["COMPLETE"] * 2
    assert first["best"]["speedup"] == max(t["speedup"] for t in first["trials"])
    result = json.loads((folder / "best" / "eval.json").read_text())
    assert (
        result["rows"]
        and json.loads((folder / "best" / "config.json").read_text())["config"]["algo"] == (first["best"]["algo"])
    )
    for number in (0, 1):
        trial = json.loads((folder / "trials" / f"{number:03}" / "config.json").read_text())
        assert trial["config"]["sweep"] is None and not (folder / "trials" / f"{number:03}" / "eval.json").exists()
    import optuna

    study = optuna.load_study(study_name="sweep", storage=f"sqlite:///{folder / 'sweep.db'}")
    study.ask()  # a trial that was under way when the process was killed
    del study
    capsys.readouterr()
    assert train_policy.main(["--resume", str(folder), "--sweep", "3", "--progress", "False"]) == 0
    second = json.loads((folder / "sweep.json").read_text())
    assert [t["state"] for t in second["trials"]] == ["COMPLETE", "COMPLETE", "FAIL", "COMPLETE"]
    assert second["trials"][:2] == first["trials"] and "(2 done)" in capsys.readouterr().out


def test_the_best_of_a_shorter_sweep_is_kept_under_another_name(files: tuple[str, ...], tmp_path: Path) -> None:
    target = tmp_path / "best"
    assert train(config(files, algo="bandit:ts", run_dir=target, eval_requests=0)) == 0
    set_aside(target, "bandit:ts", ())
    assert target.is_dir(), "the same settings go on"
    set_aside(target, "bandit:ucb", ())
    assert not target.exists() and (tmp_path / "best-before-1" / "policy.zip").is_file()


def test_without_optuna_it_is_one_sentence(
    files: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("policies.training.sweep.find_spec", lambda name: None)
    assert train_policy.main([*files, "--sweep", "2"]) == 2
    assert "pip install 'assc[sweep]'" in capsys.readouterr().err


def test_seeds_in_processes_equal_single_runs_and_are_summarised(
    files: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, alone = tmp_path / "many", tmp_path / "alone"
    words = [*files, "--algo", "bandit:ts", "--run-dir", str(folder), "--seeds", "3", "5"]
    assert train_policy.main(words) == 0
    assert train(config(files, algo="bandit:ts", seed=5, run_dir=alone)) == 0
    ours, single = (json.loads((d / "eval.json").read_text()) for d in (folder / "seed-5", alone))
    name = single["meta"]["trained"]
    assert [r["speedup"] for r in ours["rows"]] == [r["speedup"] for r in single["rows"]]
    summary = json.loads((folder / "summary.json").read_text())
    mine = next(r for r in single["rows"] if r["policy"] == name)
    assert summary["seeds"]["5"]["speedup"] == mine["speedup"] and summary["missing"] == []
    assert "95 % interval over seeds" in capsys.readouterr().out and summary["baselines"]["ar"] == 1.0

    started: list[int] = []
    monkeypatch.setattr(seeds_module, "_play", lambda config, folder, waiting, jobs: started.extend(waiting) or [])
    (folder / "seed-3" / "eval.json").unlink()
    assert train_policy.main(["--resume", str(folder)]) == 0
    assert started == [3], "finished seeds are not played again"


def test_every_seed_is_compared_on_the_same_requests(files: tuple[str, ...], tmp_path: Path) -> None:
    """As a choice of fewer by another seed would show, and live as on a trace."""
    compared = {}
    for seed in (0, 3):
        assert train(config(files, seed=seed, eval_requests=2, run_dir=tmp_path / str(seed))) == 0
        result = json.loads((tmp_path / str(seed) / "eval.json").read_text())
        compared[seed] = [sorted(r["id"] for r in detail["requests"]) for detail in result["details"]]
    assert compared[0] == compared[3]
    trace = read_trace(files[1])
    other = balanced_rows(trace, trace.where(split="held-out"), 2, 3)
    assert sorted(r.id for r in trace.requests(other)) not in compared[3], "seed 3 would choose others"

    live: dict[str, Any] = {"backend": "live", "pair": "tiny", "traces": None, "eval_requests": 3, "max_new_tokens": 8}
    problems = [live_problem(config(files, seed=seed, **live), tune_requests=2) for seed in (0, 3)]
    for name in ("held_out", "tune"):
        first, second = ([r.id for r in getattr(problem, name)] for problem in problems)
        assert first == second and len(first) in (2, 3)


def test_interval_over_seeds_is_students() -> None:
    values = [1.60, 1.62, 1.59, 1.65, 1.61]
    found = over_seeds(values)
    assert found is not None
    expected = stats.t.interval(0.95, 4, loc=np.mean(values), scale=stats.sem(values))
    assert found["ci95"] == pytest.approx(list(expected)) and (found["min"], found["max"]) == (1.59, 1.65)
    single = over_seeds([1.6])
    assert single is not None and single["ci95"] == [None, None] and over_seeds([]) is None


STUBBORN = """
import pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[sys.argv.index("--run-dir") + 1])
def stop(*_):
    (folder / "saved").write_text("x")
    sys.exit(130)
signal.signal(signal.SIGINT, stop)
folder.mkdir()
(folder / "ready").write_text("x")
time.sleep(60)
"""


def test_ctrl_c_reaches_every_seed_and_none_is_trained_twice_at_once(
    files: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "many"
    monkeypatch.setattr(seeds_module, "CHILD", STUBBORN)
    monkeypatch.setattr(seeds_module, "usable_cores", lambda: 2)
    sleep = time.sleep

    def wait(seconds: float) -> None:
        sleep(0.02)
        if all((folder / f"seed-{s}" / "ready").is_file() for s in (0, 1)):
            with pytest.raises(AsscError, match="seed 1 is still being trained"):
                seeds_module._start(config(files, seeds=(0, 1)), folder, 1, 2)
            raise KeyboardInterrupt

    monkeypatch.setattr(seeds_module.time, "sleep", wait)
    assert train_seeds(config(files, seeds=(0, 1), run_dir=folder)) == 130
    assert all((folder / f"seed-{s}" / "saved").is_file() for s in (0, 1))
    assert summarise(config(files, seeds=(0, 1)), folder) is None


def test_a_failing_seed_is_named_and_the_core_budget_holds(
    files: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(seeds_module, "usable_cores", lambda: 2)
    with pytest.raises(RequestError, match="--jobs is at most 2"):
        train_seeds(config(files, seeds=(0, 1, 2), jobs=3))
    monkeypatch.setattr(seeds_module, "CHILD", "raise SystemExit('no luck')")
    assert train_seeds(config(files, seeds=(7,), run_dir=tmp_path / "many")) == 1
    assert "Seed 7 failed: no luck" in capsys.readouterr().out


def test_settings_are_kept_on_resume(files: tuple[str, ...], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert train(config(files, algo="ppo", set=("gamma=0.3",), run_dir=run_dir, eval_requests=0)) == 0
    with pytest.raises(RequestError, match="--resume keeps --set"):
        train(config(files, algo="ppo", set=("gamma=0.4",), resume=run_dir, eval_requests=0))
    assert train(config(files, algo="ppo", set=("gamma=0.3",), resume=run_dir, eval_requests=0)) == 0
    with pytest.raises(SpecError, match="gamma is in"):
        TrainConfig(set=("gamma=7",)).check()
