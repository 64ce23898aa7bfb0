"""What eval.py plays, prepared by `eval_live` or `eval_replay`, and the loop that plays it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assc.cli import say
from assc.core import Backend, Policy, Request
from assc.eval_config import Config
from assc.evaluate import evaluate
from assc.oracle import Ladder
from assc.registry import make_policy
from assc.results import Evaluation, EvaluationInterrupted, unique_labels
from assc.rounds_json import EntropiesOf, KeptRounds, TextOf, spread

if TYPE_CHECKING:
    from assc.tb_eval import EvaluationWriter

TUNED = "static:tuned"
"""the static action that is best on train requests: known once the backend is"""
ORACLE = "oracle"
"""the hindsight optimum of a trace"""

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

    def keep(self, requests: int) -> KeptRounds | None:
        """What of this job's rounds goes into the result file."""
        return KeptRounds(requests, self.token_text, self.entropies) if requests else None


def listed_policies(config: Config) -> Listed:
    """Spec and policy of each row; None for what only the backend can make. Raises `SpecError` and `ArtefactError`."""
    seed, special = config.seed, (TUNED, ORACLE)
    return [(spec, None if spec in special else make_policy(spec, seed=seed)) for spec in config.specs]


def complete(listed: Listed, makers: Mapping[str, Callable[[], Policy]]) -> list[tuple[str, Policy]]:
    """The list with the missing policies made, each one anew."""
    return [(spec, policy if policy is not None else makers[spec]()) for spec, policy in listed]


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
            )
        except EvaluationInterrupted as stop:
            _finish(writer, stop.evaluation)
            raise
        _finish(writer, evaluation)
        return evaluation


def _writer(config: Config, job: Job, root: Path) -> EvaluationWriter:
    """Curves of this job, with its conditions as the columns of the table "HParams"."""
    from assc.tb_eval import SAMPLES, EvaluationWriter  # imports torch

    names, backend = [spec for spec, _ in job.policies], job.backend
    shared: dict[str, str | int | float | bool] = {
        "backend": config.backend,
        "pair": str(getattr(backend, "describe", dict)().get("pair")),
        "mode": backend.mode,
        "time": backend.time_source,
        "c": backend.cost_ratio,
        "requests": len(job.requests),
        "seed": config.seed,
    }
    kinds = [{"kind": name.partition(":")[0], "action": job.actions.get(name, "")} for name in names]
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
