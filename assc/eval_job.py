"""What eval.py plays, prepared by `eval_live` or `eval_replay`, and the loop that plays it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assc.cli import say
from assc.core import Backend, Policy, Request
from assc.eval_config import TUNED, Config
from assc.evaluate import Policies, evaluate
from assc.leakage import Leak, TrainedOn, check_leaks, leaked_counts, policy_leaks, told
from assc.oracle import Ladder
from assc.policy_files import saved_spec, without_alias
from assc.registry import artefacts_in, make_policy
from assc.results import Evaluation, EvaluationInterrupted, unique_labels
from assc.rounds_json import EntropiesOf, KeptRounds, TextOf, spread
from assc.rule_tuning import grid_of, is_tuned_rule
from assc.rungs import rung_of

if TYPE_CHECKING:
    from assc.tb_eval import EvaluationWriter

ORACLE = "oracle"
"""the hindsight optimum of a trace"""

Listed = Sequence[tuple[str, Policy | None]]


@dataclass(frozen=True)
class Job:
    """Everything an evaluation needs. `meta` goes into the result file, after what the backend says of itself."""

    backend: Backend
    requests: Sequence[Request]
    policies: Policies
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
    by_seed: Mapping[int, Policies] = field(default_factory=dict)
    """seed -> the policies made with it (`policies` for the first); empty: played without seeds"""

    def keep(self, requests: int) -> KeptRounds | None:
        """What of this job's rounds goes into the result file."""
        return KeptRounds(requests, self.token_text, self.entropies) if requests else None


def policy_spec(given: str, seed: int | None = None) -> str:
    """The spec without its alias, a run directory as the file in it. Raises `ArtefactError` as `saved_spec` does."""
    return saved_spec(without_alias(given), seed)


def listed_policies(config: Config, seed: int | None = None) -> Listed:
    """Label and policy of each row; None for what only the backend can make. Raises `SpecError` and `ArtefactError`.

    `seed`: one of `--policy-seeds`; without it policies are made with `--seed`.
    """
    special = (TUNED, ORACLE)
    specs = [policy_spec(spec, seed) for spec in config.specs]
    for spec in filter(is_tuned_rule, specs):
        grid_of(spec)
    own = config.seed if seed is None else seed
    made = [None if spec in special or is_tuned_rule(spec) else make_policy(spec, seed=own) for spec in specs]
    return list(zip(config.specs, made, strict=True))


def saved_files(config: Config) -> dict[str, str]:
    """Label (and seed, in a folder of seeds; and file, where there are several) -> file of every saved policy.

    Also of those inside other policies, `guard(policy.zip)`.
    """
    found: dict[str, str] = {}
    for label in config.specs:
        specs = {seed: policy_spec(label, seed) for seed in config.policy_seeds or (None,)}
        several = len(set(specs.values())) > 1
        for seed, spec in specs.items():
            name, files = f"{label} seed {seed}" if several else label, artefacts_in(spec)
            found |= {name if len(files) == 1 else f"{name} {file}": file for file in files}
    return found


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
    by_policy = policy_leaks(policies, requests, workload_hash, by_label)
    leaks = [leak for i, leak in enumerate(by_policy) if leak not in by_policy[:i]]  # once for all seeds
    leaks += drafts
    check_leaks(leaks, allowed=config.allow_leakage)
    saved = {label for label in config.specs if _is_saved(config, label)}
    found = told(policies, requests, workload_hash, by_label, saved, drafts)
    counts = leaked_counts(leaks, config.specs)  # of the spec: every row of one that is listed twice
    rows = zip(unique_labels(config.specs), config.specs, strict=True)
    return {label: counts[spec] for label, spec in rows if spec in counts}, found


SAME_C = 0.1
"""relative difference of c that is not worth a remark: calibrations differ by as much"""


def remarks(config: Config, policies: Sequence[tuple[str, Policy]], backend: Backend) -> list[str]:
    """What a reader must know of the saved policies: another mode, other costs, training prompts that nobody knows."""
    found, saved = [], {label for label in config.specs if _is_saved(config, label)}
    for label, policy in policies:
        if label not in saved:
            continue
        if getattr(policy, "trained_on", None) is None:
            found.append(f"{label} does not say what it was trained on, so leakage cannot be excluded")
        before = getattr(policy, "trained_mode", None)
        if before not in (None, backend.mode):
            found.append(f"{label} was trained in mode {before}, this evaluation is in mode {backend.mode}")
        c = getattr(policy, "trained_c", None)
        if c is not None and abs(c - backend.cost_ratio) > SAME_C * max(c, backend.cost_ratio):
            found.append(f"{label} was trained at c = {c:.3f}, this evaluation is at c = {backend.cost_ratio:.3f}")
    return list(dict.fromkeys(found))  # once for all seeds of a folder


def _is_saved(config: Config, label: str) -> bool:
    """Whether a row plays a saved policy, alone or inside another one."""
    return bool(artefacts_in(policy_spec(label, next(iter(config.policy_seeds), None))))


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
                job.by_seed or job.policies,
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
    if config.policy_seeds:
        shared["policy_seeds"] = " ".join(map(str, config.policy_seeds))
    saved = {label for label in config.specs if _is_saved(config, label)}
    kinds = [
        {
            "kind": "saved" if name in saved else name.partition(":")[0],
            "action": job.actions.get(name, ""),
            "rung": rung_of(policy) or "",
        }
        for name, policy in job.policies
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
