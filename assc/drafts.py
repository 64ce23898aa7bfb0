"""What is known of a drafter once it was looked at and measured, and what static K would make of it. No torch here.

`ByPosition` counts rounds of one planned K; `predict` puts its shares into a `CostModel`:

    E[tokens(K)]  = 1 + Σ_{j<K} P(accepted > j)
    E[drafted(K)] = Σ_{j<K} P(drafted > j)
    E[seconds(K)] = verify(E[drafted], kv, E[tokens]) + draft(E[drafted], E[caught up]) + overhead

The sums are the tail formula of an expectation, of which (1 - α^(K+1)) / (1 - α) of Leviathan et al. 2023
(arXiv 2211.17192, eq. 1) is the case of independent tokens; nothing is assumed independent here. The seconds are exact
means because the cost model is linear in its counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

from assc.actions import DEFAULT_K_VALUES
from assc.core import RoundRecord
from assc.costs import CostModel

Kind = Literal["model", "hidden", "lookup"]
"""model: independent of the target; hidden: a layer conditioned on the target's hidden states; lookup: no weights"""
Keeps = Literal["nothing", "drafts", "committed"]
"""see `assc.drafters.base.Drafter.keeps`"""


@dataclass(frozen=True)
class TargetFacts:
    """What the target is and holds, for one request of `slots` buffer slots."""

    family: str
    """model type of its configuration"""
    parameters: int
    """embeddings and head included, tied ones counted once"""
    token_ids: int
    """logits per position"""
    weight_bytes: int
    kv_bytes: int
    """keys and values of one row of `slots` slots"""
    logit_bytes: int
    """one verification of K_max + 1 columns, in the target's dtype"""
    slots: int
    k_max: int


@dataclass(frozen=True)
class DrafterFacts:
    """What a drafter is and holds."""

    name: str
    kind: Kind
    keeps: Keeps = "nothing"
    family: str = ""
    """model type of its configuration; empty without one"""
    parameters: int | None = None
    """its own, tensors shared with the target left out; None for a lookup"""
    token_ids: int | None = None
    """how many of the target's ids it can propose; None: all"""
    coverage: float = 1.0
    """share of the tokens of the target's own text that it can propose"""
    memory_bytes: int = 0
    """weights, cut head and buffers, at the target's `slots`"""
    cut_head: bool = False
    """whether `token_ids` are the frequent ones that a learned draft's head was cut to"""
    buffer_bytes: int = 0
    """the part of `memory_bytes` that is buffers: free while the drafter is unloaded, as its weights are"""


