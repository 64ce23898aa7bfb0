"""`eval.py --preset seed-table`: the table this project starts from, made again in form.

The table's own figures are of a 67B target with a 1.5B draft on 8xH800 and 2,000 mixed requests that are not at hand.
Four parts stand in for it: `live` decodes with the models of a pair; `modelled` plays a recorded trace at the computed
costs of that pair and machine, so its acceptance is that of the trace's draft and its c that of the 67B/1.5B pair;
`synthetic` plays a two-state source that is fitted to the table's waste rates, at the same costs, and `switching` the
best fit among those whose regimes last for some ten tokens.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from assc.cli import say
from assc.core import Request
from assc.costs import CostModel
from assc.costs_io import CostFile
from assc.errors import PairError
from assc.eval_config import Config
from assc.eval_job import Job, listed_policies, play
from assc.eval_live import live_job
from assc.eval_output import EVAL_JSON
from assc.eval_replay import replay_job, trace_of
from assc.files import git_commit, write_json, write_text
from assc.manifest import claim_directory, finish_run, start_run
from assc.markov import MarkovBackend, markov_requests
from assc.results import Evaluation
from assc.roofline import profile_costs
from assc.seed_findings import Finding, findings
from assc.seed_fit import TwoStates, fit
from assc.seed_nouns import SEED, Part, PartRow
from assc.tables import conditions, console_for, markdown_table, text_table
from assc.trace import Trace

PROFILE = "67b-1.5b-8xh800"
SWITCHING = 0.9
"""share of the tokens that keep their regime in the part `switching`"""
LIVE_REQUESTS, LIVE_TOKENS = 16, 48
SYNTHETIC_REQUESTS, SYNTHETIC_TOKENS = 200, 256
JSON_FILE, MARKDOWN_FILE = "seed-table.json", "seed-table.md"
POLICIES = ("ar", *SEED)


def seed_table(config: Config, words: Sequence[str] = ()) -> int:
    """Play all parts, print the tables beside the seed's figures and what agrees, and write the files."""
    if config.run_dir is not None:
        claim_directory(config.run_dir)
        start_run(config.run_dir, "eval", config, seeds={"seed": config.seed}, data={"trace": config.traces})
    processes = seed_processes()
    evaluations: dict[str, Evaluation] = {}
    for name, job in _jobs(config, processes):
        say(f"{name} ...")
        evaluations[name] = play(replace(_plain(config), repeats=config.repeats if name == "live" else 1), job)
        evaluations[name].meta |= {"command": shlex.join(["python", "eval.py", *words]), "git_commit": git_commit()}
    parts = [_part(name, evaluation) for name, evaluation in evaluations.items()]
    found = findings(parts, processes, profile_costs(PROFILE).cost_ratio("model"))
    _print(parts, found)
    content = {
        "preset": "seed-table",
        "profile": PROFILE,
        "seed_figures": {name: vars(figures) for name, figures in SEED.items()},
        "fits": {name: vars(process) for name, process in processes.items()},
        "parts": {p.name: {"conditions": p.conditions, "rows": [vars(row) for row in p.rows]} for p in parts},
        "findings": [vars(f) for f in found],
        "evaluations": {name: evaluation.to_json() for name, evaluation in evaluations.items()},
    }
    if config.json is not None:
        write_json(config.json, content)
    if config.markdown is not None:
        write_text(config.markdown, to_markdown(parts, found))
    if config.run_dir is not None:
        write_json(config.run_dir / JSON_FILE, content)
        write_text(config.run_dir / MARKDOWN_FILE, to_markdown(parts, found))
        for name, evaluation in evaluations.items():
            evaluation.write(config.run_dir / name / EVAL_JSON)
        finish_run(config.run_dir, complete=True)
    return 0


@cache
def seed_processes() -> dict[str, TwoStates]:
    """The two-state sources closest to the waste rates of the seed's static K, by name of the part."""
    wastes = {int(name.partition(":")[2]): f.waste for name, f in SEED.items() if name != "assc"}
    return {"synthetic": fit(wastes), "switching": fit(wastes, stay=SWITCHING)}


def _plain(config: Config) -> Config:
    """The configuration of one part: without the preset, its files and the comparisons."""
    return replace(config, preset=None, policies=POLICIES, against="none", run_dir=None, json=None, rounds=0)


