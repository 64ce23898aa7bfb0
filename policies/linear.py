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
from policies import probing
from policies.base import BasePolicy
from policies.ridge import Places, RidgeArms
from policies.rng import NormalStream, seed_state
from policies.round_costs import Costs, add_round, load_level, prices
from policies.vectors import LinearFeatures

SPREAD = 0.5
"""tokens; the rewards of an arm of K are taken to scatter by this times sqrt(K + 1), as in `policies.arms`"""
BEYOND = 0.5
"""what a token after an accepted draft is taken to be accepted with, where nobody asked for it"""
PACE = 0.995
"""kept of the sums behind ρ from round to round"""


def outcomes(ks: NDArray[np.float64], record: RoundRecord) -> NDArray[np.float64]:
    """What a round says of every K of its drafter (`ks`, ascending): gains and drafted tokens, [2, K].

    The outcome of a smaller K follows from that of a larger one. So does that of a larger one, unless all that was
    asked for was drafted and accepted. To leave it out then would show larger K their failures only; the further
    tokens count as if each were accepted with chance BEYOND, given those before it. After a round that ended the
    request only the K up to the one played are told, [2, told].

    >>> from assc.core import Action
    >>> outcomes(np.array([1.0, 2.0, 4.0]), RoundRecord(0, 0, Action("model", 2), 2, 1, 2, (), 0.1)).tolist()
    [[1.0, 1.0, 1.0], [1.0, 2.0, 4.0]]
    >>> outcomes(np.array([1.0, 2.0, 4.0]), RoundRecord(0, 0, Action("model", 2), 2, 2, 3, (), 0.1)).tolist()
    [[1.0, 2.0, 2.75], [1.0, 2.0, 4.0]]
    """
    k, drafted, gain = record.action.k, record.drafted, record.emitted - 1.0
    if drafted < k:
        told: NDArray[np.float64] = np.minimum(ks, np.array([[gain], [drafted]]))
        return told
    if record.finish is None and record.accepted == drafted:
        further = 1.0 - BEYOND ** np.maximum(ks - k, 0.0)
        return np.stack([np.minimum(ks, k) + BEYOND / (1.0 - BEYOND) * further, ks])
    if record.finish is not None:
        ks = ks[: int(ks.searchsorted(k, "right"))]
    return np.stack([np.minimum(ks, gain), ks])


