"""Replay equals live, round by round; the kept fault is named in each test."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tiny_traces import COSTS, tiny_engine, tiny_trace

from assc.core import ROLLBACK, Action, Backend, Mode, Observation, Request, RoundRecord
from assc.errors import RequestError, TraceError
from assc.kv import bucket_length
from assc.live import LiveBackend
from assc.observe import FIELDS, Featurizer
from assc.replay import ReplayBackend
from assc.trace import FINISHES, Trace
from assc.trace_rules import kv_slots

ALL = Featurizer(tuple(FIELDS))
FREE = Featurizer()


def play(
    backend: Backend,
    request: Request,
    seed: int,
    needs: Featurizer | None,
    drafters: tuple[str, ...] = ("model", "ngram"),
) -> tuple[list[RoundRecord], list[Observation], list[np.ndarray]]:
    """A random schedule over rollback, both drafters and K up to 16 (never a table's K only)."""
    rng = np.random.default_rng(seed)
    records, seen, vectors = [], [], []
    backend.reset(request)
    while not backend.done:
        # a policy may look at the paid fields in some rounds only
        fields = needs if needs is not None else (ALL if rng.random() < 0.5 else FREE)
        observation = backend.observe(fields.needs)
        vectors.append(ALL(observation))
        seen.append(replace(observation, past=()))
        drafter = drafters[rng.integers(len(drafters))]
        k = int(rng.integers(0, 17))
        records.append(backend.step(ROLLBACK if k == 0 or rng.random() < 0.25 else Action(drafter, k)))
    return records, seen, vectors


def same(a: RoundRecord, b: RoundRecord, tolerance: float = 0.0) -> None:
    """Every field equal; entropies to float32, or to `tolerance` where live itself varies with the block width."""
    plain = {"target_entropy": None, "target_top1": None}
    assert replace(a, **plain) == replace(b, **plain)
    for name in plain:
        x, y = getattr(a, name), getattr(b, name)
        assert (x is None) == (y is None)
        assert x is None or abs(np.float32(x) - np.float32(y)) <= tolerance


@pytest.mark.parametrize("mode", ["greedy", "gumbel"])
@pytest.mark.parametrize("needs", [FREE, ALL, None], ids=["free", "peeked", "mixed"])
def test_replay_is_live_round_by_round(mode: Mode, needs: Featurizer | None) -> None:
    trace = tiny_trace(mode)
    live = LiveBackend(tiny_engine(), mode=mode, cost_model=COSTS, time_source="modelled")
    replayed = ReplayBackend(trace, COSTS)
    accepted = {"model": 0, "ngram": 0}
    assert replayed.table == live.table and replayed.cost_ratio == live.cost_ratio
    for row, request in enumerate(trace.requests()):
        for seed in range(1):
            one, two = (play(b, request, 10 * row + seed, needs) for b in (live, replayed))
            assert len(one[0]) == len(two[0])
            for a, b in zip(one[0], two[0], strict=True):
                same(a, b)
                if a.action.drafter:
                    accepted[a.action.drafter] += a.accepted
            for v, w in zip(one[2], two[2], strict=True):
                assert (v == w).all()
    assert min(accepted.values()) > 0, f"this pair shows nothing: {accepted}"


def test_requests_end_by_eos_in_some_traces_and_by_budget_in_others() -> None:
    finishes = {int(f) for m in ("greedy", "gumbel") for f in tiny_trace(m).columns["finish"]}  # type: ignore[arg-type]
    assert len(finishes) == 2


def test_a_smaller_budget_replays_and_a_larger_one_is_refused() -> None:
    trace = tiny_trace()
    live = LiveBackend(tiny_engine(), mode="gumbel", cost_model=COSTS, time_source="modelled")
    replayed = ReplayBackend(trace, COSTS)
    rows = np.flatnonzero(trace.columns["finish"] == FINISHES.index("length"))
    cut = trace.request(int(rows[0]))
    request = replace(cut, max_new_tokens=11)
    for a, b in zip(play(live, request, 5, ALL)[0], play(replayed, request, 5, ALL)[0], strict=True):
        same(a, b)
    with pytest.raises(RequestError, match="recorded up to 32 tokens"):
        replayed.reset(replace(cut, max_new_tokens=33))


def test_what_the_trace_does_not_hold_is_refused() -> None:
    trace = tiny_trace()
    backend = ReplayBackend(trace, COSTS)
    request = trace.request(0)
    with pytest.raises(RequestError, match="not in the trace"):
        backend.reset(replace(request, seed=1))
    with pytest.raises(RequestError, match="not in the trace"):
        backend.reset(replace(request, prompt_ids=(5, 6)))
    with pytest.raises(RequestError, match="mode 'greedy'"):
        backend.reset(replace(request, sampling={"mode": "greedy"}))
    with pytest.raises(RuntimeError, match="reset"):
        _ = backend.done
    backend.reset(request)
    with pytest.raises(RequestError, match="unknown drafter 'other'"):
        backend.step(Action("other", 2))
    with pytest.raises(RequestError, match="above K_max"):
        backend.step(Action("model", 17))


def test_a_rejection_trace_is_refused_unless_approximate() -> None:
    trace = tiny_trace()
    rejected = Trace(replace(trace.header, mode="rejection"), trace.columns, "r.npz")
    with pytest.raises(TraceError, match=r"r\.npz was recorded in mode rejection.*--approximate"):
        ReplayBackend(rejected, COSTS)
    assert ReplayBackend(rejected, COSTS, approximate=True).mode == "rejection"


def test_the_cost_model_has_to_know_every_drafter() -> None:
    with pytest.raises(TraceError, match="no drafter 'ngram'"):
        ReplayBackend(tiny_trace(), replace(COSTS, drafters={"model": COSTS.drafters["model"]}))


def test_slots_are_those_of_the_decoder() -> None:
    assert all(kv_slots(n) == bucket_length(n) for n in range(1, 600))
