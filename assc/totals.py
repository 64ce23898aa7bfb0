"""Pooled counts of many rounds, and the rates that are made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from assc.core import RoundRecord


@dataclass(frozen=True)
class Totals:
    """Pooled counts of many rounds. Rates are None where nothing was counted, never 0/0."""

    rounds: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    planned: int = 0
    rollbacks: int = 0
    discarded: int = 0
    seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    policy_seconds: float = 0.0
    other_seconds: float = 0.0

    @classmethod
    def of(cls, rounds: Sequence[RoundRecord]) -> Totals:
        return cls(
            rounds=len(rounds),
            tokens=sum(r.emitted for r in rounds),
            drafted=sum(r.drafted for r in rounds),
            accepted=sum(r.accepted for r in rounds),
            planned=sum(r.planned for r in rounds),
            rollbacks=sum(r.rollback for r in rounds),
            discarded=sum(r.discarded for r in rounds),
            seconds=sum(r.seconds for r in rounds),
            draft_seconds=sum(r.draft_seconds for r in rounds),
            verify_seconds=sum(r.verify_seconds for r in rounds),
            policy_seconds=sum(r.policy_seconds for r in rounds),
            other_seconds=sum(r.other_seconds for r in rounds),
        )

    def __add__(self, other: Totals) -> Totals:
        return replace(self, **{f: getattr(self, f) + getattr(other, f) for f in self.__dataclass_fields__})

    @property
    def acceptance_rate(self) -> float | None:
        """Σaccepted / Σdrafted, None when nothing was drafted"""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def waste_rate(self) -> float | None:
        return None if self.acceptance_rate is None else 1.0 - self.acceptance_rate

    @property
    def tokens_per_round(self) -> float | None:
        """τ, also called block efficiency: Σemitted / rounds, pooled"""
        return self.tokens / self.rounds if self.rounds else None

    @property
    def mean_k(self) -> float | None:
        return self.planned / self.rounds if self.rounds else None

    @property
    def rollback_rate(self) -> float | None:
        return self.rollbacks / self.rounds if self.rounds else None

    @property
    def tokens_per_second(self) -> float | None:
        return self.tokens / self.seconds if self.seconds > 0 else None

    def share(self, phase: Literal["draft", "verify", "policy", "other"]) -> float | None:
        """Part of the seconds spent in one phase."""
        part: float = getattr(self, f"{phase}_seconds")
        return part / self.seconds if self.seconds > 0 else None
