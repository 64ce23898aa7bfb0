"""What eval.py plays, prepared by `eval_live` or `eval_replay`, and the loop that plays it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assc.cli import say
from assc.core import Backend, Policy, Request
from assc.errors import ArtefactError
from assc.eval_config import TUNED, Config, without_alias
from assc.evaluate import evaluate
from assc.leakage import Leak, TrainedOn, check_leaks, leaked_counts, policy_leaks, told
from assc.oracle import Ladder
from assc.registry import make_policy
from assc.results import Evaluation, EvaluationInterrupted, unique_labels
from assc.rounds_json import EntropiesOf, KeptRounds, TextOf, spread
from assc.rule_tuning import grid_of, is_tuned_rule

if TYPE_CHECKING:
    from assc.tb_eval import EvaluationWriter

ORACLE = "oracle"
"""the hindsight optimum of a trace"""
SAVED = "policy.zip"
"""the finished policy in a run directory of train_policy.py"""

Listed = Sequence[tuple[str, Policy | None]]


@dataclass(frozen=True)
class Job:
    """Everything an evaluation needs. `meta` goes into the result file, after what the backend says of itself."""

    backend: Backend
    requests: Sequence[Request]
    policies: Sequence[tuple[str, Policy]]
    warmup: int
    meta: Mapping[str, Any]
    actions: Mapping[str, str] = field(default_factory=dict)
    """policy -> the action that tuning chose for it"""
    ladder: Ladder | None = None
    """rungs for the same requests, where there is a trace"""
    token_text: TextOf | None = None
    """text of one token id, where there is a tokenizer"""
    entropies: EntropiesOf | None = None
    """the target's entropy at each token of a request, where there is a trace"""
    leaked: Mapping[str, int] = field(default_factory=dict)
    """label -> requests from which it has learned, where that was allowed"""
    data: Mapping[str, str | Path | None] = field(default_factory=dict)
    """files that were read, for the manifest"""

    def keep(self, requests: int) -> KeptRounds | None:
        """What of this job's rounds goes into the result file."""
        return KeptRounds(requests, self.token_text, self.entropies) if requests else None


def policy_spec(given: str) -> str:
    """What `make_policy` takes: without an alias, and the policy.zip of a run directory.

    Raises `ArtefactError` for a directory in which no training has finished.
    """
    spec = without_alias(given)
    if os.sep not in spec or not Path(spec).is_dir():
        return spec
    saved = Path(spec) / SAVED
    if not saved.is_file():
        what = f"has no {SAVED}: no training has finished in it" if any(Path(spec).iterdir()) else "is empty"
        raise ArtefactError(f"the run directory {spec!r} {what}")
    return str(saved)


def listed_policies(config: Config) -> Listed:
    """Label and policy of each row; None for what only the backend can make. Raises `SpecError` and `ArtefactError`."""
    seed, special = config.seed, (TUNED, ORACLE)
    specs = [policy_spec(spec) for spec in config.specs]
    for spec in filter(is_tuned_rule, specs):
        grid_of(spec)
    made = [None if spec in special or is_tuned_rule(spec) else make_policy(spec, seed=seed) for spec in specs]
    return list(zip(config.specs, made, strict=True))


def saved_files(config: Config) -> dict[str, str]:
    """label -> file of every saved policy."""
    specs = [policy_spec(spec) for spec in config.specs]
    return {label: spec for label, spec in zip(config.specs, specs, strict=True) if spec.endswith(".zip")}


def complete(listed: Listed, makers: Mapping[str, Callable[[], Policy]]) -> list[tuple[str, Policy]]:
    """The list with the missing policies made, each one anew."""
    return [(label, policy if policy is not None else makers[without_alias(label)]()) for label, policy in listed]


