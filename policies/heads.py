"""Acceptance heads: P(a drafted token is accepted | those before it were) from what the draft says about it.

A head is a list of coefficients of `FEATURES`, so that it is saved as plain JSON and evaluated without scikit-learn.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assc.errors import TraceError
from assc.steps import ENTROPIES, PROBABILITIES
from assc.trace import Trace

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

FEATURES: tuple[str, ...] = ("one", "entropy", "top1", "margin", "prob", "product", "position")
"""1; nats / 3; probabilities; log2 of the place in the draft (1, 2, …) / 4: usual values differ by about 1"""
START: tuple[float, ...] = (-2.0, 0.0, 0.0, 0.0, 4.0, 0.0, 0.0)
"""head before anything is learned: the draft's own probability, from a chance of 0.12 at 0 to 0.88 at 1"""


def features_of(entropy: float, top1: float, margin: float, prob: float, product: float, drafted: int) -> list[float]:
    """The features of one drafted token.

    >>> features_of(1.5, 0.5, 0.25, 0.125, 0.5, 4)
    [1.0, 0.5, 0.5, 0.25, 0.125, 0.5, 0.5]
    """
    return [1.0, entropy / 3.0, top1, margin, prob, product, math.log2(drafted) / 4.0]


def trace_samples(trace: Trace) -> dict[str, tuple[Floats, Bools]]:
    """Per drafter with confidences per draft step: features [S, len(FEATURES)] and whether accepted [S].

    Of a draft from every position of the texts, all steps up to the first refused one; what would lie behind the end of
    a text is left out, since nobody knows. `TraceError` where no drafter has confidences per draft step.
    """
    found: dict[str, tuple[Floats, Bools]] = {}
    entropies, probabilities = np.array(ENTROPIES), np.array(PROBABILITIES)
    c = trace.columns
    left = np.repeat(c["offsets"][1:], np.diff(c["offsets"])) - np.arange(trace.positions)
    for drafter in trace.header.drafters:
        if not drafter.steps:
            continue
        name = drafter.name
        steps = np.arange(drafter.steps)
        accepted = c[f"acc/{name}"].astype(np.int64)[:, None]
        proposed = np.minimum(c[f"avail/{name}"], left)[:, None]
        judged = (steps <= accepted) & (steps < proposed)
        entropy = entropies[c[f"step_entropy/{name}"]]
        top1, margin, prob = (probabilities[c[f"step_{n}/{name}"]] for n in ("top1", "margin", "prob"))
        position = np.broadcast_to(np.log2(steps + 1.0) / 4.0, judged.shape)
        columns = (np.ones(judged.shape), entropy / 3.0, top1, margin, prob, np.cumprod(top1, axis=1), position)
        found[name] = (np.stack([column[judged] for column in columns], axis=1), (steps < accepted)[judged])
    if not found:
        raise TraceError(
            f"{trace.name} has no confidences per draft step, from which an acceptance head learns; record it again "
            "with this version (python -m assc record), without --steps 0"
        )
    return found


def fit_head(x: Floats, y: Bools, *, reject: float = 1.0) -> list[float]:
    """Coefficients of a logistic regression (scikit-learn, L2 with C = 1) of y on x; refused rows weigh `reject`.

    Where all of y is the same there is nothing to tell apart, and the answer is a constant chance of 0.99 or 0.01.
    """
    from sklearn.linear_model import LogisticRegression  # slow to import, and not needed to decide

    if y.all() or not y.any():
        return [math.log(99.0) if y.all() else -math.log(99.0)] + [0.0] * (len(FEATURES) - 1)
    untyped: Any = LogisticRegression
    model = untyped(max_iter=1000, class_weight={True: 1.0, False: reject})
    model.fit(x[:, 1:], y)
    return [float(model.intercept_[0]), *model.coef_[0].tolist()]


def fit_on(head: list[float], x: Floats, y: Bools, *, rate: float, reject: float = 1.0) -> list[float]:
    """`head` after one pass of stochastic gradient descent over the rows of x, in their order."""
    from sklearn.linear_model import SGDClassifier

    untyped: Any = SGDClassifier
    model = untyped(
        loss="log_loss", alpha=1e-4, learning_rate="constant", eta0=rate, fit_intercept=False, shuffle=False
    )
    model.coef_, model.intercept_ = np.array([head]), np.zeros(1)
    model.partial_fit(x, y.astype(np.int64), classes=np.array([0, 1]), sample_weight=np.where(y, 1.0, reject))
    coefficients: list[float] = model.coef_[0].tolist()
    return coefficients
