"""`eval.py --backend replay`: a recorded trace, a cost model, and the rungs that need no policy. No model is loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from assc.cli import say
from assc.core import Policy, Request
from assc.costs_io import CostFile, read_costs
from assc.errors import AsscError, RequestError, TraceError
from assc.eval_config import TUNED, Config
from assc.eval_job import ORACLE, Job, complete, guarded, listed_policies, remarks, saved_files
from assc.leakage import TrainedOn, draft_leaks
from assc.manifest import PACKAGED
from assc.oracle import ladder, optimum
from assc.oracle_policy import OraclePolicy
from assc.registry import make_policy
from assc.replay import ReplayBackend
from assc.rule_tuning import is_tuned_rule, tuned_rule
from assc.shipped import COSTS, TRACE, shipped_cost_file, shipped_trace
from assc.token_texts import text_of_trace
from assc.trace import Trace
from assc.trace_io import fingerprint, read_trace
from assc.trace_rules import balanced_rows
from assc.tuning import static_spec
from assc.vector_replay import FlatTrace


def _refuse_unknown(trace: Trace, column: str, what: str, asked: Sequence[Any]) -> None:
    known = sorted(set(trace.columns[column].tolist()))
    for value in asked:
        if value not in known:
            raise TraceError(f"{trace.name} has no {what} {value!r}, only {', '.join(map(repr, known))}")


def _rows(config: Config, trace: Trace, choice: int) -> list[int]:
    """The requests to play: all that fit, or the balanced choice of the seed `choice`."""
    _refuse_unknown(trace, "category", "category", config.categories)
    _refuse_unknown(trace, "temperature", "temperature", config.temperatures)
    split = None if config.split == "all" else config.split
    rows = trace.where(split=split, categories=config.categories, temperatures=config.temperatures)
    return balanced_rows(trace, rows, config.replay.requests, choice) if config.replay.requests else rows


def _train_rows(config: Config, trace: Trace) -> list[int]:
    """Requests to tune the static action on: none where they would be evaluated too, or where there are none."""
    overlap, splits = config.split != "held-out", trace.columns["split"]
    fit = trace.where(categories=config.categories, temperatures=config.temperatures)
    train = [] if overlap else [row for row in fit if splits[row] == "train"]
    asked = [spec for spec in config.bare if spec == TUNED or is_tuned_rule(spec)]
    if asked and not train:
        why = f"--split {config.split} evaluates them" if overlap else f"{trace.name} has none that fit"
        raise AsscError(f"{asked[0]} is tuned on requests of the split 'train', but {why}")
    return train


def _requests(config: Config, trace: Trace, rows: Sequence[int]) -> list[Request]:
    """The requests of these rows with the budget asked for. `RequestError` when less was recorded."""
    requests, budget = trace.requests(rows), config.replay.max_new_tokens
    if budget is None:
        return requests
    for request in requests:
        if request.max_new_tokens < budget:
            raise RequestError(
                f"--max-new-tokens is {budget}, but request {request.id!r} of {trace.name} was recorded with "
                f"{request.max_new_tokens}; a trace can only be cut"
            )
    return [replace(request, max_new_tokens=budget) for request in requests]


def _meta(config: Config, trace: Trace, costs: CostFile, cost_name: str) -> dict[str, Any]:
    """Provenance of the trace and of the time."""
    h = trace.header
    provenance = asdict(costs)
    del provenance["model"]  # the coefficients are in `cost_model`
    return {
        "workload": h.workload or None,
        "workload_hash": h.workload_hash or None,
        "split": config.split,
        "trace": {
            "name": trace.name,
            "sha256": fingerprint(trace),
            "requests": len(trace),
            "seed": h.seed,
            "models": dict(h.models),
            "created": h.created,
            "code": h.code,
            "schema": h.schema,
            "recheck_mismatches": h.recheck_mismatches,
        },
        "cost_file": {"name": cost_name, **provenance},
        "approximate": h.mode == "rejection",
    }


def _tuned_rules(
    config: Config, backend: ReplayBackend, train: Sequence[Request], actions: dict[str, str]
) -> dict[str, str]:
    """label -> spec of every rule that is to be tuned; into `actions` goes what was chosen."""
    found = {}
    for name in dict.fromkeys(filter(is_tuned_rule, config.bare)):
        say(f"tuning {name.partition(':')[0]} on {len(train)} train requests ...")
        found[name] = tuned_rule(name, backend, train, seed=config.seed)
        actions[name] = found[name].partition(":")[2] or "as by default"
    return found


def trace_of(config: Config) -> Trace:
    """The trace that is asked for, else the packaged one."""
    traces = config.replay.traces
    return read_trace(traces) if traces is not None else shipped_trace()


def replay_job(config: Config, costs: CostFile | None = None, *, choice: int | None = None) -> Job:
    """Read the trace and compute the ladder for the chosen requests. `costs` replace those of the configuration.

    `choice`: seed of the choice of requests where not all are played; default: `--seed`, as of everything else.
    """
    options = config.replay
    listed = {seed: listed_policies(config, seed) for seed in options.policy_seeds or (None,)}
    trace = trace_of(config)
    if costs is None:
        costs = read_costs(options.cost) if options.cost is not None else shipped_cost_file()
    backend = ReplayBackend(trace, costs.model, approximate=options.approximate, chunks=options.chunks)
    rows, train = _rows(config, trace, config.seed if choice is None else choice), _train_rows(config, trace)
    requests = _requests(config, trace, rows)
    flat = FlatTrace(
        trace,
        costs.model,
        max_new_tokens=options.max_new_tokens,
        approximate=options.approximate,
        chunks=options.chunks,
    )
    try:
        best = optimum(flat, rows)
    except ValueError as error:
        raise TraceError(f"the cost model allows no oracle: {error}") from None
    rungs = ladder(flat, train, rows, backend.table, best=best)
    keys = zip(rows, (r.max_new_tokens for r in requests), strict=True)
    plans = dict(zip(keys, best.plans, strict=True))
    meta = _meta(config, trace, costs, str(options.cost or "the package's"))
    actions: dict[str, str] = {}
    tuned, tuned_on = rungs.tuned_action, TrainedOn.of(trace.requests(train), trace.header.workload_hash)
    if tuned is not None:
        how = {"split": "train", "requests": len(train), "tuned_on": tuned_on.to_json()}
        meta["static_tuned"] = {"action": str(tuned), **how}
        actions[TUNED] = str(tuned)
    rules = _tuned_rules(config, backend, _requests(config, trace, train), actions)

    def makers(seed: int) -> dict[str, Callable[[], Policy]]:
        return {
            ORACLE: lambda: OraclePolicy(backend, plans),
            TUNED: lambda: make_policy(static_spec(tuned or backend.table[0], backend.table)),
            **{name: partial(make_policy, spec, seed=seed) for name, spec in rules.items()},
        }

    def entropies(request: Request) -> Sequence[float]:
        row, c = backend.row_of(request), trace.columns
        known: list[float] = c["target_entropy"][int(c["offsets"][row]) : int(c["offsets"][row + 1])].tolist()
        return known

    made = {s: complete(rows_of, makers(config.seed if s is None else s)) for s, rows_of in listed.items()}
    everyone = [one for policies in made.values() for one in policies]
    in_draft = [trace.columns["split"][row] == "draft" for row in rows]
    drafts = draft_leaks(requests, in_draft, {d.name: d.kind for d in trace.header.drafters})
    leaked, meta["leakage"] = guarded(config, everyone, requests, trace.header.workload_hash, tuned_on, drafts)
    meta["notes"] = remarks(config, everyone, backend)
    data = {
        "trace": options.traces or PACKAGED + TRACE,
        "cost model": options.cost or PACKAGED + COSTS,
        **saved_files(config),
    }
    return Job(
        backend,
        requests,
        next(iter(made.values())),
        options.warmup,
        meta,
        actions,
        rungs,
        text_of_trace(trace.header) if config.rounds or config.tensorboard is not None else None,
        entropies,
        leaked=leaked,
        data=data,
        by_seed={seed: policies for seed, policies in made.items() if seed is not None},
    )
