"""Plain decoding and speculation through the engine against transformers, interleaved in one process.

    python benchmarks/engine.py --requests 6 --max-new-tokens 64 --threads 2
    python benchmarks/engine.py --assistant runs/layers/draft

`--assistant` is a draft of design `layers` (`python -m assc distill --design layers`): an independent causal LM, which
both this engine and transformers' assisted generation can use.

Prints, per contender, tokens per second and the ratio to transformers' plain `generate`, and the engine's Python
overhead per round. Every request is decoded by every contender before the next one; the order rotates.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
import tyro

from assc.core import Request, Totals
from assc.live import LiveBackend
from assc.loading import build_engine
from assc.pairs import load_pair
from assc.registry import make_policy
from assc.run import run_request
from assc.workloads import load_workload, select


@dataclass
class Config:
    """What to time."""

    pair: str = "smollm2"
    requests: int = 8
    max_new_tokens: int = 64
    threads: int = 2
    dtype: str = "auto"
    specs: tuple[str, ...] = (
        "ar",
        *(f"static:drafter=ngram,k={k}" for k in (4, 8, 16)),
        *(f"static:drafter=hidden,k={k}" for k in (1, 2, 3, 4)),
    )
    """policies of the engine"""
    chunks: int = 1
    """groups in which drafted tokens are verified"""
    assistant: str | None = None


def transformers_generate(pair: Any, ids: tuple[int, ...], budget: int, **options: Any) -> tuple[int, float]:
    """New tokens and seconds of `generate`, its prefill taken off by a one-token run."""
    prompt = torch.tensor([ids])
    common = {
        "attention_mask": torch.ones_like(prompt),
        "do_sample": False,
        "eos_token_id": list(pair.eos_token_ids),
        "pad_token_id": pair.eos_token_ids[0],
    }
    start = perf_counter()
    pair.target.generate(prompt, max_new_tokens=1, **common)
    first = perf_counter() - start
    start = perf_counter()
    out = pair.target.generate(prompt, max_new_tokens=budget, **common, **options)
    return out.shape[1] - len(ids) - 1, perf_counter() - start - first


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    pair = load_pair(config.pair, threads=config.threads, dtype=config.dtype, draft=config.assistant)
    engine = build_engine(pair, chunks=config.chunks)
    backend = LiveBackend(engine)
    specs = list(config.specs)
    calls: dict[str, dict[str, Any]] = {
        "transformers": {},
        "transformers prompt lookup": {"prompt_lookup_num_tokens": 10},
    }
    if config.assistant is not None:
        runner: Any = engine.drafters["layers"]
        calls["transformers assisted (layers)"] = {"assistant_model": runner.runner.model}
        specs += [f"static:drafter=layers,k={k}" for k in (1, 2, 4)]
    policies = {s: make_policy(s) for s in specs}
    contenders = [*calls, *specs]
    tokens = dict.fromkeys(contenders, 0)
    seconds = dict.fromkeys(contenders, 0.0)
    ratios: list[float] = []
    overhead: list[float] = []
    prompts = select(load_workload("mixed", split="held-out"), config.requests + 1, seed=0)
    for number, prompt in enumerate(prompts):
        ids = pair.encode(prompt.prompt)
        taken: dict[str, float] = {}
        for name in contenders[number % len(contenders) :] + contenders[: number % len(contenders)]:
            if name in calls:
                count, spent = transformers_generate(pair, ids, config.max_new_tokens, **calls[name])
            else:
                rounds = run_request(backend, Request(ids, config.max_new_tokens), policies[name]).rounds
                # the first round emits what `generate` emits in its prefill run
                totals = Totals.of(rounds[1:])
                count, spent = totals.tokens, totals.seconds
                overhead += [r.other_seconds for r in rounds[1:]]
            if number and count:  # the first request warms up
                tokens[name] += count
                seconds[name] += spent
                taken[name] = spent / count
        if "transformers" in taken and "ar" in taken:
            ratios.append(taken["transformers"] / taken["ar"])
    base = tokens["transformers"] / seconds["transformers"]
    plain = tokens["ar"] / seconds["ar"]
    print(f"{pair.name}, {pair.device}, {pair.dtype}, {config.threads} threads, greedy, {config.requests} requests")
    for name in contenders:
        rate = tokens[name] / seconds[name]
        print(
            f"{name:32s} {rate:7.2f} tokens/s   {rate / base:5.2f}x transformers' plain generate   "
            f"{rate / plain:5.2f}x this engine's"
        )
    print(f"engine plain / transformers plain, median over requests: {median(ratios):.2f}x")
    print(f"Python overhead per round outside the forwards: median {median(overhead) * 1e3:.2f} ms")


if __name__ == "__main__":
    main()
