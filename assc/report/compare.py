"""The groups of requests on the page, every policy's speed-up in each, and with whom a policy is compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from assc.report.join import Report
from assc.report.nouns import Entry, Played, Row
from assc.stats import Interval, speedup, speedup_interval

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
    if group.kind == "category":
        return entry.categories.get(str(group.value))
    return entry.temperatures.get(float(group.value)) if group.value is not None else None


def cell(report: Report, entry: Entry, group: Group) -> Cell:
    """As the result file has it; computed in the same way where it doesn't (older files)."""
    row = row_of(entry, group)
    if row is not None:
        return Cell(row["speedup"], row["speedup_ci95"])
    columns = columns_of(entry, None, group)
    rng = np.random.default_rng(report.seed)
    return Cell(speedup(*columns), speedup_interval(*columns, rng=rng))


def columns_of(entry: Entry, other: Entry | None, group: Group) -> Columns:
    """Tokens and seconds of both per prompt; against plain decoding where there is no `other`."""
    sums: dict[object, list[float]] = {}
    theirs = (other or entry).played
    for mine, its in zip(entry.played, theirs, strict=True):
        if not group.holds(mine):
            continue
        base = (its.plain_tokens, its.plain_seconds) if other is None else (its.tokens, its.seconds)
        found = sums.setdefault(prompt_of(mine), [0.0] * 4)
        for i, value in enumerate((mine.tokens, mine.seconds, *base)):
            found[i] += value
    rows = list(sums.values())
    return tuple([r[i] for r in rows] for i in range(4))  # type: ignore[return-value]


def prompt_of(played: Played) -> object:
    """The unit that is resampled: a prompt with all its temperatures and repeats; requests without id stand alone."""
    return played.id or played.index


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
