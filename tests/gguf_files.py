"""Small GGUF files and packages for the tests, written with the gguf package and llama.cpp's conventions."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.convert_slow_tokenizer import bytes_to_unicode

from assc.tiny import tiny_target
from assc.wheel import WheelModel

VOCAB = 260
"""256 bytes, then <unk>, <eos> and two merged tokens"""


def permute(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Row order that llama.cpp's converter (`LlamaModel.permute`) gives to q and k."""
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, 2, half, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, *, architecture: str = "llama", extra: str | None = None) -> Any:
    """Write a random model; returns the transformers model with the same weights (float32)."""
    from gguf import GGUFWriter, TokenType

    model = tiny_target(vocab_size=VOCAB, dtype=torch.float32)
    config = model.config
    writer = GGUFWriter(str(path), architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(float(config.rope_parameters["rope_theta"]))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*bytes_to_unicode().values(), "<unk>", "<eos>", "ab", "abc"])
    writer.add_token_types([TokenType.NORMAL] * 256 + [TokenType.CONTROL] * 2 + [TokenType.NORMAL] * 2)
    writer.add_token_merges(["a b", "ab c"])
    writer.add_unk_token_id(256)
    for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_pad_token_id):
        add(257)
    for name, weight in model.state_dict().items():
        values = weight.numpy()
        if "q_proj" in name:
            values = permute(values, config.num_attention_heads)
        elif "k_proj" in name:
            values = permute(values, config.num_key_value_heads)
        writer.add_tensor(_gguf_name(name), np.ascontiguousarray(values))
    if extra is not None:
        writer.add_tensor(extra, np.ones(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _gguf_name(name: str) -> str:
    for old, new in {
        "model.layers.": "blk.",
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "input_layernorm": "attn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }.items():
        name = name.replace(old, new)
    return name


def wheel_model(gguf: Path) -> WheelModel:
    """Describe a package `assc_fake_model` that carries this file."""
    digest = hashlib.sha256(gguf.read_bytes()).hexdigest()
    return WheelModel(
        title="Fake",
        package="fake",
        version="1",
        module="assc_fake_model",
        file=gguf.name,
        sha256=digest,
        wheel_bytes=1,
    )


def write_wheel(path: Path, wheel: WheelModel, content: bytes) -> None:
    """A wheel whose model file has this content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{wheel.module}/__init__.py", "raise ImportError('never imported')")
        archive.writestr(f"{wheel.module}/{wheel.file}", content)
