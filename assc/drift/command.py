"""`python -m assc drift`: regret and recovery of policies on streams whose regime switches, in modelled time."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from assc.cli import NOTHING_KEPT, UsageError, on_ctrl_c, parse, run_cli, say
from assc.core import Policy
from assc.costs_io import read_costs
from assc.drift.guard import guarded, shown_label, warm_rows
from assc.drift.measure import jumps, mean_curve, regret, relative_speed, segment_report
from assc.drift.scenarios import SCENARIOS, Choice, Regime, Scenario
from assc.drift.stream import Played, Reference, draw_stream, play
from assc.errors import AsscError
from assc.files import git_commit, versions, write_json
from assc.outputs import DRIFT, check_outputs
from assc.registry import artefacts_in, make_policy
from assc.shipped import shipped_costs, shipped_trace
from assc.trace_io import fingerprint, read_trace

POLICIES = (
    "assc",
    "goodput",
    "cascade",
    "bandit:ucb",
    "bandit:ucb,discount=0.98",
    "bandit:ts,discount=0.98",
    "bandit:exp3",
    "linucb",
    "accept_model",
    "survival",
    "mdp",
)


@dataclass(frozen=True)
class Config:
    """Options of `drift`."""

    scenario: str = "temperature"
    """stationary, categories, temperature, load or bad-draft"""
    policies: tuple[str, ...] = POLICIES
    """specs to play, each from nothing; saved .zip files or the run directories they are in, as they were saved"""
    seeds: int = 5
    """streams: each has its own order of requests and seeds the policies"""
    tokens: int = 2000
    """of each segment, at least"""
    segments: int = 4
    """regimes in a row; the scenario stationary has one"""
    split: str = "held-out"
    """requests of this split, or all"""
    allow_leakage: bool = False
    """play also what a policy or a draft was trained on, and mark the rows, instead of refusing"""
    categories: tuple[str, ...] = ()
    """blocks of the scenario categories; default: the two that differ most in their best static action"""
    rows: int = 32
    """of the busy batch in the scenario load"""
    warm: int = 0
    """also play every learner after it has learned from this many train requests (offline, not counted)"""
    window: int = 50
    """rounds of the rolling speed"""
    within: float = 0.05
    """share of the best static action's speed that may be missing after a recovery"""
    traces: Path | None = None
    """trace to play; default: the packaged one"""
    cost: Path | None = None
    """its cost model; default: the packaged one"""
    json: Path | None = None
    """write all numbers there; like the figures, only over an earlier one"""
    svg: Path | None = None
    """draw the figure there (extra report)"""
    png: Path | None = None
    """the same as pixels"""


SETTLE = 200
"""rounds after which a policy should have recovered; speeds are told before and after"""


def check(config: Config) -> None:
    """`UsageError` for values that make no sense together."""
    if config.scenario not in SCENARIOS:
        raise UsageError(f"--scenario is {config.scenario!r}, it must be one of {', '.join(SCENARIOS)}")
    for name, least in (("seeds", 1), ("tokens", 1), ("segments", 1), ("window", 1), ("rows", 2), ("warm", 0)):
        if getattr(config, name) < least:
            raise UsageError(f"--{name} is {getattr(config, name)}, it must be {least} or more")
    if not 0 <= config.within < 1:
        raise UsageError(f"--within is {config.within}, it must be within 0..1")
    if not config.policies:
        raise UsageError("--policies names no policy")
    if (config.traces is None) != (config.cost is None):
        raise UsageError("--traces and --cost go together: seconds are modelled by the costs of the trace's machine")
    for spec in config.policies:
        make_policy(spec)  # a mistake is told before anything is played
    for path, suffix in ((config.svg, ".svg"), (config.png, ".png")):
        if path is not None and path.suffix != suffix:
            raise UsageError(f"the figure {path} must end with {suffix}")
    read = [config.traces, config.cost, *(path for spec in config.policies for path in artefacts_in(spec))]
    check_outputs({name: getattr(config, name) for name in ("json", "svg", "png")}, DRIFT, read)
    if config.svg or config.png:
        _figures()


def _figures() -> Any:
    try:
        from assc.drift import figure
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise AsscError('the figure needs matplotlib, which is not installed: pip install "assc[report]"') from None
    return figure


def choice_of(config: Config) -> Choice:
    """Trace, costs and the numbers that scenarios are built from."""
    trace = shipped_trace() if config.traces is None else read_trace(config.traces)
    costs = shipped_costs() if config.cost is None else read_costs(config.cost).model
    split = None if config.split == "all" else config.split
    return Choice(trace, costs, split, config.segments, config.categories, config.rows)


def learns(policy: Policy) -> bool:
    """Whether it keeps anything from request to request, which a warm start could give it."""
    return bool(policy.state_dict())


def warmed(spec: str, seed: int, choice: Choice, requests: int) -> Policy:
    """A new policy with the state of one that played this many train requests: as a saved one is continued."""
    regime = Regime("train", tuple(choice.trace.where(split="train")), choice.trace, choice.costs)
    reference = Reference(regime)
    order = np.random.default_rng([seed, 0x3A93]).permutation(warm_rows(choice, requests)).tolist()
    learner = make_policy(spec, seed=seed)
    play(learner, [reference], [0], [(0, row) for row in order])
    policy = make_policy(spec, seed=seed)
    policy.begin(reference.backend.table)
    policy.load_state_dict(learner.state_dict())
    return policy


def runs_of(config: Config) -> list[tuple[str, str, int]]:
    """(label, spec, warm requests) of everything that is played."""
    listed = []
    for spec in config.policies:
        listed.append((spec, spec, 0))
        if config.warm and learns(make_policy(spec)):
            listed.append((f"{spec}, warm", spec, config.warm))
    return listed


