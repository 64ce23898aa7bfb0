"""Public faults of the round itself: counters, caches, batches, K switching, n-gram drafts. Ids: docs/faults.md."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Sequence
from math import ceil
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fault_helpers import (
    KS,
    Schedule,
    Scripted,
    check,
    decoder,
    generate,
    hidden,
    mean_accepted,
    new_tokens,
    ngram,
    noisy,
    play,
    prompts,
    run,
    runner,
    stranger,
    target,
)
from torch import Tensor

from assc.batch import Batch
from assc.core import ROLLBACK, Action, Request, RoundRecord, Totals
from assc.decoder import SpeculativeDecoder
from assc.drafters.base import Drafter, Proposal, drafter_kinds
from assc.drafters.model import ModelDrafter
from assc.drafters.ngram import NgramDrafter
from assc.engine import Engine
from assc.errors import RequestError
from assc.live import LiveBackend
from assc.ngram_index import NgramIndex
from assc.timing import PhaseTimer
from assc.tiny import tiny_draft, tiny_tokenizer

PROMPT = [53, 78, 24, 26, 50]
LOOPING = [5, 6, 7, 5, 6, 7, 5, 6]


def stats(result: Any) -> list[tuple[int, int, int, tuple[int, ...]]]:
    return [(r.planned, r.drafted, r.accepted, r.tokens) for r in result.episode.rounds]


def spied(machine: Any) -> list[tuple[list[list[int]], list[list[int]]]]:
    """Records (ids, positions) of every forward of a model runner."""
    seen: list[tuple[list[list[int]], list[list[int]]]] = []
    forward = machine.forward

    def spy(kv: Any, tokens: Tensor, positions: Tensor, keep: int = 0, **options: Any) -> Any:
        seen.append((tokens.tolist(), positions.tolist()))
        return forward(kv, tokens, positions, keep, **options)

    machine.forward = spy
    return seen


# -- K reaches the loop -----------------------------------------------------------------------------------------------


def test_T13_the_k_that_was_asked_for_is_the_k_that_is_played() -> None:
    """By the call's policy, else the decoder's; as object or spec. Every verification but the last has K + 1 rows."""
    for machine, options in (
        (decoder(), {"policy": Schedule(2)}),
        (decoder(), {"policy": "static:2"}),
        (SpeculativeDecoder(decoder().engine, policy="static:2"), {}),
        (SpeculativeDecoder(decoder().engine, policy="static:7"), {"policy": "static:2"}),
    ):
        seen = spied(machine.engine.target)
        result = machine.generate(PROMPT, max_new_tokens=24, **options)
        assert [len(ids[0]) for ids, _ in seen[1:-1]] == [3] * (result.totals.rounds - 1)
        assert {r.planned for r in result.episode.rounds[:-1]} == {2} == {r.drafted for r in result.episode.rounds[:-1]}
        assert mean_accepted(result) > 1


def test_L04_the_drafted_length_is_k_and_is_reported() -> None:
    """No hidden confidence gate: a hopeless draft drafts K tokens too."""
    result = run(decoder(draft=stranger()), PROMPT, n=40)
    assert all(r.drafted == min(8, 40 - r.position - 1) for r in result.episode.rounds)
    assert (result.totals.acceptance_rate or 0) < 0.2 and result.tokens == generate(target(), PROMPT, 40)


def test_L03_drafted_is_what_was_verified() -> None:
    machine = decoder(draft=noisy())
    seen = spied(machine.engine.target)
    result = run(machine, PROMPT, 8, 3, 0, n=40)
    assert sum(len(ids[0]) for ids, _ in seen[1:]) == result.totals.drafted + result.totals.rounds
    assert all(r.discarded == 0 for r in result.episode.rounds) and mean_accepted(result) > 0


def test_K_above_k_max_is_refused_and_the_request_goes_on() -> None:
    backend = LiveBackend(decoder(k_max=4).engine)
    backend.reset(Request(tuple(PROMPT), 12))
    for wrong, words in (
        (Action("model", 5), "K=5 is above K_max=4"),
        (Action("nobody", 1), "unknown drafter 'nobody'"),
    ):
        with pytest.raises(RequestError, match=words):
            backend.step(wrong)
        with pytest.raises(RequestError, match=words):
            backend.engine.round(backend.batch, [wrong], PhaseTimer(backend.engine.device))
    while not backend.done:
        backend.step(Action("model", 4))
    assert new_tokens(backend.batch) == [generate(target(), PROMPT, 12)]


def test_V20_switching_k_never_verifies_a_stale_draft() -> None:
    """Every proposal is new: what the target is asked about in a round was drafted in that round."""
    want = generate(target(), PROMPT, 60)
    rng, drafted = random.Random(0), []

    def propose(tokens: list[int], k: int) -> list[int]:
        at = len(tokens) - len(PROMPT)
        draft = [t if rng.random() < 0.7 else rng.randrange(98) for t in want[at : at + k]]
        drafted.append(draft)
        return draft

    machine = decoder(draft=[Scripted(propose)])
    seen = spied(machine.engine.target)
    result = run(machine, PROMPT, 0, 1, 5, 0, 5, 1, n=60)
    assert result.tokens == want and 0 < mean_accepted(result)
    verified = [ids[0][1:] for ids, _ in seen[1:]]
    assert [v for v in verified if v] == drafted
    assert [len(v) for v in verified] == [r.drafted for r in result.episode.rounds]
    for draft in (None, noisy()):
        assert run(decoder(draft=draft), PROMPT, 0, 1, 5, n=60).tokens == want


def test_V14_rounds_are_counted_and_not_derived() -> None:
    chunks = decoder().stream(PROMPT, policy=Schedule(3, 0, 5, 1), max_new_tokens=60)
    totals = Totals.of([next(chunks).record for _ in range(4)])
    assert (totals.rounds, totals.drafted, totals.accepted, totals.rollbacks, totals.tokens) == (4, 9, 9, 1, 13)
    assert (totals.mean_k, totals.tokens_per_round, totals.rollback_rate) == (9 / 4, 13 / 4, 1 / 4)


def test_V11_pooled_and_per_request_numbers_are_told_apart() -> None:
    """By hand: a request of 5 tokens and one of 200."""

    def record(drafted: int, accepted: int) -> RoundRecord:
        tokens = (1,) * (accepted + 1)
        return RoundRecord(0, 0, Action("model", max(1, drafted)), drafted, accepted, accepted + 1, tokens, 1.0)

    short, long = [record(4, 4)], [record(4, 1)] * 100
    pooled = Totals.of(short) + Totals.of(long)
    assert pooled == Totals.of([*short, *long])
    assert pooled.tokens == 205 and pooled.tokens_per_round == 205 / 101
    assert pooled.acceptance_rate == 104 / 404  # the mean of the two requests' rates would be 0.625
    assert (Totals.of(short).acceptance_rate, Totals.of(long).acceptance_rate) == (1.0, 0.25)
    assert pooled.tokens_per_second == 205 / 101


def test_V12_nothing_drafted_has_no_rate() -> None:
    for machine, ks in ((decoder(draft=ngram()), (8,)), (decoder(), (0,))):
        prompt = list(range(40, 52))
        seen = spied(machine.engine.target)
        result = machine.generate(prompt, policy=Schedule(*ks), max_new_tokens=4)
        quiet = [r for r in result.episode.rounds if not r.drafted]
        assert quiet == list(result.episode.rounds) and all(r.draft_steps == 0 and r.emitted == 1 for r in quiet)
        totals = result.totals
        assert totals.drafted == 0 and totals.acceptance_rate is None is totals.waste_rate
        assert [len(ids[0]) for ids, _ in seen[1:]] == [1] * 4
        assert result.tokens == generate(target(), prompt, 4)
    assert Totals().acceptance_rate is None is Totals().tokens_per_second


def test_V12_a_placeholder_zero_is_never_accepted() -> None:
    """The text consists of token 0, which is also what padding holds: without drafts nothing is accepted."""
    options: dict[str, Any] = {"logit_bias": {0: 1000.0}, "n": 12}
    silent = run(decoder(draft=[Scripted(lambda tokens, k: [])], fixed_width=True), PROMPT, 8, **options)
    assert silent.tokens == (0,) * 12 and silent.totals.accepted == 0 == silent.totals.drafted
    assert silent.totals.rounds == 12


# -- counters ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fixed_width", [False, True])
@pytest.mark.parametrize("lazy", [False, True])
def test_V13_V09_every_round_commits_and_counts_add_up(lazy: bool, fixed_width: bool) -> None:
    """Random proposals of random length, right with chance 0.8: the helper `run` checks the invariants."""
    rng = random.Random(1)
    for prompt in prompts(6, seed=3):
        want = generate(target(), prompt, 40)

        def propose(tokens: list[int], k: int, prompt: Any = prompt, want: Any = want) -> list[int]:
            at = len(tokens) - len(prompt)
            return [t if rng.random() < 0.8 else (t + 1) % 98 for t in want[at : at + rng.randint(0, k)]]

        machine = decoder(draft=[Scripted(propose)], lazy_verify=lazy, fixed_width=fixed_width)
        result = run(machine, prompt, 8, 3, 16, n=40)
        assert result.tokens == want and mean_accepted(result) > 0
        totals = result.totals
        assert totals.tokens == totals.accepted + totals.rounds - (
            result.episode.rounds[-1].emitted == result.episode.rounds[-1].accepted
        )


class Failing(ModelDrafter):
    """A drafter that breaks in its third round."""

    rounds = 0

    def propose(self, batch: Batch, ks: Sequence[int]) -> Proposal:
        self.rounds += 1
        if self.rounds == 3:
            raise OSError("the draft broke")
        return super().propose(batch, ks)


@pytest.mark.parametrize("where", ["criterion", "drafter", "processor"])
def test_V13_a_round_that_fails_ends_its_request_and_nothing_else(where: str) -> None:
    def fail(ids: Tensor, scores: Any) -> Any:
        if where != "drafter" and ids.shape[1] > 14:
            raise OSError("the call broke")
        return scores if where == "processor" else False

    draft = Failing(runner(noisy())) if where == "drafter" else ModelDrafter(runner(noisy()))
    engine = Engine(runner(target()), [draft])
    backend = LiveBackend(engine)
    request = Request(tuple(PROMPT), 24, sampling={"processors": [fail]} if where == "processor" else {})
    backend.extras = {"criteria": [fail]} if where == "criterion" else {}
    backend.reset(request)
    records = []
    with pytest.raises(OSError, match="broke"):
        while True:
            records.append(backend.step(Action("model", 5)))
    want = generate(target(), PROMPT)
    assert len(records) >= 1 and tuple(t for r in records for t in r.tokens) == want[: sum(r.emitted for r in records)]
    assert all(0 <= r.accepted <= r.drafted for r in records)
    for call in (lambda: backend.step(ROLLBACK), backend.observe, lambda: backend.done):
        with pytest.raises(RuntimeError, match="reset"):
            call()
    backend.extras = {}
    backend.reset(Request(tuple(PROMPT), 24))
    again = []
    while not backend.done:
        again.append(backend.step(Action("model", 5)))
    fresh = run(decoder(draft=noisy()), PROMPT, 5)
    assert [(r.drafted, r.accepted, r.tokens) for r in again] == [s[1:] for s in stats(fresh)]


@pytest.mark.parametrize("k", KS[1:])
def test_T21_a_draft_equal_to_the_target_is_always_accepted(k: int) -> None:
    """Anything wrong in the draft's cache shows as a rejection; K is random, rollback rounds lie in between."""
    rng = random.Random(k)
    for mode in ("greedy", "gumbel", "rejection"):
        ks = [rng.choice([0, k, rng.randint(1, 8)]) for _ in range(100)]
        result = run(decoder(), PROMPT, *ks, n=100, mode=mode, temperature=0.0 if mode == "greedy" else 1.0)
        assert all(r.accepted == r.drafted for r in result.episode.rounds) and mean_accepted(result) > 0
        assert any(r.rollback for r in result.episode.rounds) and result.totals.acceptance_rate == 1


