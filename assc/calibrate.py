"""Fits the `CostModel` of a pair on the machine at hand, to rounds measured by the live backend itself.

Verification is measured with a probe that drafts what the target is known to say (all accepted) or its opposite (all
rejected), so every shape is met whatever the real drafters are good for; each real drafter is then measured for its
own phase, warm, after rollbacks, and cold over a whole prompt. Coefficients are non-negative, fitted to relative
errors, with outliers left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import nnls  # type: ignore[attr-defined]

from assc.batch import Batch
from assc.core import ROLLBACK, Action, Mode, Request, RoundRecord
from assc.costs import TILE, CostModel, DrafterCost
from assc.drafters.base import Drafter, Proposal
from assc.engine import Engine
from assc.live import LiveBackend

PROMPT_TOKENS = 96
TEXT_TOKENS = 64
"""tokens of text that one episode plays over"""
ROUNDS = 3
"""rounds per shape"""
K_VALUES: tuple[int, ...] = (0, 2, 4, 8, 16)
OUTLIER = 4.0
"""samples further than this many median deviations from the fit are left out"""


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


class Probe(Drafter):
    """Proposes `text` at the position reached, or wrong tokens when `wrong` is set; costs nothing."""

    kind = "probe"

    def __init__(self) -> None:
        self.name = "calibration probe"
        self.text: list[int] = []
        self.wrong = False

    def begin(self, batch: Batch) -> None:
        """Nothing to forget."""

    def propose(self, batch: Batch, ks: Sequence[int]) -> Proposal:
        row, k = batch.rows[0], ks[0]
        tokens = [(t + self.wrong) % row.vocab_size for t in self.text[row.new_tokens : row.new_tokens + k]]
        return Proposal(torch.tensor([tokens], dtype=torch.long).to(batch.device), [len(tokens)])


def calibrate(
    engine: Engine,
    *,
    rounds: int = ROUNDS,
    k_values: tuple[int, ...] = K_VALUES,
    budgets: Sequence[int] = (TEXT_TOKENS,),
    mode: Mode = "greedy",
    temperature: float = 0.0,
) -> CostModel:
    """The model of `fit_costs`, from a few seconds of measuring."""
    return fit_costs(
        engine, rounds=rounds, k_values=k_values, budgets=budgets, mode=mode, temperature=temperature
    ).model


def fit_costs(
    engine: Engine,
    *,
    rounds: int = ROUNDS,
    k_values: tuple[int, ...] = K_VALUES,
    budgets: Sequence[int] = (TEXT_TOKENS,),
    mode: Mode = "greedy",
    temperature: float = 0.0,
) -> Calibration:
    """Measure rounds of several K with every drafter over requests of these `budgets` (tokens), and fit.

    More than one buffer length is needed to tell the cost per slot apart. The engine is left as it was.
    """
    probe = Probe()
    measuring = Engine(
        engine.target,
        [probe, *engine.drafters.values()],
        k_max=engine.k_max,
        fixed_width=engine.fixed_width,
        lazy_verify=engine.lazy_verify,
    )
    backend = LiveBackend(measuring, mode=mode, time_source="measured")
    backend.extras = {"eos_ids": ()}
    ks = [k for k in k_values if 0 < k <= engine.k_max] or [1]
    samples: list[Sample] = []
    requests = [_request(engine, budget, mode, temperature) for budget in budgets]
    texts = [_plain_text(backend, request) for request in requests]
    for repeat in range(rounds + 1):  # lengths take turns, so that a machine that slows down slows all of them
        for request, probe.text in zip(requests, texts, strict=True):
            found = _episode(backend, request, probe, ks, np.random.default_rng(repeat))
            samples += found if repeat else []  # the first is a warm-up
    return _fit(samples, list(engine.drafters), probe.name)


def _request(engine: Engine, budget: int, mode: Mode, temperature: float) -> Request:
    vocab, most = engine.target.vocab_size, engine.target.max_positions
    size = PROMPT_TOKENS if most is None else max(1, min(PROMPT_TOKENS, most // 4))
    budget = budget if most is None else min(budget, most - size)
    prompt = tuple((7 * i + i * i // 5) % min(vocab, 97) for i in range(size))
    return Request(prompt, budget, sampling={"mode": mode, "temperature": temperature})


def _plain_text(backend: LiveBackend, request: Request) -> list[int]:
    """The first tokens of the request's text, with the help of a lookup where there is one."""
    backend.reset(request)
    lookup = [d for d in backend.engine.drafters.values() if not d.has_confidence and not isinstance(d, Probe)]
    tokens: list[int] = []
    while not backend.done and len(tokens) < TEXT_TOKENS:
        action = Action(lookup[0].name, min(8, backend.engine.k_max)) if lookup else ROLLBACK
        tokens += backend.step(action).tokens
    return tokens[:TEXT_TOKENS]


