"""The featurizer is a pure function of the observation, although it remembers how far it has read."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np

from assc.core import ROLLBACK, Action, Observation, RoundRecord
from assc.observe import FIELDS, Featurizer, acceptance_ema, full_streak


def random_past(rng: random.Random, n: int) -> list[RoundRecord]:
    past = []
    for i in range(n):
        k = rng.choice((0, 2, 4, 8))
        drafted = min(k, rng.randint(0, 9))
        accepted = rng.choice((drafted, rng.randint(0, drafted)))
        action = Action("ngram", k) if k else ROLLBACK
        past.append(RoundRecord(i, i, action, drafted, accepted, accepted + 1, (), 0.1))
    return past


def observation(past: Sequence[RoundRecord], **changes: float | None) -> Observation:
    values: dict[str, float | None] = {"temperature": 0.5, "cost_ratio": 0.1, "target_entropy": 1.0}
    return Observation(len(past), 3, 20, 16, past=past, **(values | changes))  # type: ignore[arg-type]


def test_reading_on_equals_reading_from_the_start() -> None:
    """Growing lists, copied tuples, repeated looks, jumps between requests and back: always the value from scratch."""
    rng = random.Random(0)
    used = Featurizer(list(FIELDS))
    streams = [random_past(rng, 60) for _ in range(4)]
    growing: list[RoundRecord] = []
    for step in range(60):
        growing.append(streams[0][step])
        histories = [growing, tuple(growing), *(s[: rng.randint(0, 60)] for s in streams[1:])]
        for past in histories:
            seen = observation(past)
            expected = [v for s in used.specs for v in s.read(seen)]
            np.testing.assert_array_equal(used(seen), np.clip(np.array(expected, np.float32), used.low, used.high))


def test_average_and_streak_by_hand() -> None:
    rounds = [
        RoundRecord(i, i, Action("d", 4) if d else ROLLBACK, d, a, a + 1, (), 0.1)
        for i, (d, a) in enumerate([(4, 4), (0, 0), (4, 0), (2, 2), (4, 4)])
    ]
    assert math.isclose(acceptance_ema(rounds[:3]), 0.7 * (0.7 * 0.75 + 0.3))
    assert [full_streak(rounds[:n]) for n in range(6)] == [0, 1, 0, 0, 1, 2]
    assert full_streak([rounds[0]] * 20) == 8


def test_B16_strange_values_are_bounded() -> None:
    featurizer = Featurizer(list(FIELDS))
    for value in (math.nan, math.inf, -math.inf, 1e30, -1e30):
        vector = featurizer(
            observation([], temperature=value, cost_ratio=value, target_entropy=value, draft_top1=value)
        )
        assert vector.dtype == np.float32 and np.isfinite(vector).all()
        assert (vector >= featurizer.low).all() and (vector <= featurizer.high).all()
    unknown = featurizer(observation([], target_entropy=math.nan))
    assert unknown[list(featurizer.names).index("target_entropy")] == -1.0
