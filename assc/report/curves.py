"""Charts of single requests and of predictions: K over the text, and how far chances of acceptance hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from assc.report.figures import ORACLE, PLAIN, shorten, styles
from assc.report.join import Report
from assc.report.nouns import Entry, View
from assc.report.rounds import ema_after
from assc.report.svg import Chart


def rounds_chart(report: Report, view: View, name: str, longest: int) -> Chart:
    """K, accepted length and acceptance over the text, a panel per policy that drafts, the target's entropy below."""
    runs, look = [r for r in view.runs if any(r.k)] or list(view.runs[:1]), styles(report.entries)
    texts = [h for h in view.token_entropy[:longest] if h is not None]
    entropies = bool(texts) or any(h is not None for run in view.runs for h in run.entropy)
    panels = len(runs) + entropies

    def draw(figure: Figure) -> None:
        grid: Any = figure.subplots(panels, 1, sharex=True, squeeze=False, height_ratios=[1.0] * len(runs)
                                    + [0.9] * entropies)  # fmt: skip
        for run, axes in zip(runs, grid[:, 0], strict=False):
            colour = look.get(run.policy, (PLAIN, "o", "-"))[0]
            kept = sum(p < longest for p in run.position)
            edges = [*run.position[:kept], run.position[kept - 1] + run.emitted[kept - 1]] if kept else [0, 1]
            counts = (run.k[:kept], run.accepted[:kept]) if kept else ([0], [0])
            axes.stairs(counts[1], edges, fill=True, color=colour, alpha=0.55, lw=0)
            axes.stairs(counts[0], edges, color=colour, lw=1.3, baseline=None)
            gaps = [(x, x, x) for x in edges[1:-1]], [(0.0, float(n), float("nan")) for n in counts[1][1:]]
            axes.plot(*([v for part in side for v in part] for side in gaps), color="white", lw=0.9)
            axes.set_ylim(0, max(1, *counts[0]) * 1.15)
            axes.yaxis.set_major_locator(MaxNLocator(nbins=3, integer=True))
            axes.set_title(shorten(run.policy, 60), loc="left", fontsize=9, pad=2)
            axes.set_ylabel("tokens", fontsize=8)
            right = axes.twinx()
            if any(run.drafted):
                right.plot(edges[1:], ema_after(run)[:kept], color=ORACLE, lw=0.9, ls="--")
            right.set_ylim(0, 1.05)
            right.set_yticks([0, 1])
            right.spines["right"].set_visible(True)
            right.set_ylabel("EMA", fontsize=8)
        if entropies:
            _entropy_panel(grid[-1, 0], view, report, longest)
        grid[-1, 0].set_xlim(left=0)
        grid[-1, 0].set_xlabel("committed tokens")

    facts = [f"{r.policy} {len(r.position)} rounds, mean K {sum(r.k) / max(1, len(r.k)):.1f}" for r in runs]
    alt = f"K and accepted length over the text of request {view.id}: " + "; ".join(facts)
    return Chart(name, 0.7 + 1.05 * panels, alt, draw)


def _entropy_panel(axes: Axes, view: View, report: Report, longest: int) -> None:
    """The target's entropy at every token where a trace knows it, else at the last token of each round."""
    title = "entropy of the target at each token"
    if view.token_entropy:
        values = [float("nan") if h is None else h for h in view.token_entropy[:longest]]
        axes.stairs(values, range(len(values) + 1), fill=True, color="#BBBBBB", lw=0)
        axes.stairs(values, range(len(values) + 1), color="#555555", lw=0.8, baseline=None)
    else:
        title = "entropy of the target at the last token of each round"
        look = styles(report.entries)
        for run in view.runs:
            ends = [p + e for p, e in zip(run.position, run.emitted, strict=True)]
            points = [(x, h) for x, h in zip(ends, run.entropy, strict=True) if h is not None and x <= longest]
            colour, marker, _ = look.get(run.policy, (PLAIN, "o", "-"))
            axes.plot([x for x, _ in points], [h for _, h in points], ls="none", marker=marker, ms=3, color=colour,
                      alpha=0.6)  # fmt: skip
    axes.set_ylabel("nats", fontsize=8)
    axes.set_ylim(bottom=0)
    axes.set_title(title, loc="left", fontsize=9, pad=2)


def reliability_chart(report: Report) -> Chart | None:
    """Share accepted against predicted chance, and how many positions each point is of; None without predictions."""
    entries = [e for e in report.entries if e.reliability is not None]
    if not entries:
        return None

    def draw(figure: Figure) -> None:
        grid: Any = figure.subplots(2, 1, sharex=True, height_ratios=[3.0, 1.0])
        _calibration(grid[0], report, entries)
        look, width = styles(report.entries), 0.08 / len(entries)
        for i, entry in enumerate(entries):
            assert entry.reliability is not None
            judged = entry.reliability.judged
            at = [int(min(b.predicted, 0.999) * 10) / 10 + 0.01 + (i + 0.5) * width for b in entry.reliability.bins]
            shares = [100 * b.judged / judged for b in entry.reliability.bins]
            grid[1].bar(at, shares, width=width, color=look[entry.label][0])
        grid[1].set_ylabel("% of positions", fontsize=9)
        grid[1].set_xlabel("predicted chance that the draft position is accepted")
        figure.legend(loc="outside right upper", frameon=False, fontsize=9)

    parts = [f"{e.label} calibration error {e.reliability.calibration_error:.3f}" for e in entries if e.reliability]
    return Chart("reliability", 5.2, "Calibration of predicted acceptance: " + ", ".join(parts), draw)


def _calibration(axes: Axes, report: Report, entries: Sequence[Entry]) -> None:
    look = styles(report.entries)
    axes.plot([0, 1], [0, 1], color=ORACLE, lw=1.0, ls=":", label="as predicted")
    for entry in entries:
        assert entry.reliability is not None
        colour, marker, dash = look[entry.label]
        bins = entry.reliability.bins
        axes.plot([b.predicted for b in bins], [b.accepted for b in bins], color=colour, ls=dash, lw=1.3,
                  marker=marker, ms=6, label=shorten(entry.label))  # fmt: skip
        for b in bins:
            low, high = b.interval
            if low is not None and high is not None:
                axes.plot([b.predicted] * 2, [low, high], color=colour, lw=0.9)
    axes.set_xlim(-0.02, 1.02)
    axes.set_ylim(-0.02, 1.02)
    axes.set_ylabel("share accepted")
    axes.grid(color="#DDDDDD", lw=0.7)
