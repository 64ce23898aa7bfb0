"""Changing load: the costs of a round as other requests join and leave the batch.

A load is a number of rows and what rounds cost with them. Over one request the load is kept from token to token with
probability `stay`, else drawn anew; the draws depend on the request's seed and the position alone, so every policy
meets the same loads at the same places of the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assc.core import Action, Observation, Request, RoundRecord
from assc.costs import CostModel
from assc.positions import PositionBackend
from assc.roofline import profile_costs
from assc.steps import Decision, StepObservation


@dataclass(frozen=True)
class Load:
    """Rows that decode together, and the costs of a round per row."""

    rows: int
    costs: CostModel


def roofline_loads(profile: str, batches: Sequence[int] = (1, 8, 32, 128)) -> list[Load]:
    """Loads of a named roofline profile (`assc.roofline.PROFILES`), labelled modelled."""
    return [Load(b, profile_costs(profile, batch=b)) for b in batches]


STAY = 0.98
"""chance that the load is kept from one token to the next"""


def check_loads(loads: Sequence[Load], stay: float) -> None:
    """`ValueError` without loads or for `stay` outside 0..1."""
    if not loads or not 0 <= stay <= 1:
        raise ValueError(f"switching loads need at least one load and stay within 0..1, got {stay}")


def load_schedule(seed: int, size: int, loads: int, stay: float) -> NDArray[np.int64]:
    """Number of the load at each of `size` positions of the request with this seed, [size].

    A longer schedule begins with the shorter one.
    """
    draws = np.random.default_rng([seed, 0x10AD]).random((size, 2))
    fresh = (draws[:, 1] * loads).astype(np.int64)
    kept = draws[:, 0] < stay
    kept[0] = False
    last = np.maximum.accumulate(np.where(kept, 0, np.arange(size)))
    schedule: NDArray[np.int64] = fresh[last]
    return schedule


class LoadedBackend:
    """A replay or synthetic backend under switching loads: costs, c and occupancy follow the position.

    `plain_step_seconds` is that of the first load. Raises `ValueError` without loads or for `stay` outside 0..1.
    """

    def __init__(self, backend: PositionBackend, loads: Sequence[Load], *, stay: float = STAY) -> None:
        check_loads(loads, stay)
        self.backend = backend
        self.loads = tuple(loads)
        self.stay = stay
        self.table, self.mode, self.time_source = backend.table, backend.mode, backend.time_source
        self.plain_step_seconds = self.loads[0].costs.plain_step()
        self._most = max(load.rows for load in loads)
        self._schedule = np.zeros(1, np.int64)
        self._apply(0)

    @property
    def cost_ratio(self) -> float:
        return self.backend.cost_ratio

    @property
    def done(self) -> bool:
        return self.backend.done

    def describe(self) -> dict[str, Any]:
        """Provenance for result files."""
        loads = [{"rows": load.rows, "costs": load.costs.to_json()} for load in self.loads]
        return {**self.backend.describe(), "loads": loads, "stay": self.stay}

    def check(self, request: Request) -> None:
        """`RequestError` for a request that cannot be played."""
        self.backend.check(request)

    def reset(self, request: Request) -> None:
        self.backend.reset(request)
        self._schedule = load_schedule(request.seed, request.max_new_tokens, len(self.loads), self.stay)

    def _apply(self, position: int) -> None:
        load = self.loads[int(self._schedule[min(position, len(self._schedule) - 1)])]
        self.backend.use_costs(load.costs, load.rows / self._most)

    def observe(self, needs: frozenset[str] = frozenset()) -> Observation:
        self._apply(self.backend.position)
        return self.backend.observe(needs)

    def step(self, action: Action, *, policy_seconds: float = 0.0, reasons: tuple[str, ...] = ()) -> RoundRecord:
        self._apply(self.backend.position)
        return self.backend.step(action, policy_seconds=policy_seconds, reasons=reasons)

    def check_steps(self, needs: frozenset[str]) -> None:
        """`TraceError` for step fields that the trace does not hold."""
        self.backend.check_steps(needs)

    def open_round(self, action: Action) -> StepObservation | None:
        self._apply(self.backend.position)
        return self.backend.open_round(action)

    def decide(self, decision: Decision) -> StepObservation | None:
        return self.backend.decide(decision)

    def close_round(self, *, policy_seconds: float = 0.0, reasons: tuple[str, ...] = ()) -> RoundRecord:
        return self.backend.close_round(policy_seconds=policy_seconds, reasons=reasons)


def scaled(costs: CostModel, rows: int, *, verify: float = 0.02) -> Load:
    """A load made of measured costs: verification grows by the share `verify` per row and verified token.

    For a machine whose batch costs were not measured; the label says so.
    """
    slope = costs.target_per_token + verify * costs.target_fixed * (rows - 1)
    return Load(rows, replace(costs, target_per_token=slope, label=f"{costs.label}, scaled to {rows} rows (assumed)"))
