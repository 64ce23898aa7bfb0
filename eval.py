"""Compare policies on held-out prompts: one table, one JSON file, paired by request and interleaved.

python eval.py --policies ar static:4 assc bandit:ucb --requests 24 --json out.json
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from assc.cli import EXIT_INTERRUPTED, parse, run_cli
from assc.core import Mode, Policy
from assc.errors import AsscError, RequestError
from assc.evaluate import evaluate
from assc.files import check_writable, write_text
from assc.registry import make_policy
from assc.results import Evaluation, EvaluationInterrupted, RequestResult, unique_labels
from assc.tables import print_definitions, print_evaluation, to_markdown
from assc.workloads import Prompt, content_hash, load_workload, make_requests, only_categories, select


@dataclass(frozen=True)
class Config:
    """Options of eval.py."""

    policies: tuple[str, ...] = ("ar", "static:4", "assc", "bandit:ucb")
    """spec strings (name, name:value, name:key=value,...) or saved .zip files, in the order of the rows"""
    backend: Literal["live"] = "live"
    """what plays the rounds: live = real models"""
    pair: str = "smollm2"
    """model pair; `python -m assc doctor` lists them"""
    target: str | None = None
    """target model instead of the pair's: directory, .gguf file or hub id"""
    draft: str | None = None
    """draft model: directory or hub id"""
    workload: str = "mixed"
    """mixed, or the path of a JSONL file with `prompt` or `turns` per line"""
    split: Literal["held-out", "train", "all"] = "held-out"
    """which part of the workload; report numbers from held-out only"""
    categories: tuple[str, ...] = ()
    """only these categories; default: all"""
    requests: int = 24
    """number of prompts, balanced over the categories"""
    max_new_tokens: int = 64
    """budget of each request in tokens"""
    seed: int = 0
    """chooses prompts, orders, sampled texts and resamples"""
    repeats: int = 1
    """how often everything is measured; the spread between repeats is in the JSON"""
    warmup: int = 1
    """requests that are played first by every policy and thrown away"""
    mode: Mode = "greedy"
    """verification: greedy, gumbel (sampled, same text for every policy) or rejection"""
    temperature: float | None = None
    """of sampling; default: 0 for greedy, 1 for gumbel and rejection"""
    k_max: int = 16
    """largest K that a policy may draft"""
    time_source: Literal["measured", "modelled"] = "measured"
    """measured = the clock; modelled = a cost model fitted on this machine, free of noise"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, ..."""
    dtype: str = "auto"
    """auto, bfloat16, float16, float32 or float64"""
    threads: int | None = None
    """torch threads; default: torch's own choice"""
    json: Path | None = None
    """write all results to this file"""
    markdown: Path | None = None
    """write the table to this Markdown file"""
    tensorboard: Path | None = None
    """write curves over the requests to this folder, one run per policy"""
    explain: bool = False
    """print what each number means, and a table per category"""


def _check(config: Config) -> None:
    """Refuse what can be seen to be wrong before any model is loaded."""
    if config.max_new_tokens < 1:
        raise RequestError(f"--max-new-tokens is {config.max_new_tokens}, it must be 1 or more")
    if config.k_max < 1:
        raise RequestError(f"--k-max is {config.k_max}, it must be 1 or more")
    if config.seed < 0 or config.repeats < 1 or config.warmup < 0:
        raise AsscError(
            f"--seed and --warmup are 0 or more and --repeats is 1 or more, got {config.seed}, {config.warmup} and "
            f"{config.repeats}"
        )
    if not config.policies:
        raise AsscError("--policies names no policy, give at least one")
    if config.temperature is not None and not (math.isfinite(config.temperature) and config.temperature >= 0):
        raise RequestError(f"--temperature is {config.temperature}, it must be 0 or more")
    if config.mode == "greedy" and config.temperature:
        raise RequestError(f"--mode greedy takes no --temperature {config.temperature}; sample with --mode gumbel")
    for path in (config.json, config.markdown):
        if path is not None:
            check_writable(path)


def _prompts(config: Config) -> tuple[tuple[Prompt, ...], str]:
    """The prompts to decode, and the content hash of the whole workload."""
    everything = load_workload(config.workload)
    kept = [p for p in only_categories(everything, config.categories) if config.split in ("all", p.split)]
    if not kept:
        raise AsscError(
            f"no prompt of {config.workload!r} is in the split {config.split!r}; --split all takes every one"
        )
    return select(kept, config.requests, config.seed), content_hash(everything)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _evaluate(
    config: Config, policies: list[tuple[str, Policy]], prompts: tuple[Prompt, ...], digest: str
) -> Evaluation:
    """Load the models and compare. Raises `EvaluationInterrupted` on Ctrl-C."""
    # torch and transformers take seconds to import: a typing mistake should be told before
    from assc.live import LiveBackend
    from assc.pairs import load_pair

    _say(f"loading the pair {config.pair if config.target is None else config.target} and calibrating its costs ...")
    pair = load_pair(
        config.pair,
        target=config.target,
        draft=config.draft,
        device=config.device,
        dtype=config.dtype,
        threads=config.threads,
    )
    backend = LiveBackend.from_pair(pair, mode=config.mode, k_max=config.k_max, time_source=config.time_source)
    default = 0.0 if config.mode == "greedy" else 1.0
    sampling = {"temperature": default if config.temperature is None else config.temperature}
    requests = make_requests(
        prompts, pair.encode, max_new_tokens=config.max_new_tokens, seed=config.seed, sampling=sampling
    )
    meta = {"workload": config.workload, "workload_hash": digest, "split": config.split}
    with contextlib.ExitStack() as stack:
        on_request: Callable[[RequestResult], None] | None = None
        if config.tensorboard is not None:
            from assc.tb import EvaluationWriter

            writer = stack.enter_context(EvaluationWriter(config.tensorboard, unique_labels(config.policies)))
            on_request = writer.log
            _say(f"writing curves to {writer.directory} (see them with: tensorboard --logdir {config.tensorboard})")
        _say(f"decoding {len(requests)} requests with {', '.join(config.policies)} ...")
        return evaluate(
            backend,
            requests,
            policies,
            seed=config.seed,
            repeats=config.repeats,
            warmup=config.warmup,
            on_request=on_request,
            meta=meta,
        )


def run(config: Config) -> int:
    """Evaluate as configured, print the table, write the files. 130 after Ctrl-C, with what was finished."""
    _check(config)
    policies = [(spec, make_policy(spec, seed=config.seed)) for spec in config.policies]
    prompts, digest = _prompts(config)
    if config.explain:
        print_definitions()
    try:
        evaluation = _evaluate(config, policies, prompts, digest)
    except EvaluationInterrupted as stop:
        evaluation = stop.evaluation
    try:  # files first, since a closed pipe stops the printing; and the table even if the disk is full
        if config.json is not None:
            evaluation.write(config.json)
        if config.markdown is not None:
            write_text(config.markdown, to_markdown(evaluation.rows(), evaluation.details()))
    finally:
        print_evaluation(evaluation, categories=config.explain)
    return 0 if evaluation.complete else EXIT_INTERRUPTED


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 2 and one sentence for a mistake of the user, 130 after Ctrl-C."""
    description = "Compare policies of speculative decoding, paired by request and interleaved in time."
    return run_cli(lambda: run(parse(Config, argv, prog="python eval.py", description=description)))


if __name__ == "__main__":
    sys.exit(main())
