"""The text of one request as a trace knows it, position by position."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from assc.core import FinishReason
from assc.steps import STEP_COLUMNS
from assc.trace import CONFIDENCE, FINISHES, Trace
from assc.trace_rules import peek_drafter


@dataclass(frozen=True)
class Text:
    """One request's text and what is known at each of its positions, as lists: quicker than arrays one by one."""

    tokens: tuple[int, ...]
    finish: FinishReason
    entropy: list[float]
    top1: list[float]
    match: list[int]
    acc: dict[str, list[int]]
    avail: dict[str, list[int]]
    peek: tuple[list[float], ...]
    """entropy, top-1 and margin of the drafter that a peek asks"""
    steps: Mapping[str, NDArray[np.uint8]] = field(default_factory=dict)
    """drafter -> codes [T, S, 4] of its first S draft steps from each position (`assc.steps.Codes`)"""

    @classmethod
    def of(cls, trace: Trace, row: int) -> Text:
        c = trace.columns
        part = slice(int(c["offsets"][row]), int(c["offsets"][row + 1]))
        peeker = peek_drafter(trace.header)
        return cls(
            tokens=tuple(c["tokens"][part].tolist()),
            finish=FINISHES[int(c["finish"][row])],
            entropy=c["target_entropy"][part].tolist(),
            top1=c["target_top1"][part].tolist(),
            match=c["match"][part].tolist(),
            acc={d: c[f"acc/{d}"][part].tolist() for d in trace.drafters},
            avail={d: c[f"avail/{d}"][part].tolist() for d in trace.drafters},
            peek=tuple(c[f"{name}/{peeker}"][part].tolist() for name in CONFIDENCE) if peeker is not None else (),
            steps={
                d.name: np.stack([c[f"step_{name}/{d.name}"][part] for name in STEP_COLUMNS], axis=-1)
                for d in trace.header.drafters
                if d.steps
            },
        )