class Wrong(ModelDrafter):
    """A draft equal to the target that errs at one step of each round."""

    wrong = 0

    def _choose(self, batch: Batch, row: Any, b: int, j: int, *rest: Any) -> Tensor:
        token = super()._choose(batch, row, b, j, *rest)
        return (token + 1) % 98 if j == self.wrong else token


@pytest.mark.parametrize("k", range(1, 7))
def test_X02_caches_hold_the_committed_tokens_after_every_outcome(k: int) -> None:
    """For a = 0..K accepted of K: lengths as expected, and the next round's logits are those of a fresh forward."""
    for a in range(k + 1):
        drafter = Wrong(runner(target()))
        engine = Engine(runner(target()), [drafter])
        batch, timer = engine.start([Request(tuple(PROMPT), 60)]), PhaseTimer(engine.device)
        row = batch.rows[0]
        drafter.wrong = a
        for _ in range(3):
            before = row.length
            (outcome,) = engine.round(batch, [Action("model", k)], timer)
            assert (outcome.drafted, outcome.accepted, len(outcome.tokens)) == (k, a, a + 1)
            assert row.length == before + a + 1
            assert drafter._fed[0] == before + min(a, k - 1)  # after full acceptance the draft lacks its last token
            whole = target()(input_ids=torch.tensor([row.tokens]), use_cache=False).logits[0]
            assert row.last_logits is not None
            assert torch.allclose(row.last_logits, whole[-2], atol=1e-9)
            engine.peek(batch, [0])
            assert torch.allclose(drafter._logits[0], whole[-1], atol=1e-9)
        assert tuple(row.tokens[len(PROMPT) :]) == generate(target(), PROMPT, row.new_tokens)


