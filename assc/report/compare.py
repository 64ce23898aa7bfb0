"""Who is best where, and is it more than chance: paired bootstraps over prompts, several at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from assc.report.join import Report
from assc.report.nouns import Entry, Played, Row
from assc.stats import NO_INTERVAL, Interval, speedup, speedup_interval

LEVEL = 0.95
FINE_RESAMPLES = 20_000
"""for intervals whose ends lie far out in the tails"""

Columns = tuple[list[float], list[float], list[float], list[float]]


@dataclass(frozen=True)
class Group:
    """Some of the requests: all, those of a category, or those at a temperature."""

    name: str
    kind: Literal["all", "category", "temperature"]
    value: str | float | None = None

    def holds(self, played: Played) -> bool:
        return self.kind == "all" or self.value == getattr(played, self.kind)


@dataclass(frozen=True)
class Cell:
    """Speed-up of one policy in one group. `best` among the policies that could be deployed."""

    speedup: float | None
    interval: Interval
    best: bool = False


Verdict = Literal["itself", "faster", "perhaps", "slower", "open", "unknown"]


@dataclass(frozen=True)
class Comparison:
    """The best policy of a group against another one: ratio of tokens per second."""

    other: str
    ratio: float | None
    interval: Interval
    verdict: Verdict
    adjusted: Interval = NO_INTERVAL
    """at the level that allows for all comparisons of the page; only where the plain one excludes 1"""


@dataclass(frozen=True)
class Line:
    """What is to be said about one group."""

    group: Group
    requests: int
    best: Entry
    cell: Cell
    tuned: Comparison | None
    """None where no tuned static was played"""
    heuristic: Comparison | None
    oracle: float | None
    """speed-up of the oracle"""
    fraction: float | None
    """share of the way from the tuned static to the oracle"""


def groups_of(report: Report) -> tuple[list[Group], list[Group]]:
    """All and the categories; and the temperatures where there are several."""
    entry = report.entries[0]
    categories = list(entry.categories) or sorted({p.category for p in entry.played})
    several = len(categories) > 1 or categories != [""]
    everything = Group("all", "all")
    found = [everything, *(Group(c or "(none)", "category", c) for c in categories if several)]
    known = sorted({p.temperature for p in entry.played if p.temperature is not None})
    return found, [Group(f"T = {t:g}", "temperature", t) for t in known] if len(known) > 1 else []


def row_of(entry: Entry, group: Group) -> Row | None:
    """What the result file says about this group."""
    if group.kind == "all":
        return entry.row
    return entry.categories.get(str(group.value)) if group.kind == "category" else None


def cell(report: Report, entry: Entry, group: Group) -> Cell:
    """As the result file has it; computed in the same way where it doesn't (temperatures)."""
    row = row_of(entry, group)
    if row is not None:
        return Cell(row["speedup"], row["speedup_ci95"])
    columns = _columns(entry, None, group, _prompt)
    rng = np.random.default_rng(report.seed)
    return Cell(speedup(*columns), speedup_interval(*columns, rng=rng))


def _columns(entry: Entry, other: Entry | None, group: Group, key: Callable[[Played], object]) -> Columns:
    """Tokens and seconds of both per unit of `key`; against plain decoding where there is no `other`."""
    sums: dict[object, list[float]] = {}
    theirs = (other or entry).played
    for mine, its in zip(entry.played, theirs, strict=True):
        if not group.holds(mine):
            continue
        base = (its.plain_tokens, its.plain_seconds) if other is None else (its.tokens, its.seconds)
        found = sums.setdefault(key(mine), [0.0] * 4)
        for i, value in enumerate((mine.tokens, mine.seconds, *base)):
            found[i] += value
    rows = list(sums.values())
    return tuple([r[i] for r in rows] for i in range(4))  # type: ignore[return-value]


def _prompt(played: Played) -> object:
    """The unit that is resampled: a prompt with all its temperatures and repeats; requests without id stand alone."""
    return played.id or played.index


def compare(report: Report, best: Entry, other: Entry, group: Group) -> Comparison:
    """Paired and clustered by prompt, not adjusted."""
    if other is best:
        return Comparison(other.label, 1.0, NO_INTERVAL, "itself")
    if not (best.played and other.played and report.comparable(best, other)):
        return Comparison(other.label, None, NO_INTERVAL, "unknown")
    columns = _columns(best, other, group, _prompt)
    interval = speedup_interval(*columns, rng=np.random.default_rng(report.seed), level=LEVEL)
    return Comparison(other.label, speedup(*columns), interval, _judge(interval))


