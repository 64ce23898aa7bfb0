"""The page: what is said in words and tables, around the charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from assc.metrics import DEFINITIONS, ROW_KEYS
from assc.report import curves, figures
from assc.report.compare import (
    Comparison,
    Group,
    Line,
    adjust,
    candidates,
    comparisons,
    groups_of,
    is_heuristic,
    is_tuned,
    lines_of,
    row_of,
)
from assc.report.join import Report
from assc.report.nouns import PHASES, Entry, Result, View
from assc.report.regret import regret_of
from assc.report.rounds import KINDS, Round, token_rounds
from assc.report.svg import Chart
from assc.stats import Interval

TEMPLATE = "page.html.jinja"
LONGEST = 400
"""tokens of a request that its views show"""
MANY_RUNS = 12
"""policies per request whose rounds are shown"""
VERDICTS: Mapping[str, str] = {
    "itself": "it is the same policy",
    "faster": "yes, faster",
    "slower": "no, slower",
    "perhaps": "perhaps",
    "open": "not shown",
    "unknown": "cannot be told",
}
"""answers to "is the best policy faster than the other?"; the page explains `perhaps` and `not shown`"""
MARKS: Mapping[str, str] = {"faster": "yes", "slower": "no", "perhaps": "maybe", "open": "maybe"}
"""class of a cell that holds the verdict"""


# -- numbers in words ------------------------------------------------------------------------------------------------


def times(value: float | None, digits: int = 2) -> str:
    """A ratio: 1.52×."""
    return "n/a" if value is None else f"{value:.{digits}f}×"


def percent(value: float | None) -> str:
    """A share: 12.3 %."""
    return "n/a" if value is None else f"{round(100 * value, 1) + 0.0:.1f} %"


def span(interval: Interval, digits: int = 2) -> str:
    """An interval, empty where it is not known."""
    low, high = interval
    return "" if low is None or high is None else f"{low:.{digits}f} to {high:.{digits}f}"


def shown(value: Any) -> str:
    """Any entry of a file as text."""
    if value is None or value in ("", [], {}):
        return "unknown"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(map(shown, value))
    if isinstance(value, dict):
        return ", ".join(f"{key} {shown(item)}" for key, item in value.items())
    return str(value)


def row_cells(entry: Entry) -> list[str]:
    """All fields of a row, in the order of `ROW_KEYS`, the policy under its label on this page."""
    row = entry.row
    words = {
        "policy": entry.label,
        "tokens": f"{row['tokens']:.0f}",
        "seconds": f"{row['seconds']:.3f}",
        "tokens_per_second": "n/a" if row["tokens_per_second"] is None else f"{row['tokens_per_second']:.2f}",
        "speedup": times(row["speedup"], 3),
        "speedup_ci95": span(row["speedup_ci95"], 3) or "n/a",
        "mean_k": "n/a" if row["mean_k"] is None else f"{row['mean_k']:.2f}",
        "tokens_per_round": "n/a" if row["tokens_per_round"] is None else f"{row['tokens_per_round']:.2f}",
        "rounds": f"{row['rounds']:.0f}",
        "time_source": row["time_source"] or "n/a",
        "action": row["action"] or "",
        "rung": row["rung"] or "n/a",
        "plays": "n/a" if row["plays"] is None else f"{row['plays']:.0f}",
        "speedup_sd": "n/a" if row["speedup_sd"] is None else f"{row['speedup_sd']:.3f}",
        "leaked_requests": "n/a" if row["leaked_requests"] is None else f"{row['leaked_requests']:.0f}",
    }
    return [words[key] if key in words else percent(row[key]) for key in ROW_KEYS]


# -- provenance ------------------------------------------------------------------------------------------------------


def provenance(result: Result) -> dict[str, str]:
    """What made one result, in the order of the table."""
    meta, training = result.meta, result.training
    trace = meta.get("trace") if isinstance(meta.get("trace"), dict) else {}
    costs = meta.get("cost_file") if isinstance(meta.get("cost_file"), dict) else {}
    assert isinstance(trace, dict) and isinstance(costs, dict)
    config = training.get("config") if isinstance(training.get("config"), dict) else {}
    assert isinstance(config, dict)
    hashes = {key: str(value)[:16] for key, value in (("workload", meta.get("workload_hash")),) if value}
    models = trace.get("models") if isinstance(trace.get("models"), dict) else {}
    c = meta.get("c")
    return {
        "command": shown(meta.get("command")),
        "commit": shown(meta.get("git_commit") or training.get("git_commit")),
        "versions": shown(meta.get("versions")),
        "hardware": shown(meta.get("machine") or meta.get("device")),
        "pair": shown(meta.get("pair")),
        "device, dtype, threads": ", ".join(shown(meta.get(key)) for key in ("device", "dtype", "threads")),
        "mode": shown(meta.get("mode")),
        "c (draft step / target step)": f"{c:.4f}" if isinstance(c, float | int) else "unknown",
        "time": shown(meta.get("time_source")),
        "workload": " ".join([shown(meta.get("workload")), *(f"({h})" for h in hashes.values())]),
        "split": shown(meta.get("split")),
        "trace": f"{shown(trace.get('name'))} ({str(trace.get('sha256'))[:16]})" if trace else "none, decoded live",
        "models of the trace": shown(models) if trace else "",
        "cost model": shown({k: v for k, v in costs.items() if v not in ("", 0, None, {})}) if costs else "",
        "requests": f"{shown(meta.get('requests'))} × {shown(meta.get('repeats'))} repeats",
        "seeds of the policies": shown(meta["policy_seeds"]) if meta.get("policy_seeds") else "",
        "categories": shown(meta.get("categories")),
        "budget": f"{shown(meta.get('max_new_tokens'))} tokens",
        "temperature": shown(meta.get("temperature")),
        "seed": shown(meta.get("seed")),
        "same text from every policy": "not comparable" if result.same_text is None else shown(result.same_text),
        "complete": "yes" if result.complete else "NO, it was stopped: only what was finished is counted",
        "training": f"{shown(config.get('algo'))}, seed {shown(config.get('seed'))}" if config else "",
        "training curves": f"tensorboard --logdir {result.curves}" if result.curves else "",
    }


def provenance_table(results: Sequence[Result]) -> list[tuple[str, list[str]]]:
    """One line per fact, one column per result; facts that no result has are left out."""
    columns = [provenance(result) for result in results]
    return [(key, [c[key] for c in columns]) for key in columns[0] if any(c[key] for c in columns)]


# -- findings --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """Speed-ups of all policies in some groups, and what follows for each group."""

    title: str
    groups: Sequence[Group]
    lines: Sequence[Line]


def verdict(found: Comparison | None) -> str:
    """One comparison in words."""
    if found is None:
        return "not played"
    if found.verdict in ("itself", "unknown"):
        return VERDICTS[found.verdict]
    return f"{VERDICTS[found.verdict]} ({times(found.ratio, 3)}, {span(found.interval, 3)})"


def mark(found: Comparison | None) -> str:
    """Class of the cell of a comparison."""
    return "" if found is None else MARKS.get(found.verdict, "")


def in_short(report: Report, lines: Sequence[Line]) -> list[str]:
    """The answers to the four questions that a reader comes with, over all requests."""
    if not lines:
        return []
    first, said = lines[0], []
    bounds = span(first.cell.interval)
    said.append(
        f"Best policy over all requests: {first.best.label}, {times(first.cell.speedup)} plain decoding"
        + (f" (95 % interval {bounds})." if bounds else ".")
    )
    for name, found in (("the tuned static action", first.tuned), ("the ASSC heuristic", first.heuristic)):
        if found is not None and found.verdict == "itself":
            said.append(f"It is {name} itself.")
        elif found is not None:
            said.append(f"Is it faster than {name} ({found.other}), beyond chance? {_sentence(found)}")
    if first.oracle is not None and first.cell.speedup is not None:
        gap = "" if first.fraction is None else f", and {percent(first.fraction)} of the way from static:tuned to it"
        reached = percent(first.cell.speedup / first.oracle)
        said.append(
            f"How far is the optimum? The hindsight oracle reaches {times(first.oracle)}: the best policy has "
            f"{reached} of its speed{gap}."
        )
    if all(v is not None for v in first.best.phases.values()):
        shares = ", ".join(f"{phase} {100 * figures.share(first.best, phase):.1f} %" for phase in PHASES)
        said.append(f"Where does the time of {first.best.label} go? {shares} (section 4).")
    return said


SENTENCES: Mapping[str, str] = {
    "faster": "Yes",
    "slower": "No, it is slower",
    "perhaps": "Perhaps: only without the correction for all comparisons of this page",
    "open": "Not shown: the interval contains 1",
    "unknown": "That cannot be told from these results",
}


def _sentence(found: Comparison) -> str:
    if found.verdict == "unknown":
        return f"{SENTENCES[found.verdict]}."
    return f"{SENTENCES[found.verdict]} (ratio {times(found.ratio, 3)}, 95 % interval {span(found.interval, 3)})."


def drafting(line: Line) -> float | None:
    """Share of the seconds that the best policy of a group spends drafting, None where the file doesn't say."""
    row = row_of(line.best, line.group)
    return None if row is None else row["draft_time_share"]


