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
from assc.drafters.memory import DrafterMemory
from assc.metrics import DEFINITIONS
from assc.monitor import health_line
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
    return "n/a" if value is None else f"{round(100 * value, 1) + 0.0:.1f} %"  # + 0.0: never "-0.0 %"


FRACTION = "oracle fraction"
"""a further column behind the interval, where there is a trace"""

RUNGS: dict[str, str] = {
    "plain": "plain decoding",
    "tuned": "static:tuned",
    "best_static_per_request": "static:best-per-request",
    "oracle": "oracle",
}


def headers(fraction: bool = False) -> list[str]:
    """The columns, with `oracle_fraction` or without."""
    at = HEADERS.index("95 % interval") + 1
    return [*HEADERS[:at], *([FRACTION] if fraction else []), *HEADERS[at:]]


def _has_fraction(rows: Sequence[Mapping[str, Any]]) -> bool:
    return any(row["oracle_fraction"] is not None for row in rows)


def _split(detail: Mapping[str, Any] | None, seconds: float) -> str:
    """Shares of the four phases in per cent, in the order of the header."""
    if detail is None or seconds <= 0:
        return "n/a"
    shares = [100 * detail[f"{phase}_seconds"] / seconds for phase in ("draft", "verify", "policy", "other")]
    return "/".join(f"{share:.1f}" for share in shares) + " %"


def cells(row: Mapping[str, Any], detail: Mapping[str, Any] | None = None, *, fraction: bool = False) -> list[str]:
    """One row as text, in the order of `headers`."""
    low, high = row["speedup_ci95"]
    action = "" if row["action"] is None else f" ({row['action']})"
    leaked = f" [LEAKED {row['leaked_requests']}]" if row["leaked_requests"] else ""
    return [
        f"{row['policy']}{action}{leaked}",
        _number(row["tokens_per_second"], 1),
        _number(row["speedup"], 3, "x"),
        "n/a" if low is None or high is None else f"{low:.3f} to {high:.3f}",
        *([_percent(row["oracle_fraction"])] if fraction else []),
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
        f"{meta.get('device') or 'device'} {meta.get('dtype') or 'unknown'}",
        f"mode {meta.get('mode')}",
        f"c = {c:.3f}" if isinstance(c, float | int) else "c unknown",
        f"time {meta.get('time_source')}",
        f"{meta.get('requests')} requests x {meta.get('repeats')}",
        f"seed {meta.get('seed')}",
    ]
    if "trace" in meta:
        parts.append(f"trace {meta['trace']['name']}")
    return ", ".join(parts)


def _machines(meta: Mapping[str, Any]) -> str | None:
    """A sentence where the seconds were computed, or are those of another machine than that of the recording."""
    costs = meta.get("cost_file") or {}
    if costs.get("time_source") == "modelled":
        label = (meta.get("cost_model") or {}).get("label") or "modelled"
        return f"the cost model was computed, not measured: {label}"
    known = [key for key in ("pair", "device", "dtype", "threads") if costs.get(key) and meta.get(key)]
    other = [f"{key} {costs[key]} instead of {meta[key]}" for key in known if costs[key] != meta[key]]
    return f"the cost model is of {', '.join(other)}, where the trace was recorded" if other else None


def notes(evaluation: Evaluation) -> list[str]:
    """What a reader must know beside the table: texts that differ, missing parts, phases that do not add up."""
    found: list[str] = []
    if evaluation.baseline is None:
        found.append(f"plain decoding: {_number(evaluation.baseline_row()['tokens_per_second'], 1)} tokens per second")
    if any(row["leaked_requests"] for row in evaluation.rows()):
        found.append("LEAKED: that many of the requests were trained or tuned on, so these rows hold for no others")
    found += evaluation.meta.get("notes", [])
    machines = _machines(evaluation.meta)
    if machines is not None:
        found.append(machines)
    held = evaluation.meta.get("drafter_memory")
    if held:
        found.append(f"drafts in memory at the end: {', '.join(str(DrafterMemory(**m)) for m in held)}")
    if evaluation.ladder is not None and evaluation.ladder.tuned is None:
        found.append("oracle fraction: n/a, there are no requests of the split 'train' apart from those evaluated")
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
    details = evaluation.details()
    thrown = [f"{d['label']} {d['discarded']}" for d in details if d["discarded"]]
    if thrown:
        found.append(f"tokens discarded unjudged: {', '.join(thrown)} (in no rate, paid for in the seconds)")
    for detail in details:
        gap = detail["phase_gap"]
        if gap is not None and gap > GAP:
            found.append(f"{detail['label']}: the phase times miss the total by {100 * gap:.1f} %")
    found += _wall(evaluation)
    return found


