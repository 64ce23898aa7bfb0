"""The nouns of the project, in one file without torch.

A `Request` is decoded in rounds. Before each round a policy sees an `Observation` and answers with an `Action`
(roll back to plain decoding, or draft K tokens with a named drafter); the backend plays the round and returns a
`RoundRecord`. `assc.run.run_request` is the loop that joins them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from assc.totals import Totals as Totals

if TYPE_CHECKING:
    from assc.actions import ActionTable

Mode = Literal["greedy", "rejection", "gumbel"]
MODES: tuple[Mode, ...] = ("greedy", "rejection", "gumbel")


def default_temperature(mode: Mode) -> float:
    """Temperature of requests that name none."""
    return 0.0 if mode == "greedy" else 1.0


FinishReason = Literal["eos", "stop", "criteria", "length", "context"]
"""Why a request ended: an EOS id, a stop string, a custom stopping criterion, `max_new_tokens`, or the model's
last position. The first three end an episode (`terminated`), the last two cut it (`truncated`)."""


@dataclass(frozen=True, slots=True)
class Action:
    """What a policy decides for one round: draft `k` tokens with `drafter`, or roll back (`k == 0`)."""

    drafter: str | None
    k: int

    def __post_init__(self) -> None:
        if (self.drafter is None) != (self.k == 0) or self.k < 0:
            raise ValueError(f"an action is ROLLBACK or (drafter, K >= 1), got drafter={self.drafter!r}, k={self.k}")

    @property
    def rollback(self) -> bool:
        return self.k == 0

    def clipped(self, k_max: int) -> Action:
        """The same with at most `k_max` tokens; rollback where that is nothing."""
        return self if self.k <= k_max else Action(self.drafter, k_max) if k_max > 0 else ROLLBACK

    def __str__(self) -> str:
        return "rollback" if self.rollback else f"{self.drafter}:{self.k}"


ROLLBACK = Action(None, 0)


@dataclass(frozen=True)
class Request:
    """One prompt to decode.

    `prompt_ids` are token ids of the target's tokenizer (at least one). `sampling` holds the keyword arguments of
    `assc.sampling.SamplingParams`, `seed` is the only source of randomness of the request's tokens.
    """

    prompt_ids: tuple[int, ...]
    max_new_tokens: int = 64
    seed: int = 0
    id: str = ""
    category: str = ""
    sampling: Mapping[str, Any] = field(default_factory=dict)

    @property
    def temperature(self) -> float:
        return float(self.sampling.get("temperature", 0.0))


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """One round as it happened. Counts are tokens, times are seconds of the decoding device.

    `planned` is the policy's K, `drafted` the tokens really proposed and verified (budget, early stop and missing
    n-gram matches make it smaller), `accepted` the leading accepted run and `emitted` the tokens committed, both
    after clipping at stop and budget. `seconds` is what the round cost: measured, or modelled by a `CostModel`
    (`time_source` of the backend says which); the four phases add up to it.
    """

    index: int
    position: int
    """committed new tokens before this round"""
    action: Action
    """what was planned; where a step policy decided token by token, the tokens that it let be drafted"""
    drafted: int
    accepted: int
    emitted: int
    tokens: tuple[int, ...]
    """the emitted token ids"""
    seconds: float
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    policy_seconds: float = 0.0
    other_seconds: float = 0.0
    discarded: int = 0
    """tokens drafted but thrown away without being judged by the target: a step policy rolled back, or verification was
    chunked and ended before their group; never part of the acceptance rate"""
    peeked: bool = False
    """the draft's first forward ran before the decision (its cost is in `draft_seconds`)"""
    catch_up: int = 0
    """committed tokens the drafter had to be fed besides its usual one, because earlier rounds left it cold"""
    draft_steps: int = 0
    """forwards of the drafter in this round, peek included"""
    finish: FinishReason | None = None
    target_entropy: float | None = None
    """nats, of the distribution from which the last emitted token came; None when nobody asked for it"""
    target_top1: float | None = None
    reasons: tuple[str, ...] = ()
    """notes of the policy about this decision (for example which fallback fired)"""
    groups: tuple[int, ...] = ()
    """columns of each target forward where verification is chunked (`assc.groups`); empty: one, over drafted + 1"""
    loads: int = 0
    """unloaded drafts that had to be brought back for this round (their time is in `draft_seconds`)"""
    accept_chances: tuple[float, ...] = ()
    """the policy's chances that draft positions 1, 2, … are accepted, each given that those before it were; empty
    where it predicts none"""

    @property
    def forwards(self) -> int:
        """target forwards of this round"""
        return len(self.groups) or 1

    @property
    def planned(self) -> int:
        return self.action.k

    @property
    def rollback(self) -> bool:
        """one plain target step: nothing was planned, or a step policy threw all of the draft away"""
        return self.action.rollback or (self.discarded > 0 and not self.drafted)

    @property
    def plain(self) -> bool:
        """a rollback round in which no draft ran at all: its seconds are those of plain decoding"""
        return self.rollback and not self.peeked and not self.discarded


