"""Which tokens followed the most recent earlier occurrence of the current suffix. No torch here.

Source of the idea: prompt lookup decoding (Saxena 2023) and LZ77. Prompt and output are searched, the longest suffix
first, the most recent match first, and a suffix never matches itself. A match may overlap the suffix; the copy then
runs on into its own output, so that a periodic text is continued for any K.
"""

from __future__ import annotations

from collections.abc import Sequence


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

    @property
    def source(self) -> int:
        """Index of the token that followed the match, 0 without one."""
        return self._match[1]

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
