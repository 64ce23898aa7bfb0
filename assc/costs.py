"""What a round costs, as a function of its shape: the deterministic clock of modelled time.

    seconds = target_fixed + target_per_token · (drafted + 1) + target_per_tile · ⌊drafted / 16⌋
            + target_per_kv · kv + per_emitted · emitted
            + per_call + per_step · draft forwards + per_catch_up · tokens caught up     (of the drafter that ran)
            + overhead

A block of up to 16 columns (drafted + 1) is one tile of the matrix units of CPUs with AMX and of tensor cores; the 17th
column begins another one, which costs a step and not a slope. Where that shape leaves too much unexplained,
`target_curve` corrects it at the measured widths, linearly in between.

In a round whose verification is chunked each group is a forward of its own (`assc.groups`): it pays target_fixed and
target_per_kv again, and its columns are counted by themselves.

`kv` counts committed tokens, or, with `static_kv`, the slots of the decoder's buffers: they have one length per request
and attention reads all of it.

Coefficients are fitted by non-negative least squares to measured rounds of the pair at hand (`assc.calibrate`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assc.core import RoundRecord
from assc.groups import judged, played_groups

TILE = 16
"""columns that are multiplied at once"""


def _check_seconds(costs: Any) -> None:
    """ValueError unless every number of a dataclass is finite and 0 or more: NaN would spread into every result."""
    for f in fields(costs):
        value = getattr(costs, f.name)
        if f.name in ("drafters", "label", "static_kv", "target_curve"):
            continue
        if isinstance(value, bool) or not (isinstance(value, int | float) and 0 <= value < math.inf):
            raise ValueError(f"{f.name} is {value!r}, it must be a finite number from 0")


@dataclass(frozen=True)
class DrafterCost:
    """Seconds of one drafter."""

    per_step: float
    """one forward"""
    per_catch_up: float = 0.0
    """one committed token fed besides the usual one"""
    per_call: float = 0.0
    """each time it is asked at all, for a proposal or a peek; the whole cost of a lookup"""
    per_load: float = 0.0
    """unloading it once and bringing it back, charged to the round that asks for it (live only)"""

    def __post_init__(self) -> None:
        _check_seconds(self)


@dataclass(frozen=True)
class VerifyTables:
    """By tokens proposed (0..K_max) and committed (1..K_max + 1): arrays [K_max + 1, K_max + 2]."""

    seconds: NDArray[np.float64]
    """of all target forwards, apart from what depends on `kv`"""
    forwards: NDArray[np.int64]
    judged: NDArray[np.int64]
    """proposed tokens that were judged"""


@dataclass(frozen=True)
class CostModel:
    """Seconds of a round by its shape; `label` says what it was fitted on."""

    target_fixed: float
    target_per_token: float = 0.0
    """per token in the verified block, the last committed one included"""
    target_per_kv: float = 0.0
    """per slot of the buffers (`static_kv`) or per committed token"""
    drafters: Mapping[str, DrafterCost] = field(default_factory=dict)
    overhead: float = 0.0
    per_emitted: float = 0.0
    """judging and committing one token (sampling noise, processors); the same for every policy over one text"""
    label: str = "modelled"
    static_kv: bool = False
    """attention reads the whole buffer, whatever is committed (the decoder of this package; `calibrate` sets it)"""
    kv_reference: int = 0
    """slots or tokens at which `plain_step` and `cost_ratio` are told when the caller names none"""
    target_per_tile: float = 0.0
    """per `TILE` columns of the verified block beyond the first `TILE`"""
    target_curve: tuple[tuple[int, float], ...] = ()
    """knots (columns, seconds), columns ascending: what a forward takes beyond the terms above, linear between the
    knots and flat outside; may be negative"""

    def __post_init__(self) -> None:
        _check_seconds(self)
        if self.target_fixed <= 0:
            raise ValueError("a cost model needs target_fixed > 0 seconds")
        object.__setattr__(self, "target_curve", tuple((int(c), float(s)) for c, s in self.target_curve))
        columns = [c for c, _ in self.target_curve]
        if columns != sorted(set(columns)):
            raise ValueError(f"the knots of target_curve have ascending columns, got {columns}")
        if not all(math.isfinite(seconds) for _, seconds in self.target_curve):
            raise ValueError(f"the seconds of target_curve are finite numbers, got {self.target_curve}")

    def forward(self, columns: float) -> float:
        """Seconds of one target forward over `columns` tokens, apart from what depends on `kv`.

        Linear but for the tiles and the curve: between their steps, means of the counts give the mean of the seconds.
        """
        seconds = self.target_fixed + self.target_per_token * columns + self.target_per_tile * ((columns - 1) // TILE)
        if self.target_curve:
            knots, beyond = zip(*self.target_curve, strict=True)
            seconds += float(np.interp(columns, knots, beyond))
        return seconds

    def verify(self, drafted: float, kv: float, emitted: float = 1) -> float:
        """Seconds of one target forward over `drafted` + 1 tokens behind `kv`, and of committing `emitted` tokens."""
        return self.forward(drafted + 1) + self.target_per_kv * kv + self.per_emitted * emitted

    def verify_groups(self, groups: Sequence[int], kv: float, emitted: float) -> float:
        """The same of several forwards over so many columns each."""
        seconds = sum(self.forward(columns) for columns in groups)
        return seconds + self.target_per_kv * kv * len(groups) + self.per_emitted * emitted

    def verify_tables(self, k_max: int, chunks: int) -> VerifyTables:
        """What rounds with up to `k_max` tokens cost to verify in `chunks` groups."""
        shape = (k_max + 1, k_max + 2)
        tables = VerifyTables(np.zeros(shape), np.ones(shape, np.int64), np.zeros(shape, np.int64))
        for drafted in range(k_max + 1):
            for emitted in range(1, drafted + 2):
                groups = played_groups(drafted, chunks, emitted)
                tables.seconds[drafted, emitted] = sum(self.forward(columns) for columns in groups)
                tables.forwards[drafted, emitted] = len(groups)
                tables.judged[drafted, emitted] = judged(drafted, groups)
        return tables

    def kv(self, committed: int, slots: int) -> int:
        """What `target_per_kv` counts: `slots` of the buffers, or `committed` tokens."""
        return slots if self.static_kv else committed

    def draft(self, drafter: str, steps: float, catch_up: float = 0) -> float:
        """Seconds of one call: `steps` draft forwards, of which the first also feeds `catch_up` tokens."""
        if drafter not in self.drafters:
            raise KeyError(f"the cost model has no drafter {drafter!r}, only {sorted(self.drafters)}")
        cost = self.drafters[drafter]
        return cost.per_call + cost.per_step * steps + cost.per_catch_up * catch_up

    def plain_step(self, kv: float | None = None) -> float:
        """Seconds of one plain round."""
        return self.verify(0, self.kv_reference if kv is None else kv) + self.overhead

    def cost_ratio(self, drafter: str, kv: float | None = None) -> float:
        """c: one draft step (a call, where a call has no steps) / one target step."""
        if drafter not in self.drafters:
            return 0.0
        cost = self.drafters[drafter]
        return (cost.per_step or cost.per_call) / self.verify(0, self.kv_reference if kv is None else kv)

    def price(self, record: RoundRecord, kv: int, draft_seconds: float | None = None) -> RoundRecord:
        """The same round with modelled phase times; the policy's own measured time is left out.

        `draft_seconds` replaces what the record's own drafter, steps and catch-up would cost (a peek of another
        drafter is not visible in them).
        """
        verify = self.verify_groups(record.groups or (record.drafted + 1,), kv, record.emitted)
        if draft_seconds is None:
            name = record.action.drafter
            draft_seconds = self.draft(name, record.draft_steps, record.catch_up) if name is not None else 0.0
        return replace(
            record,
            seconds=draft_seconds + verify + self.overhead,
            draft_seconds=draft_seconds,
            verify_seconds=verify,
            policy_seconds=0.0,
            other_seconds=self.overhead,
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CostModel:
        drafters = {name: DrafterCost(**cost) for name, cost in data["drafters"].items()}
        return cls(**{**data, "drafters": drafters})
