"""The featurizer's vector in the scale that linear learners like, with a constant in front."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from assc.core import Observation
from assc.errors import ArtefactError
from assc.observe import Featurizer

LINEAR_FIELDS = ("acceptance_ema", "full_streak", "target_entropy", "target_top1", "ngram_match", "position")
CONFIDENCE_FIELDS = ("draft_entropy", "draft_top1")
UNITS = {"target_entropy": 3.0, "draft_entropy": 3.0, "ngram_match": 0.25}
"""fields are divided by these, so that their usual values differ by about 1: 3 nats; a match of 4 tokens"""


class LinearFeatures:
    """Float64 vector [1 + size]: 1, then the fields in the units of `UNITS`.

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
        scales = [np.full(s.size, 1.0 / UNITS.get(s.name, 1.0)) for s in self.featurizer.specs]
        self._scale: NDArray[np.float64] = np.concatenate(scales)

    def __call__(self, observation: Observation) -> NDArray[np.float64]:
        vector = np.empty(self.size)
        vector[0] = 1.0
        np.multiply(self.featurizer(observation), self._scale, out=vector[1:])
        return vector
