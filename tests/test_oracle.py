"""The optimum equals brute force over the real replay backend, also where a cold draft must catch up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tiny_traces import COSTS, tiny_trace

from assc.actions import ActionTable
from assc.core import ROLLBACK, Action
from assc.costs import CostModel, DrafterCost
from assc.evaluate import evaluate
from assc.markov import MARKOV_COSTS, MarkovSource, markov_requests
from assc.oracle import ladder, optimum, static_table, tuned_static
from assc.oracle_policy import OraclePolicy
from assc.registry import make_policy, policy_factory, policy_names
from assc.replay import ReplayBackend
from assc.run import run_request
from assc.trace import DrafterInfo, Header, Trace
from assc.vector_replay import FlatTrace


def random_trace(seed: int, *, length: int, k_max: int = 3, second: str = "nothing", n: int = 1) -> Trace:
    """A trace of two drafters with random agreement."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(max(1, length - 2), length + 1, n)
    total = int(lengths.sum())
    left = np.concatenate([np.arange(t, 0, -1) for t in lengths])
    drafters = (DrafterInfo("a", "model", "drafts"), DrafterInfo("b", "x", second))  # type: ignore[arg-type]
    columns: dict[str, Any] = {
        "id": np.array([f"r{i}" for i in range(n)]),
        "category": np.array(["c"] * n),
        "split": np.array(["train", "held-out"] * n)[:n],
        "temperature": np.zeros(n),
        "seed": np.arange(n, dtype=np.uint64),
        "budget": np.full(n, length, np.int32),
        "finish": np.where(lengths == length, 3, 0).astype(np.int8),
        "prompt_ids": np.ones(2 * n, np.int32),
        "prompt_offsets": 2 * np.arange(n + 1),
        "offsets": np.concatenate([[0], np.cumsum(lengths)]),
        "tokens": rng.integers(0, 9, total).astype(np.int32),
        "target_entropy": rng.random(total).astype(np.float32),
        "target_top1": rng.random(total).astype(np.float32),
        "match": np.full(total, -1, np.int8),
    }
    for name in "ab":
        avail = np.full(total, k_max) if name == "a" else k_max * rng.integers(0, 2, total)
        columns[f"avail/{name}"] = avail.astype(np.int8)
        columns[f"acc/{name}"] = np.minimum(np.minimum(rng.geometric(0.35, total) - 1, avail), left).astype(np.int8)
    return Trace(Header("greedy", k_max, drafters), columns)


def costs(seed: int) -> CostModel:
    """Random costs in which catching up matters a lot."""
    rng = np.random.default_rng(seed)
    own = {}
    for name in "ab":
        step, call = rng.uniform(0, 0.4), rng.uniform(0, 0.1)
        own[name] = DrafterCost(step, per_catch_up=rng.uniform(0.3, 1.0) * (step + call), per_call=call)
    return CostModel(
        1.0, rng.uniform(0, 0.1), rng.uniform(0, 0.01), own, 0.05, per_emitted=0.01, static_kv=bool(seed % 2)
    )


def schedules(backend: ReplayBackend, request: Any, prefix: tuple[Action, ...]) -> Iterator[float]:
    """Σseconds of every schedule that starts with `prefix`."""
    backend.reset(request)
    total = sum(backend.step(a).seconds for a in prefix)
    if backend.done:
        yield total
        return
    for action in (ROLLBACK, *(Action(d, k) for d in "ab" for k in range(1, 4))):
        yield from schedules(backend, request, (*prefix, action))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("second", ["nothing", "committed", "drafts"])
def test_the_optimum_is_that_of_brute_force(seed: int, second: str) -> None:
    trace, model = random_trace(seed, length=5, second=second), costs(seed)
    backend = ReplayBackend(trace, model)
    best = min(schedules(backend, trace.request(0), ()))
    found = optimum(FlatTrace(trace, model))
    assert found.seconds[0] == pytest.approx(best, rel=1e-12)
    backend.reset(trace.request(0))
    total, n = 0.0, 0
    while not backend.done:
        record = backend.step(found.plans[0][n])
        total, n = total + record.seconds, n + record.emitted
    assert total == pytest.approx(best, rel=1e-12), "the plan does not cost what the optimum says"


