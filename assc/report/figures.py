"""The charts of the page, in colours that all common kinds of colour vision tell apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from assc.report.join import Report
from assc.report.nouns import PHASES, Entry, Row
from assc.report.svg import Chart

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#8C6D00", "#5D3A9B")
"""of Okabe and Ito, told apart by all common kinds of colour vision; yellow is replaced, being too pale on white"""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "h", "p")
DASHES = ("-", "--", "-.", ":")
PLAIN, ORACLE = "#6E6E6E", "#000000"
PHASE_STYLES = (("#0072B2", ""), ("#E69F00", "//"), ("#CC79A7", ".."), ("#999999", "xx"))
RUNG_STYLES: Mapping[str, tuple[str, str, str]] = {
    "plain": ("plain decoding", PLAIN, ":"),
    "tuned": ("static:tuned", "#D55E00", "--"),
    "best_static_per_request": ("static:best-per-request", "#009E73", "-."),
    "oracle": ("oracle", ORACLE, "-"),
}


def shorten(label: str, longest: int = 34) -> str:
    """A label that fits beside a chart: the end of a path, the start of anything else.

    >>> shorten("runs/ppo-replay-20260101/policy.zip"), shorten("a" * 50)
    ('ppo-replay-20260101/policy.zip', 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa…')
    """
    if "/" in label and ".zip" in label:
        label = "/".join(label.split("/")[-2:])
    return label if len(label) <= longest else label[: longest - 1] + "…"


def styles(entries: Sequence[Entry]) -> dict[str, tuple[str, str, str]]:
    """Colour, marker and dashes of each label, the same in every chart."""
    found = {}
    number = 0
    for entry in entries:
        if entry.oracle or entry.name == "ar":
            found[entry.label] = (ORACLE, "*", "-") if entry.oracle else (PLAIN, "o", ":")
            continue
        dash = DASHES[number // len(COLOURS) % len(DASHES)]
        found[entry.label] = (COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)], dash)
        number += 1
    return found


# -- the charts ------------------------------------------------------------------------------------------------------


def ladder_chart(report: Report) -> Chart:
    """Speed-up of every policy with its interval; rungs as lines."""
    entries, look = [e for e in report.entries if e.row["speedup"] is not None], styles(report.entries)
    rungs = report.ladder or {}

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        for i, entry in enumerate(entries):
            value, (low, high) = entry.row["speedup"], entry.row["speedup_ci95"]
            colour = look[entry.label][0]
            axes.barh(i, value, height=0.62, color=colour, alpha=0.75, hatch="//" if entry.oracle else "",
                      edgecolor="white" if entry.oracle else colour)  # fmt: skip
            if low is not None and high is not None:
                axes.errorbar(value, i, xerr=[[value - low], [high - value]], color="black", capsize=3, lw=1.2)
            box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.85}
            axes.annotate(
                f"{value:.2f}×", (high or value, i), (7, 0), textcoords="offset points", va="center", bbox=box
            )
        for key, (name, colour, dash) in RUNG_STYLES.items():
            rung = rungs.get(key)
            if rung is not None:
                action = f" ({rung['action']})" if rung.get("action") else ""
                label = f"{name}{action} {rung['speedup']:.2f}×"
                axes.axvline(rung["speedup"], color=colour, ls=dash, lw=1.6, label=label)
        if not rungs:
            axes.axvline(1.0, color=PLAIN, ls=":", lw=1.6, label="plain decoding 1.00×")
        _policy_axis(axes, entries)
        axes.set_xlabel("speed-up over plain decoding (bar: estimate, whisker: 95 % interval)")
        axes.margins(x=0.12)
        axes.set_xlim(left=0)
        figure.legend(loc="outside upper left", ncols=2, frameon=False, fontsize=9)

    parts = [f"{e.label} {e.row['speedup']:.2f}" for e in entries]
    parts += [f"rung {RUNG_STYLES[k][0]} {r['speedup']:.2f}" for k, r in rungs.items() if r is not None]
    alt = "Bar chart of speed-ups over plain decoding: " + ", ".join(parts)
    return Chart("ladder", 1.5 + 0.36 * len(entries), alt, draw)


def _policy_axis(axes: Axes, entries: Sequence[Entry]) -> None:
    axes.set_yticks(range(len(entries)), [shorten(e.label) for e in entries])
    axes.set_ylim(len(entries) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#DDDDDD", lw=0.7)


def scatter_chart(report: Report) -> Chart | None:
    """Waste rate against speed-up; None where no policy drafted."""
    entries, look = (
        [e for e in report.entries if e.row["waste_rate"] is not None and e.row["speedup"]],
        styles(report.entries),
    )
    if not entries:
        return None

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        for entry in entries:
            x, y, (low, high) = 100 * entry.row["waste_rate"], entry.row["speedup"], entry.row["speedup_ci95"]
            colour, marker, _ = look[entry.label]
            error = None if low is None or high is None else [[y - low], [high - y]]
            axes.errorbar(x, y, yerr=error, color=colour, ecolor=colour, elinewidth=0.8, alpha=0.95, ls="none",
                          marker=marker, ms=11 if entry.oracle else 8, label=shorten(entry.label))  # fmt: skip
        axes.axhline(1.0, color=PLAIN, ls=":", lw=1.2)
        axes.grid(color="#DDDDDD", lw=0.7)
        axes.set_xlabel("waste rate: drafted tokens that were rejected, per cent")
        axes.set_ylabel("speed-up")
        axes.margins(0.08)
        figure.legend(loc="outside right upper", frameon=False, fontsize=9)

    parts = [f"{e.label} wastes {100 * e.row['waste_rate']:.0f} % at {e.row['speedup']:.2f}" for e in entries]
    return Chart("scatter", 4.2, "Scatter of waste rate against speed-up: " + ", ".join(parts), draw)


def time_chart(report: Report) -> Chart | None:
    """Milliseconds per token by phase; None where the files have no phases."""
    entries = [e for e in report.entries if e.row["tokens"] and all(v is not None for v in e.phases.values())]
    if not entries:
        return None

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        left = [0.0] * len(entries)
        for phase, (colour, hatch) in zip(PHASES, PHASE_STYLES, strict=True):
            values = [1000 * (e.phases[phase] or 0.0) / e.row["tokens"] for e in entries]
            axes.barh(range(len(entries)), values, left=left, height=0.62, color=colour, hatch=hatch,
                      edgecolor="white", lw=0.5, label=phase)  # fmt: skip
            for i, (value, entry) in enumerate(zip(values, entries, strict=True)):
                total = 1000 * sum(v or 0.0 for v in entry.phases.values()) / entry.row["tokens"]
                if total > 0 and value / max(1e-12, _longest(entries)) > 0.06:
                    box = {"facecolor": "white", "edgecolor": "none", "pad": 1.2, "alpha": 0.85}
                    text = f"{100 * value / total:.0f} %"
                    axes.text(left[i] + value / 2, i, text, ha="center", va="center", fontsize=8, bbox=box)
            left = [a + b for a, b in zip(left, values, strict=True)]
        _policy_axis(axes, entries)
        axes.set_xlabel("milliseconds per token")
        figure.legend(loc="outside upper left", ncols=4, frameon=False, fontsize=9)

    shares = [", ".join(f"{p} {100 * share(e, p):.0f} %" for p in PHASES) for e in entries]
    parts = [f"{e.label}: {text}" for e, text in zip(entries, shares, strict=True)]
    alt = "Stacked bars of time per token by phase: " + "; ".join(parts)
    return Chart("time", 1.3 + 0.36 * len(entries), alt, draw)


def share(entry: Entry, phase: str) -> float:
    """Part of the phases' seconds that one of them takes, 0 where nothing took time."""
    whole = sum(v or 0.0 for v in entry.phases.values())
    return (entry.phases[phase] or 0.0) / whole if whole > 0 else 0.0


def _longest(entries: Sequence[Entry]) -> float:
    return max(1000 * sum(v or 0.0 for v in e.phases.values()) / float(e.row["tokens"]) for e in entries)


def regret_chart(report: Report, curves: Mapping[str, Sequence[float]], against: str) -> Chart:
    """Cumulative seconds behind the reference, by number of requests."""
    look = styles(report.entries)

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        for label, values in curves.items():
            colour, marker, dash = look[label]
            every = max(1, len(values) // 8)
            axes.plot(range(len(values)), values, color=colour, ls=dash, lw=1.6, marker=marker, ms=5,
                      markevery=every, label=shorten(label))  # fmt: skip
        axes.axhline(0.0, color=ORACLE, lw=1.0)
        axes.grid(color="#DDDDDD", lw=0.7)
        axes.set_xlabel("requests played")
        axes.set_ylabel(f"seconds more than {shorten(against)}")
        axes.margins(x=0.02)
        figure.legend(loc="outside right upper", frameon=False, fontsize=9)

    ends = ", ".join(f"{label} {values[-1]:+.2f} s" for label, values in curves.items())
    alt = f"Cumulative seconds behind {against} over requests; at the end: {ends}"
    return Chart("regret", 4.0, alt, draw)


def rung_rows(ladder: Mapping[str, Row | None] | None) -> list[tuple[str, Row]]:
    """Names and numbers of the rungs that are known."""
    return [(RUNG_STYLES[key][0], rung) for key, rung in (ladder or {}).items() if rung is not None]
