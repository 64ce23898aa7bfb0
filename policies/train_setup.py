"""What a training run plays on: a backend with the time it shall see, one for the comparison, and two sets of requests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from assc.core import Backend, Request
from assc.costs import CostModel
from assc.errors import ArtefactError
from assc.workloads import load_workload, make_requests, select
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
    try:
        return CostModel.from_json(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ArtefactError(f"there is no cost model at {path}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtefactError(f"the cost model {path} cannot be read ({error})") from None


def write_costs(run_dir: Path, costs: CostModel) -> None:
    (run_dir / COSTS_FILE).write_text(json.dumps(costs.to_json(), indent=2) + "\n", encoding="utf-8")


def live_problem(config: TrainConfig, *, tune_requests: int) -> Problem:
    """Load the pair and the workload; fit the cost model unless the configuration names one."""
    from assc.live import LiveBackend
    from assc.pairs import load_pair

    costs = read_costs(config.costs) if config.costs is not None else None
    prompts = {split: load_workload(config.workload, split) for split in ("train", "held-out")}
    chosen = select(prompts["held-out"], config.eval_requests, config.seed) if config.eval_requests else ()
    tuned = select(prompts["train"], min(tune_requests, len(prompts["train"])), config.seed) if tune_requests else ()

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

    def requests(prompts: Sequence[Any], tokens: int) -> list[Request]:
        sampling = {"temperature": config.temperature}
        return make_requests(prompts, pair.encode, max_new_tokens=tokens, seed=config.seed, sampling=sampling)

    return Problem(
        backend=backend,
        eval_backend=eval_backend,
        train=requests(prompts["train"], config.max_new_tokens),
        held_out=requests(chosen, config.eval_max_new_tokens),
        tune=requests(tuned, config.eval_max_new_tokens),
        costs=backend.cost_model,
        description={**backend.describe(), "workload": config.workload, "time_source": config.time_source},
    )
