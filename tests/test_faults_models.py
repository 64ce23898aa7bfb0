"""Public faults of architectures, caches, vocabularies, dtypes and devices. Ids are those of docs/faults.md.

Every model is random, tiny and built here; float64 unless the dtype is the point; the oracle is plain `generate`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from fault_helpers import (
    Schedule,
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
    target,
)
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten
from transformers import PreTrainedTokenizerFast

import assc
from assc.core import ROLLBACK, Action, Request
from assc.decoder import SpeculativeDecoder
from assc.drafters.model import ModelDrafter
from assc.engine import Engine
from assc.errors import PairError, RequestError, UnsupportedModelError
from assc.kv import ModelRunner
from assc.pairs import make_pair
from assc.timing import PhaseTimer
from assc.tiny import tiny_draft, tiny_target, tiny_tokenizer

PROMPT = [53, 18, 24, 26, 50]

NO_SPECIAL: dict[str, Any] = {
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
MODERN: dict[str, Any] = NO_SPECIAL | {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
GPT: dict[str, Any] = NO_SPECIAL | {"vocab_size": 64, "n_positions": 128, "n_embd": 32, "n_layer": 2, "n_head": 4}
FALCON: dict[str, Any] = NO_SPECIAL | {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
MIXED = ["sliding_attention", "full_attention"]


def build(name: str, config: Any, seed: int = 0) -> Any:
    """A float64 model with weights wide enough that its greedy text is not one token for ever."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(hf, name)(config)
    model = model.double().eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if weight.dim() > 1:
                scale = 1.0 if "emb" in key or "wte" in key or "wpe" in key else 2.0 / weight.shape[1] ** 0.5
                weight.copy_(torch.randn(weight.shape, generator=generator, dtype=torch.float64) * scale)
    return model


FAMILIES: dict[str, Callable[[str], Any]] = {
    "gpt2": lambda a: build("GPT2LMHeadModel", hf.GPT2Config(**GPT, attn_implementation=a)),
    "gpt_bigcode": lambda a: build(
        "GPTBigCodeForCausalLM", hf.GPTBigCodeConfig(**GPT, multi_query=True, attn_implementation=a)
    ),
    "falcon": lambda a: build("FalconForCausalLM", hf.FalconConfig(**FALCON, attn_implementation=a)),
    "falcon_gqa": lambda a: build(
        "FalconForCausalLM",
        hf.FalconConfig(**FALCON, new_decoder_architecture=True, num_kv_heads=2, attn_implementation=a),
    ),
    "llama": lambda a: build("LlamaForCausalLM", hf.LlamaConfig(**MODERN, attn_implementation=a)),
    "qwen2": lambda a: build("Qwen2ForCausalLM", hf.Qwen2Config(**MODERN, attn_implementation=a)),
    "mistral_window": lambda a: build(
        "MistralForCausalLM", hf.MistralConfig(**MODERN, sliding_window=8, attn_implementation=a)
    ),
    "gemma3_mixed": lambda a: build(
        "Gemma3ForCausalLM",
        hf.Gemma3TextConfig(**MODERN, head_dim=8, sliding_window=8, layer_types=MIXED, attn_implementation=a),
    ),
    "qwen2_mixed": lambda a: build(
        "Qwen2ForCausalLM",
        hf.Qwen2Config(**MODERN, use_sliding_window=True, sliding_window=8, max_window_layers=1, attn_implementation=a),
    ),
}
SLIDING = ["mistral_window", "gemma3_mixed", "qwen2_mixed"]


@cache
def family(name: str, attention: str) -> Any:
    return FAMILIES[name](attention)


def repetitive(length: int) -> list[int]:
    return ([7, 9, 11, 13] * length)[:length]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", [n for n in FAMILIES if n not in SLIDING])
