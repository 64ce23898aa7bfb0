"""Stage 3, the data: texts with the teacher's labels, and batches of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from assc.distill.data import Report, ShardStore, Text, load_tensors, read_texts, save_tensors

CHUNK = 1024
"""positions whose logits are in memory at once"""


@dataclass
class Example:
    """One text with the teacher's labels: position t is labelled with the target's distribution for t + 1."""

    text: Text
    hidden: Tensor
    label: Tensor
    mass: Tensor
    top: Tensor


@dataclass
class Block:
    """A padded batch: hidden and label are [B, T, H], all others [B, T]; weight is 1 where the loss counts, else 0."""

    tokens: Tensor
    hidden: Tensor
    label: Tensor
    mass: Tensor
    top: Tensor
    weight: Tensor


@torch.no_grad()
def labels_of(hidden: Tensor, full_head: Tensor, token_ids: Tensor) -> dict[str, Tensor]:
    """Per position: sum of p_i W_i over the head, the mass it covers, and the target's argmax."""
    head = full_head[token_ids]
    parts: dict[str, list[Tensor]] = {"label": [], "mass": [], "top": []}
    for first in range(0, hidden.shape[0], CHUNK):
        some = hidden[first : first + CHUNK]
        z = F.linear(some, full_head).float()
        p = (z[:, token_ids] - z.logsumexp(-1, keepdim=True)).exp()
        parts["mass"].append(p.sum(-1))
        parts["label"].append((p.to(head.dtype) @ head).to(hidden.dtype))
        parts["top"].append(z.argmax(-1).int())
    return {name: torch.cat(values) for name, values in parts.items()}


def load_examples(
    store: ShardStore, shards: int, full_head: Tensor, token_ids: Tensor, report: Report
) -> list[Example]:
    """All texts with their labels; labels are made once per shard and kept beside it."""
    examples: list[Example] = []
    for number in range(shards):
        path = store.folder / f"labels-{number:05d}.safetensors"
        hidden = load_tensors(store.hidden_path(number))["hidden"]
        if not path.is_file():
            save_tensors(path, labels_of(hidden, full_head, token_ids))
            report(f"labels: shard {number + 1} of {shards}")
        labels = load_tensors(path)
        start = 0
        for text in read_texts(store.texts_path(number)):
            part = slice(start, start + len(text.ids))
            examples.append(Example(text, hidden[part], *(labels[n][part] for n in ("label", "mass", "top"))))
            start += len(text.ids)
    return examples


def collate(examples: Sequence[Example], dtype: torch.dtype, *, prompts: bool = False) -> Block:
    """Pad; the last position has no use as its label lies beyond the text. Prompts count only with `prompts`."""
    width = max(len(e.text.ids) for e in examples)
    size, hidden_size = len(examples), examples[0].hidden.shape[1]
    tokens = torch.zeros(size, width, dtype=torch.long)
    weight = torch.zeros(size, width)
    top = torch.zeros(size, width, dtype=torch.long)
    hidden = torch.zeros(size, width, hidden_size, dtype=dtype)
    label = torch.zeros(size, width, hidden_size, dtype=dtype)
    mass = torch.zeros(size, width)
    for b, e in enumerate(examples):
        n = len(e.text.ids)
        tokens[b, :n] = torch.tensor(e.text.ids)
        hidden[b, :n], label[b, :n], mass[b, :n], top[b, :n] = e.hidden.to(dtype), e.label.to(dtype), e.mass, e.top
        weight[b, 0 if prompts else e.text.prompt_length - 1 : n - 1] = 1.0
    return Block(tokens, hidden, label, mass, top, weight)
