"""An independent draft made of a few of the target's own layers, saved and loaded.

An ordinary causal model of the target's class with fewer layers, so that `ModelRunner` and `ModelDrafter` run it like
any other. Embeddings are the target's tensor; the head is cut to the frequent tokens `token_ids`, and every other
token scores -inf. Only what lies between the two is trained and stored.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from assc.drafters.artefact import WEIGHTS_OF, check_shape, check_target, read_draft, unfitting, write_draft
from assc.drafters.net import shared_weights
from assc.errors import ArtefactError, UnsupportedModelError

WEIGHTS = WEIGHTS_OF["layers"]


class TrimmedHead(nn.Module):
    """Scores [..., V] from hidden states [..., H]: those of `token_ids` by the head's own rows, -inf elsewhere."""

    rows: Tensor
    token_ids: Tensor

    def __init__(self, weight: Tensor, token_ids: Tensor) -> None:
        super().__init__()
        self.vocab_size = int(weight.shape[0])
        ids = token_ids.to(weight.device, torch.long)
        self.register_buffer("token_ids", ids, persistent=False)
        self.register_buffer("rows", weight.detach()[ids], persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        scores = F.linear(hidden, self.rows)
        whole = scores.new_full((*scores.shape[:-1], self.vocab_size), -torch.inf)
        return whole.index_copy_(-1, self.token_ids, scores)


def outer_layers(total: int, n: int) -> list[int]:
    """The first and the last half of `n` layers out of `total`, the odd one in front. Raises `ArtefactError`.

    >>> outer_layers(30, 4)
    [0, 1, 28, 29]
    """
    if not 1 <= n <= total:
        raise ArtefactError(f"a draft out of the target's {total} layers has 1 to {total} of them, not {n}")
    return [*range(n - n // 2), *range(total - n // 2, total)]


def layer_stack(target: PreTrainedModel) -> nn.ModuleList:
    """The target's layers. Raises `UnsupportedModelError` where they are in no plain list."""
    total = int(target.config.get_text_config().num_hidden_layers)
    base: Any = target.base_model
    found = [m for m in base.children() if isinstance(m, nn.ModuleList) and len(m) == total]
    if len(found) != 1:
        raise UnsupportedModelError(f"{type(target).__name__} has no plain list of layers to cut a draft out of")
    return found[0]


def few_layers(target: PreTrainedModel, layers: Sequence[int], token_ids: Tensor) -> PreTrainedModel:
    """A frozen model of the target's class with copies of these layers, the target's embeddings and a cut head.

    Nothing of the target changes; no tensor is copied but what the draft owns. Raises `UnsupportedModelError`.
    """
    whole: Any = target
    embed, head = shared_weights(target)
    if getattr(whole.config.get_text_config(), "final_logit_softcapping", None):
        raise UnsupportedModelError(f"{type(target).__name__} caps its scores, which a cut head cannot follow")
    stack = layer_stack(target)
    # a deep copy in which the big parts are replaced on the way: no initialisation, so no random numbers either
    memo: dict[int, Any] = {
        id(whole.get_input_embeddings().weight): nn.Parameter(embed, requires_grad=False),
        id(whole.get_output_embeddings()): TrimmedHead(head, token_ids),
    }
    config = copy.deepcopy(whole.config, memo).get_text_config()
    kinds = getattr(config, "layer_types", None)
    config.num_hidden_layers = len(layers)
    if kinds:
        config.layer_types = [kinds[i] for i in layers]
    kept = nn.ModuleList([copy.deepcopy(stack[i], memo) for i in layers])
    for number, layer in enumerate(kept):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = number  # type: ignore[assignment]
    memo[id(stack)] = kept
    model: PreTrainedModel = copy.deepcopy(target, memo)
    model.train(False)
    model.requires_grad_(False)
    return model


def trunk(model: PreTrainedModel) -> nn.Module:
    """What a draft of `few_layers` owns: everything between embeddings and head."""
    base: Any = model.base_model
    own = nn.Module()
    for name, child in base.named_children():
        if child is not base.get_input_embeddings():
            own.add_module(name, child)
    return own


def trimmed_head(model: nn.Module) -> TrimmedHead | None:
    """The cut head of a model that has one."""
    return next((m for m in model.modules() if isinstance(m, TrimmedHead)), None)


def own_bytes(model: PreTrainedModel) -> int:
    """Bytes of weights that a draft model adds to its target's."""
    head = trimmed_head(model)
    if head is None:
        return sum(p.numel() * p.element_size() for p in model.parameters())
    return sum(p.numel() * p.element_size() for p in (*trunk(model).parameters(), head.rows))


# -- the artefact ----------------------------------------------------------------------------------------------------


def save_layers(folder: Path, model: PreTrainedModel, layers: Sequence[int], notes: dict[str, Any]) -> None:
    """Write weights (bfloat16; float64 when the model is float64) and configuration of a draft of `few_layers`."""
    head, own = trimmed_head(model), trunk(model)
    assert head is not None, "few_layers gives one"
    dtype = torch.float64 if next(own.parameters()).dtype == torch.float64 else torch.bfloat16
    tensors = {k: v.detach().to("cpu", dtype) if v.is_floating_point() else v for k, v in own.state_dict().items()}
    whole: Any = model
    embed = whole.get_input_embeddings().weight
    fields = {
        "kind": "model",
        "layers": list(layers),
        "shape": {"vocab_size": int(embed.shape[0]), "hidden_size": int(embed.shape[1])},
        "head_tokens": int(head.token_ids.shape[0]),
        "parameters": sum(p.numel() for p in own.parameters()),
        **notes,
    }
    write_draft(folder, "layers", {**tensors, "token_ids": head.token_ids.to("cpu", torch.int32)}, embed, fields)


def load_layers(folder: Path, target: PreTrainedModel) -> PreTrainedModel:
    """The draft of an artefact, in the target's dtype and on its device. Raises `ArtefactError`."""
    config, tensors = read_draft(folder, "layers")
    embed, _ = shared_weights(target)
    try:
        shape = {name: int(config["shape"][name]) for name in ("vocab_size", "hidden_size")}
        check_shape(embed, **shape)
        model = few_layers(target, config["layers"], tensors.pop("token_ids"))
        trunk(model).load_state_dict(tensors)
    except (ArtefactError, UnsupportedModelError):
        raise
    except Exception as error:  # KeyError, TypeError, IndexError or RuntimeError
        raise unfitting(folder, error) from None
    check_target(folder, config, embed)
    return model
