"""Many rows of plain sampling at once: how the target writes training data.

A single stream would take a weight read per token. Here B rows share it, over static buffers of which each forward
sees only the part in use, and rows that have ended make room.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from assc.attention import grouped
from assc.kv import ModelRunner, StaticKV

VIEW = 32
"""the visible part of the buffers grows in steps of this many slots"""


class ViewedKV(StaticKV):
    """Static buffers of which a forward sees the first `length` slots only; rows can be dropped."""

    def __init__(self, rows: int, capacity: int) -> None:
        super().__init__(rows, 0)
        self.capacity = capacity

    def see(self, slots: int) -> None:
        """Make at least `slots` slots visible."""
        self.length = min(self.capacity, -(-slots // VIEW) * VIEW)

    def keep(self, rows: Tensor) -> None:
        """Drop all other rows."""
        self._keys = [None if t is None else t.index_select(0, rows) for t in self._keys]
        self._values = [None if t is None else t.index_select(0, rows) for t in self._values]
        self.rows, self._row_index = int(rows.shape[0]), None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return keys[:, :, : self.length], values[:, :, : self.length]

    def _allocate(self, states: Tensor) -> Tensor:
        return states.new_zeros(self.rows, states.shape[1], self.capacity, states.shape[3])


def _sample(logits: Tensor, temperatures: Tensor, generator: torch.Generator) -> Tensor:
    """One token per row of `logits` [B, V]; temperature 0 takes the largest."""
    scores = logits.float()
    warm = (temperatures > 0).nonzero()[:, 0]
    if warm.shape[0]:
        noise = torch.empty(warm.shape[0], scores.shape[1]).exponential_(generator=generator).to(scores.device)
        scores[warm] = scores[warm] / temperatures[warm, None] - noise.log_()
    return scores.argmax(-1)


@torch.inference_mode()
def generate(
    runner: ModelRunner,
    prompts: Sequence[Sequence[int]],
    temperatures: Sequence[float],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    generator: torch.Generator,
    states: list[Tensor] | None = None,
) -> list[list[int]]:
    """New tokens of each prompt (the stop token included), decoded together. Deterministic in its arguments.

    Into `states` go the final hidden states [length, H] of each row's prompt and new tokens, on the CPU; the last
    token was never fed, so its state is zero.
    """
    device = runner.device
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    capacity = int(lengths.max()) + max_new_tokens
    if runner.max_positions is not None:
        capacity = min(capacity, runner.max_positions)
    ids = torch.zeros(len(prompts), capacity, dtype=torch.long)
    for b, prompt in enumerate(prompts):
        ids[b, : len(prompt)] = torch.tensor(list(prompt))
    ids = ids.to(device)
    kv = ViewedKV(len(prompts), capacity)
    heat = torch.tensor(list(temperatures), device=device)
    stops = torch.tensor(list(stop_ids), device=device, dtype=torch.long)
    rows = torch.arange(len(prompts), device=device)
    """the prompt that each buffer row belongs to"""
    out: list[list[int]] = [[] for _ in prompts]
    kept = None if states is None else torch.zeros(len(prompts), capacity, runner.hidden_size, dtype=runner.dtype)

    def keep_hidden(positions: Tensor, hidden: Tensor) -> None:
        assert kept is not None
        kept[rows.cpu()[:, None], positions.cpu()] = hidden.cpu()

    keep = None if kept is None else keep_hidden
    with grouped(runner.model):
        longest = int(lengths.max())
        kv.see(longest)
        runner.prefill(kv, ids[:, : longest - 1], keep_hidden=keep)
        last = ids.gather(1, lengths[:, None] - 1)
        at = lengths - 1
        live = torch.ones(len(prompts), dtype=torch.bool, device=device)
        for _ in range(max_new_tokens):
            kv.see(int(at[live].max()) + 1)
            position = torch.where(live, at, torch.zeros_like(at))[:, None]
            logits = runner.forward(kv, last, position, keep=1, hidden=kept is not None)[:, -1]
            if kept is not None:
                on = live.nonzero()[:, 0].cpu()
                kept[rows.cpu()[on], at.cpu()[on]] = runner.last_hidden[:, 0].cpu()[on]
            token = _sample(logits, heat, generator)
            for b, t, on in zip(rows.tolist(), token.tolist(), live.tolist(), strict=True):
                if on:
                    out[b].append(t)
            at = at + 1
            live = live & ~torch.isin(token, stops) & (at < capacity)
            if not live.any():
                break
            last = token[:, None]
            if live.sum() <= (0.8 if live.shape[0] > 8 else 0.99) * live.shape[0]:
                chosen = live.nonzero()[:, 0]
                kv.keep(chosen)
                rows, last, at, heat, live = rows[chosen], last[chosen], at[chosen], heat[chosen], live[chosen]
    if states is not None and kept is not None:
        for b, (prompt, new) in enumerate(zip(prompts, out, strict=True)):
            states.append(kept[b, : len(prompt) + len(new)].clone())
            states[-1][len(prompt) + len(new) - 1 :] = 0
    return out