class LinearBandit(BasePolicy):
    """What `linucb` and `lints` share: ridge regression per arm, features of the observation, choice by `scores`."""

    learned: ClassVar[tuple[str, ...]] = ("arms", "costs", "pace", "probes", "rng")
    per_request: ClassVar[tuple[str, ...]] = ("level",)

    def __init__(
        self,
        explore: float = 0.25,
        ridge: float = 1.0,
        fields: str = "",
        confidence: bool = False,
        frozen: bool = False,
        seed: int = 0,
        discount: float = 1.0,
        probe: int = probing.REST,
        share: float = probing.SHARE,
    ) -> None:
        if not 0 < discount <= 1:
            raise ValueError(f"discount is in (0, 1], got {discount}")
        if not (0 <= explore < math.inf and 0 < ridge < math.inf):
            raise ValueError(f"explore is 0 or more and ridge above 0, got {explore} and {ridge}")
        probing.check_setting(probe, share)
        self.explore, self.probe, self.share, self.frozen = explore, probe, share, frozen
        self.features = LinearFeatures(fields, confidence=confidence)
        self.needs = self.features.needs
        self.arms = RidgeArms(self.features.size, ridge, discount)
        self.costs: Costs = {}
        self.pace: dict[str, list[float]] = {}
        """level of load -> discounted tokens and seconds"""
        self.probes = probing.fresh_probes()
        self.level = load_level(1.0)
        self.rng = seed_state(seed)
        self._normals = NormalStream()
        self._seen: NDArray[np.float64] | None = None
        self._probe: probing.Probe | None = None

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
        self._drafter_of = np.array([self._drafters.index(n) for n in names])
        self._of_drafter: dict[str, Places] = {}
        """places of a drafter's arms, by rising K"""
        self._ks_of: dict[str, NDArray[np.float64]] = {}
        self._shortest: dict[str, int] = {}
        for i, d in enumerate(self._drafters):
            if d is not None:
                arms = np.flatnonzero((self._drafter_of == i) & (self._ks < 1 << 30))
                arms = arms[self._ks[arms].argsort()]
                together = bool((np.diff(arms) == 1).all())  # a slice is faster
                self._of_drafter[d] = slice(int(arms[0]), int(arms[-1]) + 1) if together else arms
                self._ks_of[d], self._shortest[d] = self._ks[arms].astype(np.float64), int(arms[0])
        probing.know(self.probes, self._shortest)
        self._seen = None

    def act(self, observation: Observation) -> Action:
        level = self.level = load_level(observation.occupancy)
        self._seen = x = self.features(observation)
        self._probe = None
        c = observation.cost_ratio
        priced = [prices(self.costs, level, d, c) for d in self._drafters]
        tokens, seconds = self.pace.get(level, (0.0, 0.0))
        rho = tokens / seconds if seconds > 0 else 1.0 / priced[0][0]
        of_arms = np.array(priced).take(self._drafter_of, axis=0)
        of_arms *= rho
        means, variances = self.arms.estimate(x, of_arms[:, 2])
        means -= of_arms[:, 1]  # against plain decoding, which is worth 0
        scores = means if self.frozen else self.scores(means, variances)
        if observation.k_max < self._all:
            scores = np.where(self._ks <= observation.k_max, scores, -np.inf)
        chosen = int(scores.argmax())
        if not self.frozen and (ready := probing.due(self.probes, self.probe)):
            chosen = self._probed(ready, chosen, means, x, observation)
        action = self._actions[chosen]
        assert action is not None
        return action

    def _probed(
        self, ready: list[str], chosen: int, means: NDArray[np.float64], x: NDArray[np.float64], o: Observation
    ) -> int:
        """The arm of a probe, if one is due and can be paid, else the chosen one."""
        own, found = self._drafters[self._drafter_of[chosen]], []
        for d in ready:
            arm = self._shortest.get(d)
            if arm is not None and d != own and self._ks[arm] <= o.k_max and probing.can_show(d, o):
                gain = float(self.arms.solved[0, arm] @ x) / int(self._ks[arm])
                found.append(probing.Probe(d, float(means[chosen] - means[arm]), gain))
        self._probe = probing.choose(self.probes, found)
        return chosen if self._probe is None else self._shortest[self._probe.drafter]

    def scores(self, means: NDArray[np.float64], variances: NDArray[np.float64]) -> NDArray[np.float64]:
        raise NotImplementedError

    def update(self, record: RoundRecord) -> None:
        x, self._seen = self._seen, None
        if x is None or self.frozen:
            return
        probe, self._probe = self._probe, None
        if probing.count(self.probes, record, self.share, probe) and probe is not None:
            self.arms.forget(self._of_drafter[probe.drafter])
        if not add_round(self.costs, record, self.level):
            return
        tokens, seconds = self.pace.get(self.level, (0.0, 0.0))
        self.pace[self.level] = [PACE * tokens + record.emitted, PACE * seconds + record.seconds]
        places = self._of_drafter.get(record.action.drafter or "")
        if places is not None:
            found = outcomes(self._ks_of[str(record.action.drafter)], record)
            n = found.shape[1]
            if n:
                self.arms.add(
                    slice(places.start, places.start + n) if isinstance(places, slice) else places[:n], x, found
                )

    def state_dict(self) -> dict[str, Any]:
        own = {"costs": self.costs, "pace": self.pace, "probes": self.probes, "rng": self.rng}
        return copy.deepcopy(own) | {"arms": self.arms.to_json(), "fields": list(self.features.fields)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if set(state) != {*self.learned, "fields"} or not isinstance(state["rng"], int):
            raise ArtefactError(f"policy {self.spec!r} expects the state of a linear bandit, got {sorted(state)}")
        if state["fields"] != list(self.features.fields):
            raise ArtefactError(f"policy {self.spec!r} reads {list(self.features.fields)}, saved was {state['fields']}")
        probing.check_probes(state["probes"], self.spec)
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
        return means + self._width * np.sqrt(np.maximum(variances, 0.0))


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
        return means + self._width * z * np.sqrt(np.maximum(variances, 0.0))