@dataclass(frozen=True, slots=True)
class Observation:
    """What is known at a decision point, and nothing the decoder would not know then.

    `past` are this request's rounds so far, oldest first. Optional fields are None unless the policy declared that
    it reads them (`Policy.needs`), since they cost time to make.
    """

    position: int
    """committed new tokens"""
    prompt_length: int
    remaining: int
    """tokens left in the budget, at least 1"""
    k_max: int
    """largest K that can be played now (table limit, budget and context)"""
    temperature: float
    past: Sequence[RoundRecord]
    cost_ratio: float
    """c: seconds of one draft step / seconds of one target step"""
    occupancy: float = 1.0
    """rows decoding / rows of the batch"""
    target_entropy: float | None = None
    target_top1: float | None = None
    draft_entropy: float | None = None
    """nats, of the draft's distribution for the next position (costs the draft's first forward)"""
    draft_top1: float | None = None
    draft_margin: float | None = None
    ngram_match: int | None = None
    """length of the longest suffix of the committed text that occurred before, capped by the drafter's maximum"""
    committed: Sequence[int] | None = None
    """token ids of the prompt and of what was committed behind it"""


@runtime_checkable
class Backend(Protocol):
    """Plays rounds: live models, a recorded trace, or a synthetic source behind one interface.

    A backend knows its `table` of actions, its verification `mode`, its `time_source` ("measured" or "modelled"),
    the cost ratio `c` and the seconds of one plain target step.
    """

    table: ActionTable
    mode: Mode
    time_source: Literal["measured", "modelled"]

    @property
    def cost_ratio(self) -> float: ...

    @property
    def plain_step_seconds(self) -> float:
        """seconds of one plain (K = 0) round, measured in calibration or modelled"""
        ...

    def reset(self, request: Request) -> None:
        """Start a request. Raises `RequestError` if it cannot be decoded."""
        ...

    @property
    def done(self) -> bool: ...

    def observe(self, needs: frozenset[str] = frozenset()) -> Observation:
        """The current decision point. `needs` names the optional `Observation` fields to fill."""
        ...

    def step(self, action: Action, *, policy_seconds: float = 0.0, reasons: tuple[str, ...] = ()) -> RoundRecord:
        """Play one round. Raises `RuntimeError` before `reset` or after the end."""
        ...


@runtime_checkable
class Policy(Protocol):
    """A controller of K. `policies.base.BasePolicy` implements the parts that rarely differ."""

    spec: str
    needs: frozenset[str]

    def begin(self, table: ActionTable) -> None:
        """A request starts: forget per-request memory, keep what was learned; `table` names the drafters and K_max.

        A policy may play any K from 1 to the table's K_max; the listed K are the choices of a learner.
        """
        ...

    def act(self, observation: Observation) -> Action: ...

    def update(self, record: RoundRecord) -> None: ...

    def reset(self) -> None:
        """Forget everything, back to the state after construction."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class Episode:
    """All rounds of one request under one policy."""

    request: Request
    policy: str
    rounds: tuple[RoundRecord, ...]

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(t for r in self.rounds for t in r.tokens)

    @property
    def seconds(self) -> float:
        return sum(r.seconds for r in self.rounds)

    @property
    def finish(self) -> FinishReason | None:
        return self.rounds[-1].finish if self.rounds else None
