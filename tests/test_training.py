"""The training job; names carry the ids of public faults (docs/faults.md)."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import FakeBackend, fake_requests
from stable_baselines3.common.vec_env import DummyVecEnv, VecCheckNan
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import train_policy
from assc.core import Action, Observation, Request, RoundRecord, Totals
from assc.errors import ArtefactError, AsscError, RequestError, SpecError
from assc.registry import make_policy
from assc.run import run_request
from assc.tuning import static_spec, tune_static
from envs import SpecDecodeEnv
from policies.training import sb3 as train_sb3
from policies.training.checkpoint import CHECKPOINT_FILE, read_checkpoint
from policies.training.config import SB3_ALGORITHMS, TrainConfig, merge_resumed
from policies.training.job import is_finished, planned_rounds, train
from policies.training.log import Interrupt, TrainingLog
from policies.training.play import SinglePlay
from policies.training.sb3 import Rollout, Sb3Run
from policies.training.setup import Problem

LEARNERS = ("ppo", "a2c", "dqn", "bandit:ucb", "bandit:ts", "linucb", "accept_model")
EVERY_K = range(1, 17)


@pytest.fixture(autouse=True)
def small_rollouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_sb3, "ROLLOUT", 64)
    torch.set_num_threads(1)


class BestK(FakeBackend):
    """A diagnostic: the first `best` drafted tokens are accepted, never more, so one K is clearly the best.

    With `best` a mapping, the category decides, and the target's entropy at the decision point tells it.
    """

    def __init__(self, best: int | dict[str, int]) -> None:
        super().__init__(k_values=(1, 4, 16), c=0.2)
        self.best = best

    def reset(self, request: Request) -> None:
        super().reset(request)
        self._accept = self.best if isinstance(self.best, int) else self.best[request.category]

    def observe(self, needs: frozenset[str] = frozenset()) -> Observation:
        return replace(super().observe(needs), target_entropy=0.1 * self._accept, target_top1=0.5, ngram_match=0)

    def step(self, action: Action, **options: Any) -> RoundRecord:
        agree = np.zeros_like(next(iter(self._agree.values())))
        agree[self._position : self._position + self._accept] = True
        self._agree = dict.fromkeys(self._agree, agree)
        return super().step(action, **options)


def problem(backend: FakeBackend | None = None, *, n: int = 12, tokens: int = 48, evaluate: int = 0) -> Problem:
    played = backend or FakeBackend(k_values=EVERY_K)
    train_requests, held_out = fake_requests(n, max_new_tokens=tokens), fake_requests(4, seed=1)
    return Problem(played, FakeBackend(k_values=EVERY_K), train_requests, held_out, fake_requests(2, seed=2))


def config(tmp_path: Path, **options: Any) -> TrainConfig:
    return TrainConfig(
        **{"run_dir": tmp_path / "run", "total_timesteps": 128, "eval_requests": 0, "progress": False, **options}
    )


def scalars(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    folders = (run_dir / "tb").iterdir()
    (policy,) = [p for p in folders if p.name in SB3_ALGORITHMS or p.name.endswith("-trained")]
    events = EventAccumulator(str(policy))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def network(run_dir: Path) -> list[np.ndarray[Any, Any]]:
    policy: Any = make_policy(str(run_dir / "policy.zip"))
    return [a for layer in policy.network.layers for a in layer]


def learned(run_dir: Path) -> Any:
    """Everything that a run has learned, in a form that compares."""
    policy: Any = make_policy(str(run_dir / "policy.zip"))
    return policy.state_dict() if not hasattr(policy, "network") else [a.tolist() for a in network(run_dir)]


def test_b01_the_real_number_of_rounds_is_said_and_at_most_one_rollout_above(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(config(tmp_path, total_timesteps=100), problem()) == 0
    said = capsys.readouterr().out
    assert "up to round 128 (100 asked for" in said and "128 rounds done" in said
    assert read_checkpoint(tmp_path / "run").steps == 128
    assert planned_rounds(TrainConfig(total_timesteps=10)) == 10
    with pytest.raises(RequestError, match=r"at least 2 \(ppo normalises"):
        train(config(tmp_path, total_timesteps=1), problem())


def test_b02_a_short_run_updates_the_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for i, algo in enumerate(("ppo", "a2c", "dqn")):
        run_dir = tmp_path / str(i)
        train(config(tmp_path, run_dir=run_dir, algo=algo, total_timesteps=16), problem())
        fresh = Sb3Run(
            config(tmp_path, algo=algo, total_timesteps=16),
            SinglePlay(SpecDecodeEnv(problem().backend, problem().train)),
            Rollout(16, 1),
            TrainingLog(tmp_path / "other", 16, progress=False),
            None,
        )
        before = next(iter(fresh.model.policy.parameters())).detach().numpy()
        assert not any(np.array_equal(before, a) for a in network(run_dir))
        assert int(re.findall(r"(\d+) updates", capsys.readouterr().out)[0]) > 0


def test_b02_no_update_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sb3Run, "updates", 0)
    train(config(tmp_path, total_timesteps=8), problem())
    assert "Warning: 8 rounds were too few" in capsys.readouterr().out


class Killed(Exception):
    """Stands for kill -9: nothing after it runs."""


def killed_at(rounds: int) -> Callable[[Request, Action], None]:
    count = 0

    def on_step(request: Request, action: Action) -> None:
        nonlocal count
        count += 1
        if count > rounds:
            raise Killed

    return on_step


@pytest.mark.parametrize("algo", LEARNERS)
def test_b04_k02_a_killed_run_goes_on_as_if_it_had_never_stopped(
    algo: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"algo": algo, "total_timesteps": 256, "checkpoint_every": 64, "seed": 3}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(config(tmp_path, run_dir=whole, **options), problem())
    with pytest.raises(Killed):
        train(
            config(tmp_path, run_dir=cut, **options),
            problem(FakeBackend(k_values=EVERY_K, on_step=killed_at(180))),
        )
    done = read_checkpoint(cut).steps
    assert 64 <= done < 180
    capsys.readouterr()
    assert train(config(tmp_path, run_dir=None, resume=cut, **options), problem()) == 0
    assert f"Resuming {algo} at round {done}" in capsys.readouterr().out
    assert read_checkpoint(cut).steps == read_checkpoint(whole).steps >= 256
    assert learned(cut) == learned(whole)
    expected, found = scalars(whole), scalars(cut)
    for tag in set(expected) - {"time/fps"}:
        steps = [step for step, _ in found[tag]]
        assert steps == sorted(set(steps)), tag
        assert found[tag] == expected[tag], tag


def test_b04_more_steps_continue_the_count_and_start_from_the_saved_network(tmp_path: Path) -> None:
    train(config(tmp_path, total_timesteps=64), problem())
    saved = learned(tmp_path / "run")
    again = config(tmp_path, run_dir=None, resume=tmp_path / "run", total_timesteps=64)
    assert train(again, problem()) == 0 and learned(tmp_path / "run") == saved
    train(config(tmp_path, run_dir=None, resume=tmp_path / "run", total_timesteps=128), problem())
    assert read_checkpoint(tmp_path / "run").steps == 128 and learned(tmp_path / "run") != saved
    assert [step for step, _ in scalars(tmp_path / "run")["decode/mean_k"]] == [64, 128]


def files_of(run_dir: Path) -> dict[str, bytes]:
    return {str(p.relative_to(run_dir)): p.read_bytes() for p in sorted(run_dir.rglob("*")) if p.is_file()}


def test_a_finished_run_is_left_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "run"
    train(config(tmp_path, total_timesteps=100, eval_requests=2), problem())
    before = files_of(run_dir)
    options: dict[str, Any] = {"run_dir": None, "resume": run_dir, "eval_requests": 2}
    for rounds in (100, 128):
        assert train(config(tmp_path, **options, total_timesteps=rounds), problem()) == 0
        assert f"has done 128 rounds, {rounds} were asked for" in capsys.readouterr().out
    with pytest.raises(RequestError, match="has done 128 rounds, --total-timesteps 64 cannot take any back"):
        train(config(tmp_path, **options, total_timesteps=64), problem())
    assert files_of(run_dir) == before
    (run_dir / "eval.json").unlink()  # as after Ctrl-C in the comparison
    assert train(config(tmp_path, **options, total_timesteps=100), problem()) == 0
    after = files_of(run_dir)
    kept = [name for name in before if name.partition("/")[0] not in ("tb", "eval.json")]
    assert kept and {name: after[name] for name in kept} == {name: before[name] for name in kept}
    assert json.loads(after["eval.json"])["rows"]


def test_ctrl_c_before_the_first_round_loses_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It may come while the baselines of the curves are played, which takes minutes on a live decoder."""
    options: dict[str, Any] = {"algo": "bandit:ucb", "total_timesteps": 128, "curve_every": 64, "curve_requests": 2}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(config(tmp_path, run_dir=whole, **options), problem())
    stopped = problem()

    def ctrl_c(request: Request, action: Action) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    stopped.eval_backend = FakeBackend(k_values=EVERY_K, on_step=ctrl_c)
    assert train(config(tmp_path, run_dir=cut, **options), stopped) == 130
    assert f"--resume {cut}" in capsys.readouterr().out and not (cut / CHECKPOINT_FILE).exists()
    assert train(config(tmp_path, run_dir=None, resume=cut, **options), problem()) == 0
    assert "starts from the beginning" in capsys.readouterr().out
    assert learned(cut) == learned(whole)
    found = scalars(cut)
    assert set(found) == set(scalars(whole))
    for tag, points in found.items():
        steps = [step for step, _ in points]
        assert steps == sorted(set(steps)), tag


