"""Chunked verification: text and accepted runs are those of one forward, and its cost counts each group."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from checks import check_caches, check_distribution
from helpers import Played, SchedulePolicy, make_drafter, oracle_all, play, request, schedule_of, target_runner
from test_draft_steps import RandomSteps, check_same
from test_draft_steps import played as play_steps
from test_hidden_drafter import make_engine as hidden_engine
from test_hidden_drafter import play as play_hidden
from test_hidden_drafter import request as hidden_request
from test_oracle import costs as random_costs
from test_oracle import random_trace, schedules
from test_replay import ALL, same
from test_replay import play as play_schedule
from tiny_traces import COSTS, tiny_engine, tiny_trace
from transformers import LogitsProcessorList
from transformers.generation import RepetitionPenaltyLogitsProcessor

import eval as eval_script
from assc.core import ROLLBACK, Action, Mode, Request, RoundRecord
from assc.costs import CostModel
from assc.decoder import SpeculativeDecoder
from assc.engine import Engine
from assc.errors import RequestError
from assc.groups import K_LIMIT, group_columns, group_sizes, judged, played_groups
from assc.live import LiveBackend
from assc.loads import Load, LoadedBackend, scaled
from assc.oracle import optimum
from assc.replay import ReplayBackend
from assc.run import run_request
from assc.steps import STEP_FIELDS
from assc.vector_replay import FlatTrace, Rounds

LAZY = pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "vectorised"])


def test_groups_share_the_tokens_out_and_feed_one_column_more() -> None:
    for k, chunks in itertools.product(range(18), range(1, 19)):
        sizes, columns = group_sizes(k, chunks), group_columns(k, chunks)
        assert sum(sizes) == k and sum(columns) == k + 1 and len(sizes) == len(columns) == max(1, min(k, chunks))
        assert max(sizes) - min(sizes) <= 1 and list(sizes) == sorted(sizes, reverse=True)
        before = 0
        for emitted in range(1, k + 2):
            groups = played_groups(k, chunks, emitted)
            assert sum(groups) >= emitted > sum(groups[:-1]), "the group that holds the round's last token is the last"
            assert before <= len(groups) and judged(k, groups) >= emitted - 1
            before = len(groups)
        assert len(groups) == len(sizes) and judged(k, groups) == k
    with pytest.raises(ValueError, match="commits 1 to 4"):
        played_groups(3, 2, 5)


def both(mode: str, chunks: int, lazy: bool, fixed: bool = False, **sampling: Any) -> tuple[list[Played], list[Played]]:
    """The same ragged batch and schedules in one forward and in groups."""
    requests = [request(n, mode, 20, **sampling) for n in (1, 9, 26)]
    engines = [
        Engine(target_runner(), [make_drafter("model")], lazy_verify=lazy, fixed_width=fixed, chunks=c)
        for c in (1, chunks)
    ]
    one, many = (play(e, requests, [schedule_of("random", n) for n in range(3)]) for e in engines)
    return one, many


@LAZY
@pytest.mark.parametrize("chunks", [2, 3, 7])
@pytest.mark.parametrize("mode", ["greedy", "gumbel", "rejection"])
def test_rounds_are_those_of_one_forward(mode: str, chunks: int, lazy: bool) -> None:
    """Accepted runs and tokens, in rejection mode too, whose draws depend on position and round alone."""
    one, many = both(mode, chunks, lazy)
    if mode != "rejection":
        assert [p.tokens for p in many] == oracle_all([request(n, mode, 20) for n in (1, 9, 26)])
    stopped = 0
    for a, b in zip(one, many, strict=True):
        assert [(r.accepted, r.tokens, r.draft_steps) for r in a.rounds] == [
            (r.accepted, r.tokens, r.draft_steps) for r in b.rounds
        ]
        for whole, part in zip(a.rounds, b.rounds, strict=True):
            assert part.drafted + part.discarded == whole.drafted and whole.groups == () and whole.discarded == 0
            assert part.groups == played_groups(whole.drafted, chunks, len(part.tokens))
            stopped += part.discarded > 0
    assert stopped > 0 and sum(p.accepted for p in many) > 0, "this pair shows nothing"


def test_groups_of_one_width_are_the_same_too() -> None:
    one, many = both("gumbel", 3, True, fixed=True)
    assert [p.tokens for p in one] == [p.tokens for p in many]


@pytest.mark.parametrize("chunks", [2, 4])
def test_processors_that_read_the_prefix_see_each_one_once(chunks: int) -> None:
    seen: list[int] = []

    class Counting:
        def __call__(self, prefix: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            seen.append(prefix.shape[1])
            return scores

        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("not for the draft")

    penalty = RepetitionPenaltyLogitsProcessor(1.3)
    asked = request(9, "greedy", 20, repetition_penalty=1.3)
    processed = replace(asked, sampling={**asked.sampling, "processors": [Counting()]})
    engine = Engine(target_runner(), [make_drafter("model")], chunks=chunks)
    (played,) = play(engine, [processed], [schedule_of("5")])
    assert played.tokens == oracle_all([asked], processors=LogitsProcessorList([penalty]))[0]
    assert seen == sorted(set(seen)), "a prefix was judged twice, or out of order"


def test_buffers_are_right_after_every_group() -> None:
    """The next logits of both models are those of the committed text, whatever group a round ended in."""
    engine = Engine(target_runner(), [make_drafter("model")], chunks=3)
    requests = [request(n, "greedy", 16) for n in (3, 14)]
    play(engine, requests, [schedule_of((5, 0, 8, 2)), schedule_of((8, 3))], lambda batch: check_caches(engine, batch))


def test_the_draft_on_hidden_states_gets_the_states_of_every_group() -> None:
    requests = [hidden_request(seed, 20) for seed in range(2)]
    texts = []
    for chunks in (1, 3):
        engine = hidden_engine()
        engine.chunks = chunks
        texts.append([play_hidden(engine, [r], 4) for r in requests])
    assert texts[0] == texts[1]


@pytest.mark.parametrize(("drafter", "sampling", "lazy"), [("dense", "cool", False), ("ngram", "plain", True)])
def test_rejection_follows_the_targets_distribution(drafter: str, sampling: str, lazy: bool) -> None:
    """Odds of a false alarm as `checks.allowed_variation` states them: near 1e-9 each."""
    check_distribution(drafter, sampling, lazy=lazy, schedule="5", chunks=2, rows=60, length=50)


# -- costs and replay -------------------------------------------------------------------------------------------------


def test_each_group_pays_the_fixed_cost_and_the_buffers() -> None:
    groups = (4, 5)
    apart = COSTS.target_fixed + COSTS.target_per_kv * 256
    expected = 2 * apart + COSTS.target_per_token * 9 + COSTS.per_emitted * 7
    assert COSTS.verify_groups(groups, 256, 7) == pytest.approx(expected, rel=1e-12)
    assert COSTS.verify_groups((9,), 256, 7) == COSTS.verify(8, 256, 7)
    record = RoundRecord(0, 0, Action("model", 8), 4, 2, 3, (1, 2, 3), 0.0, draft_steps=8, discarded=4, groups=(4,))
    assert COSTS.price(record, 256).verify_seconds == COSTS.verify_groups((4,), 256, 3)


def test_a_curve_corrects_the_line_at_its_knots() -> None:
    bent = replace(COSTS, target_curve=((1, 0.0), (5, -0.001), (9, 0.003)))
    for columns, more in ((1, 0.0), (3, -0.0005), (5, -0.001), (7, 0.001), (9, 0.003), (17, 0.003)):
        assert bent.forward(columns) == pytest.approx(COSTS.forward(columns) + more, rel=1e-12)
    assert CostModel.from_json(bent.to_json()) == bent
    with pytest.raises(ValueError, match="ascending"):
        replace(COSTS, target_curve=((5, 0.0), (5, 1.0)))


BENT = replace(COSTS, target_curve=((1, 0.0), (5, -0.001), (9, 0.003), (16, 0.002), (17, 0.004)))


@pytest.mark.parametrize("mode", ["greedy", "gumbel"])
@pytest.mark.parametrize("chunks", [2, 5])
def test_replay_is_live_round_by_round(mode: Mode, chunks: int) -> None:
    trace, engine = tiny_trace(mode), tiny_engine()
    live = LiveBackend(engine, mode=mode, cost_model=BENT, time_source="modelled")
    replayed = ReplayBackend(trace, BENT, chunks=chunks)
    engine.chunks = chunks
    try:
        for row, asked in enumerate(trace.requests()):
            one, two = (play_schedule(b, asked, row, ALL) for b in (live, replayed))
            for a, b in zip(one[0], two[0], strict=True):
                same(a, b)
            assert all((v == w).all() for v, w in zip(one[2], two[2], strict=True))
    finally:
        engine.chunks = 1


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_many_requests_at_once_are_the_single_ones(chunks: int) -> None:
    trace = tiny_trace()
    flat, backend = FlatTrace(trace, BENT, chunks=chunks), ReplayBackend(trace, BENT, chunks=chunks)
    rng, discarded = np.random.default_rng(0), 0
    for row in range(len(trace)):
        many = Rounds(flat, [row])
        backend.reset(trace.request(row))
        while not backend.done:
            drafter, k = int(rng.integers(-1, 2)), int(rng.integers(1, 17))
            record = backend.step(Action(trace.drafters[drafter], k) if drafter >= 0 else ROLLBACK)
            played = many.play(np.array([drafter]), np.array([k]))
            counts = int(played.drafted[0]), int(played.accepted[0]), int(played.emitted[0]), float(played.seconds[0])
            assert counts == (record.drafted, record.accepted, record.emitted, record.seconds)
            discarded += record.discarded
    assert (discarded > 0) == (chunks > 1)


@pytest.mark.parametrize("chunks", [2, 4])
def test_many_requests_under_switching_loads_are_the_single_ones(chunks: int) -> None:
    trace = tiny_trace()
    loads = [Load(4, scaled(BENT, 4).costs), Load(1, BENT), Load(32, replace(COSTS, static_kv=not COSTS.static_kv))]
    flat = FlatTrace(trace, BENT, loads=loads, stay=0.8, chunks=chunks)
    backend = LoadedBackend(ReplayBackend(trace, BENT, chunks=chunks), loads, stay=0.8)
    rng, seen = np.random.default_rng(1), set[int]()
    for row in range(len(trace)):
        many = Rounds(flat, [row])
        backend.reset(trace.request(row))
        while not backend.done:
            assert flat.load is not None
            seen.add(int(flat.load[many.start + many.position][0]))
            drafter, k = int(rng.integers(-1, 2)), int(rng.integers(1, 17))
            record = backend.step(Action(trace.drafters[drafter], k) if drafter >= 0 else ROLLBACK)
            played = many.play(np.array([drafter]), np.array([k]))
            counts = int(played.drafted[0]), int(played.accepted[0]), int(played.emitted[0]), float(played.seconds[0])
            assert counts == (record.drafted, record.accepted, record.emitted, record.seconds)
    assert seen == {0, 1, 2}


@pytest.mark.parametrize("chunks", [2, 5])
def test_decisions_after_each_token_go_with_groups(chunks: int) -> None:
    """Live and replayed alike; a token is judged, rolled back, or of a group that had no turn."""
    trace, engine = tiny_trace("gumbel"), tiny_engine()
    live = LiveBackend(engine, mode="gumbel", cost_model=BENT, time_source="modelled")
    replayed, whole = ReplayBackend(trace, BENT, chunks=chunks), ReplayBackend(trace, BENT)
    rounds: list[RoundRecord] = []
    engine.chunks = chunks
    try:
        for row, asked in enumerate(trace.requests()):
            policy = RandomSteps(row, ("model", "ngram"), frozenset(STEP_FIELDS))
            mine = check_same(live, replayed, asked, policy)
            plain = play_steps(whole, asked, policy)
            assert [r.tokens for r in mine] == [r.tokens for r in plain]
            assert [r.drafted + r.discarded for r in mine] == [r.drafted + r.discarded for r in plain]
            rounds += mine
    finally:
        engine.chunks = 1
    assert any(r.rollback and r.discarded for r in rounds)
    assert any(r.drafted and r.discarded for r in rounds) and any(r.forwards > 1 for r in rounds)


@pytest.mark.parametrize("seed", range(3))
def test_the_optimum_is_that_of_brute_force(seed: int) -> None:
    trace, model = random_trace(seed, length=5, second="committed"), random_costs(seed)
    model = replace(model, target_per_token=0.4)
    backend = ReplayBackend(trace, model, chunks=2)
    best = min(schedules(backend, trace.request(0), ()))
    found = optimum(FlatTrace(trace, model, chunks=2))
    assert found.seconds[0] == pytest.approx(best, rel=1e-12)


# -- how it is asked for ----------------------------------------------------------------------------------------------


def test_the_decoder_takes_it_and_counts_its_phases() -> None:
    decoder = SpeculativeDecoder.from_pair("tiny", policy="static:6", chunks=3)
    plain = SpeculativeDecoder.from_pair("tiny", policy="ar")
    found = decoder.generate("Hello there", max_new_tokens=24)
    assert found.tokens == plain.generate("Hello there", max_new_tokens=24).tokens
    rounds = found.episode.rounds
    assert max(r.forwards for r in rounds) > 1 and all(r.verify_seconds > 0 for r in rounds)
    for r in rounds:
        assert r.groups and r.drafted <= sum(r.groups) <= r.drafted + 1 and r.drafted + r.discarded <= r.planned


@pytest.mark.parametrize("chunks", [0, -1, 17, True, 2.0])
def test_a_number_of_groups_that_cannot_be_is_refused(chunks: Any) -> None:
    with pytest.raises(RequestError, match="the number of verification groups is"):
        Engine(target_runner(), [], chunks=chunks)
    with pytest.raises(RequestError, match="verification groups"):
        FlatTrace(tiny_trace(), COSTS, chunks=chunks)


@pytest.mark.parametrize("k_max", [0, K_LIMIT + 1])
def test_one_bound_on_k_max(k_max: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RequestError, match=f"K_max is {k_max}, allowed is 1 to {K_LIMIT}"):
        Engine(target_runner(), [], k_max=k_max)
    assert eval_script.main(["--pair", "tiny", "--k-max", str(k_max)]) == 2
    assert f"K_max is {k_max}, allowed is 1 to {K_LIMIT}" in capsys.readouterr().err


@pytest.mark.parametrize("backend", ["live", "replay"])
def test_eval_takes_it_with_either_backend(backend: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = {"live": ["--pair", "tiny", "--max-new-tokens", "8", "--time-source", "modelled"], "replay": []}[backend]
    words = ["--backend", backend, "--policies", "ar", "static:8", "--requests", "2", *words]
    assert eval_script.main([*words, "--chunks", "2"]) == 0
    assert eval_script.main([*words, "--chunks", "0"]) == 2
    assert "verification groups is 0" in capsys.readouterr().err


def test_a_round_is_dearer_in_groups_only_by_its_forwards() -> None:
    """Modelled live seconds against the formula, round by round."""
    engine = tiny_engine()
    backend = LiveBackend(engine, mode="greedy", cost_model=COSTS, time_source="modelled")
    asked = Request((5, 9, 5, 9, 5), 24)
    seconds: dict[int, Sequence[RoundRecord]] = {}
    try:
        for chunks in (1, 4):
            engine.chunks = chunks
            seconds[chunks] = run_request(backend, asked, SchedulePolicy("model", "8")).rounds
    finally:
        engine.chunks = 1
    for one, many in zip(seconds[1], seconds[4], strict=True):
        assert one.tokens == many.tokens
        kv = COSTS.kv(0, 128)
        columns = COSTS.target_per_token * (one.drafted + 1 - sum(many.groups))
        saved = columns - (COSTS.target_fixed + COSTS.target_per_kv * kv) * (many.forwards - 1)
        assert one.seconds - many.seconds == pytest.approx(saved, abs=1e-12)
