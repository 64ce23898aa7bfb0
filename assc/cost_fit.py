"""From measured rounds to a `CostModel`: non-negative coefficients fitted to relative errors, outliers left out.

Where the linear target cost misses a width of the verified block by more than `CURVE_BAR`, a curve through the measured
widths takes its place (`CostModel.target_curve`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls  # type: ignore[attr-defined]

from assc.core import RoundRecord
from assc.costs import TILE, CostModel, DrafterCost

CURVE_BAR = 0.01
"""relative error of the linear target cost at some width above which the curve is used"""
CURVE_SAMPLES = 4
"""samples that a width needs to be a knot of the curve"""
OUTLIER = 4.0
"""samples further than this many median deviations from the fit are left out"""
PLAIN_SHARE = 0.5
"""of the measured seconds of a plain step, which the forward must be given at least; the rest may be committing"""


@dataclass(frozen=True)
class Sample:
    """One measured round and the length of its buffers."""

    record: RoundRecord
    slots: int


@dataclass(frozen=True)
class Calibration:
    """A fitted model and, per quantity, the relative root mean square of what it does not explain."""

    model: CostModel
    residuals: Mapping[str, float]


def fit_samples(samples: Sequence[Sample], drafters: Sequence[str]) -> Calibration:
    """The costs of the target, of each of these drafters, and what a round costs besides."""
    records = [s.record for s in samples]
    target, residuals = _target(samples)
    costs: dict[str, DrafterCost] = {}
    for name in drafters:
        own = [r for r in records if r.action.drafter == name]
        costs[name], residuals[name] = _drafter(own)
    model = replace(
        target,
        drafters=costs,
        overhead=float(np.median([r.other_seconds for r in records])),
        label="fitted to measured rounds on this machine",
        static_kv=True,
        kv_reference=int(np.median([s.slots for s in samples])),
    )
    return Calibration(model, residuals)


def _target(samples: Sequence[Sample]) -> tuple[CostModel, dict[str, float]]:
    """The target's coefficients: the line with its tiles, and the curve through the widths if the line will not do.

    A plain step always commits one token, so few or noisy samples may give all of its seconds to `per_emitted`, and a
    target step that costs nothing makes c infinite. Then what a committed token costs is not fitted.
    """
    plain = [s for s in samples if not s.record.drafted]
    model, residuals = _fitted_target(samples, commits=True)
    if plain:
        slots = float(np.median([s.slots for s in plain]))
        if model.verify(0, slots) < PLAIN_SHARE * float(np.median([s.record.verify_seconds for s in plain])):
            model, residuals = _fitted_target(samples, commits=False)
    return model, residuals


def _fitted_target(samples: Sequence[Sample], *, commits: bool) -> tuple[CostModel, dict[str, float]]:
    seconds = np.array([s.record.verify_seconds for s in samples])
    width = np.array([s.record.drafted + 1.0 for s in samples])
    slots = np.array([s.slots for s in samples], np.float64)
    rest = [np.array([float(s.record.emitted) if commits else 0.0 for s in samples])]
    rest += [slots] if len(set(slots.tolist())) > 1 else []
    line = [np.ones(len(samples)), width, (width - 1) // TILE]
    (fixed, per_token, per_tile, per_emitted, *per_slot), errors, kept = _relative_nnls([*line, *rest], seconds)
    model = CostModel(
        target_fixed=max(fixed, 1e-9),
        target_per_token=per_token,
        target_per_tile=per_tile,
        target_per_kv=per_slot[0] if per_slot else 0.0,
        per_emitted=per_emitted,
    )
    residuals = {"verify": _rms(errors[kept])}
    knots = [w for w in sorted(set(width.tolist())) if (width == w).sum() >= CURVE_SAMPLES]
    missed = max((abs(float(np.median(errors[width == w]))) for w in knots), default=0.0)
    if missed <= CURVE_BAR or len(knots) < 3:
        return model, residuals
    hats = [np.interp(width, knots, np.arange(len(knots)) == i) for i in range(len(knots))]
    coefficients, errors, kept = _relative_nnls([*hats, *rest], seconds)
    at, (per_emitted, *per_slot) = coefficients[: len(knots)], coefficients[len(knots) :]
    at = [max(value, 1e-9) for value in at]
    curve = tuple((int(w), value - model.forward(w)) for w, value in zip(knots, at, strict=True))
    model = replace(model, target_curve=curve, per_emitted=per_emitted, target_per_kv=per_slot[0] if per_slot else 0.0)
    return model, {"verify": _rms(errors[kept]), "verify, a line instead": residuals["verify"]}


def _drafter(records: Sequence[RoundRecord]) -> tuple[DrafterCost, float]:
    """Costs of one drafter's phase; catching a token up is never dearer than a step."""
    seconds = np.array([r.draft_seconds for r in records])
    steps = np.array([r.draft_steps for r in records], np.float64)
    if not len(records):
        return DrafterCost(0.0), 0.0
    if not steps.any():
        call = float(np.median(seconds))
        return DrafterCost(0.0, per_call=call), float(np.median(np.abs(seconds / max(call, 1e-12) - 1.0)))
    catch_up = np.array([r.catch_up for r in records], np.float64)
    used = seconds > 0
    design = [part[used] for part in (np.ones(len(records)), steps, catch_up)]
    (call, step, caught), errors, kept = _relative_nnls(design, seconds[used])
    return DrafterCost(step, per_catch_up=min(caught, step + call), per_call=call), _rms(errors[kept])


def _rms(errors: NDArray[np.float64]) -> float:
    return float(np.sqrt(np.mean(errors**2)))


def _relative_nnls(
    columns: Sequence[NDArray[np.float64]], seconds: NDArray[np.float64]
) -> tuple[list[float], NDArray[np.float64], NDArray[np.bool_]]:
    """Non-negative coefficients that minimise relative errors, the errors, and which samples are no outliers."""
    design = np.stack(columns, axis=1)
    keep = np.ones(len(seconds), bool)
    errors = np.zeros(len(seconds))
    coefficients = np.zeros(design.shape[1])
    for _ in range(2):
        weights = 1.0 / np.maximum(seconds[keep], 1e-12)
        coefficients = nnls(design[keep] * weights[:, None], np.ones(int(keep.sum())))[0]
        errors = design @ coefficients / np.maximum(seconds, 1e-12) - 1.0
        spread = np.median(np.abs(errors[keep] - np.median(errors[keep])))
        keep = np.abs(errors - np.median(errors[keep])) <= OUTLIER * max(spread, 1e-6)
    return [float(c) for c in coefficients], errors, keep
