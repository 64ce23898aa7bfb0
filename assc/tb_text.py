"""A decoded text for TensorBoard's page "Text", which shows no colours: coloured squares mark the tokens instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from assc.core import RoundRecord
from assc.report.rounds import Kind, kinds

if TYPE_CHECKING:
    from assc.rounds_json import TextOf

MARKS: dict[Kind, str] = {"drafted": "🟦", "correction": "🟥", "bonus": "🟩", "plain": "⬜"}
LEGEND = (
    "🟦 drafted and accepted · 🟥 the draft's token was rejected, this is the target's · 🟩 bonus after a fully "
    "accepted draft · ⬜ plain decoding"
)
LONGEST = 160
"""tokens of a text that are shown"""
_SPECIAL = str.maketrans(
    {**{c: "\\" + c for c in "\\`*_{}[]()#+-.!|"}, "&": "&amp;", "<": "&lt;", ">": "&gt;", "\n": "⏎ "}
)


def sample(rounds: Sequence[RoundRecord], text_of: TextOf | None) -> str:
    """Markdown: the legend, the counts, and the text with a mark before each token.

    Without `text_of` token ids stand for the text.
    """
    parts: list[str] = []
    shown = 0
    for record in rounds:
        if shown >= LONGEST:
            parts.append("…")
            break
        names = kinds(record.drafted, record.accepted, record.emitted)
        for token, kind in zip(record.tokens, names, strict=True):
            parts.append(MARKS[kind] + _shown(token, text_of))
        shown += len(record.tokens)
    drafted, accepted = sum(r.drafted for r in rounds), sum(r.accepted for r in rounds)
    counts = f"{len(rounds)} rounds, {drafted} tokens drafted, {accepted} accepted, {drafted - accepted} rejected"
    return f"{LEGEND}\n\n{counts}\n\n{''.join(parts)}"


def _shown(token: int, text_of: TextOf | None) -> str:
    if text_of is None:
        return f"{token} "
    return text_of(token).translate(_SPECIAL)
