"""The state of B requests while they are decoded. B is 1 for the public calls; nothing here assumes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from assc.core import FinishReason, Request
from assc.kv import StaticKV
from assc.sampling import LogitsChain, Noise, SamplingParams
from assc.stopping import Stopper


@dataclass
class Row:
    """One request: committed `tokens` (prompt first), its sampling chain, noise and stop rules."""

    request: Request
    params: SamplingParams
    chain: LogitsChain
    draft_chain: LogitsChain
    noise: Noise | None
    stopper: Stopper
    tokens: list[int]
    prompt_length: int
    budget: int
    """new tokens at most: the request's budget, cut to the room in the context"""
    vocab_size: int
    cut_by_context: bool = False
    rounds: int = 0
    finish: FinishReason | None = None
    logprobs: list[float] | None = None
    last_logits: Tensor | None = field(default=None, repr=False)
    """raw target logits [V] from which the last committed token came"""

    @property
    def length(self) -> int:
        """committed tokens, prompt included"""
        return len(self.tokens)

    @property
    def new_tokens(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def remaining(self) -> int:
        return self.budget - self.new_tokens

    @property
    def k_limit(self) -> int:
        """The largest useful K: every round also emits the correction or bonus token."""
        return max(0, self.remaining - 1)


@dataclass
class Batch:
    """B rows over one set of buffers of C slots.

    `ids` [B, C] mirrors the committed tokens on the device; the slots behind a row's length hold the tokens being
    verified and, after a rejection, garbage that nothing reads.
    """

    rows: list[Row]
    kv: StaticKV
    ids: Tensor
    device: torch.device
    hidden: Tensor | None = None
    """the target's final hidden states [B, C, H] at the positions it was fed, if a drafter needs them"""

    @property
    def size(self) -> int:
        return len(self.rows)

    @classmethod
    def join(cls, parts: Sequence[Batch]) -> Batch:
        """The rows of several batches side by side; their buffers must have one length."""
        hidden = [p.hidden for p in parts if p.hidden is not None]
        return cls(
            rows=[row for p in parts for row in p.rows],
            kv=StaticKV.join([p.kv for p in parts]),
            ids=torch.cat([p.ids for p in parts]),
            device=parts[0].device,
            hidden=torch.cat(hidden) if hidden else None,
        )

    def keep_hidden(self, positions: Tensor, states: Tensor) -> None:
        """Store `states` [B, Q, H] at `positions` [B, Q]."""
        assert self.hidden is not None
        self.hidden.scatter_(1, positions[..., None].expand_as(states), states)

    def positions(self, starts: Sequence[int], width: int) -> Tensor:
        """Positions [B, width] from `starts` on; those past the buffer become its last slot, which nobody reads."""
        first = torch.tensor(starts, dtype=torch.long).to(self.device, non_blocking=True)
        steps = torch.arange(width, device=self.device)
        return (first[:, None] + steps).clamp_(max=self.kv.length - 1)

    def slices(self, starts: Sequence[int], width: int) -> tuple[Tensor, Tensor]:
        """Ids and positions [B, width] from each row's own start."""
        positions = self.positions(starts, width)
        return self.ids.gather(1, positions), positions
