"""Regret and recovery of policies over streams that switch. Definitions: docs/drift.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from assc.drift.stream import Played
from assc.vector_replay import Floats, Ints


@dataclass(frozen=True)
class Curve:
    """Cumulative regret in seconds at the end of each request of a stream, arrays [requests]."""

    tokens: Ints
    """emitted up to there"""
    best: Floats
    """against the best static action of the regime that held; below 0 where the policy is faster"""
    optimal: Floats
    """against the hindsight optimum; never falls"""


def regret(played: Played) -> Curve:
    """The cumulative regret of one policy over one stream."""
    at = np.flatnonzero(played.last)
    ahead = np.cumsum(played.seconds)[at]
    return Curve(
        np.cumsum(played.tokens)[at], ahead - np.cumsum(played.reference)[at], ahead - np.cumsum(played.optimal)[at]
    )


def mean_curve(curves: Sequence[Curve], points: int = 41) -> Curve:
    """Mean of several streams at the same numbers of tokens, straight between requests."""
    grid = np.linspace(0, min(int(c.tokens[-1]) for c in curves), points)

    def mean(name: str) -> Floats:
        parts = [np.interp(grid, np.r_[0, c.tokens], np.r_[0.0, getattr(c, name)]) for c in curves]
        pooled: Floats = np.mean(parts, axis=0)
        return pooled

    return Curve(grid.astype(np.int64), mean("best"), mean("optimal"))


def _seconds(played: Sequence[Played], segment: int) -> tuple[Floats, Floats]:
    """Seconds of the static action and of the policy in each round of a segment, summed over the streams.

    They end with the shortest stream.
    """
    inside = [p.segment == segment for p in played]
    shortest = min(int(i.sum()) for i in inside)
    theirs, mine = (
        np.sum([getattr(p, name)[i][:shortest] for p, i in zip(played, inside, strict=True)], axis=0)
        for name in ("reference", "seconds")
    )
    return theirs, mine


def relative_speed(played: Sequence[Played], segment: int, window: int) -> Floats:
    """Speed relative to the regime's best static action over the last `window` rounds, pooled over the streams.

    Entry i belongs to round window + i of the segment: Σ seconds of the static action over the text of these rounds /
    Σ seconds of the policy. It ends with the shortest of the streams; empty where that has less than a window.
    """
    theirs, mine = _seconds(played, segment)
    if len(mine) < window:
        return np.empty(0)
    sums = [np.convolve(x, np.ones(window), "valid") for x in (theirs, mine)]
    speeds: Floats = sums[0] / sums[1]
    return speeds


def recovery(played: Sequence[Played], segment: int, window: int, within: float) -> int | None:
    """Rounds after the switch until the rolling speed is within this share of the static action's, and stays so.

    It is the first round at which `relative_speed` is at least 1 − within over the last `window` rounds, and over all
    rounds from the beginning of that window to the end of the segment. None if there is no such round.
    """
    theirs, mine = _seconds(played, segment)
    if len(mine) < window:
        return None
    rest = np.cumsum(theirs[::-1])[::-1] / np.cumsum(mine[::-1])[::-1]
    bar = 1.0 - within
    good = np.flatnonzero((relative_speed(played, segment, window) >= bar) & (rest[: len(mine) - window + 1] >= bar))
    return window + int(good[0]) if len(good) else None


def jumps(played: Sequence[Played], k_max: int) -> float:
    """Share of pairs of rounds in a row, of one request, that go from rollback to K ≥ K_max / 2 or back."""
    pairs = hits = 0
    for p in played:
        inside = ~p.last[:-1]
        low, high = p.k == 0, 2 * p.k >= k_max
        hits += int((inside & ((low[:-1] & high[1:]) | (high[:-1] & low[1:]))).sum())
        pairs += int(inside.sum())
    return hits / pairs if pairs else 0.0


def segment_report(played: Sequence[Played], segment: int, window: int, within: float, settle: int) -> dict[str, Any]:
    """Recovery (pooled over streams, and of each), and the speed before and after `settle` rounds of the segment."""
    own = [recovery([p], segment, window, within) for p in played]
    inside = [p.segment == segment for p in played]
    names = ("reference", "seconds", "k")
    parts = [tuple(getattr(p, name)[i] for name in names) for p, i in zip(played, inside, strict=True)]
    late = np.concatenate([k[settle:] for _, _, k in parts])

    def speed(part: slice) -> float | None:
        theirs, mine = (sum(float(pair[i][part].sum()) for pair in parts) for i in (0, 1))
        return theirs / mine if mine > 0 else None

    return {
        "recovery": recovery(played, segment, window, within),
        "recovery_of_each": own,
        "early_speed": speed(slice(0, settle)),
        "settled_speed": speed(slice(settle, None)),
        "rollback": float((late == 0).mean()) if len(late) else None,
        "rounds": [len(k) for _, _, k in parts],
    }
