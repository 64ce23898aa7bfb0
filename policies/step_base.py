"""What most step policies share: policies that decide after each drafted token (docs/step-policies.md)."""

from __future__ import annotations

from assc.actions import ActionTable
from assc.core import ROLLBACK, Action, Observation
from assc.kinds import first_lookup, first_model
from assc.rule_tuning import Grid
from assc.steps import Decision, StepObservation
from policies.base import BasePolicy

LOOKUPS: Grid = {"m": (1, 2, 3, 4), "k_ngram": (4, 8, 12, 16)}
"""what `NAME:tuned` tries for the lookup in front of the model; the default is none"""


class BaseStepPolicy(BasePolicy):
    """Base of the step policies. A subclass writes `decide` and says in `needs` which step fields it reads.

    `act` opens every round with up to `cap` tokens of `drafter` (default: the table's first model, the only kind that
    has confidences; without one the first drafter). With `m` above 0 a round whose last `m` tokens or more have
    occurred before is opened with up to `k_ngram` tokens of the first lookup drafter instead, as `cascade` does.
    A subclass that rolls back before anything is drafted overrides `act`.

    The memory of a round (say, the confidences seen in it) belongs into `per_request` and is emptied in `update`.
    """

    def __init__(self, cap: int, drafter: str | None = None, m: int = 0, k_ngram: int = 10) -> None:
        if min(cap, k_ngram) < 1 or m < 0:
            raise ValueError(f"cap and k_ngram are at least 1, m 0 (off) or more, got {cap}, {k_ngram}, {m}")
        self.cap, self.drafter, self.m, self.k_ngram = cap, drafter, m, k_ngram
        if m:
            self.needs = self.needs | {"ngram_match"}
        self._lookup: str | None = None

    def begin(self, table: ActionTable) -> None:
        super().begin(table)
        if self.drafter is None:
            self._first = first_model(table) or self._first
        self._lookup = first_lookup(table)
        self._most = {name: max(table.k_values(name)) for name in table.drafters}

    def act(self, observation: Observation) -> Action:
        if self.m and self._lookup is not None and (observation.ngram_match or 0) >= self.m:
            return self.draft(self._within(self.k_ngram, self._lookup), observation, self._lookup)
        name = self.drafter or self._first
        return ROLLBACK if name is None else self.draft(self._within(self.cap, name), observation, name)

    def _within(self, k: int, drafter: str) -> int:
        return min(k, self._most[drafter])

    def decide(self, step: StepObservation) -> Decision:
        raise NotImplementedError
