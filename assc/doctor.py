"""`python -m assc doctor`: what this machine can run, in plain aligned lines."""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch

from assc.catalogue import PAIRS, PairSpec, pair_spec
from assc.cli import parse, run_cli
from assc.convert import cache_dir
from assc.device import cpu_features, resolve_device, resolve_dtype
from assc.hardware import cpu_name, usable_cores
from assc.sources import availability

if TYPE_CHECKING:
    from assc.pairs import LoadedPair

CHECK_TOKENS = 8
CHECK_PROMPT = "What is the capital of France?"


@dataclass(frozen=True)
class Config:
    """Options of `python -m assc doctor`."""

    pair: str | None = None
    """show only this pair"""
    check: str | None = None
    """load this pair (downloading it if need be) and decode 8 tokens with transformers"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, ..."""
    dtype: str = "auto"
    """auto, bfloat16, float16, float32 or float64"""
    threads: int | None = None
    """torch threads; default: torch's own choice"""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; 2 and one sentence for an unknown pair, device or dtype, or a pair that fails its check."""
    prog, text = "python -m assc doctor", "What this machine can run: device, dtype, versions, model pairs."
    return run_cli(lambda: _report(parse(Config, argv, prog=prog, description=text)))


def _report(config: Config) -> int:
    specs = [pair_spec(config.pair)] if config.pair is not None else list(PAIRS.values())
    if config.check is not None:
        pair_spec(config.check)
    rows = list(_machine(config))
    rows.append(("versions", ", ".join(f"{name} {version}" for name, version in versions().items())))
    for label, value in rows:
        print(f"{label:<10}{value}")
    print("\npairs (each also has the n-gram drafter)")
    width = max(len(spec.name) for spec in specs)
    for spec in specs:
        print("\n".join(_pair_lines(spec, width)))
    if config.check is not None:
        print()
        for line in check(config.check, config):
            print(line, flush=True)
    return 0


def _machine(config: Config) -> Iterator[tuple[str, str]]:
    """Label and value of each line about this machine."""
    device = resolve_device(config.device)
    yield "assc", f"{_version('assc')}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    if device.type == "cuda":
        card: Any = torch.cuda.get_device_properties(device)
        yield "device", f"{device}: {card.name}, {card.total_memory / 2**30:.0f} GiB"
    else:
        yield "device", f"{device}: {cpu_name()}, {usable_cores()} usable cores"
    features = ", ".join(f"{name} {'yes' if there else 'no'}" for name, there in cpu_features().items())
    yield "cpu", features
    how = "default" if config.dtype == "auto" else "chosen"
    yield "dtype", f"{str(resolve_dtype(config.dtype, device)).removeprefix('torch.')} ({how})"
    threads = config.threads if config.threads is not None else torch.get_num_threads()
    yield "threads", f"{threads}, OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'unset')}"
    yield "cache", f"{cache_dir()} (change it with ASSC_CACHE)"


def versions() -> dict[str, str]:
    """Installed version of every run-time dependency of this package, "missing" where there is none."""
    try:
        required = metadata.requires("assc") or []
    except metadata.PackageNotFoundError:  # a source tree that was never installed
        required = ["torch", "transformers", "gymnasium", "numpy"]
    names = [re.split(r"[^A-Za-z0-9._-]", line)[0] for line in required if "extra ==" not in line]
    return {name: _version(name) for name in names}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "missing"


def _pair_lines(spec: PairSpec, width: int) -> Iterator[str]:
    """One line for the pair, one for each of its models."""
    models = {"target": spec.target, **spec.drafts}
    states = {role: availability(source) for role, source in models.items()}
    found = "found" if all(state.found for state in states.values()) else "absent"
    gated = ", gated" if spec.gated else ""
    yield f"  {spec.name:<{width}}  {found:<6}  {spec.origin} [{spec.licence}{gated}]"
    for role, state in states.items():
        yield f"  {'':<{width}}          {role} {models[role]}: {state.detail}"


def draft_memory(pair: LoadedPair) -> list[str]:
    """Bytes of each drafter of a pair after it has drafted one token behind `CHECK_PROMPT`."""
    from assc.core import Action, Request
    from assc.live import LiveBackend
    from assc.loading import build_engine

    backend, lines = LiveBackend(build_engine(pair, k_max=1)), []
    for name, drafter in backend.engine.drafters.items():
        backend.reset(Request(pair.encode(CHECK_PROMPT), 2))
        backend.step(Action(name, 1))
        lines.append(str(drafter.memory()))
    return lines


def check(name: str, config: Config) -> Iterator[str]:
    """Load a pair, decode a few tokens with the target and run each draft once; yields lines to print."""
    from assc.pairs import load_pair

    start = time.perf_counter()
    pair = load_pair(name, device=config.device, dtype=config.dtype, threads=config.threads)
    dtype = str(pair.dtype).removeprefix("torch.")
    yield f"check     {name} loaded in {time.perf_counter() - start:.1f} s ({dtype} on {pair.device})"
    prompt = torch.tensor([pair.encode(CHECK_PROMPT)], device=pair.device)
    start = time.perf_counter()
    target: Any = pair.target
    output = target.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=CHECK_TOKENS, do_sample=False
    )
    new = output[0, prompt.shape[1] :].tolist()
    seconds = time.perf_counter() - start
    yield f"check     {CHECK_PROMPT!r} -> {pair.decode(new)!r} ({len(new)} tokens in {seconds:.1f} s)"
    for line in draft_memory(pair):
        yield f"check     drafter {line}"
    for key, draft in pair.drafts.items():
        with torch.inference_mode():
            logits = draft(prompt).logits
        yield f"check     draft {key!r} answers ({logits.shape[-1]} logits, {pair.vocab_size} ids shared)"
