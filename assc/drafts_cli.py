"""`python -m assc drafts`: the draft choice report of a pair (docs/drafts.md)."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from assc.cli import NOTHING_KEPT, on_ctrl_c, parse, run_cli
from assc.core import Mode
from assc.drafts_report import Report
from assc.errors import RequestError, WorkloadError
from assc.files import write_json
from assc.groups import check_k_max
from assc.outputs import DRAFTS, check_outputs
from assc.pair_options import PairOptions, load_chosen
from assc.workloads import Prompt, content_hash, load_workload, make_requests, only_categories, select

FIXED_K = 4
"""acceptance is measured at it besides K = 1, unless K_max or the budget is smaller"""


@dataclass(frozen=True, kw_only=True)
class Config(PairOptions):
    """Options of `python -m assc drafts`."""

    workload: str = "mixed"
    """mixed, or the path of a JSONL file; only its held-out prompts are decoded"""
    categories: tuple[str, ...] = ()
    """only these categories; default: all"""
    requests: int = 16
    """number of prompts, balanced over the categories"""
    max_new_tokens: int = 48
    """budget of each request in tokens, 2 or more"""
    mode: Mode = "greedy"
    """verification: greedy, gumbel (sampled, same text for every K) or rejection"""
    temperature: float | None = None
    """of sampling; default: 0 for greedy, 1 for gumbel and rejection"""
    k: int | None = None
    """fixed K at which acceptance is measured besides K=1; default: 4, or what K_max and the budget allow"""
    k_max: int = 16
    """largest K compared"""
    seed: int = 0
    """chooses prompts, orders, sampled texts and resamples"""
    json: Path | None = None
    """write the whole report to this file"""

    @property
    def fixed_k(self) -> int:
        """The K of `k`, or its default."""
        return min(FIXED_K, self.k_max, self.max_new_tokens - 1) if self.k is None else self.k

    @property
    def heat(self) -> float:
        """Temperature of the requests."""
        return (0.0 if self.mode == "greedy" else 1.0) if self.temperature is None else self.temperature


def _check(config: Config) -> None:
    """Refuse what can be seen to be wrong before any model is loaded."""
    if config.max_new_tokens < 2:
        raise RequestError(
            f"--max-new-tokens is {config.max_new_tokens}, it must be 2 or more: a budget's last token is never drafted"
        )
    check_k_max(config.k_max)
    if not 1 <= config.fixed_k <= min(config.k_max, config.max_new_tokens - 1):
        raise RequestError(f"--k is {config.k}, it must be 1 or more, at most --k-max and below --max-new-tokens")
    if config.seed < 0:
        raise RequestError(f"--seed is {config.seed}, it must be 0 or more")
    if not (math.isfinite(config.heat) and config.heat >= 0):
        raise RequestError(f"--temperature is {config.temperature}, it must be 0 or more")
    if config.mode == "greedy" and config.heat:
        raise RequestError(f"--mode greedy takes no --temperature {config.temperature}; sample with --mode gumbel")
    drafts = [source.rpartition("=")[2] for source in config.draft]
    check_outputs({"json": config.json}, DRAFTS, [config.workload, config.target, *drafts])


def _prompts(config: Config) -> tuple[tuple[Prompt, ...], str]:
    """The held-out prompts to decode, and the content hash of the whole workload."""
    everything = load_workload(config.workload)
    kept = [p for p in only_categories(everything, config.categories) if p.split == "held-out"]
    if not kept:
        raise WorkloadError(f"no prompt of {config.workload!r} that was asked for is held out")
    return select(kept, config.requests, config.seed), content_hash(everything)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def report(config: Config) -> Report:
    """Load, calibrate, decode, judge. Raises `AsscError` for input that cannot be used."""
    _check(config)
    prompts, digest = _prompts(config)
    # torch and transformers take seconds to import: a typing mistake should be told before
    from assc.drafts_measure import make_backend, measure

    _say(f"loading the pair {config.pair if config.target is None else config.target} and calibrating its costs ...")
    pair = load_chosen(config)
    requests = make_requests(
        prompts,
        pair.encode,
        max_new_tokens=config.max_new_tokens,
        seed=config.seed,
        sampling={"temperature": config.heat},
    )
    backend = make_backend(pair, mode=config.mode, temperature=config.heat, k_max=config.k_max)
    _say(f"decoding {len(requests)} requests with {', '.join(backend.engine.drafters)} ...")
    found, target, drafters = measure(backend, requests, k=config.fixed_k, seed=config.seed)
    meta = {
        **found,
        "workload": config.workload,
        "workload_hash": digest,
        "split": "held-out",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    return Report(meta, target, drafters)


def run(config: Config) -> int:
    """Make the report, write it, print it; 0 whatever the verdicts."""
    with on_ctrl_c(NOTHING_KEPT):
        found = report(config)
    if config.json is not None:
        write_json(config.json, found.to_json())
    print(found.to_text())
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 2 and one sentence for a mistake of the user, 130 after Ctrl-C."""
    description = "Judge the drafters of a pair: size, tokens, acceptance, c, memory and best static K."
    return run_cli(lambda: run(parse(Config, argv, prog="python -m assc drafts", description=description)))
