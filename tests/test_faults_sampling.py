"""Public faults of sampling: processors, seeds, penalties, constraints, accept rules. Ids are those of docs/faults.md.

Exactness is asserted in float64 against plain `generate` (greedy) or exact enumeration on a vocabulary of eight.
"""

from __future__ import annotations

import random
import threading
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from fault_helpers import (
    Schedule,
    Scripted,
    decoder,
    exact_two,
    first_two,
    generate,
    mean_accepted,
    new_tokens,
    ngram,
    noisy,
    p_value,
    play,
    prompts,
    run,
    runner,
    stranger,
    target,
)
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

import assc.verify
from assc.core import Action, Request
from assc.drafters.model import ModelDrafter
from assc.engine import Engine
from assc.errors import RequestError
from assc.sampling import LogitsChain, Noise, SamplingParams, widen
from assc.tiny import tiny_draft, tiny_target
from assc.verify import VerifyContext, accepts, residual, verify

PROMPT = [53, 78, 24, 26, 50]
LOOPING = [40, 7, 63, 12, 88]
"""its plain greedy continuation repeats itself, so that penalties matter"""
SMALL = tiny_target(vocab_size=8, layers=1, seed=18)
SMALL_DRAFT = tiny_draft(SMALL, noise=0.4, seed=3)
"""neither equal to the target nor foreign to it: the first tokens' distributions are 0.3 to 0.5 apart"""
SMALL_PROMPT = [1, 2, 3, 1, 2, 3, 1, 2]
FALSE_ALARM = 1e-4


def small(draft: Any = SMALL_DRAFT, **options: Any) -> Any:
    return decoder(SMALL, draft, **options)


# -- the distribution -------------------------------------------------------------------------------------------------


def argmax_draft() -> list[Any]:
    """A drafter that always proposes the draft's argmax: its q is one-hot."""
    table: dict[tuple[int, ...], int] = {}

    def propose(tokens: list[int], k: int) -> list[int]:
        ids = list(tokens)
        for _ in range(k):
            key = tuple(ids)
            if key not in table:
                logits = SMALL_DRAFT(input_ids=torch.tensor([ids]), use_cache=False).logits
                table[key] = int(logits[0, -1].argmax())
            ids.append(table[key])
        return ids[len(tokens) :]

    return [Scripted(propose)]


@pytest.mark.parametrize("kind", ["model", "argmax", "ngram"])
def test_T01_sampled_output_follows_the_target(kind: str) -> None:
    drafts = {"model": SMALL_DRAFT, "argmax": argmax_draft(), "ngram": ngram()}[kind]
    counts, accepted = first_two(small(drafts), SMALL_PROMPT, temperature=1.0)
    assert p_value(counts, exact_two(SMALL, SMALL_PROMPT)) > FALSE_ALARM and accepted > 0


@pytest.mark.parametrize(
    ("mode", "kept"),
    [
        ("rejection", {"top_k": 3}),
        ("rejection", {"top_p": 0.8}),
        ("rejection", {"min_p": 0.1}),
        ("gumbel", {"top_k": 3, "top_p": 0.9}),
    ],
    ids=str,
)
def test_T02_warpers_apply_to_p_and_q_alike(mode: str, kept: dict[str, Any]) -> None:
    counts, accepted = first_two(small(), SMALL_PROMPT, mode=mode, temperature=0.7, **kept)
    exact = exact_two(SMALL, SMALL_PROMPT, temperature=0.7, **kept)
    assert (exact == 0).any() and p_value(counts, exact) > FALSE_ALARM and accepted > 0


@pytest.mark.parametrize("temperature", [0.1, 2.0])
def test_V06_temperature_is_part_of_the_accept_test(temperature: float) -> None:
    counts, accepted = first_two(small(), SMALL_PROMPT, temperature=temperature)
    assert p_value(counts, exact_two(SMALL, SMALL_PROMPT, temperature=temperature)) > FALSE_ALARM and accepted > 0


def test_V04_min_p_at_every_position() -> None:
    counts, accepted = first_two(small(), SMALL_PROMPT, temperature=1.5, min_p=0.3)
    exact = exact_two(SMALL, SMALL_PROMPT, temperature=1.5, min_p=0.3)
    assert (exact == 0).any() and p_value(counts, exact) > FALSE_ALARM and accepted > 0