def test_T23_every_cache_layout_gives_the_plain_text(name: str, attention: str) -> None:
    model = family(name, attention)
    for prompt in ([10], *prompts(1, vocab=64, low=5, high=9)):
        want = generate(model, prompt, 30)
        result = run(decoder(model), prompt, 8, 0, 3, n=30)
        assert result.tokens == want and result.totals.acceptance_rate == 1 and mean_accepted(result) > 1
        assert run(decoder(model, ngram(min_n=1)), prompt, n=30).tokens == want
    assert len(set(want)) > 3


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", SLIDING)
def test_T11_sliding_windows_far_beyond_the_window(name: str, attention: str) -> None:
    """Window 8, prompt 6, 60 new tokens, target and draft both sliding."""
    model = family(name, attention)
    prompt = [3, 14, 15, 9, 26, 5]
    want = generate(model, prompt, 60)
    assert len(set(want)) > 3
    result = run(decoder(model), prompt, 8, 0, 3, 1, n=60)
    assert result.tokens == want and result.totals.acceptance_rate == 1 and mean_accepted(result) > 1
    # a draft that is often wrong, so that rejected tokens lie in the window
    other = run(decoder(model, family(name, "eager" if attention == "sdpa" else "sdpa")), prompt, 5, n=60)
    assert other.tokens == want
    wrong = copy.deepcopy(model)
    with torch.no_grad():
        for weight in wrong.parameters():
            if weight.dim() > 1:
                weight.add_(0.05 * weight.std() * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    mixed = run(decoder(model, wrong), prompt, 5, n=60)
    assert mixed.tokens == want and 0 < (mixed.totals.acceptance_rate or 0) < 1
    batch, outcomes = play(
        Engine(runner(model), [ModelDrafter(runner(model))]),
        [Request(tuple(prompt), 40), Request((1,), 40), Request(tuple(repetitive(20)), 40)],
        lambda r, b: Action("model", 5 - b),
    )
    assert new_tokens(batch) == [generate(model, p, 40) for p in (prompt, [1], repetitive(20))]
    assert all(o.accepted == o.drafted for row in outcomes for o in row)


def test_T11_a_window_ignored_would_be_noticed() -> None:
    """The text of these models does depend on the window."""
    prompt = [3, 14, 15, 9, 26, 5]
    model = family("mistral_window", "sdpa")
    wide = build("MistralForCausalLM", hf.MistralConfig(**MODERN, sliding_window=None))
    assert generate(model, prompt, 60) != generate(wide, prompt, 60)


SMALL_STATE: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_n_groups": 1}
RECURRENT: dict[str, Callable[[], Any]] = {
    "MambaForCausalLM": lambda: hf.MambaConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4, **NO_SPECIAL
    ),
    "RwkvForCausalLM": lambda: hf.RwkvConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, **NO_SPECIAL),
    "BambaForCausalLM": lambda: hf.BambaConfig(**MODERN, attn_layer_indices=[1], **SMALL_STATE),
    "FalconH1ForCausalLM": lambda: hf.FalconH1Config(**MODERN, mamba_d_ssm=32, **(SMALL_STATE | {"mamba_n_heads": 4})),
    "Lfm2ForCausalLM": lambda: hf.Lfm2Config(**MODERN, layer_types=["conv", "full_attention"]),
    "Qwen3NextForCausalLM": lambda: hf.Qwen3NextConfig(
        **MODERN, layer_types=["linear_attention", "full_attention"], head_dim=8
    ),
}


@pytest.mark.parametrize("name", RECURRENT)
def test_T12_recurrent_and_hybrid_models_are_refused_with_any_drafter(name: str) -> None:
    """Refused when the target is wrapped, so with the n-gram drafter too, and as a draft."""
    model = build(name, RECURRENT[name]())
    for use in (lambda: decoder(model, ngram()), lambda: decoder(target(), model), lambda: decoder(model)):
        with pytest.raises(UnsupportedModelError, match=name):
            use()