GAP = 0.05
"""share of the time that no phase may leave unexplained without a warning"""


def _wall(evaluation: Evaluation) -> list[str]:
    """Do the phases and the prefill make up the wall clock? For measured time only."""
    open_shares = {d["label"]: d["unexplained_share"] for d in evaluation.details()}
    shares = {label: share for label, share in open_shares.items() if share is not None}
    if not shares:
        return []
    low, high = (100 * (1 - end(shares.values())) for end in (max, min))
    found = [f"time check: prefill and phases make up {low:.1f} to {high:.1f} % of each policy's wall time"]
    return found + [
        f"WARNING, {label}: {100 * share:.1f} % of the wall time is in no phase, more than {100 * GAP:g} %"
        for label, share in shares.items()
        if abs(share) > GAP
    ]


def result_table(rows: Sequence[Mapping[str, Any]], details: Sequence[Mapping[str, Any]] | None = None) -> Table:
    """A rich table; `details` (in the order of `rows`) fill the column of phase times."""
    fraction = _has_fraction(rows)
    lines = [cells(row, details[i] if details else None, fraction=fraction) for i, row in enumerate(rows)]
    return text_table(headers(fraction), lines)


def text_table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> Table:
    """A rich table, the first column to the left."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, header in enumerate(columns):
        table.add_column(header, justify="right" if i else "left", no_wrap=i > 0)
    for line in lines:
        # Text(): a spec such as bandit[x] must not be read as markup
        table.add_row(*(Text(cell) for cell in line))
    return table


def _rungs(rungs: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Columns and lines of the ladder."""
    lines = []
    for key, name in RUNGS.items():
        rung = rungs[key] or dict.fromkeys(("tokens_per_second", "speedup", "oracle_fraction"))
        action = f" ({rung['action']})" if "action" in rung else ""
        speeds = [_number(rung["tokens_per_second"], 1), _number(rung["speedup"], 3, "x")]
        lines.append([name + action, *speeds, _percent(rung["oracle_fraction"])])
    return ["ladder", "tok/s", "speed-up", FRACTION], lines


def console_for(file: IO[str] | None = None) -> Console:
    """A console on `file` (standard output) that does not fold tables when it is piped."""
    stream = file if file is not None else sys.stdout
    tty = stream.isatty()
    return Console(file=stream, width=None if tty else PIPED_WIDTH, highlight=False, emoji=False)


def print_evaluation(
    evaluation: Evaluation, *, file: IO[str] | None = None, categories: bool = False, health: bool = False
) -> None:
    """The comparison table with its conditions and notes.

    With `health` a line of the health monitor per policy, with `categories` one more table for each category.
    """
    console = console_for(file)
    console.print(result_table(evaluation.rows(), evaluation.details()))
    for columns, lines in further_tables(evaluation):
        console.print(text_table(columns, lines))
    for line in all_notes(evaluation):
        console.print(Text(line))
    if health:
        for report in evaluation.health():
            console.print(Text(f"health of {health_line(report['label'], report)}"))
    if categories:
        for category, rows in evaluation.by_category().items():
            console.print(Text(f"\n{category or '(no category)'}"))
            console.print(result_table(rows, evaluation.details(category)))
        for t in evaluation.temperatures if len(evaluation.temperatures) > 1 else ():
            console.print(Text(f"\ntemperature {t:g}"))
            console.print(result_table(evaluation.rows(temperature=t), evaluation.details(temperature=t)))


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
    rows, details = evaluation.rows(), evaluation.details()
    fraction = _has_fraction(rows)
    lines = [cells(row, detail, fraction=fraction) for row, detail in zip(rows, details, strict=True)]
    tables = [markdown_table(headers(fraction), lines)]
    tables += [markdown_table(*table) for table in further_tables(evaluation)]
    return "\n".join([*tables, "".join(f"- {note}\n" for note in all_notes(evaluation))])


def markdown_table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table, the first column to the left."""
    head = ["| " + " | ".join(columns) + " |", "|" + "---|" + "---:|" * (len(columns) - 1)]
    body = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
    return "\n".join([*head, *body]) + "\n"