def test_T25_E05_faults_of_q_are_caught_by_these_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: q is the draft's raw softmax (T02), or a draft that ignores the temperature (T01)."""
    options: dict[str, Any] = {"temperature": 0.5, "top_k": 3}
    exact = exact_two(SMALL, SMALL_PROMPT, **options)
    choose = ModelDrafter._choose

    def raw_q(self: Any, batch: Any, row: Any, b: int, j: int, logits: Any, tokens: Tensor, q: Any) -> Tensor:
        token = choose(self, batch, row, b, j, logits, tokens, q)
        q[b, j] = logits.softmax(-1)
        return token

    monkeypatch.setattr(ModelDrafter, "_choose", raw_q)
    assert p_value(first_two(small(), SMALL_PROMPT, **options)[0], exact) < FALSE_ALARM

    def cold_token(self: Any, batch: Any, row: Any, b: int, j: int, logits: Any, tokens: Tensor, q: Any) -> Tensor:
        choose(self, batch, row, b, j, logits, tokens, q)
        return logits.argmax()

    monkeypatch.setattr(ModelDrafter, "_choose", cold_token)
    assert p_value(first_two(small(), SMALL_PROMPT, **options)[0], exact) < FALSE_ALARM


@pytest.mark.parametrize("kept", [{}, {"top_k": 3}, {"top_p": 0.6, "min_p": 0.1}, {"logit_bias": {5: 2.0}}], ids=str)
def test_T01_T02_q_is_what_the_draft_token_was_drawn_from(kept: dict[str, Any]) -> None:
    """q against the draft's own forward and transformers' own warpers, the token against q and the noise."""
    machine = small()
    drafter: Any = machine.engine.drafters["model"]
    proposals = []
    propose = drafter.propose
    drafter.propose = lambda batch, ks: proposals.append((batch, propose(batch, ks))) or proposals[-1][1]
    for seed in range(5):
        run(machine, SMALL_PROMPT, 4, n=5, mode="rejection", temperature=0.6, seed=seed, **kept)
        _, proposal = proposals[0]
        proposals.clear()
        assert proposal.q is not None
        params = SamplingParams(mode="rejection", temperature=0.6, **kept)
        chain = LogitsChain.build(params, prompt_length=len(SMALL_PROMPT), eos_ids=())
        ids = list(SMALL_PROMPT)
        for j in range(proposal.lengths[0]):
            with torch.inference_mode():
                logits = SMALL_DRAFT(input_ids=torch.tensor([ids]), use_cache=False).logits[:, -1]
            want = chain(torch.tensor([ids]), widen(logits)).softmax(-1)[0]
            assert torch.allclose(proposal.q[0, j].double(), want, atol=1e-6)
            token = int(proposal.tokens[0, j])
            noise = Noise(seed, 8).gumbel("draft", len(ids), 0)
            assert token == int((want.log() + noise).argmax()) and want[token] > 0
            ids.append(token)


# -- the accept rule --------------------------------------------------------------------------------------------------


def context(params: SamplingParams, seed: int = 0, vocab: int = 4) -> VerifyContext:
    prefix = torch.zeros(1, 16, dtype=torch.long)
    noise = None if params.greedy else Noise(seed, vocab)
    return VerifyContext(params, LogitsChain.build(params, prompt_length=1, eos_ids=()), noise, prefix, 3, 0)


def logits_for(choices: Sequence[int], vocab: int = 4) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(choices), vocab).double() * 5


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize(
    ("hits", "accepted"), [("0100", 0), ("1101", 2), ("1111", 4), ("1000", 1), ("0111", 0), ("", 0)], ids=str
)
def test_V09_accepted_is_the_leading_run_only(hits: str, accepted: int, lazy: bool) -> None:
    choices = [1, 2, 3, 0, 1][: len(hits) + 1]
    drafted = torch.tensor(
        [c if hit == "1" else (c + 1) % 4 for c, hit in zip(choices, hits, strict=False)], dtype=torch.long
    )
    got, tokens = verify(context(SamplingParams()), logits_for(choices), drafted, None, lazy=lazy)
    assert int(got) == accepted and tokens[: accepted + 1].tolist() == choices[: accepted + 1]


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("mode", ["greedy", "rejection", "gumbel"])
def test_X04_temperature_zero_emits_the_argmax(mode: Any, lazy: bool) -> None:
    """p(a) = .3, p(b) = .5, q(a) = .2: accepting a because p >= q would be wrong."""
    p, q = torch.tensor([[0.3, 0.5, 0.2, 0.0]] * 2).log(), torch.tensor([[0.2, 0.2, 0.6, 0.0]])
    got, tokens = verify(context(SamplingParams(mode=mode)), p, torch.tensor([0]), q, lazy=lazy)
    assert int(got) == 0 and int(tokens[0]) == 1