def _episode(
    backend: LiveBackend, request: Request, probe: Probe, ks: Sequence[int], rng: np.random.Generator
) -> list[Sample]:
    """Every shape once in random order, as far as the text goes."""
    drafters = [n for n in backend.engine.drafters if n != probe.name]
    menu: list[tuple[Action, bool]] = [(ROLLBACK, False)] * 3
    menu += [(Action(name, k), True) for name in drafters for k in ks]
    menu += [(Action(probe.name, k), wrong) for k in ks for wrong in (True, False)]
    backend.reset(request)
    slots = backend.batch.kv.length
    samples: list[Sample] = []
    for i in rng.permutation(len(menu)):
        action, probe.wrong = menu[i]
        left = min(backend.batch.rows[0].remaining, len(probe.text) - backend.batch.rows[0].new_tokens)
        if backend.done or left < 2:
            break
        backend.observe()
        samples.append(Sample(backend.step(action.clipped(left - 1)), slots))
    return samples


def _fit(samples: Sequence[Sample], drafters: Sequence[str], probe: str) -> Calibration:
    records = [s.record for s in samples]
    slots = np.array([s.slots for s in samples], np.float64)
    emitted = np.array([r.emitted for r in records], np.float64)
    ones = np.ones(len(records))
    tiles = np.array([r.drafted // TILE for r in records], np.float64)
    columns = [ones, np.array([r.drafted + 1.0 for r in records]), emitted, tiles]
    if len(set(slots.tolist())) > 1:
        columns.append(slots)
    seconds = np.array([r.verify_seconds for r in records])
    (fixed, per_token, per_emitted, per_tile, *per_slot), residual = _relative_nnls(np.stack(columns, axis=1), seconds)
    residuals = {"verify": residual}
    costs: dict[str, DrafterCost] = {}
    for name in drafters:
        own = [r for r in records if r.action.drafter == name]
        costs[name], residuals[name] = _drafter(own)
    model = CostModel(
        target_fixed=max(fixed, 1e-9),
        target_per_token=per_token,
        target_per_tile=per_tile,
        target_per_kv=per_slot[0] if per_slot else 0.0,
        per_emitted=per_emitted,
        drafters=costs,
        overhead=float(np.median([r.other_seconds for r in records])),
        label="fitted to measured rounds on this machine",
        static_kv=True,
        kv_reference=int(np.median(slots)),
    )
    return Calibration(model, residuals)


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
    design = np.stack([np.ones(len(records)), steps, catch_up], axis=1)[used]
    (call, step, caught), residual = _relative_nnls(design, seconds[used])
    return DrafterCost(step, per_catch_up=min(caught, step + call), per_call=call), residual


def _relative_nnls(design: NDArray[np.float64], seconds: NDArray[np.float64]) -> tuple[list[float], float]:
    """Non-negative coefficients that minimise relative errors, outliers left out once; and the errors' RMS."""
    keep = np.ones(len(seconds), bool)
    errors = np.zeros(len(seconds))
    coefficients = np.zeros(design.shape[1])
    for _ in range(2):
        weights = 1.0 / np.maximum(seconds[keep], 1e-12)
        coefficients = nnls(design[keep] * weights[:, None], np.ones(int(keep.sum())))[0]
        errors = design @ coefficients / np.maximum(seconds, 1e-12) - 1.0
        spread = np.median(np.abs(errors[keep] - np.median(errors[keep])))
        keep = np.abs(errors - np.median(errors[keep])) <= OUTLIER * max(spread, 1e-6)
    return [float(c) for c in coefficients], float(np.sqrt(np.mean(errors[keep] ** 2)))
