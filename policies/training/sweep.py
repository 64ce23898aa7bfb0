"""A sweep over hyperparameters with Optuna: tuned on a part of the train requests, evaluated once on held-out ones."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from assc.cli import EXIT_INTERRUPTED
from assc.core import Request, Totals
from assc.errors import AsscError, RequestError
from assc.files import write_json
from assc.manifest import finish_run
from assc.policy_files import POLICY_FILE
from assc.registry import make_policy
from assc.run import run_request
from policies.training.checkpoint import CHECKPOINT_FILE
from policies.training.config import CONFIG_FILE, TrainConfig, stored_config, write_config
from policies.training.imitated import check_problem
from policies.training.job import generators_kept, group_folder, learn, say, train
from policies.training.seeds import train_seeds
from policies.training.settings import SPACES, with_settings
from policies.training.setup import Problem, replay_problem

STORAGE, RESULT, STUDY = "sweep.db", "sweep.json", "sweep"
VALIDATION = 4
"""one of so many train prompts is kept for validation"""


def require_optuna() -> None:
    """`AsscError` where Optuna is not installed."""
    if find_spec("optuna") is None:
        raise AsscError("--sweep needs the package optuna: pip install 'assc[sweep]'")


def inner_split(requests: Sequence[Request], seed: int) -> tuple[list[Request], list[Request]]:
    """Train requests apart into an inner train and a validation part that share no prompt (id)."""
    ids = sorted({r.id for r in requests})
    if len(ids) < 2:
        raise RequestError(f"a sweep needs at least 2 different train prompts to split, this trace has {len(ids)}")
    order = np.random.default_rng(seed).permutation(len(ids))
    chosen = {ids[i] for i in order[: max(1, len(ids) // VALIDATION)]}
    return [r for r in requests if r.id not in chosen], [r for r in requests if r.id in chosen]


def sweep(config: TrainConfig) -> int:
    """Try `config.sweep` settings, train with the best on all train requests, compare once on held-out; an exit code.

    The study is a sqlite file in the run folder: `--resume DIR` goes on after Ctrl-C or a kill, which lose the trial
    under way. A resumed sweep tries other settings than one that was never stopped.
    """
    require_optuna()
    config.check()
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    problem = replay_problem(config)
    train_part, validation = inner_split(problem.train, config.seed)
    check_problem(config, problem)
    folder = group_folder(config, seeds={"seed": config.seed})
    inner = replace(problem, train=train_part, held_out=())
    storage = f"sqlite:///{folder / STORAGE}"
    study = optuna.create_study(storage=storage, study_name=STUDY, direction="maximize", load_if_exists=True)
    complete, dead = optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.FAIL
    for trial in study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,)):
        study.tell(trial.number, state=dead)  # of a process that was killed
    study.sampler = optuna.samplers.TPESampler(seed=config.seed + len(study.trials))
    plain = _speed(inner, validation, "ar", config.seed)

    def objective(trial: Any) -> float:
        algo, words = with_settings(config.algo, config.set, SPACES[config.algo.partition(":")[0]](trial))
        steps = config.sweep_timesteps or config.total_timesteps
        one = replace(
            config, algo=algo, set=words, total_timesteps=steps, progress=False, sweep=None, seeds=(), curve_every=0
        )
        run_dir = folder / "trials" / f"{trial.number:03}"
        shutil.rmtree(run_dir, ignore_errors=True)
        run_dir.mkdir(parents=True)
        write_config(replace(one, run_dir=run_dir), run_dir, {})
        trial.set_user_attr("algo", algo)
        trial.set_user_attr("set", list(words))
        with generators_kept():
            finished = learn(one, inner, run_dir, None)
        if not finished:
            raise KeyboardInterrupt
        speed = _speed(inner, validation, str(run_dir / POLICY_FILE), config.seed) / plain
        say(f"  trial {trial.number}: {speed:.3f}x on {len(validation)} validation requests: {algo} {' '.join(words)}")
        return speed

    done = len(study.get_trials(deepcopy=False, states=(complete,)))
    say(f"Sweeping {config.algo}: {config.sweep} trials ({done} done), {len(train_part)} train requests, in {folder} …")
    try:
        while (done := len(study.get_trials(deepcopy=False, states=(complete,)))) < (config.sweep or 0):
            study.optimize(objective, n_trials=1)
    except KeyboardInterrupt:
        say(f"Stopped after {done} trials. To go on: python train_policy.py --resume {folder}")
        return EXIT_INTERRUPTED
    return _refit(config, folder, study)


def _refit(config: TrainConfig, folder: Path, study: Any) -> int:
    best = study.best_trial
    algo, words = best.user_attrs["algo"], tuple(best.user_attrs["set"])
    trials = [
        {"number": t.number, "state": t.state.name, "speedup": t.value, "params": t.params} for t in study.get_trials()
    ]
    write_json(folder / RESULT, {"best": {"algo": algo, "set": list(words), "speedup": best.value}, "trials": trials})
    say(f"Best of {len(trials)}: {best.value:.3f}x (inner validation): --algo {algo} --set {' '.join(words)}")
    target = folder / "best"
    set_aside(target, algo, words)
    final = replace(config, algo=algo, set=words, sweep=None, sweep_timesteps=None, run_dir=target, resume=None)
    if (target / CHECKPOINT_FILE).is_file() or (config.seeds and (target / CONFIG_FILE).is_file()):
        final = replace(final, resume=target, run_dir=None)
    else:
        shutil.rmtree(target, ignore_errors=True)  # killed before its first checkpoint
    code = train_seeds(final) if final.seeds else train(final)
    finish_run(folder, complete=code == 0)
    return code


def set_aside(target: Path, algo: str, words: tuple[str, ...]) -> None:
    """Keep the best of an earlier, shorter sweep under another name where more trials found other settings."""
    if (target / CONFIG_FILE).is_file():
        before = stored_config(target)
        if (before.algo, before.set) != (algo, words):
            number = 1 + sum(1 for _ in target.parent.glob(f"{target.name}-before-*"))
            target.rename(target.with_name(f"{target.name}-before-{number}"))


def _speed(problem: Problem, requests: Sequence[Request], spec: str, seed: int) -> float:
    """Σtokens / Σseconds of a policy on these requests."""
    policy = make_policy(spec, seed=seed)
    totals = sum((Totals.of(run_request(problem.backend, r, policy).rounds) for r in requests), Totals())
    return totals.tokens / totals.seconds
