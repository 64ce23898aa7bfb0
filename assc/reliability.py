"""How far predicted chances of acceptance can be believed: calibration curve, Brier score, and their intervals.

A policy may predict for each round the chance that draft position j is accepted, given that those before it were
(`RoundRecord.accept_chances`). What a round shows of it: every accepted position was right to be believed in, the
first refused one was not, and positions behind that were never judged.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assc.core import RoundRecord

BINS = 10
"""of equal width, over [0, 1]"""
RESAMPLES = 1000

Floats = NDArray[np.float64]


def judged(record: RoundRecord) -> tuple[tuple[float, ...], int]:
    """The predicted chances of the positions that this round judged, and how many of them were accepted.

    A round that ended the request proves no refusal. A drafter that proposed nothing although it was asked to (a
    lookup without a match) counts as a refusal of position 1, as its cost is the same.

    >>> from assc.core import Action
    >>> judged(RoundRecord(0, 0, Action("m", 3), 3, 1, 2, (5, 6), 1.0, accept_chances=(0.9, 0.5, 0.4)))
    ((0.9, 0.5), 1)
    """
    refused = record.finish is None and (record.accepted < record.drafted or record.drafted == 0 < record.planned)
    seen = record.accept_chances[: record.accepted + refused]
    return seen, min(record.accepted, len(seen))


def bin_sums(rounds: Iterable[RoundRecord]) -> Floats:
    """Per bin: positions judged, sum of predictions, accepted, sum of squared errors; [BINS, 4]."""
    sums = np.zeros((BINS, 4))
    for record in rounds:
        if not record.accept_chances:
            continue
        chances, accepted = judged(record)
        for j, p in enumerate(chances):
            hit = float(j < accepted)
            sums[min(int(p * BINS), BINS - 1)] += (1.0, p, hit, (p - hit) ** 2)
    return sums


def reliability(units: Sequence[tuple[Hashable, Sequence[RoundRecord]]], *, seed: int) -> dict[str, Any] | None:
    """Calibration over all rounds, None where nothing was predicted.

    `units` are (prompt, rounds): intervals are percentiles of a bootstrap over prompts, since the rounds of one text
    depend on each other. `brier` is the mean squared error of the chances, `brier_constant` that of always saying the
    share that was accepted; `calibration_error` is Σ n_b·|accepted share − mean prediction| / n (Naeini et al. 2015).
    """
    prompts: dict[Hashable, Floats] = {}
    for prompt, rounds in units:
        found = bin_sums(rounds)
        if found.any():
            prompts[prompt] = prompts.get(prompt, np.zeros((BINS, 4))) + found
    if not prompts:
        return None
    each = np.stack(list(prompts.values()))
    total = each.sum(0)
    n, predicted, accepted = total[:, 0], total[:, 1], total[:, 2]
    everything, share = n.sum(), accepted.sum() / n.sum()
    low, high = _intervals(each, seed)
    bins = [
        {
            "from": b / BINS,
            "judged": int(n[b]),
            "predicted": predicted[b] / n[b],
            "accepted": accepted[b] / n[b],
            "accepted_ci95": [low[b], high[b]],
        }
        for b in range(BINS)
        if n[b]
    ]
    return {
        "judged": int(everything),
        "accepted_share": float(share),
        "brier": float(total[:, 3].sum() / everything),
        "brier_constant": float(share * (1 - share)),
        "calibration_error": float(np.abs(accepted - predicted).sum() / everything),
        "bins": bins,
    }


def _intervals(each: Floats, seed: int) -> tuple[list[float | None], list[float | None]]:
    """Ends of the 95 % interval of the accepted share in each bin, None where one prompt alone is in it."""
    count = len(each)
    weights = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
    n, accepted = weights @ each[:, :, 0], weights @ each[:, :, 2]
    low: list[float | None] = []
    high: list[float | None] = []
    for b in range(BINS):
        if np.count_nonzero(each[:, b, 0]) < 2:
            low.append(None)
            high.append(None)
            continue
        drawn = n[:, b] > 0
        ends = np.quantile(accepted[drawn, b] / n[drawn, b], [0.025, 0.975])
        low.append(float(ends[0]))
        high.append(float(ends[1]))
    return low, high
