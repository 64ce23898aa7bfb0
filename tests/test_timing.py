"""Phase times, told by an injected clock (E06, E08): what each second is charged to, and that they add up.

Models are tables whose forwards take exact times: 4 s the target, 1 s the draft; sums are exact in binary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from fakes import FakeClock
from helpers import CPU, SchedulePolicy, TableRunner, draft_runner, target_runner

from assc import run as loop
from assc.core import ROLLBACK, Action, Request, RoundRecord, Totals
from assc.costs import CostModel, DrafterCost
from assc.drafters.model import ModelDrafter
from assc.drafters.ngram import NgramDrafter
from assc.engine import Engine
from assc.live import LiveBackend
from assc.run import iter_rounds, run_request
from assc.timing import PhaseTimer

TARGET_SECONDS, DRAFT_SECONDS = 4.0, 1.0
DRAFT = frozenset({"draft_entropy"})
REQUEST = Request((1, 2, 3, 1, 2), 40)


class SlowRunner(TableRunner):
    """A table whose every forward takes `seconds` of the clock."""

    def __init__(self, table: torch.Tensor, clock: FakeClock, seconds: float) -> None:
        super().__init__(table)
        self.clock, self.seconds = clock, seconds

    def forward(self, *args: Any, **options: Any) -> torch.Tensor:
        self.clock.advance(self.seconds)
        return super().forward(*args, **options)

    def prefill(self, *args: Any, **options: Any) -> torch.Tensor | None:
        self.clock.advance(self.seconds)
        return super().prefill(*args, **options)


class TickingClock(FakeClock):
    """Time also passes between any two readings: 2^-10 s each."""

    def __call__(self) -> float:
        self.advance(2.0**-10)
        return self.now


def slow_backend(clock: FakeClock, **options: Any) -> LiveBackend:
    table = torch.randn(8, 8, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    target: Any = SlowRunner(table, clock, TARGET_SECONDS)
    draft: Any = SlowRunner(table, clock, DRAFT_SECONDS)
    engine = Engine(target, [ModelDrafter(draft), NgramDrafter(min_n=1)])
    return LiveBackend(engine, clock=clock, **options)


def phases(record: RoundRecord) -> tuple[float, float, float, float]:
    return record.draft_seconds, record.verify_seconds, record.policy_seconds, record.other_seconds


def play(backend: LiveBackend, actions: Sequence[Action], needs: frozenset[str] = frozenset()) -> list[RoundRecord]:
    backend.reset(REQUEST)
    records = []
    for action in actions:
        backend.observe(needs)
        records.append(backend.step(action))
    return records


# -- the timer ----------------------------------------------------------------------------------------------------


def test_e08_phase_timer_reports_the_clock_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """And asks nothing of CUDA on a CPU."""
    for name in ("synchronize", "Event"):
        monkeypatch.setattr(torch.cuda, name, lambda *a, **o: pytest.fail("a CUDA call on a CPU"))
    clock = FakeClock()
    timer = PhaseTimer(CPU, clock)
    for name, seconds in (("draft", 1.0), ("verify", 2.0), ("draft", 0.25)):
        with timer.phase(name):
            clock.advance(seconds)
        clock.advance(100.0)  # outside of phases
    assert timer.read() == {"draft": 1.25, "verify": 2.0}
    assert timer.read() == {}
    assert timer.now() == clock.now


def test_e08_a_phase_that_raises_is_timed_too() -> None:
    clock = FakeClock()
    timer = PhaseTimer(CPU, clock)
    with pytest.raises(KeyError), timer.phase("draft"):
        clock.advance(3.0)
        raise KeyError
    assert timer.read() == {"draft": 3.0}


# -- measured rounds ----------------------------------------------------------------------------------------------


def test_e08_latencies_are_reported_exactly() -> None:
    """Prefill is no round; a cold drafter reads the prompt within its first round, as one of its forwards."""
    clock = FakeClock()
    backend = slow_backend(clock)
    plain, cold, warm, copied = play(backend, [ROLLBACK, Action("model", 3), Action("model", 3), Action("ngram", 2)])
    assert backend.prefill_seconds == TARGET_SECONDS
    assert phases(plain) == (0.0, 4.0, 0.0, 0.0)
    assert phases(cold) == (3.0, 4.0, 0.0, 0.0)
    assert (cold.draft_steps, cold.catch_up) == (3, len(REQUEST.prompt_ids))
    assert phases(warm) == (3.0, 4.0, 0.0, 0.0) and warm.draft_steps == 3
    assert phases(copied) == (0.0, 4.0, 0.0, 0.0) and copied.drafted > 0
    assert [r.seconds for r in (plain, cold, warm, copied)] == [4.0, 7.0, 7.0, 4.0]


def test_e06_phases_add_up_to_the_seconds_of_every_round() -> None:
    """With time passing between all readings of the clock, observation and bookkeeping are `other`."""
    clock = TickingClock()
    backend = slow_backend(clock)
    actions = [Action("model", 2), ROLLBACK, Action("ngram", 3), Action("model", 1)] * 2
    for needs in (frozenset[str](), DRAFT | {"target_entropy", "ngram_match"}):
        for record in play(backend, actions, needs):
            assert sum(phases(record)) == record.seconds
            assert 0 < record.other_seconds < 0.05
    totals = Totals.of(play(backend, actions))
    parts = [totals.share(phase) or 0.0 for phase in ("draft", "verify", "policy", "other")]
    assert sum(parts) == pytest.approx(1.0, abs=1e-12)


def test_e06_seconds_between_observation_and_step_count_only_if_the_policy_took_them() -> None:
    clock = FakeClock()
    backend = slow_backend(clock)
    backend.reset(REQUEST)
    backend.observe()
    clock.advance(1000.0)  # a debugger, or another request
    record = backend.step(ROLLBACK, policy_seconds=0.5)
    assert phases(record) == (0.0, 4.0, 0.5, 0.0) and record.seconds == 4.5


def test_e06_the_loop_charges_deciding_now_and_learning_to_the_next_round(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    monkeypatch.setattr(loop, "perf_counter", clock)

    class Thinker(SchedulePolicy):
        def act(self, observation: Any) -> Action:
            clock.advance(0.25)
            return super().act(observation)

        def update(self, record: RoundRecord) -> None:
            clock.advance(0.5)

    first, *rest = run_request(slow_backend(clock), REQUEST, Thinker("model", (2, 0))).rounds
    assert first.policy_seconds == 0.25
    assert {r.policy_seconds for r in rest} == {0.75}
    assert all(sum(phases(r)) == r.seconds and r.other_seconds == 0.0 for r in (first, *rest))


def test_peek_is_paid_as_drafting_and_saves_the_first_forward() -> None:
    clock = FakeClock()
    backend = slow_backend(clock)
    actions = [ROLLBACK, Action("model", 3), Action("ngram", 2), Action("model", 1)]
    seen = play(backend, actions, DRAFT)
    assert [r.draft_seconds for r in seen] == [1.0, 3.0, 1.0, 1.0]
    assert [r.draft_steps for r in seen] == [1, 3, 1, 1]
    assert all(r.peeked for r in seen)
    assert seen[0].catch_up == len(REQUEST.prompt_ids) - 1  # the cold read of the prompt, paid by a rollback
    assert not any(r.peeked for r in play(backend, actions))


def test_a_second_look_at_one_decision_is_not_paid_twice() -> None:
    backend = slow_backend(FakeClock())
    backend.reset(REQUEST)
    first = backend.observe(DRAFT)
    assert backend.observe(DRAFT) == first
    assert backend.step(Action("model", 2)).draft_seconds == 2.0


def test_l06_nothing_is_charged_to_the_next_request() -> None:
    clock = FakeClock()
    backend = slow_backend(clock)
    backend.reset(REQUEST)
    backend.observe(DRAFT)  # abandoned after a peek
    (record,) = play(backend, [ROLLBACK])
    assert phases(record) == (0.0, 4.0, 0.0, 0.0) and not record.peeked


# -- modelled rounds ----------------------------------------------------------------------------------------------

COSTS = CostModel(
    target_fixed=4.0,
    target_per_token=0.5,
    target_per_kv=2.0**-6,
    drafters={"model": DrafterCost(1.0, per_catch_up=0.25), "ngram": DrafterCost(0.125)},
    overhead=0.0625,
)


def modelled(**options: Any) -> LiveBackend:
    engine = Engine(target_runner(), [ModelDrafter(draft_runner()), NgramDrafter(min_n=1)])
    return LiveBackend(engine, cost_model=COSTS, time_source="modelled", **options)


def test_modelled_time_is_deterministic_and_follows_the_formula() -> None:
    one, two = (list(iter_rounds(modelled(), REQUEST, SchedulePolicy("model", (3, 0, 1)))) for _ in range(2))
    assert one == two
    kv = len(REQUEST.prompt_ids)
    for record in one:
        verify = 4.0 + 0.5 * (record.drafted + 1) + kv / 64
        draft = record.draft_steps + 0.25 * record.catch_up
        assert phases(record) == (draft, verify, 0.0, 0.0625)
        assert record.seconds == sum(phases(record))
        kv += record.emitted
    assert sum(r.accepted for r in one) > 0


def test_modelled_time_charges_a_peek_whatever_follows() -> None:
    """DESIGN: the first draft forward is paid even when the decision is rollback, or another drafter."""
    actions = [ROLLBACK, ROLLBACK, Action("model", 2), Action("ngram", 2), Action("model", 1)]
    records = play(modelled(), actions, DRAFT)
    assert [r.draft_steps for r in records] == [1, 1, 2, 1, 1]
    assert [r.catch_up for r in records[:2]] == [len(REQUEST.prompt_ids) - 1, 0]
    assert [r.draft_seconds for r in records] == [r.draft_steps + 0.25 * r.catch_up for r in records]
    assert all(sum(phases(r)) == r.seconds for r in records)


def test_a_peek_before_the_last_token_is_charged_although_nothing_can_be_drafted() -> None:
    backend = modelled()
    backend.reset(Request((1, 2, 3), 1))
    backend.observe(DRAFT)
    record = backend.step(Action("model", 4))
    assert (record.drafted, record.draft_steps, record.finish) == (0, 1, "length")
    assert record.draft_seconds == 1.0 + 0.25 * 2


@pytest.mark.model
def test_phases_of_the_real_model_make_up_its_wall_time() -> None:
    """Prefill and phases against the clock, within 5 %; measured 99.9 % also on a busy machine."""
    from assc.errors import PairError
    from assc.evaluate import evaluate
    from assc.pairs import load_pair
    from assc.registry import make_policy
    from assc.shipped import shipped_costs
    from assc.workloads import load_workload, make_requests, select

    try:
        pair = load_pair("smollm2", device="cpu")
    except PairError as error:
        pytest.skip(str(error))
    backend = LiveBackend.from_pair(pair, mode="greedy", time_source="measured", cost_model=shipped_costs())
    prompts = select(load_workload("mixed", "train"), 2, 0)
    requests = make_requests(prompts, pair.encode, max_new_tokens=16, seed=0)
    policies = [(name, make_policy(name)) for name in ("ar", "static:4", "assc")]
    evaluation = evaluate(backend, requests, policies, seed=0, warmup=1)
    for detail in evaluation.details():
        assert detail["unexplained_share"] is not None and abs(detail["unexplained_share"]) < 0.05, detail["label"]
        assert detail["phase_gap"] < 0.05
