"""The contract of a drafter, and the registry of drafter kinds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

from torch import Tensor

from assc.drafters.memory import DrafterMemory
from assc.drafters.parking import Parking
from assc.steps import Codes, encode

if TYPE_CHECKING:
    from assc.batch import Batch


@dataclass
class Proposal:
    """Drafted tokens of a batch: `tokens` [B, K] on the target's device, of which row b uses the first `lengths[b]`.

    `q` [B, K, V] are the probabilities that the tokens were drawn from (rejection mode), None for one-hot.
    `steps` and `catch_up` count, per row, draft forwards and committed tokens fed beyond the usual one.
    """

    tokens: Tensor
    lengths: Sequence[int]
    q: Tensor | None = None
    steps: Sequence[int] = ()
    catch_up: Sequence[int] = ()
    one_hot: Sequence[bool] = ()
    """set by the engine when it merges drafters: rows whose drafter gives no probabilities"""
    discarded: Sequence[int] = ()
    """set by the engine: tokens per row whose draft was rolled back"""


@dataclass(frozen=True)
class Confidence:
    """The draft's distribution for the next position: entropy in nats, largest probability, and its lead."""

    entropy: float
    top1: float
    margin: float
    prob: float | None = None
    """probability of the token that was drafted from it, once there is one"""


def codes_of(seen: Confidence) -> Codes:
    """What traces and step policies keep of the confidence that a token was drafted with."""
    return encode(seen.entropy, seen.top1, seen.margin, seen.prob if seen.prob is not None else 0.0)


Drafting = Generator[Mapping[int, Confidence | None], Iterable[int], Proposal]
"""A proposal token by token: yields the rows that have just drafted one more token, is sent those that stop there."""


def finish(drafting: Drafting) -> Proposal:
    """Run a drafting to its end without stopping any row."""
    try:
        next(drafting)
        while True:
            drafting.send(())
    except StopIteration as done:
        proposal: Proposal = done.value
        return proposal


class Drafter(ABC):
    """Proposes tokens and learns from the outcome.

    The life of a drafter in one batch: `begin`, then rounds of `propose` (perhaps after `peek`) and `committed`.
    A drafter keeps all per-request state between `begin` and the next `begin`, and none beyond.
    """

    kind: ClassVar[str]
    name: str
    has_confidence: bool = False
    """whether `peek` can tell the draft's distribution for the next position"""
    has_step_confidence: ClassVar[bool] = False
    """whether `propose_steps` tells the distribution that each token came from"""
    keeps: ClassVar[Literal["nothing", "drafts", "committed"]] = "nothing"
    """what the state after a round covers: nothing to feed (a lookup), the committed text up to and including
    accepted drafts, or only the text that was committed when it drafted; decides the catch-up in modelled time"""
    gives_q: bool = False
    """whether proposals carry probabilities in rejection mode; otherwise the draft counts as one-hot"""
    needs_hidden: bool = False
    """whether `Batch.hidden` has to hold the target's final hidden states of the committed positions"""

    @abstractmethod
    def begin(self, batch: Batch) -> None:
        """New requests: forget everything."""

    @abstractmethod
    def propose(self, batch: Batch, ks: Sequence[int]) -> Proposal:
        """Draft up to `ks[b]` tokens after the committed text of each row b; 0 leaves the row alone.

        Fewer tokens (none included) may come back, more never.
        """

    def propose_steps(self, batch: Batch, ks: Sequence[int]) -> Drafting:
        """`propose` in steps, for decisions after each token: a row stopped at a token keeps it and drafts no more.

        This default is for drafters whose proposal costs the same at any length, such as lookups: it is made whole,
        shown without confidences, and cut.
        """
        proposal = self.propose(batch, ks)
        lengths, j = list(proposal.lengths), 0
        while going := [b for b, n in enumerate(lengths) if n > j]:
            j += 1
            for b in (yield dict.fromkeys(going)):
                lengths[b] = j
        return replace(proposal, lengths=lengths)

    def peek(self, batch: Batch, rows: Sequence[int]) -> dict[int, Confidence]:
        """Run the first draft forward of `rows` ahead of the decision; `propose` then continues from it."""
        return {}

    def work(self, row: int) -> tuple[int, int]:
        """What this round cost `row` so far: forwards, and committed tokens fed besides the usual one."""
        return 0, 0

    def committed(self, batch: Batch) -> None:  # noqa: B027 - doing nothing is right for a stateless drafter
        """The round is over and `batch` holds the new lengths: drop what belongs to rejected tokens."""

    def match_length(self, batch: Batch, row: int) -> int | None:
        """Length of the longest committed suffix that occurred before; None if this drafter does not look."""
        return None

    # -- memory ----------------------------------------------------------------------------------------------------

    def weights(self) -> list[Tensor]:
        """Every floating tensor of the draft's weights, those shared with the target included."""
        return []

    def parameter_bytes(self) -> int:
        """Bytes of weights that this drafter adds to its target's, wherever they are."""
        return 0

    def buffer_bytes(self) -> int:
        """Bytes of buffers held for the batch at hand."""
        return 0

    def memory_bytes(self) -> int:
        """Bytes of weights and buffers held for drafting."""
        return self.memory().held

    def memory(self) -> DrafterMemory:
        """The same, told apart."""
        return DrafterMemory(self.name, self.parameter_bytes(), self.buffer_bytes(), self.loaded)

    @property
    def parking(self) -> Parking:
        """Where the weights go when the drafter is unloaded."""
        found: Parking | None = self.__dict__.get("_parking")
        if found is None:
            found = self.__dict__["_parking"] = Parking()
        return found

    @property
    def loaded(self) -> bool:
        """Whether the weights are where they are needed."""
        return not self.parking.away

    def unload(self, keep: Collection[int] = ()) -> None:
        """Free the buffers and take the weights off the device, but for memory at the addresses `keep`.

        What was read of the texts is forgotten with the buffers, so the next proposal catches all of it up.
        """
        if self.loaded and self.weights():
            self.forget()
            self.parking.park(self.weights(), keep)

    def load(self) -> None:
        """Bring the weights back."""
        if not self.loaded:
            self.parking.restore()

    def forget(self) -> None:  # noqa: B027 - nothing to forget is right for a drafter without buffers
        """Free the buffers of the batch at hand: nothing of its texts counts as read."""


D = TypeVar("D", bound=type[Drafter])

_kinds: dict[str, type[Drafter]] = {}


def register_drafter(kind: str) -> Callable[[D], D]:
    """Register a drafter class under its kind."""

    def add(cls: D) -> D:
        if kind in _kinds and _kinds[kind] is not cls:
            raise ValueError(f"drafter kind {kind!r} is registered twice")
        cls.kind = kind
        _kinds[kind] = cls
        return cls

    return add


def drafter_kinds() -> dict[str, type[Drafter]]:
    """Kind to class, of everything registered."""
    return dict(_kinds)
