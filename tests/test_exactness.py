"""Greedy and gumbel decoding equal plain decoding, token for token (invariants 1 and 4), in float64.

Everything is deterministic: no test here can fail by chance. The oracles are plain transformers forwards without a
cache (`helpers.oracle_all`) and transformers' own `generate`. Every test says what was accepted, since a fault in
verification or in the caches hides behind drafts that are never accepted (T04).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from helpers import (
    CPU,
    DRAFTERS,
    SCHEDULES,
    Played,
    draft_runner,
    make_drafter,
    make_engine,
    oracle_all,
    play,
    request,
    schedule_of,
    target_model,
    target_runner,
)
from transformers import LogitsProcessorList
from transformers.generation import logits_process as lp

from assc.core import ROLLBACK, Action, Request
from assc.drafters.model import ModelDrafter
from assc.drafters.ngram import NgramDrafter
from assc.engine import Engine
from assc.timing import PhaseTimer

MODES = ("greedy", "gumbel")
LENGTHS = (1, 2, 3, 5, 8, 13, 21, 34, 40)
VERIFY: tuple[dict[str, bool], ...] = tuple(
    {"lazy_verify": lazy, "fixed_width": fixed} for lazy, fixed in product((True, False), (False, True))
)
CASES = [
    pytest.param(mode, schedule, drafter, (i + j + k) % len(VERIFY), id=f"{mode}-{schedule}-{drafter}")
    for i, mode in enumerate(MODES)
    for j, schedule in enumerate(SCHEDULES)
    for k, drafter in enumerate(DRAFTERS)
]
"""every mode x schedule x drafter; the way of verifying rotates so that it meets each of them in every variant"""


def check_acceptance(drafter: str, schedule: str, played: Sequence[Played]) -> None:
    """The drafts were really used: a run that never drafts, or never accepts, proves nothing."""
    drafted, accepted = sum(p.drafted for p in played), sum(p.accepted for p in played)
    if schedule == "0":
        assert drafted == 0
    elif drafter == "adversary":
        assert drafted > 0 and accepted == 0
    elif drafter == "perfect":
        assert accepted == drafted > 0
    else:
        assert 0 < accepted < drafted


@pytest.mark.parametrize(("mode", "schedule", "drafter", "variant"), CASES)
def test_equals_plain_decoding_one_prompt_at_a_time(mode: str, schedule: str, drafter: str, variant: int) -> None:
    first = SCHEDULES.index(schedule) + DRAFTERS.index(drafter)
    requests = [request(LENGTHS[(first + 3 * i) % len(LENGTHS)], mode) for i in range(3)] + [request(30, mode)]
    engine = make_engine(make_drafter(drafter, requests), **VERIFY[variant])
    played = []
    for r in requests:
        played += play(engine, [r], [schedule_of(schedule, len(r.prompt_ids))])
        assert played[-1].tokens == oracle_all([r])[0]
    check_acceptance(drafter, schedule, played)


@pytest.mark.parametrize(("mode", "schedule", "drafter", "variant"), CASES)
def test_t17_v26_equals_plain_decoding_in_a_batch_of_all_lengths(
    mode: str, schedule: str, drafter: str, variant: int
) -> None:
    """Prompts of 1 to 40 tokens, every row with its own schedule; the length-1 prompt is T09's."""
    requests = [request(n, mode) for n in range(1, 41)]
    engine = make_engine(make_drafter(drafter, requests), **VERIFY[(variant + 1) % len(VERIFY)])
    played = play(engine, requests, [schedule_of(schedule, n) for n in range(1, 41)])
    assert [p.tokens for p in played] == oracle_all(requests)
    check_acceptance(drafter, schedule, played)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("variant", range(len(VERIFY)))
def test_equals_plain_decoding_when_drafts_are_right_for_a_random_while(mode: str, variant: int) -> None:
    """Every accepted length from 0 to K comes up, which neither good nor bad drafters do."""
    requests = [request(n, mode, budget=40) for n in (1, 6, 17)]
    engine = make_engine(make_drafter("saboteur", requests), **VERIFY[variant])
    played = play(engine, requests, [schedule_of("random", n) for n in range(3)])
    assert [p.tokens for p in played] == oracle_all(requests)
    assert {r.accepted for p in played for r in p.rounds} >= {0, 1, 2, 3}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("variant", range(len(VERIFY)))
