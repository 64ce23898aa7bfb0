"""The command line of eval.py: one dataclass, and what its options are by default for each backend."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from tyro.conf import arg

from assc.cli import UsageError
from assc.core import Mode
from assc.errors import AsscError, RequestError
from assc.groups import check_chunks, check_k_max
from assc.manifest import check_free
from assc.outputs import EVALUATION, SEED_TABLE, check_outputs
from assc.policy_files import without_alias
from assc.prometheus import require_prometheus
from assc.registry import artefacts_in

Backend = Literal["live", "replay"]
TUNED = "static:tuned"
"""the static action that is best on train requests: known once the backend is"""
PLAIN = "ar"
NONE = "none"
"""--against of nobody"""


@dataclass(frozen=True)
class LiveOptions:
    """What `--backend live` reads besides the common options, with its defaults."""

    pair: str = "smollm2"
    target: str | None = None
    draft: tuple[str, ...] = ()
    workload: str = "mixed"
    requests: int = 24
    max_new_tokens: int = 64
    warmup: int = 1
    mode: Mode = "greedy"
    temperature: float | None = None
    k_max: int = 16
    chunks: int = 1
    unload_after: int | None = None
    time_source: Literal["measured", "modelled"] = "measured"
    cost: Path | None = None
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
    chunks: int = 1
    requests: int = 0
    max_new_tokens: int | None = None
    warmup: int = 0
    policy_seeds: tuple[int, ...] = ()


@dataclass(frozen=True)
class Config:
    """Options of eval.py. What is not given takes the default of the backend."""

    policies: tuple[str, ...] = ("ar", "static:4", "assc", "bandit:ucb")
    """spec strings (name, name:value, name:key=value,...), saved .zip files or the run directories they are in,
    static:tuned (the static action that is best on train requests), NAME:tuned (replay only: a rule with its best
    parameters on train requests) or oracle (replay only), in the order of the rows; SPEC@NAME is the same policy once
    more"""
    preset: Literal["seed-table"] | None = None
    """seed-table: static K = 2, 5, 8 and assc beside the figures this project starts from, live and modelled; with
    --backend replay the modelled parts alone"""
    against: str | None = None
    """the policy with which the others are compared besides plain decoding; none: no such comparison; default:
    static:tuned where it is listed"""
    backend: Backend = "live"
    """what plays the rounds: live = real models, replay = a recorded trace in modelled time"""
    pair: str | None = None
    """live: model pair; `python -m assc doctor` lists them; default: smollm2"""
    target: str | None = None
    """live: target model instead of the pair's: directory, .gguf file or hub id"""
    draft: tuple[str, ...] = ()
    """live: drafts to add: directory or hub id of a model, or the folder of a learned draft; NAME=SOURCE names the
    drafter"""
    unload_after: int | None = None
    """live: unload a draft that was not asked for so many rounds, until it is asked again; default: never"""
    workload: str | None = None
    """live: mixed, or the path of a JSONL file with `prompt` or `turns` per line; default: mixed"""
    traces: str | None = None
    """replay: trace, a .npz file or a folder; default: the one that comes with the package"""
    cost: Path | None = None
    """cost model that prices modelled rounds; default: replay: the one that comes with the package, live: fitted in a
    short calibration"""
    temperatures: tuple[float, ...] = ()
    """replay: only requests recorded at these temperatures; default: all of the trace"""
    approximate: bool = False
    """replay: allow a trace of mode rejection, whose text depends on K"""
    split: Literal["held-out", "train", "draft", "all"] = "held-out"
    """which part of the workload or trace; report numbers from held-out only"""
    allow_leakage: bool = False
    """evaluate also what a policy or a draft was trained or tuned on, and mark the rows, instead of refusing"""
    categories: tuple[str, ...] = ()
    """only these categories; default: all"""
    requests: int | None = None
    """number of prompts, balanced over the categories; default: 24 live; in replay 0, which is all of them"""
    max_new_tokens: int | None = None
    """budget of each request in tokens; default: 64 live; in replay what was recorded, which can only be cut"""
    seed: int = 0
    """chooses prompts, orders, sampled texts and resamples"""
    repeats: Annotated[int, arg(aliases=["--repeat"])] = 1
    """how often everything is measured; the spread between repeats is in the JSON"""
    policy_seeds: tuple[int, ...] = ()
    """replay: play everything once for each of these seeds and pool it: the policies are made with the seed and the
    requests come in an order drawn by it; a folder of `train_policy.py --seeds` plays its policy of each seed"""
    warmup: int | None = None
    """requests that are played first by every policy and thrown away; default: 1 live, 0 in replay"""
    mode: Mode | None = None
    """live: verification: greedy, gumbel (sampled, same text for every policy) or rejection; default: greedy"""
    temperature: float | None = None
    """live: of sampling; default: 0 for greedy, 1 for gumbel and rejection"""
    k_max: int | None = None
    """live: largest K that a policy may draft; default: 16"""
    chunks: int | None = None
    """verify drafted tokens in so many groups, one after the other, until one holds a rejection; default: 1"""
    time_source: Literal["measured", "modelled"] | None = None
    """live: measured = the clock; modelled = a cost model fitted on this machine, free of noise; default: measured"""
    device: str | None = None
    """live: auto, cpu, cuda, cuda:1, ...; default: auto"""
    dtype: str | None = None
    """live: auto, bfloat16, float16, float32 or float64; default: auto"""
    threads: int | None = None
    """live: torch threads; default: torch's own choice"""
    run_dir: Path | None = None
    """write everything to this new folder: eval.json, eval.md, eval.csv, and manifest.json, by which
    `python -m assc rerun` repeats the run"""
    json: Path | None = None
    """write all results to this file; like all outputs, only over an earlier result of the same kind"""
    rounds: int = 0
    """with --json or --run-dir: store the rounds and tokens of N requests too, of as many categories as there are, for
    `python -m assc report`"""
    markdown: Path | None = None
    """write the tables to this Markdown file"""
    csv: Path | None = None
    """write the rows to this CSV file: of all requests, of each category and of each temperature"""
    tensorboard: Path | None = None
    """write curves over the requests to this folder, one run per policy"""
    health: bool = False
    """print a line of the health monitor for each policy (docs/monitor.md); the JSON always has it"""
    prometheus: Path | None = None
    """write the health of each policy to this file in Prometheus' text format (needs the extra 'prometheus')"""
    explain: bool = False
    """print what each number means, first (alone: only that), and all numbers of each category and temperature"""

    @property
    def specs(self) -> tuple[str, ...]:
        """The policies without blanks around them."""
        return tuple(spec.strip() for spec in self.policies)

    @property
    def bare(self) -> tuple[str, ...]:
        """The policies without their aliases."""
        return tuple(without_alias(spec) for spec in self.specs)

    @property
    def reference(self) -> str | None:
        """Label of the policy that the others are compared with besides plain decoding (which always is played)."""
        if self.against is not None:
            asked = self.against.strip()
            return None if asked == NONE or (asked == PLAIN and PLAIN not in self.specs) else asked
        return next((spec for spec, bare in zip(self.specs, self.bare, strict=True) if bare == TUNED), None)

    @property
    def live(self) -> LiveOptions:
        return _options(self, LiveOptions)

    @property
    def replay(self) -> ReplayOptions:
        return _options(self, ReplayOptions)


