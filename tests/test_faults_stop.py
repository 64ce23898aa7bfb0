"""Public faults around the end of a text: EOS, stop strings, budget, streaming. Ids are those of docs/faults.md.

The draft is the target itself and K is 8, so that what ends the text is accepted in the middle of a block.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from math import ceil
from typing import Any

import pytest
import torch
from fault_helpers import (
    KS,
    Schedule,
    check,
    decoder,
    generate,
    mean_accepted,
    ngram,
    noisy,
    prompts,
    run,
    target,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LogitsProcessorList, MinNewTokensLengthLogitsProcessor, PreTrainedTokenizerFast, TextStreamer
from transformers.generation import StoppingCriteriaList

from assc.stopping import Stopper
from assc.tiny import tiny_target, tiny_tokenizer

PROMPT = [53, 78, 24, 26, 50]
"""its greedy continuation repeats no token within 20"""


@cache
def greedy(n: int = 40) -> tuple[int, ...]:
    return generate(target(), PROMPT, n)


@cache
def texts(n: int = 40) -> list[str]:
    tokenizer: Any = tiny_tokenizer()
    return [tokenizer.decode([t]) for t in greedy(n)]


def test_the_reference_text_is_fit_for_these_tests() -> None:
    assert len(set(greedy(20))) == 20 and not {0, 1} & set(greedy(20))


@pytest.mark.parametrize("at", range(12))
def test_T03_eos_inside_a_block_cuts_it(at: int) -> None:
    eos = greedy()[at]
    machine = decoder(eos=[eos])
    seen = []
    generation = machine.stream(PROMPT, policy=Schedule(8), max_new_tokens=24, logprobs=True)
    for chunk in generation:
        seen += chunk.tokens
    result = generation.result()
    check(result)
    assert result.tokens == tuple(seen) == greedy()[: at + 1] == generate(target(), PROMPT, 24, eos=eos)
    assert result.finish == "eos" and len(result.logprobs or ()) == at + 1
    assert result.totals.tokens == at + 1 and generation._backend.batch.rows[0].length == len(PROMPT) + at + 1
    assert at == 0 or mean_accepted(result) > 0


def test_T03_several_eos_ids_and_none() -> None:
    early, late = greedy()[3], greedy()[6]
    result = run(decoder(eos=[late, early]), PROMPT)
    assert result.tokens == greedy()[:4] == generate(target(), PROMPT, eos=[late, early]) and mean_accepted(result) > 0
    assert (
        run(decoder(eos=[early]), PROMPT, eos_ids=[late]).tokens == greedy()[:7]
    )  # the call's ids replace the model's
    for none in (run(decoder(eos=[early]), PROMPT, eos_ids=()), run(decoder(), PROMPT, eos_ids=None)):
        assert none.tokens == greedy(24) and none.finish == "length"


@pytest.mark.parametrize("k", KS)
def test_S05_every_k_stops_at_the_same_token(k: int) -> None:
    tokenizer = tiny_tokenizer()
    assert run(decoder(eos=[greedy()[9]]), PROMPT, k).tokens == greedy()[:10]
    stopped = run(decoder(tokenizer=tokenizer), PROMPT, k, stop="".join(texts()[8:10]))
    assert stopped.tokens == greedy()[:10] and stopped.finish == "stop"
    assert run(decoder(), PROMPT, k, n=11).tokens == greedy()[:11]


@pytest.mark.parametrize("at", range(10))
def test_T04_stop_string_inside_a_block_cuts_it(at: int) -> None:
    tokenizer: Any = tiny_tokenizer()
    stop = "".join(texts()[at : at + 2])
    result = run(decoder(tokenizer=tokenizer), PROMPT, stop=stop, logprobs=True)
    oracle = generate(target(), PROMPT, stop_strings=[stop], tokenizer=tokenizer)
    assert result.tokens == oracle == greedy()[: at + 2]
    assert result.finish == "stop" and result.matched_stop == stop and mean_accepted(result) > 1
    assert result.text == "".join(texts()[: at + 2])


def test_T04_a_stop_string_of_the_prompt_does_not_stop() -> None:
    tokenizer: Any = tiny_tokenizer()
    stop = tokenizer.decode(PROMPT[1:3])
    assert run(decoder(tokenizer=tokenizer), PROMPT, stop=stop).tokens == greedy(24)


def test_T04_a_special_token_is_a_stop_string_too() -> None:
    """It never shows in the text, which leaves special tokens out."""
    tokenizer: Any = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [texts()[5]]})
    assert tokenizer.decode([greedy()[5]], skip_special_tokens=True) == ""
    result = run(decoder(tokenizer=tokenizer), PROMPT, stop=["<eos>", texts()[5], texts()[7]])
    assert result.tokens == greedy()[:6] and result.matched_stop == texts()[5] and mean_accepted(result) > 0
    assert result.finish == "stop" and result.text == "".join(texts()[:5])
    chunks = decoder(tokenizer=tokenizer).stream(PROMPT, policy=Schedule(3), stop=texts()[5])
    assert "".join(c.text for c in chunks) == result.text


@pytest.mark.parametrize("at", range(1, 12))
def test_T04_custom_criteria_cut_inside_a_block(at: int) -> None:
    """Oracle: plain `generate`; transformers' own assisted path misses criteria in mid-block."""
    wanted, lengths = greedy()[at], []

    def criterion(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        lengths.append(ids.shape[1])
        return ids[:, -1] == wanted

    oracle = generate(target(), PROMPT, stopping_criteria=StoppingCriteriaList([criterion]))
    plain, lengths = lengths, []
    result = run(decoder(), PROMPT, stopping_criteria=[criterion])
    assert result.tokens == oracle and result.finish == "criteria" and mean_accepted(result) > 0
    assert lengths == plain  # asked once per committed token, in order, and never beyond


@pytest.mark.parametrize("kind", ["model", "noisy", "ngram"])
@pytest.mark.parametrize("k", [1, 5, 20])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_T05_never_more_than_the_budget(n: int, k: int, kind: str) -> None:
    prompt = [5, 6, 7, 5, 6, 7, 5, 6]
    drafts = {"model": None, "noisy": noisy(), "ngram": ngram()}[kind]
    result = run(decoder(draft=drafts, k_max=20), prompt, k, n=n)
    assert result.tokens == generate(target(), prompt, n) and result.finish == "length"
    for r in result.episode.rounds:
        assert r.drafted <= n - r.position - 1 and (r.drafted or not r.draft_steps)
    if n == 1:
        assert result.totals.drafted == 0 and result.totals.rounds == 1


def test_T05_end_token_in_the_last_place_counts_as_eos() -> None:
    result = run(decoder(eos=[greedy()[8]]), PROMPT, n=9)
    assert result.tokens == greedy()[:9] and result.finish == "eos" and mean_accepted(result) == 8


@pytest.mark.parametrize("n", [9, 10, 17, 23])
@pytest.mark.parametrize("k", [4, 8])
def test_E03_lengths_that_are_no_multiple_of_the_block(k: int, n: int) -> None:
    result = run(decoder(), PROMPT, k, n=n)
    assert result.tokens == greedy(n) and len(result.tokens) == n and mean_accepted(result) > 1


def test_L09_budget_below_k_is_a_clamp_and_not_an_exit() -> None:
    result = run(decoder(), [3], 16, n=4)
    assert result.tokens == generate(target(), [3], 4) and result.totals.rounds == 1 and result.totals.drafted == 3


@pytest.mark.parametrize("n", [1, 9, 10, 18, 40])
def test_L08_no_plain_step_between_rounds(n: int) -> None:
    """The bonus token starts the next round: ceil(n / (K + 1)) target calls, none of them of one token."""
    result = run(decoder(), PROMPT, n=n)
    assert result.totals.rounds == ceil(n / 9)
    assert all(r.emitted == 9 for r in result.episode.rounds[:-1])


@pytest.mark.parametrize("at", [3, 18])
@pytest.mark.parametrize("k", [5, 8])
def test_T16_min_new_tokens_counts_from_the_prompt(k: int, at: int) -> None:
    """The end token would come early, or so late that counting the prompt's five tokens too would let it pass."""
    eos = greedy()[at]
    want = generate(target(), PROMPT, 40, eos=eos, min_new_tokens=20)
    result = run(decoder(eos=[eos]), PROMPT, k, n=40, min_new_tokens=20)
    assert len(want) >= 20 and result.tokens == want and mean_accepted(result) > 1


def test_T16_a_processor_object_is_used_twice_in_a_row() -> None:
    eos = greedy()[3]
    processor = MinNewTokensLengthLogitsProcessor(len(PROMPT), 20, [eos])
    want = generate(target(), PROMPT, 40, eos=eos, logits_processor=LogitsProcessorList([processor]))
    machine = decoder(eos=[eos])
    for _ in range(2):
        assert run(machine, PROMPT, n=40, processors=[processor]).tokens == want
    # twice in one chain, as keyword and as object: the same text again
    assert run(machine, PROMPT, n=40, processors=[processor], min_new_tokens=20).tokens == want


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_V16_the_stop_string_that_completes_first_wins(order: tuple[int, int]) -> None:
    first, second = texts()[2], texts()[5]
    stops = [(first, second)[i] for i in order]
    machine = decoder(tokenizer=tiny_tokenizer())
    chunks = list(machine.stream(PROMPT, policy=Schedule(8), stop=stops, max_new_tokens=24))
    result = run(machine, PROMPT, stop=stops)
    assert result.matched_stop == first and result.text == "".join(texts()[:3]) == "".join(c.text for c in chunks)
    assert result.tokens == greedy()[:3] and mean_accepted(result) > 0


def test_V16_within_one_token_too() -> None:
    class Words:
        """Each token is several characters."""

        def decode(self, ids: list[int], **_: Any) -> str:
            return "".join(("xx", "..ab..", "yy")[i] for i in ids)

    for stops in (["b.", "a"], ["a", "b."]):
        stopper = Stopper(stop=stops, tokenizer=Words())
        assert stopper.check(0, torch.tensor([[0]]), None) is None
        assert stopper.check(1, torch.tensor([[0, 1]]), None) == "stop"
        assert (stopper.matched, stopper.text) == ("a", "xx..a")


def test_V17_ids_logprobs_text_and_counts_are_cut_at_the_same_token() -> None:
    tokenizer: Any = tiny_tokenizer()
    stop = "".join(texts()[3:5])
    machine = decoder(tokenizer=tokenizer)
    result = run(machine, PROMPT, stop=stop, logprobs=True)
    text = tokenizer.decode(list(result.tokens))
    assert text == result.text and text.endswith(stop) and text.count(stop) == 1
    assert len(result.tokens) == len(result.logprobs or ()) == result.totals.tokens == 5
    last = result.episode.rounds[-1]
    assert last.drafted == 8 and last.accepted == last.emitted == 5
    # going on from the cut is going on from the text
    assert run(machine, [*PROMPT, *result.tokens], n=10).tokens == greedy()[5:15]


def test_V17_V08_logprobs_are_those_of_the_plain_forward() -> None:
    result = run(decoder(), PROMPT, 8, 0, 3, n=20, logprobs=True, repetition_penalty=1.3)
    whole = torch.tensor([[*PROMPT, *result.tokens]])
    with torch.inference_mode():
        scores = target()(input_ids=whole, use_cache=False).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    want = scores.gather(1, whole[0, len(PROMPT) :, None])[:, 0]
    # scores are reported in float32
    assert torch.allclose(torch.tensor(result.logprobs, dtype=torch.float64), want, atol=1e-5)
    assert mean_accepted(result) > 0


@pytest.mark.parametrize("length", [1, 2, 4])
@pytest.mark.parametrize("at", [0, 6, 7, 8, 9])
def test_S02_stop_early_in_a_block_and_over_its_border(at: int, length: int) -> None:
    """With K = 8 the first block holds tokens 0..8: stops that begin at 6..8 reach over its end."""
    stop = "".join(texts()[at : at + length])
    result = run(decoder(tokenizer=tiny_tokenizer()), PROMPT, stop=stop, n=30)
    assert result.tokens == greedy()[: at + length] and result.text.endswith(stop) and mean_accepted(result) > 0


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, as byte-level BPE has without merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast: Any = PreTrainedTokenizerFast
    return fast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


TEXT = "a漢é😀b😀😀é漢漢z"
"""characters of 1, 2, 3 and 4 bytes"""


def forced(script: list[int], prompt_length: int) -> Any:
    """A constraint under which exactly `script` is generated, whatever the model."""
    return lambda batch, ids: [script[min(len(ids) - prompt_length, len(script) - 1)]]


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
def test_S03_characters_split_over_blocks_are_held_back(k: int) -> None:
    tokenizer: Any = byte_tokenizer()
    script = tokenizer.encode(TEXT)
    assert len(script) == len(TEXT.encode())
    machine = decoder(tiny_target(vocab_size=256, layers=1), tokenizer=tokenizer)
    generation = machine.stream(
        [1, 2], policy=Schedule(k), max_new_tokens=len(script), prefix_allowed_tokens_fn=forced(script, 2)
    )
    chunks = list(generation)
    assert "".join(c.text for c in chunks) == TEXT == generation.result().text
    assert all("\ufffd" not in c.text for c in chunks) and mean_accepted(generation.result()) > 0
    assert len(chunks) >= 5 and sum(not c.text for c in chunks) < len(chunks)


@pytest.mark.parametrize("k", [1, 3, 5])
def test_S03_what_stays_incomplete_comes_out_once_at_the_end(k: int) -> None:
    tokenizer: Any = byte_tokenizer()
    script = tokenizer.encode("ok 😀")[:-1]
    machine = decoder(tiny_target(vocab_size=256, layers=1), tokenizer=tokenizer)
    generation = machine.stream(
        [1, 2], policy=Schedule(k), max_new_tokens=len(script), prefix_allowed_tokens_fn=forced(script, 2)
    )
    chunks = list(generation)
    assert "".join(c.text for c in chunks) == tokenizer.decode(script) == generation.result().text
    assert all("\ufffd" not in c.text for c in chunks[:-1]) and chunks[-1].text.count("\ufffd") == 1


@pytest.mark.parametrize("k", [1, 4, 8])
def test_S03_a_stop_string_of_long_characters(k: int) -> None:
    tokenizer: Any = byte_tokenizer()
    script = tokenizer.encode(TEXT)
    machine = decoder(tiny_target(vocab_size=256, layers=1), tokenizer=tokenizer)
    options: dict[str, Any] = {"prefix_allowed_tokens_fn": forced(script, 2), "stop": "😀b"}
    result = run(machine, [1, 2], k, n=len(script), **options)
    assert result.text == "a漢é😀b" and tokenizer.decode(list(result.tokens)) == result.text
    chunks = machine.stream([1, 2], policy=Schedule(k), max_new_tokens=len(script), **options)
    assert "".join(c.text for c in chunks) == result.text


class Listener:
    """Records what a transformers streamer is told."""

    def __init__(self) -> None:
        self.calls: list[list[int] | None] = []
        self.shapes: list[tuple[int, ...]] = []

    def put(self, value: torch.Tensor) -> None:
        self.shapes.append(tuple(value.shape))
        self.calls.append(value.reshape(-1).tolist())

    def end(self) -> None:
        self.calls.append(None)


@pytest.mark.parametrize("mode", ["greedy", "gumbel", "rejection"])
def test_X05_streaming_gives_the_ids_of_generate(mode: str) -> None:
    options: dict[str, Any] = {"mode": mode, "temperature": 0.0 if mode == "greedy" else 0.8, "seed": 3}
    machine = decoder(tokenizer=tiny_tokenizer())
    whole = run(machine, PROMPT, 8, 0, 3, **options)
    chunks = list(machine.stream(PROMPT, policy=Schedule(8, 0, 3), max_new_tokens=24, **options))
    assert tuple(t for c in chunks for t in c.tokens) == whole.tokens and mean_accepted(whole) > 0
    assert "".join(c.text for c in chunks) == whole.text
    assert [c.record.tokens for c in chunks] == [c.tokens for c in chunks]


def test_X05_a_transformers_streamer_hears_what_plain_generate_tells() -> None:
    ours, theirs = Listener(), Listener()
    eos = greedy()[11]
    run(decoder(eos=[eos]), PROMPT, streamer=ours)
    generate(target(), PROMPT, eos=eos, streamer=theirs)
    assert ours.calls == theirs.calls == [PROMPT, *([t] for t in greedy()[:12]), None]
    assert ours.shapes == theirs.shapes


def test_X05_text_streamer_prints_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = tiny_tokenizer()
    result = run(decoder(tokenizer=tokenizer), PROMPT, streamer=TextStreamer(tokenizer, skip_prompt=True))
    assert capsys.readouterr().out.rstrip("\n") == result.text.rstrip("\n") and result.text


def test_X05_the_streamer_is_ended_when_a_call_fails() -> None:
    def fail(ids: torch.Tensor, scores: Any) -> bool:
        raise KeyboardInterrupt

    listener = Listener()
    with pytest.raises(KeyboardInterrupt):
        run(decoder(), PROMPT, streamer=listener, stopping_criteria=[fail])
    assert listener.calls == [PROMPT, None]


@pytest.mark.parametrize("kind", ["model", "ngram"])
def test_X05_a_consumer_that_leaves_early_spoils_nothing(kind: str) -> None:
    machine = decoder(draft=noisy() if kind == "model" else ngram())
    others = list(prompts(3, low=3, high=9, seed=4))
    fresh = [run(decoder(draft=noisy() if kind == "model" else ngram()), p).episode.rounds for p in others]
    for prompt, want in zip(others, fresh, strict=True):
        stream = machine.stream(PROMPT, policy=Schedule(5), max_new_tokens=24)
        next(stream)
        with pytest.raises(RuntimeError, match="has not ended"):
            stream.result()
        rounds = run(machine, prompt).episode.rounds
        assert [(r.drafted, r.accepted, r.tokens) for r in rounds] == [(r.drafted, r.accepted, r.tokens) for r in want]


def test_X05_positions_of_the_chunks_follow_on() -> None:
    records = [c.record for c in decoder().stream(PROMPT, policy=Schedule(3), max_new_tokens=20)]
    assert all(b.position == a.position + a.emitted for a, b in pairwise(records)) and records[0].position == 0
