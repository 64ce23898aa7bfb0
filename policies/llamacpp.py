"""The probability stop of llama.cpp's draft models."""

from __future__ import annotations

from typing import ClassVar

from assc.core import ROLLBACK, Action, Observation
from assc.kinds import is_lookup
from assc.registry import register
from assc.rule_tuning import Grid
from assc.steps import Decision, StepObservation
from policies.step_base import LOOKUPS, BaseStepPolicy


@register("llamacpp")
class LlamaCpp(BaseStepPolicy):
    """Draft until the draft gives its own token a probability below `p_min`; at most `n_max` tokens.

    A draft that ends with fewer than `n_min` tokens is thrown away unverified, and where fewer than `n_min` can be
    drafted none are. `p_min=0.75` is the value of the years 2024 and 2025; newer versions start from 0.0, which
    always drafts `n_max`. Tokens of a lookup have no probability and go on.

    Limits: this is the classic rule, in which the doubtful token is verified too; versions since 2026 drop it, although
    its draft forward is paid for. There the probability is taken among the draft's 10 best tokens, here among all.
    llama.cpp goes on from a draft that was thrown away where it fits; here it is drafted again.

    Uses draft confidence. Source: llama.cpp, `common/speculative.cpp` (`--draft-p-min`, `--draft-max` 16,
    `--draft-min` 0).

    >>> policy = LlamaCpp(n_min=2)
    >>> class Seen: prob, drafted = 0.75, 1
    >>> policy.decide(Seen).name
    'CONTINUE'
    >>> Seen.prob = 0.74
    >>> policy.decide(Seen).name
    'ROLLBACK'
    >>> Seen.drafted = 2
    >>> policy.decide(Seen).name
    'VERIFY'
    """

    uses: ClassVar[str] = "C"
    needs = frozenset({"step_prob"})
    grid: ClassVar[Grid] = {**LOOKUPS, "p_min": (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9), "n_max": (3, 4, 6, 8, 12)}

    def __init__(
        self,
        p_min: float = 0.75,
        n_max: int = 16,
        n_min: int = 0,
        drafter: str | None = None,
        m: int = 0,
        k_ngram: int = 10,
    ) -> None:
        if not 0.0 <= p_min <= 1.0 or not 0 <= n_min <= n_max:
            raise ValueError(f"p_min is a probability and n_min 0 to n_max, got p_min={p_min}, {n_min}, {n_max}")
        super().__init__(n_max, drafter, m, k_ngram)
        self.p_min, self.n_min = p_min, n_min

    def act(self, observation: Observation) -> Action:
        action = super().act(observation)
        short = action.drafter is not None and not is_lookup(action.drafter) and action.k < self.n_min
        return ROLLBACK if short else action

    def decide(self, step: StepObservation) -> Decision:
        if step.prob is None or step.prob >= self.p_min:
            return Decision.CONTINUE
        return Decision.VERIFY if step.drafted >= self.n_min else Decision.ROLLBACK
