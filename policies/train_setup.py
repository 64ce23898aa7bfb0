"""What a training run plays on: a backend to train on, one for the comparison, and requests that are kept apart."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from assc.core import Backend, Request
from assc.costs import CostModel
from assc.errors import ArtefactError
from assc.files import write_json
from assc.workloads import Prompt, load_workload, make_requests, select
from envs.sources import fitting
from policies.train_config import TrainConfig

COSTS_FILE = "costs.json"


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


def read_costs(path: Path) -> CostModel:
    """The cost model in a `costs.json`."""
    try:
        return CostModel.from_json(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ArtefactError(f"there is no cost model at {path}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtefactError(f"the cost model {path} cannot be read ({error})") from None


def write_costs(run_dir: Path, costs: CostModel) -> None:
    """Keep the cost model beside what was trained with it: a resumed run needs the same one."""
    write_json(run_dir / COSTS_FILE, costs.to_json())


def live_problem(config: TrainConfig, *, tune_requests: int) -> Problem:
    """Load the pair and the workload; fit the cost model unless the configuration names one."""
    from assc.live import LiveBackend
    from assc.pairs import load_pair

    costs = read_costs(config.costs) if config.costs is not None else None
    train, held_out = load_workload(config.workload, "train"), load_workload(config.workload, "held-out")
    select(held_out, max(1, config.eval_requests), config.seed)  # too many are refused before the models are loaded
    pair = load_pair(
        config.pair,
        target=config.target,
        draft=config.draft,
        device=config.device,
        dtype=config.dtype,
        threads=config.threads,
    )
    backend = LiveBackend.from_pair(
        pair, mode=config.mode, k_max=config.k_max, time_source=config.time_source, cost_model=costs
    )
    eval_backend = LiveBackend(
        backend.engine, mode=config.mode, cost_model=backend.cost_model, time_source="measured", label=backend.label
    )

    def requests(prompts: Sequence[Prompt], tokens: int) -> list[Request]:
        sampling = {"temperature": config.sampling_temperature}
        made = make_requests(prompts, pair.encode, max_new_tokens=tokens, seed=config.seed, sampling=sampling)
        return fitting(made, backend.engine.target.max_positions)

    def some(prompts: Sequence[Prompt], n: int) -> list[Request]:
        balanced = select(prompts, len(prompts), config.seed)
        return requests(balanced, config.eval_max_new_tokens)[:n]

    return Problem(
        backend=backend,
        eval_backend=eval_backend,
        train=requests(train, config.max_new_tokens),
        held_out=some(held_out, config.eval_requests),
        tune=some(train, tune_requests),
        costs=backend.cost_model,
        description={**backend.describe(), "workload": config.workload, "time_source": config.time_source},
    )
