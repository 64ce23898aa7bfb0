"""A trained recurrent network in the engine: one LSTM step in numpy per decision, no SB3, no torch."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from assc.actions import ActionTable
from assc.core import Observation
from assc.observe import Featurizer
from policies.learned import LearnedPolicy, Network, Normaliser

Floats32 = NDArray[np.float32]


class Lstm:
    """One layer of long short-term memory with torch's weights, gates in the order input, forget, cell, output.

    `w_x` [4·H, in], `w_h` [4·H, H], `bias` [4·H] (both of torch's added up), float32. Source: Hochreiter and
    Schmidhuber 1997, with the forget gate of Gers et al. 2000.

    >>> lstm = Lstm(np.zeros((4, 1), np.float32), np.zeros((4, 1), np.float32), np.zeros(4, np.float32))
    >>> h, c = lstm(np.ones(1, np.float32), *lstm.start())
    >>> h.tolist(), c.tolist()
    ([0.0], [0.0])
    """

    def __init__(self, w_x: Floats32, w_h: Floats32, bias: Floats32) -> None:
        self.w_x, self.w_h, self.bias = w_x, w_h, bias
        self.hidden = w_h.shape[1]
        self._both = np.ascontiguousarray(np.concatenate([w_x, w_h], axis=1).T)

    def start(self) -> tuple[Floats32, Floats32]:
        """Output and cell before the first step of a request: zeros."""
        return np.zeros(self.hidden, np.float32), np.zeros(self.hidden, np.float32)

    def __call__(self, x: Floats32, h: Floats32, c: Floats32) -> tuple[Floats32, Floats32]:
        """Output and cell [H] after one more input [in]."""
        n = self.hidden
        z = np.concatenate([x, h]) @ self._both
        z += self.bias
        gates = 1.0 / (1.0 + np.exp(-np.clip(z, -80.0, 80.0)))
        cell: Floats32 = gates[n : 2 * n] * c + gates[:n] * np.tanh(z[2 * n : 3 * n])
        return gates[3 * n :] * np.tanh(cell), cell


class RecurrentNetwork:
    """Observation scaling, an LSTM, and a `Network` from its output to one score per action."""

    def __init__(self, lstm: Lstm, head: Network, normaliser: Normaliser | None = None) -> None:
        self.lstm, self.head, self.normaliser = lstm, head, normaliser

    def __call__(self, vector: Floats32, h: Floats32, c: Floats32) -> tuple[Floats32, Floats32, Floats32]:
        """Scores, and the state after this step."""
        n = self.normaliser
        if n is not None:
            scaled = np.clip((vector - n.mean) / np.sqrt(n.var + n.eps), -n.clip, n.clip)
            vector = scaled.astype(np.float32)
        h, c = self.lstm(vector, h, c)
        return self.head(h), h, c


class RecurrentPolicy(LearnedPolicy):
    """As `LearnedPolicy`, with a memory that a request starts empty and that each decision moves on by one step.

    A guard around it that rolls back without asking leaves the memory as it was.

    Uses the observation fields listed in its artefact, and what it remembers of them. Source: PPO (Schulman et al.
    2017, arXiv 1707.06347) over an LSTM, trained with sb3-contrib.
    """

    per_request: ClassVar[tuple[str, ...]] = ("output", "cell")

    def __init__(
        self,
        network: RecurrentNetwork,
        featurizer: Featurizer,
        table: ActionTable,
        *,
        deterministic: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(network.head, featurizer, table, deterministic=deterministic, seed=seed)
        self.recurrent = network
        self.output, self.cell = network.lstm.start()

    def scores(self, observation: Observation) -> Floats32:
        found, self.output, self.cell = self.recurrent(self.featurizer(observation), self.output, self.cell)
        return found
