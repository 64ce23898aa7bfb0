"""What follows from a trace's header for whoever plays it: limits, buffers, the peeking drafter, the action table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from assc.actions import DEFAULT_K_VALUES, ActionTable
from assc.core import Request
from assc.costs import CostModel
from assc.errors import RequestError, TraceError
from assc.trace import Header, Trace
from assc.workloads import select

SLOT_BUCKET = 128
"""the decoder's buffers come in multiples of this many slots (`assc.kv.BUCKET`, equal by test)"""


def kv_slots(tokens: int) -> int:
    """Slots of the decoder's buffers for a request of `tokens` tokens, prompt and budget."""
    return -(-(tokens + 1) // SLOT_BUCKET) * SLOT_BUCKET


def check_replayable(header: Header, costs: CostModel, *, approximate: bool, name: str = "the trace") -> None:
    """`TraceError` for a rejection-mode trace (unless `approximate`) and for drafters that `costs` does not know."""
    if header.mode == "rejection" and not approximate:
        raise TraceError(
            f"{name} was recorded in mode rejection, where the text depends on K, so it cannot be replayed exactly; "
            "allow it with --approximate (approximate=True)"
        )
    missing = [d.name for d in header.drafters if d.name not in costs.drafters]
    if missing:
        raise TraceError(
            f"the cost model has no drafter {missing[0]!r} of {name}, only {sorted(costs.drafters)}; `python -m assc "
            "calibrate` fits one to a pair, `roofline --drafters` computes one for any names"
        )


def budget_of(header: Header, request: Request) -> int:
    """New tokens at most: the request's budget, cut to the target's positions."""
    room = request.max_new_tokens
    if header.max_positions is not None:
        room = min(room, header.max_positions - len(request.prompt_ids))
    return room


def peek_drafter(header: Header) -> str | None:
    """The drafter that a peek asks: the first with a confidence."""
    return next((d.name for d in header.drafters if d.confidence), None)


def trace_cost_ratio(header: Header, costs: CostModel) -> float:
    """c of the first drafter with a confidence, else of the first drafter, as in the live backend."""
    return costs.cost_ratio(peek_drafter(header) or header.drafters[0].name)


def replay_table(header: Header, k_values: Sequence[int] | None = None) -> ActionTable:
    """Rollback, then each drafter with each K: the default values up to K_max and K_max itself, or `k_values`."""
    values = [k for k in (k_values or DEFAULT_K_VALUES) if k <= header.k_max or k_values]
    if max(values) > header.k_max:
        raise RequestError(f"K={max(values)} is above K_max={header.k_max} of this trace")
    return ActionTable.build([d.name for d in header.drafters], sorted({*values, header.k_max}))


@dataclass(frozen=True)
class _Row:
    """One request of a trace as `select` sees it."""

    row: int
    id: str
    category: str


def balanced_rows(trace: Trace, rows: Sequence[int], n: int, seed: int) -> list[int]:
    """`n` of these requests. `WorkloadError` when there are fewer.

    With one temperature the choice is that of the live backend for the same prompts and seed. With several it is
    balanced over pairs of category and temperature, with the same prompts at each.
    """
    c = trace.columns
    several = len({float(c["temperature"][r]) for r in rows}) > 1
    kinds = [f"{c['category'][r]} {c['temperature'][r]:g}" if several else str(c["category"][r]) for r in rows]
    choices = [_Row(r, str(c["id"][r]), kind) for r, kind in zip(rows, kinds, strict=True)]
    return [choice.row for choice in select(choices, n, seed)]
