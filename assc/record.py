"""`python -m assc record`: record a workload by position, in shards, resumable (docs/traces.md)."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from tqdm import tqdm

import assc
from assc.cli import on_ctrl_c, parse, run_cli
from assc.core import Mode, Request
from assc.engine import Engine
from assc.errors import RequestError, TraceError
from assc.files import check_writable, only_run
from assc.groups import check_k_max
from assc.manifest import finish_run, packaged_workload, start_run
from assc.pair_options import PairOptions, load_chosen
from assc.recorder import KnownText, decode_together, drafter_info, record_request
from assc.trace import Header, Trace
from assc.trace_build import Recorded, build_trace, concatenate
from assc.trace_io import read_trace, write_trace
from assc.walks import STARTS
from assc.workloads import Prompt, content_hash, load_workload, make_requests, only_categories, select

if TYPE_CHECKING:
    from assc.pairs import LoadedPair


@dataclass(frozen=True, kw_only=True)
class Config(PairOptions):
    """Options of `python -m assc record`."""

    out: Path
    """folder of the shards; the finished trace is written beside them as trace.npz"""
    workload: str = "mixed"
    """mixed, or the path of a JSONL file"""
    split: Literal["held-out", "train", "draft", "all"] = "all"
    """which part of the workload"""
    categories: tuple[str, ...] = ()
    """only these categories; default: all"""
    requests: int = 0
    """number of prompts, balanced over the categories; 0: all"""
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    """each prompt is recorded at each of them"""
    mode: Mode = "gumbel"
    """gumbel (sampled, one text per seed) or greedy (temperature 0)"""
    max_new_tokens: int = 96
    """budget of each request in tokens"""
    k_max: int = 16
    """largest K that the trace can answer for"""
    seed: int = 0
    """chooses prompts and texts"""
    shard: int = 16
    """requests per shard: what a kill can cost"""
    texts: Path | None = None
    """trace whose texts are read again instead of decoded: the same recording with other drafters, much faster"""
    together: int = 1
    """requests whose texts are decoded side by side, several times faster; in half precision see docs/traces.md"""
    steps: int | None = None
    """draft steps from each position whose confidences are kept for step policies; default: K_max, 0: none"""
    starts: int = STARTS
    """positions of a text at which a drafter is asked side by side; in half precision see docs/traces.md"""
    resume: bool = False
    """go on where an earlier run in `out` stopped"""


def fingerprint(model: Any) -> str:
    """16 hex digits over names, shapes and a sample of every parameter: tells apart revisions of a model."""
    sha = hashlib.sha256()
    for name, weight in sorted(model.named_parameters()):
        flat = weight.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // 64)][:64].to("cpu", torch.float64)
        sha.update(f"{name}{tuple(weight.shape)}".encode() + sample.numpy().tobytes())
    return sha.hexdigest()[:16]


def header_of(engine: Engine, *, mode: Mode, max_new_tokens: int, steps: int | None = None, **fields: Any) -> Header:
    """The header that describes recordings of this engine with confidences of `steps` draft steps (None: K_max)."""
    kept = engine.k_max if steps is None else steps
    models = {"target": fingerprint(engine.target.model)}
    for name, drafter in engine.drafters.items():
        weights = getattr(getattr(drafter, "runner", None), "model", getattr(drafter, "net", None))
        if weights is not None:
            models[name] = fingerprint(weights)
    return Header(
        mode=mode,
        k_max=engine.k_max,
        drafters=tuple(drafter_info(d, kept) for d in engine.drafters.values()),
        models=models,
        dtype=str(engine.target.dtype).removeprefix("torch."),
        device=str(engine.device),
        threads=torch.get_num_threads(),
        max_positions=engine.target.max_positions,
        max_new_tokens=max_new_tokens,
        code=assc.__version__,
        **fields,
    )


def plan(config: Config, pair: LoadedPair, max_positions: int | None) -> Iterator[list[tuple[Request, str]]]:
    """The requests of each shard with their splits, in an order that depends on the configuration alone.

    Prompts that leave no room for the whole budget in the context are left out.
    """
    prompts = _prompts(config)
    splits = {p.id: p.split for p in prompts}
    jobs: list[tuple[Request, str]] = []
    per_temperature = [
        make_requests(
            prompts,
            pair.encode,
            max_new_tokens=config.max_new_tokens,
            seed=config.seed,
            sampling={"mode": config.mode, "temperature": temperature},
        )
        for temperature in config.temperatures
    ]
    for same_prompt in zip(*per_temperature, strict=True):
        for request in same_prompt:
            if max_positions is None or len(request.prompt_ids) + request.max_new_tokens <= max_positions:
                jobs.append((request, splits[request.id]))
    if not jobs:
        raise RequestError(f"no prompt leaves room for {config.max_new_tokens} tokens in the target's context")
    for start in range(0, len(jobs), config.shard):
        yield jobs[start : start + config.shard]


def _prompts(config: Config) -> tuple[Prompt, ...]:
    everything = only_categories(load_workload(config.workload), config.categories)
    kept = [p for p in everything if config.split in ("all", p.split)]
    return select(kept, config.requests or len(kept), config.seed)


def _check(config: Config) -> None:
    """Refuse what can be seen to be wrong before any model is loaded."""
    if config.mode == "rejection":
        raise RequestError("in mode rejection the text depends on K; record in mode gumbel, which samples as well")
    if (
        not config.temperatures
        or min(config.temperatures) < 0
        or len(set(config.temperatures)) < len(config.temperatures)
    ):
        raise RequestError("--temperatures needs at least one number, each 0 or more and listed once")
    if config.mode == "greedy" and max(config.temperatures) > 0:
        raise RequestError("--mode greedy takes --temperatures 0; sample with --mode gumbel")
    if min(config.max_new_tokens, config.shard, config.together) < 1 or config.requests < 0:
        raise RequestError("--max-new-tokens, --shard and --together are 1 or more, --requests is 0 or more")
    check_k_max(config.k_max)
    if config.starts < 1 or not 0 <= (config.steps or 0) <= config.k_max:
        raise RequestError(
            f"--starts is 1 or more and --steps 0 to K_max, which is {config.k_max}; got {config.starts} and "
            f"{config.steps}"
        )
    check_writable(config.out / "trace.npz")
    if sorted(config.out.glob("shard-*.npz")) and not config.resume:
        raise TraceError(f"{config.out} holds shards of an earlier run; add --resume or choose another folder")


class Texts:
    """The texts of an earlier recording. `TraceError` where it was made by another target or otherwise differs."""

    def __init__(self, path: Path, header: Header) -> None:
        self.trace = read_trace(path)
        before = self.trace.header
        own = {**header.to_json(), "target": header.models["target"]}
        for name, old in {**before.to_json(), "target": before.models.get("target")}.items():
            if name in ("mode", "dtype", "device", "target") and old != own[name]:
                raise TraceError(f"the texts of {path} are of {name} {old}, this recording is of {own[name]}")

    def of(self, request: Request) -> KnownText:
        """`TraceError` when the trace lacks the request, or ends before its budget does."""
        row = self.trace.rows_by_key.get((request.id, request.seed, request.temperature))
        known = None if row is None else self.trace.request(row)
        if row is None or known is None or known.prompt_ids != request.prompt_ids:
            raise TraceError(
                f"{self.trace.name} lacks the text of request {request.id!r} (seed {request.seed}, temperature "
                f"{request.temperature:g})"
            )
        if known.max_new_tokens != request.max_new_tokens:
            raise TraceError(
                f"{self.trace.name} was recorded with --max-new-tokens {known.max_new_tokens}, not "
                f"{request.max_new_tokens}"
            )
        columns = self.trace.columns
        first, last = columns["offsets"][row : row + 2]
        return KnownText(tuple(columns["tokens"][first:last].tolist()), int(columns["finish"][row]))


def _record_shard(
    engine: Engine, header: Header, jobs: Sequence[tuple[Request, str]], texts: Texts | None, config: Config, bar: Any
) -> Trace:
    together = config.together
    known: Sequence[KnownText | None] = [None] * len(jobs)
    if texts is not None:
        known = [texts.of(request) for request, _ in jobs]
    elif together > 1:
        known = decode_together(engine, [request for request, _ in jobs], together)
    recorded: list[Recorded] = []
    for (request, split), text in zip(jobs, known, strict=True):
        columns, mismatches = record_request(engine, request, text, steps=config.steps, starts=config.starts)
        recorded.append((request, split, columns, mismatches))
        bar.update(len(columns["tokens"]))
    return build_trace(header, recorded)


def _same_recording(old: Trace, header: Header, jobs: Sequence[tuple[Request, str]]) -> bool:
    """Whether a shard on disk is what this run would write there."""
    same = old.header.settings() == header.settings()
    return same and [old.request(r) for r in range(len(old))] == [request for request, _ in jobs]


def record(config: Config) -> Path:
    """Record what is missing, then write the whole trace; returns its path.

    Each shard is written whole or not at all, so a kill costs at most the shard under way.
    """
    from assc.loading import build_engine
    from assc.pairs import draft_data

    _check(config)
    digest = content_hash(load_workload(config.workload))
    pair = load_chosen(config)
    engine = build_engine(pair, k_max=config.k_max)
    header = header_of(
        engine,
        mode=config.mode,
        max_new_tokens=config.max_new_tokens,
        steps=config.steps,
        pair=pair.name,
        seed=config.seed,
        workload=config.workload if config.workload == "mixed" else Path(config.workload).name,
        workload_hash=digest,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )
    config.out.mkdir(parents=True, exist_ok=True)
    data: dict[str, str | Path | None] = {
        "workload": packaged_workload(config.workload),
        "texts": config.texts,
        "target": config.target,
        **draft_data(config.draft),
    }
    start_run(config.out, "record", config, seeds={"seed": config.seed}, data=data)
    texts = None if config.texts is None else Texts(config.texts, header)
    shards = list(plan(config, pair, engine.target.max_positions))
    parts: list[Trace] = []
    total = sum(r.max_new_tokens for jobs in shards for r, _ in jobs)
    with tqdm(total=total, desc="record", unit="token", disable=None, file=sys.stderr) as bar:
        for i, jobs in enumerate(shards):
            path = config.out / f"shard-{i:05d}.npz"
            if path.is_file():
                part = read_trace(path)
                if not _same_recording(part, header, jobs):
                    raise TraceError(f"{path} was recorded with other settings; choose another folder")
                header = replace(header, created=part.header.created)
                bar.update(part.positions)
            else:
                part = _record_shard(engine, header, jobs, texts, config, bar)
                write_trace(part, path)
            parts.append(part)
    trace = concatenate(parts, str(config.out))
    trace.header = replace(trace.header, created=parts[0].header.created)
    write_trace(trace, config.out / "trace.npz")
    finish_run(config.out, complete=True)
    return config.out / "trace.npz"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 2 and one sentence for a mistake of the user, 130 after Ctrl-C."""

    def work() -> int:
        config = parse(Config, argv, prog="python -m assc record", description="Record what drafters would propose.")
        _check(config)  # makes the folder
        with (
            only_run(config.out),
            on_ctrl_c(f"stopped; finished shards are kept in {config.out}: add --resume to go on"),
        ):
            path = record(config)
        print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")
        return 0

    return run_cli(work)
