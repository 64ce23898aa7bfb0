"""A policy of your own against the ladder, on the packaged recording of SmolLM2-135M.

python examples/own_policy.py

Seconds; no model is loaded. The policy trusts the drafter more where the target was sure of its last token, and takes
the lookup where the text repeats itself.
"""

# %% The policy: one class, registered under a name
import sys

import eval as evaluation
from assc import Action, Observation, RoundRecord, register
from policies.base import BasePolicy


@register("sure")
class Sure(BasePolicy):
    """Lookup while the text repeats itself, else K by the target's certainty and by what was accepted last."""

    needs = frozenset({"target_top1", "ngram_match"})  # optional observations are computed only where asked for
    per_request = ("last",)  # goes back to its first value when a request begins

    def __init__(self, lookup: int = 12, most: int = 6, bar: float = 0.5) -> None:
        self.lookup, self.most, self.bar = lookup, most, bar
        self.last = 1

    def act(self, observation: Observation) -> Action:
        if (observation.ngram_match or 0) >= 3:
            return self.draft(self.lookup, observation, "ngram")
        sure = (observation.target_top1 or 0.0) > self.bar
        return self.draft(min(self.most, self.last + 1) if sure else 1, observation)

    def update(self, record: RoundRecord) -> None:
        if record.drafted:
            self.last = record.accepted


# %% Compare it, also with other parameters: those of __init__ are the keys of the spec
if __name__ == "__main__":
    policies = ["ar", "static:tuned", "assc", "cascade", "sure", "sure:bar=0.8,most=3", "oracle"]
    words = ["--backend", "replay", "--requests", "24", "--policies", *policies, *sys.argv[1:]]
    sys.exit(evaluation.main(words))
