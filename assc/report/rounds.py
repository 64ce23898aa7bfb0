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
    "correction": "the draft's token was rejected, this is the target's own",
    "bonus": "bonus token of the target after a fully accepted draft",
    "plain": "plain decoding, nothing was drafted",
}


@dataclass(frozen=True)
class Token:
    """One token, how it came to be, and what the pointer shows over it."""

    text: str
    kind: Kind
    title: str


@dataclass(frozen=True)
class Round:
    """One round of the token view."""

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
    emas = [EMA_START, *ema_after(run)]
    for i, start in enumerate(run.position):
        if start >= longest:
            return
        ids = run.tokens[start : start + run.emitted[i]]
        names = kinds(run.drafted[i], run.accepted[i], run.emitted[i])
        action = f"round {i + 1}: {_action(run, i)}, accepted {run.accepted[i]} of {run.drafted[i]} drafted"
        yield Round(
            tuple(
                Token(_text(view, token), kind, "\n".join([*_facts(view, run, i, j, kind, emas[i]), action]))
                for j, (token, kind) in enumerate(zip(ids, names, strict=True))
            )
        )


def _text(view: View, token: int) -> str:
    text = None if view.texts is None else view.texts.get(str(token))
    return f"{token} " if text is None else text.replace("\n", "⏎\n")


def _action(run: RoundsOf, i: int) -> str:
    return f"K {run.k[i]} ({run.drafter[i]})" if run.k[i] else "rollback (K 0)"


def _facts(view: View, run: RoundsOf, i: int, j: int, kind: Kind, ema: float) -> list[str]:
    """How token `j` of round `i` came to be, its chance of acceptance before, and the target's entropy there."""
    came = f"{KINDS[kind]}" + (f" (draft position {j + 1})" if kind in ("drafted", "correction") else "")
    facts = [came]
    chances = run.chances[i] if run.chances else ()
    if kind in ("drafted", "correction"):
        predicted = f"accept probability {chances[j]:.2f} (predicted)" if j < len(chances) else None
        facts.append(predicted or f"accept probability not predicted, acceptance EMA {ema:.2f}")
    entropy = _entropy(view, run, i, j)
    facts.append("entropy unknown" if entropy is None else f"entropy {entropy:.2f} nats")
    return facts


def _entropy(view: View, run: RoundsOf, i: int, j: int) -> float | None:
    """The target's entropy at this token: of the trace, else of the round for its last token."""
    at = run.position[i] + j
    if at < len(view.token_entropy) and view.token_entropy[at] is not None:
        return view.token_entropy[at]
    return run.entropy[i] if j == run.emitted[i] - 1 else None