def _jobs(config: Config, processes: Mapping[str, TwoStates]) -> list[tuple[str, Job]]:
    """What is played, by name of the part; the live part only where its models can be had."""
    own = _plain(config)
    jobs: list[tuple[str, Job]] = []
    if config.backend == "live":
        few = replace(own, requests=config.requests or LIVE_REQUESTS, traces=None, temperatures=(), approximate=False)
        try:
            jobs.append(("live", live_job(replace(few, max_new_tokens=config.max_new_tokens or LIVE_TOKENS))))
        except PairError as error:
            say(f"no live part: {error}")
    number = config.requests if config.backend == "replay" else None
    replayed = replace(own, backend="replay", requests=number, max_new_tokens=None, cost=None, warmup=0, threads=None)
    trace = trace_of(replayed)
    costs = CostFile(profile_on(trace), pair="67B/1.5B (computed)", device="8xh800", time_source="modelled")
    jobs.append(("modelled", replay_job(replayed, costs)))
    return jobs + [(name, synthetic_job(own, process, config.seed)) for name, process in processes.items()]


def profile_on(trace: Trace) -> CostModel:
    """The computed costs of the 67B/1.5B pair, its draft's for each drafter of the trace that runs a model."""
    costs = profile_costs(PROFILE)
    own = {d.name: costs.drafters["model" if d.keeps != "nothing" else "ngram"] for d in trace.header.drafters}
    return replace(costs, drafters=own)


def synthetic_job(config: Config, process: TwoStates, seed: int) -> Job:
    """The fitted source at the computed costs."""
    backend = MarkovBackend(process.source(), profile_costs(PROFILE))
    requests: list[Request] = markov_requests(SYNTHETIC_REQUESTS, max_new_tokens=SYNTHETIC_TOKENS, seed=seed)
    policies = [(label, policy) for label, policy in listed_policies(config) if policy is not None]
    return Job(backend, requests, policies, 0, {"split": "all"})


def _part(name: str, evaluation: Evaluation) -> Part:
    """The seed's columns of one evaluation."""
    rows = {}
    for row, detail in zip(evaluation.rows(), evaluation.details(), strict=True):
        if row["policy"] in SEED:
            first = detail["acceptance_by_position"]
            rows[row["policy"]] = PartRow(
                strategy=row["policy"],
                mean_k=row["mean_k"] or 0.0,
                waste=row["waste_rate"] or 0.0,
                accepted=detail["accepted"] / row["rounds"],
                speedup=row["speedup"],
                interval=tuple(row["speedup_ci95"]),
                first_token=first[0] if first else 0.0,
            )
    meta: Mapping[str, Any] = evaluation.meta
    costs = f", costs {meta['cost_model']['label']}" if meta["time_source"] == "modelled" else ""
    return Part(name, tuple(rows[strategy] for strategy in SEED), conditions(meta) + costs, float(meta["c"]))


# -- output ----------------------------------------------------------------------------------------------------------

COLUMNS = ["mean K", "seed", "waste", "seed", "accepted/step", "seed", "speed-up", "95 % interval", "seed"]


def part_table(part: Part) -> tuple[list[str], list[list[str]]]:
    """The seed's columns, each with the seed's own figure beside it."""
    lines = []
    for row in part.rows:
        seed, (low, high) = SEED[row.strategy], row.interval
        lines.append(
            [
                row.strategy,
                *(f"{row.mean_k:.1f}", f"{seed.mean_k:.1f}"),
                *(f"{100 * row.waste:.1f} %", f"{100 * seed.waste:.1f} %"),
                *(f"{row.accepted:.2f}", f"{seed.accepted:.2f}"),
                "n/a" if row.speedup is None else f"{row.speedup:.2f}x",
                "n/a" if low is None or high is None else f"{low:.2f} to {high:.2f}",
                f"{seed.speedup:.2f}x",
            ]
        )
    return [part.name, *COLUMNS], lines


def _print(parts: Sequence[Part], found: Sequence[Finding]) -> None:
    console = console_for()
    for part in parts:
        console.print(text_table(*part_table(part)))
        console.print(part.conditions, markup=False)
    console.print()
    for finding in found:
        console.print(str(finding), markup=False)


def to_markdown(parts: Sequence[Part], found: Sequence[Finding]) -> str:
    """Tables and findings for a document."""
    tables = [f"{markdown_table(*part_table(part))}\n{part.conditions}\n" for part in parts]
    return "\n".join([*tables, "".join(f"- {finding}\n" for finding in found)])
