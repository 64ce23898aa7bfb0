"""Replay equals live on the real model: 20 requests in float32, all drafters that come with the pair."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from test_replay import ALL, FREE, play, same

from assc.core import Request
from assc.costs import CostModel, DrafterCost
from assc.engine import Engine
from assc.errors import PairError
from assc.live import LiveBackend
from assc.loading import build_engine
from assc.pairs import load_pair
from assc.record import header_of
from assc.recorder import record_request
from assc.replay import ReplayBackend
from assc.trace_build import build_trace
from assc.workloads import load_workload, make_requests, select

FLOAT32 = 1e-3
"""what entropies may differ by: in float32 the live decoder's own logits vary with the width of a block"""


def requests(encode: object, n: int, tokens: int) -> list[Request]:
    """Prompts of all categories, three temperatures in turn."""
    prompts = select(load_workload("mixed"), n, 0)
    return [
        replace(made, sampling={"mode": "gumbel", "temperature": (0.0, 0.7, 1.0)[i % 3]})
        for i, made in enumerate(make_requests(prompts, encode, max_new_tokens=tokens, seed=0))  # type: ignore[arg-type]
    ]


def check(engine: Engine, asked: list[Request], drafters: tuple[str, ...]) -> tuple[int, int]:
    """Play each request live and from its own recording; returns rounds and accepted draft tokens."""
    costs = CostModel(0.05, drafters={d: DrafterCost(0.005, 0.0005) for d in engine.drafters})
    live = LiveBackend(engine, mode="gumbel", cost_model=costs, time_source="modelled")
    header = header_of(engine, mode="gumbel", max_new_tokens=asked[0].max_new_tokens)
    rounds = accepted = 0
    for i, request in enumerate(asked):
        columns, mismatches = record_request(engine, request)
        assert mismatches == 0
        replayed = ReplayBackend(build_trace(header, [(request, "train", columns, 0)]), costs)
        fields = ALL if i % 2 else FREE
        one, two = (play(b, request, i, fields, drafters) for b in (live, replayed))
        for a, b in zip(one[0], two[0], strict=True):
            same(a, b, FLOAT32)
            rounds, accepted = rounds + 1, accepted + a.accepted
        assert all(np.abs(v - w).max() <= FLOAT32 for v, w in zip(one[2], two[2], strict=True))
    return rounds, accepted


@pytest.mark.model
@pytest.mark.timeout(1800)
def test_twenty_requests_of_smollm2_replay_as_they_play() -> None:
    try:
        pair = load_pair("smollm2", device="cpu", dtype="float32")
    except PairError as error:
        pytest.skip(str(error))
    engine = build_engine(pair)
    rounds, accepted = check(engine, requests(pair.encode, 20, 12), tuple(engine.drafters))
    assert rounds > 60 and accepted > 10, (rounds, accepted)