class Leaky(hf.LlamaForCausalLM):
    """Attention plus a hidden running state that nothing declares: rejected tokens would stay in it."""

    state: Any = 0.0

    def forward(self, *args: Any, use_cache: Any = None, **kwargs: Any) -> Any:
        output = super().forward(*args, use_cache=use_cache, **kwargs)
        if use_cache:
            self.state = self.state + kwargs["input_ids"].sum()
            output.logits = output.logits + torch.sin(self.state.double() + torch.arange(output.logits.shape[-1]))
        return output


# which arguments a model takes is read off its signature
Leaky.forward.__signature__ = inspect.signature(hf.LlamaForCausalLM.forward)  # type: ignore[attr-defined]


def test_T12_an_undeclared_running_state_is_found_by_the_probe() -> None:
    model = Leaky(hf.LlamaConfig(**MODERN)).double().eval()
    with pytest.raises(UnsupportedModelError, match=r"Leaky gives other logits"):
        decoder(model, ngram())


def test_T12_positions_that_come_out_of_a_mask_are_refused() -> None:
    for name, config in (
        ("FalconForCausalLM", hf.FalconConfig(**FALCON, alibi=True)),
        ("BloomForCausalLM", hf.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4, **NO_SPECIAL)),
    ):
        with pytest.raises(UnsupportedModelError, match=name):
            decoder(build(name, config), ngram())


def test_T23_a_window_that_the_model_computes_from_lengths_is_refused() -> None:
    """GPT-Neo's local layers: wrong text without any error over buffers of fixed length."""
    config = hf.GPTNeoConfig(
        vocab_size=64,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        max_position_embeddings=256,
        window_size=64,
        attention_types=[[["global", "local"], 1]],
        **NO_SPECIAL,
    )
    with pytest.raises(UnsupportedModelError, match="GPTNeoForCausalLM"):
        decoder(build("GPTNeoForCausalLM", config), ngram())


@pytest.mark.parametrize("k", [0, 1, 8])
@pytest.mark.parametrize("fixed_width", [False, True])
def test_V18_the_last_position_of_the_model_is_the_end(k: int, fixed_width: bool) -> None:
    model = build("GPT2LMHeadModel", hf.GPT2Config(**(GPT | {"n_positions": 32})))
    machine = decoder(model, fixed_width=fixed_width)
    prompt = list(range(1, 21))
    want = generate(model, prompt, 12)
    result = run(machine, prompt, k, n=12)
    assert result.tokens == want and len(want) == 12 and result.finish == "length"
    longer = run(machine, prompt, k, n=40)
    assert longer.tokens == want and longer.finish == "context"
    assert k == 0 or mean_accepted(result) > 0.5
    last = list(range(1, 32))
    one = run(machine, last, k, n=5)
    assert one.tokens == generate(model, last, 1) and one.finish == "context" and one.totals.drafted == 0
    with pytest.raises(RequestError, match="32 tokens, the target takes at most 31"):
        machine.generate([*last, 32])
    assert run(decoder(model, ngram(min_n=1), fixed_width=fixed_width), prompt, k, n=40).tokens == want


@pytest.mark.parametrize("needs", [frozenset(), frozenset({"draft_entropy"})], ids=["plain", "peek"])
def test_V18_a_draft_with_a_shorter_context_stops_drafting(needs: frozenset[str]) -> None:
    model = build("GPT2LMHeadModel", hf.GPT2Config(**GPT))
    draft = copy.deepcopy(model)
    draft.config.n_positions = 16
    draft.transformer.wpe = torch.nn.Embedding.from_pretrained(model.transformer.wpe.weight[:16].clone())
    result = decoder(model, draft).generate(PROMPT, policy=Schedule(4, needs=needs), max_new_tokens=40)
    assert result.tokens == generate(model, PROMPT, 40) and mean_accepted(result) > 0
    assert {r.drafted for r in result.episode.rounds if len(PROMPT) + r.position > 16} == {0}
    long = run(decoder(model, draft), list(range(1, 30)), 4, n=10)
    assert long.tokens == generate(model, list(range(1, 30)), 10) and long.totals.drafted == 0


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_V18_rotary_scaling_that_changes_with_the_length_ends_the_context(kind: str) -> None:
    """Beyond the change a key would depend on the block that it was fed in, so the text on K."""
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 100.0, "factor": 2.0}
    if kind == "longrope":
        rope |= {
            "short_factor": [1.0] * 4,
            "long_factor": [4.0] * 4,
            "original_max_position_embeddings": 24,
            "factor": 64 / 24,
        }
        config: Any = hf.Phi3Config(**MODERN, rope_parameters=rope, original_max_position_embeddings=24)
        model = build("Phi3ForCausalLM", config)
    else:
        model = build(
            "LlamaForCausalLM", hf.LlamaConfig(**(MODERN | {"max_position_embeddings": 24}), rope_parameters=rope)
        )
    result = run(decoder(model), PROMPT, 8, n=60)
    assert result.finish == "context" and len(PROMPT) + len(result.tokens) == 24 and mean_accepted(result) > 1
    assert result.tokens == generate(model, PROMPT, 19) == run(decoder(model), PROMPT, 0, n=60).tokens