@pytest.mark.parametrize("k", [1, 2, 5, 16, 31, 32])
def test_L07_positions_are_consecutive_in_both_models(k: int) -> None:
    """K up to K_max = 32 on a prompt of one token."""
    machine = decoder(draft=noisy(), k_max=32)
    drafter: Any = machine.engine.drafters["model"]
    big, small = spied(machine.engine.target), spied(drafter.runner)
    result = run(machine, [10], k, 0, k, n=70)
    text = [10, *result.tokens]
    assert result.tokens == generate(target(), [10], 70) and mean_accepted(result) > 0
    starts = [r.position for r in result.episode.rounds]
    assert [p[0] for _, p in big] == [
        list(range(s, s + r.drafted + 1)) for s, r in zip(starts, result.episode.rounds, strict=True)
    ]
    for seen in (big, small):
        written: dict[int, int] = {}
        for ids, positions in seen:
            (row,), (at,) = ids, positions
            assert at == list(range(at[0], at[0] + len(at)))
            assert all(p in written for p in range(at[0]))  # no hole before it
            written.update(zip(at, row, strict=True))
    assert all(ids[0][0] == text[p[0][0]] for ids, p in big)


# -- state between calls ----------------------------------------------------------------------------------------------


def test_T14_an_adaptive_policy_starts_afresh_in_every_call() -> None:
    machine = SpeculativeDecoder(decoder(draft=noisy()).engine, policy="assc")
    first = machine.generate(PROMPT, max_new_tokens=60)
    machine.generate(LOOPING, max_new_tokens=30)
    again = machine.generate(PROMPT, max_new_tokens=60)
    assert stats(first) == stats(again) and len({s[0] for s in stats(first)}) > 1 and mean_accepted(first) > 0


