"""The comparison after training: the trained policy beside its baselines on held-out requests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from assc.core import Backend, Policy, Request, Totals
from assc.evaluate import evaluate
from assc.registry import make_policy
from assc.results import Evaluation
from assc.run import run_request
from assc.tables import print_evaluation
from policies.train_config import TrainConfig
from policies.train_setup import Problem

EVAL_FILE = "eval.json"
TUNE_REQUESTS = 4
TUNE_K = (2, 4, 8, 16)
"""K of the sweep for the best static K: coarse, since it is paid for in decoding"""


def tune_static(backend: Backend, requests: Sequence[Request]) -> int:
    """The K with the most tokens per second on these (train) requests, pooled."""
    k_max = backend.table.k_max
    speeds: dict[int, float] = {}
    for k in [k for k in TUNE_K if k <= k_max] or [k_max]:
        policy, totals = make_policy(f"static:{k}"), Totals()
        for request in requests:
            totals = totals + Totals.of(run_request(backend, request, policy).rounds)
        speeds[k] = totals.tokens_per_second or 0.0
    return max(speeds, key=lambda k: speeds[k])


def contestants(table_k_max: int, tuned: int | None, trained: Path, seed: int) -> list[tuple[str, Policy]]:
    """Label and policy of each row of the comparison."""
    static = min(4, table_k_max)
    specs = {"ar": "ar", f"static:{static}": f"static:{static}"}
    specs = {label: spec for label, spec in specs.items() if spec != f"static:{tuned}"}
    if tuned is not None:
        specs[f"static:{tuned} (tuned)"] = f"static:{tuned}"
    specs |= {name: name for name in ("assc", "bandit:ucb", str(trained))}
    return [(label, make_policy(spec, seed=seed)) for label, spec in specs.items()]


def compare(config: TrainConfig, problem: Problem, run_dir: Path, trained: Path) -> Evaluation:
    """Tune the static K on train requests, compare all on held-out ones, print the table and write `eval.json`."""
    backend = problem.eval_backend
    tuned = None
    if problem.tune:
        print(f"Tuning a static K on {len(problem.tune)} train requests …", flush=True)
        tuned = tune_static(problem.backend, problem.tune)
    policies = contestants(backend.table.k_max, tuned, trained, config.seed)
    print(
        f"Comparing {len(policies)} policies on {len(problem.held_out)} held-out requests, "
        f"interleaved ({backend.time_source} seconds) …",
        flush=True,
    )
    evaluation = evaluate(
        backend,
        problem.held_out,
        policies,
        seed=config.seed,
        progress=config.progress,
        meta={"workload": config.workload, "split": "held-out", "trained": str(trained), "static_tuned": tuned},
    )
    evaluation.write(run_dir / EVAL_FILE)
    print_evaluation(evaluation)
    return evaluation
