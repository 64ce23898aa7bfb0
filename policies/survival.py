"""Discounted survival curves of drafts: a few numbers per drafter, and the best (drafter, K) under them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from assc.actions import ActionTable
from assc.core import ROLLBACK, Action, Observation, RoundRecord
from assc.errors import ArtefactError
from assc.kinds import is_lookup
from assc.registry import register
from policies import probing
from policies.base import BasePolicy
from policies.rng import InverseNormals, seed_state
from policies.round_costs import Costs, add_round, load_level, prices, sound_costs, sound_pace

PRIOR = 0.75
"""acceptance of a position before anything is known, worth one token"""
TRUST = 4.0
"""tokens that the pooled acceptance of positions 2, 3 … counts for in each of them"""
SURE = 0.999
"""largest chance that is believed"""
LEAST = (1, 3, 6)
"""least length in tokens, of the matches of strata 1, 2, 3; 0 is for no match"""


def pooled(reached: list[float], passed: list[float]) -> float:
    """Acceptance of positions 2, 3 … taken together."""
    return (PRIOR + sum(passed) - passed[0]) / (1.0 + sum(reached) - reached[0])


@register("survival")
class Survival(BasePolicy):
    """argmax over (drafter, K) of E[tokens] − ρ·E[seconds] under a discounted survival curve per drafter.

    A draft dies at its first rejection. Of a round one sees how long it lived, or that it lived to its end, so p_j =
    P(position j is accepted | those before it were) is estimated as Kaplan and Meier do it: tokens accepted at j /
    tokens judged at j. One round teaches all positions up to its first rejection, whatever its K was, where an arm of
    a bandit learns from its own rounds only. Every round multiplies the counts of its drafter by `discount`: what is
    old counts by the rounds that came after it, not by time. Position 1 starts at 0.75 with the weight of one token,
    the others are drawn to what they are together by 4 tokens. E[tokens | K] = 1 + Σ_{k≤K} Π_{j≤k} p_j. Seconds are
    fitted to the policy's own rounds per level of load (`policies.round_costs`), ρ = Σtokens / Σseconds at that load
    with `memory` per round (Dinkelbach 1967). Rollback is worth 1 − ρ·(seconds of a target step).

    A lookup has a curve per stratum: no match (it is not asked then), a match of 1 or 2 tokens, 3 to 5, 6 or more.
    `strata` says how many of these are told apart; with `strata=1` the policy reads nothing but its own rounds, and a
    lookup without a proposal counts as a rejection at j = 1. A round that ended the request proves no rejection.

    `explore` > 0 is Thompson sampling: every p_j is moved by explore · z standard deviations of its Beta posterior,
    with one normal z per drafter and round. What is not played at all is probed within `share` of the time, at most
    every `probe` rounds (`policies.probing`); a drafter that its probes show to be better starts anew. `frozen=true`
    neither learns, explores nor probes.

    Uses the acceptance, tokens and seconds of its own rounds, load, and the n-gram match unless `strata=1`. Source:
    this project; Kaplan and Meier 1958; discounted Thompson sampling: Raj and Kalyani 2017, arXiv 1707.09727; goodput:
    Liu et al. 2024, arXiv 2406.14066.

    >>> from assc.actions import ActionTable
    >>> policy = Survival(explore=0)
    >>> policy.begin(ActionTable.build(["model"], [1, 2, 4, 8]))
    >>> seen = Observation(0, 3, 99, 8, 0.0, (), cost_ratio=0.1)
    >>> str(policy.act(seen))  # before anything is known
    'model:8'
    >>> for i in range(30):
    ...     action = policy.act(seen)
    ...     spent = 0.1 * action.k
    ...     policy.update(RoundRecord(i, i, action, action.k, 1, 2, (), 1.0 + spent, draft_seconds=spent))
    >>> str(action), round(policy.acceptance("model")[1], 2)
    ('model:1', 0.12)
    """

    uses: ClassVar[str] = "H, N, L, seconds"
    learner: ClassVar[bool] = True
    learned: ClassVar[tuple[str, ...]] = ("counts", "costs", "pace", "probes", "rng")
    checks: ClassVar[Mapping[str, Callable[[Any], bool]]] = {"costs": sound_costs, "pace": sound_pace}
    per_request: ClassVar[tuple[str, ...]] = ("level",)

    def __init__(
        self,
        discount: float = 0.98,
        strata: int = 4,
        explore: float = 0.25,
        memory: float = 0.995,
        probe: int = probing.REST,
        share: float = probing.SHARE,
        frozen: bool = False,
        seed: int = 0,
    ) -> None:
        if not (0.0 < discount <= 1.0 and 0.0 < memory <= 1.0):
            raise ValueError(f"discount and memory are in (0, 1], got {discount} and {memory}")
        if not (1 <= strata <= 1 + len(LEAST) and 0.0 <= explore < math.inf):
            raise ValueError(f"strata is 1 to {1 + len(LEAST)} and explore 0 or more, got {strata} and {explore}")
        probing.check_setting(probe, share)
        self.discount, self.strata, self.explore, self.memory = discount, strata, explore, memory
        self.probe, self.share, self.frozen = probe, share, frozen
        self.needs = frozenset({"ngram_match"} if strata > 1 else ())
        self.counts: dict[str, list[list[float]]] = {}
        """"drafter/stratum" -> per position how many tokens were judged there, and how many of them accepted"""
        self.costs: Costs = {}
        self.pace: dict[str, list[float]] = {}
        """level of load -> discounted tokens and seconds"""
        self.probes = probing.fresh_probes()
        self.rng = seed_state(seed)
        self.level = load_level(1.0)
        self._normals = InverseNormals()
        self._stratum = 0
        self._probe: probing.Probe | None = None

    def begin(self, table: ActionTable) -> None:
        super().begin(table)
        played = table if self.saved_table is None else self.saved_table
        self._drafters = [(d, is_lookup(d)) for d in played.drafters]
        self._playable = {d: frozenset(played.k_values(d)) for d in played.drafters}
        self._longest = {d: max(ks) for d, ks in self._playable.items()}
        probing.know(self.probes, played.drafters)
        self._probe = None

    def _rows(self, drafter: str, stratum: int) -> list[list[float]]:
        key, longest = f"{drafter}/{stratum}", self._longest[drafter]
        rows = self.counts.get(key)
        if rows is None:
            rows = self.counts[key] = [[0.0] * longest, [0.0] * longest]
        if len(rows[0]) < longest:  # learned under a table with shorter drafts
            for row in rows:
                row += [0.0] * (longest - len(row))
        return rows

    def acceptance(self, drafter: str, stratum: int = 0) -> list[float]:
        """p_1, p_2 … of a drafter."""
        reached, passed = self._rows(drafter, stratum)
        later = TRUST * pooled(reached, passed)
        first = (passed[0] + PRIOR) / (reached[0] + 1.0)
        return [first, *((p + later) / (n + TRUST) for n, p in zip(reached[1:], passed[1:], strict=True))]

    def accept_chances(self, action: Action) -> tuple[float, ...]:
        if action.drafter not in self._longest:
            return ()
        stratum = self._stratum if is_lookup(action.drafter) else 0
        return tuple(self.acceptance(action.drafter, stratum)[: action.k])

    def _best(
        self, drafter: str, stratum: int, k_max: int, price: tuple[float, float], luck: float
    ) -> tuple[float, int]:
        """Worth and K of the drafter's best action; `price` is ρ·seconds of a round and of each of its tokens."""
        reached, passed = self._rows(drafter, stratum)
        playable, (whole, token) = self._playable[drafter], price
        best, best_k = -math.inf, 0
        later, run, worth = TRUST * pooled(reached, passed), 1.0, 1.0 - whole
        prior, weight = PRIOR, 1.0
        for k in range(1, min(k_max, len(reached)) + 1):
            n = reached[k - 1] + weight
            p = (passed[k - 1] + prior) / n
            if luck:
                p += luck * math.sqrt(p * (1.0 - p) / (n + 1.0))
            run *= 0.0 if p < 0.0 else SURE if p > SURE else p
            worth += run - token
            if k in playable and worth > best:
                best, best_k = worth, k
            if run < token and best_k:
                break  # no later token is worth its seconds either: they are ever less likely
            prior, weight = later, TRUST
        return best, best_k

    def act(self, observation: Observation) -> Action:
        self.level = level = load_level(observation.occupancy)
        k_max, match, c = observation.k_max, observation.ngram_match, observation.cost_ratio
        self._probe = None
        self._stratum = stratum = 0 if not match else sum(match >= least for least in LEAST[: self.strata - 1])
        plain, _, _ = prices(self.costs, level, None, c)
        tokens, seconds = self.pace.get(level, (0.0, 0.0))
        rho = tokens / seconds if seconds > 0.0 and self.costs else 1.0 / plain
        worth, action = 1.0 - rho * plain, ROLLBACK
        if k_max < 1:
            return action
        ready = () if self.frozen else probing.due(self.probes, self.probe)
        first: list[tuple[str, float, float]] = []
        luck = [0.0] * len(self._drafters)
        if self.explore and not self.frozen:
            self.rng, luck = self._normals.take(self.rng, len(luck))
        for (drafter, lookup), z in zip(self._drafters, luck, strict=True):
            if lookup and self.strata > 1 and not match:
                continue
            base, call, token = prices(self.costs, level, drafter, c)
            price = rho * (base + call), rho * token
            own = stratum if lookup else 0
            value, k = self._best(drafter, own, k_max, price, self.explore * z)
            if value > worth:
                worth, action = value, Action(drafter, k)
            if drafter in ready:
                reached, passed = self._rows(drafter, own)
                p = (passed[0] + PRIOR) / (reached[0] + 1.0)
                first.append((drafter, p, 1.0 + p - sum(price)))
        found = [probing.Probe(d, worth - value, p) for d, p, value in first if d != action.drafter]
        self._probe = probing.choose(self.probes, found)
        return action if self._probe is None else Action(self._probe.drafter, 1)

    def update(self, record: RoundRecord) -> None:
        if self.frozen:
            return
        probe, self._probe = self._probe, None
        better = probing.count(self.probes, record, self.share, probe)
        if add_round(self.costs, record, self.level):
            tokens, seconds = self.pace.get(self.level, (0.0, 0.0))
            self.pace[self.level] = [self.memory * tokens + record.emitted, self.memory * seconds + record.seconds]
        name = record.action.drafter
        if name is None or name not in self._longest:
            return
        lookup = is_lookup(name)
        missed = lookup and record.drafted == 0
        judged = record.accepted + (missed or (record.accepted < record.drafted and record.finish is None))
        if judged:
            self._count(self._rows(name, self._stratum if lookup else 0), judged, record.accepted)
        if better:
            for key in [k for k in self.counts if k.rpartition("/")[0] == name]:
                del self.counts[key]

    def _count(self, rows: list[list[float]], judged: int, accepted: int) -> None:
        d = self.discount
        for row, seen in zip(rows, (judged, accepted), strict=True):
            row[:] = [d * n + 1.0 for n in row[:seen]] + [d * n for n in row[seen:]]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        counts = state.get("counts")
        good = isinstance(counts, dict) and all(
            isinstance(rows, list)
            and len(rows) == 2
            and all(isinstance(row, list) and len(row) == len(rows[0]) > 0 for row in rows)
            and all(isinstance(n, int | float) and 0.0 <= p <= n for n, p in zip(*rows, strict=True))
            for rows in counts.values()
        )
        if not good:
            raise ArtefactError(f"the saved counts of {self.spec!r} are damaged")
        probing.check_probes(state.get("probes"), self.spec)
        super().load_state_dict(state)
