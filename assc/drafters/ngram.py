"""Prompt lookup: propose what followed the latest earlier occurrence of the current suffix (`assc.ngram_index`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from assc.batch import Batch
from assc.drafters.base import Drafter, Proposal, register_drafter
from assc.ngram_index import NgramIndex


@register_drafter("ngram")
class NgramDrafter(Drafter):
    """Prompt lookup over prompt and output, indexed incrementally: O(max_n) per committed token."""

    def __init__(self, name: str = "ngram", *, max_n: int = 4, min_n: int = 2) -> None:
        if not 1 <= min_n <= max_n:
            raise ValueError(f"n-gram lengths need 1 <= min_n <= max_n, got {min_n} and {max_n}")
        self.name = name
        self.max_n = max_n
        self.min_n = min_n
        self._rows: list[NgramIndex] = []

    def begin(self, batch: Batch) -> None:
        self._rows = [NgramIndex(self.max_n, self.min_n) for _ in batch.rows]
        self.committed(batch)

    def propose(self, batch: Batch, ks: Sequence[int]) -> Proposal:
        drafts = [index.propose(k) for index, k in zip(self._rows, ks, strict=True)]
        width = max(map(len, drafts))
        padded = [d + [0] * (width - len(d)) for d in drafts]
        tokens = torch.tensor(padded, dtype=torch.long).reshape(len(drafts), width)
        return Proposal(tokens.to(batch.device, non_blocking=True), [len(d) for d in drafts])

    def committed(self, batch: Batch) -> None:
        for index, row in zip(self._rows, batch.rows, strict=True):
            index.extend(row.tokens[len(index.tokens) :])

    def match_length(self, batch: Batch, row: int) -> int:
        return self._rows[row].match_length()