def test_a_frozen_learner_counts_no_updates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(config(tmp_path, algo="bandit:ucb,frozen=true", total_timesteps=64), problem())
    said = capsys.readouterr().out
    assert ", 0 updates;" in said and "Warning" not in said
    train(config(tmp_path, run_dir=tmp_path / "learns", algo="bandit:ucb", total_timesteps=64), problem())
    assert ", 0 updates;" not in capsys.readouterr().out


def test_a_resumed_run_keeps_the_rollout_it_was_started_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(config(tmp_path, total_timesteps=20), problem())
    train(config(tmp_path, run_dir=None, resume=tmp_path / "run", total_timesteps=64), problem())
    assert "up to round 80 (64 asked for" in capsys.readouterr().out
    assert read_checkpoint(tmp_path / "run").steps == 80


@pytest.mark.parametrize("algo", LEARNERS)
def test_b12_equal_seeds_give_equal_policies_and_curves(algo: str, tmp_path: Path) -> None:
    runs = {}
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        torch.rand(1), np.random.rand(1)  # the global generators differ at the start
        train(config(tmp_path, run_dir=tmp_path / name, algo=algo, seed=seed, total_timesteps=96), problem())
        curves = scalars(tmp_path / name)
        curves.pop("time/fps", None)
        runs[name] = (learned(tmp_path / name), curves)
    assert runs["a"] == runs["b"]
    assert algo == "bandit:ucb" or runs["a"] != runs["c"]


