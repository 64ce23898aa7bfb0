"""Uniformly random actions."""

from __future__ import annotations

from typing import ClassVar

from assc.core import Action, Observation
from assc.registry import register
from policies.base import BasePolicy
from policies.rng import seed_state, uniform


@register("random")
class RandomK(BasePolicy):
    """Every action of the table that can be played now with the same chance, rollback included.

    Data for exploration and a floor for sanity. The stream goes on from request to request; `reset` rewinds it.

    Uses nothing. Source: a baseline of this project.

    >>> from assc.actions import ActionTable
    >>> policy = RandomK(seed=1)
    >>> policy.begin(ActionTable.build(["ngram"], [1, 2, 4]))
    >>> class Seen: k_max = 2
    >>> sorted({str(policy.act(Seen)) for _ in range(50)})
    ['ngram:1', 'ngram:2', 'rollback']
    """

    uses: ClassVar[str] = "-"
    learned: ClassVar[tuple[str, ...]] = ("rng",)

    def __init__(self, seed: int = 0) -> None:
        self.rng = seed_state(seed)

    def act(self, observation: Observation) -> Action:
        k_max = observation.k_max
        playable = [a for a in self.table.actions if a.k <= k_max]
        self.rng, u = uniform(self.rng)
        return playable[int(u * len(playable))]