Options = TypeVar("Options", LiveOptions, ReplayOptions)

_NOT_OF_PRESETS = (
    "chunks",
    "csv",
    "explain",
    "health",
    "tensorboard",
    "prometheus",
    "rounds",
    "against",
    "policy_seeds",
)
"""options of an evaluation that the parts of a preset do not have"""


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
    if config.preset is not None and config.specs != Config().specs:
        raise UsageError(f"--preset {config.preset} has its own policies, so it takes no --policies")
    for name in _NOT_OF_PRESETS if config.preset is not None else ():
        if getattr(config, name) != getattr(Config(), name):
            raise UsageError(f"--preset {config.preset} takes no --{name.replace('_', '-')}")
    unread = (
        []
        if config.preset and not replay
        else [n for n in _given(config, other) if n not in {f.name for f in fields(mine)}]
    )
    for name in unread:
        why = "the trace and the cost model decide it" if replay else "it is for --backend replay"
        raise UsageError(f"--{name.replace('_', '-')} makes no sense with --backend {config.backend}: {why}")
    if config.max_new_tokens is not None and config.max_new_tokens < 1:
        raise RequestError(f"--max-new-tokens is {config.max_new_tokens}, it must be 1 or more")
    if config.k_max is not None:
        check_k_max(config.k_max)
    if not replay:
        check_chunks(config.live.chunks, config.live.k_max)
    if config.unload_after is not None and config.unload_after < 1:
        raise RequestError(f"--unload-after is {config.unload_after}, it must be 1 or more")
    if replay and config.replay.requests < 0:
        raise RequestError(f"--requests is {config.requests}, it must be 1 or more, or 0 for all")
    warmup = config.warmup or 0
    if config.seed < 0 or config.repeats < 1 or warmup < 0:
        raise AsscError(
            f"--seed and --warmup are 0 or more and --repeats is 1 or more, got {config.seed}, {warmup} and "
            f"{config.repeats}"
        )
    seeds = config.policy_seeds
    if any(s < 0 for s in seeds) or len(set(seeds)) < len(seeds):
        raise AsscError(f"--policy-seeds are different numbers of 0 or more, got {' '.join(map(str, seeds))}")
    if seeds and config.repeats > 1:
        raise UsageError(f"--policy-seeds plays once for each seed, so it takes no --repeats {config.repeats}")
    if config.rounds < 0:
        raise AsscError(f"--rounds is {config.rounds}, it must be 0 or more")
    if config.rounds and config.json is None and config.run_dir is None:
        raise UsageError("--rounds stores rounds in the file of --json or in --run-dir, but no --json is given")
    if not config.policies:
        raise AsscError("--policies names no policy, give at least one")
    if config.preset is None and config.reference is not None and config.reference not in config.specs:
        raise AsscError(
            f"--against {config.reference} is not among --policies {' '.join(config.specs)}; list it there too"
        )
    temperature = config.temperature
    if temperature is not None and not (math.isfinite(temperature) and temperature >= 0):
        raise RequestError(f"--temperature is {temperature}, it must be 0 or more")
    if config.live.mode == "greedy" and temperature:
        raise RequestError(f"--mode greedy takes no --temperature {temperature}; sample with --mode gumbel")
    if config.prometheus is not None:
        require_prometheus()
    if config.run_dir is not None:
        check_free(config.run_dir)
    outputs = {name: getattr(config, name) for name in ("json", "markdown", "csv", "prometheus")}
    read = [config.traces, config.cost, config.workload, config.target]
    read += [source.rpartition("=")[2] for source in config.draft]
    read += [path for spec in config.specs for path in artefacts_in(spec)]
    check_outputs(outputs, EVALUATION if config.preset is None else SEED_TABLE, read)
