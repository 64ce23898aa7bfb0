"""What the buffers hold: draft == target accepts everything (invariant 3), caches hold the committed text (5)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import (
    CPU,
    Faltering,
    make_drafter,
    make_engine,
    oracle_all,
    play,
    prompt,
    request,
    schedule_of,
    target_model,
    target_runner,
)

from assc.batch import Batch
from assc.core import Action, Request
from assc.drafters.model import ModelDrafter
from assc.engine import Engine
from assc.kv import ModelRunner
from assc.timing import PhaseTimer

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


def check_caches(engine: Engine, batch: Batch, peek: bool = True) -> None:
    """The next logits of target and draft over the used buffers equal forwards of the committed text alone."""
    for b, row in enumerate(batch.rows):
        if row.finish is not None:
            continue
        text = torch.tensor([row.tokens])
        ids, positions = batch.slices([r.length - 1 for r in batch.rows], 1)
        assert ids[b].tolist() == row.tokens[-1:]
        with torch.inference_mode():
            ours = engine.target.forward(batch.kv, ids, positions)[b, -1]
            fresh = target_model()(input_ids=text, use_cache=False).logits[0, -1]
        torch.testing.assert_close(ours, fresh, rtol=0, atol=1e-10)
        drafter = engine.drafters["draft"]
        if peek and isinstance(drafter, ModelDrafter):
            seen = engine.peek(batch, [b])[b]
            with torch.inference_mode():
                p = drafter.runner.model(input_ids=text, use_cache=False).logits[0, -1].softmax(-1)
            first, second = p.topk(2).values.tolist()
            entropy = float(-(p * p.log()).sum())
            assert (seen.top1, seen.margin, seen.entropy) == pytest.approx((first, first - second, entropy), abs=1e-9)


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
    """K = 1..6 x accepted 0..K: what both buffers hold is right, by its logits, and the next round is accepted."""
    for right in range(k + 1):
        drafter = Faltering(target_runner(), "draft")
        engine, timer = make_engine(drafter), PhaseTimer(CPU)
        batch = engine.start([Request(prompt(6), 20)])
        drafter.right = right
        (outcome,) = engine.round(batch, [Action("draft", k)], timer)
        assert (outcome.drafted, outcome.accepted) == (k, right)
        row = batch.rows[0]
        assert row.length == 6 + right + 1
        # the draft was fed the prompt and K - 1 of its tokens; what was accepted of them stays
        assert drafter._fed == [6 + min(right, k - 1)]
        check_caches(engine, batch, peek=right % 2 == 0)
        drafter.right = 10**9
        (outcome,) = engine.round(batch, [Action("draft", 4)], timer)
        assert outcome.accepted == outcome.drafted == 4
        assert outcome.catch_up == int(right == k)
