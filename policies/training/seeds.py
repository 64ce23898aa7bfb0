"""Several seeds of one training run: a process and a folder for each, within the core budget, and a summary."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from scipy.special import stdtrit

from assc.cli import EXIT_INTERRUPTED
from assc.errors import AsscError, RequestError
from assc.files import write_json
from assc.hardware import usable_cores
from assc.manifest import finish_run
from policies.training.checkpoint import CHECKPOINT_FILE
from policies.training.config import TrainConfig
from policies.training.imitated import check_problem
from policies.training.job import group_folder, is_finished, say
from policies.training.report import EVAL_FILE
from policies.training.setup import replay_problem

SUMMARY_FILE = "summary.json"
OF_THE_GROUP = ("run_dir", "resume", "seed", "seeds", "jobs", "sweep", "sweep_timesteps", "progress")
"""fields that a child does not inherit"""
CHILD = "import sys; from train_policy import main; sys.exit(main())"


def train_seeds(config: TrainConfig) -> int:
    """Train every seed of `config.seeds`, then summarise; 130 after Ctrl-C, 1 if a seed failed.

    A killed or stopped group goes on with `--resume DIR`: finished seeds are kept, others go on from their checkpoints.
    """
    config.check()
    cores = usable_cores()
    jobs = min(cores, len(config.seeds)) if config.jobs is None else config.jobs
    if jobs > cores:
        raise RequestError(f"--jobs is at most {cores}, the cores this process may use, got {jobs}")
    if config.backend == "replay" and config.resume is None:  # not in each child, when folders have been made
        check_problem(config, replay_problem(config))
    folder = group_folder(config, seeds={"seeds": list(config.seeds)})
    waiting = [seed for seed in config.seeds if not is_finished(config, folder / f"seed-{seed}")]
    say(f"Training {config.algo} with seeds {_listed(config.seeds)} in {folder}, {min(jobs, len(waiting))} at a time …")
    failed = _play(config, folder, waiting, jobs)
    if failed is None:
        say(f"Stopped. To go on: python train_policy.py --resume {folder}")
        return EXIT_INTERRUPTED
    summary = summarise(config, folder)
    if summary is not None:
        write_json(folder / SUMMARY_FILE, summary)
        say(describe(summary))
    finish_run(folder, complete=not failed)
    for seed in failed:
        say(f"Seed {seed} failed: {_last_line(folder / f'seed-{seed}.log')}")
    return 1 if failed else 0


def _listed(seeds: Sequence[int]) -> str:
    return " ".join(map(str, seeds))


@dataclass
class _Child:
    seed: int
    process: subprocess.Popen[bytes]
    log: IO[bytes]


def _play(config: TrainConfig, folder: Path, waiting: list[int], jobs: int) -> list[int] | None:
    """Run the seeds, `jobs` at a time; the seeds that failed, or None after Ctrl-C."""
    running: list[_Child] = []
    failed: list[int] = []
    waiting = list(waiting)
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(_start(config, folder, waiting.pop(0), jobs))
            time.sleep(0.1)
            for child in [c for c in running if c.process.poll() is not None]:
                running.remove(child)
                child.log.close()
                done = child.process.returncode == 0
                say(f"  seed {child.seed} {'is done' if done else 'FAILED'}")
                failed += [] if done else [child.seed]
    except KeyboardInterrupt:
        for child in running:  # they have a process group of their own: the terminal's Ctrl-C reached only us
            child.process.send_signal(signal.SIGINT)
        say("Ctrl-C: each seed saves a checkpoint …")
        for child in running:
            child.process.wait()
        return None
    finally:
        for child in running:
            if child.process.poll() is None:
                child.process.kill()
            child.log.close()
    return failed


def _start(config: TrainConfig, folder: Path, seed: int, jobs: int) -> _Child:
    run_dir = folder / f"seed-{seed}"
    log = (folder / f"seed-{seed}.log").open("ab")
    _lock(log, seed)
    if (run_dir / CHECKPOINT_FILE).is_file():
        words = ["--resume", str(run_dir), *_words(config, only_free=True)]
    else:
        if run_dir.exists():  # killed before its first checkpoint: nothing is lost
            run_dir.rename(folder / f"seed-{seed}.cut-{time.time_ns()}")
        words = ["--run-dir", str(run_dir), "--seed", str(seed), *_words(config)]
    root = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))}
    environment.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // jobs)))
    command = [sys.executable, "-c", CHILD, *words, "--progress", "False"]
    process = subprocess.Popen(
        command,
        stdout=log,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
        pass_fds=(log.fileno(),) if os.name == "posix" else (),
    )
    return _Child(seed, process, log)


def _lock(log: IO[bytes], seed: int) -> None:
    """Hold the log as long as the child lives, also where the parent was killed: no two write into one folder."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        return
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        log.close()
        raise AsscError(f"seed {seed} is still being trained by a process of an earlier start; wait for it") from None