# -- vocabularies -----------------------------------------------------------------------------------------------------


@cache
def padded(rows: int) -> Any:
    """The 64-row model with its vocabulary cut or padded to `rows`."""
    return tiny_draft(tiny_target(vocab_size=64), noise=0.0, vocab_size=rows)


@pytest.mark.parametrize(("wide", "narrow"), [(64, 60), (60, 64), (64, 70)])
def test_T06_padded_vocabularies_share_their_overlap(wide: int, narrow: int) -> None:
    """Target of `wide` rows, draft of `narrow`."""
    model, draft = padded(wide), padded(narrow)
    accepted = []
    for prompt in prompts(4, vocab=min(wide, narrow), low=2, high=8):
        want = generate(model, prompt)
        result = run(decoder(model, draft), prompt, 5)
        accepted.append(mean_accepted(result))
        assert result.tokens == want and all(t < wide for t in result.tokens)
        for mode in ("gumbel", "rejection"):
            options: dict[str, Any] = {"mode": mode, "temperature": 1.0, "seed": 3}
            sampled = run(decoder(model, draft), prompt, 5, **options)
            assert mode == "rejection" or sampled.tokens == run(decoder(model, draft), prompt, 0, **options).tokens
            assert mean_accepted(sampled) > 0 and all(t < wide for t in sampled.tokens)
    assert max(accepted) > 1


def test_T07_a_draft_with_another_tokenizer_is_refused() -> None:
    """Cross-tokenizer drafts are not offered: refused by name, and lossless when forced all the same."""
    mine, other = (
        tiny_tokenizer(),
        PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"b": 2, "a": 3}, "a"))),
    )
    with pytest.raises(PairError, match="tokenizers of target and draft 'model' differ at id 2"):
        make_pair("mixed", target(), mine, {"model": noisy()}, draft_tokenizers={"model": other})
    pair = make_pair(
        "mixed", target(), mine, {"model": noisy()}, draft_tokenizers={"model": other}, force_tokenizer=True
    )
    machine = SpeculativeDecoder.from_pair(pair, policy=Schedule(4))
    assert run(machine, PROMPT, 4, eos_ids=()).tokens == generate(target(), PROMPT)


def test_T06_nothing_is_proposed_that_one_of_the_two_lacks() -> None:
    for wide, narrow in ((64, 60), (60, 64)):
        drafter = ModelDrafter(ModelRunner(padded(narrow)))
        seen: list[int] = []
        propose = drafter.propose

        def spy(batch: Any, ks: Any, propose: Any = propose, seen: Any = seen) -> Any:
            proposal = propose(batch, ks)
            seen += [t for b, n in enumerate(proposal.lengths) for t in proposal.tokens[b, :n].tolist()]
            assert proposal.q is None or bool((proposal.q[:, :, 60:] == 0).all())
            return proposal

        drafter.propose = spy  # type: ignore[method-assign]
        for seed in range(12):
            run(decoder(padded(wide), [drafter]), [1, 2, 3], 6, mode="rejection", temperature=3.0, seed=seed)
        assert len(set(seen)) > 30 and max(seen) < 60


