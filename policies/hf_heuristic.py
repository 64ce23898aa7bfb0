"""The schedule of transformers' assisted generation."""

from __future__ import annotations

from typing import ClassVar

from assc.actions import ActionTable
from assc.core import Action, Observation, RoundRecord
from assc.registry import register
from policies.base import BasePolicy


@register("hf_heuristic")
class HfHeuristic(BasePolicy):
    """K + 2 after a round in which everything drafted was accepted, else max(1, K − 1); first `init`.

    "Everything" is what was really drafted, as there: a draft that the budget or the lookup cut short counts as full.
    Rounds that drafted nothing change nothing. K is cut to the decoder's K_max, where the original has no limit.
    It begins anew with every request (their schedule `heuristic_transient`).

    Limits: it never rolls back.

    Uses acceptance history. Source: Hugging Face transformers, `num_assistant_tokens_schedule="heuristic"`,
    `AssistedCandidateGenerator.update_candidate_strategy`; 5 was its default start while that schedule was its default.

    >>> from assc.actions import ActionTable
    >>> policy = HfHeuristic()
    >>> policy.begin(ActionTable.build(["model"], range(1, 17)))
    >>> policy.update(RoundRecord(0, 0, Action("model", 5), 5, 5, 6, (), 0.1))
    >>> policy.k
    7
    """

    uses: ClassVar[str] = "H"
    per_request: ClassVar[tuple[str, ...]] = ("k",)

    def __init__(self, init: int = 5, up: int = 2, down: int = 1, drafter: str | None = None) -> None:
        if min(init, up, down) < 1:
            raise ValueError(f"init, up and down are at least 1, got {init}, {up}, {down}")
        self.k, self.up, self.down, self.drafter = init, up, down, drafter
        self._cap = init

    def begin(self, table: ActionTable) -> None:
        super().begin(table)
        self._cap = self.limit(table)
        self.k = min(self.k, self._cap)

    def act(self, observation: Observation) -> Action:
        return self.draft(self.k, observation)

    def update(self, record: RoundRecord) -> None:
        if record.drafted:
            full = record.accepted == record.drafted
            self.k = min(self._cap, self.k + self.up) if full else max(min(1, self._cap), self.k - self.down)
