"""The entropy stop of SVIP."""

from __future__ import annotations

import math
from typing import ClassVar

from assc.registry import register
from assc.rule_tuning import Grid
from assc.steps import Decision, StepObservation
from policies.step_base import LOOKUPS, BaseStepPolicy


@register("svip")
class Svip(BaseStepPolicy):
    """Draft until sqrt(`scale`·H) > `h`, H the entropy (nats) of the token's distribution; it is verified too.

    1 − sqrt(scale·H) estimates a lower bound of the chance of acceptance out of what the draft alone knows. With the
    defaults, 0.15 and 0.3, drafting ends above 0.6 nats. At most `cap` (40) tokens, cut to the decoder's K_max. Tokens
    of a lookup have no entropy and go on.

    Limits: it learns nothing and never rolls back.

    Uses draft confidence. Source: Zhang et al. 2024, arXiv 2411.18462, and its code (`entropy_threshold` 0.3).

    >>> policy = Svip()
    >>> class Seen: entropy = 0.59
    >>> policy.decide(Seen).name
    'CONTINUE'
    >>> Seen.entropy = 0.61
    >>> policy.decide(Seen).name
    'VERIFY'
    """

    uses: ClassVar[str] = "C"
    needs = frozenset({"step_entropy"})
    grid: ClassVar[Grid] = {**LOOKUPS, "h": (0.2, 0.3, 0.4, 0.5, 0.6, 0.7), "cap": (3, 4, 6, 8, 12)}

    def __init__(
        self,
        h: float = 0.3,
        scale: float = 0.15,
        cap: int = 40,
        drafter: str | None = None,
        m: int = 0,
        k_ngram: int = 10,
    ) -> None:
        if not (math.isfinite(h) and h >= 0.0 and math.isfinite(scale) and scale > 0.0):
            raise ValueError(f"h is 0 or more and scale above 0, got {h} and {scale}")
        super().__init__(cap, drafter, m, k_ngram)
        self.h, self.scale = h, scale

    def decide(self, step: StepObservation) -> Decision:
        if step.entropy is None:
            return Decision.CONTINUE
        return Decision.VERIFY if math.sqrt(self.scale * step.entropy) > self.h else Decision.CONTINUE
