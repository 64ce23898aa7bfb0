"""A trained network in the engine: numpy only, no SB3, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from assc.actions import ActionTable
from assc.core import Action, Observation
from assc.observe import Featurizer
from policies.base import BasePolicy
from policies.rng import seed_state, uniform

ACTIVATIONS = ("tanh", "relu")


@dataclass(frozen=True)
class Normaliser:
    """Observation scaling of SB3's `VecNormalize`: clip((x − mean) / sqrt(var + eps), ±clip), float64 [size]."""

    mean: NDArray[np.float64]
    var: NDArray[np.float64]
    eps: float
    clip: float


class Network:
    """A multi-layer perceptron from an observation vector to one score per action.

    `layers` are (weight [out, in], bias [out]) in float32; `activation` stands between them.

    >>> layers = [(np.eye(2, dtype=np.float32), np.zeros(2, np.float32))]
    >>> Network(layers, "relu")(np.array([0.5, -1.0], np.float32)).tolist()
    [0.5, -1.0]
    """

    def __init__(
        self,
        layers: Sequence[tuple[NDArray[np.float32], NDArray[np.float32]]],
        activation: str,
        normaliser: Normaliser | None = None,
    ) -> None:
        if activation not in ACTIVATIONS:
            raise ValueError(f"the activation is one of {', '.join(ACTIVATIONS)}, got {activation!r}")
        self.layers, self.activation, self.normaliser = tuple(layers), activation, normaliser
        self._hidden = [(np.ascontiguousarray(w.T), b) for w, b in self.layers[:-1]]
        self._last = (np.ascontiguousarray(self.layers[-1][0].T), self.layers[-1][1])
        if normaliser is not None:
            self._scale: NDArray[np.float64] = np.sqrt(normaliser.var + normaliser.eps)

    def __call__(self, vector: NDArray[np.float32]) -> NDArray[np.float32]:
        x = vector
        if self.normaliser is not None:
            y = (x - self.normaliser.mean) / self._scale
            np.minimum(np.maximum(y, -self.normaliser.clip, out=y), self.normaliser.clip, out=y)
            x = y.astype(np.float32)
        for weight, bias in self._hidden:
            x = x @ weight
            x += bias
            if self.activation == "tanh":
                np.tanh(x, out=x)
            else:
                np.maximum(x, 0.0, out=x)
        scores: NDArray[np.float32] = x @ self._last[0] + self._last[1]
        return scores


class LearnedPolicy(BasePolicy):
    """Plays the best-scored action of a saved network; `deterministic=False` samples from softmax(scores).

    Sampling has its own seeded stream and is for policies whose scores are logits (PPO, A2C), not values (DQN). An
    action above what can be played now is cut to that, as the decoder cuts the draft.

    Uses the observation fields listed in its artefact. Source: PPO (Schulman et al. 2017, arXiv 1707.06347), A2C
    (Mnih et al. 2016, arXiv 1602.01783), DQN (Mnih et al. 2015), trained with stable-baselines3.

    >>> table = ActionTable((Action(None, 0), Action("ngram", 4)))
    >>> network = Network([(np.zeros((2, 1), np.float32), np.array([0.0, 1.0], np.float32))], "tanh")
    >>> policy = LearnedPolicy(network, Featurizer(["temperature"]), table)
    >>> policy.begin(table)
    >>> class Seen: k_max, temperature, past = 8, 0.0, ()
    >>> str(policy.act(Seen))
    'ngram:4'
    """

    uses: ClassVar[str] = "as listed in the artefact"
    learned: ClassVar[tuple[str, ...]] = ("rng",)

    def __init__(
        self, network: Network, featurizer: Featurizer, table: ActionTable, *, deterministic: bool = True, seed: int = 0
    ) -> None:
        self.network, self.featurizer, self.saved_table = network, featurizer, table
        self.needs = featurizer.needs
        self.deterministic = deterministic
        self.rng = seed_state(seed)

    def scores(self, observation: Observation) -> NDArray[np.float32]:
        """One score per action of the table."""
        return self.network(self.featurizer(observation))

    def choose(self, scores: NDArray[np.float32]) -> int:
        """The index that is played for these scores."""
        if self.deterministic:
            return int(scores.argmax())
        weights = np.cumsum(np.exp(scores - scores.max(), dtype=np.float64))
        self.rng, u = uniform(self.rng)
        return min(int(np.searchsorted(weights, u * weights[-1])), len(weights) - 1)

    def act(self, observation: Observation) -> Action:
        assert self.saved_table is not None
        action = self.saved_table.actions[self.choose(self.scores(observation))]
        return action if action.k <= observation.k_max else self.draft(action.k, observation, action.drafter)
