"""The registered environments over live models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from assc.actions import ActionTable
from assc.core import Backend, Mode, Request
from assc.costs import CostModel
from assc.errors import RequestError
from assc.observe import DEFAULT_FIELDS
from assc.workloads import Split, load_workload, make_requests
from envs.decode import SpecDecodeEnv
from envs.draft_step import DraftStepEnv
from envs.sources import fitting


def live_env(
    *,
    pair: str = "smollm2",
    workload: str = "mixed",
    split: Split | None = "train",
    mode: Mode = "greedy",
    k_values: Sequence[int] | None = None,
    reward: str = "dinkelbach",
    fields: Sequence[str] = DEFAULT_FIELDS,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    time_source: Literal["measured", "modelled"] = "modelled",
    cost_model: CostModel | None = None,
    backend: Backend | Callable[[], Backend] | None = None,
    requests: Sequence[Request] | None = None,
) -> SpecDecodeEnv:
    """Entry point of `assc/SpecDecode-Live-v0` (modelled seconds) and `assc/SpecDecode-LiveMeasured-v0`.

    `k_values` restricts K to a part of the backend's table. Modelled seconds come from `cost_model`, or from a short
    calibration here: they repeat within this environment, and across processes only with the same `cost_model`.
    Prompts longer than the model's positions are left out.
    `backend` (an object, or a function that makes one per environment) replaces the live models, `requests` the
    workload; a backend without a tokenizer of its own needs both.
    """
    encode: Callable[[str], Sequence[int]] | None = None
    max_positions: int | None = None
    if backend is None:
        from assc.live import LiveBackend
        from assc.pairs import load_pair

        loaded = load_pair(pair)
        encode = loaded.encode
        live = LiveBackend.from_pair(
            loaded, mode=mode, time_source=time_source, cost_model=cost_model, temperature=temperature
        )
        max_positions = live.engine.target.max_positions
        played: Backend = live
    else:
        played = backend() if callable(backend) else backend
    if played.time_source != time_source:
        other = "LiveMeasured" if time_source == "modelled" else "Live"
        raise RequestError(
            f"this environment has {time_source} seconds, but those of the backend are {played.time_source}; "
            f"use assc/SpecDecode-{other}-v0 or another backend"
        )
    if requests is None:
        if encode is None:
            raise RequestError("an environment over a backend object needs requests=[...] as well")
        requests = make_requests(
            load_workload(workload, split),
            encode,
            max_new_tokens=max_new_tokens,
            seed=0,
            sampling={"temperature": temperature},
        )
        requests = fitting(requests, max_positions)
    table = None if k_values is None else ActionTable.build(played.table.drafters, k_values)
    return SpecDecodeEnv(played, requests, reward=reward, fields=fields, table=table)


def live_step_env(*, drafter: str | None = None, m: int = 0, **options: Any) -> DraftStepEnv:
    """Entry point of `assc/DraftStep-Live-v0`; `options` are those of `live_env` but `k_values`."""
    fields = options.get("fields", DEFAULT_FIELDS)
    made = live_env(**options)
    backend: Any = made.backend
    reward = options.get("reward", "dinkelbach")
    return DraftStepEnv(backend, made.source.requests, reward=reward, fields=fields, drafter=drafter, m=m)
