"""The featurizer: `Observation` to a named, bounded float32 vector, the same object in training and in the engine.

Every field is causal: it uses finished rounds and what the decoder knows at the decision point. Fields are declared
in `FIELDS`; a policy lists the ones it reads, and an artefact stores that list together with `FEATURES_VERSION`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from assc.core import Observation, RoundRecord
from assc.errors import ArtefactError
from assc.kinds import is_lookup
from assc.text_memory import TEXT, TextReader

FEATURES_VERSION = 1
"""Raise it when the meaning, order or bounds of a field change: older artefacts are then refused."""

HISTORY = 4
"""rounds of history in the vector"""

EMA_DECAY = 0.7
EMA_START = 0.75
"""start value and decay of the acceptance average, those of the reference heuristic"""

HITS_START = 0.5
"""average of hits before there was a round"""

MAX_ENTROPY = 12.0
"""nats; above the entropy of a uniform distribution over 160,000 tokens (11.98)"""

MAX_MATCH = 16
MAX_POSITION = 4096
LOG_MAX_POSITION = math.log1p(MAX_POSITION)


@dataclass(frozen=True)
class FieldSpec:
    """One named part of the vector: `size` numbers within [low, high]."""

    name: str
    size: int
    low: float
    high: float
    unit: str
    doc: str
    read: Callable[[Observation], Sequence[float]]
    needs: frozenset[str] = frozenset()
    """optional `Observation` fields that must be filled for it"""


def _padded(values: list[float]) -> Sequence[float]:
    """With -1 where there was no round yet."""
    return values if len(values) == HISTORY else values + [-1.0] * (HISTORY - len(values))


def _history_k(o: Observation) -> Sequence[float]:
    ks, k_max = [r.action.k for r in o.past[: -HISTORY - 1 : -1]], max(1, o.k_max)
    return _padded([k / (k if k > k_max else k_max) for k in ks])


def _history_accepted(o: Observation) -> Sequence[float]:
    return _padded([r.accepted / r.drafted if r.drafted else -1.0 for r in o.past[: -HISTORY - 1 : -1]])


def _history_rollback(o: Observation) -> Sequence[float]:
    return _padded([0.0 if r.action.k else 1.0 for r in o.past[: -HISTORY - 1 : -1]])


def acceptance_ema(past: Sequence[RoundRecord], ema: float = EMA_START) -> float:
    """Exponential average of accepted/drafted over the rounds that drafted, `ema` before the first."""
    for record in past:
        if record.drafted:
            ema = EMA_DECAY * ema + (1 - EMA_DECAY) * record.accepted / record.drafted
    return ema


def full_streak(past: Sequence[RoundRecord], most: int = 8) -> int:
    """Rounds in a row, newest first, in which everything drafted was accepted; counted up to `most`."""
    streak = 0
    while streak < most and streak < len(past):
        record = past[-1 - streak]
        if not record.drafted or record.accepted < record.drafted:
            break
        streak += 1
    return streak


def _optional(value: float | None) -> float:
    return -1.0 if value is None or math.isnan(value) else value


def _match(o: Observation) -> Sequence[float]:
    return [-1.0 if o.ngram_match is None else min(o.ngram_match, MAX_MATCH) / MAX_MATCH]


def model_hits(past: Sequence[RoundRecord], hits: float = HITS_START) -> float:
    """Exponential average of "its first token was accepted" over the rounds that a model drafted."""
    for record in past:
        if record.drafted and record.action.drafter is not None and not is_lookup(record.action.drafter):
            hits = EMA_DECAY * hits + (1 - EMA_DECAY) * (record.accepted > 0)
    return hits


FIELDS: dict[str, FieldSpec] = {
    f.name: f
    for f in (
        FieldSpec("history_k", HISTORY, -1, 1, "K/K_max", "planned K of the last rounds, newest first", _history_k),
        FieldSpec("history_accepted", HISTORY, -1, 1, "accepted/drafted", "-1: nothing was drafted", _history_accepted),
        FieldSpec("history_rollback", HISTORY, -1, 1, "0 or 1", "was the round a rollback?", _history_rollback),
        FieldSpec(
            "acceptance_ema", 1, 0, 1, "rate", "exponential average of acceptance", lambda o: [acceptance_ema(o.past)]
        ),
        FieldSpec(
            "full_streak",
            1,
            0,
            1,
            "rounds/8",
            "rounds in a row with everything accepted",
            lambda o: [min(full_streak(o.past), 8) / 8],
        ),
        FieldSpec(
            "target_entropy",
            1,
            -1,
            MAX_ENTROPY,
            "nats",
            "of the target's distribution at the last committed token; -1: none yet",
            lambda o: [_optional(o.target_entropy)],
            frozenset({"target_entropy"}),
        ),
        FieldSpec(
            "target_top1",
            1,
            -1,
            1,
            "probability",
            "largest probability of that distribution; -1: none yet",
            lambda o: [_optional(o.target_top1)],
            frozenset({"target_top1"}),
        ),
        FieldSpec(
            "draft_entropy",
            1,
            -1,
            MAX_ENTROPY,
            "nats",
            "of the draft's distribution for the next position; costs the draft's first forward; -1: no model draft",
            lambda o: [_optional(o.draft_entropy)],
            frozenset({"draft_entropy"}),
        ),
        FieldSpec(
            "draft_top1",
            1,
            -1,
            1,
            "probability",
            "largest draft probability for the next position; same cost",
            lambda o: [_optional(o.draft_top1)],
            frozenset({"draft_top1"}),
        ),
        FieldSpec(
            "ngram_match",
            1,
            -1,
            1,
            f"tokens/{MAX_MATCH}",
            "longest suffix seen before; -1: no n-gram drafter",
            _match,
            frozenset({"ngram_match"}),
        ),
        FieldSpec("temperature", 1, 0, 2, "1", "sampling temperature, 0 is greedy", lambda o: [o.temperature]),
        FieldSpec(
            "position",
            1,
            0,
            1,
            "log",
            f"log(1 + new tokens) / log(1 + {MAX_POSITION})",
            lambda o: [math.log1p(o.position) / LOG_MAX_POSITION],
        ),
        FieldSpec(
            "remaining",
            1,
            0,
            1,
            "tokens/16",
            "budget left, capped at 16: K beyond it is cut",
            lambda o: [min(o.remaining, 16) / 16],
        ),
        FieldSpec(
            "match_found",
            1,
            -1,
            1,
            "0 or 1",
            "has the suffix occurred before? -1: no n-gram drafter",
            lambda o: [-1.0 if o.ngram_match is None else float(o.ngram_match > 0)],
            frozenset({"ngram_match"}),
        ),
        FieldSpec(
            "text",
            TEXT,
            -1,
            2,
            "counts",
            "who followed whom in the text so far (assc/text_memory.py); -1: unknown",
            lambda o: TextReader()(o),
            frozenset({"committed"}),
        ),
        FieldSpec(
            "model_hits",
            1,
            0,
            1,
            "rate",
            "exponential average of whether a model's first token was accepted",
            lambda o: [model_hits(o.past)],
        ),
        FieldSpec("cost_ratio", 1, 0, 4, "c", "one draft step / one target step", lambda o: [o.cost_ratio]),
        FieldSpec("occupancy", 1, 0, 1, "rows/rows", "share of the batch that decodes", lambda o: [o.occupancy]),
    )
}

DEFAULT_FIELDS: tuple[str, ...] = (
    "history_k",
    "history_accepted",
    "history_rollback",
    "acceptance_ema",
    "full_streak",
    "target_entropy",
    "target_top1",
    "ngram_match",
    "temperature",
    "position",
    "remaining",
    "cost_ratio",
    "occupancy",
)
"""what the environments observe; costs no draft forward"""
LEARNER_FIELDS: tuple[str, ...] = (*DEFAULT_FIELDS, "match_found", "text", "model_hits")
"""what learners are trained on: all fields that cost no draft forward"""


class _Continued:
    """An average over `past`, continued from the last call where `past` goes on from there, else from the start."""

    def __init__(self, average: Callable[[Sequence[RoundRecord], float], float], start: float) -> None:
        self.average, self.start = average, start
        self.seen: tuple[int, RoundRecord | None, float] = (0, None, start)

    def __call__(self, o: Observation) -> Sequence[float]:
        past = o.past
        count, last, value = self.seen
        if not (0 < count <= len(past) and past[count - 1] is last):
            count, value = 0, self.start
        value = self.average(past[count:], value)
        self.seen = (len(past), past[-1] if past else None, value)
        return (value,)


class Featurizer:
    """Maps an `Observation` to a float32 vector of shape [size].

    Values are clipped to their bounds and always finite; -1 marks "not known".
    """

    def __init__(self, fields: Sequence[str] = DEFAULT_FIELDS) -> None:
        unknown = [f for f in fields if f not in FIELDS]
        if unknown or not fields:
            raise ArtefactError(f"unknown observation field {unknown or 'list'}; known fields: {', '.join(FIELDS)}")
        self.fields = tuple(fields)
        self.specs = tuple(FIELDS[f] for f in self.fields)
        self.size = sum(s.size for s in self.specs)
        self.low: NDArray[np.float32] = np.concatenate([np.full(s.size, s.low, np.float32) for s in self.specs])
        self.high: NDArray[np.float32] = np.concatenate([np.full(s.size, s.high, np.float32) for s in self.specs])
        self.needs: frozenset[str] = frozenset().union(*(s.needs for s in self.specs))
        own: dict[str, Callable[[Observation], Sequence[float]]] = {
            "acceptance_ema": _Continued(acceptance_ema, EMA_START),
            "model_hits": _Continued(model_hits, HITS_START),
            "text": TextReader(),
        }
        self._readers = [own.get(s.name, s.read) for s in self.specs]

    @property
    def names(self) -> tuple[str, ...]:
        """One name per number of the vector, such as `history_k[0]`."""
        return tuple(
            n for s in self.specs for n in ([s.name] if s.size == 1 else [f"{s.name}[{i}]" for i in range(s.size)])
        )

    def __call__(self, observation: Observation) -> NDArray[np.float32]:
        vector = np.array([v for read in self._readers for v in read(observation)], dtype=np.float32)
        np.fmax(vector, self.low, out=vector)  # a NaN becomes the lower bound, which is -1 where values may be unknown
        np.fmin(vector, self.high, out=vector)
        return vector
