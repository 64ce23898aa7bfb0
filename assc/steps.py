"""Decisions inside a round: after each drafted token a step policy says continue, verify or rollback. No torch here.

A step policy is a `Policy` with one more method, `decide`. Its `act` opens the round with a drafter and the most tokens
it may draft; the backend then drafts one token at a time and shows it as a `StepObservation`. `play_steps` is the
loop that joins them (docs/step-policies.md).

Confidences reach policies as `Codes`: a trace keeps one byte per number, and the live decoder rounds to the same codes,
so that a decision is the same in replay and live, to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from time import perf_counter
from typing import Any, NamedTuple, Protocol, runtime_checkable

from assc.core import Action, Backend, Observation, Policy, RoundRecord
from assc.errors import AsscError

STEP_FIELDS: tuple[str, ...] = ("step_entropy", "step_top1", "step_margin", "step_prob")
"""names that a step policy lists in `needs` for the confidences it reads; without any it sees None in all of them"""


class Decision(IntEnum):
    """What follows a drafted token. The numbers are the actions of the environments `assc/DraftStep-...`."""

    CONTINUE = 0
    """draft one more; where no more can be drafted the tokens are verified"""
    VERIFY = 1
    """verify what was drafted, the token just seen included"""
    ROLLBACK = 2
    """throw the drafted tokens away unverified (`RoundRecord.discarded`) and take one plain target step"""


@dataclass(frozen=True, slots=True)
class StepObservation:
    """One drafted token, as a step policy sees it.

    The confidences are those of the draft's distribution that the token came from, at temperature 1 and before any
    processor, rounded to the codes of a trace. They are None where the drafter has none (a lookup), and where the
    policy named no step field in `needs`.
    """

    observation: Observation
    """the decision point at which the round began"""
    drafter: str
    planned: int
    """tokens that this round may draft at most: the action's K, cut to the budget"""
    drafted: int
    """tokens drafted so far in this round, this one included: 1, 2, ..., at most `planned`"""
    entropy: float | None = None
    """nats, 0 to 12"""
    top1: float | None = None
    """largest probability"""
    margin: float | None = None
    """its lead over the second largest"""
    prob: float | None = None
    """probability of the drafted token itself; equal to `top1` in greedy decoding"""
    product: float | None = None
    """product of `top1` over the tokens of this round so far"""


Decide = Callable[[StepObservation], Decision]


@runtime_checkable
class StepPolicy(Policy, Protocol):
    """A `Policy` that also decides after each drafted token (`policies.step_base.BaseStepPolicy` is its usual base).

    `act` opens a round: rollback, or a drafter and the most tokens to draft. `decide` is then asked after each of
    them, until it says VERIFY or ROLLBACK, or no more can be drafted. `update` gets the round's record.
    """

    def decide(self, step: StepObservation) -> Decision: ...


class StepBackend(Backend, Protocol):
    """A backend that plays rounds token by token: `open_round`, `decide` while a token is shown, `close_round`.

    In between neither `observe` nor `step` may be called (`RuntimeError`).
    """

    def check_steps(self, needs: frozenset[str]) -> None:
        """Raise one sentence (`TraceError`) where the step fields of `needs` are unknown here."""
        ...

    def open_round(self, action: Action) -> StepObservation | None:
        """Begin a round and draft its first token; None where nothing is drafted (rollback, budget, no match)."""
        ...

    def decide(self, decision: Decision) -> StepObservation | None:
        """What to do after the token shown last; the next token, or None when drafting is over."""
        ...

    def close_round(self, *, policy_seconds: float = 0.0, reasons: tuple[str, ...] = ()) -> RoundRecord:
        """Verify what was kept and commit."""
        ...


def step_decider(policy: Any) -> Decide | None:
    """The `decide` of a step policy, None for a policy that decides once per round."""
    decide: Decide | None = getattr(policy, "decide", None)
    return decide


def check_policy(backend: Backend, policy: Policy) -> None:
    """Refuse in one sentence a step policy that `backend` cannot serve; any other policy passes."""
    if step_decider(policy) is None:
        return
    check_steps = getattr(backend, "check_steps", None)
    if check_steps is None:
        raise AsscError(
            f"policy {policy.spec!r} decides after each drafted token, which the backend {type(backend).__name__} "
            "cannot do"
        )
    check_steps(policy.needs)


def play_steps(
    backend: Any, action: Action, decide: Decide, *, policy_seconds: float = 0.0, reasons: tuple[str, ...] = ()
) -> RoundRecord:
    """Play one round of a `StepBackend`, asking `decide` after each drafted token; its time is the policy's."""
    step = backend.open_round(action)
    deciding = 0.0
    while step is not None:
        start = perf_counter()
        decision = decide(step)
        deciding += perf_counter() - start
        step = backend.decide(decision)
    record: RoundRecord = backend.close_round(policy_seconds=policy_seconds + deciding, reasons=reasons)
    return record


class Codes(NamedTuple):
    """The confidences of one drafted token in one byte each (0 to 255)."""

    entropy: int
    top1: int
    margin: int
    prob: int


STEP_COLUMNS: tuple[str, ...] = Codes._fields
MAX_STEP_ENTROPY = 12.0
"""nats; above the entropy of a uniform distribution over 160,000 tokens (11.98)"""

ENTROPIES: tuple[float, ...] = tuple(round(MAX_STEP_ENTROPY * (c / 255) ** 2, 6) for c in range(256))
"""code -> nats: steps of 0.0002 near 0, of 0.05 at 3 nats"""
PROBABILITIES: tuple[float, ...] = tuple(round(math.sin(math.pi * c / 510) ** 2, 6) for c in range(256))
"""code -> probability: steps of 0.006 at one half and of 0.00004 near 0 and 1, where products of many tell apart"""


def encode_entropy(nats: float) -> int:
    """The code of an entropy; NaN counts as the largest.

    >>> encode_entropy(0.0), encode_entropy(3.0), round(ENTROPIES[encode_entropy(3.0)], 2), encode_entropy(99.0)
    (0, 128, 3.02, 255)
    """
    if not nats < MAX_STEP_ENTROPY:
        return 255
    return round(255 * math.sqrt(max(0.0, nats) / MAX_STEP_ENTROPY))


def encode_probability(p: float) -> int:
    """The code of a probability (or a difference of two); NaN counts as 0.

    >>> encode_probability(0.0), encode_probability(0.5), encode_probability(1.0)
    (0, 128, 255)
    >>> [round(PROBABILITIES[encode_probability(p)], 4) for p in (0.1, 0.9, 0.999)]
    [0.0991, 0.9009, 0.9991]
    """
    if not p > 0.0:
        return 0
    return round(510 / math.pi * math.asin(math.sqrt(min(1.0, p))))


def encode(entropy: float, top1: float, margin: float, prob: float) -> Codes:
    """The codes of the confidences of one drafted token."""
    return Codes(encode_entropy(entropy), *(encode_probability(p) for p in (top1, margin, prob)))


def observe_step(
    observation: Observation,
    drafter: str,
    planned: int,
    drafted: int,
    codes: Codes | None,
    before: StepObservation | None,
) -> StepObservation:
    """What a policy sees of a drafted token; `before` is the token drafted before it in the same round."""
    if codes is None:
        return StepObservation(observation, drafter, planned, drafted)
    top1 = PROBABILITIES[codes[1]]
    product = top1 if before is None or before.product is None else before.product * top1
    return StepObservation(
        observation,
        drafter,
        planned,
        drafted,
        ENTROPIES[codes[0]],
        top1,
        PROBABILITIES[codes[2]],
        PROBABILITIES[codes[3]],
        product,
    )
