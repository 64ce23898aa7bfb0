"""What a training run plays on: a backend to train on, one for the comparison, and requests that are kept apart."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from assc.core import Backend, Request
from assc.costs import CostModel
from assc.costs_io import read_costs
from assc.errors import TraceError
from assc.files import write_json
from assc.manifest import PACKAGED, packaged_workload
from assc.observe import DEFAULT_FIELDS, LEARNER_FIELDS
from assc.pair_options import load_chosen
from assc.registry import artefacts_in
from assc.replay import ReplayBackend
from assc.shipped import COSTS, TRACE, shipped_costs, shipped_trace
from assc.trace import IMPORTED, Trace
from assc.trace_io import read_trace
from assc.trace_rules import balanced_rows
from assc.workloads import Prompt, content_hash, load_workload, make_requests, select
from envs import DraftStepEnv, SpecDecodeEnv
from envs.sources import fitting
from envs.vector import ReplayVecEnv
from policies.training.config import LIVE_EVAL_REQUESTS, TrainConfig
from policies.training.play import LanesPlay, Play, SinglePlay, StepPlay

COSTS_FILE = "costs.json"
CHOICE_SEED = 0
"""of the choice of held-out requests where not all are compared: the same whatever the seed of the training"""
PEEKED_FIELDS = ("draft_entropy", "draft_top1")


@dataclass
class Problem:
    """`backend` is trained on, `eval_backend` (measured seconds) compares; `train` and `held_out` share no prompt."""

    backend: Backend
    eval_backend: Backend
    train: Sequence[Request]
    held_out: Sequence[Request]
    """requests of the comparison, with its own budget of tokens"""
    tune: Sequence[Request] = ()
    """a few train requests with that budget, on which the static K is tuned"""
    costs: CostModel | None = None
    description: dict[str, Any] = field(default_factory=dict)
    workload_hash: str = ""
    """of the whole workload, where it is known"""
    data: Mapping[str, str | Path | None] = field(default_factory=dict)
    """files that were read, for the manifest"""
    trace: Trace | None = None
    """where `train` is part of a trace, learners of stable-baselines3 play many of its requests at once"""

    @property
    def train_rows(self) -> list[int]:
        """Where the train requests are in the trace."""
        assert self.trace is not None
        return [self.trace.rows_by_key[r.id, r.seed, r.temperature] for r in self.train]

    def play(self, config: TrainConfig, lanes: int) -> Play:
        """The environment to train on; `lanes` counts only where there is a trace."""
        own = LEARNER_FIELDS if config.granularity == "round" else DEFAULT_FIELDS
        fields = (*own, *PEEKED_FIELDS) if config.peek else own
        if config.granularity == "step":
            # a copy plays a request of its own and shares what was read of the trace
            backends: list[Any] = [copy.copy(self.backend) for _ in range(lanes)]
            options: dict[str, Any] = {"reward": config.reward, "fields": fields, "m": config.copy_from}
            return StepPlay([DraftStepEnv(backend, self.train, **options) for backend in backends])
        if self.trace is None:
            return SinglePlay(SpecDecodeEnv(self.backend, self.train, reward=config.reward, fields=fields))
        assert self.costs is not None
        venv = ReplayVecEnv(self.trace, self.costs, lanes, rows=self.train_rows, reward=config.reward, fields=fields)
        venv.seed(config.seed)
        return LanesPlay(venv)


def write_costs(run_dir: Path, costs: CostModel) -> None:
    """Keep the cost model beside what was trained with it: a resumed run needs the same one."""
    write_json(run_dir / COSTS_FILE, costs.to_json())


def costs_changed(config: TrainConfig, run_dir: Path) -> bool:
    """Whether a run on the package's cost model began with another one than the package has now."""
    kept = run_dir / COSTS_FILE
    return config.cost is None and kept.is_file() and read_costs(kept).model != shipped_costs()


def files_of(config: TrainConfig) -> dict[str, str | Path | None]:
    """Name and path of everything that a run reads, for its manifest."""
    if config.backend == "replay":
        imitated = {f"imitated {path}": path for path in artefacts_in(config.imitate or "")}
        return {"trace": config.traces or PACKAGED + TRACE, "cost model": config.cost or PACKAGED + COSTS, **imitated}
    from assc.pairs import draft_data

    return {
        "workload": packaged_workload(config.workload),
        "target": config.target,
        **draft_data(config.draft),
        "cost model": config.cost,
    }


def live_problem(config: TrainConfig, *, tune_requests: int) -> Problem:
    """Load the pair and the workload; fit the cost model unless the configuration names one."""
    from assc.live import LiveBackend

    costs = read_costs(config.cost).model if config.cost is not None else None
    train, held_out = load_workload(config.workload, "train"), load_workload(config.workload, "held-out")
    compared = LIVE_EVAL_REQUESTS if config.eval_requests is None else config.eval_requests
    select(held_out, max(1, compared), CHOICE_SEED)  # too many are refused before the models are loaded
    pair = load_chosen(config)
    backend = LiveBackend.from_pair(
        pair,
        mode=config.mode,
        k_max=config.k_max,
        time_source=config.time_source,
        cost_model=costs,
        temperature=config.sampling_temperature,
    )
    eval_backend = LiveBackend(
        backend.engine, mode=config.mode, cost_model=backend.cost_model, time_source="measured", label=backend.label
    )

    def requests(prompts: Sequence[Prompt], tokens: int) -> list[Request]:
        sampling = {"temperature": config.sampling_temperature}
        made = make_requests(prompts, pair.encode, max_new_tokens=tokens, seed=config.seed, sampling=sampling)
        return fitting(made, backend.engine.target.max_positions)

    def some(prompts: Sequence[Prompt], n: int) -> list[Request]:
        balanced = select(prompts, len(prompts), CHOICE_SEED)
        return requests(balanced, config.eval_max_new_tokens)[:n]

    return Problem(
        backend=backend,
        eval_backend=eval_backend,
        train=requests(train, config.max_new_tokens),
        held_out=some(held_out, compared),
        tune=some(train, tune_requests),
        costs=backend.cost_model,
        description={**backend.describe(), "workload": config.workload, "time_source": config.time_source},
        workload_hash=content_hash(load_workload(config.workload)),
        data=files_of(config),
    )


def replay_problem(config: TrainConfig) -> Problem:
    """A trace's own requests and splits; `TraceError` where it lacks one of them."""
    trace = shipped_trace() if config.traces is None else read_trace(config.traces)
    if config.live_check and trace.header.pair == IMPORTED:
        raise TraceError(f"--live-check cannot be made: {trace.name} was imported, its models are not known")
    costs = shipped_costs() if config.cost is None else read_costs(config.cost).model
    backend, held_out = ReplayBackend(trace, costs), trace.where(split="held-out")
    if config.eval_requests:
        balanced_rows(trace, held_out, config.eval_requests, CHOICE_SEED)  # too many are refused before the training
    return Problem(
        backend=backend,
        eval_backend=backend,
        train=trace.requests(trace.where(split="train")),
        held_out=trace.requests(held_out) if config.eval_requests != 0 else (),
        costs=costs,
        description={**backend.describe(), "workload": trace.header.workload, "time_source": "modelled"},
        workload_hash=trace.header.workload_hash,
        data=files_of(config),
        trace=trace,
    )
