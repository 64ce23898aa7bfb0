"""Attention whose numbers do not depend on how many columns a forward has (CPU kernels).

Matrix kernels of a CPU take other paths for very few rows, with other roundings. Measured with torch 2.13, bfloat16
and float32 (`tests/test_invariance.py` looks again): on an AMD EPYC (Zen 4) scaled dot-product attention gives other
bits for 1 to 3 query rows than for 4 and more, and matrix products for 1 row than for more; logits of SmolLM2 differ
by up to 0.56 then. On an Intel Xeon with AMX nothing differs. So a forward of a single column is given a second one
(`ModelRunner`), and attention at least `ROWS` query rows, which costs nothing that could be measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

ROWS = 4
"""query rows from which on the kernels measured agree"""
TILE = 32
"""query rows that the kernel takes at once; the rest of a division by it is a block of its own"""

_STEADY, _GROUPED = "assc_steady", "assc_grouped"


def missing_rows(rows: int) -> int:
    """How many rows to add so that no block of the kernel has fewer than `ROWS`.

    >>> [missing_rows(n) for n in (1, 3, 4, 32, 33, 35, 36)]
    [3, 1, 0, 0, 3, 1, 0]
    """
    rest = rows % TILE
    return ROWS - rest if 0 < rest < ROWS else 0


def _steady_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """transformers' sdpa attention with at least `ROWS` query rows; those added are dropped again."""
    columns = query.shape[2]
    added = missing_rows(columns)
    if added and attention_mask is not None:
        query = torch.cat([query, query[:, :, -1:].expand(-1, -1, added, -1)], 2)
        attention_mask = torch.cat([attention_mask, attention_mask[:, :, -1:].expand(-1, -1, added, -1)], 2)
    out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return out[:, :columns], None


def _grouped_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attention that shares key/value heads without copying them for each query head."""
    out = grouped_attention(query, key, value, attention_mask, options.get("scaling"))
    return out.transpose(1, 2).contiguous(), None


def grouped_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None = None
) -> Tensor:
    """Heads' outputs [B, heads, Q, D] from queries [B, heads, Q, D] and keys, values [B, kv_heads, S, D].

    With one query column the heads of a group become the rows of one query: the same arithmetic in a sixth of the time
    on the CPU measured (64 rows, 320 slots: 4 ms against 24 ms a layer).
    """
    rows, heads, columns, width = query.shape
    if columns == 1 and (mask is None or mask.shape[1] == 1):
        query = query.reshape(rows, key.shape[1], heads // key.shape[1], width)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=True)
    return out.reshape(rows, heads, columns, width)


@contextmanager
def _through(model: PreTrainedModel, name: str, function: Any) -> Iterator[None]:
    config: Any = model.config.get_text_config()
    before = config._attn_implementation
    if before == "sdpa":
        AttentionInterface.register(name, function)
        config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before


def steady(model: PreTrainedModel) -> Any:
    """Let a model that attends through sdpa give the same bits for any number of columns; undone on leaving."""
    return _through(model, _STEADY, _steady_attention)


def grouped(model: PreTrainedModel) -> Any:
    """Let a model that attends through sdpa share its key/value heads; undone on leaving."""
    return _through(model, _GROUPED, _grouped_attention)
