"""The vectorised replay plays the rounds of the single one, to the bit."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_traces import COSTS, tiny_trace

from assc.core import Action
from assc.observe import FIELDS, Featurizer
from assc.replay import ReplayBackend
from assc.trace import FINISHES
from assc.trace_cli import drafter_table, static_rounds
from assc.vector_replay import GOING, FlatTrace, Rounds, static_seconds


@pytest.mark.parametrize("peek", [False, True])
@pytest.mark.parametrize("budget", [None, 9])
def test_rounds_are_those_of_the_single_backend(peek: bool, budget: int | None) -> None:
    trace = tiny_trace()
    flat = FlatTrace(trace, COSTS, max_new_tokens=budget)
    backend = ReplayBackend(trace, COSTS)
    needs = Featurizer(tuple(FIELDS)).needs if peek else frozenset()
    rng = np.random.default_rng(0)
    for row in range(len(trace)):
        request = trace.request(row)
        if budget is not None:
            request = type(request)(**{**request.__dict__, "max_new_tokens": budget})
        many = Rounds(flat, [row, row], peek=peek)
        backend.reset(request)
        while not backend.done:
            backend.observe(needs)
            many.look()
            drafter, k = int(rng.integers(-1, 2)), int(rng.integers(1, 17))
            record = backend.step(Action(trace.drafters[drafter], k) if drafter >= 0 else Action(None, 0))
            played = many.play(np.full(2, drafter), np.full(2, k))
            for lane in range(2):
                assert (played.drafted[lane], played.accepted[lane], played.emitted[lane]) == (
                    record.drafted,
                    record.accepted,
                    record.emitted,
                )
                assert (played.steps[lane], played.catch_up[lane]) == (record.draft_steps, record.catch_up)
                assert played.seconds[lane] == record.seconds and played.draft_seconds[lane] == record.draft_seconds
                code = played.finish[lane]
                assert (None if code == GOING else FINISHES[code]) == record.finish


def test_static_play_adds_up() -> None:
    trace = tiny_trace()
    backend = ReplayBackend(trace, COSTS)
    seconds, tokens, rounds, drafted, accepted = static_seconds(FlatTrace(trace, COSTS), range(len(trace)), "model", 3)
    for row in range(len(trace)):
        backend.reset(trace.request(row))
        records = []
        while not backend.done:
            records.append(backend.step(Action("model", 3)))
        assert seconds[row] == pytest.approx(sum(r.seconds for r in records), rel=1e-12)
        assert (tokens[row], rounds[row]) == (sum(r.emitted for r in records), len(records))
        assert (drafted[row], accepted[row]) == (sum(r.drafted for r in records), sum(r.accepted for r in records))


def test_the_table_of_drafters_counts_static_rounds() -> None:
    """`trace info` counts rounds by itself, without costs."""
    trace = tiny_trace("gumbel")
    flat = FlatTrace(trace, COSTS)
    for drafter in trace.drafters:
        for k in (1, 3, 16):
            expected = static_seconds(flat, range(len(trace)), drafter, k)[2]
            assert [static_rounds(trace, drafter, r, k) for r in range(len(trace))] == expected.tolist()
    rows = [line.split() for line in drafter_table(trace, "held-out", "category").splitlines()[1:]]
    held = [r for r in range(len(trace)) if trace.columns["split"][r] == "held-out"]
    whole = [row for row in rows if row[2] == "all"]
    assert sum(int(row[3]) for row in whole) == len(held) * len(trace.drafters)
    assert {row[2] for row in rows} == {"all", *trace.columns["category"][held].tolist()}
