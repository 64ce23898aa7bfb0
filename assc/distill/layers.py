"""A draft of a few of the target's layers as a student: an independent model sees true tokens, one pass is enough."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from assc.distill.train import Block, head_loss
from assc.drafters.layers import few_layers, save_layers, trimmed_head, trunk
from assc.errors import UnsupportedModelError


class LayersStudent:
    """A model of `few_layers` in training, in float32 or float64 (see `assc.distill.loop.Student`)."""

    def __init__(self, target: PreTrainedModel, layers: Sequence[int], token_ids: Tensor) -> None:
        self.layers = list(layers)
        self.model = few_layers(target, layers, token_ids)
        self.net = trunk(self.model)
        self.dtype = torch.float64 if target.dtype == torch.float64 else torch.float32
        for p in self.net.parameters():
            if p.dim() > 2:
                raise UnsupportedModelError(f"{type(target).__name__} has weights of more than two dimensions")
            p.data = p.data.to(self.dtype)  # buffers keep their own precision
            p.requires_grad_(True)
        head = trimmed_head(self.model)
        assert head is not None, "few_layers gives one"
        self._head = head
        self._autocast = self.dtype == torch.float32 and head.rows.dtype == torch.bfloat16

    def _features(self, tokens: Tensor) -> Tensor:
        """Final hidden states [B, T, H]. Padding lies behind the text, where causal attention never looks."""
        whole: Any = self.model
        embedded = whole.get_input_embeddings()(tokens).to(self.dtype)
        features: Tensor = whole.base_model(inputs_embeds=embedded, use_cache=False).last_hidden_state
        return features

    def loss(self, block: Block) -> Tensor:
        on = block.weight > 0
        with torch.autocast("cpu", torch.bfloat16, enabled=self._autocast):
            features = self._features(block.tokens)
        chosen = features[on].to(self.dtype)
        return head_loss(chosen, self._head.rows, block.label[on].to(self.dtype), block.mass[on])

    def hits(self, block: Block, steps: int) -> Iterator[Tensor]:
        on = block.weight > 0
        scores = F.linear(self._features(block.tokens)[on].to(self._head.rows.dtype), self._head.rows)
        hit = torch.zeros_like(on)
        hit[on] = self._head.token_ids[scores.argmax(-1)] == block.top[on]
        for _ in range(steps):  # until its first mismatch a draft sees the text itself, whatever the step
            yield hit

    def save(self, folder: Path, notes: dict[str, Any]) -> None:
        save_layers(folder, self.model, self.layers, notes)
