"""Smoothed accepted lengths, with a switch for runs of full acceptance."""

from __future__ import annotations

from typing import ClassVar

from assc.actions import ActionTable
from assc.core import Action, Observation, RoundRecord
from assc.registry import register
from policies.base import BasePolicy


@register("gammatune")
class GammaTune(BasePolicy):
    """K = round(m) + 1, with m the smoothed accepted length.

    After a round that drafted: m ← (1 − eta)·m + eta·x, where x = accepted while something was rejected, and
    x = K + `boost` when all K tokens were accepted, since then the accepted length is only a lower bound (the switch
    between following and exploring). A draft shorter than K that was accepted in full says nothing and is left out.
    K stays within k_min..k_max, so it never rolls back.

    Uses acceptance history. Source: after Gautam et al. 2025, GammaTune, arXiv 2504.00030 (exponential smoothing of
    accepted lengths with a switching heuristic). The paper's constants were not at hand: `eta`, `boost` and `init` are
    ours, and GammaTune+ (which also reads draft confidence) is not this rule.

    >>> from assc.actions import ActionTable
    >>> policy = GammaTune()
    >>> policy.begin(ActionTable.build(["model"], range(1, 17)))
    >>> policy.update(RoundRecord(0, 0, Action("model", 4), 4, 4, 5, (), 0.1))
    >>> round(policy.mean, 6), policy.k
    (4.2, 5)
    """

    uses: ClassVar[str] = "H"
    per_request: ClassVar[tuple[str, ...]] = ("mean", "k")

    def __init__(
        self,
        eta: float = 0.4,
        boost: int = 2,
        k_min: int = 1,
        k_max: int = 16,
        init: int = 4,
        drafter: str | None = None,
    ) -> None:
        if not 0 < eta <= 1:
            raise ValueError(f"eta is in (0, 1], got {eta}")
        if boost < 0:
            raise ValueError(f"boost is 0 or more, got {boost}")
        if not 1 <= k_min <= init <= k_max:
            raise ValueError(f"1 <= k_min <= init <= k_max must hold, got {k_min}, {init}, {k_max}")
        self.eta, self.boost, self.k_min, self.k_max, self.drafter = eta, boost, k_min, k_max, drafter
        self.k, self.mean = init, init - 1.0
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
        if drafted == 0 or (accepted == drafted < self.k):
            return
        x = accepted + self.boost if accepted == drafted else accepted
        self.mean = (1 - self.eta) * self.mean + self.eta * x
        self.k = max(self._floor, min(self._cap, int(self.mean + 0.5) + 1))
