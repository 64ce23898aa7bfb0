"""The comparison after training: the trained policy beside its baselines on held-out requests."""

from __future__ import annotations

import shlex
from pathlib import Path

from assc.catalogue import PAIRS
from assc.core import Policy
from assc.errors import AsscError
from assc.eval_config import Config
from assc.eval_job import ORACLE, play
from assc.eval_replay import replay_job
from assc.evaluate import evaluate
from assc.files import write_json
from assc.live_check import LiveCheck, held_out_rows, live_backend, live_check
from assc.policy_files import POLICY_FILE
from assc.registry import make_policy, policy_names
from assc.results import Evaluation
from assc.sources import availability
from assc.tables import print_evaluation
from assc.tuning import static_spec, tune_static
from policies.training.config import TrainConfig
from policies.training.imitated import rule_of
from policies.training.log import TENSORBOARD_DIR
from policies.training.setup import CHOICE_SEED, Problem

EVAL_FILE = "eval.json"
LIVE_FILE = "live.json"
SHOWN_REQUESTS = 2
"""requests whose rounds are kept for `python -m assc report`"""


def contestants(table_k_max: int, tuned: str | None, trained: Path, seed: int) -> list[tuple[str, Policy]]:
    """Label and policy of each row of the comparison; `tuned` is the spec of the tuned static action."""
    static = min(4, table_k_max)
    specs = {"ar": "ar", f"static:{static}": f"static:{static}"}
    specs = {label: spec for label, spec in specs.items() if spec != tuned}
    if tuned is not None:
        specs[f"{tuned} (tuned)"] = tuned
    specs |= {name: name for name in ("assc", "bandit:ucb", str(trained))}
    return [(label, make_policy(spec, seed=seed)) for label, spec in specs.items()]


REPLAY_POLICIES = ("ar", "static:tuned", "assc", "threshold", "bandit:ucb", "cascade:tuned")
"""rows of the ladder between plain decoding and the optimum"""


def compare_on_trace(config: TrainConfig, problem: Problem, trained: Path) -> Evaluation:
    """The ladder on held-out requests of the trace, in modelled seconds; a clone is set against what it began as."""
    known = [spec for spec in REPLAY_POLICIES if spec.partition(":")[0] in policy_names()]
    rule = rule_of(config, problem.backend.table)
    job_config = Config(
        policies=(*known, str(trained), ORACLE),
        against=rule if rule in known else None,
        backend="replay",
        traces=config.traces,
        cost=config.cost,
        requests=config.eval_requests,
        seed=config.seed,
        rounds=SHOWN_REQUESTS,
    )
    job = replay_job(job_config, choice=CHOICE_SEED)
    evaluation = play(job_config, job)
    evaluation.meta["trained"] = str(trained)
    evaluation.kept = job.keep(SHOWN_REQUESTS)
    return evaluation


def check_live(config: TrainConfig, problem: Problem, run_dir: Path, trained: Path) -> LiveCheck | None:
    """Play the policy on the live decoder where that was asked for, or where the models are at hand."""
    if not config.live_requests or problem.trace is None or problem.costs is None:
        return None
    if not config.live_check and not _at_hand(config.pair):
        print(f"The models of {config.pair} are not on this machine: no live check (--live-check fetches them).")
        return None
    recorded = problem.trace.header.pair
    if not config.live_check and recorded not in ("", config.pair):
        print(f"The trace is of the pair {recorded}, not of {config.pair}: no live check.")
        return None
    try:
        print(f"Checking {config.live_requests} held-out requests on the live decoder …", flush=True)
        trace, costs = problem.trace, problem.costs
        live = live_backend(trace, costs, config.pair, threads=config.threads)
        requests = trace.requests(held_out_rows(trace, config.live_requests, config.seed))
        found = live_check(live, trace, costs, str(trained), requests, seed=config.seed)
    except AsscError as error:
        if config.live_check:
            raise
        print(f"No live check: {error}")
        return None
    write_json(run_dir / LIVE_FILE, found.to_json())
    print(found)
    return found


def _at_hand(pair: str) -> bool:
    """Whether the pair's models are on this machine."""
    spec = PAIRS.get(pair)
    return spec is not None and all(availability(s).found for s in (spec.target, *spec.drafts.values()))


def compare(config: TrainConfig, problem: Problem, run_dir: Path, trained: Path) -> Evaluation:
    """Compare with baselines on held-out requests, print the table and write `eval.json`."""
    on_trace = problem.trace is not None
    evaluation = compare_on_trace(config, problem, trained) if on_trace else compare_live(config, problem, trained)
    evaluation.write(run_dir / EVAL_FILE)
    print_evaluation(evaluation)
    return evaluation


def compare_live(config: TrainConfig, problem: Problem, trained: Path) -> Evaluation:
    """Tune a static action on train requests and compare all on held-out ones."""
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
    return evaluate(
        backend,
        problem.held_out,
        policies,
        seed=config.seed,
        progress=config.progress,
        meta={"workload": config.workload, "split": "held-out", "trained": str(trained), "static_tuned": tuned},
    )


def next_commands(config: TrainConfig, problem: Problem, run_dir: Path) -> str:
    """The two commands that follow a training run, one per line."""
    quoted = shlex.quote(str(run_dir))
    parts = [f"python eval.py --backend {config.backend}"]
    if config.backend == "replay":
        parts += [f"--{n} {shlex.quote(str(v))}" for n in ("traces", "cost") if (v := getattr(config, n)) is not None]
        specs = "ar static:tuned assc threshold bandit:ucb cascade:tuned oracle"
    else:
        parts += [f"--pair {config.pair} --workload {config.workload}"]
        parts += [] if config.target is None else [f"--target {config.target}"]
        parts += [f"--draft {' '.join(config.draft)}"] if config.draft else []
        if config.mode != "greedy":
            parts.append(f"--mode {config.mode} --temperature {config.sampling_temperature:g}")
        specs = f"ar static:{min(4, problem.backend.table.k_max)} assc bandit:ucb"
    compared = f"{' '.join(parts)} --policies {specs} {quoted}/{POLICY_FILE} --json {quoted}/out.json"
    return "\n".join(["Next:", f"  tensorboard --logdir {quoted}/{TENSORBOARD_DIR}", f"  {compared}"])