def _judge(interval: Interval) -> Verdict:
    low, high = interval
    if low is None or high is None:
        return "unknown"
    return "faster" if low > 1 else "slower" if high < 1 else "open"


def _adjust(report: Report, found: Comparison, best: Entry, other: Entry, group: Group, tests: int) -> Comparison:
    """The same with its verdict after Bonferroni: `perhaps` where only the plain interval excludes 1."""
    if found.verdict not in ("faster", "slower"):
        return found
    rng, level = np.random.default_rng(report.seed), 1 - (1 - LEVEL) / tests
    columns = _columns(best, other, group, _prompt)
    adjusted = speedup_interval(*columns, rng=rng, level=level, resamples=FINE_RESAMPLES)
    return replace(found, adjusted=adjusted, verdict=found.verdict if _judge(adjusted) != "open" else "perhaps")


def reference(report: Report, entry: Entry, wanted: Callable[[Entry], bool]) -> Entry | None:
    """The first policy of that kind on the same clock, of the same result where there is one."""
    found = [e for e in report.entries if wanted(e)]
    same = [e for e in found if e.result == entry.result]
    return next((e for e in (*same, *found) if report.comparable(e, entry)), None)


def is_tuned(entry: Entry) -> bool:
    """The static action tuned on train requests, as eval.py and train_policy.py name it."""
    policy = str(entry.row["policy"])
    return policy == "static:tuned" or policy.endswith("(tuned)")


def is_heuristic(entry: Entry) -> bool:
    """The ASSC state machine in any variant."""
    return entry.name == "assc"


def candidates(entries: Sequence[Entry]) -> list[Entry]:
    """Policies that could be deployed: all but the oracle, which knows the text beforehand."""
    return [e for e in entries if not e.oracle] or list(entries)


def lines_of(report: Report, groups: Sequence[Group]) -> tuple[dict[tuple[str, Group], Cell], list[Line]]:
    """Cells by (label, group), and one line per group, verdicts not yet adjusted."""
    cells: dict[tuple[str, Group], Cell] = {}
    lines = []
    for group in groups:
        mine = {e.label: cell(report, e, group) for e in report.entries}
        known = [e for e in candidates(report.entries) if mine[e.label].speedup is not None]
        if not known:
            continue
        best = max(known, key=lambda e: mine[e.label].speedup or 0.0)
        mine[best.label] = replace(mine[best.label], best=True)
        cells |= {(label, group): found for label, found in mine.items()}
        tuned, heuristic = (reference(report, best, kind) for kind in (is_tuned, is_heuristic))
        lines.append(
            Line(
                group=group,
                requests=len({p.index for p in best.played if group.holds(p)}),
                best=best,
                cell=mine[best.label],
                tuned=None if tuned is None else compare(report, best, tuned, group),
                heuristic=None if heuristic is None else compare(report, best, heuristic, group),
                oracle=_oracle(report, group, mine),
                fraction=_fraction(best, group),
            )
        )
    return cells, lines


def _oracle(report: Report, group: Group, cells: Mapping[str, Cell]) -> float | None:
    played = [e for e in report.entries if e.oracle]
    if played:
        return cells[played[0].label].speedup
    rung = (report.ladder or {}).get("oracle")
    return None if rung is None or group.kind != "all" else float(rung["speedup"])


def _fraction(entry: Entry, group: Group) -> float | None:
    row = row_of(entry, group)
    return None if row is None else row["oracle_fraction"]


def adjust(report: Report, lines: Sequence[Line], tests: int) -> list[Line]:
    """The lines with verdicts that allow for all the comparisons that were made."""

    def one(line: Line, found: Comparison | None, wanted: Callable[[Entry], bool]) -> Comparison | None:
        other = reference(report, line.best, wanted)
        if found is None or other is None:
            return found
        return _adjust(report, found, line.best, other, line.group, tests)

    return [replace(x, tuned=one(x, x.tuned, is_tuned), heuristic=one(x, x.heuristic, is_heuristic)) for x in lines]


def comparisons(lines: Sequence[Line]) -> int:
    """Comparisons that could have come out either way."""
    return sum(c is not None and c.verdict not in ("itself", "unknown") for x in lines for c in (x.tuned, x.heuristic))