def test_T14_two_decoders_share_one_draft_undisturbed() -> None:
    draft = tiny_draft()
    alone = [stats(run(decoder(draft=tiny_draft()), p, 5)) for p in (PROMPT, LOOPING)]
    streams = [decoder(draft=draft).stream(p, policy=Schedule(5), max_new_tokens=24) for p in (PROMPT, LOOPING)]
    for _ in range(24):
        for stream in streams:
            next(stream, None)
    assert [stats(s.result()) for s in streams] == alone


@pytest.mark.parametrize("kind", ["model", "ngram", "both"])
def test_L06_requests_in_a_row_are_as_in_a_fresh_engine(kind: str) -> None:
    def fresh() -> SpeculativeDecoder:
        drafts: dict[str, Any] = {
            "model": [ModelDrafter(runner(noisy()))],
            "ngram": ngram(min_n=1),
            "both": [ModelDrafter(runner(noisy())), *ngram(min_n=1)],
        }
        return decoder(draft=drafts[kind])

    names = list(fresh().engine.drafters)
    schedule = [(names[0], 4), 0, (names[-1], 6)]
    machine = fresh()
    asked = [LOOPING, PROMPT, LOOPING, *prompts(3, low=3, seed=8)]
    accepted = 0.0
    for prompt in asked:
        want = fresh().generate(prompt, policy=Schedule(*schedule), max_new_tokens=30)
        got = machine.generate(prompt, policy=Schedule(*schedule), max_new_tokens=30)
        assert stats(got) == stats(want) and got.tokens == generate(target(), prompt, 30)
        accepted += mean_accepted(got)
    assert accepted > 0


