"""Result tables for people: on the terminal, in a pipe, and as Markdown."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import IO, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from assc.breakdown import GROUP_NOTE, family_note, family_table, group_table
from assc.comparisons import families
from assc.metrics import DEFINITIONS
from assc.monitor import health_line
from assc.results import Evaluation
from assc.table_notes import notes

PIPED_WIDTH = 200
"""columns of text when the output is no terminal; tables are as wide as they need to be there, for searching"""

HEADERS: tuple[str, ...] = (
    "policy",
    "rung",
    "tok/s",
    "speed-up",
    "95 % interval",
    "accepted",
    "wasted",
    "mean K",
    "tok/round",
    "rollback",
    "draft/verify/policy/other",
    "rounds",
)


def _number(value: float | None, digits: int = 2, suffix: str = "") -> str:
    return "n/a" if value is None else f"{value:.{digits}f}{suffix}"


def _percent(value: float | None) -> str:
    return "n/a" if value is None else f"{round(100 * value, 1) + 0.0:.1f} %"  # + 0.0: never "-0.0 %"


FRACTION = "oracle fraction"
"""a further column behind the interval, where there is a trace"""

RUNGS: dict[str, str] = {
    "plain": "plain decoding",
    "tuned": "static:tuned",
    "best_static_per_request": "static:best-per-request",
    "oracle": "oracle",
}


DEVIATION = "sd"
"""a further column behind the interval, where there were several seeds or repeats"""


def further(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The further columns that these rows have."""
    known = {DEVIATION: "speedup_sd", FRACTION: "oracle_fraction"}
    return [name for name, key in known.items() if any(row[key] is not None for row in rows)]


def headers(more: Sequence[str] = ()) -> list[str]:
    """The columns, with the further ones."""
    at = HEADERS.index("95 % interval") + 1
    return [*HEADERS[:at], *more, *HEADERS[at:]]


def _split(detail: Mapping[str, Any] | None, seconds: float) -> str:
    """Shares of the four phases in per cent, in the order of the header."""
    if detail is None or seconds <= 0:
        return "n/a"
    shares = [100 * detail[f"{phase}_seconds"] / seconds for phase in ("draft", "verify", "policy", "other")]
    return "/".join(f"{share:.1f}" for share in shares) + " %"


def cells(row: Mapping[str, Any], detail: Mapping[str, Any] | None = None, *, more: Sequence[str] = ()) -> list[str]:
    """One row as text, in the order of `headers`."""
    known = {DEVIATION: _spread(row), FRACTION: _percent(row["oracle_fraction"])}
    low, high = row["speedup_ci95"]
    action = "" if row["action"] is None else f" ({row['action']})"
    leaked = f" [LEAKED {row['leaked_requests']}]" if row["leaked_requests"] else ""
    return [
        f"{row['policy']}{action}{leaked}",
        row["rung"] or "n/a",
        _number(row["tokens_per_second"], 1),
        _number(row["speedup"], 3, "x"),
        "n/a" if low is None or high is None else f"{low:.3f} to {high:.3f}",
        *(known[name] for name in more),
        _percent(row["acceptance_rate"]),
        _percent(row["waste_rate"]),
        _number(row["mean_k"]),
        _number(row["tokens_per_round"]),
        _percent(row["rollback_rate"]),
        _split(detail, row["seconds"]),
        str(row["rounds"]),
    ]


def _spread(row: Mapping[str, Any]) -> str:
    return _number(row["speedup_sd"], 3) if row["speedup_sd"] is not None else "once" if row["plays"] == 1 else "n/a"


def conditions(meta: Mapping[str, Any]) -> str:
    """One line that says under which conditions the numbers hold."""
    c = meta.get("c")
    parts = [
        f"pair {meta.get('pair')}",
        f"{meta.get('device') or 'device'} {meta.get('dtype') or 'unknown'}",
        f"mode {meta.get('mode')}",
        f"c = {c:.3f}" if isinstance(c, float | int) else "c unknown",
        f"time {meta.get('time_source')}",
        f"{meta.get('requests')} requests x {meta.get('repeats')}" + (" seeds" if "policy_seeds" in meta else ""),
        f"seed {meta.get('seed')}",
    ]
    if "trace" in meta:
        parts.append(f"trace {meta['trace']['name']}")
    return ", ".join(parts)


def result_table(rows: Sequence[Mapping[str, Any]], details: Sequence[Mapping[str, Any]] | None = None) -> Table:
    """A rich table; `details` (in the order of `rows`) fill the column of phase times."""
    return text_table(*_result_cells(rows, details))


def _result_cells(
    rows: Sequence[Mapping[str, Any]], details: Sequence[Mapping[str, Any]] | None
) -> tuple[list[str], list[list[str]]]:
    more = further(rows)
    return headers(more), [cells(row, details[i] if details else None, more=more) for i, row in enumerate(rows)]