def test_the_callers_generators_are_left_as_found(tmp_path: Path) -> None:
    torch.manual_seed(5)
    np.random.seed(5)
    expected = torch.rand(1), np.random.rand()
    torch.manual_seed(5)
    np.random.seed(5)
    train(config(tmp_path, total_timesteps=8), problem())
    assert (torch.rand(1), np.random.rand()) == expected


@pytest.mark.parametrize("algo", LEARNERS)
def test_b08_k01_tensorboard_shows_sb3s_scalars_and_ours(algo: str, tmp_path: Path) -> None:
    assert tuple(int(p) for p in version("tensorboard").split(".")[:2]) >= (2, 21)
    train(config(tmp_path, algo=algo, total_timesteps=256), problem())
    found = scalars(tmp_path / "run")
    ours = {"tokens_per_gpu_second", "acceptance_rate", "waste_rate", "mean_k", "rollback_rate", "draft_time_share"}
    assert {f"decode/{name}" for name in ours} <= set(found)
    if algo in SB3_ALGORITHMS:
        assert {"rollout/ep_rew_mean", "rollout/ep_len_mean"} <= set(found)
    for tag, points in found.items():
        steps = [step for step, _ in points]
        assert steps == sorted(set(steps)) and steps[-1] <= 256 + 64, tag
        assert np.isfinite([value for _, value in points]).all(), tag


