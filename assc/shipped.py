"""The trace and the cost model that come with the package, so that training needs no model."""

from __future__ import annotations

from functools import cache
from importlib.resources import as_file, files

from assc.costs import CostModel
from assc.costs_io import CostFile, read_costs
from assc.errors import TraceError
from assc.manifest import PACKAGED
from assc.trace import Trace
from assc.trace_io import read_trace

TRACE = "data/traces/mixed.npz"
COSTS = "data/traces/mixed-costs.json"


@cache
def shipped_trace() -> Trace:
    """The packaged trace. `TraceError` where this installation has none."""
    with as_file(files("assc").joinpath(TRACE)) as path:
        if not path.is_file():
            raise TraceError("no trace comes with this installation; record one: python -m assc record --out DIR")
        found = read_trace(path)
        return Trace(found.header, found.columns, PACKAGED + TRACE)  # the same name wherever this is installed


@cache
def shipped_cost_file() -> CostFile:
    """The packaged cost model with its provenance, measured where the packaged trace was recorded."""
    with as_file(files("assc").joinpath(COSTS)) as path:
        if not path.is_file():
            raise TraceError("no cost model comes with this installation; fit one: python -m assc calibrate --out FILE")
        return read_costs(path)


def shipped_costs() -> CostModel:
    """The packaged cost model alone."""
    return shipped_cost_file().model