def test_T06_prompts_hold_ids_that_the_draft_lacks() -> None:
    result = run(decoder(padded(64), padded(60)), [63, 61, 5, 62, 60], 4, n=40)
    assert result.tokens == generate(padded(64), [63, 61, 5, 62, 60], 40)


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.4},
        {"no_repeat_ngram_size": 1},
        {"logit_bias": {63: 2.0, 61: -100.0, 4: 1.0}},
        {"prefix_allowed_tokens_fn": lambda batch, ids: [3, 62] if len(ids) % 2 else [61, 62, 63]},
        {"min_new_tokens": 20},
    ],
    ids=["penalty", "no_repeat", "bias", "constraint", "min_new"],
)
def test_T06_processors_may_name_ids_that_the_draft_lacks(options: dict[str, Any]) -> None:
    model, prompt = padded(64), [63, 61, 5, 62, 60]
    plain = dict(options)
    if "logit_bias" in plain:
        plain["sequence_bias"] = [[[t], b] for t, b in plain.pop("logit_bias").items()]
    want = generate(model, prompt, eos=62, **plain)
    machine = decoder(model, padded(60), eos=[62])
    assert run(machine, prompt, 4, **options).tokens == want
    for seed in range(3):
        run(machine, prompt, 4, mode="rejection", temperature=1.0, seed=seed, **options)


@pytest.mark.parametrize(("wide", "narrow"), [(8, 6), (6, 8)])
def test_T06_sampling_follows_the_target_whatever_the_padding(wide: int, narrow: int) -> None:
    base = tiny_target(vocab_size=8, layers=1, seed=18)
    model = tiny_draft(base, noise=0.0, vocab_size=wide)
    draft = tiny_draft(base, noise=0.4, seed=3, vocab_size=narrow)
    counts, accepted = first_two(decoder(model, draft), [1, 2, 3, 1, 2], temperature=1.0)
    assert p_value(counts, exact_two(model, [1, 2, 3, 1, 2])) > 1e-4 and accepted > 0


# -- dtypes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["greedy", "gumbel", "rejection"])
def test_S04_each_model_computes_in_its_own_dtype(mode: str) -> None:
    single = tiny_target(dtype=torch.float32)
    options: dict[str, Any] = {"mode": mode, "temperature": 0.0 if mode == "greedy" else 0.7, "seed": 2}
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        draft = tiny_target(dtype=dtype)
        result = run(decoder(single, draft), PROMPT, 5, n=40, **options)
        assert mean_accepted(result) > 1
        if mode != "rejection":
            assert result.tokens == run(decoder(single, draft), PROMPT, 0, n=40, **options).tokens
        if mode == "greedy":
            assert result.tokens == generate(single, PROMPT, 40)
        assert draft.dtype == dtype and single.dtype == torch.float32


@pytest.mark.parametrize("mode", ["greedy", "gumbel", "rejection"])
def test_S04_a_draft_that_overflows_only_loses_acceptance(mode: str) -> None:
    draft = tiny_target(dtype=torch.float16)
    with torch.no_grad():
        draft.lm_head.weight.mul_(6e4)
    logits = draft(input_ids=torch.tensor([PROMPT])).logits
    assert not bool(logits.isfinite().all())
    with pytest.raises(UnsupportedModelError, match="relative difference nan"):
        decoder(draft=draft)  # told at once when the first tokens overflow; later it costs acceptance
    options: dict[str, Any] = {"mode": mode, "temperature": 0.0 if mode == "greedy" else 0.7, "seed": 2}
    peek = Schedule(4, needs=frozenset({"draft_entropy", "draft_top1", "draft_margin"}))
    late = ModelDrafter(ModelRunner(draft, probe=False))
    result = decoder(target(), [late]).generate(PROMPT, policy=peek, max_new_tokens=24, **options)
    assert len(result.tokens) == 24
    if mode != "rejection":
        assert result.tokens == run(decoder(), PROMPT, 0, **options).tokens


