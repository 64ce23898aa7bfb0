"""Rounds token by token, one at a time: what every backend says when it is called out of turn (`assc.steps`)."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from assc.steps import StepObservation


class Round(Protocol):
    """A round under way."""

    shown: StepObservation | None
    """the token that was drafted last"""

    @property
    def drafting(self) -> bool:
        """Whether a decision about `shown` is still to come."""


R = TypeVar("R", bound=Round)


class OneRound(Generic[R]):
    """At most one round is open, `_round`."""

    _round: R | None = None

    @property
    def done(self) -> bool:
        """Whether the request has ended. `RuntimeError` before the first `reset`."""
        raise NotImplementedError

    def _idle(self) -> None:
        """`RuntimeError` unless a request is under way and no round is open."""
        if self.done:
            raise RuntimeError("the request has ended; call reset(request)")
        if self._round is not None:
            raise RuntimeError("a round is open; call close_round() first")

    def _waiting(self) -> R:
        """The open round, in which a drafted token waits for its decision; else `RuntimeError`."""
        if self._round is None or self._round.shown is None or not self._round.drafting:
            raise RuntimeError("no drafted token waits for a decision; call open_round(action)")
        return self._round

    def _ended(self) -> R:
        """The open round, all decisions of which are made, no longer open; else `RuntimeError`."""
        round_ = self._round
        if round_ is None or round_.drafting:
            raise RuntimeError("no round is open, or a drafted token waits for its decision")
        self._round = None
        return round_