def test_t03_an_end_token_inside_an_accepted_block_cuts_it(mode: str, variant: int) -> None:
    """Invariant 4 there: accepted == emitted, since neither correction nor bonus was committed."""
    r = request(12, mode)
    text = oracle_all([r])[0]
    for end in (1, 3, 6):
        engine = make_engine(make_drafter("perfect"), eos_ids=(text[end],), **VERIFY[variant])
        (played,) = play(engine, [r], [schedule_of("16")])
        expected = text[: text.index(text[end]) + 1]
        assert played.tokens == expected
        assert [(x.drafted, x.accepted) for x in played.rounds] == [(played.rounds[0].drafted, len(expected))]


# -- batches -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["greedy", "gumbel", "rejection"])
@pytest.mark.parametrize("drafter", ["model", "ngram", "perfect"])
def test_t17_v19_v26_ragged_batch_equals_single_runs_round_by_round(mode: str, drafter: str) -> None:
    """Same tokens and same outcome of every round, for rows with K = 0 beside rows with K = 5."""
    requests = [request(n, mode, budget) for n, budget in ((1, 24), (7, 9), (23, 18))]
    plans: list[Any] = [[0, 3, 1], [5], "random"]
    for variant in VERIFY[:1] if drafter == "model" else VERIFY[2:]:
        engine = make_engine(make_drafter(drafter), **variant)
        together = play(engine, requests, [schedule_of(p) for p in plans])
        alone = [play(engine, [r], [schedule_of(p)])[0] for r, p in zip(requests, plans, strict=True)]
        assert together == alone
        accepted, drafted = sum(p.accepted for p in alone), sum(p.drafted for p in alone)
        assert accepted == drafted if drafter == "perfect" else 0 < accepted < drafted


def test_rows_of_one_batch_may_differ_in_drafter_and_mode() -> None:
    engine = Engine(target_runner(), [ModelDrafter(draft_runner()), NgramDrafter(min_n=1)])
    requests = [request(9, "greedy"), request(20, "gumbel"), request(31, "rejection"), request(4, "greedy")]
    plans = [
        [Action("model", 4), ROLLBACK, Action("ngram", 3)],
        [Action("ngram", 6), Action("model", 2), ROLLBACK],
        [ROLLBACK, Action("model", 3), Action("ngram", 2)],
        [ROLLBACK, ROLLBACK, ROLLBACK],
    ]

    def run(rows: Sequence[int]) -> tuple[list[list[int]], int]:
        batch, timer, accepted = engine.start([requests[r] for r in rows]), PhaseTimer(CPU), 0
        for n in range(100):
            outcomes = engine.round(batch, [plans[r][n % 3] for r in rows], timer)
            accepted += sum(o.accepted for o in outcomes)
            if all(row.finish for row in batch.rows):
                break
        return [row.tokens[row.prompt_length :] for row in batch.rows], accepted

    together, accepted = run(range(4))
    alone = [run([r]) for r in range(4)]
    assert together == [tokens for (tokens,), _ in alone]
    assert accepted == sum(n for _, n in alone) > 0
    assert [together[r] for r in (0, 1, 3)] == oracle_all([requests[r] for r in (0, 1, 3)])


def test_l06_requests_that_take_turns_do_not_disturb_each_other() -> None:
    requests = [request(25, "greedy", 24), request(3, "gumbel", 24)]
    for drafter in ("perfect", "model", "ngram"):
        engine, timer = make_engine(make_drafter(drafter)), PhaseTimer(CPU)
        batches = [engine.start([r]) for r in requests]
        accepted = drafted = 0
        while not all(batch.rows[0].finish for batch in batches):
            for batch in batches:
                (outcome,) = engine.round(batch, [Action("draft", 3)], timer)
                accepted, drafted = accepted + outcome.accepted, drafted + outcome.drafted
        assert [b.rows[0].tokens[b.rows[0].prompt_length :] for b in batches] == oracle_all(requests)
        assert accepted == drafted if drafter == "perfect" else accepted > 0


