"""`python -m assc trace info|check|pack|import`: look at traces, convert and import them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from assc.cli import UsageError, parse, run_cli
from assc.core import Mode
from assc.trace import FINISHES, Trace
from assc.trace_import import import_jsonl
from assc.trace_io import read_trace, write_trace


@dataclass(frozen=True)
class Info:
    """Options of `trace info`."""

    file: str
    """trace: .npz file, folder of columns, or folder of shards"""
    split: Literal["held-out", "train", "draft", "all"] = "all"
    """requests of the table of drafters"""
    by: Literal["nothing", "category"] = "nothing"
    """a line per category as well"""


@dataclass(frozen=True)
class Pack:
    """Options of `trace pack`."""

    file: str
    """trace to read"""
    out: Path
    """.npz file to ship, or a folder of columns that can be mapped into memory"""


@dataclass(frozen=True)
class Import:
    """Options of `trace import`."""

    file: str
    """JSONL with prompt_token_ids, generated_token_ids and acc_<drafter>.acc_len per line"""
    out: Path
    """.npz file or folder to write"""
    mode: Mode = "greedy"
    """verification mode of the recording; rejection can be replayed approximately only"""
    temperature: float = 0.0
    """sampling temperature of the recording"""
    lookups: tuple[str, ...] = ("ngram", "suffix")
    """drafters whose name starts with one of these are lookups: no forwards, nothing to catch up"""
    category: str = ""
    """category of lines that name none"""
    k_max: int = 16
    """larger accepted lengths are cut to it"""


def describe(trace: Trace) -> str:
    """What a trace holds, for people."""
    h, c = trace.header, trace.columns
    lengths = np.diff(c["offsets"])
    lines = [
        f"{trace.name}: {len(trace)} requests, {trace.positions:,} positions, schema {h.schema}",
        f"pair {h.pair or '?'}, mode {h.mode}, {h.dtype or '?'} on {h.device or '?'} with {h.threads or '?'} threads, "
        f"K_max {h.k_max}, seed {h.seed}",
        f"workload {h.workload or '?'} ({h.workload_hash or 'no hash'}), at most {h.max_new_tokens} tokens, "
        f"mean {lengths.mean():.1f}",
        f"recorded {h.created or '?'} by version {h.code or '?'}; models: "
        + (", ".join(f"{role} {mark}" for role, mark in sorted(h.models.items())) or "?"),
        f"teacher-forced pass disagreed at {h.recheck_mismatches} positions",
        "confidences of draft steps: " + (", ".join(f"{d.name} {d.steps}" for d in h.drafters if d.steps) or "none"),
        "ends: " + ", ".join(f"{name} {n}" for i, name in enumerate(FINISHES) if (n := int((c["finish"] == i).sum()))),
        "splits: " + ", ".join(f"{s} {int((c['split'] == s).sum())}" for s in sorted(set(c["split"].tolist()))),
    ]
    return "\n".join(lines)


TABLE_K = (1, 2, 4, 8, 16)


def static_rounds(trace: Trace, drafter: str, row: int, k: int) -> int:
    """Rounds that static K takes over the text of a request."""
    first, last = trace.columns["offsets"][row : row + 2].tolist()
    acc = trace.columns[f"acc/{drafter}"]
    rounds = 0
    while first < last:
        first += min(k, int(acc[first]), last - first - 1) + 1
        rounds += 1
    return rounds


def drafter_table(trace: Trace, split: str = "all", by: str = "nothing") -> str:
    """Per drafter and temperature (and category): how often it proposes, how often its first token is accepted where
    it does, the mean length accepted of K_max there, and the tokens per round of static K.
    """
    c, h = trace.columns, trace.header
    owner = np.repeat(np.arange(len(trace)), np.diff(c["offsets"]))
    wanted = np.ones(len(trace), bool) if split == "all" else c["split"] == split
    ks = [k for k in TABLE_K if k <= h.k_max]
    head = f"{'drafter':<10} {'temp':>4} {'category':<14} {'requests':>8} {'positions':>9} {'proposes':>8} "
    lines = [head + f"{'first token':>11} {'mean run':>8}  tokens/round at K=" + " ".join(f"{k:>5}" for k in ks)]
    categories = ["all", *(sorted(set(c["category"].tolist())) if by == "category" else [])]
    for drafter in trace.drafters:
        acc, avail = c[f"acc/{drafter}"], c[f"avail/{drafter}"]
        for temperature in sorted(set(c["temperature"].tolist())):
            for category in categories:
                some = wanted & (c["temperature"] == temperature)
                some = some if category == "all" else some & (c["category"] == category)
                here = some[owner]
                if not here.any():
                    continue
                proposed = here & (avail > 0)
                first = f"{(acc[proposed] > 0).mean():.1%}" if proposed.any() else "n/a"
                mean = f"{acc[proposed].mean():.2f}" if proposed.any() else "n/a"
                rounds = [sum(static_rounds(trace, drafter, r, k) for r in np.flatnonzero(some).tolist()) for k in ks]
                lines.append(
                    f"{drafter:<10} {temperature:>4g} {category:<14} {int(some.sum()):>8} {int(here.sum()):>9} "
                    f"{proposed.sum() / here.sum():>8.1%} {first:>11} {mean:>8}  {'':<18}"
                    + " ".join(f"{here.sum() / n:>5.2f}" for n in rounds)
                )
    return "\n".join(lines)


def _info(words: Sequence[str]) -> None:
    config = parse(Info, _named(words, 1), prog="python -m assc trace info", description="Describe and check a trace.")
    trace = read_trace(config.file)
    print(describe(trace), drafter_table(trace, config.split, config.by), sep="\n\n")


def _pack(words: Sequence[str]) -> None:
    config = parse(Pack, _named(words, 2), prog="python -m assc trace pack", description="Convert a trace.")
    write_trace(read_trace(config.file), config.out)
    print(config.out)


def _import(words: Sequence[str]) -> None:
    config = parse(Import, _named(words, 1), prog="python -m assc trace import", description="Import a JSONL trace.")
    trace = import_jsonl(
        Path(config.file),
        mode=config.mode,
        temperature=config.temperature,
        lookups=config.lookups,
        category=config.category,
        k_max=config.k_max,
    )
    write_trace(trace, config.out)
    print(describe(written := read_trace(config.out)), drafter_table(written), sep="\n\n")
    longest = max(int(written.columns[f"acc/{name}"].max()) for name in written.drafters)
    if 0 < longest < config.k_max:
        print(
            f"\nNote: no accepted length is above {longest} tokens, K_max is {config.k_max}. If drafts were no longer, "
            f"give --k-max {longest}: a larger K would pay for tokens that were never proposed."
        )


def _named(words: Sequence[str], most: int) -> list[str]:
    """Leading bare words become --file and --out."""
    bare = 0
    while bare < min(most, len(words)) and not words[bare].startswith("-"):
        bare += 1
    flags = [f for name, word in zip(("--file", "--out"), words[:bare], strict=False) for f in (name, word)]
    return [*flags, *words[bare:]]


COMMANDS = {"info": _info, "pack": _pack, "import": _import}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 2 and one sentence for a mistake of the user."""
    words = list(sys.argv[1:] if argv is None else argv)

    def work() -> int:
        if not words or words[0] in ("-h", "--help"):
            print("usage: python -m assc trace info FILE | pack FILE OUT | import FILE.jsonl --out OUT")
            return 0
        if words[0] not in COMMANDS:
            raise UsageError(f"unknown command {words[0]!r}; trace knows {', '.join(COMMANDS)}")
        COMMANDS[words[0]](words[1:])
        return 0

    return run_cli(work)
