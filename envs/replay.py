"""The registered environments over a recorded trace and over the synthetic source: no model, modelled seconds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from assc.actions import ActionTable
from assc.core import Request
from assc.costs import CostModel
from assc.loads import Load, LoadedBackend
from assc.observe import DEFAULT_FIELDS
from assc.replay import ReplayBackend
from assc.shipped import shipped_costs, shipped_trace
from assc.trace import Trace
from assc.trace_io import read_trace
from envs.chain import ChainedEnv
from envs.decode import SpecDecodeEnv
from envs.draft_step import DraftStepEnv


def replay_env(
    *,
    trace: Trace | str | Path | None = None,
    cost_model: CostModel | None = None,
    split: str | None = "train",
    categories: Sequence[str] = (),
    temperatures: Sequence[float] = (),
    k_values: Sequence[int] | None = None,
    reward: str = "dinkelbach",
    fields: Sequence[str] = DEFAULT_FIELDS,
    chain: int = 1,
    loads: Sequence[Load] = (),
    approximate: bool = False,
) -> SpecDecodeEnv:
    """Entry point of `assc/SpecDecode-Replay-v0`.

    `trace` (an object or a path) and `cost_model` default to the ones that come with the package. `split`,
    `categories` and `temperatures` choose requests. `chain` requests make an episode; under `loads` (`assc.loads`) the
    costs switch while a request is decoded. Raises `TraceError` for a trace that cannot be replayed.
    """
    loaded = trace if isinstance(trace, Trace) else shipped_trace() if trace is None else read_trace(trace)
    backend = ReplayBackend(loaded, cost_model or shipped_costs(), approximate=approximate)
    rows = loaded.where(split=split, categories=categories, temperatures=temperatures)
    table = None if k_values is None else ActionTable.build(backend.table.drafters, k_values)
    played = LoadedBackend(backend, loads) if loads else backend
    requests = loaded.requests(rows)
    if chain != 1:
        return ChainedEnv(played, requests, chain=chain, reward=reward, fields=fields, table=table)
    return SpecDecodeEnv(played, requests, reward=reward, fields=fields, table=table)


def markov_env(
    *,
    requests: int | Sequence[Request] = 64,
    cost_model: CostModel | None = None,
    max_new_tokens: int = 96,
    k_values: Sequence[int] | None = None,
    reward: str = "dinkelbach",
    fields: Sequence[str] = DEFAULT_FIELDS,
) -> SpecDecodeEnv:
    """Entry point of `assc/SpecDecode-Markov-v0`: `requests` synthetic requests, or given ones (see `assc.markov`)."""
    from assc.markov import MARKOV_COSTS, MarkovBackend, markov_requests

    backend = MarkovBackend(cost_model=cost_model or MARKOV_COSTS)
    made = markov_requests(requests, max_new_tokens=max_new_tokens) if isinstance(requests, int) else list(requests)
    table = None if k_values is None else ActionTable.build(backend.table.drafters, k_values)
    return SpecDecodeEnv(backend, made, reward=reward, fields=fields, table=table)


def replay_step_env(
    *,
    trace: Trace | str | Path | None = None,
    cost_model: CostModel | None = None,
    split: str | None = "train",
    categories: Sequence[str] = (),
    temperatures: Sequence[float] = (),
    reward: str = "dinkelbach",
    fields: Sequence[str] = DEFAULT_FIELDS,
    drafter: str | None = None,
    m: int = 0,
) -> DraftStepEnv:
    """Entry point of `assc/DraftStep-Replay-v0`; arguments as in `replay_env` and `DraftStepEnv`.

    Raises `TraceError` for a trace without confidences per draft step.
    """
    loaded = trace if isinstance(trace, Trace) else shipped_trace() if trace is None else read_trace(trace)
    backend = ReplayBackend(loaded, cost_model or shipped_costs())
    requests = loaded.requests(loaded.where(split=split, categories=categories, temperatures=temperatures))
    return DraftStepEnv(backend, requests, reward=reward, fields=fields, drafter=drafter, m=m)
