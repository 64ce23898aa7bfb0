"""The live backend: real models, one request at a time, behind the `Backend` interface."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

from assc.actions import DEFAULT_K_VALUES, ActionTable
from assc.batch import Batch
from assc.core import Action, Mode, Observation, Request, RoundRecord, default_temperature
from assc.costs import CostModel
from assc.device import peak_bytes, restart_peak
from assc.drafters.base import Confidence, codes_of
from assc.drafters.memory import DrafterMemory
from assc.drafters.model import confidence
from assc.engine import Engine, RowOutcome
from assc.errors import RequestError
from assc.live_round import LiveRound
from assc.needs import DRAFT_FIELDS, STEP_NEEDS, TARGET_FIELDS
from assc.open_round import OneRound
from assc.steps import Decision, StepObservation
from assc.timing import Clock, PhaseTimer

if TYPE_CHECKING:
    from assc.pairs import LoadedPair

TimeSource = Literal["measured", "modelled"]


class LiveBackend(OneRound[LiveRound]):
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
        self._decision: Observation | None = None
        self._round = None
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
        temperature: float | None = None,
        chunks: int = 1,
        unload_after: int | None = None,
    ) -> LiveBackend:
        """A backend over a loaded pair. `chunks` and `unload_after` are the engine's.

        Without a `cost_model` a short calibration fits one, in this mode at this temperature (default: 0 for greedy, 1
        for sampling), since choosing a token costs time as well.
        """
        from assc.calibrate import calibrate
        from assc.loading import build_engine

        engine = build_engine(pair, k_max=k_max, chunks=chunks, unload_after=unload_after)
        heat = default_temperature(mode) if temperature is None else temperature
        model = cost_model if cost_model is not None else calibrate(engine, mode=mode, temperature=heat)
        return cls(engine, mode=mode, cost_model=model, time_source=time_source, k_values=k_values, label=pair.label())

    def memory(self) -> tuple[DrafterMemory, ...]:
        """Bytes of each drafter after the last round."""
        return self.engine.pool.memory()

    def describe(self) -> dict[str, Any]:
        """Pair, device, dtype, threads, mode, c, drafters and time source, for result files."""
        return {
            **self.label,
            "backend": "live",
            "mode": self.mode,
            "c": self.cost_ratio,
            "k_max": self.engine.k_max,
            "chunks": self.engine.chunks,
            "drafters": list(self.engine.drafters),
            "unload_after": self.engine.pool.unload_after,
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
        self._decision = self._round = None
        self._timer.read()
        restart_peak(self.engine.device)

    @property
    def memory_peak(self) -> int | None:
        """Bytes in use at once in the rounds of this request (CUDA), or by the process so far (CPU)."""
        return peak_bytes(self.engine.device)

    def observe(self, needs: frozenset[str] = frozenset()) -> Observation:
        start = self._clock()
        self._idle()
        batch, engine = self.batch, self.engine
        row = batch.rows[0]
        self._needs = needs
        if needs & DRAFT_FIELDS and not self._peeked:
            with self._timer.phase("draft"):
                self._peeked = engine.peek(batch, [0])
        draft = self._peeked.get(0)
        target = self._confidence_of_target() if needs & TARGET_FIELDS else None
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
            committed=tuple(row.tokens) if "committed" in needs else None,
        )
        self._decision = observation
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
        round_ = self._begin_round(action)
        start = self._clock()
        with self._whole_or_over():
            outcome = self.engine.round(self.batch, [action], self._timer)[0]
        return self._close(round_, action, outcome, start, policy_seconds, reasons)

    # -- token by token ------------------------------------------------------------------------------------------

    def check_steps(self, needs: frozenset[str]) -> None:
        """Live drafters tell what they know, and None where they know nothing."""

    def open_round(self, action: Action) -> StepObservation | None:
        """Begin a round and draft its first token; None where nothing is drafted."""
        decision = self._decision if self._decision is not None else self.observe()
        self._round = self._begin_round(action)
        self._round.decision = decision
        self._round.steps = self.engine.steps(self.batch, [action], self._timer)
        return self._advance(None)

    def decide(self, decision: Decision) -> StepObservation | None:
        """What to do after the token shown last; the next one, or None when drafting is over."""
        self._waiting()
        return self._advance(Decision(decision))

    def close_round(self, *, policy_seconds: float = 0.0, reasons: tuple[str, ...] = ()) -> RoundRecord:
        """The record of the round that `open_round` began. Raises `RuntimeError` while a token waits for a decision."""
        round_ = self._ended()
        shown, action = round_.shown, round_.action
        assert round_.outcome is not None
        if shown is not None:
            action = Action(shown.drafter, shown.drafted)
        return self._close(round_, action, round_.outcome, self._clock(), policy_seconds, reasons)

    def _advance(self, decision: Decision | None) -> StepObservation | None:
        round_, start = self._round, self._clock()
        assert round_ is not None and round_.steps is not None and round_.decision is not None
        step: StepObservation | None = None
        with self._whole_or_over():
            try:
                seen = next(round_.steps) if decision is None else round_.steps.send({0: decision})
            except StopIteration as done:
                round_.outcome = done.value[0]
        if round_.outcome is None:
            told = seen[0] if self._needs & STEP_NEEDS else None
            step = round_.show(self.batch.rows[0].k_limit, None if told is None else codes_of(told))
        self._observing += self._clock() - start
        return step

    # -- what both share -----------------------------------------------------------------------------------------

    def _begin_round(self, action: Action) -> LiveRound:
        self._idle()
        self.engine.check(action)
        row = self.batch.rows[0]
        peeker = self.engine.peeker if self._peeked else None
        peek = (peeker.name, *peeker.work(0)) if peeker is not None else None
        return LiveRound(action, row.new_tokens, row.length, min(action.k, row.k_limit) > 0, peek)

    @contextmanager
    def _whole_or_over(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._batch = None  # half a round cannot be counted or taken back: the request is over
            raise

    def _close(
        self,
        round_: LiveRound,
        action: Action,
        outcome: RowOutcome,
        start: float,
        policy_seconds: float,
        reasons: tuple[str, ...],
    ) -> RoundRecord:
        """The record of a round that was played; `start` is when the part of it began that is not yet counted."""
        batch, row = self.batch, self.batch.rows[0]
        phases, loads = self._timer.read(), self.engine.pool.take_loads()
        self._target_confidence = None
        target = self._confidence_of_target() if self._needs & TARGET_FIELDS else None
        wall = self._observing + self._timer.now() - start + policy_seconds
        draft, verify = phases.get("draft", 0.0), phases.get("verify", 0.0)
        work = round_.work(action.drafter, outcome)
        record = RoundRecord(
            index=len(self._past),
            position=round_.position,
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
            groups=outcome.groups,
            discarded=outcome.discarded,
            loads=len(loads),
        )
        if self.time_source == "modelled" and self.cost_model is not None:
            costs = self.cost_model
            kv = costs.kv(round_.length, batch.kv.length)
            drafting = sum((costs.draft(*w) for w in work), sum(costs.drafters[name].per_load for name in loads))
            record = costs.price(record, kv, drafting)
        self._past.append(record)
        self._peeked = {}
        self._observing = 0.0
        self._decision = None
        return record