@pytest.mark.parametrize(
    ("p", "q"),
    [
        ([0.3, 0.5, 0.2, 0.0], [0.2, 0.2, 0.6, 0.0]),
        ([0.25, 0.25, 0.25, 0.25], [0.25, 0.25, 0.25, 0.25]),
        ([0.4, 0.4, 0.1, 0.1], [0.0, 0.0, 0.5, 0.5]),
        ([0.1, 0.2, 0.3, 0.4], [0.0, 1.0, 0.0, 0.0]),
        ([0.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]),
    ],
)
def test_E02_accept_and_residual_paths_add_up_to_p(p: list[float], q: list[float]) -> None:
    p_, q_ = torch.tensor(p, dtype=torch.float64), torch.tensor(q, dtype=torch.float64)
    accept = torch.tensor([chance(a, b) if b else 0.0 for a, b in zip(p, q, strict=True)], dtype=torch.float64)
    rest = residual(p_, q_)
    total = q_ * accept + (q_ * (1 - accept)).sum() * rest / rest.sum()
    assert torch.allclose(total, p_, rtol=0, atol=1e-12) and rest.sum() > 0


def chance(p: float, q: float) -> float:
    """The measure of the u in (0, 1) that `accepts` takes, by bisection."""
    low, high = 0.0, 1.0
    if accepts(1 - 1e-16, p, q):
        return 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if accepts(middle, p, q) else (low, middle)
    return low


@pytest.mark.parametrize("lazy", [True, False])
def test_E02_residual_of_one_hot_and_of_a_full_draft(lazy: bool) -> None:
    """After a rejection the rejected token of a one-hot draft never comes; 400 seeds follow max(p - q, 0)."""
    params = SamplingParams(mode="rejection", temperature=1.0)
    p = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    q = torch.tensor([0.1, 0.2, 0.6, 0.1], dtype=torch.float64)
    for drafted, dist, want in ((0, None, p * torch.tensor([0, 1, 1, 1])), (2, q[None], (p - q).clamp(min=0))):
        counts = torch.zeros(4, dtype=torch.float64)
        for seed in range(400):
            got, tokens = verify(context(params, seed), p.log().expand(2, -1), torch.tensor([drafted]), dist, lazy=lazy)
            if int(got) == 0:
                counts[int(tokens[0])] += 1
        assert counts.sum() > 100 and p_value(counts, want / want.sum()) > FALSE_ALARM


@pytest.mark.parametrize("lazy", [True, False])
def test_T01_draws_of_draft_and_residual_are_independent(lazy: bool) -> None:
    """Noise of one stream for both would favour residual tokens that the draft finds unlikely."""
    params = SamplingParams(mode="rejection", temperature=1.0)
    p = torch.tensor([0.3, 0.45, 0.2, 0.05], dtype=torch.float64)
    q = torch.tensor([0.01, 0.3, 0.64, 0.05], dtype=torch.float64)
    counts, rejected = torch.zeros(4, dtype=torch.float64), 0
    for seed in range(2000):
        c = context(params, seed)
        assert c.noise is not None
        drafted = (q.log() + c.noise.gumbel("draft", c.length, c.salt)).argmax()
        got, tokens = verify(c, p.log().expand(2, -1), drafted[None], q[None], lazy=lazy)
        counts[int(tokens[0])] += 1
        rejected += int(got) == 0
    assert rejected > 500 and p_value(counts, p) > FALSE_ALARM


