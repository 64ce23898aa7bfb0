"""The adaptive draft-exiting threshold of Draft & Verify."""

from __future__ import annotations

import math
from typing import ClassVar

from assc.core import RoundRecord
from assc.kinds import is_lookup
from assc.registry import register
from assc.rule_tuning import Grid
from assc.steps import Decision, StepObservation
from policies.step_base import LOOKUPS, BaseStepPolicy


def moved(threshold: float, raised: bool, kept: bool, step: float, smooth: float) -> float:
    """The threshold after a round: smooth·threshold + (1 − smooth)·(threshold ± step, or itself if `kept`).

    >>> round(moved(0.6, True, False, 0.01, 0.9), 6), round(moved(0.6, False, False, 0.01, 0.9), 6)
    (0.601, 0.599)
    """
    goal = threshold + step if raised else threshold if kept else threshold - step
    return smooth * threshold + (1.0 - smooth) * goal


@register("draft_verify")
class DraftVerify(BaseStepPolicy):
    """Draft until the draft gives its own token a probability below th; that token is verified too. th adapts.

    After each round that drafted: m ← `keep`·m + (1 − keep)·accepted/drafted with m 0 at the start of a request, and
    th' = th + `step` while m < `goal`, else th if all `cap` tokens were drafted, else th − step;
    th ← `smooth`·th + (1 − smooth)·th'. With the defaults th moves by 0.001 per round. As in the source's evaluation,
    th (first 0.6) goes on from request to request; `adapt=false` keeps it. Tokens of a lookup have no probability,
    go on and count nowhere.

    Limits: the doubtful token counts as drafted, so an acceptance of 0.9 is rarely reached, th creeps up and drafts
    shrink to one token unless the draft is very good. It never rolls back.

    Uses draft confidence and acceptance history. Source: Zhang et al. 2023, arXiv 2309.08168, and its code
    (`auto_th_stop_draft`, `auto_parameters` 0.5, 0.9, 0.01, 0.9, `max_step_draft` 8).

    >>> policy = DraftVerify()
    >>> class Seen: prob = 0.6
    >>> policy.decide(Seen).name
    'CONTINUE'
    >>> Seen.prob = 0.59
    >>> policy.decide(Seen).name
    'VERIFY'
    """

    uses: ClassVar[str] = "C, H"
    needs = frozenset({"step_prob"})
    grid: ClassVar[Grid] = {
        **LOOKUPS,
        "th": (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8),
        "goal": (0.3, 0.5, 0.7, 0.9),
        "cap": (3, 4, 8, 12),
    }
    per_request: ClassVar[tuple[str, ...]] = ("matched",)
    learned: ClassVar[tuple[str, ...]] = ("th",)

    def __init__(
        self,
        th: float = 0.6,
        goal: float = 0.9,
        step: float = 0.01,
        keep: float = 0.5,
        smooth: float = 0.9,
        cap: int = 8,
        adapt: bool = True,
        drafter: str | None = None,
        m: int = 0,
        k_ngram: int = 10,
    ) -> None:
        if not all(0.0 <= x <= 1.0 for x in (th, goal, keep, smooth)) or not (math.isfinite(step) and step >= 0.0):
            raise ValueError(
                f"th, goal, keep and smooth are 0 to 1 and step 0 or more, got {th}, {goal}, {keep}, {smooth}, {step}"
            )
        super().__init__(cap, drafter, m, k_ngram)
        self.th, self.goal, self.step, self.keep, self.smooth, self.adapt = th, goal, step, keep, smooth, adapt
        self.matched = 0.0
        """m of the docstring: smoothed acceptance"""

    def decide(self, step: StepObservation) -> Decision:
        return Decision.CONTINUE if step.prob is None or step.prob >= self.th else Decision.VERIFY

    def update(self, record: RoundRecord) -> None:
        name = record.action.drafter
        if not self.adapt or name is None or is_lookup(name) or record.drafted == 0:
            return
        self.matched = self.keep * self.matched + (1.0 - self.keep) * record.accepted / record.drafted
        full = record.drafted == self._within(self.cap, name)
        self.th = moved(self.th, self.matched < self.goal, full, self.step, self.smooth)
