"""The live backend: real models, one request at a time, behind the `Backend` interface."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

import torch

from assc.actions import DEFAULT_K_VALUES, ActionTable
from assc.batch import Batch
from assc.core import Action, Mode, Observation, Request, RoundRecord
from assc.costs import CostModel
from assc.device import peak_bytes, restart_peak
from assc.drafters.base import Confidence
from assc.drafters.model import confidence
from assc.engine import Engine
from assc.errors import RequestError
from assc.timing import Clock, PhaseTimer

if TYPE_CHECKING:
    from assc.pairs import LoadedPair

TimeSource = Literal["measured", "modelled"]
_DRAFT = frozenset({"draft_entropy", "draft_top1", "draft_margin"})
_TARGET = frozenset({"target_entropy", "target_top1"})


class LiveBackend:
    """Plays rounds on real models.

    `time_source` "measured" reports the clock, "modelled" prices each round with `cost_model`, which makes rewards
    deterministic. Prefill is not part of any round; what the drafter must read of the prompt is, in the round where
    it first drafts.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        mode: Mode = "greedy",
        cost_model: CostModel | None = None,
        time_source: TimeSource = "measured",
        k_values: Sequence[int] | None = None,
        label: Mapping[str, Any] | None = None,
        clock: Clock = perf_counter,
    ) -> None:
        if time_source == "modelled" and cost_model is None:
            raise ValueError("modelled time needs a cost model")
        values = [k for k in (k_values or DEFAULT_K_VALUES) if k <= engine.k_max or k_values]
        if max(values) > engine.k_max:
            raise RequestError(f"K={max(values)} is above K_max={engine.k_max} of this decoder")
        self.engine = engine
        self.mode: Mode = mode
        self.table = ActionTable.build(list(engine.drafters), sorted({*values, engine.k_max}))
        self.cost_model = cost_model
        self.time_source: TimeSource = time_source
        self.label = dict(label or {})
        self.extras: dict[str, Any] = {}
        """stop strings, criteria, logprobs, eos ids for the coming requests (see `Engine.start`)"""
        self._clock = clock
        self._timer = PhaseTimer(engine.device, clock)
        self._batch: Batch | None = None
        self._past: list[RoundRecord] = []
        self._peeked: dict[int, Confidence] = {}
        self._needs: frozenset[str] = frozenset()
        self._observing = 0.0
        self._target_confidence: Confidence | None = None
        self.prefill_seconds = 0.0

    @classmethod
    def from_pair(
        cls,
        pair: LoadedPair,
        *,
        mode: Mode = "greedy",
        k_max: int = 16,
        time_source: TimeSource = "measured",
        cost_model: CostModel | None = None,
        k_values: Sequence[int] | None = None,
    ) -> LiveBackend:
        """A backend over a loaded pair. Without a `cost_model` a short calibration fits one."""
        from assc.calibrate import calibrate
        from assc.loading import build_engine

        engine = build_engine(pair, k_max=k_max)
        label = {
            "pair": pair.name,
            "device": str(pair.device),
            "dtype": str(pair.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
        }
        model = cost_model if cost_model is not None else calibrate(engine)
        return cls(engine, mode=mode, cost_model=model, time_source=time_source, k_values=k_values, label=label)

    def describe(self) -> dict[str, Any]:
        """Pair, device, dtype, threads, mode, c, drafters and time source, for result files."""
        return {
            **self.label,
            "backend": "live",
            "mode": self.mode,
            "c": self.cost_ratio,
            "k_max": self.engine.k_max,
            "drafters": list(self.engine.drafters),
            "time_source": self.time_source,
            "cost_model": self.cost_model.to_json() if self.cost_model is not None else None,
        }

    @property
    def cost_ratio(self) -> float:
        """c of the first model drafter, else of the first drafter; 0 when nothing was calibrated."""
        if self.cost_model is None:
            return 0.0
        names = sorted(self.engine.drafters, key=lambda n: not self.engine.drafters[n].has_confidence)
        return self.cost_model.cost_ratio(names[0]) if names else 0.0

    @property
    def plain_step_seconds(self) -> float:
        if self.cost_model is None:
            raise RuntimeError("this backend was not calibrated, so the seconds of a plain step are unknown")
        return self.cost_model.plain_step()

    @property
    def batch(self) -> Batch:
        if self._batch is None:
            raise RuntimeError("no request is running; call reset(request) first")
        return self._batch

    @property
    def done(self) -> bool:
        return self.batch.rows[0].finish is not None

    def check(self, request: Request) -> None:
        """Raise `RequestError` if `reset` would refuse the request; costs no forward."""
        self.engine.check_request(self._in_mode(request), self.extras)

    def _in_mode(self, request: Request) -> Request:
        mode = request.sampling.get("mode", self.mode)
        if mode != self.mode:
            raise RequestError(f"the request asks for mode {mode!r}, this backend decodes in mode {self.mode!r}")
        return replace(request, sampling={**request.sampling, "mode": self.mode})

    def reset(self, request: Request) -> None:
        request = self._in_mode(request)
        start = self._timer.now()
        self._batch = self.engine.start([request], self.extras)
        self.prefill_seconds = self._timer.now() - start
        self._past = []
        self._peeked = {}
        self._observing = 0.0
        self._target_confidence = None
        self._timer.read()
        restart_peak(self.engine.device)

    @property
    def memory_peak(self) -> int | None:
        """Bytes in use at once in the rounds of this request (CUDA), or by the process so far (CPU)."""
        return peak_bytes(self.engine.device)

    def observe(self, needs: frozenset[str] = frozenset()) -> Observation:
        start = self._clock()
        batch, engine = self.batch, self.engine
        if self.done:
            raise RuntimeError("the request has ended; call reset(request)")
        row = batch.rows[0]
        self._needs = needs
        if needs & _DRAFT and not self._peeked:
            with self._timer.phase("draft"):
                self._peeked = engine.peek(batch, [0])
        draft = self._peeked.get(0)
        target = self._confidence_of_target() if needs & _TARGET else None
        observation = Observation(
            position=row.new_tokens,
            prompt_length=row.prompt_length,
            remaining=row.remaining,
            k_max=min(engine.k_max, row.k_limit),
            temperature=row.params.temperature,
            past=tuple(self._past),
            cost_ratio=self.cost_ratio,
            target_entropy=target.entropy if target else None,
            target_top1=target.top1 if target else None,
            draft_entropy=draft.entropy if draft else None,
            draft_top1=draft.top1 if draft else None,
            draft_margin=draft.margin if draft else None,
            ngram_match=engine.match_length(batch, 0) if "ngram_match" in needs else None,
        )
        self._observing += self._clock() - start
        return observation

    def _confidence_of_target(self) -> Confidence | None:
        logits = self.batch.rows[0].last_logits
        if logits is None:
            return None
        if self._target_confidence is None:
            self._target_confidence = confidence(logits)
        return self._target_confidence

    def step(self, action: Action, *, policy_seconds: float = 0.0, reasons: tuple[str, ...] = ()) -> RoundRecord:
        batch = self.batch
        if self.done:
            raise RuntimeError("the request has ended; call reset(request)")
        self.engine.check(action)
        row = batch.rows[0]
        position, length = row.new_tokens, row.length
        asked = min(action.k, row.k_limit) > 0
        peeker = self.engine.peeker if self._peeked else None
        peek = (peeker.name, *peeker.work(0)) if peeker is not None else None
        start = self._clock()
        try:
            outcome = self.engine.round(batch, [action], self._timer)[0]
        except BaseException:
            self._batch = None  # half a round cannot be counted or taken back: the request is over
            raise
        phases = self._timer.read()
        self._target_confidence = None
        target = self._confidence_of_target() if self._needs & _TARGET else None
        wall = self._observing + self._timer.now() - start + policy_seconds
        draft, verify = phases.get("draft", 0.0), phases.get("verify", 0.0)
        drafter = action.drafter if asked else None
        work = [(drafter, outcome.draft_steps, outcome.catch_up)] if drafter is not None else []
        if peek is not None and drafter != peek[0]:
            work.append(peek)  # the round made no use of the peek, which is paid all the same
        record = RoundRecord(
            index=len(self._past),
            position=position,
            action=action,
            drafted=outcome.drafted,
            accepted=outcome.accepted,
            emitted=len(outcome.tokens),
            tokens=outcome.tokens,
            seconds=wall,
            draft_seconds=draft,
            verify_seconds=verify,
            policy_seconds=policy_seconds,
            other_seconds=max(0.0, wall - draft - verify - policy_seconds),
            peeked=bool(self._peeked),
            catch_up=sum(caught for _, _, caught in work),
            draft_steps=sum(steps for _, steps, _ in work),
            finish=row.finish,
            target_entropy=target.entropy if target else None,
            target_top1=target.top1 if target else None,
            reasons=reasons,
        )
        if self.time_source == "modelled" and self.cost_model is not None:
            costs = self.cost_model
            kv = costs.kv(length, batch.kv.length)
            record = costs.price(record, kv, sum((costs.draft(*w) for w in work), 0.0))
        self._past.append(record)
        self._peeked = {}
        self._observing = 0.0
        return record