def test_forgetting_the_catch_up_would_be_noticed() -> None:
    """The planted fault: pricing every call as a warm one gives another optimum on these traces."""
    wrong = 0
    for seed in range(6):
        trace, model = random_trace(seed, length=5, second="drafts"), costs(seed)
        warm = replace(model, drafters={d: replace(c, per_catch_up=0.0) for d, c in model.drafters.items()})
        wrong += optimum(FlatTrace(trace, model)).seconds[0] > optimum(FlatTrace(trace, warm)).seconds[0] + 1e-9
    assert wrong >= 3


def test_no_random_schedule_with_peeks_beats_it() -> None:
    trace = tiny_trace()
    flat = FlatTrace(trace, COSTS)
    least = optimum(flat).seconds
    backend = ReplayBackend(trace, COSTS)
    rng = np.random.default_rng(0)
    for row, request in enumerate(trace.requests()):
        for _ in range(20):
            backend.reset(request)
            total = 0.0
            while not backend.done:
                if rng.random() < 0.3:
                    backend.observe(frozenset({"draft_entropy"}))
                k = int(rng.integers(0, 6))
                total += backend.step(Action(str(rng.choice(["model", "ngram"])), k) if k else ROLLBACK).seconds
            assert total >= least[row] - 1e-12


def test_the_ladder_is_ordered() -> None:
    trace, model = random_trace(1, length=40, n=30), costs(2)
    flat = FlatTrace(trace, model)
    table = ActionTable.build(trace.drafters, [1, 2, 3])
    rungs = ladder(flat, trace.where(split="train"), trace.where(split="held-out"), table)
    assert (rungs.oracle <= rungs.best_static + 1e-12).all() and (rungs.best_static <= rungs.tuned).all()
    assert (rungs.best_static <= rungs.plain).all()
    assert rungs.fraction(float(rungs.oracle.sum())) == pytest.approx(1.0)
    assert rungs.fraction(float(rungs.tuned.sum())) == pytest.approx(0.0)
    train = trace.where(split="train")
    sums = static_table(flat, train, table).sum(0)
    assert sums[table.index(tuned_static(flat, train, table))] == sums.min()


def test_no_registered_policy_beats_it() -> None:
    trace = MarkovSource().trace(markov_requests(6, max_new_tokens=60))
    least = optimum(FlatTrace(trace, MARKOV_COSTS)).seconds
    backend = ReplayBackend(trace, MARKOV_COSTS)
    played = 0
    for name in policy_names():
        spec = getattr(policy_factory(name), "example", "") or name
        if spec.endswith(".zip"):
            continue
        policy = make_policy(spec)
        for row, request in enumerate(trace.requests()):
            seconds = run_request(backend, request, policy).seconds
            assert seconds >= least[row] * (1 - 1e-12), f"{spec} beats the optimum on request {row}"
            played += 1
    assert played >= 30


def test_as_a_policy_it_stands_beside_the_others_in_an_evaluation() -> None:
    trace = MarkovSource().trace(markov_requests(8, max_new_tokens=50))
    backend = ReplayBackend(trace, MARKOV_COSTS)
    flat = FlatTrace(trace, MARKOV_COSTS)
    static = make_policy("static:4")
    rows = evaluate(
        backend, trace.requests(), [("oracle", OraclePolicy(backend)), ("static:4", static)], seed=0, progress=False
    )
    oracle, other = (sum(r.runs[i].episode.seconds for r in rows.results) for i in (0, 1))
    assert oracle == pytest.approx(float(optimum(flat).seconds.sum()), rel=1e-12) and oracle < other
    short = replace(trace.request(0), max_new_tokens=10)
    found = run_request(backend, short, OraclePolicy(backend)).seconds
    assert found == pytest.approx(optimum(FlatTrace(trace, MARKOV_COSTS, max_new_tokens=10), [0]).seconds[0])


def test_costs_under_which_idle_peeks_pay_are_refused() -> None:
    odd = replace(COSTS, drafters={**COSTS.drafters, "model": DrafterCost(0.001, per_catch_up=0.01)})
    with pytest.raises(ValueError, match="idle peeks"):
        optimum(FlatTrace(tiny_trace(), odd))