@pytest.mark.parametrize("algo", LEARNERS)
def test_b11_every_learner_finds_the_one_good_k(algo: str, tmp_path: Path) -> None:
    backend, rounds = BestK(4), 512 if algo.startswith("bandit") else 960
    train(config(tmp_path, algo=algo, total_timesteps=rounds), problem(backend))
    episode = run_request(backend, fake_requests(1, seed=9)[0], make_policy(str(tmp_path / "run" / "policy.zip")))
    played = [r.planned for r in episode.rounds[:-1]]
    assert played.count(4) >= 0.8 * len(played), played


def test_b11_ppo_reads_the_observation(tmp_path: Path) -> None:
    """Two kinds of request with different best K, told apart by the entropy alone."""
    backend = BestK({"a": 1, "b": 16})
    train(config(tmp_path, total_timesteps=2048), problem(backend, tokens=100))
    for category, best in (("a", 1), ("b", 16)):
        request = Request((1, 2), 100, seed=77, category=category)
        episode = run_request(backend, request, make_policy(str(tmp_path / "run" / "policy.zip")))
        played = [r.planned for r in episode.rounds if r.position < 80]
        assert played.count(best) >= 0.7 * len(played), (category, played)


def test_b07_the_network_is_small_and_on_the_cpu(tmp_path: Path) -> None:
    log = TrainingLog(tmp_path, 8, progress=False)
    play = SinglePlay(SpecDecodeEnv(problem().backend, problem().train))
    run = Sb3Run(config(tmp_path), play, Rollout(64, 1), log, None)
    assert run.model.device == torch.device("cpu")
    assert all(p.device.type == "cpu" for p in run.model.policy.parameters())
    assert sum(p.numel() for p in run.model.policy.parameters()) < 20_000


