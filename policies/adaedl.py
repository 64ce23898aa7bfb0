"""The entropy bound of AdaEDL, with its adaptive threshold."""

from __future__ import annotations

import math
from typing import ClassVar

from assc.core import RoundRecord
from assc.registry import register
from assc.rule_tuning import Grid
from assc.steps import Decision, StepObservation
from policies.draft_verify import moved
from policies.step_base import LOOKUPS, BaseStepPolicy


@register("adaedl")
class AdaEdl(BaseStepPolicy):
    """Draft while 1 − sqrt(`gamma`·H) ≥ λ, H the entropy (nats) that the token was drawn from.

    The left side approximates a lower bound of the token's chance of acceptance. After each round with n such tokens:
    rate ← `keep`·rate + (1 − keep)·accepted/n with rate 0 at the start of a request, and λ' = λ + `step` while
    rate < `goal`, else λ if all `cap` tokens were accepted, else λ − step; λ ← `smooth`·λ + (1 − smooth)·λ'. The
    constants are the source's (gamma 0.2, 0.5, 0.9, 0.01, 0.9). λ starts from `lam` (0.6, the middle of the source's
    range of 0.3 to 0.9) and goes on from request to request as in Draft & Verify, whose update it is; `adapt=false`
    keeps it. Tokens of a lookup have no entropy and go on.

    Limits: the source takes the entropy before it draws the token and then drops that token; here its draft forward is
    paid for already, so it is verified too, but counts neither among the n nor as accepted. A round of it alone leaves
    λ as it is; so a draft that is sure and wrong for long could drive λ above 1, where nothing passes any more. It
    never rolls back.

    Uses draft confidence and acceptance history. Source: Agrawal et al. 2024, arXiv 2410.18351, algorithm 1.

    >>> policy = AdaEdl()
    >>> class Seen: entropy = 0.79
    >>> policy.decide(Seen).name
    'CONTINUE'
    >>> Seen.entropy = 0.81
    >>> policy.decide(Seen).name
    'VERIFY'
    """

    uses: ClassVar[str] = "C, H"
    needs = frozenset({"step_entropy"})
    grid: ClassVar[Grid] = {
        **LOOKUPS,
        "lam": (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8),
        "goal": (0.3, 0.5, 0.7, 0.9),
        "cap": (3, 4, 6, 8, 12),
    }
    per_request: ClassVar[tuple[str, ...]] = ("rate", "sure")
    learned: ClassVar[tuple[str, ...]] = ("lam",)

    def __init__(
        self,
        lam: float = 0.6,
        gamma: float = 0.2,
        goal: float = 0.9,
        step: float = 0.01,
        keep: float = 0.5,
        smooth: float = 0.9,
        cap: int = 16,
        adapt: bool = True,
        drafter: str | None = None,
        m: int = 0,
        k_ngram: int = 10,
    ) -> None:
        if not all(0.0 <= x <= 1.0 for x in (lam, goal, keep, smooth)):
            raise ValueError(f"lam, goal, keep and smooth are 0 to 1, got {lam}, {goal}, {keep}, {smooth}")
        if not (math.isfinite(gamma) and gamma > 0.0 and math.isfinite(step) and step >= 0.0):
            raise ValueError(f"gamma is above 0 and step 0 or more, got {gamma} and {step}")
        super().__init__(cap, drafter, m, k_ngram)
        self.lam, self.gamma, self.goal, self.step = lam, gamma, goal, step
        self.keep, self.smooth, self.adapt = keep, smooth, adapt
        self.rate = 0.0
        """smoothed acceptance"""
        self.sure = 0
        """tokens of this round whose bound held"""

    def decide(self, step: StepObservation) -> Decision:
        if step.entropy is None:
            return Decision.CONTINUE
        if 1.0 - math.sqrt(self.gamma * step.entropy) < self.lam:
            return Decision.VERIFY
        self.sure += 1
        return Decision.CONTINUE

    def update(self, record: RoundRecord) -> None:
        sure, self.sure = self.sure, 0
        if not self.adapt or sure == 0 or record.drafted == 0 or record.action.drafter is None:
            return
        accepted = min(record.accepted, sure)
        self.rate = self.keep * self.rate + (1.0 - self.keep) * accepted / sure
        full = accepted == self._within(self.cap, record.action.drafter)
        self.lam = moved(self.lam, self.rate < self.goal, full, self.step, self.smooth)
