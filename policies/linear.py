"""Contextual linear bandits over the action table."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from assc.actions import ActionTable
from assc.core import Action, Observation, RoundRecord
from assc.errors import ArtefactError
from assc.registry import register
from policies.base import BasePolicy
from policies.ridge import RidgeArms
from policies.rng import NormalStream, seed_state
from policies.round_costs import Costs, add_round, load_level, price_list
from policies.vectors import LinearFeatures

SPREAD = 0.5
"""tokens; the rewards of an arm of K are taken to scatter by this times sqrt(K + 1), as in `policies.arms`"""
PACE = 0.995
"""kept of the sums behind ρ from round to round"""


def _roots(variances: NDArray[np.float64]) -> NDArray[np.float64]:
    """Their square roots, in place; rounding may have put one a little below 0."""
    np.maximum(variances, 0.0, out=variances)
    roots: NDArray[np.float64] = np.sqrt(variances, out=variances)
    return roots


class LinearBandit(BasePolicy):
    """What `linucb` and `lints` share: ridge regression per arm, features of the observation, choice by `scores`."""

    learner: ClassVar[bool] = True
    learned: ClassVar[tuple[str, ...]] = ("arms", "costs", "pace", "rng")
    per_request: ClassVar[tuple[str, ...]] = ("level",)

    def __init__(
        self,
        explore: float = 1.0,
        ridge: float = 1.0,
        fields: str = "",
        confidence: bool = False,
        frozen: bool = False,
        seed: int = 0,
        discount: float = 1.0,
    ) -> None:
        if not 0 < discount <= 1:
            raise ValueError(f"discount is in (0, 1], got {discount}")
        if not (0 <= explore < math.inf and 0 < ridge < math.inf):
            raise ValueError(f"explore is 0 or more and ridge above 0, got {explore} and {ridge}")
        self.explore, self.frozen = explore, frozen
        self.features = LinearFeatures(fields, confidence=confidence)
        self.needs = self.features.needs
        self.arms = RidgeArms(self.features.size, ridge, discount)
        self.costs: Costs = {}
        self.pace: dict[str, list[float]] = {}
        """level of load -> discounted tokens and seconds"""
        self.level = load_level(1.0)
        self.rng = seed_state(seed)
        self._normals = NormalStream()
        self._seen: NDArray[np.float64] | None = None

    def begin(self, table: ActionTable) -> None:
        super().begin(table)
        actions = table.actions if self.saved_table is None else self.saved_table.actions
        self.arms.extend([str(a) for a in actions])
        known = {str(a): a for a in actions}
        self._actions = [known.get(name) for name in self.arms.names]
        ks = [0 if a is None else a.k for a in self._actions]
        self._ks = np.array([1 << 30 if a is None else a.k for a in self._actions])
        """K of each arm; arms of another table can never be played"""
        self._width = self.explore * SPREAD * np.sqrt(np.array(ks) + 1.0) * (np.array(ks) > 0)
        self._all = max(self._ks)
        self._drafters: list[str | None] = [None, *dict.fromkeys(a.drafter for a in actions if a.drafter is not None)]
        names = [None if a is None else a.drafter for a in self._actions]
        of = np.array([self._drafters.index(n) for n in names])
        self._of_arms = np.concatenate([2 * of, 2 * of + 1])
        """where the price of a call of each arm's drafter, then that of a token, stands in the list of all"""
        self._places = {a: i for i, a in enumerate(self._actions) if a is not None}
        self._seen = None

    def act(self, observation: Observation) -> Action:
        level = self.level = load_level(observation.occupancy)
        self._seen = x = self.features(observation)
        c = observation.cost_ratio
        priced, plain = price_list(self.costs, level, self._drafters, c)
        tokens, seconds = self.pace.get(level, (0.0, 0.0))
        rho = tokens / seconds if seconds > 0 else 1.0 / plain
        of_arms = np.array([rho * price for both in priced for price in both])[self._of_arms]
        n = len(self._ks)
        means, variances = self.arms.estimate(x, of_arms[n:])
        means -= of_arms[:n]  # against plain decoding, which is worth 0
        scores = means if self.frozen else self.scores(means, variances)
        if observation.k_max < self._all:
            scores = np.where(self._ks <= observation.k_max, scores, -np.inf)
        action = self._actions[int(scores.argmax())]
        assert action is not None
        return action

    def scores(self, means: NDArray[np.float64], variances: NDArray[np.float64]) -> NDArray[np.float64]:
        raise NotImplementedError

    def update(self, record: RoundRecord) -> None:
        x, self._seen = self._seen, None
        if x is None or self.frozen or not add_round(self.costs, record, self.level):
            return
        tokens, seconds = self.pace.get(self.level, (0.0, 0.0))
        self.pace[self.level] = [PACE * tokens + record.emitted, PACE * seconds + record.seconds]
        place = self._places.get(record.action)
        if place is None and (name := str(record.action)) in self.arms.names:  # an arm of another table
            place = self.arms.names.index(name)
        if place is not None:
            self.arms.add(place, x, record.emitted - 1, record.drafted)

    def state_dict(self) -> dict[str, Any]:
        own = {"costs": self.costs, "pace": self.pace, "rng": self.rng}
        return copy.deepcopy(own) | {"arms": self.arms.to_json(), "fields": list(self.features.fields)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if set(state) != {*self.learned, "fields"} or not isinstance(state["rng"], int):
            raise ArtefactError(f"policy {self.spec!r} expects the state of a linear bandit, got {sorted(state)}")
        if state["fields"] != list(self.features.fields):
            raise ArtefactError(f"policy {self.spec!r} reads {list(self.features.fields)}, saved was {state['fields']}")
        arms = RidgeArms(self.arms.size, self.arms.ridge, self.arms.discount)
        arms.from_json(state["arms"])
        super().load_state_dict({n: state[n] for n in self.learned if n != "arms"} | {"arms": arms})


@register("linucb")
class LinUcb(LinearBandit):
    """argmax over the arms of E[gain − ρ·(call + price·drafted)] + explore·σ_a·sqrt(xᵀ A_a⁻¹ x); rollback is worth 0.

    Arms are the actions of the table, of which those compete that can be played now. x is 1 and the fields
    acceptance_ema, full_streak, target_entropy, target_top1, ngram_match and position of the featurizer;
    `confidence=true` adds the draft's entropy and top-1 (its first forward is paid in every round), and
    `fields=a+b` names others. Gain is the round's tokens less the one of plain decoding; it and the number of drafted
    tokens are regressed on x by ridge regressions per arm. What a call and a drafted token cost in seconds depends on
    the machine and the load and not on the text, so it is fitted to all rounds at this load together
    (`policies.round_costs`): when the load changes no arm must be tried again. ρ = Σtokens / Σseconds of this policy at
    that load, discounted by 0.995 per round. σ_a = sqrt(K_a + 1) / 2 tokens. `frozen=true` neither learns nor explores.

    `discount` < 1 lets the regressions forget too (Russac et al. 2019, arXiv 1909.09146, in blocks of 32 rounds). The
    default does not: a change that x shows needs no forgetting, and forgetting costs exploration for ever.

    Uses the features named, the tokens and seconds of its own rounds. Source: Li et al. 2010, arXiv 1003.0146, LinUCB
    with disjoint models.

    >>> from assc.actions import ActionTable
    >>> from assc.core import ROLLBACK
    >>> policy = LinUcb()
    >>> policy.begin(ActionTable.build(["ngram"], [2]))
    >>> for i in range(30):
    ...     action = policy.act(Observation(i, 3, 9, 8, 0.0, (), 0.1, ngram_match=2))
    ...     policy.update(RoundRecord(i, i, action, action.k, action.k, action.k + 1, (), 0.1 + 0.01 * action.k))
    >>> str(action)
    'ngram:2'
    """

    uses: ClassVar[str] = "H, E, N, L, seconds"

    def scores(self, means: NDArray[np.float64], variances: NDArray[np.float64]) -> NDArray[np.float64]:
        return means + self._width * _roots(variances)


@register("lints")
class LinTs(LinearBandit):
    """Thompson sampling on the same regressions as `linucb`: argmax of a draw from N(θ_a·x, explore²·σ_a²·xᵀA_a⁻¹x).

    One number per arm is drawn, which has the same law as θ_a drawn from its posterior and multiplied by x. Arms, x,
    reward, prices, σ_a and keys are those of `linucb`.

    Uses the features named, the tokens and seconds of its own rounds. Source: Agrawal and Goyal 2013, arXiv 1209.3352.

    >>> from assc.actions import ActionTable
    >>> policy = LinTs(seed=1)
    >>> policy.begin(ActionTable.build(["ngram"], [2]))
    >>> for i in range(60):
    ...     action = policy.act(Observation(i, 3, 9, 8, 0.0, (), 0.1, ngram_match=2))
    ...     policy.update(RoundRecord(i, i, action, action.k, action.k, action.k + 1, (), 0.1 + 0.01 * action.k))
    >>> str(action)
    'ngram:2'
    """

    uses: ClassVar[str] = "H, E, N, L, seconds"

    def scores(self, means: NDArray[np.float64], variances: NDArray[np.float64]) -> NDArray[np.float64]:
        self.rng, z = self._normals.take(self.rng, len(means))
        return means + self._width * z * _roots(variances)
