"""What the buffers hold: draft == target accepts everything (invariant 3), caches hold the committed text (5)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checks import check_cache_lengths, check_caches
from helpers import (
    SchedulePolicy,
    make_drafter,
    make_engine,
    oracle_all,
    play,
    request,
    schedule_of,
    target_model,
)

from assc.engine import Engine
from assc.kv import ModelRunner, bucket_length
from assc.live import LiveBackend
from assc.run import run_request

# -- draft == target ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["greedy", "gumbel", "rejection"])
@pytest.mark.parametrize("schedule", ["random", (5, 0, 0, 3, 0, 1, 8), (0, 0, 0, 16), (1, 0)], ids=str)
def test_t21_v19_draft_equal_to_target_accepts_everything(mode: str, schedule: Any) -> None:
    """Invariant 3, alone and in a batch, on schedules with rollback rounds. Rejection mode draws p/q = 1."""
    requests = [request(n, mode, 60) for n in (1, 10, 33)]
    engine = make_engine(make_drafter("perfect"))
    runs = [play(engine, [requests[2]], [schedule_of(schedule)]), play(engine, requests, [schedule_of(schedule)] * 3)]
    for played in runs:
        assert any(k == 0 for p in played for k in p.planned)
        for p in played:
            assert [r.accepted for r in p.rounds] == [r.drafted for r in p.rounds]
            assert p.drafted > 0


@pytest.mark.parametrize("k", [1, 2, 3, 7, 16])
def test_l08_no_plain_step_between_rounds(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """rounds == ceil(n / (K + 1)), one target forward each, K + 1 columns wide (V12, T13)."""
    runner, widths = ModelRunner(target_model()), []
    inner = runner.forward
    engine = Engine(runner, [make_drafter("perfect")], k_max=k)
    monkeypatch.setattr(runner, "forward", lambda *a, **o: (widths.append(a[1].shape[1]), inner(*a, **o))[1])
    n = 35
    (played,) = play(engine, [request(6, budget=n)], [schedule_of([k])])
    assert len(played.rounds) == -(-n // (k + 1))
    prefill, *rounds = widths
    assert prefill == 5
    assert rounds[:-1] == [k + 1] * (len(rounds) - 1) and len(rounds) == len(played.rounds)
    assert rounds[-1] == n - (k + 1) * (len(rounds) - 1)
    assert played.accepted == n - len(rounds)


# -- caches (invariant 5) -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("peek", [True, False])
@pytest.mark.parametrize("drafter", ["model", "perfect", "saboteur"])
def test_caches_hold_the_committed_text_after_every_round(drafter: str, peek: bool) -> None:
    """Invariant 5 under random schedules, in a batch of unequal rows; a peek before each decision changes nothing."""
    requests = [request(n, budget=16) for n in (1, 9)]
    engine = make_engine(make_drafter(drafter, requests))
    schedules = [schedule_of("random", n) for n in range(2)]
    played = play(engine, requests, schedules, lambda batch: check_caches(engine, batch, peek))
    assert [p.tokens for p in played] == oracle_all(requests)
    assert sum(p.accepted for p in played) > 0


@pytest.mark.parametrize("k", range(1, 7))
def test_x02_cache_lengths_for_every_accepted_length(k: int) -> None:
    check_cache_lengths(k)


@pytest.mark.parametrize("variant", [{}, {"lazy_verify": False, "fixed_width": True}], ids=["default", "vectorised"])
def test_target_confidence_is_that_of_the_last_committed_token(variant: dict[str, bool]) -> None:
    """After every accepted length, also where the block went on behind it."""
    r = request(9, budget=24)
    backend = LiveBackend(make_engine(make_drafter("saboteur", [r]), **variant))
    policy = SchedulePolicy("draft", "random", frozenset({"target_entropy", "target_top1"}))
    text, rejected = list(r.prompt_ids), 0
    for record in run_request(backend, r, policy).rounds:
        text += record.tokens
        with torch.inference_mode():
            p = target_model()(input_ids=torch.tensor([text[:-1]]), use_cache=False).logits[0, -1].softmax(-1)
        assert record.target_top1 == pytest.approx(float(p.max()), abs=1e-9)
        assert record.target_entropy == pytest.approx(float(-(p * p.log()).sum()), abs=1e-9)
        rejected += record.drafted - record.accepted
    assert rejected > 0


@pytest.mark.parametrize("total", [126, 127, 128, 129])
def test_buffers_may_be_filled_to_the_last_slot(total: int) -> None:
    """Prompt + budget around a multiple of the bucket of 128, beside a row that goes on when the full one has ended."""
    full, other = request(100, budget=total - 100), request(1, budget=60)
    assert bucket_length(total) == (128 if total < 128 else 256)
    for drafter, schedules in (("perfect", ("16", "16")), ("model", ("16", "5"))):
        engine = make_engine(make_drafter(drafter), fixed_width=drafter == "perfect")
        for requests in ([full], [full, other]):
            played = play(engine, requests, [schedule_of(s) for s in schedules[: len(requests)]])
            assert [p.tokens for p in played] == oracle_all(requests)
            assert sum(p.accepted for p in played) > 0
