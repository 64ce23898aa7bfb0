"""The command line of eval.py: one dataclass, and what its options are by default for each backend."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from assc.actions import check_k_max
from assc.cli import UsageError
from assc.core import Mode
from assc.errors import AsscError, RequestError
from assc.files import check_writable

Backend = Literal["live", "replay"]


@dataclass(frozen=True)
class LiveOptions:
    """What `--backend live` reads besides the common options, with its defaults."""

    pair: str = "smollm2"
    target: str | None = None
    draft: str | None = None
    workload: str = "mixed"
    requests: int = 24
    max_new_tokens: int = 64
    warmup: int = 1
    mode: Mode = "greedy"
    temperature: float | None = None
    k_max: int = 16
    time_source: Literal["measured", "modelled"] = "measured"
    device: str = "auto"
    dtype: str = "auto"
    threads: int | None = None


@dataclass(frozen=True)
class ReplayOptions:
    """What `--backend replay` reads besides the common options, with its defaults."""

    traces: str | None = None
    cost: Path | None = None
    temperatures: tuple[float, ...] = ()
    approximate: bool = False
    requests: int = 0
    max_new_tokens: int | None = None
    warmup: int = 0


@dataclass(frozen=True)
class Config:
    """Options of eval.py. What is not given takes the default of the backend."""

    policies: tuple[str, ...] = ("ar", "static:4", "assc", "bandit:ucb")
    """spec strings (name, name:value, name:key=value,...), saved .zip files, static:tuned (the static action that is
    best on train requests) or oracle (replay only), in the order of the rows"""
    backend: Backend = "live"
    """what plays the rounds: live = real models, replay = a recorded trace in modelled time"""
    pair: str | None = None
    """live: model pair; `python -m assc doctor` lists them; default: smollm2"""
    target: str | None = None
    """live: target model instead of the pair's: directory, .gguf file or hub id"""
    draft: str | None = None
    """live: draft model: directory or hub id"""
    workload: str | None = None
    """live: mixed, or the path of a JSONL file with `prompt` or `turns` per line; default: mixed"""
    traces: str | None = None
    """replay: trace, a .npz file or a folder; default: the one that comes with the package"""
    cost: Path | None = None
    """replay: cost model that prices the rounds; default: the one that comes with the package"""
    temperatures: tuple[float, ...] = ()
    """replay: only requests recorded at these temperatures; default: all of the trace"""
    approximate: bool = False
    """replay: allow a trace of mode rejection, whose text depends on K"""
    split: Literal["held-out", "train", "draft", "all"] = "held-out"
    """which part of the workload or trace; report numbers from held-out only"""
    categories: tuple[str, ...] = ()
    """only these categories; default: all"""
    requests: int | None = None
    """number of prompts, balanced over the categories; default: 24 live; in replay 0, which is all of them"""
    max_new_tokens: int | None = None
    """budget of each request in tokens; default: 64 live; in replay what was recorded, which can only be cut"""
    seed: int = 0
    """chooses prompts, orders, sampled texts and resamples"""
    repeats: int = 1
    """how often everything is measured; the spread between repeats is in the JSON"""
    warmup: int | None = None
    """requests that are played first by every policy and thrown away; default: 1 live, 0 in replay"""
    mode: Mode | None = None
    """live: verification: greedy, gumbel (sampled, same text for every policy) or rejection; default: greedy"""
    temperature: float | None = None
    """live: of sampling; default: 0 for greedy, 1 for gumbel and rejection"""
    k_max: int | None = None
    """live: largest K that a policy may draft; default: 16"""
    time_source: Literal["measured", "modelled"] | None = None
    """live: measured = the clock; modelled = a cost model fitted on this machine, free of noise; default: measured"""
    device: str | None = None
    """live: auto, cpu, cuda, cuda:1, ...; default: auto"""
    dtype: str | None = None
    """live: auto, bfloat16, float16, float32 or float64; default: auto"""
    threads: int | None = None
    """live: torch threads; default: torch's own choice"""
    json: Path | None = None
    """write all results to this file"""
    rounds: int = 0
    """with --json: store the rounds and tokens of the first N requests too, for `python -m assc report`"""
    markdown: Path | None = None
    """write the table to this Markdown file"""
    tensorboard: Path | None = None
    """write curves over the requests to this folder, one run per policy"""
    explain: bool = False
    """print what each number means, and a table per category"""

    @property
    def specs(self) -> tuple[str, ...]:
        """The policies without blanks around them."""
        return tuple(spec.strip() for spec in self.policies)

    @property
    def live(self) -> LiveOptions:
        return _options(self, LiveOptions)

    @property
    def replay(self) -> ReplayOptions:
        return _options(self, ReplayOptions)


Options = TypeVar("Options", LiveOptions, ReplayOptions)


def _given(config: Config, kind: type[Any]) -> dict[str, Any]:
    """The options of `kind` that differ from "not given"."""
    values = {f.name: getattr(config, f.name) for f in fields(kind)}
    return {name: v for name, v in values.items() if not (v is None or v is False or v == ())}


def _options(config: Config, kind: type[Options]) -> Options:
    return kind(**_given(config, kind))


def check(config: Config) -> None:
    """Refuse what can be seen to be wrong before anything is loaded."""
    replay = config.backend == "replay"
    mine, other = (ReplayOptions, LiveOptions) if replay else (LiveOptions, ReplayOptions)
    for name in [n for n in _given(config, other) if n not in {f.name for f in fields(mine)}]:
        why = "the trace and the cost model decide it" if replay else "it is for --backend replay"
        raise UsageError(f"--{name.replace('_', '-')} makes no sense with --backend {config.backend}: {why}")
    if config.max_new_tokens is not None and config.max_new_tokens < 1:
        raise RequestError(f"--max-new-tokens is {config.max_new_tokens}, it must be 1 or more")
    if config.k_max is not None:
        check_k_max(config.k_max)
    if replay and config.replay.requests < 0:
        raise RequestError(f"--requests is {config.requests}, it must be 1 or more, or 0 for all")
    warmup = config.warmup or 0
    if config.seed < 0 or config.repeats < 1 or warmup < 0:
        raise AsscError(
            f"--seed and --warmup are 0 or more and --repeats is 1 or more, got {config.seed}, {warmup} and "
            f"{config.repeats}"
        )
    if config.rounds < 0:
        raise AsscError(f"--rounds is {config.rounds}, it must be 0 or more")
    if config.rounds and config.json is None:
        raise UsageError("--rounds stores rounds in the file of --json, but no --json is given")
    if not config.policies:
        raise AsscError("--policies names no policy, give at least one")
    temperature = config.temperature
    if temperature is not None and not (math.isfinite(temperature) and temperature >= 0):
        raise RequestError(f"--temperature is {temperature}, it must be 0 or more")
    if config.live.mode == "greedy" and temperature:
        raise RequestError(f"--mode greedy takes no --temperature {temperature}; sample with --mode gumbel")
    for path in (config.json, config.markdown):
        if path is not None:
            check_writable(path)
