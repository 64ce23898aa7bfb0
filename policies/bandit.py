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
from policies.rng import InverseNormals, seed_state, uniform

ALGORITHMS = ("ucb", "ts", "exp3", "eps")

Choice = tuple[Action, str, int, float]
"""an arm: the action, its name, its place in the columns of `ArmSums`, sqrt(K + 1)"""


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
    learner: ClassVar[bool] = True
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
        self._normals = InverseNormals()
        self._last: tuple[Action | None, str] = (None, "")
        self._chance: tuple[str, float] = ("", 1.0)
        """the last arm drawn by EXP3, and eps / n / its chance"""

    def begin(self, table: ActionTable) -> None:
        super().begin(table)
        actions = table.actions if self.saved_table is None else self.saved_table.actions
        self._names: tuple[tuple[Action, str], ...] = tuple((a, str(a)) for a in actions)
        self._half = (max(a.k for a in actions) + 1) / 2.0
        self._chance = ("", 1.0)
        self._bound: ArmSums | None = None
        self._choices: dict[int, list[Choice]] = {}
        self._last = (None, "")

    def _playable(self, k_max: int) -> list[Choice]:
        """The arms that can be played now, in the order of the table."""
        if self._bound is not self.arms:  # restored or reset: its arms have other places
            self._bound = self.arms
            self._choices = {}
        known = self._choices.get(k_max)
        if known is None:
            known = [(a, n, self.arms.slot(n), math.sqrt(a.k + 1)) for a, n in self._names if a.k <= k_max]
            self._choices[k_max] = known
        return known

    def act(self, observation: Observation) -> Action:
        playable = self._playable(observation.k_max)
        if self.frozen:
            return self._best(playable)
        if self.algo == "ucb":
            action, name = self._upper_bound(playable)
        elif self.algo == "ts":
            action, name = self._thompson(playable)
        else:
            action, name = self._greedy(playable) if self.algo == "eps" else self._exp3(playable)
        self._last = (action, name)
        return action

    def _best(self, playable: list[Choice]) -> Action:
        arms, rho = self.arms, self.arms.rho()
        known = [choice for choice in playable if arms.n[choice[2]] > arms.floor]
        return max(known, key=lambda choice: arms.mean(choice[1], rho))[0] if known else playable[0][0]

    def _greedy(self, playable: list[Choice]) -> tuple[Action, str]:
        arms, floor = self.arms, self.arms.floor
        rho, counts, tokens, seconds = arms.rho(), arms.n, arms.tokens, arms.seconds
        self.rng, u = uniform(self.rng)
        best, chosen = -math.inf, playable[0]
        for choice in playable:
            i = choice[2]
            if counts[i] <= floor:
                return choice[:2]
            value = (tokens[i] - rho * seconds[i]) / counts[i]
            if value > best:
                best, chosen = value, choice
        return (playable[int(u / self.eps * len(playable))] if u < self.eps else chosen)[:2]

    def _exp3(self, playable: list[Choice]) -> tuple[Action, str]:
        known = self.arms.weights
        logs = [known.get(choice[1], 0.0) for choice in playable]
        top, n = max(logs), len(playable)
        weights = [math.exp(v - top) for v in logs]
        share, floor = (1.0 - self.eps) / sum(weights), self.eps / n
        self.rng, u = uniform(self.rng)
        chosen = 0
        while chosen < n - 1 and (u := u - share * weights[chosen] - floor) >= 0:
            chosen += 1
        action, name = playable[chosen][:2]
        self._chance = (name, floor / (share * weights[chosen] + floor))
        return action, name

    def _upper_bound(self, playable: list[Choice]) -> tuple[Action, str]:
        arms, floor = self.arms, self.arms.floor
        rho, counts, tokens, seconds = arms.rho(), arms.n, arms.tokens, arms.seconds
        width = self.explore * arms.spread(rho) * math.sqrt(2.0 * math.log1p(arms.total) * arms.weight)
        best, chosen = -math.inf, playable[0]
        for choice in playable:
            i, n = choice[2], counts[choice[2]]
            if n <= floor:
                return choice[:2]
            value = (tokens[i] - rho * seconds[i]) / n + width * choice[3] / math.sqrt(n)
            if value > best:
                best, chosen = value, choice
        return chosen[:2]

    def _thompson(self, playable: list[Choice]) -> tuple[Action, str]:
        arms, weight = self.arms, self.arms.weight
        rho, counts, tokens, seconds = arms.rho(), arms.n, arms.tokens, arms.seconds
        width = self.explore * arms.spread(rho) * math.sqrt(weight)
        self.rng, draws = self._normals.take(self.rng, len(playable))
        best, chosen = -math.inf, playable[0]
        for choice, z in zip(playable, draws, strict=True):
            i = choice[2]
            n = counts[i] + weight
            value = (tokens[i] - rho * seconds[i]) / n + width * z * choice[3] / math.sqrt(n)
            if value > best:
                best, chosen = value, choice
        return chosen[:2]

    def update(self, record: RoundRecord) -> None:
        name = self._last[1] if record.action is self._last[0] else str(record.action)
        if self.frozen or not self.arms.add(name, record.emitted, record.seconds):
            return
        if self.algo == "exp3":
            self._weigh(record, name)

    def _weigh(self, record: RoundRecord, played: str) -> None:
        name, step = self._chance
        weights, discount = self.arms.weights, self.arms.discount
        if discount < 1.0:
            for key in weights:
                weights[key] *= discount
        if name == played:  # else another one's decision: nothing is known about its chance
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
