"""The confidence stop of transformers' assisted generation."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import ClassVar

from assc.core import RoundRecord
from assc.registry import register
from assc.rule_tuning import Grid
from assc.steps import Decision, StepObservation
from policies.step_base import LOOKUPS, BaseStepPolicy

SAMPLES = 5
"""the threshold is refitted when there are more samples than this"""
MISS = 3.0
"""a token that was accepted but would have ended the draft weighs this much more than the opposite"""


@register("hf_confidence")
class HfConfidence(BaseStepPolicy):
    """Draft until the draft gives its own token a probability below `t`; that token is verified too.

    At most `cap` (20) tokens, cut to the decoder's K_max. After every round with more than 5 samples, of accepted and
    refused tokens, t becomes the sample probability that minimises FPR + 3·FNR, "positive" being p ≥ t and the truth
    whether the token was accepted; samples are the tokens up to the first refused one. `refit=false` keeps t. As there,
    samples and threshold begin anew with every request. Tokens of a lookup have no probability and go on.

    Limits: it never rolls back.

    Uses draft confidence. Source: Hugging Face transformers, `ConfidenceCriteria` and
    `AssistedCandidateGenerator.update_candidate_strategy` (`assistant_confidence_threshold`, 0.4;
    `num_assistant_tokens`, 20); Mamou et al. 2024, arXiv 2405.04304.

    >>> policy = HfConfidence()
    >>> class Seen: prob = 0.5
    >>> policy.decide(Seen).name
    'CONTINUE'
    >>> Seen.prob = 0.39
    >>> policy.decide(Seen).name
    'VERIFY'
    """

    uses: ClassVar[str] = "C"
    needs = frozenset({"step_prob"})
    grid: ClassVar[Grid] = {
        **LOOKUPS,
        "refit": (False,),
        "t": (0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8),
        "cap": (2, 3, 4, 6, 12),
    }
    per_request: ClassVar[tuple[str, ...]] = ("t", "round", "good", "bad")

    def __init__(
        self,
        t: float = 0.4,
        cap: int = 20,
        refit: bool = True,
        drafter: str | None = None,
        m: int = 0,
        k_ngram: int = 10,
    ) -> None:
        if not 0.0 <= t <= 1.0:
            raise ValueError(f"t is a probability, got {t}")
        super().__init__(cap, drafter, m, k_ngram)
        self.t, self.refit = t, refit
        self.round: list[float] = []
        """probabilities of the tokens drafted in this round"""
        self.good: list[float] = []
        """samples that were accepted, ascending"""
        self.bad: list[float] = []
        """samples that were refused, ascending"""

    def decide(self, step: StepObservation) -> Decision:
        if step.prob is None:
            return Decision.CONTINUE
        self.round.append(step.prob)
        return Decision.CONTINUE if step.prob >= self.t else Decision.VERIFY

    def update(self, record: RoundRecord) -> None:
        seen, self.round = self.round, []
        if not self.refit or not seen:
            return
        for p in seen[: record.accepted]:
            insort(self.good, p)
        # a round that the text's end cut short refused nothing
        if record.finish is None and record.accepted < len(seen):
            insort(self.bad, seen[record.accepted])
        if self.good and self.bad and len(self.good) + len(self.bad) > SAMPLES:
            self.t = best_threshold(self.good, self.bad)


def best_threshold(good: list[float], bad: list[float]) -> float:
    """The sample t that minimises (share of `bad` ≥ t) + 3·(share of `good` < t); the largest of equals.

    Both lists ascend. The best t is one of `good`: just above a t between them fewer of `bad` are kept and no more of
    `good` missed. It lies where the second term alone is no more than the cost found, in the lowest third of `good`.

    >>> best_threshold([0.7, 0.8, 0.9], [0.2, 0.3, 0.75])
    0.7
    """
    best, least = 0.0, float("inf")
    goods, bads = len(good), len(bad)
    before = -1.0
    for i, t in enumerate(good):
        if t == before:
            continue  # as many are below it as below the first of its equals
        before, missed = t, MISS * i / goods
        if missed > least:
            break
        cost = (bads - bisect_left(bad, t)) / bads + missed
        if cost <= least:
            best, least = t, cost
    return best
