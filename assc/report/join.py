"""Several results as one set of policies; results that cannot be compared are refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from assc.report.checked import ResultError
from assc.report.load import read_result
from assc.report.nouns import Entry, Result, Row, View
from assc.results import short_labels

SHARED: Mapping[str, str] = {
    "mode": "verification mode",
    "time_source": "time source",
    "pair": "pair",
    "device": "device",
    "dtype": "dtype",
    "workload_hash": "workload",
    "split": "split",
    "max_new_tokens": "budget of tokens",
    "k_max": "largest K of the action table",
    "drafters": "set of drafters",
}
"""entries of `meta` that must agree, with their names for people"""


@dataclass(frozen=True)
class Report:
    """Everything on the page."""

    results: tuple[Result, ...]
    entries: tuple[Entry, ...]
    """policies of all results, each with a label of its own"""
    ladder: Mapping[str, Row | None] | None
    views: tuple[View, ...]

    @property
    def meta(self) -> Mapping[str, Any]:
        return self.results[0].meta

    @property
    def seed(self) -> int:
        """Of the resamples, so that intervals are those of the result file."""
        seed = self.meta.get("seed")
        return seed if isinstance(seed, int) and seed >= 0 else 0

    @property
    def measured(self) -> bool:
        return bool(self.meta["time_source"] == "measured")

    def comparable(self, a: Entry, b: Entry) -> bool:
        """Whether their seconds are of one clock: of one run, or modelled by one cost model."""
        return a.result == b.result or not self.measured


def read_report(paths: Sequence[Path]) -> Report:
    """Read and join. `ResultError` with one sentence for what is no result or cannot stand beside the others."""
    if not paths:
        raise ResultError("no result is given: name run directories of train_policy.py or files of eval.py --json")
    seen: set[Path] = set()
    for path in paths:
        if path.resolve() in seen:
            raise ResultError(f"{path} is given twice")
        seen.add(path.resolve())
    return join([read_result(path) for path in paths])


def join(results: Sequence[Result]) -> Report:
    """One report. A policy that is in several results with the same seconds is kept once."""
    first = results[0]
    for other in results[1:]:
        _check_pair(first, other)
    modelled, kept = first.meta["time_source"] == "modelled", list[Entry]()
    for i, result in enumerate(results):
        for entry in result.entries:
            twins = [k for k in kept if k.result != i and k.label == entry.label and k.played == entry.played]
            if not (modelled and entry.played and twins):
                kept.append(replace(entry, result=i))
    short = short_labels([e.label for e in kept])
    names, labels = _short_names(results), Counter(short[e.label] for e in kept)
    renamed = {(e.result, e.label): s if labels[s := short[e.label]] == 1 else f"{s} [{names[e.result]}]" for e in kept}
    ladder = next((r.ladder for r in results if r.ladder is not None), None)
    entries = tuple(replace(e, label=renamed[e.result, e.label], given=e.label) for e in kept)
    return Report(tuple(results), entries, ladder, _views(results, renamed))


def _short_names(results: Sequence[Result]) -> list[str]:
    """Last part of each path, or all of it where that is not unique."""
    stems = [Path(r.name).stem or r.name for r in results]
    return stems if len(set(stems)) == len(stems) else [r.name for r in results]


def _views(results: Sequence[Result], labels: Mapping[tuple[int, str], str]) -> tuple[View, ...]:
    """Requests whose rounds were stored, each once, with the runs of all results under the labels of the page."""
    found: dict[object, View] = {}
    for i, result in enumerate(results):
        for view in result.views:
            key = view.id, view.category, view.temperature
            runs = tuple(replace(r, policy=labels[i, r.policy]) for r in view.runs if (i, r.policy) in labels)
            before = found.get(key)
            if before is None:
                found[key] = replace(view, runs=runs)
            else:
                texts = {**(before.texts or {}), **(view.texts or {})}
                found[key] = replace(before, runs=before.runs + runs, texts=texts or None)
    return tuple(found.values())


def _check_pair(one: Result, two: Result) -> None:
    """`ResultError` unless both were made under the same conditions on the same requests."""

    def differ(what: str, a: object = None, b: object = None) -> ResultError:
        values = "" if a is None and b is None else f" ({a} and {b})"
        return ResultError(f"{one.name} and {two.name} cannot be in one report: their {what} differs{values}")

    for key, what in SHARED.items():
        a, b = one.meta.get(key), two.meta.get(key)
        if a != b:
            raise differ(what, a, b)
    if _trace(one) != _trace(two):
        raise differ("trace", *(str(_trace(r))[:12] for r in (one, two)))
    if one.meta["time_source"] == "modelled" and one.meta.get("cost_model") != two.meta.get("cost_model"):
        raise differ("cost model")
    if one.complete != two.complete or _requests(one) != _requests(two):
        raise differ("choice of requests")


def _trace(result: Result) -> object:
    trace = result.meta.get("trace")
    return trace.get("sha256") if isinstance(trace, dict) else None


def _requests(result: Result) -> list[object]:
    return [(p.key, p.temperature) for p in result.entries[0].played]