# -- seeds ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["gumbel", "rejection"])
def test_V01_the_seed_decides_and_the_global_generators_do_not(mode: Any) -> None:
    machine = decoder(draft=noisy())
    options: dict[str, Any] = {"mode": mode, "temperature": 1.0}
    torch.manual_seed(1)
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    first = run(machine, PROMPT, 5, seed=7, **options)
    assert torch.equal(states[0], torch.get_rng_state()) and states[2] == random.getstate()
    assert states[1] == np.random.get_state()[1].tolist()
    torch.manual_seed(999)
    torch.rand(10)
    again = run(machine, PROMPT, 5, seed=7, **options)
    assert first.tokens == again.tokens and mean_accepted(first) > 0
    assert [r.drafted for r in first.episode.rounds] == [r.drafted for r in again.episode.rounds]
    others = {run(machine, PROMPT, 5, seed=s, **options).tokens for s in range(5)}
    assert len(others) == 5 and first.tokens not in others
    assert run(machine, PROMPT, 5, seed=np.int64(7), **options).tokens == first.tokens
    far = [run(machine, PROMPT, 5, seed=s, **options).tokens for s in (-1, 2**64 - 2, 2**63, 10**30)]
    assert len(set(far)) == 4


def test_V01_gumbel_text_depends_on_the_seed_alone() -> None:
    """One text per seed, whatever the drafter or K."""
    for seed in range(3):
        options: dict[str, Any] = {"mode": "gumbel", "temperature": 1.0, "seed": seed}
        plain = run(decoder(), PROMPT, 0, **options).tokens
        results = [run(decoder(draft=d), PROMPT, 8, 3, 0, **options) for d in (None, noisy(), stranger(), ngram())]
        assert [r.tokens for r in results] == [plain] * 4 and mean_accepted(results[0]) > 1


# -- temperature near zero --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["gumbel", "rejection"])
@pytest.mark.parametrize(
    "options",
    [{"temperature": 0.0}, {"temperature": 1e-8}, {"temperature": 0.9, "top_k": 1}, {"temperature": 0.9, "top_p": 0.0}],
    ids=str,
)
def test_L02_V06_temperature_zero_and_its_equals_are_greedy(options: dict[str, Any], mode: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = run(decoder(draft=noisy()), PROMPT, mode=mode, logprobs=True, **options)
        assert result.tokens == generate(target(), PROMPT) and mean_accepted(result) > 0
        assert result.logprobs == run(decoder(draft=noisy()), PROMPT, logprobs=True).logprobs


@pytest.mark.parametrize("mode", ["gumbel", "rejection"])
def test_L02_a_tiny_temperature_is_safe(mode: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for dtype in (torch.float64, torch.float32):
            model = tiny_target(dtype=dtype)
            result = run(decoder(model), PROMPT, mode=mode, temperature=1e-3, seed=5)
            assert result.tokens == run(decoder(model), PROMPT, 0, mode="gumbel", temperature=1e-3, seed=5).tokens
            assert mean_accepted(result) > 1


def test_L02_whole_numbers_are_numbers() -> None:
    """transformers' processors refuse an int where they want a float."""
    machine = decoder(draft=noisy())
    for whole, real in (
        ({"temperature": 2}, {"temperature": 2.0}),
        ({"temperature": 1, "min_p": 0}, {"temperature": 1.0}),
    ):
        options: dict[str, Any] = {"mode": "gumbel", "seed": 4}
        assert run(machine, PROMPT, **whole, **options).tokens == run(machine, PROMPT, **real, **options).tokens
    assert run(machine, PROMPT, repetition_penalty=2).tokens == generate(target(), PROMPT, repetition_penalty=2.0)
    assert run(machine, PROMPT, temperature=0, top_p=1).tokens == generate(target(), PROMPT)


# -- processors with the right prefix ---------------------------------------------------------------------------------


class Frequency(LogitsProcessor):
    """The usual frequency penalty: minus `amount` for each time that a token has been generated."""

    def __init__(self, amount: float, prompt_length: int) -> None:
        self.amount, self.prompt_length = amount, prompt_length

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        counts = torch.bincount(ids[0, self.prompt_length :], minlength=scores.shape[1])
        return scores - self.amount * counts.to(scores.dtype)


PENALTIES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.5},
    {"no_repeat_ngram_size": 2},
    {"processors": [Frequency(2.0, len(LOOPING))]},
    {"processors": [Frequency(-2.0, len(LOOPING))]},
]


