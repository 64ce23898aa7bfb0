"""What the committed text itself says of its next token: who followed whom so far. No torch here.

Plain Python, since it is asked in every round, and causal: a `TextMemory` has read what was committed and no more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from assc.core import Observation, RoundRecord
from assc.ngram_index import NgramIndex

MAX_N, MIN_N = 4, 2
"""n-gram lengths of the lookup that is imagined here, those of the packaged one"""
RECENT = 8
"""followers of a token that count, newest first"""
HITS = 0.8
"""kept per token of the average of hits"""
UNKNOWN = 0.5
"""average of hits before there was a token"""
LONGEST_RUN = 64
TEXT = 9
"""numbers of a decision point"""
AHEAD = 5
"""numbers of a token that the lookup will propose"""


def share(followers: Sequence[int] | None, token: int) -> float:
    """How often `token` was among the last followers, held near 0 where there are few of them.

    >>> share([7, 7], 7), share([9], 7), share(None, 7)
    (0.6666666666666666, 0.0, 0.0)
    """
    if not followers:
        return 0.0
    recent = followers[-RECENT:]
    return recent.count(token) / (len(recent) + 1)


class TextMemory:
    """The followers of every token and of every pair of tokens in one text, read as it grows.

    >>> memory = TextMemory()
    >>> memory.read([1, 2, 9, 1, 2], 5)
    >>> memory.proposal(3)
    [9, 1, 2]
    >>> memory.read([1, 2, 9, 1, 2, 9, 1], 5)  # the lookup foresaw both
    >>> memory.run, round(memory.hits, 2)
    (2, 0.68)
    """

    def __init__(self) -> None:
        self.index = NgramIndex(MAX_N, MIN_N)
        self.one: dict[int, list[int]] = {}
        self.two: dict[tuple[int, int], list[int]] = {}
        self.prompt = 0
        """tokens of the prompt"""
        self.hits = UNKNOWN
        """average of whether the lookup, where it had a proposal, foresaw the token, whoever drafted it"""
        self.run = 0
        """tokens on end that it foresaw"""

    def __repr__(self) -> str:
        """What it has read; everything else follows from that."""
        return f"TextMemory({self.index.tokens}, prompt={self.prompt})"

    def read(self, committed: Sequence[int], prompt: int) -> None:
        """Take in what was committed since the last call; the first `prompt` tokens are the prompt."""
        tokens, self.prompt = self.index.tokens, prompt
        for token in committed[len(tokens) :]:
            if tokens:
                if len(tokens) >= prompt and (guess := self.index.propose(1)):
                    right = guess[0] == token
                    self.hits = HITS * self.hits + (1.0 - HITS) * right
                    self.run = min(self.run + 1, LONGEST_RUN) if right else 0
                last = tokens[-1]
                self.one.setdefault(last, []).append(token)
                if len(tokens) > 1:
                    self.two.setdefault((tokens[-2], last), []).append(token)
            self.index.extend((token,))

    def proposal(self, k: int) -> list[int]:
        """What the lookup would propose."""
        return self.index.propose(k)

    def numbers(self) -> list[float]:
        """Of the next position: `TEXT` numbers from 0 to about 1."""
        tokens = self.index.tokens
        if not tokens:
            return [0.0] * TEXT
        last, before = tokens[-1], tokens[-2] if len(tokens) > 1 else -1
        two, one = self.two.get((before, last)), self.one.get(last)
        proposed = self.index.propose(1)
        copied = bool(proposed)
        token = proposed[0] if proposed else two[-1] if two else one[-1] if one else -1
        return [
            math.log1p(len(two) if two else 0) / 3.0,
            share(two, token),
            math.log1p(len(one) if one else 0) / 4.0,
            share(one, token),
            float(not one),
            float(copied and self.index.source < self.prompt),
            math.log(len(tokens) - self.index.source) / 6.0 if copied else 0.0,
            self.hits,
            math.log1p(self.run) / 4.0,
        ]

    def ahead(self, temperature: float, proposed: Sequence[int]) -> list[list[float]]:
        """Of each proposed token, given that those before it are right: `AHEAD` numbers of about unit size.

        >>> memory = TextMemory()
        >>> memory.read([1, 2, 9, 1, 2], 5)
        >>> memory.ahead(0.5, [9])
        [[0.5, 0.5, 0.25, 0.25, 1.0]]
        """
        tokens = self.index.tokens
        rows: list[list[float]] = []
        if not proposed:
            return rows
        before, last = tokens[-2] if len(tokens) > 1 else -1, tokens[-1]
        for token in proposed:
            two, one = share(self.two.get((before, last)), token), share(self.one.get(last), token)
            rows.append([two, one, two * temperature, one * temperature, float(not rows)])
            before, last = last, token
        return rows


class TextReader:
    """`TextMemory.numbers` of an observation, reading on where the text goes on from the last call."""

    def __init__(self) -> None:
        self._memory = TextMemory()
        self._seen: tuple[int, RoundRecord | None] = (0, None)

    def __call__(self, o: Observation) -> list[float]:
        """-1 in all where the committed text is not known."""
        if o.committed is None:
            return [-1.0] * TEXT
        count, last = self._seen
        if not (0 < count <= len(o.past) and o.past[count - 1] is last):
            self._memory = TextMemory()
        self._memory.read(o.committed, o.prompt_length)
        self._seen = (len(o.past), o.past[-1] if o.past else None)
        return self._memory.numbers()


def text_columns(prompt: Sequence[int], text: Sequence[int]) -> list[list[float]]:
    """`TextMemory.numbers` before each token of a whole text: [len(text)][TEXT]."""
    memory, whole, rows = TextMemory(), [*prompt, *text], []
    for n in range(len(prompt), len(whole)):
        memory.read(whole[:n], len(prompt))
        rows.append(memory.numbers())
    return rows