def test_T10_single_precision_differs_only_at_ties() -> None:
    """float32 against plain `generate` with its growing cache: a difference needs a top-2 margin below 1e-4."""
    model = tiny_target(dtype=torch.float32)
    machine = decoder(model)
    total, block = 0, 0.0
    for prompt in prompts(10, low=2, high=20, seed=5):
        want = generate(model, prompt, 40)
        result = run(machine, prompt, 8, 3, 0, n=40)
        block += mean_accepted(result)
        total += len(want)
        if result.tokens != want:
            at = next(i for i, (a, b) in enumerate(zip(result.tokens, want, strict=True)) if a != b)
            logits = model(input_ids=torch.tensor([[*prompt, *want[:at]]])).logits[0, -1]
            first, second = logits.topk(2).values.tolist()
            assert first - second < 1e-4, f"token {at} of {prompt} differs at a margin of {first - second:.2g}"
    assert total == 400 and block > 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_T10_one_text_for_every_schedule_in_low_precision(dtype: torch.dtype) -> None:
    """Against the engine's own plain decoding: the same text, since the shapes do not depend on K."""
    model = tiny_target(dtype=dtype)
    machine = decoder(model)
    for prompt in prompts(4, low=2, high=20, seed=6):
        plain = run(machine, prompt, 0, n=60).tokens
        result = run(machine, prompt, 8, 1, 0, 3, 16, n=60)
        assert result.tokens == plain and mean_accepted(result) > 1


def test_T09_one_token_prompts_and_cache_lengths() -> None:
    """Positions follow from the committed length, not from K."""
    machine = decoder(draft=noisy())
    engine = machine.engine
    accepted = 0.0
    for prompt in ([10], *prompts(8, low=1, high=12, seed=9)):
        want = generate(target(), prompt, 40)
        batch, timer = engine.start([Request(tuple(prompt), 40)]), PhaseTimer(engine.device)
        drafter: Any = engine.drafters["model"]
        while not batch.rows[0].finish:
            outcome = engine.round(batch, [Action("model", 5)], timer)[0]
            accepted += outcome.accepted
            row = batch.rows[0]
            assert batch.ids[0, : row.length].tolist() == row.tokens
            assert drafter._fed[0] <= row.length - 1
        assert new_tokens(batch) == [want]
    assert accepted > 30


# -- configuration and the cache interface ----------------------------------------------------------------------------


def test_T22_use_cache_false_in_a_config_does_not_matter() -> None:
    model = tiny_target(use_cache=False)
    draft = tiny_draft(model)
    before = copy.deepcopy(model.config.to_dict()), copy.deepcopy(draft.config.to_dict())
    result = run(decoder(model, draft), PROMPT)
    assert result.tokens == generate(target(), PROMPT) and mean_accepted(result) > 0
    assert model.config.use_cache is False and before == (model.config.to_dict(), draft.config.to_dict())


def test_T14_configs_of_both_models_are_left_as_found() -> None:
    model, draft = tiny_target(), tiny_draft()
    objects = (model.config, model.generation_config, draft.config, draft.generation_config)
    before = [copy.deepcopy(o.to_dict()) for o in objects]
    flags = [(m.training, [p.requires_grad for p in m.parameters()]) for m in (model, draft)]
    weights = [copy.deepcopy(m.state_dict()) for m in (model, draft)]
    machine = decoder(model, draft, eos=[3])
    for mode in ("greedy", "rejection", "gumbel"):
        run(machine, PROMPT, 8, 2, mode=mode, temperature=0.0 if mode == "greedy" else 1.0, min_new_tokens=9)
    assert before == [o.to_dict() for o in objects]
    assert flags == [(m.training, [p.requires_grad for p in m.parameters()]) for m in (model, draft)]
    for m, old in zip((model, draft), weights, strict=True):
        assert all(torch.equal(v, old[k]) for k, v in m.state_dict().items())


