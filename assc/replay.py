"""The replay backend: plays rounds from a recorded trace, as the live decoder would, in modelled time.

In modes greedy and gumbel the text does not depend on the policy, so a replayed round equals the live one in every
count and every observed feature, for any schedule (tests/test_replay.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from assc.core import Request
from assc.costs import CostModel
from assc.errors import RequestError
from assc.positions import PositionBackend, Text
from assc.trace import Trace
from assc.trace_rules import budget_of, check_replayable


class ReplayBackend(PositionBackend):
    """A `Backend` over a trace. Requests are those of the trace, found by id, seed and temperature.

    A request may ask for fewer tokens than were recorded. Raises `TraceError` for a trace that cannot be replayed
    (see `check_replayable`).
    """

    def __init__(
        self,
        trace: Trace,
        cost_model: CostModel,
        *,
        k_values: Sequence[int] | None = None,
        approximate: bool = False,
        chunks: int = 1,
    ) -> None:
        check_replayable(trace.header, cost_model, approximate=approximate, name=trace.name)
        matches = bool((trace.columns["match"] >= 0).any())
        super().__init__(trace.header, cost_model, k_values=k_values, matches=matches, chunks=chunks)
        self.trace = trace
        self._texts: dict[int, Text] = {}
        self._prompts: dict[int, tuple[int, ...]] = {}

    def describe(self) -> dict[str, Any]:
        h = self.trace.header
        trace = {"name": self.trace.name, "workload": h.workload, "hash": h.workload_hash, "created": h.created}
        return {**super().describe(), "trace": trace}

    def row_of(self, request: Request) -> int:
        """The row of a request. `RequestError` when the trace does not hold it."""
        row = self.trace.rows_by_key.get((request.id, request.seed, request.temperature))
        if row is not None and row not in self._texts:
            self._texts[row] = Text.of(self.trace, row)
            self._prompts[row] = self.trace.request(row).prompt_ids
        if row is None or self._prompts[row] != request.prompt_ids:
            raise RequestError(
                f"request {request.id!r} (seed {request.seed}, temperature {request.temperature:g}) is not in the trace"
            )
        return row

    def text_of(self, request: Request) -> Text:
        """`RequestError` when the trace does not hold the request, or not so many tokens of it."""
        text = self._texts[self.row_of(request)]
        if text.finish in ("length", "context") and budget_of(self.header, request) > len(text.tokens):
            raise RequestError(
                f"request {request.id!r} was recorded up to {len(text.tokens)} tokens, {request.max_new_tokens} are "
                "asked for"
            )
        return text
