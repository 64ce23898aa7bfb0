"""The optimum of the geometric model of acceptance."""

from __future__ import annotations

from typing import ClassVar

from assc.actions import ActionTable
from assc.core import Action, Observation, RoundRecord
from assc.registry import register
from policies.base import BasePolicy


def best_k(alpha: float, c: float, k_max: int) -> int:
    """K in 0..k_max with the largest (1 − α^{K+1}) / ((1 − α)·(1 + (K + 1)·c)); plain decoding is worth 1.

    The ratio rises and then falls in K, so the search stops at the first fall.

    >>> best_k(0.8, 0.1, 16), best_k(0.3, 0.5, 16), best_k(1.0, 0.1, 16)
    (6, 0, 16)
    """
    best, value, tokens, power = 0, 1.0, 1.0, 1.0
    last = 0.0
    for k in range(1, k_max + 1):
        power *= alpha
        tokens += power
        ratio = tokens / (1.0 + (k + 1) * c)
        if ratio < last:
            break
        if ratio > value:
            best, value = k, ratio
        last = ratio
    return best


@register("closed_form")
class ClosedForm(BasePolicy):
    """argmax over K of (1 − α^{K+1}) / ((1 − α)·(1 + (K + 1)·c)), with α and c estimated as it goes.

    α is the chance that one more token is accepted: discounted Σaccepted / (Σaccepted + rounds with a rejection),
    started by `prior` tokens of chance `alpha`. c is the measured ratio (draft seconds per drafted token) / (seconds
    of verification) of this policy's rounds, discounted alike and kept from request to request, since it is the
    machine's; before there is any it is the observation's c. A round
    that ended the request proves no rejection. The formula charges one draft step more than K: the draft's own step
    for the last token, which the live decoder pays as catch-up.

    Where no K is worth more than plain decoding it rolls back, and after `probe` such rounds drafts one token.

    Limits: it believes that positions are alike and independent, so mixed text (long runs here, none there) makes it
    draft too little where runs are long. It takes verification to cost the same for every K.

    Uses acceptance history and its own seconds. Source: Leviathan et al. 2023, arXiv 2211.17192, theorem 3.8, with
    one draft step more in the denominator.

    >>> from assc.actions import ActionTable
    >>> policy = ClosedForm(alpha=0.8)
    >>> policy.begin(ActionTable.build(["model"], range(1, 9)))
    >>> class Seen: k_max, cost_ratio = 8, 0.1
    >>> str(policy.act(Seen))
    'model:6'
    """

    uses: ClassVar[str] = "H, seconds"
    per_request: ClassVar[tuple[str, ...]] = ("accepted", "rejected", "idle")
    learned: ClassVar[tuple[str, ...]] = ("draft_time", "verify_time")

    def __init__(
        self,
        alpha: float = 0.75,
        prior: float = 4.0,
        discount: float = 0.95,
        k_max: int = 16,
        probe: int = 8,
        drafter: str | None = None,
    ) -> None:
        if not 0 < alpha < 1:
            raise ValueError(f"alpha is the acceptance to begin with, in (0, 1), got {alpha}")
        if not (0 < prior < 1e6 and 0 < discount <= 1):
            raise ValueError(f"prior is in (0, 1e6) and discount in (0, 1], got {prior} and {discount}")
        if k_max < 1 or probe < 1:
            raise ValueError(f"k_max and probe are at least 1, got {k_max} and {probe}")
        self.discount, self.k_max, self.probe, self.drafter = discount, k_max, probe, drafter
        self.accepted, self.rejected = prior * alpha, prior * (1 - alpha)
        self.draft_time: list[float] = [0.0, 0.0]
        """drafted tokens, seconds"""
        self.verify_time: list[float] = [0.0, 0.0]
        """rounds, seconds"""
        self.idle = 0
        self._cap = k_max

    def begin(self, table: ActionTable) -> None:
        super().begin(table)
        self._cap = min(self.k_max, self.limit(table))

    def act(self, observation: Observation) -> Action:
        (tokens, drafting), (rounds, verifying) = self.draft_time, self.verify_time
        c = observation.cost_ratio
        if tokens > 0 and verifying > 0 and drafting > 0:
            c = drafting / tokens / (verifying / rounds)
        k = best_k(self.alpha, c, self._cap)
        return self.draft(1 if k == 0 and self.idle >= self.probe else k, observation)

    @property
    def alpha(self) -> float:
        """The present estimate of α."""
        total = self.accepted + self.rejected
        return self.accepted / total if total > 0 else 0.0

    def accept_chances(self, action: Action) -> tuple[float, ...]:
        return (self.alpha,) * action.k

    def update(self, record: RoundRecord) -> None:
        g = self.discount
        if 0.0 < record.verify_seconds <= 1e6 and 0.0 <= record.draft_seconds <= 1e6:
            self.verify_time = [g * self.verify_time[0] + 1.0, g * self.verify_time[1] + record.verify_seconds]
            if record.drafted:
                n, s = self.draft_time
                self.draft_time = [g * n + record.drafted, g * s + record.draft_seconds]
        if record.drafted == 0:
            self.idle += 1
            return
        self.idle = 0
        refused = record.accepted < record.drafted and record.finish is None
        self.accepted = g * self.accepted + record.accepted
        self.rejected = g * self.rejected + refused
