"""Acceptance in a sliding window moves a cap on K, or pauses speculation."""

from __future__ import annotations

from typing import ClassVar

from assc.actions import ActionTable
from assc.core import Action, Observation, RoundRecord
from assc.registry import register
from policies.base import BasePolicy


@register("window")
class WindowRule(BasePolicy):
    """Raise the cap step by step in good times; below a safety bar halve it, and pause when it can't be halved.

    Over the last `window` rounds that drafted: rate = Σaccepted / Σdrafted, mean = Σaccepted / rounds.

    1. rate < `safety` over at least min(4, window) rounds: K ← max(k_min, K // 2) with an empty window; if K is at
       k_min already, pause: roll back for `pause` rounds, then draft one token; if it is accepted go on with K = k_min
       and an empty window, else pause again.
    2. rate ≥ `bar` and mean ≥ K / 2: K ← min(k_max, K + 1). The mean guards against raising a cap that short drafts
       (a lookup with little to copy) do not reach anyway.
    3. Else K stays.

    Uses acceptance history. Source: a sliding window with a bar and a safety bar, ours; additive raise and halving
    as in congestion control (Chiu and Jain 1989).

    >>> from assc.actions import ActionTable
    >>> policy = WindowRule()
    >>> policy.begin(ActionTable.build(["ngram"], range(1, 9)))
    >>> policy.update(RoundRecord(0, 0, Action("ngram", 4), 4, 4, 5, (), 0.1))
    >>> policy.k
    5
    """

    uses: ClassVar[str] = "H"
    per_request: ClassVar[tuple[str, ...]] = ("k", "history", "idle")

    def __init__(
        self,
        window: int = 8,
        bar: float = 0.75,
        safety: float = 0.30,
        k_min: int = 1,
        k_max: int = 8,
        init: int = 4,
        pause: int = 8,
        drafter: str | None = None,
    ) -> None:
        if window < 1 or pause < 1:
            raise ValueError(f"window and pause are at least 1, got {window} and {pause}")
        if not 0 <= safety <= bar <= 1:
            raise ValueError(f"0 <= safety <= bar <= 1 must hold, got safety={safety}, bar={bar}")
        if not 1 <= k_min <= init <= k_max:
            raise ValueError(f"1 <= k_min <= init <= k_max must hold, got {k_min}, {init}, {k_max}")
        self.window, self.bar, self.safety, self.pause = window, bar, safety, pause
        self.k_min, self.k_max, self.drafter = k_min, k_max, drafter
        self.k, self.idle = init, 0
        self.history: list[tuple[int, int]] = []
        self._floor, self._cap = k_min, k_max

    def begin(self, table: ActionTable) -> None:
        super().begin(table)
        self._cap = min(self.k_max, self.limit(table))
        self._floor = min(self.k_min, self._cap)
        self.k = min(self.k, self._cap)

    def act(self, observation: Observation) -> Action:
        if self.k == 0:
            return self.draft(1 if self.idle >= self.pause else 0, observation)
        return self.draft(self.k, observation)

    def update(self, record: RoundRecord) -> None:
        drafted, accepted = record.drafted, record.accepted
        if drafted == 0:
            self.idle += 1
            return
        self.idle = 0
        if self.k == 0:
            self.k = self._floor if accepted else 0
            return
        self.history.append((accepted, drafted))
        del self.history[: -self.window]
        total = sum(a for a, _ in self.history)
        rate = total / sum(d for _, d in self.history)
        if rate < self.safety and len(self.history) >= min(4, self.window):
            self.history.clear()
            self.k = max(self._floor, self.k // 2) if self.k > self._floor else 0
        elif rate >= self.bar and total / len(self.history) >= self.k / 2:
            self.k = min(self._cap, self.k + 1)
