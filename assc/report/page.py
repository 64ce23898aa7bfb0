"""The page: what is said in words and tables, around the charts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from assc.metrics import DEFINITIONS, ROW_KEYS
from assc.report import curves, figures
from assc.report.compare import Group, candidates, groups_of, is_heuristic, is_tuned
from assc.report.join import Report
from assc.report.nouns import PHASES, Entry, Result, View
from assc.report.regret import regret_of
from assc.report.rounds import KINDS, Round, token_rounds
from assc.report.svg import Chart
from assc.report.verdicts import Judged, Line, Reference, judge, references
from assc.report.words import (
    answer,
    caution,
    drafting,
    evidence,
    families_note,
    in_short,
    line_sentences,
    many,
    mark,
    percent,
    shown,
    span,
    times,
)

TEMPLATE = "page.html.jinja"
LONGEST = 400
"""tokens of a request that its views show"""
MANY_RUNS = 12
"""policies per request whose rounds are shown"""


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
        "played on": shown(result.hardware) if result.hardware else "",
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


# -- the whole page --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """Speed-ups of all policies in some groups, and what follows for each group."""

    title: str
    groups: Sequence[Group]
    found: Judged
    sentences: Sequence[tuple[str, Sequence[str]]]
    """per group its name with the number of prompts, and what is said about it"""
    caution: str | None
    note: str

    @property
    def lines(self) -> Sequence[Line]:
        return self.found.lines


def _table(report: Report, title: str, groups: Sequence[Group]) -> Table:
    found = judge(report, groups)
    said = [(_heading(line), line_sentences(report, line)) for line in found.lines]
    return Table(title, groups, found, said, caution(found.lines), families_note(report, found.lines))


def _shown_references(report: Report) -> list[Reference]:
    """Those of the table of all policies; plain decoding is in the ladder already."""
    return [r for r in references(report) if r.wanted is not None] or references(report)


def _heading(line: Line) -> str:
    return f"{line.group.name}: {many(line.prompts, 'prompt')}, {many(line.requests, 'request')}"


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
    (everything, *categories), temperatures = groups_of(report)
    named = {"Per category": categories, "Per temperature": temperatures}
    whole = _table(report, "All requests", [everything])
    tables = [table for name, groups in named.items() if (table := _table(report, name, groups)).lines]
    lines = whole.lines
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"times": times, "percent": percent, "span": span, "svg": Markup}
    environment.filters |= {"answer": answer, "evidence": evidence, "mark": mark, "drafting": drafting}
    environment.filters["short"] = figures.shorten
    template = environment.from_string(files("assc.report").joinpath(TEMPLATE).read_text(encoding="utf-8"))
    regret, c = regret_of(report), report.meta.get("c")
    temperature = report.meta.get("temperature")
    return template.render(
        title=title or "Policies of speculative decoding compared",
        report=report,
        meta=report.meta,
        c=f"{c:.3f}" if isinstance(c, float | int) else "unknown",
        short=in_short(report, lines),
        answers=next((t for t in tables if t.groups is categories), None),
        provenance=provenance_table(report.results),
        ladder_chart=figures.ladder_chart(report),
        rungs=figures.rung_rows(report.ladder),
        keys=ROW_KEYS,
        definitions=DEFINITIONS,
        rows=[(entry, row_cells(entry)) for entry in report.entries],
        tables=tables,
        whole=whole,
        everything=everything,
        references=_shown_references(report),
        temperatures_unknown=isinstance(temperature, list) and not temperatures,
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
