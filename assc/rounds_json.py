"""The rounds of a few requests as part of a result file (`eval.py --rounds N`): columns, and each token's text once."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from assc.core import Episode, Request, RoundRecord

if TYPE_CHECKING:
    from assc.results import RequestResult

COLUMNS: tuple[str, ...] = ("position", "drafter", "k", "drafted", "accepted", "emitted", "seconds", "target_entropy")
"""one list each per run, one entry per round; `drafter` is an index into `drafters`, -1 for a rollback"""

EntropiesOf = Callable[[Request], Sequence[float]]
TextOf = Callable[[int], str]


@dataclass(frozen=True)
class KeptRounds:
    """How many requests keep their rounds, and what is known about their tokens besides the records."""

    requests: int
    token_text: TextOf | None = None
    """text of one token id, where there is a tokenizer"""
    entropies: EntropiesOf | None = None
    """the target's entropy at each token of a request's text, where a trace knows it"""


def spread(requests: Sequence[Request], n: int) -> list[int]:
    """Which `n` requests to look at: of as many categories, prompts and temperatures as there are, the earlier first.

    Indices in ascending order; all of them where there are fewer.
    """
    taken: Counter[object] = Counter()

    def marks(i: int) -> tuple[object, ...]:
        request = requests[i]
        return ("category", request.category), ("prompt", request.id or i), ("temperature", request.temperature)

    left = list(range(len(requests)))
    chosen: list[int] = []
    while left and len(chosen) < n:
        best = min(left, key=lambda i: ([taken[mark] for mark in marks(i)], i))
        left.remove(best)
        chosen.append(best)
        taken.update(marks(best))
    return sorted(chosen)


def rounds_json(results: Sequence[RequestResult], labels: Sequence[str], kept: KeptRounds) -> dict[str, Any]:
    """Rounds of some requests of the first repeat under every policy, chosen by `spread`.

    `requests` lists them with one entry of `runs` per policy: `tokens` are the emitted ids in order, `emitted` says
    how many of them each round committed. `token_texts` maps an id to its text, null where no tokenizer is known.
    `token_entropy` is the target's at every token of the recorded text, null without a trace; `accept_chances` has one
    list per round (`RoundRecord.accept_chances`), null for a policy that predicts none.
    """
    first = [r for r in results if r.repeat == 0]
    chosen = [first[i] for i in spread([r.request for r in first], kept.requests)]
    episodes = [run.episode for result in chosen for run in result.runs]
    drafters = sorted({r.action.drafter for e in episodes for r in e.rounds if r.action.drafter is not None})
    ids = sorted({token for episode in episodes for token in episode.tokens})
    text = kept.token_text
    return {
        "drafters": drafters,
        "token_texts": None if text is None else {str(i): text(i) for i in ids},
        "requests": [_request(result, labels, drafters, kept) for result in chosen],
    }


def _request(result: RequestResult, labels: Sequence[str], drafters: Sequence[str], kept: KeptRounds) -> dict[str, Any]:
    request = result.request
    known: Sequence[float] = () if kept.entropies is None else kept.entropies(request)
    return {
        "index": result.index,
        "id": request.id,
        "category": request.category,
        "temperature": request.temperature,
        "prompt_tokens": len(request.prompt_ids),
        "token_entropy": [_entropy(float(h)) for h in known] if len(known) else None,
        "runs": [
            {"policy": label, **_run(run.episode, drafters, known)}
            for label, run in zip(labels, result.runs, strict=True)
        ],
    }


def _run(episode: Episode, drafters: Sequence[str], known: Sequence[float]) -> dict[str, Any]:
    rounds = episode.rounds
    columns: Mapping[str, list[Any]] = {
        "position": [r.position for r in rounds],
        "drafter": [-1 if r.action.drafter is None else drafters.index(r.action.drafter) for r in rounds],
        "k": [r.planned for r in rounds],
        "drafted": [r.drafted for r in rounds],
        "accepted": [r.accepted for r in rounds],
        "emitted": [r.emitted for r in rounds],
        "seconds": [_digits(r.seconds) for r in rounds],
        "target_entropy": [_entropy(known_entropy(r, known)) for r in rounds],
    }
    chances = [[_digits(p, 3) for p in r.accept_chances] for r in rounds]
    return {
        "finish": episode.finish,
        "tokens": list(episode.tokens),
        **columns,
        "accept_chances": chances if any(chances) else None,
    }


def known_entropy(record: RoundRecord, known: Sequence[float]) -> float | None:
    """Entropy at the last emitted token: of the record, else of `known`, the trace's for each token of the text."""
    value, last = record.target_entropy, record.position + record.emitted - 1
    if value is None and last < len(known):
        value = float(known[last])
    return None if value is None or not math.isfinite(value) or value < 0 else value


def _entropy(value: float | None) -> float | None:
    """Rounded; None for an unknown one, which is NaN or negative in a trace."""
    return None if value is None or not math.isfinite(value) or value < 0 else _digits(value, 4)


def _digits(value: float, digits: int = 6) -> float:
    """Rounded to significant digits.

    >>> _digits(0.0123456789)
    0.0123457
    """
    return float(f"{value:.{digits}g}")
