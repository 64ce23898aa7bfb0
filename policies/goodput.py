"""The K with the largest expected tokens per second."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from assc.actions import ActionTable
from assc.core import Action, Observation, RoundRecord
from assc.registry import register
from policies.base import BasePolicy
from policies.round_costs import Costs, add_round, load_level, prices, sound_costs

PRIOR = 0.75
"""acceptance of a position nobody has seen, worth one round"""


@register("goodput")
class Goodput(BasePolicy):
    """argmax over K = 0..k_max of E[tokens(K)] / E[seconds(K)], at the load of now.

    E[tokens(K)] = 1 + Σ_{k≤K} Π_{j≤k} p_j. p_j is the acceptance of draft position j, given that those before it were
    accepted, over the last `window` rounds that drafted, drawn by one round's weight to the pooled acceptance of all
    positions (0.75 before the first). E[seconds(K)] is fitted to the policy's own rounds per level of load
    (`policies.round_costs`): verification by the number of tokens, drafting by the token; before there are any it is
    1 + K·c. A round that ended the request proves no rejection.

    Where K = 0 is best it rolls back, and after `probe` such rounds drafts one token. Acceptance and costs are the
    server's, as in the source, so they live on from request to request. `k_max` 0 means the decoder's.

    Uses acceptance history, its own seconds and load. Source: Liu et al. 2024, SmartSpec / TurboSpec, arXiv 2406.14066
    (goodput); per-position acceptance and measured step costs as in SGLang's strategy `throughput_aware`.

    >>> from assc.actions import ActionTable
    >>> policy = Goodput()
    >>> policy.begin(ActionTable.build(["model"], range(1, 9)))
    >>> class Seen: k_max, cost_ratio, occupancy = 8, 0.1, 1.0
    >>> str(policy.act(Seen))
    'model:5'
    """

    uses: ClassVar[str] = "H, seconds, L"
    learned: ClassVar[tuple[str, ...]] = ("history", "costs")
    checks: ClassVar[Mapping[str, Callable[[Any], bool]]] = {"costs": sound_costs}
    per_request: ClassVar[tuple[str, ...]] = ("idle", "level")

    def __init__(self, window: int = 32, k_max: int = 0, probe: int = 8, drafter: str | None = None) -> None:
        if window < 1 or probe < 1 or k_max < 0:
            raise ValueError(f"window and probe are at least 1, k_max 0 or more, got {window}, {probe}, {k_max}")
        self.window, self.k_max, self.probe, self.drafter = window, k_max, probe, drafter
        self.history: list[list[int]] = []
        """[accepted, tokens judged] of the last rounds: one more than accepted where one was rejected"""
        self.costs: Costs = {}
        self.idle = 0
        self.level = load_level(1.0)
        self._cap = 0
        self._planned: tuple[str, float, int] | None = None
        self._passed: list[int] = [0]
        self._reached: list[int] = [0]
        """[1 + cap] rounds of the history in which position j was accepted, and judged"""
        self._sums = [0, 0]
        """of these two"""
        self._counted: list[list[int]] | None = None
        """the list of which these are the counts"""

    def begin(self, table: ActionTable) -> None:
        super().begin(table)
        self._cap = min(self.k_max or 1 << 30, self.limit(table))
        self._planned = None
        self._counted = None

    def act(self, observation: Observation) -> Action:
        level, c = load_level(observation.occupancy), observation.cost_ratio
        self.level = level
        planned = self._planned
        if planned is None or planned[0] != level or planned[1] != c:
            planned = self._planned = (level, c, self._best(level, c))
        k = planned[2]
        return self.draft(1 if k == 0 and self.idle >= self.probe else k, observation)

    def accept_chances(self, action: Action) -> tuple[float, ...]:
        return tuple(self.positions()[: action.k])

    def positions(self) -> list[float]:
        """p_1 … p_cap."""
        self._recount()
        pooled = (PRIOR + sum(self._passed[1:])) / (1.0 + sum(self._reached[1:]))
        pairs = zip(self._passed[1:], self._reached[1:], strict=True)
        return [(pooled + passed) / (1.0 + reached) for passed, reached in pairs]

    def _recount(self) -> None:
        """Count the history anew where it is not the one that was counted: after `begin` and a restored state."""
        if self._counted is not self.history:
            self._passed, self._reached, self._sums = [0] * (self._cap + 1), [0] * (self._cap + 1), [0, 0]
            self._counted = self.history
            for accepted, judged in self.history:
                self._count(accepted, judged, 1)

    def _count(self, accepted: int, judged: int, sign: int) -> None:
        reached, sums = self._reached, self._sums
        if accepted:
            passed, counted = self._passed, min(accepted, self._cap)
            for j in range(1, counted + 1):
                passed[j] += sign
                reached[j] += sign
            sums[0] += sign * counted
            sums[1] += sign * counted
        if accepted < judged <= self._cap:
            reached[judged] += sign
            sums[1] += sign

    def _best(self, level: str, c: float) -> int:
        if self._counted is not self.history:
            self._recount()
        passed, reached = self._passed, self._reached
        pooled = (PRIOR + self._sums[0]) / (1.0 + self._sums[1])
        plain, call, token = prices(self.costs, level, self.drafter or self._first, c)
        best, value = 0, 1.0 / plain
        tokens = power = 1.0
        seconds = plain + call
        for k in range(1, self._cap + 1):
            power *= (pooled + passed[k]) / (1.0 + reached[k])
            tokens += power
            seconds += token
            if tokens > value * seconds:
                best, value = k, tokens / seconds
            elif power <= value * token:  # no later token is worth its seconds either: they are ever less likely
                break
        return best

    def update(self, record: RoundRecord) -> None:
        add_round(self.costs, record, self.level)
        if record.drafted == 0:
            self.idle += 1
        else:
            self.idle = 0
            accepted, history = record.accepted, self.history
            judged = accepted + (accepted < record.drafted and record.finish is None)
            if self._counted is not history:
                self._recount()
            history.append([accepted, judged])
            old = history.pop(0) if len(history) > self.window else None
            if old is None or (accepted, judged) != (old[0], old[1]):
                self._count(accepted, judged, 1)
                if old is not None:
                    self._count(old[0], old[1], -1)
        if self._planned is not None:
            c = self._planned[1]
            self._planned = (self.level, c, self._best(self.level, c))
