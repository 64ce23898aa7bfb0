"""The main job: train a policy on a backend, save it, and compare it with baselines on held-out requests."""

from __future__ import annotations

import math
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from assc.errors import RequestError
from assc.files import only_run
from assc.leakage import TrainedOn
from assc.manifest import finish_run, start_run, words_of
from assc.policy_files import POLICY_FILE
from assc.tuning import TUNE_REQUESTS
from policies.artefact import read_artefact, save_policy
from policies.sb3_adapter import export_sb3
from policies.training.accept_fit import AcceptRun
from policies.training.checkpoint import (
    CHECKPOINT_FILE,
    Checkpoint,
    generator_states,
    read_checkpoint,
    restore_generators,
)
from policies.training.config import SB3_ALGORITHMS, TrainConfig, check_resumable, stored_config, write_config
from policies.training.imitated import check_problem, rule_of
from policies.training.log import TENSORBOARD_DIR, Interrupt, TrainingLog
from policies.training.online import OnlineRun
from policies.training.progress import draw_progress, log_held_out
from policies.training.report import EVAL_FILE, check_live, compare, next_commands
from policies.training.sb3 import Sb3Run, rollout_of
from policies.training.setup import (
    COSTS_FILE,
    Problem,
    costs_changed,
    files_of,
    live_problem,
    replay_problem,
    write_costs,
)

INTERRUPTED = 130


def train(config: TrainConfig, problem: Problem | None = None) -> int:
    """Run the whole job and return the exit code; `problem` replaces the live models and the workload.

    Raises an `AsscError` for what the user can mend. Global random generators are left as they were.
    """
    config.check()
    run_dir, checkpoint = _open(config)
    trained = checkpoint is not None and _trained(config, run_dir, checkpoint)
    if trained and is_finished(config, run_dir):
        return 0
    if config.resume is not None and config.backend == "replay" and costs_changed(config, run_dir):
        config = replace(config, cost=run_dir / COSTS_FILE)
        say(f"The cost model of {run_dir} is not the one that the package has now: the run keeps its own.")
    if problem is None:
        problem = _problem(config, run_dir)
    check_problem(config, problem, None if checkpoint is None else checkpoint.state)
    if not trained and not _learned(config, problem, run_dir, checkpoint):
        say(f"Stopped. To go on: python train_policy.py --resume {shlex.quote(str(run_dir))}")
        return INTERRUPTED
    try:
        if config.eval_requests != 0:
            evaluation = compare(config, problem, run_dir, run_dir / POLICY_FILE)
            log_held_out(evaluation, config, run_dir, read_checkpoint(run_dir).steps)
            check_live(config, problem, run_dir, run_dir / POLICY_FILE)
    except KeyboardInterrupt:
        say("\nThe comparison was stopped; training is complete.")
        say(next_commands(config, problem, run_dir))
        return INTERRUPTED
    say(next_commands(config, problem, run_dir))
    return 0


def _learned(config: TrainConfig, problem: Problem, run_dir: Path, checkpoint: Checkpoint | None) -> bool:
    """Make the run directory unless the run is resumed, train, and complete the manifest; False after Ctrl-C."""
    if config.resume is None:
        _make(run_dir)
        write_config(replace(config, run_dir=run_dir), run_dir, {"description": problem.description})
        start_run(run_dir, "train", config, seeds={"seed": config.seed}, data=problem.data)
    if problem.costs is not None:
        write_costs(run_dir, problem.costs)
    with only_run(run_dir), generators_kept():
        try:
            complete = learn(config, problem, run_dir, checkpoint)
        except KeyboardInterrupt:  # before the first round, or a second Ctrl-C: the checkpoint, if any, is whole
            return False
    finish_run(run_dir, complete=complete, words=words_of(config, ("resume",)))
    return complete


def is_finished(config: TrainConfig, run_dir: Path) -> bool:
    """Whether the rounds that are asked for are done, and their policy was saved and (where asked for) compared."""
    done = _saved_rounds(run_dir)
    if (run_dir / CHECKPOINT_FILE).is_file():  # Ctrl-C in mid-request: the policy is ahead of its checkpoint
        done = min(done, read_checkpoint(run_dir).steps)
    if done < config.rounds:
        return False
    policy, result = run_dir / POLICY_FILE, run_dir / EVAL_FILE
    return config.eval_requests == 0 or (result.is_file() and result.stat().st_mtime >= policy.stat().st_mtime)


