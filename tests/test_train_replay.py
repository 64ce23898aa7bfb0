"""Training on a recorded trace: resumable to the bit, the ladder, and the check on the live decoder."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_traces import COSTS, tiny_engine, tiny_trace

import train_policy
from assc import live_check as checking
from assc import rerun
from assc.__main__ import main
from assc.costs_io import CostFile, write_costs
from assc.errors import AsscError
from assc.live import LiveBackend
from assc.markov import MARKOV_COSTS, MarkovSource, markov_requests
from assc.registry import make_policy
from assc.trace_io import write_trace
from envs.lanes import ReplayLanes
from policies.training import sb3 as train_sb3
from policies.training.checkpoint import read_checkpoint
from policies.training.config import TrainConfig
from policies.training.job import train
from policies.training.setup import replay_problem

ALGORITHMS = ("ppo", "a2c", "dqn", "recurrent_ppo")


@pytest.fixture(autouse=True)
def small_rollouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_sb3, "LANES_ROLLOUT", {"ppo": 64, "recurrent_ppo": 64, "a2c": 64, "dqn": 32})
    monkeypatch.setattr(train_sb3, "CLONED_ROLLOUT", 1)
    torch.set_num_threads(1)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """A synthetic trace and its costs."""
    trace, costs = tmp_path / "trace.npz", tmp_path / "costs.json"
    write_trace(MarkovSource().trace(markov_requests(12, max_new_tokens=24)), trace)
    write_costs(CostFile(MARKOV_COSTS), costs)
    return trace, costs


def config(files: tuple[Path, Path], run_dir: Path | None, **options: Any) -> TrainConfig:
    fixed = {"eval_requests": 0, "progress": False, "live_requests": 0, "total_timesteps": 256, "checkpoint_every": 64}
    return TrainConfig(**{"traces": str(files[0]), "cost": files[1], "run_dir": run_dir, **fixed, **options})


def weights(run_dir: Path) -> list[Any]:
    policy: Any = make_policy(str(run_dir / "policy.zip"))
    return [array.tolist() for layer in policy.network.layers for array in layer]


class Killed(Exception):
    """Stands for kill -9: nothing after it runs."""


def killed(given: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train until more than 150 rounds have been played."""
    step, played = ReplayLanes.step, 0

    def deadly(lanes: ReplayLanes, actions: Any) -> Any:
        nonlocal played
        played += lanes.num_envs
        if played > 150:
            raise Killed
        return step(lanes, actions)

    with monkeypatch.context() as patch:
        patch.setattr(ReplayLanes, "step", deadly)
        with pytest.raises(Killed):
            train(given)


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_b04_a_killed_run_goes_on_as_if_it_had_never_stopped(
    algo: str, files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert train(config(files, whole, algo=algo, seed=3)) == 0
    killed(config(files, cut, algo=algo, seed=3), monkeypatch)
    assert 0 < read_checkpoint(cut).steps < 256 and not (cut / "policy.zip").exists()
    assert train(config(files, None, algo=algo, seed=3, resume=cut)) == 0
    assert read_checkpoint(cut).steps == read_checkpoint(whole).steps
    assert weights(cut) == weights(whole)


def test_a_resumed_run_names_the_costs_that_it_began_with(
    files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not its own copy of them: else the repeated run, which was never stopped, would differ in that name."""
    cut, package = tmp_path / "cut", CostFile(MARKOV_COSTS, pair="markov")
    for place in ("assc.shipped", "assc.eval_replay"):
        monkeypatch.setattr(f"{place}.shipped_cost_file", lambda: package)
    options: dict[str, Any] = {"algo": "a2c", "cost": None, "eval_requests": 2}
    killed(config(files, cut, **options), monkeypatch)
    assert (cut / "costs.json").is_file()
    assert train(config(files, None, resume=cut, **options)) == 0
    assert "--cost" not in capsys.readouterr().out.partition("Next:")[2]
    assert json.loads((cut / "eval.json").read_text())["meta"]["cost_file"]["name"] == "the package's"
    monkeypatch.setattr(rerun, "start", lambda words: train_policy.main(words[2:]))
    assert main(["rerun", str(cut)]) == 0
    assert "bit for bit" in capsys.readouterr().out

    package = CostFile(replace(MARKOV_COSTS, target_fixed=1.0))  # a later version of the package
    assert train(config(files, None, resume=cut, **{**options, "total_timesteps": 320})) == 0
    assert "is not the one that the package has now: the run keeps its own" in capsys.readouterr().out
    assert json.loads((cut / "eval.json").read_text())["meta"]["cost_file"]["name"] == str(cut / "costs.json")


def test_b12_equal_seeds_give_equal_policies(files: tuple[Path, Path], tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train(config(files, tmp_path / name, seed=seed))
    assert weights(tmp_path / "a") == weights(tmp_path / "b") != weights(tmp_path / "c")


def test_training_improves_on_the_untrained_policy(files: tuple[Path, Path], tmp_path: Path) -> None:
    """A few thousand rounds beat the first checkpoint's exploration by far on any seed tried (0..4: 1.24 to 1.41x)."""
    train(config(files, tmp_path / "run", total_timesteps=6000, imitate="none"))
    curve = EventAccumulator(str(tmp_path / "run" / "tb" / "ppo"))
    curve.Reload()
    speeds = [e.value for e in curve.Scalars("decode/tokens_per_gpu_second")]
    assert np.mean(speeds[-10:]) > 1.1 * np.mean(speeds[:10])


def test_the_ladder_and_the_next_commands(
    files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    words = ["--traces", str(files[0]), "--cost", str(files[1]), "--run-dir", str(run_dir), "--live-requests", "0"]
    assert train_policy.main([*words, "--total-timesteps", "64"]) == 0
    said = capsys.readouterr().out
    assert "static:best-per-request" in said and "same text: yes" in said
    command = next(line for line in said.splitlines() if "python eval.py" in line)
    assert f"--backend replay --traces {files[0]} --cost {files[1]}" in command
    result = json.loads((run_dir / "eval.json").read_text())
    assert [row["policy"] for row in result["rows"]][-2:] == [str(run_dir / "policy.zip"), "oracle"]
    assert result["meta"]["trained"] == str(run_dir / "policy.zip")
    assert all(row["oracle_fraction"] <= 1 + 1e-9 for row in result["rows"])


def test_no_model_library_is_loaded_for_replay(files: tuple[Path, Path], tmp_path: Path) -> None:
    code = (
        "import sys, train_policy\n"
        f"code = train_policy.main(['--traces', {str(files[0])!r}, '--cost', {str(files[1])!r}, '--run-dir', "
        f"{str(tmp_path / 'run')!r}, '--live-requests', '0', '--total-timesteps', '32', '--eval-requests', '2'])\n"
        "assert code == 0 and 'transformers' not in sys.modules, code"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent.parent, capture_output=True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--mode", "gumbel"), "--mode is decided by the trace"),
        (("--draft", "x"), "--draft is decided by the trace"),
        (("--max-new-tokens", "5"), "--max-new-tokens is decided by the trace"),
        (("--traces", "nowhere.npz"), "nowhere.npz"),
        (("--cost", "nowhere.json"), "nowhere.json"),
        (("--live-requests", "-1"), "--live-requests is at least 0"),
        (("--backend", "live", "--traces", "x.npz"), "--traces is for --backend replay"),
        (("--backend", "live", "--live-check"), "--live-check is for --backend replay"),
    ],
)
def test_mistakes_are_one_sentence(
    words: tuple[str, ...], message: str, files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    given = [] if "live" in words else ["--traces", str(files[0]), "--cost", str(files[1])]
    assert train_policy.main([*given, *words]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error and "\n" not in error


# -- the same decisions live ------------------------------------------------------------------------------------------


def live() -> LiveBackend:
    label = {"pair": "tiny", "device": "cpu", "dtype": "float64", "threads": 1}
    return LiveBackend(tiny_engine(), mode="gumbel", cost_model=COSTS, label=label)


@pytest.mark.parametrize("spec", ["assc", "threshold", "random", "static:drafter=ngram,k=8"])
def test_a_policy_decides_live_as_on_the_trace(spec: str) -> None:
    trace = tiny_trace()
    found = checking.live_check(live(), trace, COSTS, spec, trace.requests(checking.held_out_rows(trace, 3, 0)))
    assert (found.same_text, found.same_rounds) == (3, found.rounds) and found.rounds >= 6
    assert f"same round in {found.rounds} of {found.rounds}" in str(found)


def test_a_difference_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another text from the fourth token on: what comes before still counts."""
    trace = tiny_trace()
    rows = checking.held_out_rows(trace, 1, 0)
    start = int(trace.columns["offsets"][rows[0]])
    columns = dict(trace.columns)
    columns["tokens"] = columns["tokens"].copy()
    columns["tokens"][start + 3] += 1
    changed = type(trace)(trace.header, columns)
    found = checking.live_check(live(), changed, COSTS, "ar", changed.requests(rows))
    assert (found.same_text, found.same_rounds) == (0, 3) and found.rounds > 3


def test_another_pair_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tiny_trace()
    header = replace(trace.header, drafters=trace.header.drafters[:1])
    write_trace(type(trace)(header, {k: v for k, v in trace.columns.items() if "ngram" not in k}), tmp_path / "t.npz")
    write_costs(CostFile(COSTS), tmp_path / "c.json")
    words = ["live-check", "--policy", "assc", "--pair", "tiny", "--traces", str(tmp_path / "t.npz")]
    assert main([*words, "--cost", str(tmp_path / "c.json")]) == 2
    assert "the pair has model, ngram" in capsys.readouterr().err


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace(tiny_trace(), tmp_path / "t.npz")
    write_costs(CostFile(COSTS), tmp_path / "c.json")
    words = ["live-check", "--policy", "static:2", "--pair", "tiny", "--traces", str(tmp_path / "t.npz")]
    words += ["--cost", str(tmp_path / "c.json"), "--requests", "2", "--json", str(tmp_path / "out.json")]
    assert main(words) == 0
    assert "2 held-out requests" in capsys.readouterr().out
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["requests"] == 2 and found["live"]["speedup"] > 0 and found["meta"]["pair"] == "tiny"
    assert main([*words[:-2], "--requests", "0"]) == 2


def test_too_many_requests_to_compare_are_told_before_the_training(tmp_path: Path) -> None:
    config = TrainConfig(run_dir=tmp_path / "run", total_timesteps=512, eval_requests=100_000)
    with pytest.raises(AsscError, match="100000 requests were asked for"):
        replay_problem(config)
    assert not (tmp_path / "run").exists()
