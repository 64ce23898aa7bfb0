"""The featurizer's vector in the scale that linear learners like, with a constant in front."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from assc.core import Observation
from assc.errors import ArtefactError
from assc.observe import Featurizer

LINEAR_FIELDS = ("acceptance_ema", "full_streak", "target_entropy", "target_top1", "ngram_match", "position")
CONFIDENCE_FIELDS = ("draft_entropy", "draft_top1")
TYPICAL = 3.0
"""entropies (nats) are divided by it"""


class LinearFeatures:
    """Float64 vector [1 + size]: 1, then the fields, entropies in units of 3 nats.

    `names` are fields of the featurizer joined by "+"; "" stands for `LINEAR_FIELDS`. Raises `ValueError` for others.
    """

    def __init__(self, names: str = "", *, confidence: bool = False) -> None:
        fields = tuple(names.split("+")) if names else LINEAR_FIELDS
        fields += tuple(f for f in CONFIDENCE_FIELDS if confidence and f not in fields)
        try:
            self.featurizer = Featurizer(fields)
        except ArtefactError as error:
            raise ValueError(f"fields are names joined by +, {error}") from None
        self.fields, self.needs = fields, self.featurizer.needs
        self.size = 1 + self.featurizer.size
        sizes = [(s.size, TYPICAL if s.unit == "nats" else 1.0) for s in self.featurizer.specs]
        self._scale: NDArray[np.float64] = np.concatenate([np.full(n, 1.0 / unit) for n, unit in sizes])

    def __call__(self, observation: Observation) -> NDArray[np.float64]:
        vector = np.empty(self.size)
        vector[0] = 1.0
        np.multiply(self.featurizer(observation), self._scale, out=vector[1:])
        return vector
