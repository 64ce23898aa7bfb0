"""A live round under way: where it began, and in a round token by token how far it is."""

from __future__ import annotations

from dataclasses import dataclass

from assc.core import Action, Observation
from assc.engine import RowOutcome, Steps
from assc.steps import Codes, StepObservation, observe_step


@dataclass
class LiveRound:
    """A round of the one request that a `LiveBackend` decodes."""

    action: Action
    position: int
    """committed new tokens before it"""
    length: int
    """committed tokens before it, prompt included"""
    drafts: bool
    """whether the budget lets it draft at all"""
    peek: tuple[str, int, int] | None
    """drafter, forwards and tokens caught up of the peek before it"""
    decision: Observation | None = None
    steps: Steps | None = None
    shown: StepObservation | None = None
    outcome: RowOutcome | None = None

    @property
    def drafting(self) -> bool:
        return self.outcome is None

    def show(self, k_limit: int, codes: Codes | None) -> StepObservation:
        """What a step policy sees of the token just drafted; `k_limit` is the largest K that the budget leaves."""
        before = self.shown
        assert self.decision is not None and self.action.drafter is not None
        self.shown = observe_step(
            self.decision,
            self.action.drafter,
            min(self.action.k, k_limit),
            1 if before is None else before.drafted + 1,
            codes,
            before,
        )
        return self.shown

    def work(self, drafter: str | None, outcome: RowOutcome) -> list[tuple[str, int, int]]:
        """Drafter, forwards and tokens caught up of all drafting that this round has to pay."""
        used = drafter if self.drafts else None
        work = [(used, outcome.draft_steps, outcome.catch_up)] if used is not None else []
        if self.peek is not None and used != self.peek[0]:
            work.append(self.peek)  # the round made no use of the peek, which is paid all the same
        return work