def study(config: Config, choice: Choice) -> dict[str, Any]:
    """Play everything; the result is what `--json` writes. Raises `LeakageError` unless overlaps are allowed."""
    scenario: Scenario = SCENARIOS[config.scenario](choice)
    runs = runs_of(config)
    guard = guarded(runs, scenario, choice, allowed=config.allow_leakage)
    references = [Reference(regime) for regime in scenario.regimes]
    streams = [draw_stream(scenario, config.tokens, seed) for seed in range(config.seeds)]
    rows: list[dict[str, Any]] = []
    last: list[Played] = []
    for label, spec, warm in runs:
        say(f"{scenario.name}: {label}")
        played = []
        for seed, stops in enumerate(streams):
            policy = warmed(spec, seed, choice, warm) if warm else make_policy(spec, seed=seed)
            played.append(play(policy, references, scenario.order, stops))
        row = _row(config, scenario, label, played, references[0].backend.k_max)
        rows.append(row | {"leaked_requests": guard.leaked.get(label, 0)})
        last = played
    ends = np.cumsum([int(last[0].tokens[last[0].segment == s].sum()) for s in range(len(scenario.order))])
    segments = [
        {
            "regime": scenario.regimes[number].name,
            "best": str(references[number].best),
            "best_speedup": references[number].plain_seconds / references[number].best_seconds,
            "oracle_speedup": references[number].plain_seconds / references[number].optimal_seconds,
            "from_token": int(start),
        }
        for number, start in zip(scenario.order, [0, *ends[:-1].tolist()], strict=True)
    ]
    settings = {k: v for k, v in asdict(config).items() if k not in ("json", "svg", "png", "traces", "cost")}
    return {
        "kind": DRIFT,
        "scenario": scenario.name,
        "settings": settings,
        "trace": {"name": choice.trace.name, "sha256": fingerprint(choice.trace)},
        "cost_model": choice.costs.to_json(),
        "time_source": "modelled",
        "versions": versions(),
        "commit": git_commit(),
        "leakage": guard.told,
        "notes": list(guard.notes),
        "segments": segments,
        "optimal": _optimal(last),
        "policies": rows,
    }


def _optimal(played: Sequence[Played]) -> dict[str, Any]:
    """The oracle's own curve: its seconds less those of the best static actions."""
    curve = mean_curve([regret(p) for p in played])
    return {"tokens": curve.tokens.tolist(), "best": np.round(curve.best - curve.optimal, 3).tolist()}


def _row(config: Config, scenario: Scenario, label: str, played: Sequence[Played], k_max: int) -> dict[str, Any]:
    curves = [regret(p) for p in played]
    mean = mean_curve(curves)
    segments = []
    for s in range(len(scenario.order)):
        report = segment_report(played, s, config.window, config.within, SETTLE)
        segments.append(report | {"speeds": np.round(relative_speed(played, s, config.window), 4).tolist()})
    return {
        "label": label,
        "regret_best": float(np.mean([c.best[-1] for c in curves])),
        "regret_best_of_each": [float(c.best[-1]) for c in curves],
        "regret_oracle": float(np.mean([c.optimal[-1] for c in curves])),
        "seconds": float(np.mean([p.seconds.sum() for p in played])),
        "tokens": int(np.mean([p.tokens.sum() for p in played])),
        "jumps": jumps(played, k_max),
        "curve": {
            "tokens": mean.tokens.tolist(),
            "best": np.round(mean.best, 3).tolist(),
            "oracle": np.round(mean.optimal, 3).tolist(),
        },
        "segments": segments,
    }


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    segments = result["segments"]
    lines = [f"{len(segments)} segments, {result['settings']['seeds']} streams, modelled time"]
    for i, s in enumerate(segments):
        lines.append(
            f"  {i + 1}: {s['regime']}, best static action {s['best']} ({s['best_speedup']:.2f}x plain decoding, "
            f"oracle {s['oracle_speedup']:.2f}x)"
        )
    numbers = range(1, len(segments) + 1)
    heads = ["policy", "regret: best", "of its time", "oracle", *(f"rounds {i}" for i in numbers)]
    heads += [*(f"speed {i}" for i in numbers), "jumps"]
    lines += ["", "| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
    for row in result["policies"]:
        share = row["regret_best"] / (row["seconds"] - row["regret_best"])
        cells = [
            shown_label(row),
            f"{row['regret_best']:+.1f} s",
            f"{100 * share:+.1f} %",
            f"{row['regret_oracle']:.1f} s",
        ]
        cells += ["never" if s["recovery"] is None else str(s["recovery"]) for s in row["segments"]]
        cells += ["n/a" if s["settled_speed"] is None else f"{s['settled_speed']:.3f}" for s in row["segments"]]
        lines.append("| " + " | ".join([*cells, f"{100 * row['jumps']:.1f} %"]) + " |")
    return "\n".join([*lines, *(f"\n- {note}" for note in result["notes"])])


def run(config: Config) -> None:
    """Play, print the table, write the files."""
    check(config)
    with on_ctrl_c(NOTHING_KEPT):
        result = study(config, choice_of(config))
    print(table(result))
    if config.json is not None:
        write_json(config.json, result)
    for path in (config.svg, config.png):
        if path is not None:
            _figures().save(result, path)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 2 and one sentence for a mistake of the user."""
    words = list(sys.argv[1:] if argv is None else argv)
    description = "Regret and recovery of policies on streams whose regime switches (modelled time)."
    return run_cli(lambda: run(parse(Config, words, prog="python -m assc drift", description=description)))
