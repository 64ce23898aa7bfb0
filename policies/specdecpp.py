"""SpecDec++: stop when some drafted token is likely to be refused, by a learned acceptance head."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np

from assc.core import RoundRecord
from assc.errors import ArtefactError
from assc.registry import register
from assc.rule_tuning import Grid
from assc.steps import Decision, StepObservation
from assc.trace import Trace
from policies.heads import FEATURES, START, features_of, fit_head, fit_on, trace_samples
from policies.step_base import LOOKUPS, BaseStepPolicy


@register("specdecpp")
class SpecDecPP(BaseStepPolicy):
    """Draft until 1 − Π p̂ > `tau`, the predicted chance that some token of the round is refused; verify them all.

    p̂ = P(accepted | those before it were) of each token is a logistic regression (`policies.heads`, one per drafter)
    on the token's entropy, top-1, margin, probability, the product of top-1 so far and its position; a refused token
    weighs `reject` times an accepted one while it learns. Between `least` and `cap` tokens, cut to the decoder's K_max.
    Tokens of a lookup have no confidence and go on.

    Usable at once: it starts from p̂ = sigmoid(4·probability − 2) and every `every` rounds goes on with scikit-learn's
    SGDClassifier (`partial_fit`, constant `rate`) on what those showed. Offline: `fit(trace)` learns from every draft
    step of a trace, as `train_policy.py --algo specdecpp` does before it plays. `frozen=true` does not go on learning
    and needs numpy only.

    Limits: the source's head is a 4-layer network on the draft's hidden states and predicts a token's acceptance one
    forward later; ours reads what this project records. `reject` above 1, as in the source, makes p̂ too low, so that
    `tau` is no honest chance then; 1 (ours) keeps it one. It never rolls back.

    Uses draft confidence. Source: Huang et al. 2024, arXiv 2405.19715, and its code (`--bound 2 20`,
    `--stop_threshold`, `--weight_mismatch` 6).

    >>> policy = SpecDecPP(frozen=True)
    >>> class Seen: drafter, drafted, entropy, top1, margin, prob, product = "model", 1, 0.1, 0.9, 0.8, 0.1, 0.9
    >>> policy.decide(Seen).name  # surely refused, but the first of at least two
    'CONTINUE'
    >>> Seen.drafted = 2
    >>> policy.decide(Seen).name
    'VERIFY'
    """

    uses: ClassVar[str] = "C"
    learner: ClassVar[bool] = True
    needs = frozenset({"step_entropy", "step_top1", "step_margin", "step_prob"})
    grid: ClassVar[Grid] = {
        "least": (1, 2),
        **LOOKUPS,
        "tau": (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
        "cap": (3, 4, 6, 8, 12),
    }
    learned: ClassVar[tuple[str, ...]] = ("heads", "buffer")
    per_request: ClassVar[tuple[str, ...]] = ("round", "chance")

    def __init__(
        self,
        tau: float = 0.7,
        least: int = 2,
        cap: int = 20,
        reject: float = 1.0,
        every: int = 16,
        rate: float = 0.02,
        frozen: bool = False,
        drafter: str | None = None,
        m: int = 0,
        k_ngram: int = 10,
    ) -> None:
        if not 0.0 <= tau <= 1.0 or not 1 <= least <= cap:
            raise ValueError(f"tau is a chance and least is 1 to cap, got {tau}, {least}, {cap}")
        if not (math.isfinite(reject) and reject > 0.0) or every < 1 or not 0.0 < rate <= 1.0:
            raise ValueError(f"reject is above 0, every 1 or more, rate in (0, 1], got {reject}, {every}, {rate}")
        super().__init__(cap, drafter, m, k_ngram)
        self.tau, self.least, self.reject = tau, least, reject
        self.every, self.rate, self.frozen = every, rate, frozen
        self.heads: dict[str, list[float]] = {}
        """drafter -> coefficients of `policies.heads.FEATURES`"""
        self.buffer: list[list[Any]] = []
        """rounds not yet learned from: drafter, features of the judged tokens, how many of them were accepted"""
        self.round: list[list[float]] = []
        """features of the tokens drafted in this round"""
        self.chance = 1.0
        """Π p̂ over them"""

    def decide(self, step: StepObservation) -> Decision:
        if step.prob is None or step.entropy is None or step.top1 is None or step.margin is None:
            return Decision.CONTINUE
        x = features_of(step.entropy, step.top1, step.margin, step.prob, step.product or 0.0, step.drafted)
        self.round.append(x)
        logit = sum(w * v for w, v in zip(self.heads.get(step.drafter, START), x, strict=True))
        self.chance *= 1.0 / (1.0 + math.exp(-max(-30.0, min(30.0, logit))))
        if step.drafted < self.least or 1.0 - self.chance <= self.tau:
            return Decision.CONTINUE
        return Decision.VERIFY

    def update(self, record: RoundRecord) -> None:
        seen, self.round, self.chance = self.round, [], 1.0
        name = record.action.drafter
        if self.frozen or name is None or not seen or record.drafted == 0:
            return
        # a round that the text's end cut short refused nothing
        refused = record.accepted < record.drafted and record.finish is None
        judged = seen[: record.accepted + refused]
        if judged:
            self.buffer.append([name, judged, min(record.accepted, len(judged))])
        if len(self.buffer) >= self.every:
            for drafter in dict.fromkeys(row[0] for row in self.buffer):
                rows = [row for row in self.buffer if row[0] == drafter]
                x = np.array([features for row in rows for features in row[1]])
                y = np.array([i < row[2] for row in rows for i in range(len(row[1]))])
                head = self.heads.get(drafter, list(START))
                self.heads[drafter] = fit_on(head, x, y, rate=self.rate, reject=self.reject)
            self.buffer.clear()

    def fit(self, trace: Trace) -> int:
        """Learn the head of every drafter with confidences from all draft steps of `trace`; how many tokens these were.

        `TraceError` for a trace without confidences per draft step.
        """
        total = 0
        for name, (x, y) in trace_samples(trace).items():
            self.heads[name] = fit_head(x, y, reject=self.reject)
            total += len(y)
        return total

    def load_state_dict(self, state: Any) -> None:
        heads = state.get("heads")
        lists = isinstance(heads, dict) and all(isinstance(head, list) for head in heads.values())
        if not lists or any(len(head) != len(FEATURES) for head in heads.values()):
            raise ArtefactError(f"policy {self.spec!r} expects {len(FEATURES)} coefficients per drafter")
        super().load_state_dict(state)