def _saved_rounds(run_dir: Path) -> int:
    """Rounds that the saved policy has learned from, 0 without one."""
    path = run_dir / POLICY_FILE
    return int(read_artefact(path).meta["training"]["rounds"]) if path.is_file() else 0


def _trained(config: TrainConfig, run_dir: Path, checkpoint: Checkpoint) -> bool:
    """Whether all rounds that a resumed run asks for are done and their policy is saved; then it says so.

    `RequestError` where fewer are asked for than the run was started with: its result is not to be made again.
    """
    done, first = checkpoint.steps, stored_config(run_dir).rounds
    if config.rounds < min(first, done):
        raise RequestError(
            f"{run_dir} has done {done} rounds, --total-timesteps {config.rounds} cannot take any back; give more, or "
            "start a new run"
        )
    if done < config.rounds or _saved_rounds(run_dir) != done:
        return False
    say(f"{run_dir} has done {done} rounds, {config.rounds} were asked for: nothing is left to train.")
    return True


def _problem(config: TrainConfig, run_dir: Path) -> Problem:
    """What to play on, read or loaded. A resumed live run keeps the costs that were fitted when it began."""
    if config.backend == "replay":
        say(f"Reading {config.traces or 'the packaged trace'} (modelled seconds, no model is needed) …")
        return replay_problem(config)
    if config.resume is not None and config.cost is None and (run_dir / COSTS_FILE).is_file():
        config = replace(config, cost=run_dir / COSTS_FILE)
    say(f"Loading {config.target or config.pair} and workload {config.workload} ({config.time_source} seconds) …")
    return live_problem(config, tune_requests=0 if config.eval_requests == 0 else TUNE_REQUESTS)


def say(text: str) -> None:
    """Print a sentence at once."""
    print(text, flush=True)


def _open(config: TrainConfig) -> tuple[Path, Checkpoint | None]:
    """The run directory, and the checkpoint to go on from when the run is resumed."""
    if config.resume is not None:
        if config.run_dir is not None:
            raise RequestError("--resume goes on in its own directory; leave --run-dir out")
        check_resumable(config, stored_config(config.resume))
        if any((config.resume / name).is_file() for name in (CHECKPOINT_FILE, POLICY_FILE)):
            return config.resume, read_checkpoint(config.resume)
        say(f"{config.resume} was stopped before its first checkpoint: it starts from the beginning.")
        shutil.rmtree(config.resume / TENSORBOARD_DIR, ignore_errors=True)  # its curves are drawn again
        return config.resume, None
    return new_run_dir(config), None


def new_run_dir(config: TrainConfig) -> Path:
    """The directory of a new run; `RequestError` for one that exists."""
    if config.run_dir is None:
        played = "replay" if config.backend == "replay" else config.pair
        many = f"-{len(config.seeds)}-seeds" if config.seeds else "-sweep" if config.sweep else ""
        name = f"{config.algo.replace(':', '-').replace(',', '-')}-{played}{many}-{datetime.now():%Y%m%d-%H%M%S}"
        return Path("runs") / name
    if config.run_dir.exists():
        raise RequestError(f"{config.run_dir} exists; give a new --run-dir, or go on with --resume {config.run_dir}")
    return config.run_dir


def group_folder(config: TrainConfig, *, seeds: dict[str, Any]) -> Path:
    """The folder of a group of runs (`seeds`, a sweep): a new one with its configuration, or that to go on in."""
    if config.resume is not None:
        check_resumable(config, stored_config(config.resume))
        return config.resume
    folder = new_run_dir(config)
    _make(folder)
    write_config(replace(config, run_dir=folder), folder, {})
    start_run(folder, "train", config, seeds=seeds, data=files_of(config))
    return folder


def _make(run_dir: Path) -> None:
    try:
        run_dir.mkdir(parents=True)
    except OSError as error:
        raise RequestError(f"the run directory {run_dir} cannot be made ({error.strerror})") from None


@contextmanager
def generators_kept() -> Iterator[None]:
    """Global random generators are afterwards as they were."""
    states = generator_states()
    try:
        yield
    finally:
        restore_generators(states)


