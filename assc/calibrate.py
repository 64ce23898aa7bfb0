"""Fits the `CostModel` of a pair on the machine at hand, by a short interleaved series of measured rounds."""

from __future__ import annotations

from time import perf_counter

import numpy as np
from scipy.optimize import nnls  # type: ignore[attr-defined]

from assc.core import ROLLBACK, Action, Request
from assc.costs import CostModel, DrafterCost
from assc.engine import Engine
from assc.timing import PhaseTimer

PROMPT_TOKENS = 48
ROUNDS = 4
"""rounds per shape; the medians are fitted, so one slow round does no harm"""


def calibrate(engine: Engine, *, rounds: int = ROUNDS, k_values: tuple[int, ...] = (0, 2, 4, 8, 16)) -> CostModel:
    """Measure rounds of several K with every drafter and fit the coefficients.

    Takes a few seconds for a small pair. Tokens are arbitrary, since cost depends on shapes alone.
    """
    k_values = tuple(k for k in k_values if k <= engine.k_max) or (0, 1)
    verify: dict[int, list[float]] = {}
    drafts: dict[str, list[float]] = {name: [] for name in engine.drafters}
    overhead: list[float] = []
    vocab = engine.target.vocab_size
    prompt = tuple((7 * i + i * i // 5) % min(vocab, 97) for i in range(PROMPT_TOKENS))
    timer = PhaseTimer(engine.device)
    for repeat in range(rounds + 1):
        batch = engine.start([Request(prompt * 2, max_new_tokens=512)], {"eos_ids": ()})
        for name in engine.drafters:
            for k in k_values:
                if batch.rows[0].k_limit < k:
                    continue
                start = perf_counter()
                outcome = engine.round(batch, [Action(name, k) if k else ROLLBACK], timer)[0]
                wall = timer.now() - start
                phases = timer.read()
                if repeat == 0 or outcome.catch_up > 1:
                    continue  # warm-up, or a cold drafter that had to read the prompt
                verify.setdefault(outcome.drafted, []).append(phases["verify"])
                if outcome.draft_steps or outcome.drafted:
                    drafts[name].append(phases["draft"] / max(1, outcome.draft_steps))
                overhead.append(max(0.0, wall - phases["verify"] - phases["draft"]))
    shapes = sorted(verify)
    design = np.array([[1.0, d + 1] for d in shapes])
    fixed, per_token = nnls(design, np.array([np.median(verify[d]) for d in shapes]))[0]
    costs = {name: DrafterCost(float(np.median(t)) if t else 0.0) for name, t in drafts.items()}
    return CostModel(
        target_fixed=max(float(fixed), 1e-9),
        target_per_token=float(per_token),
        drafters=costs,
        overhead=float(np.median(overhead)),
        label="fitted to measured rounds on this machine",
    )
