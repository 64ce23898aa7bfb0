"""Speed-ups by category and temperature, comparisons with verdicts, and all rows as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from typing import Any

from assc.comparisons import ALPHA, Family, Line
from assc.metrics import ROW_KEYS
from assc.results import Evaluation
from assc.stats import POWER

Cells = tuple[list[str], list[list[str]]]
"""columns and lines of a table"""


def group_table(evaluation: Evaluation) -> Cells | None:
    """Speed-up of each policy (lines) in each category and at each temperature (columns); None for a single group.

    A speed-up whose own 95 % interval includes 1 stands in brackets.
    """
    groups = [(name or "(none)", rows) for name, rows in evaluation.by_category().items()]
    groups = groups if len(groups) > 1 else []
    heats = [(f"T = {name}", rows) for name, rows in evaluation.by_temperature().items()]
    groups += heats if len(heats) > 1 else []
    if not groups:
        return None
    lines = [[label, *(_speedup(rows[i]) for _, rows in groups)] for i, label in enumerate(evaluation.labels)]
    return ["speed-up by group", *(name for name, _ in groups)], lines


def _speedup(row: dict[str, Any]) -> str:
    low, high = row["speedup_ci95"]
    if row["speedup"] is None:
        return "n/a"
    sure = low is not None and high is not None and (low > 1 or high < 1 or low == high)
    return f"{row['speedup']:.2f}x" if sure else f"({row['speedup']:.2f}x)"


GROUP_NOTE = "by group: a speed-up in brackets has a 95 % interval that includes 1, or none (too few prompts)"


def family_table(family: Family) -> Cells:
    """All comparisons with one reference."""
    columns = [f"against {family.against}", "ratio", "95 % interval", "p", "p (Holm)", "verdict"]
    return [*columns, "detectable", "prompts for 1 %"], [_cells(line) for line in family.lines]


def _cells(line: Line) -> list[str]:
    low, high = line.ci95
    return [
        line.label,
        "n/a" if line.ratio is None else f"{line.ratio:.3f}x",
        "n/a" if low is None or high is None else f"{low:.3f} to {high:.3f}",
        _p(line.p_value),
        _p(line.p_holm),
        line.verdict,
        "n/a" if line.detectable is None else f"{100 * line.detectable:.1f} %",
        "n/a" if line.prompts_for_one_percent is None else str(line.prompts_for_one_percent),
    ]


def _p(value: float | None) -> str:
    return "n/a" if value is None else "<0.001" if value < 0.001 else f"{value:.3f}"


def family_note(found: Sequence[Family]) -> str:
    """What the verdicts allow for and what `detectable` means."""
    tests = " and ".join(f"{family.tests} against {family.against}" for family in found)
    return (
        f"verdicts hold at {100 * ALPHA:g} % for all comparisons with one reference together (Holm; {tests}); "
        f"detectable: the least true difference that {found[0].prompts} prompts show with odds of {100 * POWER:g} %, "
        "one comparison alone"
    )


# -- CSV -------------------------------------------------------------------------------------------------------------

CSV_COLUMNS: tuple[str, ...] = (
    "group",
    "value",
    "label",
    *(name for key in ROW_KEYS for name in (("speedup_low", "speedup_high") if key == "speedup_ci95" else (key,))),
)
"""`group` is all, category or temperature; the other columns are those of the rows, the interval as two numbers"""


def to_csv(evaluation: Evaluation) -> str:
    """One line per policy over all requests, then of each category and each temperature; empty where unknown."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for group, value, rows in _groups(evaluation):
        for label, row in zip(evaluation.labels, rows, strict=True):
            low, high = row["speedup_ci95"]
            cells = [x for key in ROW_KEYS for x in ((low, high) if key == "speedup_ci95" else (row[key],))]
            writer.writerow([group, value, label, *("" if x is None else x for x in cells)])
    return text.getvalue()


def _groups(evaluation: Evaluation) -> Iterator[tuple[str, str, list[dict[str, Any]]]]:
    yield "all", "", evaluation.rows()
    for name, rows in evaluation.by_category().items():
        yield "category", name, rows
    for name, rows in evaluation.by_temperature().items():
        yield "temperature", name, rows
