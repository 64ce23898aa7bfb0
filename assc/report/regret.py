"""Cumulative seconds of each policy beyond those of the oracle, of the best static action, or of plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from assc.report.compare import is_tuned
from assc.report.join import Report
from assc.report.nouns import Entry


@dataclass(frozen=True)
class Regret:
    """One curve per policy over the requests as they were played."""

    against: str
    curves: dict[str, list[float]]


def regret_of(report: Report) -> Regret | str:
    """The curves, or a sentence that says why there are none."""
    entries = [e for e in report.entries if e.played]
    if not entries:
        return "The file has no seconds per request, so there is no regret curve."
    if len({sum(p.tokens for p in e.played) for e in entries}) > 1:
        return "The policies emitted different numbers of tokens, so their seconds cannot be subtracted."
    references = {e.label: _reference(report, e, entries) for e in entries}
    if any(found is None for found in references.values()):
        references = {}
    curves, names = {}, set()
    for entry in entries:
        reference = references.get(entry.label)
        names.add("plain decoding" if reference is None else reference.label)
        theirs = [p.plain_seconds for p in entry.played] if reference is None else _seconds(reference)
        steps = [mine - its for mine, its in zip(_seconds(entry), theirs, strict=True)]
        curves[entry.label] = [0.0, *accumulate(steps)]
    return Regret(names.pop() if len(names) == 1 else "the best static action of the same run", curves)


def _seconds(entry: Entry) -> list[float]:
    return [p.seconds for p in entry.played]


def _reference(report: Report, entry: Entry, entries: Sequence[Entry]) -> Entry | None:
    """The oracle, else the static action with the fewest seconds, on the clock of `entry`."""
    mine = [e for e in entries if report.comparable(e, entry)]
    oracle = next((e for e in mine if e.oracle), None)
    static = [e for e in mine if e.name == "static" or is_tuned(e)]
    return oracle or min(static, key=lambda e: sum(_seconds(e)), default=None)
