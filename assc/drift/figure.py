"""The picture of a scenario: cumulative regret over the text, and the speed after each switch."""

from __future__ import annotations

import io
import re
import warnings
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from assc.drift.guard import shown_label
from assc.files import write_bytes, write_text
from assc.report.figures import COLOURS, DASHES
from assc.report.svg import SETTINGS

SHOWN = 400
"""rounds after a switch that are drawn"""
POINTS = 28
"""of each line of the lower panels"""


def draw(result: dict[str, Any]) -> Figure:
    """A figure of what `assc.drift.command` found out (one scenario)."""
    segments, window = result["segments"], result["settings"]["window"]
    figure = Figure(figsize=(9.0, 6.4 if len(segments) > 1 else 4.2), layout="constrained")
    rows = 2 if len(segments) > 1 else 1
    grid = figure.add_gridspec(rows, len(segments), height_ratios=[3, 2][:rows])
    top = figure.add_subplot(grid[0, :])
    lower = [figure.add_subplot(grid[1, i]) for i in range(len(segments))] if rows > 1 else []
    for number, row in enumerate(result["policies"]):
        style: dict[str, Any] = {"color": COLOURS[number % len(COLOURS)], "lw": 1.3}
        style["ls"] = DASHES[number // len(COLOURS) % len(DASHES)]
        top.plot(row["curve"]["tokens"], row["curve"]["best"], label=shown_label(row), **style)
        for axes, segment in zip(lower, row["segments"], strict=False):  # one regime has no lower panels
            speeds = segment["speeds"][: SHOWN - window + 1]
            step = max(1, len(speeds) // POINTS)
            axes.plot(range(window, window + len(speeds), step), speeds[::step], **style)
    top.plot(result["optimal"]["tokens"], result["optimal"]["best"], color="#000000", lw=1.0, ls=":", label="oracle")
    top.axhline(0.0, color="#6E6E6E", lw=0.8)
    for segment in segments[1:]:
        top.axvline(segment["from_token"], color="#6E6E6E", lw=0.8, ls="--")
    names = " | ".join(f"{s['regime']}: {s['best']}" for s in segments)
    top.set_title(f"{result['scenario']}:   {names}", fontsize=8)
    top.set_xlabel("tokens of the stream")
    top.set_ylabel("seconds behind the regime's\nbest static action (regret)")
    low = min(min(row["curve"]["best"]) for row in result["policies"])
    high = max(max(row["curve"]["best"]) for row in result["policies"])
    pad = 0.05 * (high - low or 1.0)
    top.set_ylim(low - pad, high + pad)
    top.legend(fontsize=7, ncols=1, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    for axes, segment in zip(lower, segments, strict=False):
        axes.axhline(1.0, color="#6E6E6E", lw=0.8)
        axes.axhline(1.0 - result["settings"]["within"], color="#6E6E6E", lw=0.8, ls=":")
        axes.set_title(segment["regime"], fontsize=8)
        axes.set_xlabel("rounds after the switch" if segment["from_token"] else "rounds after the start", fontsize=8)
        axes.set_ylim(0.5, 1.5)
        axes.set_xlim(0, SHOWN)
        axes.set_xticks([0, SHOWN // 2, SHOWN])
        axes.set_yticks([0.5, 1.0, 1.5] if axes is lower[0] else [])
        axes.tick_params(labelsize=7)
    if lower:
        lower[0].set_ylabel(f"speed / best static action,\nlast {window} rounds", fontsize=8)
    return figure


def save(result: dict[str, Any], path: Path) -> None:
    """Draw into an .svg or .png file, whole or not at all."""
    settings: Any = {**SETTINGS, "font.sans-serif": ["DejaVu Sans"]}  # the default list is repeated at every label
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure = draw(result)
        out = io.BytesIO()
        if path.suffix == ".png":
            figure.savefig(out, format="png", dpi=110, metadata={"Software": None})
            write_bytes(path, out.getvalue())
            return
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    write_text(path, _slim(out.getvalue().decode()))


def _slim(svg: str) -> str:
    """The same picture in fewer bytes: a tenth of a point is enough, and nothing need be indented or turned by 0."""
    # numbers of the drawing, not of labels, which stand between tags
    svg = re.sub(r"<[^>]+>", lambda tag: re.sub(r"-?\d+\.\d{2,}", lambda n: f"{float(n[0]):.1f}", tag[0]), svg)
    svg = re.sub(r' transform="rotate\(-0 [^)]*\)"', "", svg)
    return re.sub(r"\n\s+", "\n", svg)