@pytest.mark.parametrize("peek", [False, True])
@pytest.mark.parametrize("kind", ["model", "ngram"])
def test_L06_interleaved_requests_of_one_decoder_do_not_disturb_each_other(kind: str, peek: bool) -> None:
    def fresh() -> SpeculativeDecoder:
        return decoder(draft=noisy() if kind == "model" else ngram(min_n=1))

    needs = frozenset({"draft_entropy", "ngram_match"}) if peek else frozenset()
    asked = [LOOPING, PROMPT, [10]]
    options: list[dict[str, Any]] = [
        {},
        {"mode": "rejection", "temperature": 1.0, "seed": 1},
        {"mode": "gumbel", "temperature": 0.5},
    ]
    want = [
        fresh().generate(p, policy=Schedule(4, 2, 0, needs=needs), max_new_tokens=24, **o)
        for p, o in zip(asked, options, strict=True)
    ]
    machine = fresh()
    streams = [
        machine.stream(p, policy=Schedule(4, 2, 0, needs=needs), max_new_tokens=24, **o)
        for p, o in zip(asked, options, strict=True)
    ]
    for _ in range(24):
        for stream in streams:
            next(stream, None)
    for stream, alone in zip(streams, want, strict=True):
        check(stream.result())
        assert stats(stream.result()) == stats(alone)
    assert sum(map(mean_accepted, want)) > 0


def test_T15_a_second_turn_is_a_new_prompt() -> None:
    """No cache is taken over from a caller: the whole text is fed again, and the answer is that of a fresh decoder."""
    machine = decoder(draft=noisy())
    for prompt in prompts(5, low=3, seed=2):
        first = run(machine, prompt, n=16)
        turn = [*prompt, *first.tokens, 9, 8]
        second = run(machine, turn, n=16)
        assert second.tokens == generate(target(), turn, 16) and stats(second) == stats(
            run(decoder(draft=noisy()), turn, n=16)
        )
        assert len(second.episode.request.prompt_ids) == len(turn)


# -- batches ----------------------------------------------------------------------------------------------------------


UNEQUAL = [[10], [3, 4, 5], [7, 8, 9, 7, 8, 9, 7], [1, 2], list(range(20, 60))]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", ["same", "noisy", "ngram", "stranger"])
def test_T17_rows_of_a_batch_are_as_alone(kind: str, size: int) -> None:
    drafts: dict[str, Callable[[], list[Drafter]]] = {
        "same": lambda: [ModelDrafter(runner(target()))],
        "noisy": lambda: [ModelDrafter(runner(noisy()))],
        "ngram": lambda: ngram(min_n=1),
        "stranger": lambda: [ModelDrafter(runner(stranger()))],
    }
    (drafter,) = drafts[kind]()
    engine = Engine(runner(target()), [drafter])
    requests = [Request(tuple(p), 20 + 3 * i) for i, p in enumerate(UNEQUAL[:size])]
    batch, outcomes = play(engine, requests, lambda r, b: Action(drafter.name, 5))
    assert new_tokens(batch) == [generate(target(), q.prompt_ids, q.max_new_tokens) for q in requests]
    for request, row in zip(requests, outcomes, strict=True):
        _, (alone,) = play(engine, [request], lambda r, b: Action(drafter.name, 5))
        assert [(o.drafted, o.accepted, o.tokens) for o in row] == [(o.drafted, o.accepted, o.tokens) for o in alone]
    assert kind in ("stranger", "ngram") or sum(o.accepted for row in outcomes for o in row) > 0


def test_V19_padding_never_reaches_the_draft() -> None:
    """Draft == target, K = 10, three unequal rows: any leak of padding or rejected slots lowers 100 %."""
    engine = Engine(runner(target()), [ModelDrafter(runner(target()))])
    requests = [Request(tuple(p), 50) for p in (UNEQUAL[0], UNEQUAL[2], UNEQUAL[4])]
    for ks in ([10, 10, 10], [10, 3, 0], [1, 10, 7]):
        batch, outcomes = play(
            engine, requests, lambda r, b, ks=ks: Action("model", k) if (k := ks[(r + b) % 3]) else ROLLBACK
        )
        assert new_tokens(batch) == [generate(target(), q.prompt_ids, 50) for q in requests]
        for row in outcomes:
            assert all(o.accepted == o.drafted for o in row) and sum(o.accepted for o in row) > 10