def test_progress_counts_decisions_where_it_counts_decisions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Several decisions make one round: the share that is done is that of the decisions."""
    assert [TrainConfig(granularity=g).unit for g in ("round", "step")] == ["round", "decision"]
    log = TrainingLog(tmp_path, 20, unit="decision")
    for step in range(1, 21):
        log.add(Totals(rounds=int(step % 5 == 0)), step)
    log.close()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0].strip() for line in lines] == [f"{n} of 20 decisions" for n in range(2, 21, 2)]


class Frozen(FakeBackend):
    """A clock that stands still."""

    def step(self, action: Action, **options: Any) -> RoundRecord:
        return replace(super().step(action, **options), seconds=0.0)


def test_b16_no_nan_in_500_steps_with_a_clock_that_stands_still() -> None:
    for reward in ("throughput", "dinkelbach", "saved"):
        frozen = SpecDecodeEnv(Frozen(), fake_requests(4), reward=reward)
        venv = VecCheckNan(DummyVecEnv([lambda env=frozen: env]), raise_exception=True)
        venv.seed(0)
        venv.reset()
        for i in range(500):
            venv.step(np.array([i % 10]))


def test_b17_a_saved_policy_gives_one_action_for_one_state(tmp_path: Path) -> None:
    train(config(tmp_path), problem())
    backend = FakeBackend(k_values=EVERY_K)
    policy = make_policy(str(tmp_path / "run" / "policy.zip"))
    backend.reset(fake_requests(1)[0])
    policy.begin(backend.table)
    assert len({policy.act(backend.observe(policy.needs)) for _ in range(20)}) == 1


def test_the_comparison_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(config(tmp_path, eval_requests=4), problem()) == 0
    said = capsys.readouterr().out
    assert "tensorboard --logdir" in said and "python eval.py" in said and "same text: yes" in said
    result = json.loads((tmp_path / "run" / "eval.json").read_text())
    tuned = result["meta"]["static_tuned"]
    names = [row["policy"] for row in result["rows"]]
    assert names[0] == "ar" and names[-1] == str(tmp_path / "run" / "policy.zip")
    assert tuned.startswith("static:") and f"{tuned} (tuned)" in names and {"assc", "bandit:ucb"} <= set(names)
    stored = json.loads((tmp_path / "run" / "config.json").read_text())
    assert stored["config"]["run_dir"] == str(tmp_path / "run") and stored["versions"]["stable-baselines3"]


def test_a_static_action_is_tuned_to_the_best_of_the_sweep() -> None:
    def tuned(**chances: float) -> str:
        backend = FakeBackend(drafters=("ngram", "model"), k_values=EVERY_K, **chances)
        return static_spec(tune_static(backend, fake_requests(3)), backend.table)

    one = FakeBackend(k_values=EVERY_K, alpha=0.95, c=0.01)
    assert tune_static(one, fake_requests(3)) == Action("ngram", 16)
    assert tuned(alpha=0.95, c=0.01) in ("static:16", "static:drafter=model,k=16")
    assert tuned(alpha=0.6, c=0.2) in ("static:2", "static:drafter=model,k=2")
    assert tuned(alpha=0.2, c=0.5) == "static:0", "drafting does not pay here"


def test_held_out_requests_are_never_trained_on(tmp_path: Path) -> None:
    played: set[str] = set()
    setup = problem(FakeBackend(k_values=EVERY_K, on_step=lambda request, action: played.add(request.id)))
    setup.held_out = [Request((1,), 8, id=f"held-{i}") for i in range(3)]
    train(config(tmp_path, eval_requests=3), setup)
    assert played and not any(name.startswith("held") for name in played)


SIGINT_JOB = """
import sys, time
sys.path.insert(0, {tests!r})
from pathlib import Path
from fakes import FakeBackend, fake_requests
from policies.training.config import TrainConfig
from policies.training.setup import Problem
from policies.training.job import train

played = 0

def on_step(request, action):
    global played
    played += 1
    time.sleep(0.002)
    if played == 300:
        print("go", flush=True)

