"""Attention that the engine puts in place of transformers' own: the same numbers, whatever the number of columns."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from assc.attention import ROWS, TILE, grouped, grouped_attention, missing_rows, steady
from assc.kv import ModelRunner
from assc.tiny import tiny_target


@pytest.mark.parametrize("columns", [1, 2, 5])
@pytest.mark.parametrize("heads", [2, 6])
def test_grouped_attention_is_attention(columns: int, heads: int) -> None:
    g = torch.Generator().manual_seed(columns)
    query = torch.randn(3, heads, columns, 8, dtype=torch.float64, generator=g)
    key, value = (torch.randn(3, 2, 12, 8, dtype=torch.float64, generator=g) for _ in range(2))
    mask = torch.zeros(3, 1, columns, 12, dtype=torch.float64)
    mask[..., 9:] = -torch.inf
    wanted = F.scaled_dot_product_attention(
        query, key.repeat_interleave(heads // 2, 1), value.repeat_interleave(heads // 2, 1), attn_mask=mask
    )
    torch.testing.assert_close(grouped_attention(query, key, value, mask), wanted, rtol=1e-12, atol=1e-12)


def test_no_block_of_rows_is_small() -> None:
    for rows in range(1, 5 * TILE):
        rest = (rows + missing_rows(rows)) % TILE
        assert rest == 0 or rest >= ROWS
        assert missing_rows(rows) < ROWS


@pytest.mark.parametrize("put", [steady, grouped])
def test_the_models_own_attention_comes_back(put: object) -> None:
    model = tiny_target()
    assert callable(put)
    with pytest.raises(KeyError), put(model):
        assert model.config._attn_implementation != "sdpa"
        raise KeyError
    assert model.config._attn_implementation == "sdpa"


def test_a_model_without_sdpa_is_left_alone() -> None:
    model = tiny_target(attn_implementation="eager")
    with steady(model):
        assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keep", [0, 1])
def test_a_single_column_is_what_it_is_among_others(dtype: torch.dtype, keep: int) -> None:
    """One column is fed beside a second one: logits, states and buffers are those of that column."""
    runner = ModelRunner(tiny_target(dtype=dtype))
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    at = torch.arange(6)[None]
    one, many = runner.new_cache(1, 8), runner.new_cache(1, 8)
    together = runner.forward(many, ids, at, hidden=True)
    states = runner.last_hidden
    for t in range(6):
        logits = runner.forward(one, ids[:, t : t + 1], at[:, t : t + 1], keep, hidden=True)
        assert logits.shape == (1, 1, runner.vocab_size) and runner.last_hidden.shape == (1, 1, runner.hidden_size)
        tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
        torch.testing.assert_close(logits[0, 0], together[0, t], rtol=0, atol=tolerance)
        torch.testing.assert_close(runner.last_hidden[0, 0], states[0, t], rtol=0, atol=tolerance)
    for a, b in zip(one._keys, many._keys, strict=True):
        assert a is not None and b is not None
        torch.testing.assert_close(a[:, :, :6], b[:, :, :6], rtol=0, atol=0.05)
    assert runner.forward(one, ids[:, :1], at[:, :1]).shape[1] == 1  # no states asked for
