"""Contextual linear bandits over the action table."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from assc.actions import ActionTable
from assc.core import ROLLBACK, Action, Observation, RoundRecord
from assc.errors import ArtefactError
from assc.registry import register
from policies import probing
from policies.base import BasePolicy, drafting
from policies.ridge import Ridges
from policies.rng import NormalStream, seed_state
from policies.round_costs import Costs, add_round, load_level, price_list, sound_costs, sound_pace
from policies.vectors import LinearFeatures

SPREAD = 0.5
"""tokens; the rewards of an arm of K are taken to scatter by this times sqrt(K + 1), as in `policies.arms`"""
BEYOND = 0.5
"""what a token after an accepted draft is taken to be accepted with, where nobody asked for it"""
PACE = 0.995
"""kept of the sums behind ρ from round to round"""


@lru_cache(maxsize=8192)
def outcomes(ks: tuple[int, ...], k: int, drafted: int, accepted: int) -> NDArray[np.float64]:
    """What a round of `k` says of every K of its drafter (`ks`, ascending): gains, then drafted tokens, [2 × K].

    The outcome of a smaller K follows from that of a larger one. So does that of a larger one, unless all that was
    asked for was drafted and accepted. To leave it out then would show larger K their failures only; the further
    tokens count as if each were accepted with chance BEYOND, given those before it. A round that ended the request
    tells nothing of larger K, so it is not asked.

    >>> outcomes((1, 2, 4), 2, 2, 1).tolist()
    [1.0, 1.0, 1.0, 1.0, 2.0, 4.0]
    >>> outcomes((1, 2, 4), 2, 2, 2).tolist()
    [1.0, 2.0, 2.75, 1.0, 2.0, 4.0]
    """
    more = BEYOND / (1.0 - BEYOND) if drafted == k == accepted else 0.0
    gains = [min(other, accepted) + more * (1.0 - BEYOND ** max(other - k, 0)) for other in ks]
    told = np.array([*gains, *(min(other, drafted) if drafted < k else other for other in ks)], np.float64)
    told.flags.writeable = False
    return told


class LinearBandit(BasePolicy):
    """What `linucb` and `lints` share: ridge regressions per arm, features of the observation, choice by `scores`."""

    learner: ClassVar[bool] = True
    learned: ClassVar[tuple[str, ...]] = ("ridges", "costs", "pace", "probes", "rng")
    checks: ClassVar[Mapping[str, Callable[[Any], bool]]] = {"costs": sound_costs, "pace": sound_pace}
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
        self.ridges = Ridges(self.features.size, ridge, discount)
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
        played = table if self.saved_table is None else self.saved_table
        for d in played.drafters:
            self.ridges.know(d, played.k_values(d))
        self._drafters = list(self.ridges.ks)
        arms = [(d, k) for d, ks in self.ridges.ks.items() for k in ks]
        """one per drafter and K; rollback is worth 0"""
        self._of = np.array([self._drafters.index(d) for d, _ in arms], dtype=np.int64)
        self._prices_of = np.concatenate([2 * self._of, 2 * self._of + 1])
        """where the price of a call of each arm's drafter, then that of a token, stands in the list of all"""
        can = {*played.drafters}
        self._ks = np.array([k if d in can else 1 << 30 for d, k in arms], dtype=np.int64)
        """K of each arm; arms of another table can never be played"""
        self._most = int(self._ks.max(initial=0))
        self._actions = [drafting(d, k) for d, k in arms]
        self._width = self.explore * SPREAD * np.sqrt(np.array([k for _, k in arms]) + 1.0)
        self._ks_of = {d: tuple(ks) for d, ks in self.ridges.ks.items()}
        self._shortest = {d: self.ridges.rows(d).start // 2 for d in played.drafters}
        probing.know(self.probes, self._shortest)
        self._seen = None

    def act(self, observation: Observation) -> Action:
        level = self.level = load_level(observation.occupancy)
        self._seen = x = self.features(observation)
        self._probe = None
        if not self._actions:
            return ROLLBACK
        c = observation.cost_ratio
        priced, plain = price_list(self.costs, level, self._drafters, c)
        tokens, seconds = self.pace.get(level, (0.0, 0.0))
        rho = tokens / seconds if seconds > 0 else 1.0 / plain
        costs = np.array([rho * price for both in priced for price in both])[self._prices_of]
        gains, drafted, variances = self.ridges.estimate(x)
        n = len(gains)
        means = gains - costs[n:] * drafted - costs[:n]
        scores = means if self.frozen else self.scores(means, variances[self._of])
        if observation.k_max < self._most:
            scores = np.where(self._ks <= observation.k_max, scores, -np.inf)
        best = int(scores.argmax())
        chosen = best if scores[best] > 0.0 else None
        if not self.frozen and (ready := probing.due(self.probes, self.probe)):
            chosen = self._probed(ready, chosen, means, gains, observation)
        return ROLLBACK if chosen is None else self._actions[chosen]

    def _probed(
        self,
        ready: list[str],
        chosen: int | None,
        means: NDArray[np.float64],
        gains: NDArray[np.float64],
        observation: Observation,
    ) -> int | None:
        """The arm of a probe, if one is due and can be paid, else the chosen one."""
        worth, own = (0.0, None) if chosen is None else (float(means[chosen]), self._actions[chosen].drafter)
        found = []
        for d in ready:
            arm = self._shortest.get(d)
            if arm is not None and d != own and self._ks[arm] <= observation.k_max and probing.can_show(d, observation):
                believed = float(gains[arm]) / int(self._ks[arm])
                found.append(probing.Probe(d, worth - float(means[arm]), believed))
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
            self.ridges.forget(probe.drafter)
        if not add_round(self.costs, record, self.level):
            return
        tokens, seconds = self.pace.get(self.level, (0.0, 0.0))
        self.pace[self.level] = [PACE * tokens + record.emitted, PACE * seconds + record.seconds]
        drafter = record.action.drafter
        if drafter in self._ks_of and record.finish is None:
            told = outcomes(self._ks_of[drafter], record.action.k, record.drafted, record.accepted)
            self.ridges.add(drafter, x, told)

    def state_dict(self) -> dict[str, Any]:
        own = {"costs": self.costs, "pace": self.pace, "probes": self.probes, "rng": self.rng}
        return copy.deepcopy(own) | {"ridges": self.ridges.to_json(), "fields": list(self.features.fields)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if set(state) != {*self.learned, "fields"} or not isinstance(state["rng"], int):
            raise ArtefactError(f"policy {self.spec!r} expects the state of a linear bandit, got {sorted(state)}")
        if state["fields"] != list(self.features.fields):
            raise ArtefactError(f"policy {self.spec!r} reads {list(self.features.fields)}, saved was {state['fields']}")
        probing.check_probes(state["probes"], self.spec)
        ridges = Ridges(self.ridges.size, self.ridges.ridge, self.ridges.discount)
        ridges.from_json(state["ridges"])
        super().load_state_dict({n: state[n] for n in self.learned if n != "ridges"} | {"ridges": ridges})


@register("linucb")
class LinUcb(LinearBandit):
    """argmax over the arms of E[gain − ρ·(call + price·drafted)] + explore·σ_a·sqrt(xᵀ A⁻¹ x); rollback is worth 0.

    Arms are the actions of the table, of which those compete that can be played now. x is 1 and the fields
    acceptance_ema, full_streak, target_entropy, target_top1, ngram_match and position of the featurizer;
    `confidence=true` adds the draft's entropy and top-1 (its first forward is paid in every round), and
    `fields=a+b` names others. Gain is the round's tokens less the one of plain decoding; it and the number of drafted
    tokens are regressed on x by ridge regressions per arm; a round teaches every K of its drafter (`outcomes`). What a
    call and a drafted token cost in seconds depends on the machine and the load and not on the text, so it is fitted to
    all rounds at this load together (`policies.round_costs`): when the load changes no arm must be tried again. ρ =
    Σtokens / Σseconds of this policy at that load, discounted by 0.995 per round. σ_a = sqrt(K_a + 1) / 2 tokens.
    `frozen=true` neither learns nor explores.

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
