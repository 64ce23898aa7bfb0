"""What a learner of decisions per draft token observes, and how it opens a round: the same in training and deployed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assc.actions import ActionTable
from assc.core import ROLLBACK, Action, Observation
from assc.errors import RequestError
from assc.kinds import first_lookup, first_model, is_lookup
from assc.observe import DEFAULT_FIELDS, Featurizer
from assc.steps import MAX_STEP_ENTROPY, STEP_FIELDS, StepObservation

STEP_FEATURES_VERSION = 1
"""Raise it when the meaning, order or bounds of a number change: older artefacts are then refused."""

MOST = 16
"""draft tokens that count as 1"""

STEP_NUMBERS: tuple[tuple[str, float, float, str, str], ...] = (
    ("drafted", 0, 1, f"tokens/{MOST}", "drafted so far in this round; 0: the round begins, nothing is drafted yet"),
    ("left", 0, 1, f"tokens/{MOST}", "that the round may still draft"),
    ("lookup", -1, 1, "0 or 1", "does a lookup draft this round? -1: the round begins"),
    ("step_entropy", -1, MAX_STEP_ENTROPY, "nats", "of the distribution of the token drafted last; -1: unknown"),
    ("step_top1", -1, 1, "probability", "its largest probability; -1: unknown"),
    ("step_margin", -1, 1, "probability", "lead of that over the second largest; -1: unknown"),
    ("step_prob", -1, 1, "probability", "of the token itself; -1: unknown"),
    ("step_product", -1, 1, "probability", "product of step_top1 over the round so far; -1: unknown"),
)
"""name, low, high, unit and meaning of the numbers in front of the round's own"""


@dataclass(frozen=True)
class Opening:
    """With whom a round is drafted, and how far at most: up to `cap` tokens of `drafter`.

    With `m` above 0, where the last `m` tokens or more have occurred before: up to `k_lookup` tokens of `lookup`.
    """

    drafter: str
    cap: int
    lookup: str | None = None
    m: int = 0
    k_lookup: int = 10

    @classmethod
    def of(cls, table: ActionTable, drafter: str | None = None, *, m: int = 0) -> Opening:
        """`drafter` (default: the first model, else the first) to its K_max. `RequestError` for what is not there."""
        name = drafter or first_model(table) or next(iter(table.drafters), None)
        lookup = first_lookup(table) if m else None
        if name is None or name not in table.drafters or m < 0 or (m and lookup is None):
            raise RequestError(
                f"decisions per draft token need a drafter, and a lookup where m is above 0; got drafter {drafter!r} "
                f"and m={m} for {table.describe()}"
            )
        k_lookup = min(10, max(table.k_values(lookup))) if lookup is not None else 10
        return cls(name, max(table.k_values(name)), lookup, m, k_lookup)

    @property
    def table(self) -> ActionTable:
        """The largest actions that it opens with."""
        more = () if self.lookup is None else (Action(self.lookup, self.k_lookup),)
        return ActionTable(tuple(dict.fromkeys((ROLLBACK, Action(self.drafter, self.cap), *more))))

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"ngram_match"}) if self.m else frozenset()

    def action(self, observation: Observation) -> Action:
        """What the round is opened with."""
        if self.lookup is not None and (observation.ngram_match or 0) >= self.m:
            return Action(self.lookup, self.k_lookup).clipped(observation.k_max)
        return Action(self.drafter, self.cap).clipped(observation.k_max)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class StepFeaturizer:
    """Maps a decision inside a round to a float32 vector: `STEP_NUMBERS`, then the round's own `fields`.

    Values are clipped to their bounds and always finite; -1 marks "not known".
    """

    def __init__(self, fields: Sequence[str] = DEFAULT_FIELDS) -> None:
        self.round = Featurizer(fields)
        self.fields = self.round.fields
        low, high = (np.array([n[i] for n in STEP_NUMBERS], np.float32) for i in (1, 2))
        self.low: NDArray[np.float32] = np.concatenate([low, self.round.low])
        self.high: NDArray[np.float32] = np.concatenate([high, self.round.high])
        self.size = len(self.low)
        self.needs = self.round.needs | frozenset(STEP_FIELDS)
        self.names = (*(n[0] for n in STEP_NUMBERS), *self.round.names)
        self._of: Observation | None = None
        self._rest: NDArray[np.float32] = np.zeros(self.round.size, np.float32)

    def __call__(self, observation: Observation, step: StepObservation | None = None) -> NDArray[np.float32]:
        """The vector [size]; without a `step` that of the beginning of the round."""
        if self._of is not observation:  # the round's part is the same for all of its tokens
            self._of, self._rest = observation, self.round(observation)
        if step is None:
            own = [0.0, min(observation.k_max, MOST) / MOST, -1.0, -1.0, -1.0, -1.0, -1.0, -1.0]
        else:
            told = (step.entropy, step.top1, step.margin, step.prob, step.product)
            own = [
                min(step.drafted, MOST) / MOST,
                min(step.planned - step.drafted, MOST) / MOST,
                float(is_lookup(step.drafter)),
                *(-1.0 if x is None else x for x in told),
            ]
        return np.concatenate([np.array(own, np.float32), self._rest])