# -- transformers' generate as the oracle -------------------------------------------------------------------------


def generate(r: Request, **options: Any) -> list[int]:
    """Plain greedy decoding by transformers, the end token included."""
    ids = torch.tensor([r.prompt_ids])
    out = target_model().generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=r.max_new_tokens, **options
    )
    return [int(t) for t in out[0, ids.shape[1] :]]


class NoRepeatOfLast(lp.LogitsProcessor):
    """Pushes down the last token of the prefix: a custom processor that must see the right prefix."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        scores = scores.clone()
        scores[torch.arange(len(scores)), input_ids[:, -1]] -= 3.0
        return scores


def alternate(batch_id: int, ids: torch.Tensor) -> list[int]:
    return [t for t in range(98) if (t + int(ids[-1])) % 2]


PROCESSORS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "none": ({}, {}),
    "repetition": ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
    "no_repeat": ({"no_repeat_ngram_size": 2}, {"no_repeat_ngram_size": 2}),
    "bias": ({"logit_bias": {7: 1.5, 90: -50.0, 0: 1.0}}, {"sequence_bias": [[[7], 1.5], [[90], -50.0], [[0], 1.0]]}),
    "min_new": ({"min_new_tokens": 12, "logit_bias": {0: 3.0}}, {"min_new_tokens": 12, "sequence_bias": [[[0], 3.0]]}),
    "constraint": ({"prefix_allowed_tokens_fn": alternate}, {"prefix_allowed_tokens_fn": alternate}),
    "custom": ({"processors": (NoRepeatOfLast(),)}, {"logits_processor": LogitsProcessorList([NoRepeatOfLast()])}),
    "together": (
        {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "logit_bias": {7: 0.5}, "min_new_tokens": 9},
        {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "sequence_bias": [[[7], 0.5]], "min_new_tokens": 9},
    ),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_v03_v04_v05_v15_greedy_with_processors_equals_generate(name: str) -> None:
    """Penalties, bias, constraints and custom processors at every position with its own prefix; `<eos>` ends both."""
    ours, theirs = PROCESSORS[name]
    requests = [request(n, budget=20, **ours) for n in (1, 12, 33)]
    expected = [generate(r, **theirs) for r in requests]
    accepted = 0
    for drafter, k, variant in (("perfect", "5", 0), ("model", "random", 3), ("ngram", "2", 1)):
        engine = make_engine(make_drafter(drafter), eos_ids=(0,), **VERIFY[variant])
        for r, text in zip(requests, expected, strict=True):
            (played,) = play(engine, [r], [schedule_of(k)])
            assert played.tokens == text
            accepted += played.accepted
            if drafter == "perfect":  # everything is accepted, but for what an <eos> inside the block cuts off
                whole = [x for x in played.rounds if 0 not in x.tokens]
                assert all(x.accepted == x.drafted for x in whole)
    assert accepted > 0


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.3},
        {"temperature": 1.0, "top_k": 3},
        {"temperature": 0.9, "top_p": 0.6},
        {"temperature": 1.5, "min_p": 0.2},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.3},
    ],
    ids=lambda s: "-".join(s),
)
@pytest.mark.parametrize("variant", range(len(VERIFY)))
def test_v04_v06_gumbel_with_warpers_equals_plain_decoding(sampling: dict[str, float], variant: int) -> None:
    """The oracle applies transformers' classes in transformers' order."""
    make: dict[str, Callable[[Any], Any]] = {
        "repetition_penalty": lp.RepetitionPenaltyLogitsProcessor,
        "temperature": lp.TemperatureLogitsWarper,
        "top_k": lp.TopKLogitsWarper,
        "top_p": lp.TopPLogitsWarper,
        "min_p": lp.MinPLogitsWarper,
    }
    chain = LogitsProcessorList([make[name](sampling[name]) for name in make if name in sampling])
    requests = [request(n, "gumbel", 16, **sampling) for n in (1, 11, 28)]
    engine = make_engine(make_drafter("model"), **VERIFY[variant])
    played = play(engine, requests, [schedule_of("random", n) for n in range(3)])
    assert [p.tokens for p in played] == oracle_all(requests, processors=chain)
    assert sum(p.accepted for p in played) > 0