@dataclass(frozen=True)
class ByPosition:
    """Rounds of one static K, counted by draft position j = 0..K-1 (fewer where the budget allowed fewer).

    >>> counts = ByPosition((10, 10), (10, 10), (8, 6))
    >>> counts.rounds, counts.drafted, counts.rate
    (10, 20, 0.7)
    >>> [[round(x, 3) for x in part] for part in counts.shares(3)]
    [[1.0, 1.0, 1.0], [0.8, 0.6, 0.45]]
    """

    planned: tuple[int, ...] = ()
    """rounds in which more than j tokens were planned, after the cut at the budget"""
    proposed: tuple[int, ...] = ()
    """rounds that drafted more than j tokens"""
    accepted: tuple[int, ...] = ()
    """rounds that accepted more than j tokens"""

    @classmethod
    def of(cls, rounds: Iterable[RoundRecord], k: int) -> ByPosition:
        """Count rounds in which at most `k` tokens were planned."""
        kept = list(rounds)
        return cls(
            tuple(sum(r.planned > j for r in kept) for j in range(k)),
            tuple(sum(r.drafted > j for r in kept) for j in range(k)),
            tuple(sum(r.accepted > j for r in kept) for j in range(k)),
        )

    def __add__(self, other: ByPosition) -> ByPosition:
        def add(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
            return tuple(x + y for x, y in zip_longest(a, b, fillvalue=0))

        return ByPosition(
            add(self.planned, other.planned), add(self.proposed, other.proposed), add(self.accepted, other.accepted)
        )

    @property
    def rounds(self) -> int:
        """Rounds in which at least one token could be drafted."""
        return self.planned[0] if self.planned else 0

    @property
    def drafted(self) -> int:
        return sum(self.proposed)

    @property
    def rate(self) -> float | None:
        """Acceptance rate Σaccepted / Σdrafted; None when nothing was drafted."""
        return sum(self.accepted) / self.drafted if self.drafted else None

    @property
    def measured(self) -> int:
        """Positions that at least one round planned; beyond them `shares` extrapolates."""
        return sum(n > 0 for n in self.planned)

    def shares(self, k: int) -> tuple[list[float], list[float]]:
        """P(drafted > j) and P(accepted > j) for j < k, of the rounds that planned that many.

        Both never rise with j. Beyond the measured positions the drafted share stays, and the accepted share falls by
        the pooled conditional acceptance Σ_{j≥1} P(accepted > j) / Σ_{j≥1} P(accepted > j-1) (with one position: by
        its own acceptance rate). Zeros when nothing was measured.
        """
        proposed: list[float] = []
        accepted: list[float] = []
        for n, p, a in zip(self.planned[:k], self.proposed, self.accepted, strict=False):
            if not n:
                break
            proposed.append(min(p / n, proposed[-1] if proposed else 1.0))
            accepted.append(min(a / n, accepted[-1] if accepted else 1.0))
        if not accepted:
            return [0.0] * k, [0.0] * k
        whole = accepted[:-1] if len(accepted) > 1 else proposed
        part = accepted[1:] if len(accepted) > 1 else accepted
        ratio = sum(part) / sum(whole) if sum(whole) else 0.0
        while len(accepted) < k:
            proposed.append(proposed[-1])
            accepted.append(accepted[-1] * ratio)
        return proposed, accepted


def pooled(table: Mapping[str, ByPosition]) -> ByPosition:
    """The counts of all categories together."""
    return sum(table.values(), ByPosition())


@dataclass(frozen=True)
class Load:
    """What is decoded, as far as it decides costs; means over the requests."""

    prompt_tokens: float
    new_tokens: float
    """tokens committed per request"""
    kv: float
    """what `CostModel.target_per_kv` counts"""


@dataclass(frozen=True)
class Prediction:
    """A static K by the cost model: modelled, never measured."""

    k: int
    tokens: float
    """E[tokens(K)], per round"""
    seconds: float
    """E[seconds(K)], per round, the reading of the prompt left out"""
    speedup: float
    """against plain decoding, the drafter's reading of the prompt included"""
    extrapolated: bool
    """acceptance at positions beyond those measured is extrapolated (`ByPosition.shares`)"""


def predict(counts: ByPosition, costs: CostModel, drafter: DrafterFacts, load: Load, k: int) -> Prediction:
    """Σtokens/Σseconds of static `k` against plain decoding, by the formulas of this module.

    A drafter that keeps its drafts is fed one token more after a full acceptance; one that keeps only committed text
    is fed the accepted tokens again; both read the prompt once per request. What the end of a budget cuts off is not
    modelled.
    """
    proposed, accepted = counts.shares(k)
    drafted, tokens = sum(proposed), 1.0 + sum(accepted)
    caught = {"nothing": 0.0, "drafts": accepted[-1], "committed": tokens - 1.0}[drafter.keeps]
    draft = costs.draft(drafter.name, drafted, caught)
    seconds = costs.verify(drafted, load.kv, tokens) + draft + costs.overhead
    cold = 0.0
    if drafter.keeps != "nothing":
        cold = costs.drafters[drafter.name].per_catch_up * max(0.0, load.prompt_tokens - 1.0)
    per_token = seconds / tokens + cold / load.new_tokens
    return Prediction(k, tokens, seconds, costs.plain_step(load.kv) / per_token, k > counts.measured)


def playable(k_max: int, max_new_tokens: int) -> tuple[int, ...]:
    """The static K to compare: those of the usual action table that K_max and the budget allow.

    >>> playable(6, 48), playable(16, 4)
    ((1, 2, 3, 4, 6), (1, 2, 3))
    """
    return tuple(k for k in DEFAULT_K_VALUES if k <= min(k_max, max_new_tokens - 1))


def best(predictions: Sequence[Prediction]) -> Prediction:
    """The largest predicted speed-up; of equal ones the smallest K."""
    return max(predictions, key=lambda p: (p.speedup, -p.k))


@dataclass(frozen=True)
class Speedup:
    """A static K against plain decoding on the same requests, interleaved: measured. `low`, `high`: 95 % interval."""

    k: int
    value: float
    low: float | None
    high: float | None
    """None for a single request"""


@dataclass(frozen=True)
class DrafterMeasured:
    """Everything about one drafter that the report judges."""

    facts: DrafterFacts
    k: int
    """the fixed K at which `fixed` was measured"""
    first: Mapping[str, ByPosition]
    """category -> rounds of K = 1"""
    fixed: Mapping[str, ByPosition]
    """category -> rounds of K = `k`"""
    c: float
    """modelled: one draft step / one target step"""
    predictions: tuple[Prediction, ...]
    measured: Speedup
    """of the best predicted K"""