def test_V26_one_k_per_row() -> None:
    engine = Engine(runner(target()), [ModelDrafter(runner(noisy()))])
    requests = [Request(tuple(p), 30) for p in UNEQUAL[:3]]
    batch, outcomes = play(engine, requests, lambda r, b: ROLLBACK if b == 0 else Action("model", 5 * b))
    assert new_tokens(batch) == [generate(target(), q.prompt_ids, 30) for q in requests]
    assert {o.drafted for o in outcomes[0]} == {0} and outcomes[1][0].drafted == 5 and outcomes[2][0].drafted == 10
    assert all(sum(o.accepted for o in row) > 0 for row in outcomes[1:])


class Padded(Drafter):
    """Right proposals of random length, the rest filled with -1, as plug-ins of other engines do."""

    name = "padded"

    def __init__(self, texts: dict[int, list[int]], filler: int = -1) -> None:
        self.texts, self.filler, self.rng = texts, filler, random.Random(2)

    def begin(self, batch: Batch) -> None: ...

    def propose(self, batch: Batch, ks: Sequence[int]) -> Proposal:
        width = max(ks)
        lengths = [self.rng.randint(0, k) for k in ks]
        tokens = torch.full((batch.size, width), self.filler)
        for b, (row, n) in enumerate(zip(batch.rows, lengths, strict=True)):
            draft = self.texts[row.request.seed][row.new_tokens : row.new_tokens + n]
            draft = [t if self.rng.random() < 0.9 else (t + 1) % 98 for t in draft]
            lengths[b] = len(draft)
            tokens[b, : len(draft)] = torch.tensor(draft, dtype=torch.long)
        return Proposal(tokens, lengths)


@pytest.mark.parametrize("fixed_width", [False, True])
@pytest.mark.parametrize("filler", [-1, 0, 10**6])
def test_V22_placeholders_are_neither_read_nor_accepted(filler: int, fixed_width: bool) -> None:
    texts = {i: list(generate(target(), p, 30)) for i, p in enumerate(UNEQUAL[:4])}
    engine = Engine(runner(target()), [Padded(texts, filler)], fixed_width=fixed_width)
    requests = [Request(tuple(p), 30, seed=i) for i, p in enumerate(UNEQUAL[:4])]
    # row 1 never drafts, row 2 one token at most, the others up to 8
    limits = [8, 0, 1, 8]
    batch, outcomes = play(engine, requests, lambda r, b: Action("padded", limits[b]) if limits[b] else ROLLBACK)
    assert new_tokens(batch) == [tuple(texts[i]) for i in range(4)]
    assert [max(o.drafted for o in row) for row in outcomes][1:3] == [0, 1]
    assert all(0 <= o.accepted <= o.drafted for row in outcomes for o in row)
    assert sum(o.accepted for o in outcomes[0]) > 5


def test_V27_a_proposer_that_breaks_its_contract_is_named() -> None:
    greedy_one = Scripted(lambda tokens, k: [1] * (k + 1), name="greedy_one")
    with pytest.raises(RuntimeError, match="'greedy_one' proposed 5 tokens where at most 4"):
        run(decoder(draft=[greedy_one]), PROMPT, 4)
    with pytest.raises(RequestError, match="share a name"):
        decoder(draft=[*ngram(), *ngram()])
    assert "vllm" not in sys.modules


# -- n-gram drafts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [[10], [10, 11], [10, 11, 12, 13], list(range(30, 60))])
def test_V23_no_match_is_a_plain_round(prompt: list[int]) -> None:
    """No repeat, shorter than the n-gram, one token; then a batch in which no row has a proposal."""
    for options in ({}, {"min_n": 1, "max_n": 1}, {"min_n": 3, "max_n": 5}):
        result = run(decoder(draft=ngram(**options)), prompt, n=24)
        assert result.tokens == generate(target(), prompt) and result.episode.rounds[0].drafted == 0
    engine = Engine(runner(target()), ngram(min_n=4))
    batch, outcomes = play(engine, [Request(tuple(prompt), 6), Request((90, 91), 6)], lambda r, b: Action("ngram", 8))
    assert new_tokens(batch) == [generate(target(), p, 6) for p in (prompt, [90, 91])]
    assert all(o.drafted == 0 for row in outcomes for o in row)


A, B, X, Y = 1, 2, 3, 4


