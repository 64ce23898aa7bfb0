"""Result tables for people: on the terminal, in a pipe, and as Markdown."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import IO, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from assc.metrics import DEFINITIONS
from assc.results import Evaluation

PIPED_WIDTH = 200
"""columns when the output is no terminal: enough for every column, so that lines can be searched"""

HEADERS: tuple[str, ...] = (
    "policy",
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
    return "n/a" if value is None else f"{100 * value:.1f} %"


def _split(detail: Mapping[str, Any] | None, seconds: float) -> str:
    """Shares of the four phases in per cent, in the order of the header."""
    if detail is None or seconds <= 0:
        return "n/a"
    shares = [100 * detail[f"{phase}_seconds"] / seconds for phase in ("draft", "verify", "policy", "other")]
    return "/".join(f"{share:.1f}" for share in shares) + " %"


def cells(row: Mapping[str, Any], detail: Mapping[str, Any] | None = None) -> list[str]:
    """One row as text, in the order of `HEADERS`."""
    low, high = row["speedup_ci95"]
    return [
        str(row["policy"]),
        _number(row["tokens_per_second"], 1),
        _number(row["speedup"], 3, "x"),
        "n/a" if low is None or high is None else f"{low:.3f} to {high:.3f}",
        _percent(row["acceptance_rate"]),
        _percent(row["waste_rate"]),
        _number(row["mean_k"]),
        _number(row["tokens_per_round"]),
        _percent(row["rollback_rate"]),
        _split(detail, row["seconds"]),
        str(row["rounds"]),
    ]


def conditions(meta: Mapping[str, Any]) -> str:
    """One line that says under which conditions the numbers hold."""
    c = meta.get("c")
    parts = [
        f"pair {meta.get('pair')}",
        f"{meta.get('device')} {meta.get('dtype')}",
        f"mode {meta.get('mode')}",
        f"c = {c:.3f}" if isinstance(c, float | int) else "c unknown",
        f"time {meta.get('time_source')}",
        f"{meta.get('requests')} requests x {meta.get('repeats')}",
        f"seed {meta.get('seed')}",
    ]
    return ", ".join(parts)


def notes(evaluation: Evaluation) -> list[str]:
    """What a reader must know beside the table: texts that differ, missing parts, phases that do not add up."""
    found: list[str] = []
    if evaluation.baseline is None:
        found.append(f"plain decoding: {_number(evaluation.baseline_row()['tokens_per_second'], 1)} tokens per second")
    same = evaluation.same_text
    if same is None:
        found.append("same text: not comparable (sampled by rejection, or nothing finished)")
    elif same:
        found.append("same text: yes, every policy emitted the same tokens for every request")
    else:
        differing = evaluation.text_differences()
        first = differing[0]
        found.append(
            f"same text: NO, {len(differing)} runs differ from plain decoding, the first is {first['policy']} on "
            f"{first['id']} at token {first['position']}"
        )
    if not evaluation.complete:
        total = evaluation.meta["requests"] * evaluation.meta["repeats"]
        found.append(f"INCOMPLETE: {len(evaluation.results)} of {total} requests were finished")
    for detail in evaluation.details():
        gap = detail["phase_gap"]
        if gap is not None and gap > 0.05:
            found.append(f"{detail['label']}: the phase times miss the total by {100 * gap:.1f} %")
    return found


def result_table(rows: Sequence[Mapping[str, Any]], details: Sequence[Mapping[str, Any]] | None = None) -> Table:
    """A rich table; `details` (in the order of `rows`) fill the column of phase times."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for header in HEADERS:
        table.add_column(header, justify="left" if header == "policy" else "right", no_wrap=header != "policy")
    for i, row in enumerate(rows):
        # Text(): a spec such as bandit[x] must not be read as markup
        table.add_row(*(Text(cell) for cell in cells(row, details[i] if details else None)))
    return table


def console_for(file: IO[str] | None = None) -> Console:
    """A console on `file` (standard output) that does not fold tables when it is piped."""
    stream = file if file is not None else sys.stdout
    tty = stream.isatty()
    return Console(file=stream, width=None if tty else PIPED_WIDTH, highlight=False, emoji=False)


def print_evaluation(evaluation: Evaluation, *, file: IO[str] | None = None, categories: bool = False) -> None:
    """The comparison table with its conditions and notes; with `categories` one more table for each category."""
    console = console_for(file)
    console.print(result_table(evaluation.rows(), evaluation.details()))
    for line in (conditions(evaluation.meta), *notes(evaluation)):
        console.print(Text(line))
    if categories:
        for category, rows in evaluation.by_category().items():
            console.print(Text(f"\n{category or '(no category)'}"))
            console.print(result_table(rows, evaluation.details(category)))


def print_definitions(file: IO[str] | None = None) -> None:
    """What each number means (`--explain`)."""
    console = console_for(file)
    for name, meaning in DEFINITIONS.items():
        console.print(Text.assemble((name, "bold"), f": {meaning}"))


def to_markdown(rows: Sequence[Mapping[str, Any]], details: Sequence[Mapping[str, Any]] | None = None) -> str:
    """The same table in Markdown."""
    lines = ["| " + " | ".join(HEADERS) + " |", "|" + "---|" + "---:|" * (len(HEADERS) - 1)]
    for i, row in enumerate(rows):
        text = [cell.replace("|", "\\|") for cell in cells(row, details[i] if details else None)]
        lines.append("| " + " | ".join(text) + " |")
    return "\n".join(lines) + "\n"
