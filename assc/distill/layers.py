"""A draft of a few of the target's layers as a student: an independent model sees true tokens, one pass is enough."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from assc.distill.examples import Block
from assc.distill.train import head_loss
from assc.drafters.layers import few_layers, layer_stack, save_layers, trimmed_head, trunk
from assc.errors import UnsupportedModelError


def first_gap(layers: Sequence[int]) -> int:
    """How many of the first layers follow one another as in the target."""
    return next((i for i, (a, b) in enumerate(pairwise(layers), 1) if b != a + 1), len(layers))


@torch.no_grad()
def quieten(stack: nn.ModuleList, after: int) -> None:
    """Zero what the layers from number `after` on add to the stream, in models whose layers are built as Llama's.

    They never saw the output of the layers in front of the gap: left as they are, a draft of SmolLM2's layers
    0, 1, 28, 29 starts with a loss above that of a uniform guess. From zero they learn what to add.
    """
    for layer in list(stack)[after:]:
        for module, name in ((getattr(layer, "self_attn", None), "o_proj"), (getattr(layer, "mlp", None), "down_proj")):
            last = getattr(module, name, None)
            if isinstance(last, nn.Linear):
                last.weight.zero_()


class LayersStudent:
    """A model of `few_layers` in training, in float32 or float64 (see `assc.distill.loop.Student`)."""

    def __init__(
        self,
        target: PreTrainedModel,
        layers: Sequence[int],
        token_ids: Tensor,
        before: Mapping[str, Tensor] | None = None,
    ) -> None:
        """`before`: tensors of a draft of these layers to start from."""
        self.layers = list(layers)
        self.model = few_layers(target, layers, token_ids)
        self.net = trunk(self.model)
        if before is None:
            quieten(layer_stack(self.model), after=first_gap(layers))
        else:
            self.net.load_state_dict({name: t for name, t in before.items() if name != "token_ids"})
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