@pytest.mark.parametrize("keep", [0, 1, 5, 8, 9])
@pytest.mark.parametrize("name", ["llama", "mistral_window", "gemma3_mixed"])
def test_T19_rollback_to_any_length(name: str, keep: int) -> None:
    """After going back to `keep` of 9 tokens, other tokens give the logits of a fresh forward."""
    model = family(name, "sdpa")
    machine = runner(model)
    kv = machine.new_cache(1, 16)
    old, new = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12, 13]]), torch.tensor([[33, 34, 35]])
    machine.forward(kv, old, torch.arange(9)[None])
    logits = machine.forward(kv, new, torch.arange(keep, keep + 3)[None])
    with torch.inference_mode():
        want = model(input_ids=torch.cat([old[:, :keep], new], 1), use_cache=False).logits[:, -3:]
    assert torch.allclose(logits, want, atol=1e-9)


def test_T19_one_shim_for_the_name_of_the_cache_argument() -> None:
    """transformers 5.24 renamed `past_key_values` to `cache`; `Cache.crop` changed its meaning and is not used."""
    from assc.kv import _cache_parameter

    assert _cache_parameter(target(), {"cache": 1, "past_key_values": 2}) == "cache"
    assert _cache_parameter(target(), {"past_key_values": 2}) == "past_key_values"
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM"):
        _cache_parameter(target(), {"cache_params": 1})
    sources = Path(inspect.getfile(assc)).parent.rglob("*.py")
    assert not [p.name for p in sources if ".crop(" in p.read_text(encoding="utf-8")]


@contextmanager
def widths(machine: Any) -> Iterator[list[int]]:
    """Query lengths of the target's forwards."""
    model, seen = machine.engine.target, []
    forward = model.forward

    def spy(kv: Any, tokens: Tensor, positions: Tensor, keep: int = 0, **options: Any) -> Any:
        seen.append(tokens.shape[1])
        return forward(kv, tokens, positions, keep, **options)

    model.forward = spy
    try:
        yield seen
    finally:
        model.forward = forward


def test_T18_one_shape_for_every_k() -> None:
    """With `fixed_width` (the default on CUDA) every verification has K_max + 1 columns, whatever K."""
    machine = decoder(draft=noisy(), k_max=8, fixed_width=True)
    with widths(machine) as seen:
        result = run(machine, PROMPT, 0, 1, 5, 8, 3, n=40)
    assert result.tokens == generate(target(), PROMPT, 40) and mean_accepted(result) > 0
    assert set(seen[1:]) == {9} and len(seen) == 1 + result.totals.rounds
    free = decoder(draft=noisy(), k_max=8, fixed_width=False)
    with widths(free) as seen:
        run(free, PROMPT, 0, 1, 5, 8, 3, n=40)
    assert len(set(seen[1:])) <= 9


def test_T18_a_static_cache_of_transformers_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match="cache_implementation"):
        decoder().generate(PROMPT, cache_implementation="static")


# -- devices ----------------------------------------------------------------------------------------------------------


HOST, OTHER = torch.device("cpu"), torch.device("cpu", 0)
"""Two names of one device: `DeviceTags` tells them apart, torch does not."""


