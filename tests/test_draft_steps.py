"""Decisions after each drafted token: replay is live to the bit, the text is the target's, every token is counted."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from dataclasses import astuple, replace
from typing import Any

import numpy as np
import pytest
from test_hidden_drafter import make_net, request
from tiny_traces import COSTS, tiny_engine, tiny_trace

from assc.actions import ActionTable
from assc.core import ROLLBACK, Action, Backend, Mode, Observation, Request, RoundRecord
from assc.costs import CostModel, DrafterCost
from assc.drafters.hidden import HiddenDrafter
from assc.drafters.ngram import NgramDrafter
from assc.engine import Engine
from assc.errors import TraceError
from assc.kv import ModelRunner
from assc.live import LiveBackend
from assc.record import header_of
from assc.recorder import record_request
from assc.replay import ReplayBackend
from assc.run import run_request
from assc.steps import STEP_FIELDS, Decision, StepObservation
from assc.timing import PhaseTimer
from assc.tiny import tiny_target
from assc.trace import Trace
from assc.trace_build import build_trace

HIDDEN_COSTS = CostModel(
    target_fixed=0.02,
    target_per_token=0.0003,
    drafters={"hidden": DrafterCost(0.002, 0.0004, 0.0005), "ngram": DrafterCost(0.0, per_call=1e-4)},
    overhead=0.0007,
)


class RandomSteps:
    """Opens rounds at random and decides at random, leaning on every number it sees; keeps what it saw."""

    spec = "random-steps"

    def __init__(self, seed: int, drafters: tuple[str, ...], needs: frozenset[str] = frozenset(STEP_FIELDS)) -> None:
        self.seed, self.drafters, self.needs = seed, drafters, needs
        self.seen: list[tuple[Any, ...]] = []
        self.reset()

    def begin(self, table: ActionTable) -> None:
        pass

    def reset(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    def act(self, observation: Observation) -> Action:
        k = min(int(self.rng.integers(0, 17)), observation.k_max)
        return Action(self.drafters[self.rng.integers(len(self.drafters))], k) if k else ROLLBACK

    def decide(self, step: StepObservation) -> Decision:
        numbers = (step.entropy, step.top1, step.margin, step.prob, step.product)
        self.seen.append((step.drafter, step.planned, step.drafted, step.observation.position, *numbers))
        # a changed bit in any number changes what follows
        lean = sum(hash(x) % 97 for x in numbers if x is not None) / 97 % 1
        u = (self.rng.random() + lean) % 1
        return Decision.CONTINUE if u < 0.75 else Decision.VERIFY if u < 0.9 else Decision.ROLLBACK

    def update(self, record: RoundRecord) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


def played(backend: Backend, asked: Request, policy: RandomSteps) -> list[RoundRecord]:
    policy.reset()
    policy.seen.clear()
    return list(run_request(backend, asked, policy).rounds)


def check_same(live: Backend, replayed: Backend, asked: Request, policy: RandomSteps) -> list[RoundRecord]:
    one = played(live, asked, policy)
    seen = list(policy.seen)
    two = played(replayed, asked, policy)
    assert seen == policy.seen, "the policy saw other numbers in replay than live"
    assert [astuple(r) for r in one] == [astuple(r) for r in two]
    return one


@pytest.mark.parametrize("mode", ["greedy", "gumbel"])
@pytest.mark.parametrize("peek", [False, True], ids=["free", "peeked"])
def test_replay_is_live_at_every_drafted_token(mode: Mode, peek: bool) -> None:
    """Both drafters of the tiny pair, fp64; the plain text, and every token accounted for."""
    trace = tiny_trace(mode)
    live = LiveBackend(tiny_engine(), mode=mode, cost_model=COSTS, time_source="modelled")
    replayed = ReplayBackend(trace, COSTS)
    needs = frozenset(STEP_FIELDS) | (frozenset({"draft_entropy"}) if peek else frozenset())
    rounds: list[RoundRecord] = []
    for row, asked in enumerate(trace.requests()):
        policy = RandomSteps(row, ("model", "ngram"), needs)
        some = check_same(live, replayed, asked, policy)
        first, last = trace.columns["offsets"][row : row + 2]
        assert [t for r in some for t in r.tokens] == trace.columns["tokens"][first:last].tolist()
        rounds += some
    assert any(r.discarded for r in rounds) and any(r.accepted > 1 for r in rounds)
    for r in rounds:
        assert 0 <= r.accepted <= r.drafted and not (r.drafted and r.discarded)
        if r.discarded:
            assert r.rollback and r.emitted == 1 and r.drafted == 0 and r.discarded == r.planned
        if r.action.drafter == "model":
            assert r.draft_steps == max(r.drafted + r.discarded, int(r.peeked))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_replay_is_live_with_the_hidden_drafter(temperature: float) -> None:
    target = tiny_target()
    engine = Engine(ModelRunner(target), [HiddenDrafter(make_net(target=target)), NgramDrafter()], eos_ids=())
    live = LiveBackend(engine, mode="gumbel", cost_model=HIDDEN_COSTS, time_source="modelled")
    header = header_of(engine, mode="gumbel", max_new_tokens=30)
    for seed in range(2):
        asked = replace(request(seed, n=30, mode="gumbel", temperature=temperature), id=str(seed))
        trace = build_trace(header, [(asked, "train", *record_request(engine, asked))])
        check_same(live, ReplayBackend(trace, HIDDEN_COSTS), asked, RandomSteps(seed, ("hidden", "ngram")))


def test_recorded_side_by_side_is_recorded_one_by_one() -> None:
    trace = tiny_trace("gumbel")
    asked = trace.request(1)
    wide, narrow = (record_request(tiny_engine(), asked, starts=n)[0] for n in (16, 1))
    assert wide.keys() == narrow.keys()
    for name, column in wide.items():
        assert np.array_equal(column, narrow[name]), name


def without_steps(trace: Trace) -> Trace:
    drafters = tuple(replace(d, steps=0) for d in trace.header.drafters)
    columns = {n: c for n, c in trace.columns.items() if not n.startswith("step_")}
    return Trace(replace(trace.header, drafters=drafters), columns, "old.npz")


def test_a_trace_without_them_says_so_where_they_are_needed() -> None:
    trace = tiny_trace("gumbel")
    backend, asked = ReplayBackend(without_steps(trace), COSTS), trace.request(0)
    with pytest.raises(TraceError, match=r"reads step_entropy.*no confidences per draft step of 'model'; record it"):
        run_request(backend, asked, RandomSteps(0, ("model",)))
    blind = RandomSteps(0, ("model",), frozenset())
    live = LiveBackend(tiny_engine(), mode="gumbel", cost_model=COSTS, time_source="modelled")
    check_same(live, backend, asked, blind)
    assert blind.seen and all(seen[4:] == (None,) * 5 for seen in blind.seen)


def test_open_rounds_are_guarded() -> None:
    trace = tiny_trace("gumbel")
    live = LiveBackend(tiny_engine(), mode="gumbel", cost_model=COSTS, time_source="modelled")
    for backend in (live, ReplayBackend(trace, COSTS)):
        backend.reset(trace.request(0))
        with pytest.raises(RuntimeError, match="no round is open"):
            backend.close_round()
        with pytest.raises(RuntimeError, match="no drafted token waits"):
            backend.decide(Decision.VERIFY)
        backend.observe()
        step = backend.open_round(Action("model", 4))
        assert step is not None and (step.drafted, step.planned) == (1, 4)
        for call in (backend.observe, lambda b=backend: b.step(ROLLBACK), lambda b=backend: b.open_round(ROLLBACK)):
            with pytest.raises(RuntimeError, match="a round is open"):
                call()
        with pytest.raises(RuntimeError, match="waits for its decision"):
            backend.close_round()
        assert backend.decide(Decision.VERIFY) is None
        assert backend.close_round().drafted == 1
        assert backend.open_round(ROLLBACK) is None and backend.close_round().rollback


def _shifted(inner: Any) -> Any:
    return lambda seen: (codes := inner(seen))._replace(top1=min(255, codes.top1 + 1))


def _one_step_free(inner: Any) -> Any:
    def work(self: Any, name: str, drafted: int, *rest: Any) -> tuple[int, int]:
        steps, catch_up = inner(self, name, drafted, *rest)
        return max(0, steps - 1), catch_up

    return work


def _verified_all_the_same(inner: Any) -> Any:
    return lambda *rest: inner(*rest[:-1], frozenset())


FAULTS = {
    "a code off by one": ("assc.live.codes_of", _shifted),
    "a draft step for nothing": ("assc.positions.PositionBackend._work", _one_step_free),
    "discarded tokens verified": ("assc.engine.merge", _verified_all_the_same),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, plant = FAULTS[fault]
    owner, _, name = place.rpartition(".")
    module = pkgutil.resolve_name(owner)
    monkeypatch.setattr(module, name, plant(getattr(module, name)))
    trace = tiny_trace("gumbel")
    live = LiveBackend(tiny_engine(), mode="gumbel", cost_model=COSTS, time_source="modelled")
    with pytest.raises(AssertionError):
        for row, asked in enumerate(trace.requests()[:3]):
            check_same(live, ReplayBackend(trace, COSTS), asked, RandomSteps(row, ("model", "ngram")))


def test_rows_of_a_batch_decide_for_themselves() -> None:
    """Two rows in one engine batch, one rolling back and one going on: each commits its own plain text."""
    trace, engine = tiny_trace("greedy"), tiny_engine()
    asked = [trace.request(r) for r in (0, 1)]
    batch, timer = engine.start(asked), PhaseTimer(engine.device)
    discarded = [0, 0]
    while any(row.finish is None for row in batch.rows):
        steps = engine.steps(batch, [Action("model", 3), Action("model", 5)], timer)
        try:
            shown = next(steps)
            while True:
                shown = steps.send({b: Decision.CONTINUE if b else Decision.ROLLBACK for b in shown})
        except StopIteration as done:
            discarded = [n + o.discarded for n, o in zip(discarded, done.value, strict=True)]
    assert discarded[0] > 0 and discarded[1] == 0
    offsets, tokens = trace.columns["offsets"], trace.columns["tokens"]
    for row, recorded in zip(batch.rows, range(2), strict=True):
        text = tokens[offsets[recorded] : offsets[recorded + 1]].tolist()
        assert row.tokens[row.prompt_length :] == text
