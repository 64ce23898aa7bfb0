"""The ASSC state machine."""

from __future__ import annotations

from typing import ClassVar

from assc.actions import ActionTable
from assc.core import Action, Observation, RoundRecord
from assc.registry import register
from policies.base import BasePolicy

VARIANTS = ("code", "diagram")


@register("assc")
class AsscRule(BasePolicy):
    """Halve K when the first token fails, add 1 after two full rounds in a row, step down while the average is low.

    With a = accepted, r = a / drafted and ema ← beta·ema + (1 − beta)·r after every round that drafted something:

    1. a == 0: k ← max(k_min, k // 2), streak ← 0 (`variant=diagram`: ema < `halve` does the same);
    2. else if ema ≥ `high` and a == k: streak + 1, and at `patience`: k ← min(k_max, k + 1), streak ← 0;
    3. else if ema < `low`: k ← max(k_min, k − 1), streak ← 0;
    4. else streak ← 0.

    Rounds with a shortened draft (budget, no longer n-gram match, early stop): r divides by what was drafted, since
    a token that was never proposed was not refused; and a full acceptance of fewer than k tokens is no proof that k
    tokens fit, so it neither extends nor breaks the streak. Rounds that drafted nothing change nothing. k_max is cut
    to the decoder's K_max when a request begins.

    Limits: K stays within k_min..k_max, so the rule never rolls back: where speculation cannot pay it keeps paying
    for k_min tokens. It can't jump either: from k_min to k_max takes 2·(k_max − k_min) rounds.

    Uses acceptance history. Source: the article this project starts from, whose code (the default) and diagram
    differ in step 1.

    >>> from assc.actions import ActionTable
    >>> from assc.core import RoundRecord
    >>> policy = AsscRule()
    >>> policy.begin(ActionTable.build(["ngram"], range(1, 9)))
    >>> for _ in range(3):
    ...     policy.update(RoundRecord(0, 0, Action("ngram", 4), 4, 4, 5, (), 0.1))
    >>> policy.k
    5
    """

    uses: ClassVar[str] = "H"
    per_request: ClassVar[tuple[str, ...]] = ("k", "ema", "streak")

    def __init__(
        self,
        variant: str = "code",
        k_min: int = 2,
        k_max: int = 8,
        init: int = 4,
        ema0: float = 0.75,
        beta: float = 0.7,
        high: float = 0.85,
        low: float = 0.50,
        halve: float = 0.45,
        patience: int = 2,
        drafter: str | None = None,
    ) -> None:
        if variant not in VARIANTS:
            raise ValueError(f"variant is one of {', '.join(VARIANTS)}, got {variant!r}")
        if not 1 <= k_min <= init <= k_max:
            raise ValueError(f"1 <= k_min <= init <= k_max must hold, got {k_min}, {init}, {k_max}")
        if not (0 <= beta < 1 and 0 <= ema0 <= 1 and 0 <= low <= high <= 1 and 0 <= halve <= 1 and patience >= 1):
            raise ValueError("beta is in [0, 1), ema0 and halve in [0, 1], low <= high in [0, 1], patience at least 1")
        self.halve_below = halve if variant == "diagram" else 0.0
        self.k_min, self.k_max, self.beta, self.high, self.low = k_min, k_max, beta, high, low
        self.patience, self.drafter = patience, drafter
        self.k, self.ema, self.streak = init, ema0, 0
        self._floor, self._cap = k_min, k_max

    def begin(self, table: ActionTable) -> None:
        super().begin(table)
        self._cap = min(self.k_max, self.limit(table))
        self._floor = min(self.k_min, self._cap)
        self.k = min(self.k, self._cap)

    def act(self, observation: Observation) -> Action:
        return self.draft(self.k, observation)

    def update(self, record: RoundRecord) -> None:
        drafted, accepted = record.drafted, record.accepted
        if drafted == 0:
            return
        self.ema = self.beta * self.ema + (1 - self.beta) * accepted / drafted
        if accepted == 0 or self.ema < self.halve_below:
            self.k, self.streak = max(self._floor, self.k // 2), 0
        elif self.ema >= self.high and accepted >= self.k:
            self.streak += 1
            if self.streak >= self.patience:
                self.k, self.streak = min(self._cap, self.k + 1), 0
        elif self.ema < self.low:
            self.k, self.streak = max(self._floor, self.k - 1), 0
        elif accepted < drafted or drafted >= self.k:
            self.streak = 0
