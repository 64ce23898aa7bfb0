"""Where the figures of a healthy policy lie, and on which side of that a fault is (docs/monitor.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

BandState = Literal["unknown", "below", "within", "above"]


@dataclass(frozen=True)
class Band:
    """Where a figure should lie, ends included, and on which side of the band it is a fault to be."""

    low: float
    high: float
    faults: tuple[BandState, ...]
    text: str
    """for sentences: what is measured"""
    advice: str
    """what being on the other side means, "" where there is none"""

    def state(self, value: float | None) -> BandState:
        if value is None:
            return "unknown"
        return "below" if value < self.low else "above" if value > self.high else "within"


BANDS: dict[str, Band] = {
    "acceptance": Band(0.60, 0.85, ("below",), "acceptance", "K could be larger"),
    "draft_share": Band(0.0, 0.40, ("above",), "share of drafting in the time", ""),
    "speed_up": Band(1.5, 2.5, ("below",), "speed-up over plain decoding", ""),
    "fallback_share": Band(0.0, 0.05, ("above",), "share of fallback rounds", ""),
}
"""acceptance = Σaccepted / Σdrafted; draft_share = Σdraft_seconds / Σseconds; speed_up = seconds that plain decoding
takes for the same tokens / Σseconds; fallback_share = rollback rounds that carry a policy's reason / rounds"""


def judge(figures: Mapping[str, float | None], bands: Mapping[str, Band] = BANDS) -> dict[str, BandState]:
    """State of each figure.

    >>> judge({"acceptance": 0.5, "speed_up": None})
    {'acceptance': 'below', 'speed_up': 'unknown'}
    """
    return {name: bands[name].state(value) for name, value in figures.items()}
