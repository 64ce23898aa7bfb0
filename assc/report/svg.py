"""matplotlib figures as inline SVG: no pyplot, ids made unique, nothing that reaches out of the page."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

import matplotlib
from matplotlib.figure import Figure

SETTINGS: Mapping[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "assc",
    "text.parse_math": False,
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "hatch.linewidth": 0.5,
}
WIDTH = 10.6
"""inches, the width of the page"""
Draw = Callable[[Figure], None]


@dataclass(frozen=True)
class Chart:
    """A drawn figure: `svg` is safe markup, `alt` says in words what it shows."""

    svg: str
    alt: str


def render(name: str, height: float, alt: str, draw: Draw) -> Chart:
    """Draw on a figure of this height in inches; `name` is unique on the page."""
    settings: Any = dict(SETTINGS)  # the annotation of rc_context lists every key
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # the browser has fonts of its own
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        draw(figure)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None}, transparent=True)
    return Chart(_inline(out.getvalue(), name, alt), alt)


def _inline(svg: str, name: str, alt: str) -> str:
    """The drawing as part of a page: without namespaces, metadata and page-wide styles, ids prefixed by `name`."""
    root = ElementTree.fromstring(svg)
    size = root.get("width", "").removesuffix("pt")
    for parent in root.iter():
        for child in list(parent):
            if child.tag.endswith(("}metadata", "}style")):
                parent.remove(child)
    for element in root.iter():
        element.tag = element.tag.partition("}")[2]
        for key, value in list(element.attrib.items()):
            del element.attrib[key]
            plain = key.partition("}")[2] or key
            if plain == "id":
                value = f"{name}-{value}"
            elif plain == "href":
                value = f"#{name}-{value.removeprefix('#')}"
            elif plain in ("d", "transform", "x", "y", "points"):
                value = re.sub(r"-?\d+\.\d+", lambda found: f"{float(found[0]):.2f}".rstrip("0").rstrip("."), value)
            element.set(plain, value.replace("url(#", f"url(#{name}-"))
    view = root.get("viewBox", "")
    root.attrib.clear()
    style = f"width:{float(size or 600) * 4 / 3:.0f}px"
    root.attrib.update({"class": "plot", "viewBox": view, "style": style, "role": "img", "aria-label": alt})
    return ElementTree.tostring(root, encoding="unicode")
