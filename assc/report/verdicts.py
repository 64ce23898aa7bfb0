"""Who is best where, and is it more than chance: every policy against each reference, adjusted by Holm's procedure.

A family is one reference (plain decoding, the tuned static action, the ASSC heuristic, the policy of `--against`) and
one table (all requests, the categories, the temperatures). All policies in all groups of the table are in it, not only
the best one of each group, so that choosing the best on the same requests is allowed for. Over all requests a family
is the one that eval.py prints and stores (`assc.comparisons`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np

from assc.comparisons import ALPHA
from assc.report.compare import (
    Cell,
    Group,
    candidates,
    cell,
    columns_of,
    is_heuristic,
    is_tuned,
    prompt_of,
    reference,
    row_of,
)
from assc.report.join import Report
from assc.report.nouns import Entry
from assc.stats import NO_INTERVAL, Interval, Paired, holm
from assc.stats import compare as paired

Verdict = Literal["itself", "faster", "perhaps", "slower", "open", "unknown"]


@dataclass(frozen=True)
class Comparison:
    """One policy against a reference in one group: ratio of tokens per second, paired and clustered by prompt."""

    other: str
    verdict: Verdict
    ratio: float | None = None
    interval: Interval = NO_INTERVAL
    p_value: float | None = None
    """of this comparison alone"""
    p_holm: float | None = None
    """adjusted for all comparisons of the family"""
    tests: int = 1
    """comparisons of the family"""
    detectable: float | None = None
    """minimum detectable effect, one comparison alone"""


@dataclass(frozen=True)
class Reference:
    """With what the others are compared: `wanted` finds it, None is plain decoding."""

    key: str
    name: str
    wanted: Callable[[Entry], bool] | None = None

    def of(self, report: Report, entry: Entry) -> Entry | None:
        """The policy on the clock of `entry`, None where it was not played (or is plain decoding)."""
        return None if self.wanted is None else reference(report, entry, self.wanted)

    def played(self, report: Report) -> bool:
        return self.wanted is None or any(map(self.wanted, report.entries))


PLAIN = Reference("plain", "plain decoding")
TUNED = Reference("tuned", "the tuned static action", is_tuned)
HEURISTIC = Reference("heuristic", "the ASSC heuristic", is_heuristic)


def _is_called(name: str, entry: Entry) -> bool:
    return entry.given == name


def references(report: Report) -> list[Reference]:
    """Those that were played; that of `eval.py --against` too where it is another policy."""
    found = [r for r in (PLAIN, TUNED, HEURISTIC) if r.played(report)]
    names = {r.against for r in report.results if r.against is not None}
    for name in sorted(names):
        entry = next((e for e in report.entries if e.given == name), None)
        if entry is not None and not any(r.wanted is not None and r.wanted(entry) for r in found):
            found.append(Reference("against", entry.label, partial(_is_called, name)))
    return found


@dataclass(frozen=True)
class Line:
    """What is to be said about one group."""

    group: Group
    prompts: int
    requests: int
    best: Entry
    cell: Cell
    against: Mapping[str, Comparison]
    """key of a reference -> the best policy against it; missing where it was not played"""
    oracle: float | None
    """speed-up of the oracle"""
    fraction: float | None
    """share of the way from the tuned static to the oracle"""


Cells = dict[tuple[str, Group], Cell]


Family = dict[tuple[str, Group], Comparison]
"""(label, group) -> comparison with one reference"""


@dataclass(frozen=True)
class Judged:
    """One table: speed-ups by (label, group), one line per group, and per key of a reference its family."""

    cells: Cells
    lines: list[Line]
    families: Mapping[str, Family]


def judge(report: Report, groups: Sequence[Group]) -> Judged:
    """The speed-ups in these groups and what follows from them; `groups` are one table."""
    cells: Cells = {}
    for group in groups:
        mine = {e.label: cell(report, e, group) for e in report.entries}
        known = [e for e in candidates(report.entries) if mine[e.label].speedup is not None]
        if known:
            best = max(known, key=lambda e: mine[e.label].speedup or 0.0)
            mine[best.label] = replace(mine[best.label], best=True)
            cells |= {(label, group): found for label, found in mine.items()}
    families = {r.key: family(report, groups, r) for r in references(report)}
    lines = []
    for group in groups:
        winner = next((e for e in report.entries if (e.label, group) in cells and cells[e.label, group].best), None)
        if winner is None:
            continue
        against = {key: found[winner.label, group] for key, found in families.items() if (winner.label, group) in found}
        mine = {e.label: cells[e.label, group] for e in report.entries}
        played = [p for p in winner.played if group.holds(p)]
        lines.append(
            Line(
                group=group,
                prompts=len({prompt_of(p) for p in played}),
                requests=len({p.index for p in played}),
                best=winner,
                cell=mine[winner.label],
                against=against,
                oracle=_oracle(report, group, mine),
                fraction=_fraction(winner, group),
            )
        )
    return Judged(cells, lines, families)


def family(report: Report, groups: Sequence[Group], against: Reference) -> Family:
    """(label, group) -> comparison, of every policy but the oracle, with the adjusted p-values."""
    found: dict[tuple[str, Group], tuple[str, Paired]] = {}
    same: dict[tuple[str, Group], Comparison] = {}
    for group in groups:
        for entry in candidates(report.entries):
            other = against.of(report, entry)
            key, name = (entry.label, group), against.name if other is None else other.label
            if other is entry or (against is PLAIN and entry.name == "ar"):
                same[key] = Comparison(name, "itself", 1.0)
            elif against is not PLAIN and other is None:  # on another clock
                same[key] = Comparison(name, "unknown")
            else:
                found[key] = name, _pair(report, entry, other, group)
    adjusted = iter(holm([pair.p_value for _, pair in found.values() if pair.p_value is not None]))
    tests = sum(pair.p_value is not None for _, pair in found.values())
    judged = {
        key: _judged(name, pair, None if pair.p_value is None else next(adjusted), tests)
        for key, (name, pair) in found.items()
    }
    return same | judged


def _pair(report: Report, entry: Entry, other: Entry | None, group: Group) -> Paired:
    if not entry.played or (other is not None and not other.played):
        return Paired(None)
    return paired(*columns_of(entry, other, group), rng=np.random.default_rng(report.seed))


def _judged(other: str, pair: Paired, p_holm: float | None, tests: int) -> Comparison:
    return Comparison(
        other=other,
        verdict=_verdict(pair, p_holm),
        ratio=pair.ratio,
        interval=pair.interval,
        p_value=pair.p_value,
        p_holm=p_holm,
        tests=tests,
        detectable=pair.detectable,
    )


def _verdict(pair: Paired, p_holm: float | None) -> Verdict:
    if pair.ratio is None or pair.p_value is None or p_holm is None:
        return "unknown"
    if p_holm < ALPHA:
        return "faster" if pair.ratio > 1 else "slower"
    return "perhaps" if pair.p_value < ALPHA else "open"


def _oracle(report: Report, group: Group, cells: Mapping[str, Cell]) -> float | None:
    played = [e for e in report.entries if e.oracle]
    if played:
        return cells[played[0].label].speedup
    rung = (report.ladder or {}).get("oracle")
    return None if rung is None or group.kind != "all" else float(rung["speedup"])


def _fraction(entry: Entry, group: Group) -> float | None:
    row = row_of(entry, group)
    return None if row is None else row["oracle_fraction"]
