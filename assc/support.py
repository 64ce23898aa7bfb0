"""What the decoder can run: which models, and which tokenizers may be paired."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from assc.errors import PairError, UnsupportedModelError

ATTENTION = frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention"})
"""entries of `config.layer_types` whose whole state is a key/value per position"""


def check_supported(model: Any) -> None:
    """Refuse models whose state cannot be taken back after a rejected token.

    The decoder rolls back by forgetting positions of a key/value cache. Recurrent, convolutional and linear-attention
    layers fold every token into one state, encoder-decoder models need another input, and ALiBi models read positions
    out of a 2-D mask. Raises `UnsupportedModelError` naming the class.
    """
    if reason := unsupported_reason(model):
        raise UnsupportedModelError(
            f"{type(model).__name__} is not supported because {reason}; use a decoder-only attention model"
        )


def unsupported_reason(model: Any) -> str | None:
    """Why `check_supported` refuses this model, None if it does not."""
    config = getattr(model, "config", None)
    if config is None or not isinstance(model, nn.Module):
        return "it is not a transformers model with a config"
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder model"
    text = _text_config(model)
    for name in ("layer_types", "layers_block_type"):
        other = sorted({str(t) for t in getattr(text, name, None) or ()} - ATTENTION)
        if other:
            return f"it has layers of type {', '.join(other)}, whose state cannot be rolled back"
    for module in model.modules():
        if getattr(module, "_is_stateful", False) or isinstance(module, nn.RNNBase | nn.Conv1d):
            return f"its {type(module).__name__} keeps a running state that cannot be rolled back"
    if "position_ids" not in inspect.signature(model.forward).parameters or getattr(text, "alibi", False):
        return "it takes no explicit position_ids (ALiBi or similar)"
    return None


def vocabulary_rows(model: Any) -> int:
    """Number of logits, padding rows included."""
    return int(_text_config(model).vocab_size)


def check_tokenizers(target: Any, draft: Any, *, force: bool = False, draft_name: str = "draft") -> int:
    """Number of leading ids that both tokenizers know; ids beyond it exist in one of them only.

    Vocabularies of different length pass when they agree on their common ids (models of one family pad differently).
    Raises `PairError` naming the first id whose texts differ, unless `force`.
    """
    known, other = _texts(target), _texts(draft)
    overlap = min(max(known, default=-1), max(other, default=-1)) + 1
    differing = (i for i in range(overlap) if i in known and i in other and known[i] != other[i])
    first = next(differing, None)
    if first is not None and not force:
        raise PairError(
            f"the tokenizers of target and {draft_name} differ at id {first} ({known[first]!r} and {other[first]!r}), "
            "so their tokens cannot be compared; choose a draft of the same family, or force it at your own risk"
        )
    return overlap


def _texts(tokenizer: Any) -> dict[int, str]:
    """Token text by id, added tokens included."""
    return {i: text for text, i in tokenizer.get_vocab().items()}


def _text_config(model: Any) -> Any:
    """The config of the language model inside a possibly multimodal one."""
    config = model.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config
