"""A small random pair built in code: no download, float64-capable, deterministic. For tests and diagnostics.

The draft is the target with noise on its weights, so that it agrees with it often but not always.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

if TYPE_CHECKING:
    from assc.pairs import LoadedPair

EOS, UNKNOWN = "<eos>", "<unk>"
CHARACTERS = "\n" + "".join(chr(c) for c in range(32, 127))
"""printable ASCII and the line feed, one token each"""
VOCAB_SIZE = 2 + len(CHARACTERS)
"""98: `<eos>` is id 0, `<unk>` id 1, then `CHARACTERS`"""
EOS_ID = 0

SHARPNESS = 2.0
"""standard deviation of the random logits: moderate entropy, see tests/test_tiny.py"""
DRAFT_NOISE = 0.15
"""noise on the draft's weights, in units of each tensor's own standard deviation"""


def tiny_target(
    *, vocab_size: int = VOCAB_SIZE, layers: int = 2, seed: int = 5, dtype: torch.dtype = torch.float64, **config: Any
) -> LlamaForCausalLM:
    """A random Llama with grouped-query attention: hidden size 32, 4 heads, 2 key/value heads, 512 positions.

    The same `seed` gives the same weights whatever the global random state, which is left as found; they are drawn
    in float64 and then rounded to `dtype`. `config` overrides fields of `LlamaConfig`.
    """
    fields: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "bos_token_id": None,
        "eos_token_id": EOS_ID,
        "pad_token_id": EOS_ID,
        "tie_word_embeddings": False,
        "attn_implementation": "sdpa",
    } | config
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):  # building a module draws from the global generator
        model = LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, num_hidden_layers=layers, **fields)).double()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                continue  # norm gains stay 1
            fan_in = 1 if "embed_tokens" in name else weight.shape[1]
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            weight.copy_(noise * (SHARPNESS if "lm_head" in name else 1.0) / fan_in**0.5)
    return _frozen(model, dtype)


def tiny_draft(
    target: LlamaForCausalLM | None = None, *, noise: float = DRAFT_NOISE, vocab_size: int | None = None, seed: int = 1
) -> LlamaForCausalLM:
    """The target (default: `tiny_target()`) with noise on its weights; `noise=0` is an exact copy.

    `vocab_size` below the target's keeps only the first ids, above it adds ids that the target lacks: the padded
    vocabularies met in practice.
    """
    target = tiny_target() if target is None else target
    dtype = target.dtype
    generator = torch.Generator().manual_seed(seed)
    model = copy.deepcopy(target).double()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                draw = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
                weight.add_(noise * weight.std() * draw)
        if vocab_size is not None and vocab_size != target.config.vocab_size:
            _resize(model, vocab_size, generator)
    return _frozen(model, dtype)


def _resize(model: LlamaForCausalLM, vocab_size: int, generator: torch.Generator) -> None:
    """Drop the last ids or append random ones, in place."""
    old = model.config.vocab_size
    with torch.random.fork_rng(devices=[]):
        model.resize_token_embeddings(vocab_size, mean_resizing=False)
    for layer in (model.model.embed_tokens, model.lm_head):
        weight: Any = layer.weight
        extra = weight[old:]
        extra.copy_(torch.randn(extra.shape, generator=generator, dtype=torch.float64) * weight[:old].std())


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character (printable ASCII and the line feed), `<unk>` for the rest; no chat template."""
    vocab = {text: i for i, text in enumerate((EOS, UNKNOWN, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast: Any = PreTrainedTokenizerFast
    wrapped: PreTrainedTokenizerFast = fast(
        tokenizer_object=tokenizer, eos_token=EOS, pad_token=EOS, unk_token=UNKNOWN, clean_up_tokenization_spaces=False
    )
    return wrapped


def tiny_pair(dtype: torch.dtype = torch.float64, *, device: str = "cpu") -> LoadedPair:
    """Target, draft `model` and tokenizer: `load_pair("tiny")` in the dtype asked for."""
    from assc.pairs import load_pair

    return load_pair("tiny", dtype=str(dtype).removeprefix("torch."), device=device)


def _frozen(model: LlamaForCausalLM, dtype: torch.dtype) -> LlamaForCausalLM:
    """In `dtype`, in evaluation mode, without gradients."""
    model.config.dtype = dtype
    torch.nn.Module.to(model, dtype)
    model.train(False)
    model.requires_grad_(False)
    return model
