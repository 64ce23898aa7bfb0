"""Two thresholds on a window of acceptance."""

from __future__ import annotations

from typing import ClassVar

from assc.actions import ActionTable
from assc.core import Action, Observation, RoundRecord
from assc.registry import register
from policies.base import BasePolicy


@register("threshold")
class ThresholdRule(BasePolicy):
    """K + 1 while the windowed acceptance is above `up`, K − 1 while it is below `down`, one step per round.

    The window holds the last `window` rounds that drafted something; its rate is Σaccepted / Σdrafted. K moves within
    k_min..k_max (cut to the decoder's K_max). When sampling hotter than `hot`, one token less than K is drafted, but
    at least one.

    With k_min=0 the rule may end in rollback. Rollback rounds teach nothing, so after `probe` of them in a row one
    token is drafted with an empty window: if it is accepted K becomes 1 and the rule goes on from there.

    Uses acceptance history and the temperature. Source: a threshold controller with bands of our own; the same shape
    as the up/down thresholds of congestion control.

    >>> from assc.actions import ActionTable
    >>> policy = ThresholdRule()
    >>> policy.begin(ActionTable.build(["ngram"], range(1, 9)))
    >>> policy.update(RoundRecord(0, 0, Action("ngram", 4), 4, 4, 5, (), 0.1))
    >>> policy.k
    5
    """

    uses: ClassVar[str] = "H, temperature"
    per_request: ClassVar[tuple[str, ...]] = ("k", "history", "idle")

    def __init__(
        self,
        window: int = 5,
        up: float = 0.80,
        down: float = 0.60,
        k_min: int = 1,
        k_max: int = 8,
        init: int = 4,
        hot: float = 0.7,
        probe: int = 8,
        drafter: str | None = None,
    ) -> None:
        if window < 1 or probe < 1:
            raise ValueError(f"window and probe are at least 1, got {window} and {probe}")
        if not 0 <= down <= up <= 1:
            raise ValueError(f"0 <= down <= up <= 1 must hold, got down={down}, up={up}")
        if not (0 <= k_min <= init <= k_max and k_max >= 1):
            raise ValueError(f"0 <= k_min <= init <= k_max must hold with k_max >= 1, got {k_min}, {init}, {k_max}")
        if not hot >= 0:
            raise ValueError(f"hot is a temperature, 0 or more, got {hot}")
        self.window, self.up, self.down, self.hot, self.probe = window, up, down, hot, probe
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
            return self.draft(1 if self.idle >= self.probe else 0, observation)
        return self.draft(max(1, self.k - 1) if observation.temperature > self.hot else self.k, observation)

    def update(self, record: RoundRecord) -> None:
        if record.drafted == 0:
            self.idle += 1
            return
        if self.k == 0:
            self.history.clear()
        self.idle = 0
        self.history.append((record.accepted, record.drafted))
        del self.history[: -self.window]
        rate = sum(a for a, _ in self.history) / sum(d for _, d in self.history)
        if rate > self.up:
            self.k = min(self._cap, self.k + 1)
        elif rate < self.down:
            self.k = max(self._floor, self.k - 1)
