"""Cost models on disk: JSON with where and when they were fitted and how well they fit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from assc.costs import CostModel
from assc.errors import TraceError
from assc.files import write_json

SCHEMA = 1
KINDS: Mapping[str, type] = {
    **dict.fromkeys(("pair", "device", "dtype", "date", "time_source"), str),
    "threads": int,
    "residuals": dict,
}
NAMES: Mapping[type, str] = {str: "a text", int: "a whole number", dict: "an object of numbers"}


@dataclass(frozen=True)
class CostFile:
    """A cost model and its provenance. `residuals`: quantity -> relative root mean square of the fit."""

    model: CostModel
    pair: str = ""
    device: str = ""
    dtype: str = ""
    threads: int = 0
    date: str = ""
    residuals: Mapping[str, float] = field(default_factory=dict)
    time_source: str = "measured"
    """measured: fitted to a clock; modelled: computed (roofline)"""


def write_costs(file: CostFile, path: Path) -> None:
    """Write whole or not at all."""
    write_json(path, {"schema": SCHEMA, "kind": "assc cost model", **asdict(file)})


def read_costs(path: str | Path) -> CostFile:
    """`TraceError` with one sentence for a file that is missing, damaged or of another version."""
    try:
        data: Any = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TraceError(f"there is no cost model at {path}") from None
    except (OSError, ValueError) as error:
        raise TraceError(f"the cost model {path} is damaged or truncated ({error})") from None
    if not isinstance(data, dict):
        raise TraceError(f"{path} is no cost model")
    schema = data.pop("schema", None)
    if schema is None and "target_fixed" in data:  # bare coefficients, as `CostModel.to_json` gives them
        data = {"model": data}
    elif schema != SCHEMA:
        raise TraceError(f"{path} is a cost model of schema {schema!r}, this program reads schema {SCHEMA}")
    data.pop("kind", None)
    for name, kind in KINDS.items():
        if name in data and (not isinstance(data[name], kind) or isinstance(data[name], bool)):
            raise TraceError(f"the cost model {path} has {name} {data[name]!r}, it must be {NAMES[kind]}")
    try:
        return CostFile(**{**data, "model": CostModel.from_json(data["model"])})
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise TraceError(f"the cost model {path} has missing, unknown or impossible fields: {error}") from None
