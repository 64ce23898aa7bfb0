"""Multi-armed bandits over the action table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from assc.actions import ActionTable
from assc.core import Action, Observation, RoundRecord
from assc.errors import ArtefactError
from assc.registry import register
from policies.arms import ArmSums
from policies.base import BasePolicy
from policies.rng import normal, seed_state, uniform

ALGORITHMS = ("ucb", "ts", "exp3", "eps")


@register("bandit")
class Bandit(BasePolicy):
    """One arm per action of the table, rollback included; learns online, across requests, which one pays.

    Reward of a round: tokens − ρ·seconds, with ρ = Σtokens / Σseconds of this learner so far (Dinkelbach 1967). Its
    optimum is the optimum of the ratio, which the mean of per-round ratios is not: the only arm that cannot be beaten
    at its own ρ is the one with the best Σtokens/Σseconds. Only arms that can be played now compete, so the end of a
    budget is never held against a large K. With σ_a² = σ²·(K_a + 1) the variance of rewards within an arm (σ pooled
    over the arms, see `ArmSums.spread`) and N the count of all rounds:

    - `ucb`: every arm once, then argmax of mean_a + explore·σ_a·sqrt(2·ln(1 + N) / n_a). The bonus has the count n_a
      of its own arm: of two arms of one K with equal means the less tried one wins. Source: Auer et al. 2002, UCB1;
      the scale σ_a for Gaussian noise from Lattimore and Szepesvári 2020, chapter 8.
    - `ts`: Gaussian Thompson sampling with the plug-in variance σ_a² and the prior N(0, σ_a²) (0 is the mean reward
      of the learner itself): argmax of a draw from N(n_a·mean_a / (n_a + 1), explore²·σ_a² / (n_a + 1)).
      Source: Agrawal and Goyal 2013, arXiv 1209.3353.
    - `eps`: every arm once, then the best mean, or with chance `eps` any arm. Source: Watkins 1989, Sutton and Barto.
    - `exp3`: arm a with chance p_a = (1 − eps)·w_a / Σw + eps / n over the n arms that can be played; afterwards
      log w_a grows by eps / n · g / p_a, with the gain g = reward / ((K_max + 1) / 2) cut to −1..1. It trusts no
      average, so it suits streams that turn against the learner, and is slow on those that don't. Source: Auer et al.
      2002, The nonstochastic multiarmed bandit problem, with gains of both signs.

    `discount` < 1 multiplies all counts and sums in every round, `window` > 0 keeps the last rounds only (discounted
    and sliding-window UCB: Garivier and Moulines 2008, arXiv 0805.3415); without them a change of the stream is
    noticed after about as many rounds as were played before it. EXP3 multiplies its log-weights by `discount` and has
    no `window`. `frozen=true` neither learns nor explores: it plays the best mean, and rollback while it knows
    nothing. Rounds whose seconds are NaN, infinite or negative are not
    learned from.

    Uses the tokens and seconds of its own rounds.

    >>> from assc.actions import ActionTable
    >>> policy = Bandit("ucb")
    >>> policy.begin(ActionTable.build(["ngram"], [2]))
    >>> class Seen: k_max = 8
    >>> for i in range(20):
    ...     action = policy.act(Seen)
    ...     policy.update(RoundRecord(i, i, action, action.k, action.k, action.k + 1, (), 0.1 + 0.01 * action.k))
    >>> str(action), round(policy.arms.rho())
    ('ngram:2', 24)
    """

    uses: ClassVar[str] = "H, seconds"
    main_parameter: ClassVar[str | None] = "algo"
    example: ClassVar[str] = "bandit:ucb"
    learned: ClassVar[tuple[str, ...]] = ("arms", "rng")

    def __init__(
        self,
        algo: str,
        discount: float = 1.0,
        window: int = 0,
        explore: float = 1.0,
        eps: float = 0.1,
        frozen: bool = False,
        seed: int = 0,
    ) -> None:
        if algo not in ALGORITHMS:
            raise ValueError(f"the algorithm is one of {', '.join(ALGORITHMS)}, got {algo!r}")
        if not (0.0 < discount <= 1.0 and window >= 0 and 0.0 <= explore < math.inf):
            raise ValueError("discount is in (0, 1], window and explore are 0 or more")
        if discount < 1.0 and window:
            raise ValueError("discount and window are two ways to forget; give one of them")
        if not 0.0 < eps <= 1.0:
            raise ValueError(f"eps is the share of rounds that explore, in (0, 1], got {eps}")
        if algo == "exp3" and window:
            raise ValueError("exp3 forgets by discount, it has no window")
        self.algo, self.explore, self.eps, self.frozen = algo, explore, eps, frozen
        self.arms = ArmSums(discount, window)
        self.rng = seed_state(seed)
        self._chance: tuple[str, float] = ("", 1.0)
        """the last arm drawn by EXP3, and eps / n / its chance"""

    def begin(self, table: ActionTable) -> None:
        super().begin(table)
        actions = table.actions if self.saved_table is None else self.saved_table.actions
        self._names: tuple[tuple[Action, str], ...] = tuple((a, str(a)) for a in actions)
        self._half = (max(a.k for a in actions) + 1) / 2.0
        self._chance = ("", 1.0)

    def act(self, observation: Observation) -> Action:
        k_max, arms = observation.k_max, self.arms
        playable = [(a, name) for a, name in self._names if a.k <= k_max]
        if self.frozen:
            rho = arms.rho()
            known = [(arms.mean(name, rho), a) for a, name in playable if name in arms.sums]
            return max(known, key=lambda pair: pair[0])[1] if known else playable[0][0]
        if self.algo == "ucb":
            return self._upper_bound(playable)
        if self.algo == "ts":
            return self._thompson(playable)
        return self._greedy(playable) if self.algo == "eps" else self._exp3(playable)

    def _greedy(self, playable: list[tuple[Action, str]]) -> Action:
        sums, rho = self.arms.sums, self.arms.rho()
        unknown = [a for a, name in playable if name not in sums]
        self.rng, u = uniform(self.rng)
        if unknown:
            return unknown[0]
        if u < self.eps:
            return playable[int(u / self.eps * len(playable))][0]
        return max(playable, key=lambda pair: self.arms.mean(pair[1], rho))[0]

    def _exp3(self, playable: list[tuple[Action, str]]) -> Action:
        logs = [self.arms.weights.get(name, 0.0) for _, name in playable]
        top, n = max(logs), len(playable)
        weights = [math.exp(v - top) for v in logs]
        share, floor = (1.0 - self.eps) / sum(weights), self.eps / n
        self.rng, u = uniform(self.rng)
        chosen = 0
        while chosen < n - 1 and (u := u - share * weights[chosen] - floor) >= 0:
            chosen += 1
        action, name = playable[chosen]
        self._chance = (name, floor / (share * weights[chosen] + floor))
        return action

    def _upper_bound(self, playable: list[tuple[Action, str]]) -> Action:
        sums, rho = self.arms.sums, self.arms.rho()
        width = self.explore * self.arms.spread(rho) * math.sqrt(2.0 * math.log1p(self.arms.total))
        best, chosen = -math.inf, playable[0][0]
        for action, name in playable:
            row = sums.get(name)
            if row is None:
                return action
            value = (row[1] - rho * row[2]) / row[0] + width * math.sqrt((action.k + 1) / row[0])
            if value > best:
                best, chosen = value, action
        return chosen

    def _thompson(self, playable: list[tuple[Action, str]]) -> Action:
        sums, rho = self.arms.sums, self.arms.rho()
        width = self.explore * self.arms.spread(rho)
        best, chosen = -math.inf, playable[0][0]
        for action, name in playable:
            n, tokens, seconds = sums[name][:3] if name in sums else (0.0, 0.0, 0.0)
            self.rng, z = normal(self.rng)
            value = (tokens - rho * seconds) / (n + 1.0) + width * z * math.sqrt((action.k + 1) / (n + 1.0))
            if value > best:
                best, chosen = value, action
        return chosen

    def update(self, record: RoundRecord) -> None:
        if self.frozen or not self.arms.add(str(record.action), record.emitted, record.seconds):
            return
        if self.algo == "exp3":
            self._weigh(record)

    def _weigh(self, record: RoundRecord) -> None:
        name, step = self._chance
        weights, discount = self.arms.weights, self.arms.discount
        if discount < 1.0:
            for key in weights:
                weights[key] *= discount
        if name == str(record.action):  # else another one's decision: nothing is known about its chance
            gain = (record.emitted - self.arms.rho() * record.seconds) / self._half
            weights[name] = weights.get(name, 0.0) + step * min(1.0, max(-1.0, gain))
        self._chance = ("", 1.0)

    def state_dict(self) -> dict[str, Any]:
        return {"arms": self.arms.to_json(), "rng": self.rng}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if set(state) != set(self.learned) or not isinstance(state["rng"], int):
            raise ArtefactError(f"policy {self.spec!r} expects the state {sorted(self.learned)}, got {sorted(state)}")
        arms = ArmSums(self.arms.discount, self.arms.window)
        arms.from_json(state["arms"])
        super().load_state_dict({"arms": arms, "rng": state["rng"]})