def _words(config: TrainConfig, *, only_free: bool = False) -> list[str]:
    """The command line of a child: what differs from the defaults."""
    words: list[str] = []
    for field in dataclasses.fields(TrainConfig):
        value = getattr(config, field.name)
        free = field.name in ("total_timesteps", "eval_requests")
        if field.name in OF_THE_GROUP or value == field.default or (only_free and not free):
            continue
        words.append("--" + field.name.replace("_", "-"))
        if isinstance(value, tuple):
            words += map(str, value)
        elif not isinstance(value, bool):
            words.append(str(value))
    return words


def summarise(config: TrainConfig, folder: Path) -> dict[str, Any] | None:
    """Speed-up and oracle fraction of the trained policy over the finished seeds; None where nothing was compared.

    The interval is Student's over seeds, on the same held-out requests: it says how far another seed may land, nothing
    about other requests. Baselines are the rows of the first seed.
    """
    found: dict[int, dict[str, Any]] = {}
    others: dict[str, float] = {}
    for seed in config.seeds:
        path = folder / f"seed-{seed}" / EVAL_FILE
        if not path.is_file():
            continue
        result = json.loads(path.read_text(encoding="utf-8"))
        rows = {row["policy"]: row for row in result["rows"]}
        trained = result["meta"]["trained"]
        found[seed] = {key: rows[trained][key] for key in ("speedup", "speedup_ci95", "oracle_fraction", "mean_k")}
        others = others or {name: row["speedup"] for name, row in rows.items() if name != trained}
    if not found:
        return None
    speeds = [one["speedup"] for one in found.values()]
    fractions = [one["oracle_fraction"] for one in found.values() if one["oracle_fraction"] is not None]
    return {
        "algo": config.algo,
        "set": list(config.set),
        "seeds": {str(seed): one for seed, one in found.items()},
        "missing": [seed for seed in config.seeds if seed not in found],
        "speedup": over_seeds(speeds),
        "oracle_fraction": over_seeds(fractions),
        "baselines": others,
    }


def over_seeds(values: Sequence[float]) -> dict[str, Any] | None:
    """Mean, standard deviation, extremes and the 95 % interval of the mean (Student's t; null for fewer than two).

    >>> over_seeds([1.0, 1.2])["mean"]
    1.1
    """
    if not values:
        return None
    n, mean = len(values), float(np.mean(values))
    deviation = float(np.std(values, ddof=1)) if n > 1 else None
    half = None if deviation is None else float(stdtrit(n - 1, 0.975)) * deviation / math.sqrt(n)
    interval = [None, None] if half is None else [mean - half, mean + half]
    extremes = {"min": min(values), "max": max(values)}
    return {"mean": mean, "ci95": interval, "deviation": deviation, **extremes, "seeds": n}


def describe(summary: dict[str, Any]) -> str:
    """The summary for people."""
    s = summary["speedup"]
    low, high = s["ci95"]
    between = "" if low is None else f", 95 % interval over seeds {low:.3f} to {high:.3f}"
    lines = [f"{summary['algo']}: {s['mean']:.3f}x over {s['seeds']} seeds{between} ({s['min']:.3f} to {s['max']:.3f})"]
    lines += [f"  seed {seed}: {one['speedup']:.3f}x" for seed, one in summary["seeds"].items()]
    lines += [f"  {name}: {speed:.3f}x" for name, speed in summary["baselines"].items()]
    return "\n".join(lines)


def _last_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines() if path.is_file() else []
    return lines[-1] if lines else f"it said nothing, see {path}"
