"""matplotlib figures as inline SVG: no pyplot, ids made unique, nothing that reaches out of the page."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
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
WIDTH = 11.9
"""inches, the width of the page"""
Draw = Callable[[Figure], None]


@dataclass(frozen=True)
class Chart:
    """A figure that is drawn when it is asked for; `alt` says in words what it shows."""

    name: str
    """unique on the page"""
    height: float
    """inches"""
    alt: str
    draw: Draw

    @cached_property
    def svg(self) -> str:
        """Safe markup to stand in a page."""
        with _settings():
            out = io.StringIO()
            self._drawn().savefig(out, format="svg", metadata={"Date": None}, transparent=True)
        return _inline(out.getvalue(), self.name, self.alt)

    def figure(self) -> Figure:
        """The figure itself, for pictures elsewhere."""
        with _settings():
            return self._drawn()

    def _drawn(self) -> Figure:
        figure = Figure(figsize=(WIDTH, self.height), layout="constrained")
        self.draw(figure)
        return figure


@contextmanager
def _settings() -> Iterator[None]:
    settings: Any = dict(SETTINGS)  # the annotation of rc_context lists every key
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # the browser has fonts of its own
        yield


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
