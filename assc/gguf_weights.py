"""Weights of a GGUF file under the names of a Llama-style Hugging Face model.

transformers reads GGUF weights only beside the accelerate package, through internals that change between its
releases; the gguf package alone is enough for the plain decoder architectures below.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from assc.errors import PairError

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""values of the GGUF key `general.architecture` that are understood; Mistral models call themselves llama"""

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hf_name(gguf_name: str) -> str | None:
    """Name of the parameter in transformers, None for a tensor that has no counterpart.

    >>> hf_name("blk.3.attn_q.weight")
    'model.layers.3.self_attn.q_proj.weight'
    """
    stem, _, kind = gguf_name.rpartition(".")
    if stem.startswith("blk."):
        _, layer, part = stem.split(".", 2)
        return f"model.layers.{layer}.{_LAYER[part]}.{kind}" if part in _LAYER else None
    return f"{_TOP[stem]}.{kind}" if stem in _TOP else None


def unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo the row order that llama.cpp gives to q and k of `llama` models for its rotary embedding.

    `weight` is [heads * head_dim, ...]; within a head, rows (2i, 2i+1) go back to (i, i + head_dim / 2).
    """
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, half, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def open_gguf(path: Path) -> Any:
    """A `gguf.GGUFReader` of the file. Raises `PairError` for an architecture that this module does not know."""
    from gguf import GGUFReader

    reader = GGUFReader(str(path))
    if (name := _architecture(reader)) not in ARCHITECTURES:
        raise PairError(
            f"{path} holds a model of architecture {name!r}, and GGUF files are read for {', '.join(ARCHITECTURES)} "
            "only; give the model's Hugging Face directory"
        )
    return reader


def read_weights(reader: Any, heads: int, kv_heads: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (parameter name, dequantised float32 tensor). Raises `PairError` for a tensor without a counterpart."""
    from gguf import dequantize

    architecture = _architecture(reader)
    for tensor in reader.tensors:
        name = hf_name(tensor.name)
        if name is None:  # for example rope_freqs: ignoring it would load a subtly wrong model
            raise PairError(f"the GGUF file holds {tensor.name}, which has no place in a plain {architecture} model")
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).float()
        if architecture == "llama" and ".attn_q." in tensor.name:
            weight = unpermute(weight, heads)
        elif architecture == "llama" and ".attn_k." in tensor.name:
            weight = unpermute(weight, kv_heads)
        yield name, weight


def _architecture(reader: Any) -> str:
    field = reader.fields["general.architecture"]
    return bytes(field.parts[field.data[0]]).decode("utf-8")
