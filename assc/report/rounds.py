"""Stored rounds as a reader sees them: how each token came to be, and the running acceptance."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from assc.observe import EMA_DECAY, EMA_START
from assc.report.nouns import RoundsOf, View

Kind = Literal["drafted", "correction", "bonus", "plain"]
KINDS: dict[Kind, str] = {
    "drafted": "drafted and accepted",
    "correction": "the target's correction after a rejection",
    "bonus": "bonus token after a fully accepted draft",
    "plain": "plain decoding, nothing was drafted",
}


@dataclass(frozen=True)
class Token:
    """One token and how it came to be."""

    text: str
    kind: Kind


@dataclass(frozen=True)
class Round:
    """One round of the token view; `title` is its hover text."""

    title: str
    tokens: tuple[Token, ...]


def kinds(drafted: int, accepted: int, emitted: int) -> list[Kind]:
    """How each token of one round came to be.

    >>> kinds(4, 2, 3), kinds(2, 2, 3), kinds(0, 0, 1)
    (['drafted', 'drafted', 'correction'], ['drafted', 'drafted', 'bonus'], ['plain'])
    """
    last: Kind = "plain" if not drafted else "bonus" if accepted == drafted else "correction"
    return ["drafted" if i < accepted else last for i in range(emitted)]


def ema_after(run: RoundsOf) -> list[float]:
    """The observation `acceptance_ema` after each round."""
    value, found = EMA_START, []
    for drafted, accepted in zip(run.drafted, run.accepted, strict=True):
        if drafted:
            value = EMA_DECAY * value + (1 - EMA_DECAY) * accepted / drafted
        found.append(value)
    return found


def token_rounds(view: View, run: RoundsOf, longest: int) -> Iterator[Round]:
    """The rounds that begin before `longest` tokens."""
    emas = ema_after(run)
    for i, start in enumerate(run.position):
        if start >= longest:
            return
        ids = run.tokens[start : start + run.emitted[i]]
        names = kinds(run.drafted[i], run.accepted[i], run.emitted[i])
        tokens = tuple(Token(_text(view, token), kind) for token, kind in zip(ids, names, strict=True))
        yield Round(_title(run, i, emas[i]), tokens)


def _text(view: View, token: int) -> str:
    text = None if view.texts is None else view.texts.get(str(token))
    return f"{token} " if text is None else text.replace("\n", "⏎\n")


def _title(run: RoundsOf, i: int, ema: float) -> str:
    """What the pointer shows over a round."""
    entropy = run.entropy[i]
    action = f"K {run.k[i]} ({run.drafter[i]})" if run.k[i] else "rollback"
    parts = [
        f"round {i + 1}: {action}",
        f"drafted {run.drafted[i]}",
        f"accepted {run.accepted[i]}",
        "entropy unknown" if entropy is None else f"entropy {entropy:.2f} nats",
        f"acceptance EMA {ema:.2f}",
        f"{1000 * run.seconds[i]:.1f} ms",
    ]
    return ", ".join(parts)
