"""Fits the `CostModel` of a pair on the machine at hand, to rounds measured by the live backend itself.

Verification is measured with a probe that drafts what the target is known to say (all accepted) or its opposite (all
rejected), so every shape is met whatever the real drafters are good for; each real drafter is then measured for its
own phase, warm, after rollbacks, and cold over a whole prompt. `assc.cost_fit` makes the model of these rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter

import numpy as np
import torch

from assc.batch import Batch
from assc.core import ROLLBACK, Action, Mode, Request
from assc.cost_fit import Calibration, Sample, fit_samples
from assc.costs import CostModel
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
    """Measure rounds of several K with every drafter over requests of these `budgets` (tokens), some seconds, and fit.

    More than one buffer length is needed to tell the cost per slot apart. The engine is left as it was.
    """
    measuring = Measuring(engine, k_values=k_values, budgets=budgets, mode=mode, temperature=temperature)
    for _ in range(rounds):
        measuring.measure()
    return measuring.fit().model


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
        found = fit_samples(self.samples, list(self.engine.drafters))
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
