"""Write a random-weight pair of realistic shape to a folder, for timing where no trained model is at hand.

    python benchmarks/random_pair.py --out runs/pair

Figures made with it are labelled "random weights": the times are real, the acceptance rate means nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from transformers import LlamaConfig, LlamaForCausalLM

from assc.tiny import tiny_tokenizer


@dataclass
class Config:
    """Shapes of the two models."""

    out: Path
    hidden: int = 2048
    layers: int = 22
    draft_hidden: int = 1024
    draft_layers: int = 6
    dtype: str = "bfloat16"


def write(folder: Path, hidden: int, layers: int, dtype: torch.dtype, vocab: int) -> int:
    """Save one model, return its number of parameters."""
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 256),
        max_position_embeddings=4096,
        eos_token_id=None,
        bos_token_id=None,
    )
    torch.manual_seed(hidden)
    model = LlamaForCausalLM(config).to(dtype)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    dtype = getattr(torch, config.dtype)
    vocab = 32_000
    for name, hidden, layers in (
        ("target", config.hidden, config.layers),
        ("draft", config.draft_hidden, config.draft_layers),
    ):
        count = write(config.out / name, hidden, layers, dtype, vocab)
        print(f"{config.out / name}: {count / 1e6:.0f}M random parameters")


if __name__ == "__main__":
    main()