def text_table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> Table:
    """A rich table, the first column to the left."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, header in enumerate(columns):
        table.add_column(header, justify="right" if i else "left", no_wrap=i > 0)
    for line in lines:
        # Text(): a spec such as bandit[x] must not be read as markup
        table.add_row(*(Text(cell) for cell in line))
    return table


GAP_WIDTH = 3
"""blanks between two columns"""


def parts_of(
    columns: Sequence[str], lines: Sequence[Sequence[str]], width: int
) -> list[tuple[list[str], list[list[str]]]]:
    """The table in parts that fit into `width` characters, the first column in front of each.

    >>> [part for part, _ in parts_of(["policy", "a", "b"], [["ar", "1234", "12345678"]], 18)]
    [['policy', 'a'], ['policy', 'b']]
    """
    wide = _widths(columns, lines)
    parts: list[list[int]] = [[]]
    for i in range(1, len(columns)):
        if parts[-1] and wide[0] + sum(wide[j] for j in parts[-1]) + wide[i] > width:
            parts.append([])
        parts[-1].append(i)
    return [([columns[i] for i in (0, *p)], [[line[i] for i in (0, *p)] for line in lines]) for p in parts]


def _widths(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> list[int]:
    """Characters of each column with the gap behind it."""
    return [max(map(len, column)) + GAP_WIDTH for column in zip(columns, *lines, strict=True)]


def _rungs(rungs: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Columns and lines of the ladder."""
    lines = []
    for key, name in RUNGS.items():
        rung = rungs[key] or dict.fromkeys(("tokens_per_second", "speedup", "oracle_fraction"))
        action = f" ({rung['action']})" if "action" in rung else ""
        speeds = [_number(rung["tokens_per_second"], 1), _number(rung["speedup"], 3, "x")]
        lines.append([name + action, *speeds, _percent(rung["oracle_fraction"])])
    return ["ladder", "tok/s", "speed-up", FRACTION], lines


def console_for(file: IO[str] | None = None, at_least: int = 0) -> Console:
    """A console on `file` (standard output) that does not fold tables of `at_least` this width when it is piped."""
    stream = file if file is not None else sys.stdout
    tty = stream.isatty()
    return Console(file=stream, width=None if tty else max(PIPED_WIDTH, at_least), highlight=False, emoji=False)


def print_evaluation(
    evaluation: Evaluation, *, file: IO[str] | None = None, categories: bool = False, health: bool = False
) -> None:
    """The comparison table with its conditions and notes.

    With `health` a line of the health monitor per policy, with `categories` one more table for each category.
    """
    console = console_for(file)

    def show(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
        if not console.is_terminal:
            needed = sum(_widths(columns, lines))
            console_for(file, needed).print(text_table(columns, lines))
            return
        for part in parts_of(columns, lines, console.width):
            console.print(text_table(*part))

    show(*_result_cells(evaluation.rows(), evaluation.details()))
    for table in further_tables(evaluation):
        show(*table)
    for line in all_notes(evaluation):
        console.print(Text(line))
    if health:
        for report in evaluation.health():
            console.print(Text(f"health of {health_line(report['label'], report)}"))
    if categories:
        for category, rows in evaluation.by_category().items():
            console.print(Text(f"\n{category or '(no category)'}"))
            show(*_result_cells(rows, evaluation.details(category)))
        for t in evaluation.temperatures if len(evaluation.temperatures) > 1 else ():
            console.print(Text(f"\ntemperature {t:g}"))
            show(*_result_cells(evaluation.rows(temperature=t), evaluation.details(temperature=t)))


def further_tables(evaluation: Evaluation) -> list[tuple[list[str], list[list[str]]]]:
    """Columns and lines of the ladder, the comparisons and the groups, as far as there are any."""
    rungs, groups = evaluation.rungs(), group_table(evaluation)
    compared = [family_table(family) for family in families(evaluation) if family.lines]
    return [*([] if rungs is None else [_rungs(rungs)]), *compared, *([] if groups is None else [groups])]


def all_notes(evaluation: Evaluation) -> list[str]:
    """Conditions and everything else that a reader must know beside the tables."""
    compared = [family for family in families(evaluation) if family.lines]
    found = [conditions(evaluation.meta), *notes(evaluation)]
    found += [family_note(compared)] if compared else []
    return found + ([GROUP_NOTE] if group_table(evaluation) is not None else [])


def print_definitions(file: IO[str] | None = None) -> None:
    """What each number means (`--explain`)."""
    console = console_for(file)
    for name, meaning in DEFINITIONS.items():
        console.print(Text.assemble((name, "bold"), f": {meaning}"))


def to_markdown(evaluation: Evaluation) -> str:
    """The same tables and notes in Markdown."""
    tables = [markdown_table(*_result_cells(evaluation.rows(), evaluation.details()))]
    tables += [markdown_table(*table) for table in further_tables(evaluation)]
    return "\n".join([*tables, "".join(f"- {note}\n" for note in all_notes(evaluation))])


def markdown_table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table, the first column to the left."""
    head = ["| " + " | ".join(columns) + " |", "|" + "---|" + "---:|" * (len(columns) - 1)]
    body = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
    return "\n".join([*head, *body]) + "\n"