def plainly(options: dict[str, Any]) -> tuple[int, ...]:
    options = dict(options)
    processors = options.pop("processors", None)
    if processors:
        options["logits_processor"] = LogitsProcessorList(processors)
    return generate(target(), LOOPING, 32, **options)


@pytest.mark.parametrize("kind", ["model", "noisy", "ngram"])
@pytest.mark.parametrize("options", PENALTIES, ids=["repetition", "no_repeat", "frequency", "reward"])
def test_V03_penalties_see_the_drafted_prefix(options: dict[str, Any], kind: str) -> None:
    drafts = {"model": None, "noisy": noisy(), "ngram": ngram(min_n=1)}[kind]
    result = run(decoder(draft=drafts), LOOPING, n=32, **options)
    assert result.tokens == plainly(options) != plainly({})
    assert kind != "model" or mean_accepted(result) > 5


@pytest.mark.parametrize("options", PENALTIES, ids=["repetition", "no_repeat", "frequency", "reward"])
def test_V03_a_penalty_from_the_block_start_would_be_noticed(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted fault: every position of the block is judged with the prefix of its first one."""

    class Stale(LogitsChain):
        def __call__(self, prefix: Tensor, scores: Tensor) -> Tensor:
            return super().__call__(prefix[:, : self.start], scores)

    honest = assc.verify._verify_lazy

    def stale(c: VerifyContext, *rest: Any) -> Any:
        chain = Stale(c.chain.members)
        chain.start = c.length
        return honest(VerifyContext(c.params, chain, c.noise, c.prefix, c.length, c.salt), *rest)

    want = plainly(options)
    # the draft proposes what plain decoding without penalties would say, so that the fault has something to accept
    free = generate(target(), LOOPING, 32)
    script = Scripted(lambda tokens, k: list(free[len(tokens) - len(LOOPING) :][:k]))
    machine = decoder(draft=[script])
    assert run(machine, LOOPING, n=32, **options).tokens == want
    monkeypatch.setattr(assc.verify, "_verify_lazy", stale)
    found = [run(machine, LOOPING, n=32, **options).tokens]
    monkeypatch.setattr(LogitsChain, "for_draft", lambda self: LogitsChain([]))
    found.append(run(decoder(), LOOPING, n=32, **options).tokens)
    assert any(tokens != want for tokens in found)


def test_V04_bias_reaches_every_position() -> None:
    never = generate(target(), PROMPT, 3)[1]
    machine = decoder(draft=noisy())
    accepted = 0.0
    for seed in range(14):  # 14 x 16 samples
        options: dict[str, Any] = {"mode": ("rejection", "gumbel")[seed % 2], "temperature": 1.0, "seed": seed}
        banned = run(machine, PROMPT, 5, n=16, logit_bias={never: -100.0}, **options)
        assert never not in banned.tokens
        forced = run(machine, PROMPT, 5, n=16, logit_bias={never: 100.0}, **options)
        assert set(forced.tokens) == {never} and mean_accepted(forced) > 3
        accepted += mean_accepted(banned)
    assert accepted > 0
    greedy = run(machine, PROMPT, 5, logit_bias={never: -100.0})
    want = generate(target(), PROMPT, sequence_bias=[[[never], -100.0]])
    assert greedy.tokens == want and never not in want and mean_accepted(greedy) > 0
    assert set(run(machine, PROMPT, 5, logit_bias={0: 1000}).tokens) == {0}
    for outside in (-1, 98):
        with pytest.raises(RequestError, match=r"logit_bias names token ids outside .* 0\.\.97"):
            run(machine, PROMPT, 5, logit_bias={outside: 1.0})


class Budget(LogitsProcessor):
    """Bans a token after `n` calls, as a thinking budget does: its state is the number of calls."""

    def __init__(self, token: int, n: int) -> None:
        self.token, self.n, self.calls = token, n, 0

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > self.n:
            scores = scores.clone()
            scores[:, self.token] = -torch.inf
        return scores


class Recorder(LogitsProcessor):
    """Keeps every prefix that it is shown; changes nothing."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.seen.append(ids[0].tolist())
        return scores


@pytest.mark.parametrize("kind", ["model", "noisy", "stranger", "ngram"])
def test_V05_a_stateful_processor_sees_each_committed_prefix_once_in_order(kind: str) -> None:
    drafts = {"model": None, "noisy": noisy(), "stranger": stranger(), "ngram": ngram(min_n=1)}[kind]
    eos = generate(target(), PROMPT)[18]
    token = generate(target(), PROMPT)[5]
    want = generate(target(), PROMPT, 24, eos=eos, logits_processor=LogitsProcessorList([Budget(token, 4)]))
    assert token in generate(target(), PROMPT)[5:] and token not in want[4:]
    budget, recorder = Budget(token, 4), Recorder()
    result = run(decoder(draft=drafts, eos=[eos]), PROMPT, processors=[budget, recorder])
    assert result.tokens == want
    whole = [*PROMPT, *want]
    assert recorder.seen == [whole[:i] for i in range(len(PROMPT), len(whole))] and budget.calls == len(want)
    assert kind != "model" or mean_accepted(result) > 1


@pytest.mark.parametrize("sort", ["stateful", "uncopyable"])
def test_V05_a_processor_that_cannot_follow_the_draft_is_left_out_of_it(sort: str) -> None:
    class Strict(Budget):
        """Like a grammar matcher: every call must extend the last one by one token."""

        stateful = sort == "stateful"

        def __init__(self, token: int, n: int) -> None:
            super().__init__(token, n)
            self.lock = threading.Lock() if sort == "uncopyable" else None  # objects with a lock have no deep copy
            self.last: list[int] | None = None

        def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
            now = ids[0].tolist()
            assert self.last is None or now[:-1] == self.last
            self.last = now
            return super().__call__(ids, scores)

    token = generate(target(), PROMPT)[5]
    want = generate(target(), PROMPT, logits_processor=LogitsProcessorList([Strict(token, 4)]))
    result = run(decoder(), PROMPT, processors=[Strict(token, 4)])
    assert result.tokens == want and mean_accepted(result) > 0


# -- constraints ------------------------------------------------------------------------------------------------------

EOS, OPEN, CLOSE, DIGITS = 0, 10, 11, [20, 21, 22, 23]


def bracketed(batch: int, ids: Tensor) -> list[int]:
    """Allows `( digit digit+ )` once more and once more, at most 12 tokens, then EOS; nothing may follow EOS."""
    text = ids.tolist()[len(PROMPT) :]
    if text[-1:] == [EOS]:
        return []  # transformers raises when this is asked for
    depth = text.count(OPEN) - text.count(CLOSE)
    if not depth:
        return [OPEN] if len(text) < 12 else [EOS]
    digits = len(text) - 1 - max(i for i, t in enumerate(text) if t == OPEN)
    return DIGITS if digits < 2 else [CLOSE, *DIGITS] if digits < 5 else [CLOSE]


def is_valid(tokens: Sequence[int]) -> bool:
    text = [*PROMPT]
    for token in tokens:
        if token not in bracketed(0, torch.tensor(text)):
            return False
        text.append(token)
    return tokens[-1] == EOS


@pytest.mark.parametrize("kind", ["model", "noisy", "stranger", "ngram"])
@pytest.mark.parametrize("k", [1, 3, 8])
def test_V15_constraints_hold_and_end(k: int, kind: str) -> None:
    drafts = {"model": None, "noisy": noisy(), "stranger": stranger(), "ngram": ngram(min_n=1)}[kind]
    machine = decoder(draft=drafts, eos=[EOS])
    want = generate(target(), PROMPT, 40, eos=EOS, prefix_allowed_tokens_fn=bracketed)
    result = run(machine, PROMPT, k, n=40, prefix_allowed_tokens_fn=bracketed)
    assert result.tokens == want and is_valid(want) and result.finish == "eos"
    assert kind != "model" or mean_accepted(result) > 0
    for seed in range(3):
        for mode in ("gumbel", "rejection"):
            options: dict[str, Any] = {"mode": mode, "temperature": 1.5, "seed": seed}
            assert is_valid(run(machine, PROMPT, k, n=40, prefix_allowed_tokens_fn=bracketed, **options).tokens)


def test_V15_a_forbidden_draft_has_probability_zero() -> None:
    """A drafter that proposes nothing but forbidden tokens: the text is plain decoding's, nothing is accepted."""
    machine = decoder(draft=[Scripted(lambda tokens, k: [50] * k)], eos=[EOS])
    want = generate(target(), PROMPT, 40, eos=EOS, prefix_allowed_tokens_fn=bracketed)
    result = run(machine, PROMPT, n=40, prefix_allowed_tokens_fn=bracketed)
    assert result.tokens == want and result.totals.accepted == 0
    for seed in range(5):
        options: dict[str, Any] = {"mode": "rejection", "temperature": 1.0, "seed": seed}
        sampled = run(machine, PROMPT, n=40, prefix_allowed_tokens_fn=bracketed, **options)
        assert is_valid(sampled.tokens) and sampled.totals.accepted == 0


def test_V05_order_of_processors_is_that_of_transformers() -> None:
    """Custom processors run behind penalties and before the warpers: a doubling one shows its place."""

    class Double(LogitsProcessor):
        def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
            return scores * 2

    want = exact_two(SMALL, SMALL_PROMPT, temperature=0.5, min_p=0.2)
    counts, accepted = first_two(small(), SMALL_PROMPT, processors=[Double()], temperature=1.0, min_p=0.2)
    assert p_value(counts, want) > FALSE_ALARM and accepted > 0


def test_T13_unknown_sampling_options_are_refused_by_name() -> None:
    """An option that would have no effect must not pass in silence (`num_assistant_tokens` given to generate)."""
    for name in ("num_assistant_tokens", "frequency_penalty", "past_key_values", "do_sample"):
        with pytest.raises(Exception, match=f"unknown sampling option.*{name}"):
            decoder().generate(PROMPT, **{name: 2})


def test_T17_engine_is_built_for_batches_and_seeds_stay_apart() -> None:
    """Rows of one batch with seeds of their own give the texts that they give alone."""
    engine = Engine(runner(target()), [ModelDrafter(runner(noisy()))])
    prompt_list = list(prompts(4, low=1, high=7))
    for mode in ("gumbel", "rejection"):
        requests = [
            Request(tuple(p), 16, seed=11 + i, sampling={"mode": mode, "temperature": 1.0})
            for i, p in enumerate(prompt_list)
        ]
        together, outcomes = play(engine, requests, lambda r, b: Action("model", 4))
        alone = [play(engine, [q], lambda r, b: Action("model", 4))[0] for q in requests]
        assert new_tokens(together) == [new_tokens(a)[0] for a in alone]
        assert sum(o.accepted for rows in outcomes for o in rows) > 0


def test_schedule_helper_plays_what_it_says() -> None:
    result = decoder().generate(PROMPT, policy=Schedule(3, 0, 5), max_new_tokens=12)
    assert [r.planned for r in result.episode.rounds[:3]] == [3, 0, 5]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_new_tokens": 2.5}, "max_new_tokens is 2.5, allowed is an integer of 1 or more"),
        ({"max_new_tokens": "8"}, "max_new_tokens is '8', allowed is an integer"),
        ({"max_new_tokens": True}, "max_new_tokens is True, allowed is"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0, allowed is an integer of 1 or more"),
        ({"seed": None}, "seed is None, allowed is an integer"),
        ({"seed": 1.5}, "seed is 1.5, allowed is an integer"),
        ({"temperature": None}, "temperature is None, allowed is a finite number"),
        ({"temperature": float("inf")}, "temperature is inf, allowed is a finite number"),
        ({"temperature": float("nan")}, "temperature is nan, allowed is a finite number"),
        ({"temperature": "1"}, "temperature is '1', allowed is a finite number"),
        ({"temperature": 1.0, "top_p": None}, "top_p is None, allowed is a finite number"),
    ],
    ids=str,
)
def test_wrong_values_are_one_sentence(options: dict[str, Any], said: str) -> None:
    """A value of another type or out of range is named, before anything is decoded."""
    with pytest.raises(RequestError) as caught:
        decoder(draft=noisy()).generate([5, 6, 7], **{"max_new_tokens": 4, **options})
    assert said in str(caught.value) and "\n" not in str(caught.value)
    assert decoder().generate([5, 6, 7], max_new_tokens=np.int64(3), seed=2**64 - 1, temperature=np.float32(1)).tokens