backend = FakeBackend(on_step=on_step)
requests = fake_requests(20)
config = TrainConfig(total_timesteps=100_000, run_dir=Path({run!r}), progress=False, curve_every=0)
sys.exit(train(config, Problem(backend, backend, requests, fake_requests(4, seed=1))))
"""


def test_k03_ctrl_c_saves_everything_and_says_how_to_go_on(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    script = SIGINT_JOB.format(tests=str(Path(__file__).parent), run=str(run_dir))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    job = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment)
    assert job.stdout is not None
    assert "go\n" in iter(job.stdout.readline, "")
    job.send_signal(signal.SIGINT)
    said, _ = job.communicate(timeout=60)
    assert job.returncode == 130, said
    assert f"--resume {run_dir}" in said
    assert read_checkpoint(run_dir).steps > 0
    assert make_policy(str(run_dir / "policy.zip")).spec == str(run_dir / "policy.zip")
    assert scalars(run_dir)


@pytest.mark.parametrize("algo", LEARNERS)
def test_b04_a_run_stopped_by_ctrl_c_goes_on_as_if_it_had_not(algo: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"algo": algo, "total_timesteps": 160}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(config(tmp_path, run_dir=whole, **options), problem())

    def ctrl_c(request: Request, action: Action) -> None:
        nonlocal played
        played += 1
        if played == 101:
            os.kill(os.getpid(), signal.SIGINT)

    played = 0
    stopped = problem(FakeBackend(k_values=EVERY_K, on_step=ctrl_c))
    assert train(config(tmp_path, run_dir=cut, **options), stopped) == 130
    assert 0 < read_checkpoint(cut).steps <= 104 and played <= 105
    assert not is_finished(config(tmp_path, **options), cut) and is_finished(config(tmp_path, **options), whole)
    assert make_policy(str(cut / "policy.zip"))
    assert train(config(tmp_path, run_dir=None, resume=cut, **options), problem()) == 0
    assert learned(cut) == learned(whole)


def test_a_second_ctrl_c_interrupts_at_once() -> None:
    with Interrupt() as interrupt:
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def run_main(*words: str) -> int:
    return train_policy.main([*words, "--backend", "live", "--pair", "tiny"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--total-timesteps", "0"), "--total-timesteps is at least 2"),
        (("--total-timesteps", "-5", "--algo", "dqn"), "--total-timesteps is at least 1"),
        (("--algo", "sac"), "unknown algorithm 'sac'"),
        (("--algo", "bandit:nope"), "bandit"),
        (("--reward", "speed"), "known rewards"),
        (("--mode", "fast"), "mode"),
        (("--temperature", "0.7"), "gumbel or --mode rejection"),
        (("--k-max", "0"), "K_max is 0, allowed is 1 to 100"),
        (("--eval-requests", "-1"), "--eval-requests is at least 0"),
        (("--max-new-tokens", "-3"), "--max-new-tokens is at least 1"),
        (("--threads", "0"), "threads is 1 or more"),
        (("--workload", "none.jsonl"), "none.jsonl"),
        (("--cost", "none.json"), "none.json"),
        (("--resume", "nowhere"), "no config.json"),
        (("--frobnicate", "1"), "frobnicate"),
    ],
)
def test_mistakes_are_one_sentence_and_exit_2(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(*words) == 2
    error = capsys.readouterr().err.strip()
    assert message in error and "\n" not in error


def test_a_run_directory_is_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    assert run_main("--run-dir", str(tmp_path / "run")) == 2
    assert "exists" in capsys.readouterr().err


def test_resume_keeps_what_decides_the_learning(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    train(config(tmp_path, algo="a2c", total_timesteps=32), problem())
    given = merge_resumed(TrainConfig(resume=run_dir, total_timesteps=64), ["--resume", "x", "--total_timesteps=64"])
    assert (given.algo, given.total_timesteps, given.run_dir) == ("a2c", 64, None)
    wrong = merge_resumed(TrainConfig(resume=run_dir, algo="ppo"), ["--resume", "x", "--algo", "ppo"])
    with pytest.raises(RequestError, match="--resume keeps --algo a2c"):
        train(wrong, problem())
    with pytest.raises(RequestError, match="leave --run-dir out"):
        train(TrainConfig(**{**vars(given), "run_dir": tmp_path / "new"}), problem())


def test_a_missing_or_damaged_checkpoint_is_one_sentence(tmp_path: Path) -> None:
    train(config(tmp_path, total_timesteps=16), problem())
    path = tmp_path / "run" / CHECKPOINT_FILE
    again = config(tmp_path, run_dir=None, resume=tmp_path / "run", total_timesteps=32)
    content = path.read_bytes()
    for damaged in (content[: len(content) // 2], b"", b"no zip"):
        path.write_bytes(damaged)
        with pytest.raises(ArtefactError, match="damaged"):
            train(again, problem())
    path.unlink()
    with pytest.raises(ArtefactError, match="no checkpoint"):
        train(again, problem())


def test_configurations_are_checked() -> None:
    with pytest.raises(SpecError):
        TrainConfig(algo="bandit:ucb,discount=2").check()
    with pytest.raises(AsscError):
        TrainConfig(backend="live", mode="gumbel", temperature=float("nan")).check()
    assert TrainConfig(mode="gumbel").sampling_temperature == 1.0


def test_a_run_directory_that_cannot_be_made_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    arguments = [
        "--backend",
        "live",
        "--pair",
        "tiny",
        "--eval-requests",
        "0",
        "--run-dir",
        str(tmp_path / "file" / "run"),
    ]
    assert train_policy.main(arguments) == 2
    assert "cannot be made" in capsys.readouterr().err.splitlines()[-1]
