"""What `--imitate` may name, and what a clone has learned from through the policy that it was cloned from. No torch.

A saved policy knows the prompts that it learned from. Whoever imitates it learns from them too: they are added to the
clone's own, and none of them may be held out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from assc.actions import ActionTable
from assc.core import Policy
from assc.errors import ArtefactError, AsscError, SpecError
from assc.kinds import first_lookup, first_model
from assc.leakage import Leak, LeakageError, TrainedOn, check_apart
from assc.registry import artefacts_in, make_policy, parse_spec
from assc.rule_tuning import grid_of, is_tuned_rule
from assc.steps import step_decider

if TYPE_CHECKING:
    from policies.training.config import TrainConfig
    from policies.training.setup import Problem

RULE = "cascade:tuned"
"""what PPO imitates first on a trace with a lookup and a model"""
BEFORE = "learned_before"
"""key of a checkpoint's state: what the imitated policy had learned from, null where it doesn't say"""


def rule_of(config: TrainConfig, table: ActionTable) -> str | None:
    """The rule that this run imitates first, None if it does not."""
    if config.algo != "ppo" or config.granularity != "round" or config.backend != "replay":
        return None
    if config.imitate is not None:
        return None if config.imitate == "none" else config.imitate
    return RULE if first_lookup(table) is not None and first_model(table) is not None else None


def untuned(spec: str) -> Policy:
    """The policy of a spec; of `NAME:tuned` that with its default parameters.

    Raises `SpecError` and `ArtefactError` where it cannot be made, has nothing to tune, or decides per draft token.
    """
    if is_tuned_rule(spec):
        grid_of(spec)
    policy = make_policy(parse_spec(spec)[0] if is_tuned_rule(spec) else spec)
    if step_decider(policy) is not None:
        raise SpecError(
            f"--imitate takes policies that decide per round, {spec!r} decides after each drafted token; take another "
            "one, or none"
        )
    return policy


def learned_before(spec: str | None, state: Mapping[str, Any] | None = None) -> TrainedOn | None:
    """What the imitated policy had learned from: nothing unless it was saved, None where it doesn't say.

    `state` is that of the checkpoint of a resumed run: the file may have changed since it was imitated.
    """
    if spec is None or not artefacts_in(spec):
        return TrainedOn()
    if state is not None:
        kept = state.get(BEFORE)
        try:
            return None if kept is None else TrainedOn.from_json(kept)
        except ValueError as error:
            raise ArtefactError(f"the checkpoint has an unreadable list of training prompts ({error})") from None
    known: TrainedOn | None = getattr(make_policy(spec), "trained_on", None)
    return known


def check_problem(config: TrainConfig, problem: Problem, state: Mapping[str, Any] | None = None) -> None:
    """Refuse what would make a run fail or its result worthless, before anything is written.

    `LeakageError` where held-out requests are trained on, by this run or by the policy that it imitates; `SpecError`
    where that policy cannot play here. `state`: of the checkpoint of a resumed run, which imitates no more.
    """
    compared = config.eval_requests != 0
    if compared:
        check_apart(problem.train, problem.held_out, problem.workload_hash)
    rule = rule_of(config, problem.backend.table)
    if rule is None:
        return
    if state is None:
        _check_plays(rule, problem)
    known = learned_before(rule, state)
    leaked = known.among(problem.held_out, problem.workload_hash) if compared and known is not None else []
    if leaked:
        leak = Leak(None, f"{rule} was trained", tuple(leaked), len(problem.held_out))
        raise LeakageError(f"{leak}; imitate another policy, or skip the comparison with --eval-requests 0")


def _check_plays(rule: str, problem: Problem) -> None:
    """Ask the policy for its first decision."""
    policy, backend = untuned(rule), problem.backend
    try:
        policy.begin(backend.table)
        for request in problem.train[:1]:
            backend.reset(request)
            policy.act(backend.observe(policy.needs))
    except AsscError as error:
        raise SpecError(f"--imitate {rule} cannot be played here: {error}") from None
