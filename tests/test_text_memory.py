"""What the committed text says of its next token: against counting from scratch, for any way of reading it."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from assc.core import ROLLBACK, Observation, RoundRecord
from assc.ngram_index import NgramIndex
from assc.text_memory import HITS, RECENT, TextMemory, TextReader, text_columns


def text(rng: random.Random, n: int) -> list[int]:
    """Few different tokens, so that everything recurs."""
    return [rng.choice((1, 1, 2, 3, 4)) for _ in range(n)]


def share(followers: Sequence[int], token: int) -> float:
    last = list(followers)[-RECENT:]
    return sum(t == token for t in last) / (len(last) + 1) if last else 0.0


def by_hand(whole: Sequence[int], prompt: int) -> list[float]:
    """The numbers of the next position, by looking through the whole text."""
    two = [whole[i] for i in range(2, len(whole)) if tuple(whole[i - 2 : i]) == tuple(whole[-2:])]
    one = [whole[i] for i in range(1, len(whole)) if whole[i - 1] == whole[-1]]
    hits, run = 0.5, 0
    index = NgramIndex(4, 2)
    for i, token in enumerate(whole):
        guess = index.propose(1)
        if i >= prompt and guess:
            hits = HITS * hits + (1 - HITS) * (guess[0] == token)
            run = run + 1 if guess[0] == token else 0
        index.extend([token])
    guess = index.propose(1)
    token = guess[0] if guess else two[-1] if two else one[-1] if one else -1
    return [
        math.log1p(len(two)) / 3,
        share(two, token),
        math.log1p(len(one)) / 4,
        share(one, token),
        float(not one),
        float(bool(guess) and index.source < prompt),
        math.log(len(whole) - index.source) / 6 if guess else 0.0,
        hits,
        math.log1p(min(run, 64)) / 4,
    ]


def test_numbers_are_those_of_the_whole_text() -> None:
    for seed in range(20):
        rng = random.Random(seed)
        prompt, behind = text(rng, rng.randint(1, 9)), text(rng, 25)
        columns = text_columns(prompt, behind)
        assert len(columns) == len(behind)
        for n, row in enumerate(columns):
            assert row == by_hand([*prompt, *behind[:n]], len(prompt))


def test_ahead_judges_each_proposed_token_by_the_text_so_far() -> None:
    memory = TextMemory()
    memory.read([1, 2, 3, 1, 2, 4, 1, 2], 3)
    assert memory.proposal(2) == [4, 1]
    # 2 of the followers of (1, 2) are 3 and 4; of (2, 4) it is 1
    assert memory.ahead(0.5, [4, 1]) == [[1 / 3, 1 / 3, 1 / 6, 1 / 6, 1.0], [0.5, 0.5, 0.25, 0.25, 0.0]]
    assert memory.ahead(0.5, []) == TextMemory().ahead(0.5, []) == []


def test_reading_on_equals_reading_anew() -> None:
    """Rounds of several tokens, repeated looks, other requests in between, and rounds in which nobody asked."""
    rng = random.Random(1)
    reader, streams = TextReader(), [(text(rng, 6), text(rng, 40)) for _ in range(3)]
    past: list[list[RoundRecord]] = [[] for _ in streams]
    at = [0] * len(streams)
    for _ in range(120):
        i = rng.randrange(len(streams))
        prompt, behind = streams[i]
        asked = rng.random() < 0.7
        committed = (*prompt, *behind[: at[i]]) if asked else None
        seen = Observation(at[i], len(prompt), 99, 16, 0.0, tuple(past[i]), 0.1, committed=committed)
        assert reader(seen) == ([-1.0] * 9 if committed is None else by_hand(committed, len(prompt)))
        if at[i] < len(behind) and rng.random() < 0.7:
            n = min(len(behind) - at[i], rng.randint(1, 3))
            past[i].append(RoundRecord(len(past[i]), at[i], ROLLBACK, 0, 0, n, tuple(behind[at[i] : at[i] + n]), 0.1))
            at[i] += n