# -- the whole page --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShownView:
    """One request with its chart and token strips; the first strip is open."""

    view: View
    chart: Chart
    strips: Sequence[tuple[str, Sequence[Round], bool]]
    cut: bool


def _views(report: Report, requests: int, lines: Sequence[Line]) -> list[ShownView]:
    best = lines[0].best.label if lines else ""
    found = []
    for i, view in enumerate(report.views[:requests]):
        runs = sorted(view.runs, key=lambda r: r.policy != best)[:MANY_RUNS]
        strips = [(r.policy, list(token_rounds(view, r, LONGEST)), j == 0) for j, r in enumerate(runs)]
        cut = len(runs) < len(view.runs) or any(len(r.tokens) > LONGEST for r in runs)
        shown_view = replace(view, runs=tuple(runs))
        chart = curves.rounds_chart(report, shown_view, f"request{i}", LONGEST)
        found.append(ShownView(shown_view, chart, strips, cut))
    return found


def render(report: Report, *, requests: int = 3, title: str = "") -> str:
    """The page as HTML. `requests` is how many of the stored requests are shown round by round."""
    groups, temperatures = groups_of(report)
    cells, lines = lines_of(report, groups)
    more_cells, more_lines = lines_of(report, temperatures)
    tests = comparisons([*lines, *more_lines])
    lines, more_lines = adjust(report, lines, tests), adjust(report, more_lines, tests)
    tables = [Table("Per category", groups, lines)]
    if more_lines:
        tables.append(Table("Per temperature", temperatures, more_lines))
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"times": times, "percent": percent, "span": span, "svg": Markup}
    environment.filters |= {"verdict": verdict, "mark": mark, "drafting": drafting}
    template = environment.from_string(files("assc.report").joinpath(TEMPLATE).read_text(encoding="utf-8"))
    regret, c = regret_of(report), report.meta.get("c")
    temperature = report.meta.get("temperature")
    return template.render(
        title=title or "Policies of speculative decoding compared",
        report=report,
        meta=report.meta,
        c=f"{c:.3f}" if isinstance(c, float | int) else "unknown",
        short=in_short(report, lines),
        answers=[x for x in lines if x.group.kind == "category"],
        provenance=provenance_table(report.results),
        ladder_chart=figures.ladder_chart(report),
        rungs=figures.rung_rows(report.ladder),
        keys=ROW_KEYS,
        definitions=DEFINITIONS,
        rows=[(entry, row_cells(entry)) for entry in report.entries],
        tables=tables,
        cells={**cells, **more_cells},
        tests=tests,
        temperatures_unknown=isinstance(temperature, list) and not more_lines,
        has_tuned=any(is_tuned(e) for e in report.entries),
        has_heuristic=any(is_heuristic(e) for e in report.entries),
        eligible={e.label for e in candidates(report.entries)},
        scatter=figures.scatter_chart(report),
        time=figures.time_chart(report),
        phases=PHASES,
        share=figures.share,
        regret=regret if isinstance(regret, str) else figures.regret_chart(report, regret.curves, regret.against),
        against="" if isinstance(regret, str) else regret.against,
        reliability=curves.reliability_chart(report),
        kinds=KINDS,
        views=_views(report, requests, lines),
        longest=LONGEST,
    )
