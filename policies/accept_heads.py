"""What acceptance is predicted from: numbers of a decision point and of a drafted token, and the heads over them.

Plain Python floats, since a head is asked after every drafted token. Fitting is in `policies.training.accept_fit`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from assc.core import Observation, RoundRecord
from assc.steps import StepObservation
from assc.text_memory import AHEAD, TEXT

LONGEST_MATCH = 16
MEMORY = 0.7
"""kept per round of the averages of hits"""
UNKNOWN = 0.5
"""average of hits before there was a round"""
CLIP = 8.0
"""largest log-odds of a probability used as a feature"""

Head = list[float]
"""coefficients of a linear function, of a chance's log-odds or of an expected gain"""


@dataclass
class Hits:
    """How often the lookup and the model drafter were right of late in this request, whoever drafted.

    A match that grows by what was committed shows that the lookup would have been right, also where it was not asked.
    """

    lookup: float = UNKNOWN
    model: float = UNKNOWN
    run: int = 0
    """tokens that the text has gone on agreeing with the lookup"""
    _match: int = 0
    _emitted: int = 0

    def observe(self, match: int) -> None:
        """A decision point with a match of this length."""
        if self._match and self._emitted:
            hit = match >= min(LONGEST_MATCH, self._match + self._emitted)
            self.lookup = MEMORY * self.lookup + (1 - MEMORY) * hit
            self.run = min(self.run + self._emitted, 64) if hit else 0
        self._match, self._emitted = match, 0

    def update(self, record: RoundRecord, by_model: bool) -> None:
        """A finished round."""
        self._emitted = record.emitted
        if by_model and record.drafted and (record.accepted or record.finish is None):
            self.model = MEMORY * self.model + (1 - MEMORY) * (record.accepted > 0)


def log_odds(p: float) -> float:
    """log(p / (1 - p)), cut to ±CLIP."""
    if p <= 0.0:
        return -CLIP
    return CLIP if p >= 1.0 else max(-CLIP, min(CLIP, math.log(p / (1.0 - p))))


def chance(head: Sequence[float], x: Sequence[float]) -> float:
    """The probability that a head of log-odds gives."""
    return logistic(dot(head, x))


def logistic(z: float) -> float:
    """1 / (1 + exp(−z))."""
    return 1.0 / (1.0 + math.exp(-z)) if z > -500 else 0.0


def dot(head: Sequence[float], x: Sequence[float]) -> float:
    """Σ head · x."""
    return sum(a * b for a, b in zip(head, x, strict=True))


def round_numbers(o: Observation, hits: Hits, text: Sequence[float] = (0.0,) * TEXT) -> list[float]:
    """What is known when a round begins: `ROUND` numbers of about unit size; `text` are those of the text itself."""
    entropy = 1.0 if o.target_entropy is None else min(o.target_entropy, 8.0) / 2.0
    top1 = 0.5 if o.target_top1 is None else o.target_top1
    m = math.log1p(min(o.ngram_match or 0, LONGEST_MATCH)) / math.log1p(LONGEST_MATCH)
    t = min(o.temperature, 2.0)
    run = math.log1p(hits.run) / 4.0
    place = math.log1p(o.position) / 5.0
    return [
        *(1.0, t, entropy, top1, t * top1, m, m * m, t * m, float(m > 0.0)),
        *(hits.lookup, hits.model, hits.lookup * m, run, place),
        *text,
    ]


PLAIN = 14
"""numbers of a round without those of the text"""
ROUND = PLAIN + TEXT


def lookup_numbers(x: Sequence[float], j: int, ahead: Sequence[float] = (0.0,) * AHEAD) -> list[float]:
    """Of position j of a lookup's proposal: `round_numbers` twice (the first for j = 1 only), and those of j."""
    first = list(x) if j == 1 else [0.0] * len(x)
    return [*x, *first, *place_numbers(x, j), *ahead]


def place_numbers(x: Sequence[float], j: int) -> list[float]:
    """How far in a lookup's proposal."""
    far = math.log2(j) / 4.0
    return [far, far * x[1], far * x[5], far * x[9], far * x[12]]


LOOKUP = 2 * ROUND + 5 + AHEAD


def step_numbers(x: Sequence[float], step: StepObservation) -> list[float]:
    """Of a token drafted by a model, in a round that began with `x`."""
    prob, top1, margin = step.prob or 0.0, step.top1 or 0.0, step.margin or 0.0
    product = top1 if step.product is None else step.product
    odds, most, t, first = log_odds(prob) / 4.0, log_odds(top1) / 4.0, x[1], float(step.drafted == 1)
    e, j = min(step.entropy or 0.0, 8.0) / 4.0, step.drafted
    return [
        *(1.0, first, math.log2(j) / 3.0, odds, odds * t, odds * abs(odds), most, most * t, margin, prob),
        *(e, e * t, e * e, t, t * prob, x[2], x[2] * first, x[3], x[3] * first, x[5], x[8], x[9], x[10], x[10] * first),
        *(product, log_odds(product) / 4.0, x[13]),
    ]


STEP = 27


SIZES = {"lookup": LOOKUP, "enter": ROUND, "judge": STEP, "next": STEP}
"""head -> numbers that it reads. `lookup`: is position j of its proposal accepted, if those before it are; `enter`: log
of what a round of the model is worth beyond the least that it can be, in tokens; `judge`: is the model's token
accepted, if those before it are; `next`: is the one after it, if it is"""


def plain_heads() -> dict[str, Head]:
    """Heads before any fit: a draft's probability at its word, a lookup that is right with long matches."""
    heads = {name: [0.0] * size for name, size in SIZES.items()}
    heads["lookup"][0], heads["lookup"][5], heads["lookup"][9] = -2.5, 3.0, 3.0
    heads["judge"][3] = heads["next"][3] = 4.0  # of the log-odds of the token's own probability, which is a quarter
    heads["enter"][0], heads["enter"][10] = -0.9, 0.5
    return heads


def sound_heads(value: Any) -> bool:
    """Whether a saved value has every head, and its numbers."""
    return (
        isinstance(value, dict)
        and {
            name: len(head)
            for name, head in value.items()
            if isinstance(head, list) and all(isinstance(n, int | float) for n in head)
        }
        == SIZES
    )