@pytest.mark.parametrize(
    ("text", "k", "want"),
    [
        ([A, B, X, 9, A, B, Y, 9, A, B], 1, [Y]),  # the most recent match
        ([A, B, X, 9, A, B, Y, 9, A, B], 3, [Y, 9, A]),
        ([A, A, A, A], 2, [A, A]),  # a match may overlap the suffix
        ([A, B, A, B, A], 5, [B, A, B, A, B]),  # and is continued into its own copy
        ([X, A, B, Y, 9, 8, B, Y, 7, A, B], 1, [Y]),
        ([A, B, X, Y], 4, []),
        ([X, X], 2, []),  # shorter than min_n = 2 before the suffix: the suffix never matches itself
        ([A], 4, []),
        ([], 4, []),
        ([A, B, A, B], 0, []),
    ],
    ids=str,
)
def test_V24_which_match_is_taken(text: list[int], k: int, want: list[int]) -> None:
    index = NgramIndex(max_n=4, min_n=2)
    index.extend(text)
    assert index.propose(k) == want
    piecewise = NgramIndex(max_n=4, min_n=2)
    for token in text:
        piecewise.extend([token])
    assert piecewise.propose(k) == want and piecewise.match_length() == index.match_length()


def test_V24_the_longest_suffix_wins_over_a_more_recent_shorter_one() -> None:
    index = NgramIndex(max_n=3, min_n=1)
    index.extend([7, A, B, X, 9, B, Y, 7, A, B])
    assert index.propose(1) == [X] and index.match_length() == 3


def test_V24_against_a_search_written_out() -> None:
    rng = random.Random(3)
    for _ in range(200):
        text = [rng.randrange(3) for _ in range(rng.randint(0, 30))]
        index = NgramIndex(max_n=3, min_n=1)
        index.extend(text)
        want: list[int] = []
        for n in (3, 2, 1):
            ends = [e for e in range(n, len(text)) if text[e - n : e] == text[len(text) - n :]]
            if ends and len(text) > n:
                at = [*text]
                for i in range(6):
                    at.append(at[ends[-1] + i])
                want = at[len(text) :]
                break
        assert index.propose(6) == want


def test_V24_output_is_searched_too() -> None:
    """The prompt has no repeat: what is accepted was copied from generated text."""
    prompt = [40, 7, 63, 12, 88]
    result = run(decoder(draft=ngram()), prompt, n=60)
    assert result.tokens == generate(target(), prompt, 60) and mean_accepted(result) > 0


def test_V24_a_lookup_costs_the_same_in_a_long_text() -> None:
    """Executed lines of indexing five tokens and proposing 16 are as many after 20,000 tokens as after 200."""

    def lines(length: int) -> int:
        rng = random.Random(0)
        index = NgramIndex(max_n=4, min_n=2)
        index.extend([rng.randrange(50) for _ in range(length)])
        count = 0

        def trace(frame: Any, event: str, argument: Any) -> Any:
            nonlocal count
            count += event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            for token in range(5):
                index.extend([token])
                index.propose(16)
        finally:
            sys.settrace(before)
        return count

    assert 0 < lines(20_000) < 3 * lines(200)


# -- one verify function for every drafter ----------------------------------------------------------------------------


def drafters_for(prompt: Sequence[int], want: Sequence[int]) -> dict[str, Callable[[], Any]]:
    rng = random.Random(5)

    def at(tokens: list[int]) -> int:
        return len(tokens) - len(prompt)

    return {
        "model": lambda: noisy(),
        "same": lambda: target(),
        "stranger": lambda: stranger(),
        "ngram": lambda: ngram(min_n=1),
        "hidden": lambda: hidden(),
        "random": lambda: [Scripted(lambda tokens, k: [rng.randrange(98) for _ in range(k)])],
        "adversarial": lambda: [Scripted(lambda t, k: [(w + 1) % 98 for w in want[at(t) : at(t) + k]])],
        "nearly": lambda: [Scripted(lambda t, k: [*want[at(t) : at(t) + k - 1], 97][:k])],
        "silent": lambda: [Scripted(lambda t, k: [])],
    }


@pytest.mark.parametrize("kind", list(drafters_for([], [])))
@pytest.mark.parametrize("k", KS)
def test_L05_S05_no_drafter_changes_the_text(k: int, kind: str) -> None:
    for prompt in (PROMPT, LOOPING, [10]):
        want = generate(target(), prompt, 24)
        result = run(decoder(draft=drafters_for(prompt, want)[kind]()), prompt, k)
        assert result.tokens == want
        if kind in ("same", "nearly") and k > 1:
            assert mean_accepted(result) > 0.5
        if kind == "adversarial":
            assert result.totals.accepted == 0


