"""From recorded, drawn or imported requests to a trace, and from shards to a whole one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assc.core import Request
from assc.errors import TraceError
from assc.trace import POSITION_COLUMNS, Header, Trace, drafter_columns, step_columns

Recorded = tuple[Request, str, Mapping[str, Any], int]
"""request, split, columns [T] of the request, mismatches of the teacher-forced pass"""


def build_trace(header: Header, recorded: Sequence[Recorded]) -> Trace:
    """A trace of recorded requests."""
    requests = [r[0] for r in recorded]
    columns: dict[str, NDArray[Any]] = {
        "id": np.array([r.id for r in requests]),
        "category": np.array([r.category for r in requests]),
        "split": np.array([r[1] for r in recorded]),
        "temperature": np.array([r.temperature for r in requests], np.float64),
        "seed": np.array([r.seed for r in requests], np.uint64),
        "budget": np.array([r.max_new_tokens for r in requests], np.int32),
        "finish": np.array([r[2]["finish"] for r in recorded], np.int8),
        "prompt_ids": np.concatenate([np.array(r.prompt_ids, np.int32) for r in requests]),
        "prompt_offsets": np.cumsum([0, *(len(r.prompt_ids) for r in requests)], dtype=np.int64),
        "offsets": np.cumsum([0, *(len(r[2]["tokens"]) for r in recorded)], dtype=np.int64),
    }
    for name in [*POSITION_COLUMNS, *drafter_columns(header.drafters), *step_columns(header.drafters)]:
        columns[name] = np.concatenate([r[2][name] for r in recorded])
    temperatures = tuple(sorted({r.temperature for r in requests}))
    mismatches = sum(r[3] for r in recorded)
    return Trace(replace(header, temperatures=temperatures, recheck_mismatches=mismatches), columns)


def concatenate(traces: Sequence[Trace], name: str = "the trace") -> Trace:
    """One trace of all requests. `TraceError` when the headers tell of different recordings."""
    if not traces:
        raise TraceError(f"{name} holds no shard")
    first = traces[0].header
    for other in traces[1:]:
        if other.header.settings() != first.settings():
            raise TraceError(f"{other.name} was recorded with other settings than {traces[0].name}")
    columns: dict[str, NDArray[Any]] = {}
    for column in traces[0].columns:
        parts = [t.columns[column] for t in traces]
        if column in ("offsets", "prompt_offsets"):
            lengths = np.concatenate([np.diff(p) for p in parts])
            columns[column] = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        else:
            columns[column] = np.concatenate(parts)
    header = replace(
        first,
        recheck_mismatches=sum(t.header.recheck_mismatches for t in traces),
        temperatures=tuple(sorted({x for t in traces for x in t.header.temperatures})),
    )
    return Trace(header, columns, name)
