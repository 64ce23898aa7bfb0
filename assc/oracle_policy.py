"""The hindsight optimum as a policy object, for the same tables as every other policy. Privileged; replay only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from assc.actions import ActionTable
from assc.core import Action, Observation, RoundRecord
from assc.errors import RequestError
from assc.oracle import optimum
from assc.replay import ReplayBackend
from assc.vector_replay import FlatTrace

Plans = Mapping[tuple[int, int], dict[int, Action]]
"""(row of the trace, budget of new tokens) -> committed new tokens -> action"""


class OraclePolicy:
    """Plays the exact optimum of the request that `backend` has under way.

    The plans of all requests of the trace are computed at the first use, unless `plans` has them already. A request
    with a smaller budget than was recorded gets a plan of its own. Raises `RequestError` when the backend decodes
    another request than the trace's.
    """

    spec = "oracle"
    needs: frozenset[str] = frozenset()
    privileged: ClassVar[bool] = True

    def __init__(self, backend: ReplayBackend, plans: Plans | None = None) -> None:
        self.backend = backend
        self._plans = dict(plans or {})

    def begin(self, table: ActionTable) -> None:
        """Nothing to forget: the plan depends on the request alone."""

    def act(self, observation: Observation) -> Action:
        request = self.backend.request
        row = self.backend.row_of(request)
        key = (row, request.max_new_tokens)
        if key not in self._plans:
            self._solve(key)
        plan = self._plans[key]
        if observation.position not in plan:
            raise RequestError("the oracle was asked in the middle of a request that it did not play itself")
        return plan[observation.position]

    def _solve(self, key: tuple[int, int]) -> None:
        """Plans of the whole trace the first time, of one request where its budget differs."""
        trace, costs = self.backend.trace, self.backend.cost_model
        row, budget = key
        if budget == int(trace.columns["budget"][row]):
            plans = optimum(FlatTrace(trace, costs, approximate=True)).plans
            self._plans |= {(r, int(b)): p for r, (b, p) in enumerate(zip(trace.columns["budget"], plans, strict=True))}
        else:
            flat = FlatTrace(trace, costs, max_new_tokens=budget, approximate=True)
            self._plans[key] = optimum(flat, [row]).plans[0]

    def update(self, record: RoundRecord) -> None:
        """Nothing to learn."""

    def reset(self) -> None:
        """Nothing to forget."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to load."""