def test_L05_every_registered_drafter_is_in_the_matrix() -> None:
    assert set(drafter_kinds()) <= set(drafters_for([], [])), "add the new drafter kind to drafters_for"


# -- time -------------------------------------------------------------------------------------------------------------


class Ticks:
    """A clock that moves one second whenever it is read."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_E06_E08_phases_add_up_and_a_cpu_is_never_synchronised(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any) -> None:
        raise AssertionError("no CUDA call on a CPU")

    monkeypatch.setattr(torch.cuda, "synchronize", forbidden)
    monkeypatch.setattr(torch.cuda, "Event", forbidden)
    backend = LiveBackend(decoder(draft=noisy()).engine, clock=Ticks())
    backend.reset(Request(tuple(PROMPT), 20))
    while not backend.done:
        backend.observe()
        r = backend.step(Action("model", 4), policy_seconds=0.25)
        assert r.draft_seconds == r.verify_seconds == 1.0 and r.policy_seconds == 0.25
        assert r.seconds == r.draft_seconds + r.verify_seconds + r.policy_seconds + r.other_seconds
        # observe: 2 readings a second apart; step: start, two edges per phase, end
        assert r.seconds == 1.0 + 5.0 + 0.25


class Counting:
    """A tokenizer that counts its calls and the tokens that it decodes."""

    def __init__(self) -> None:
        self.inner: Any = tiny_tokenizer()
        self.decoded: list[int] = []
        self.encoded = 0

    def decode(self, ids: Sequence[int], **options: Any) -> str:
        self.decoded.append(len(ids))
        return str(self.inner.decode(list(ids), **options))

    def encode(self, text: str) -> list[int]:
        self.encoded += 1
        return list(self.inner.encode(text))


def test_T24_no_tokenizer_work_that_grows_with_the_text() -> None:
    tokenizer = Counting()
    machine = decoder(tokenizer=tokenizer)
    rounds = ceil(200 / 9)
    result = machine.generate("ab", policy=Schedule(8), max_new_tokens=200)
    assert result.totals.rounds == rounds and tokenizer.encoded == 1 and mean_accepted(result) > 5
    # the text that streams: two short windows per round, none of them the whole text
    assert len(tokenizer.decoded) <= 2 * rounds + 4 and max(tokenizer.decoded) <= 2 * 9
    tokenizer.decoded.clear()
    machine.generate("ab", policy=Schedule(8), max_new_tokens=200, stop="\x00")
    assert len(tokenizer.decoded) <= 2 * rounds + 4 + 2 * 200 and max(tokenizer.decoded) <= 2 * 9
    # through the backend, without text, none at all
    tokenizer.decoded.clear()
    backend = LiveBackend(machine.engine)
    backend.reset(Request((5, 6), 40))
    while not backend.done:
        backend.step(Action("model", 8))
    assert not tokenizer.decoded


def test_T24_nothing_is_copied_or_rebuilt_per_round(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    backend = LiveBackend(decoder().engine)
    backend.reset(Request(tuple(PROMPT), 60, sampling={"repetition_penalty": 1.2}))
    backend.step(Action("model", 3))
    kv, kept = backend.batch.kv, [t.data_ptr() for t in backend.batch.kv._keys if t is not None]
    monkeypatch.setattr(copy, "deepcopy", lambda *a, **k: calls.append("deepcopy"))
    monkeypatch.setattr(type(target().config), "__init__", lambda *a, **k: calls.append("config"))
    while not backend.done:
        backend.step(Action("model", 8))
    assert not calls and backend.batch.kv is kv
    assert [t.data_ptr() for t in kv._keys if t is not None] == kept and kept


def test_ngram_drafter_keeps_to_its_limits() -> None:
    """The drafter by itself, behind a batch that is only a list of rows."""
    drafter = NgramDrafter(max_n=3, min_n=2)
    rows = [SimpleNamespace(tokens=[1, 2, 3, 1, 2]), SimpleNamespace(tokens=[4, 5])]
    batch: Any = SimpleNamespace(rows=rows, device=torch.device("cpu"))
    drafter.begin(batch)
    proposal = drafter.propose(batch, [4, 4])
    assert list(proposal.lengths) == [4, 0] and proposal.tokens[0].tolist() == [3, 1, 2, 3]
    assert list(drafter.propose(batch, [0, 0]).lengths) == [0, 0]