class DeviceTags(TorchFunctionMode):
    """Pretends that tensors live on the device they were sent to, and raises where two devices meet in one call."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_flatten((args, kwargs))[0]
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        if func == Tensor.device.__get__:  # type: ignore[attr-defined]
            return tag(tensors[0])
        name = getattr(func, "__name__", "")
        devices = [x for x in leaves if isinstance(x, torch.device)]
        devices += [torch.device(x) for k, x in kwargs.items() if k == "device" and isinstance(x, str)]
        if len(tensors) > 1 and name in {"to", "type_as"}:
            devices = [tag(tensors[1])]
        tags = {tag(x) for x in tensors if x.dim()} or {tag(x) for x in tensors}
        if len(tags) > 1 and not devices:
            raise RuntimeError(f"tensors on two devices in {name}")
        out = func(*args, **kwargs)
        where = HOST if name in {"cpu", "tolist"} else devices[0] if devices else next(iter(tags), HOST)
        for x in tree_flatten(out)[0]:
            if isinstance(x, Tensor):
                x._tag = where  # type: ignore[attr-defined]
        return out


def tag(x: Tensor) -> torch.device:
    found: torch.device = getattr(x, "_tag", HOST)
    return found


def on(model: Any, device: torch.device) -> Any:
    model = copy.deepcopy(model)
    for x in (*model.parameters(), *model.buffers()):
        x._tag = device
    return model


def tagged(where: torch.device, draft: torch.device, **options: Any) -> Engine:
    drafters = [ModelDrafter(ModelRunner(on(noisy(), draft))), *ngram()]
    return Engine(ModelRunner(on(target(), where)), drafters, eos_ids=[3, 68], **options)


SAMPLING: list[dict[str, Any]] = [
    {"min_new_tokens": 6, "repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "logit_bias": {5: 1.0}},
    {"mode": "gumbel", "temperature": 0.8, "top_k": 20, "min_p": 0.01, "min_new_tokens": 6},
    {"mode": "rejection", "temperature": 0.8, "top_p": 0.9, "prefix_allowed_tokens_fn": lambda b, ids: list(range(70))},
    {"mode": "rejection", "temperature": 1.0},
]


@pytest.mark.parametrize(
    ("where", "draft", "lazy"),
    [(OTHER, HOST, False), (HOST, OTHER, True), (OTHER, OTHER, True), (OTHER, OTHER, False)],
    ids=["gpu-cpu", "cpu-gpu", "gpu-gpu-lazy", "gpu-gpu"],
)
def test_T08_every_tensor_is_moved_at_the_border(where: torch.device, draft: torch.device, lazy: bool) -> None:
    requests = [Request((53, 18, 24), 10, seed=1), Request((7, 8, 9, 7, 8, 9, 7), 12, seed=2)]

    def choose(round_: int, b: int) -> Action:
        return (Action("model", 4), Action("ngram", 3), ROLLBACK)[(round_ + b) % 3]

    accepted = 0
    for sampling in SAMPLING:
        asked = [Request(r.prompt_ids, r.max_new_tokens, r.seed, sampling=sampling) for r in requests]
        want = new_tokens(play(tagged(HOST, HOST, lazy_verify=lazy), asked, choose)[0])
        with DeviceTags():
            engine = tagged(where, draft, lazy_verify=lazy, fixed_width=where is OTHER)
            assert engine.device is where or engine.device == where
            batch, outcomes = play(engine, asked, choose, logprobs=True)
            alone, _ = play(engine, asked[:1], choose)
            engine.peek(engine.start(asked[:1]), [0])
        assert new_tokens(batch) == want and new_tokens(alone) == want[:1]
        accepted += sum(o.accepted for row in outcomes for o in row)
    assert accepted > 10


def test_T08_a_tensor_left_behind_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        ModelDrafter,
        "_forward",
        lambda self, ids, positions: self.runner.forward(self._kv, ids, positions),
    )
    with DeviceTags(), pytest.raises(RuntimeError, match="two devices"):
        play(tagged(HOST, OTHER), [Request((53, 18, 24), 14)], lambda r, b: Action("model", 4))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("where", "draft"), [("cuda", "cpu"), ("cpu", "cuda"), ("cuda", "cuda")])
def test_T08_on_real_devices(where: str, draft: str) -> None:
    model, small = tiny_target().to(where), tiny_draft().to(draft)
    machine = decoder(model, small, eos=[3, 68])
    for sampling in SAMPLING:
        want = run(decoder(tiny_target(), tiny_draft(), eos=[3, 68]), PROMPT, 4, seed=1, **sampling).tokens
        result = run(machine, PROMPT, 4, seed=1, **sampling)
        assert result.tokens == want and len(result.tokens) > 1
