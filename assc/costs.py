"""What a round costs, as a function of its shape: the deterministic clock of modelled time.

    seconds = target_fixed + target_per_token · (drafted + 1) + target_per_kv · committed
            + draft_fixed · drafted-forwards + draft_per_catch_up · tokens caught up     (per drafter)
            + overhead

Coefficients are fitted by non-negative least squares to measured rounds of the pair at hand (`assc.calibrate`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from assc.core import RoundRecord


@dataclass(frozen=True)
class DrafterCost:
    """Seconds of one drafter."""

    per_step: float
    """one forward (or lookup)"""
    per_catch_up: float = 0.0
    """one committed token fed besides the usual one"""


@dataclass(frozen=True)
class CostModel:
    """Seconds of a round by its shape; `label` says what it was fitted on."""

    target_fixed: float
    target_per_token: float = 0.0
    """per token in the verified block, the last committed one included"""
    target_per_kv: float = 0.0
    """per committed token in the buffers"""
    drafters: Mapping[str, DrafterCost] = field(default_factory=dict)
    overhead: float = 0.0
    label: str = "modelled"

    def __post_init__(self) -> None:
        if self.target_fixed <= 0:
            raise ValueError("a cost model needs target_fixed > 0 seconds")

    def verify(self, drafted: int, kv: int) -> float:
        """Seconds of one target forward over `drafted` + 1 tokens behind `kv` committed ones."""
        return self.target_fixed + self.target_per_token * (drafted + 1) + self.target_per_kv * kv

    def draft(self, drafter: str, steps: int, catch_up: int = 0) -> float:
        """Seconds of `steps` draft forwards, of which the first also feeds `catch_up` tokens."""
        if drafter not in self.drafters:
            raise KeyError(f"the cost model has no drafter {drafter!r}, only {sorted(self.drafters)}")
        cost = self.drafters[drafter]
        return cost.per_step * steps + cost.per_catch_up * catch_up

    def plain_step(self, kv: int = 0) -> float:
        """Seconds of one plain round."""
        return self.verify(0, kv) + self.overhead

    def cost_ratio(self, drafter: str, kv: int = 0) -> float:
        """c: one draft step / one target step."""
        return self.drafters[drafter].per_step / self.verify(0, kv) if drafter in self.drafters else 0.0

    def price(self, record: RoundRecord, kv: int, draft_seconds: float | None = None) -> RoundRecord:
        """The same round with modelled phase times; the policy's own measured time is left out."""
        verify = self.verify(record.drafted, kv)
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
