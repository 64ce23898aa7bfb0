"""Contextual linear bandits over the action table."""

from __future__ import annotations

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
from policies.vectors import LinearFeatures

SPREAD = 0.5
"""tokens; the rewards of an arm of K are taken to scatter by this times sqrt(K + 1), as in `policies.arms`"""


class LinearBandit(BasePolicy):
    """What `linucb` and `lints` share: ridge regression per arm, features of the observation, choice by `scores`."""

    learned: ClassVar[tuple[str, ...]] = ("arms", "rng")

    def __init__(
        self,
        explore: float = 1.0,
        ridge: float = 1.0,
        fields: str = "",
        confidence: bool = False,
        frozen: bool = False,
        seed: int = 0,
    ) -> None:
        if not (0 <= explore < math.inf and 0 < ridge < math.inf):
            raise ValueError(f"explore is 0 or more and ridge above 0, got {explore} and {ridge}")
        self.explore, self.frozen = explore, frozen
        self.features = LinearFeatures(fields, confidence=confidence)
        self.needs = self.features.needs
        self.arms = RidgeArms(self.features.size, ridge)
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
        self._width = self.explore * SPREAD * np.sqrt(np.array(ks) + 1.0)
        self._all = max(self._ks)
        self._seen = None

    def act(self, observation: Observation) -> Action:
        self._seen = x = self.features(observation)
        means, variances = self.arms.estimate(x, self.arms.rho())
        scores = means if self.frozen else self.scores(means, variances)
        if observation.k_max < self._all:
            scores = np.where(self._ks <= observation.k_max, scores, -np.inf)
        action = self._actions[int(scores.argmax())]
        assert action is not None
        return action

    def scores(self, means: NDArray[np.float64], variances: NDArray[np.float64]) -> NDArray[np.float64]:
        raise NotImplementedError

    def update(self, record: RoundRecord) -> None:
        if self._seen is not None and not self.frozen:
            self.arms.add(str(record.action), self._seen, record.emitted, record.seconds)
        self._seen = None

    def state_dict(self) -> dict[str, Any]:
        return {"arms": self.arms.to_json(), "rng": self.rng, "fields": list(self.features.fields)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if set(state) != {*self.learned, "fields"} or not isinstance(state["rng"], int):
            raise ArtefactError(f"policy {self.spec!r} expects the state of a linear bandit, got {sorted(state)}")
        if state["fields"] != list(self.features.fields):
            raise ArtefactError(f"policy {self.spec!r} reads {list(self.features.fields)}, saved was {state['fields']}")
        arms = RidgeArms(self.arms.size, self.arms.ridge)
        arms.from_json(state["arms"])
        super().load_state_dict({"arms": arms, "rng": state["rng"]})


@register("linucb")
class LinUcb(LinearBandit):
    """argmax over the arms of θ_a·x + explore·σ_a·sqrt(xᵀ A_a⁻¹ x), with ridge regression θ_a per arm.

    Arms are the actions of the table, of which those compete that can be played now. x is 1 and the fields
    acceptance_ema, full_streak, target_entropy, target_top1, ngram_match and position of the featurizer;
    `confidence=true` adds the draft's entropy and top-1 (its first forward is paid in every round), and
    `fields=a+b` names others. Reward: tokens − ρ·seconds as of `bandit`, tokens and seconds regressed apart, so that ρ
    may move. σ_a = sqrt(K_a + 1) / 2 tokens. `frozen=true` neither learns nor explores.

    Limits: it never forgets; a change that x does not show is noticed late.

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

    uses: ClassVar[str] = "H, E, N, seconds"

    def scores(self, means: NDArray[np.float64], variances: NDArray[np.float64]) -> NDArray[np.float64]:
        return means + self._width * np.sqrt(np.maximum(variances, 0.0))


@register("lints")
class LinTs(LinearBandit):
    """Thompson sampling on the same regressions as `linucb`: argmax of a draw from N(θ_a·x, explore²·σ_a²·xᵀA_a⁻¹x).

    One number per arm is drawn, which has the same law as θ_a drawn from its posterior and multiplied by x. Arms, x,
    reward, σ_a and keys are those of `linucb`.

    Uses the features named, the tokens and seconds of its own rounds. Source: Agrawal and Goyal 2013, arXiv 1209.3352.

    >>> from assc.actions import ActionTable
    >>> policy = LinTs(seed=1)
    >>> policy.begin(ActionTable.build(["ngram"], [2]))
    >>> for i in range(60):
    ...     action = policy.act(Observation(i, 3, 9, 8, 0.0, (), 0.1, ngram_match=2))
    ...     policy.update(RoundRecord(i, i, action, action.k, action.k, action.k + 1, (), 0.1 + 0.01 * action.k))
    >>> means, _ = policy.arms.estimate(policy.features(Observation(60, 3, 9, 8, 0.0, (), 0.1, ngram_match=2)), 20.0)
    >>> bool(means[1] > means[0])
    True
    """

    uses: ClassVar[str] = "H, E, N, seconds"

    def scores(self, means: NDArray[np.float64], variances: NDArray[np.float64]) -> NDArray[np.float64]:
        self.rng, z = self._normals.take(self.rng, len(means))
        return means + self._width * z * np.sqrt(np.maximum(variances, 0.0))
