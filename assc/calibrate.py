"""Fits the `CostModel` of a pair on the machine at hand, to rounds measured by the live backend itself.

Verification is measured with a probe that drafts what the target is known to say (all accepted) or its opposite (all
rejected), so every shape is met whatever the real drafters are good for; each real drafter is then measured for its
own phase, warm, after rollbacks, and cold over a whole prompt. Coefficients are non-negative, fitted to relative
errors, with outliers left out. Where the linear target cost misses a width of the verified block by more than
`CURVE_BAR`, a curve through the measured widths takes its place (`CostModel.target_curve`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

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
from assc.timing import Clock

PROMPT_TOKENS = 96
TEXT_TOKENS = 64
"""tokens of text that one episode plays over"""
ROUNDS = 3
"""rounds per shape"""
K_VALUES: tuple[int, ...] = (0, 1, 2, 4, 8, 12, 15, 16)
"""of the probe; the real drafters' costs are lines, for which `DRAFT_K` are enough"""
DRAFT_K = frozenset({1, 2, 4, 8, 16})
CURVE_BAR = 0.01
"""relative error of the linear target cost at some width above which the curve is used"""
CURVE_SAMPLES = 4
"""samples that a width needs to be a knot of the curve"""
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
    measuring = Measuring(engine, k_values=k_values, budgets=budgets, mode=mode, temperature=temperature)
    for _ in range(rounds):
        measuring.measure()
    return measuring.fit()


class Measuring:
    """Collects rounds to fit a model to, a pass at a time, so that other work can take turns with it.

    The engine's drafters and target are shared, its own state is left alone; `chunks` and `unload_after` do not apply.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        k_values: tuple[int, ...] = K_VALUES,
        budgets: Sequence[int] = (TEXT_TOKENS,),
        mode: Mode = "greedy",
        temperature: float = 0.0,
        clock: Clock = perf_counter,
    ) -> None:
        self._clock = clock
        self.engine = engine
        self.samples: list[Sample] = []
        self._probe, self._passes = Probe(), 0
        own = Engine(
            engine.target,
            [self._probe, *engine.drafters.values()],
            k_max=engine.k_max,
            fixed_width=engine.fixed_width,
            lazy_verify=engine.lazy_verify,
        )
        self._backend = LiveBackend(own, mode=mode, time_source="measured", clock=clock)
        self._backend.extras = {"eos_ids": ()}
        self._ks = [k for k in k_values if 0 < k <= engine.k_max] or [1]
        engine.pool.load_all()
        self._requests = [_request(engine, budget, mode, temperature) for budget in budgets]
        self._texts = [_plain_text(self._backend, request) for request in self._requests]
        self._pass(0)  # a warm-up

    def measure(self) -> None:
        """One pass over all shapes: lengths take turns, so that a machine that slows down slows all of them."""
        self.engine.pool.load_all()
        self._passes += 1
        self.samples += self._pass(self._passes)

    def _pass(self, seed: int) -> list[Sample]:
        found: list[Sample] = []
        for request, text in zip(self._requests, self._texts, strict=True):
            self._probe.text = text
            found += _episode(self._backend, request, self._probe, self._ks, np.random.default_rng(seed))
        return found

    def fit(self) -> Calibration:
        """The model of everything measured so far."""
        found = _fit(self.samples, list(self.engine.drafters), self._probe.name)
        if self.engine.pool.unload_after is None:
            return found
        costs = {name: replace(cost, per_load=self._load_seconds(name)) for name, cost in found.model.drafters.items()}
        return replace(found, model=replace(found.model, drafters=costs))

    def _load_seconds(self, name: str, times: int = 3) -> float:
        """Seconds of unloading a drafter and bringing it back, median; the first time, which copies, is left out."""
        drafter, seconds = self.engine.drafters[name], []
        for _ in range(times + 1):
            start = self._clock()
            self.engine.pool.unload(name)
            drafter.load()
            seconds.append(self._clock() - start)
        return float(np.median(seconds[1:])) if drafter.weights() else 0.0


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
    menu += [(Action(name, k), True) for name in drafters for k in ks if k in DRAFT_K or len(ks) == 1]
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
    """The target's coefficients: the line with its tiles, and the curve through the widths if the line will not do."""
    seconds = np.array([s.record.verify_seconds for s in samples])
    width = np.array([s.record.drafted + 1.0 for s in samples])
    slots = np.array([s.slots for s in samples], np.float64)
    rest = [np.array([s.record.emitted for s in samples], np.float64)]
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
