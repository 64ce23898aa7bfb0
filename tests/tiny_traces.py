"""Traces of the `tiny` pair for tests, recorded once per process."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from assc.core import Mode, Request
from assc.costs import CostModel, DrafterCost
from assc.engine import Engine
from assc.loading import build_engine
from assc.record import header_of
from assc.recorder import record_request
from assc.tiny import tiny_pair
from assc.trace import Trace
from assc.trace_build import build_trace

COSTS = CostModel(
    target_fixed=0.02,
    target_per_token=0.0003,
    target_per_tile=0.004,
    target_per_kv=1e-6,
    drafters={
        "model": DrafterCost(per_step=0.002, per_catch_up=0.0004, per_call=0.0005),
        "ngram": DrafterCost(per_step=0.0, per_call=0.0001),
    },
    per_emitted=0.0002,
    overhead=0.0007,
    label="test",
    static_kv=True,
)


@cache
def tiny_engine(k_max: int = 16) -> Engine:
    pair = tiny_pair()
    engine = build_engine(pair, k_max=k_max)
    engine.eos_ids = (*pair.eos_token_ids, 11, 29)  # so that some texts end before their budget
    return engine


def prompts(n: int) -> list[tuple[int, ...]]:
    """Prompts that repeat themselves in part, so that the n-gram drafter finds something."""
    rng = np.random.default_rng(3)
    made = []
    for i in range(n):
        word = rng.integers(2, 98, 4 + i % 3).tolist()
        made.append(tuple([*word, *rng.integers(2, 98, 3).tolist(), *word[: 2 + i % 2]]))
    return made


def tiny_requests(n: int, mode: Mode, *, tokens: int = 40, temperatures: tuple[float, ...] = (0.0,)) -> list[Request]:
    return [
        Request(p, tokens, seed=100 + i, id=f"t{i}", category="ab"[i % 2], sampling={"mode": mode, "temperature": t})
        for i, p in enumerate(prompts(n))
        for t in temperatures
    ]


@cache
def tiny_trace(mode: Mode = "gumbel", n: int = 3, tokens: int = 32, k_max: int = 16) -> Trace:
    engine = tiny_engine(k_max)
    temperatures = (0.0,) if mode == "greedy" else (0.0, 0.5, 1.0)
    requests = tiny_requests(n, mode, tokens=tokens, temperatures=temperatures)
    recorded: list[tuple[Request, str, dict[str, Any], int]] = []
    for i, request in enumerate(requests):
        recorded.append((request, "held-out" if i % 3 == 0 else "train", *record_request(engine, request)))
    return build_trace(header_of(engine, mode=mode, max_new_tokens=tokens), recorded)
