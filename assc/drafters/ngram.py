"""Prompt lookup: propose what followed the most recent earlier occurrence of the current suffix.

Source of the idea: prompt lookup decoding (Saxena 2023) and LZ77. Prompt and output are searched, the longest suffix
first, the most recent match first, and a suffix never matches itself. A match may overlap the suffix; the copy then
runs on into its own output, so that a periodic text is continued for any K.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from assc.batch import Batch
from assc.drafters.base import Drafter, Proposal, register_drafter


class NgramIndex:
    """Most recent earlier end of every n-gram of one growing token list.

    >>> index = NgramIndex(max_n=3, min_n=1)
    >>> index.extend([1, 2, 9, 1, 2, 8, 1, 2])
    >>> index.propose(3), index.match_length()
    ([8, 1, 2], 2)
    >>> index = NgramIndex(max_n=3, min_n=1)
    >>> index.extend([5, 5, 5, 5])
    >>> index.propose(2)
    [5, 5]
    """

    def __init__(self, max_n: int, min_n: int) -> None:
        self.max_n = max_n
        self.min_n = min_n
        self.tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}
        """n-gram -> index just behind its most recent occurrence that does not end at the end of the text"""
        self._match: tuple[int, int] = (0, 0)
        """length of the longest matched suffix, index of its continuation"""

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._append(token)

    def _append(self, token: int) -> None:
        text = self.tokens
        end = len(text)
        for n in range(self.min_n, min(self.max_n, end) + 1):  # n-grams that end before the new token
            self._ends[tuple(text[end - n :])] = end
        text.append(token)
        self._match = (0, 0)
        for n in range(min(self.max_n, end), self.min_n - 1, -1):
            found = self._ends.get(tuple(text[end + 1 - n :]))
            if found is not None:
                self._match = (self._extend_back(n, found), found)
                break

    def _extend_back(self, n: int, found: int, limit: int = 16) -> int:
        """How many tokens before `found` really agree with the suffix, up to `limit`."""
        text = self.tokens
        while n < limit and found - n - 1 >= 0 and text[found - n - 1] == text[len(text) - n - 1]:
            n += 1
        return n

    def match_length(self) -> int:
        """Length of the longest suffix that occurred before (counted up to 16), 0 if none reaches `min_n`."""
        return self._match[0]

    def propose(self, k: int) -> list[int]:
        """Up to `k` tokens that followed the match; empty without one."""
        length, source = self._match
        if not length or k <= 0:
            return []
        period = len(self.tokens) - source
        return [self.tokens[source + i % period] for i in range(k)]


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
