"""Stop rules, asked at every committed position, so that a block is cut where plain decoding would have stopped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from assc.core import FinishReason
from assc.errors import RequestError

StoppingCriterion = Callable[[Tensor, Any], Any]
"""transformers' contract: (input_ids [1, L], scores) -> bool or bool tensor [1]"""


class IncrementalText:
    """Turns a growing token list into text that only ever grows.

    A character that is split over tokens is held back until it is complete. Decoding starts a few tokens back, since
    a tokenizer may join or strip at word borders.
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._tokens: list[int] = []
        self._start = 0
        """first token of the decoded window"""
        self._done = 0
        """tokens whose text is out"""
        self.text = ""

    def push(self, tokens: Sequence[int]) -> str:
        """Add tokens, return the new text (perhaps empty)."""
        self._tokens.extend(tokens)
        before = self._decode(self._start, self._done)
        now = self._decode(self._start, len(self._tokens))
        if now.endswith("\ufffd") or len(now) <= len(before):
            return ""
        new = now[len(before) :]
        self._start, self._done = self._done, len(self._tokens)
        self.text += new
        return new

    def flush(self) -> str:
        """The text still held back, with replacement characters where a character never became complete."""
        before = self._decode(self._start, self._done)
        new = self._decode(self._start, len(self._tokens))[len(before) :]
        self._start = self._done = len(self._tokens)
        self.text += new
        return new

    def _decode(self, start: int, end: int) -> str:
        if start == end:
            return ""
        text: str = self._tokenizer.decode(
            self._tokens[start:end], skip_special_tokens=self._skip, clean_up_tokenization_spaces=False
        )
        return text


class Stopper:
    """EOS ids, stop strings and custom criteria of one request.

    `check` must see every committed token once, in order. Of several stop strings the one that completes first in
    the text wins; `matched` then names it and `text` ends with it, unless it is a special token, which stops too but
    is no part of the text.
    """

    def __init__(
        self,
        *,
        eos_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
        criteria: Sequence[StoppingCriterion] = (),
        tokenizer: Any = None,
    ) -> None:
        if any(not s for s in stop):
            raise RequestError("a stop string is empty; give at least one character")
        if stop and tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and this decoder has none")
        self.eos_ids = frozenset(eos_ids)
        self.stop = tuple(stop)
        self.criteria = tuple(criteria)
        self.matched: str | None = None
        self._text = IncrementalText(tokenizer) if stop else None
        added = tokenizer.get_added_vocab() if stop and hasattr(tokenizer, "get_added_vocab") else {}
        self._special = {added[s]: s for s in stop if s in added}

    @property
    def text(self) -> str | None:
        """The text up to and including the matched stop string, None without stop strings."""
        return self._text.text if self._text is not None else None

    def check(self, token: int, prefix: Tensor, logits: Tensor | None) -> FinishReason | None:
        """Why decoding ends with `token`, which is the last of `prefix` [1, L]; None to go on."""
        if self._text is not None:
            searched = max(0, len(self._text.text) - max(map(len, self.stop)) + 1)
            self._text.push([token])
            text = self._text.text
            ends = [(at + len(s), s) for s in self.stop if (at := text.find(s, searched)) >= 0]
            if ends:
                end, self.matched = min(ends)
                self._text.text = self._text.text[:end]
                return "stop"
            if token in self._special:  # special tokens have no place in the text
                self.matched = self._special[token]
                return "stop"
        if token in self.eos_ids:
            return "eos"
        if any(bool(torch.as_tensor(criterion(prefix, logits)).all()) for criterion in self.criteria):
            return "criteria"
        return None