def planned_rounds(
    config: TrainConfig, checkpoint: Checkpoint | None = None, *, vectorised: bool = False, cloned: bool = False
) -> int:
    """Rounds that will have been done at the end: on-policy learners finish the rollout they are in."""
    if config.algo not in SB3_ALGORITHMS:
        return config.rounds
    done = checkpoint.steps if checkpoint is not None else 0
    rollout = rollout_of(config, vectorised=vectorised, checkpoint=checkpoint, cloned=cloned).rounds
    return done + math.ceil(max(0, config.rounds - done) / rollout) * rollout


def learn(config: TrainConfig, problem: Problem, run_dir: Path, checkpoint: Checkpoint | None) -> bool:
    """Train, save the policy, and say what was done. False when Ctrl-C stopped it."""
    done = checkpoint.steps if checkpoint is not None else 0
    vectorised = problem.trace is not None
    cloned = rule_of(config, problem.backend.table) is not None
    planned = planned_rounds(config, checkpoint, vectorised=vectorised, cloned=cloned)
    _say_plan(config, problem, planned, done, run_dir)
    resumed_at = done if checkpoint is not None else None
    log = TrainingLog(
        run_dir, planned, name=config.curve_name, unit=config.unit, resumed_at=resumed_at, progress=config.progress
    )
    try:
        draw_progress(config, problem, run_dir, log, resumed_at)
        run: Sb3Run | OnlineRun | AcceptRun
        if config.algo in SB3_ALGORITHMS:
            rollout = rollout_of(config, vectorised=vectorised, checkpoint=checkpoint, cloned=cloned)
            run = Sb3Run(config, problem.play(config, rollout.lanes), rollout, log, checkpoint)
            if checkpoint is None and (rule := run.imitate(problem.backend, problem.train)):
                say(f"The network begins as {rule}.")
        elif config.fitted:
            run = AcceptRun(config, problem.backend, problem.train, log, checkpoint)
        else:
            run = OnlineRun(config, problem.backend, problem.train, log, checkpoint)
            if checkpoint is None and problem.trace is not None:
                learned = run.learn_from(problem.trace.select(problem.train_rows))
                if learned:
                    say(f"Learned from {learned} drafted tokens of the trace.")
        with Interrupt() as interrupt:
            finished = run.train(interrupt, run_dir)
        path = _save(config, problem, run, run_dir)
    finally:
        log.close()
    if finished and run.updates == 0 and not (isinstance(run, OnlineRun) and run.frozen):
        few = f"{run.steps} {config.unit}s were too few for a single update"
        say(f"Warning: {few}, so the policy is still the random one.")
    speed = log.totals.tokens_per_second
    pace = f", {speed:.1f} tokens/s while exploring ({problem.backend.time_source} seconds)" if speed else ""
    say(f"{run.steps} {config.unit}s done{pace}, {run.updates} updates; policy saved as {path}.")
    return finished


def _say_plan(config: TrainConfig, problem: Problem, planned: int, done: int, run_dir: Path) -> None:
    asked = "" if planned == config.rounds else f" ({config.rounds} asked for, whole rollouts played)"
    start = f"Resuming {config.algo} at {config.unit} {done}" if done else f"Training {config.algo}"
    say(
        f"{start}, up to {config.unit} {planned}{asked}: {len(problem.train)} train requests, "
        f"{len(problem.backend.table)} actions "
        f"{problem.backend.table.describe()}, c = {problem.backend.cost_ratio:.3f}, in {run_dir}."
    )


def _save(config: TrainConfig, problem: Problem, run: Sb3Run | OnlineRun | AcceptRun, run_dir: Path) -> Path:
    before = run.before if isinstance(run, Sb3Run) else TrainedOn()
    known = None if before is None else TrainedOn.of(problem.train, problem.workload_hash) | before
    meta: dict[str, Any] = {
        "mode": problem.backend.mode,
        "c": problem.backend.cost_ratio,
        "pair": problem.description.get("pair") or config.pair,
        **({} if known is None else {"trained_on": known.to_json()}),
        "training": {"rounds": run.steps, "updates": run.updates, **config.to_json()},
    }
    path = run_dir / POLICY_FILE
    if isinstance(run, Sb3Run):
        played = run.play
        return export_sb3(
            run.model,
            run.venv,
            path=path,
            featurizer=played.featurizer,
            table=played.table,
            meta=meta,
            opening=played.opening,
        )
    return save_policy(path, run.policy, table=problem.backend.table, meta=meta)