def guarded(
    config: Config,
    policies: Listed,
    requests: Sequence[Request],
    workload_hash: str | None,
    tuned: TrainedOn | None,
    drafts: Sequence[Leak] = (),
) -> tuple[dict[str, int], dict[str, Any]]:
    """The leakage guard: label -> evaluated requests that it has learned from, where that is allowed; `leakage.told`.

    Raises `LeakageError` where it is not. `tuned` is what tuned policies were tuned on, `drafts` are leaks of drafts.
    """
    labels = [label for label in config.bare if label == TUNED or is_tuned_rule(label)]
    by_label = {} if tuned is None else dict.fromkeys(labels, tuned)
    leaks = [*policy_leaks(policies, requests, workload_hash, by_label), *drafts]
    check_leaks(leaks, allowed=config.allow_leakage)
    found = told(policies, requests, workload_hash, by_label, saved_files(config), drafts)
    return leaked_counts(leaks, unique_labels(config.specs)), found


SAME_C = 0.1
"""relative difference of c that is not worth a remark: calibrations differ by as much"""


def remarks(config: Config, policies: Sequence[tuple[str, Policy]], backend: Backend) -> list[str]:
    """What a reader must know of the saved policies: another mode, other costs, training prompts that nobody knows."""
    found = []
    for label, policy in policies:
        if label not in saved_files(config):
            continue
        if getattr(policy, "trained_on", None) is None:
            found.append(f"{label} does not say what it was trained on, so leakage cannot be excluded")
        before = getattr(policy, "trained_mode", None)
        if before not in (None, backend.mode):
            found.append(f"{label} was trained in mode {before}, this evaluation is in mode {backend.mode}")
        c = getattr(policy, "trained_c", None)
        if c is not None and abs(c - backend.cost_ratio) > SAME_C * max(c, backend.cost_ratio):
            found.append(f"{label} was trained at c = {c:.3f}, this evaluation is at c = {backend.cost_ratio:.3f}")
    return found


def play(config: Config, job: Job) -> Evaluation:
    """Compare the policies. Raises `EvaluationInterrupted` on Ctrl-C."""
    names = [spec for spec, _ in job.policies]
    with contextlib.ExitStack() as stack:
        writer = None if config.tensorboard is None else stack.enter_context(_writer(config, job, config.tensorboard))
        if writer is not None:
            say(f"writing curves to {writer.directory} (see them with: tensorboard --logdir {config.tensorboard})")
        say(f"decoding {len(job.requests)} requests with {', '.join(names)} ...")
        try:
            evaluation = evaluate(
                job.backend,
                job.requests,
                job.policies,
                seed=config.seed,
                repeats=config.repeats,
                warmup=job.warmup,
                on_request=None if writer is None else writer.log,
                meta=job.meta,
                actions=job.actions,
                ladder=job.ladder,
                against=config.reference,
                leaked=job.leaked,
            )
        except EvaluationInterrupted as stop:
            _finish(writer, stop.evaluation)
            raise
        held = getattr(job.backend, "memory", None)
        if held is not None:
            evaluation.meta["drafter_memory"] = [asdict(m) for m in held()]
        _finish(writer, evaluation)
        return evaluation


def _writer(config: Config, job: Job, root: Path) -> EvaluationWriter:
    """Curves of this job, with its conditions as the columns of the table "HParams"."""
    from assc.tb_eval import SAMPLES, EvaluationWriter  # imports torch

    names, backend = [spec for spec, _ in job.policies], job.backend
    described: dict[str, Any] = getattr(backend, "describe", dict)()
    shared: dict[str, str | int | float | bool] = {
        "backend": config.backend,
        "pair": str(described.get("pair")),
        "mode": backend.mode,
        "time": backend.time_source,
        "c": backend.cost_ratio,
        "requests": len(job.requests),
        "seed": config.seed,
    }
    saved = saved_files(config)
    kinds = [
        {"kind": "saved" if name in saved else name.partition(":")[0], "action": job.actions.get(name, "")}
        for name in names
    ]
    return EvaluationWriter(
        root,
        unique_labels(names),
        seed=config.seed,
        settings=shared,
        own=kinds,
        samples=spread(job.requests, SAMPLES),
        token_text=job.token_text,
        entropies=job.entropies,
    )


def _finish(writer: EvaluationWriter | None, evaluation: Evaluation) -> None:
    if writer is None:
        return
    try:
        missing = writer.finish(evaluation)
    except (Exception, KeyboardInterrupt) as error:  # the results are not written yet, and matter more than pictures
        missing = f"TensorBoard lacks the table and pictures of the comparison ({error or type(error).__name__})"
    if missing is not None:
        say(missing)
