"""The files that eval.py writes: JSON, Markdown, CSV, Prometheus' text, and a run directory with a manifest."""

from __future__ import annotations

from pathlib import Path

from assc.breakdown import to_csv
from assc.core import Backend
from assc.costs_io import CostFile, write_costs
from assc.eval_config import Config
from assc.eval_job import Job
from assc.files import write_text
from assc.manifest import claim_directory, finish_run, start_run
from assc.prometheus import write_prometheus
from assc.results import Evaluation
from assc.tables import to_markdown

EVAL_JSON, EVAL_MARKDOWN, EVAL_CSV, COSTS = "eval.json", "eval.md", "eval.csv", "costs.json"
"""what a run directory holds besides the manifest; the cost model where it was fitted in this run"""


def begin_run(config: Config, job: Job) -> None:
    """Claim the run directory, if one is asked for, and write down what is going to run."""
    if config.run_dir is None:
        return
    claim_directory(config.run_dir)
    seeds = {"seed": config.seed, "requests": {r.id: r.seed for r in job.requests}}
    start_run(config.run_dir, "eval", config, seeds=seeds, data=job.data)
    costs = getattr(job.backend, "cost_model", None)
    if config.backend == "live" and costs is not None:
        label = getattr(job.backend, "label", {})
        known = {name: label[name] for name in ("pair", "device", "dtype", "threads") if name in label}
        write_costs(CostFile(costs, **known), config.run_dir / COSTS)


def write_outputs(config: Config, evaluation: Evaluation, backend: Backend) -> None:
    """Write every file that was asked for."""
    for path in (config.json, _inside(config, EVAL_JSON)):
        if path is not None:
            evaluation.write(path)
    for path in (config.markdown, _inside(config, EVAL_MARKDOWN)):
        if path is not None:
            write_text(path, to_markdown(evaluation))
    for path in (config.csv, _inside(config, EVAL_CSV)):
        if path is not None:
            write_text(path, to_csv(evaluation))
    if config.prometheus is not None:
        write_prometheus(evaluation.health(), config.prometheus)
    if config.run_dir is not None:
        finish_run(config.run_dir, complete=evaluation.complete, time_source=backend.time_source)


def _inside(config: Config, name: str) -> Path | None:
    return None if config.run_dir is None else config.run_dir / name
