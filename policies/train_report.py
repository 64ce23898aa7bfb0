"""The comparison after training: the trained policy beside its baselines on held-out requests."""

from __future__ import annotations

from pathlib import Path

from assc.core import Policy
from assc.evaluate import evaluate
from assc.registry import make_policy
from assc.results import Evaluation
from assc.tables import print_evaluation
from assc.tuning import static_spec, tune_static
from policies.train_config import TrainConfig
from policies.train_setup import Problem

EVAL_FILE = "eval.json"


def contestants(table_k_max: int, tuned: str | None, trained: Path, seed: int) -> list[tuple[str, Policy]]:
    """Label and policy of each row of the comparison; `tuned` is the spec of the tuned static action."""
    static = min(4, table_k_max)
    specs = {"ar": "ar", f"static:{static}": f"static:{static}"}
    specs = {label: spec for label, spec in specs.items() if spec != tuned}
    if tuned is not None:
        specs[f"{tuned} (tuned)"] = tuned
    specs |= {name: name for name in ("assc", "bandit:ucb", str(trained))}
    return [(label, make_policy(spec, seed=seed)) for label, spec in specs.items()]


def compare(config: TrainConfig, problem: Problem, run_dir: Path, trained: Path) -> Evaluation:
    """Tune a static action on train requests, compare all on held-out ones, print the table and write `eval.json`."""
    backend = problem.eval_backend
    tuned = None
    if problem.tune:
        print(f"Tuning a static action on {len(problem.tune)} train requests …", flush=True)
        tuned = static_spec(tune_static(problem.backend, problem.tune), backend.table)
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
