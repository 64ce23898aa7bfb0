"""A recorded trace: by position, not by round, so that it answers for every schedule of K (docs/traces.md).

Mode greedy and mode gumbel emit one text per request whatever is drafted. For each position of that text a trace
keeps how many tokens each drafter would propose there and how many of them agree with the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from assc.core import FinishReason, Mode, Request
from assc.errors import TraceError
from assc.steps import STEP_COLUMNS

SCHEMA = 2
"""raised whenever a column or a header field is added or changes its meaning"""
READS = (1, SCHEMA)
"""versions that can be read; 1 has no confidences per draft step. Others are refused"""

FINISHES: tuple[FinishReason, ...] = ("eos", "stop", "criteria", "length", "context")

IMPORTED = "imported"
"""`Header.pair` of a trace that `assc.trace_import` made: its models are not known"""

Keeps = Literal["nothing", "drafts", "committed"]
Columns = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class DrafterInfo:
    """One drafter of a trace. `keeps` decides what it must be fed again (see `assc.drafters.base.Drafter.keeps`)."""

    name: str
    kind: str
    keeps: Keeps = "nothing"
    confidence: bool = False
    """whether entropy, top-1 and margin of its next-position distribution were recorded"""
    source: str = ""
    """revision or parameters"""
    steps: int = 0
    """draft steps from each start whose confidences were recorded (docs/step-policies.md)"""


@dataclass(frozen=True)
class Header:
    """Where a trace comes from and what it can answer."""

    mode: Mode
    k_max: int
    drafters: tuple[DrafterInfo, ...]
    pair: str = ""
    models: Mapping[str, str] = field(default_factory=dict)
    """role -> source and fingerprint of the weights"""
    dtype: str = ""
    device: str = ""
    threads: int = 0
    temperatures: tuple[float, ...] = ()
    max_positions: int | None = None
    """positions of the target, prompt included"""
    max_new_tokens: int = 0
    seed: int = 0
    workload: str = ""
    workload_hash: str = ""
    code: str = ""
    """version of this package"""
    created: str = ""
    """date and time, UTC"""
    recheck_mismatches: int = 0
    """positions at which the teacher-forced pass chose another token than decoding did (bf16 ties); the text is
    decoding's in any case"""
    schema: int = SCHEMA

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def settings(self) -> Header:
        """The header without what differs between shards of one recording."""
        return replace(self, recheck_mismatches=0, created="", temperatures=(), threads=0)

    @classmethod
    def from_json(cls, data: Mapping[str, Any], name: str) -> Header:
        """`TraceError` for another schema version or missing and unknown fields; `name` is the file's."""
        schema = data.get("schema")
        if schema not in READS:
            known = " and ".join(map(str, READS))
            raise TraceError(f"{name} is a trace of schema {schema!r}, this program reads schema {known}")
        try:
            drafters = tuple(DrafterInfo(**d) for d in data["drafters"])
            fields = {**data, "drafters": drafters, "temperatures": tuple(data["temperatures"])}
            return cls(**fields)
        except (TypeError, KeyError) as error:
            raise TraceError(f"{name} has a header with missing or unknown fields: {error}") from None


REQUEST_COLUMNS: dict[str, str] = {
    "id": "U",
    "category": "U",
    "split": "U",
    "temperature": "f",
    "seed": "u",
    "budget": "i",
    "finish": "i",
}
"""one entry per request: dtype kind; `budget` is max_new_tokens, `finish` an index into FINISHES"""
POSITION_COLUMNS: dict[str, str] = {"tokens": "i", "target_entropy": "f", "target_top1": "f", "match": "i"}
"""one entry per token of the text; entropies in nats of the distribution the token came from, `match` is the longest
n-gram match at the start position, -1 without an n-gram drafter"""
CONFIDENCE: tuple[str, ...] = ("entropy", "top1", "margin")


def drafter_columns(drafters: Sequence[DrafterInfo]) -> dict[str, str]:
    """Columns per start position: `acc/NAME` agreeing and `avail/NAME` proposed tokens, and the confidences."""
    columns: dict[str, str] = {}
    for d in drafters:
        columns |= {f"acc/{d.name}": "i", f"avail/{d.name}": "i"}
        columns |= {f"{c}/{d.name}": "f" for c in CONFIDENCE if d.confidence}
    return columns


def step_columns(drafters: Sequence[DrafterInfo]) -> dict[str, int]:
    """Columns of codes [N, steps] (uint8, `assc.steps.Codes`) per start position and draft step, and their width."""
    return {f"step_{c}/{d.name}": d.steps for d in drafters if d.steps for c in STEP_COLUMNS}


class Trace:
    """Header and columns. `offsets` [R+1] cuts the position columns [N] into requests, `prompt_offsets` the prompts.

    Raises `TraceError` when the columns do not fit together.
    """

    def __init__(self, header: Header, columns: Columns, name: str = "the trace") -> None:
        self.header = header
        self.columns = dict(columns)
        self.name = name
        _check(self)

    def __len__(self) -> int:
        return len(self.columns["offsets"]) - 1

    @property
    def positions(self) -> int:
        """Tokens of all texts."""
        return int(self.columns["offsets"][-1])

    @property
    def drafters(self) -> tuple[str, ...]:
        return tuple(d.name for d in self.header.drafters)

    def request(self, row: int) -> Request:
        """The request as it was recorded."""
        c = self.columns
        first, last = c["prompt_offsets"][row : row + 2]
        prompt = tuple(c["prompt_ids"][first:last].tolist())
        sampling = {"mode": self.header.mode, "temperature": float(c["temperature"][row])}
        return Request(
            prompt_ids=prompt,
            max_new_tokens=int(c["budget"][row]),
            seed=int(c["seed"][row]),
            id=str(c["id"][row]),
            category=str(c["category"][row]),
            sampling=sampling,
        )

    def requests(self, rows: Iterable[int] | None = None) -> list[Request]:
        return [self.request(r) for r in (range(len(self)) if rows is None else rows)]

    @cached_property
    def rows_by_key(self) -> dict[tuple[str, int, float], int]:
        """(id, seed, temperature) -> row. `TraceError` when two requests share them."""
        c = self.columns
        keys = list(zip(c["id"].tolist(), c["seed"].tolist(), c["temperature"].tolist(), strict=True))
        if len(set(keys)) < len(keys):
            raise TraceError(f"{self.name} holds two requests of the same id, seed and temperature")
        return {key: row for row, key in enumerate(keys)}

    def where(
        self,
        *,
        split: str | None = None,
        categories: Sequence[str] = (),
        temperatures: Sequence[float] = (),
        keep: Callable[[int], bool] | None = None,
    ) -> list[int]:
        """Rows that fit; `TraceError` when none does."""
        c = self.columns
        good = np.ones(len(self), dtype=bool)
        if split is not None:
            good &= c["split"] == split
        if categories:
            good &= np.isin(c["category"], list(categories))
        if temperatures:
            good &= np.isin(c["temperature"], list(temperatures))
        rows = [r for r in np.flatnonzero(good).tolist() if keep is None or keep(r)]
        if not rows:
            asked = {"split": [split] if split else [], "category": categories, "temperature": temperatures}
            words = ", ".join(f"{what} {' or '.join(map(str, v))}" for what, v in asked.items() if len(v))
            raise TraceError(f"{self.name} holds no usable request of {words or 'any kind'}")
        return rows

    def select(self, rows: Sequence[int]) -> Trace:
        """A trace of these requests, in this order."""
        c = self.columns
        at = list(rows)
        picked: dict[str, NDArray[Any]] = {name: c[name][at] for name in REQUEST_COLUMNS}
        for offsets, names in (("offsets", self._position_names()), ("prompt_offsets", ["prompt_ids"])):
            pieces = [np.arange(c[offsets][r], c[offsets][r + 1]) for r in at]
            index = np.concatenate([np.zeros(0, dtype=np.int64), *pieces])
            picked[offsets] = np.cumsum([0, *(len(p) for p in pieces)], dtype=np.int64)
            picked |= {name: c[name][index] for name in names}
        return Trace(self.header, picked, self.name)

    def _position_names(self) -> list[str]:
        drafters = self.header.drafters
        return [*POSITION_COLUMNS, *drafter_columns(drafters), *step_columns(drafters)]


def _check(trace: Trace) -> None:
    """`TraceError` naming the first column that is missing, of a wrong kind or length, or out of its range."""
    c, header, name = trace.columns, trace.header, trace.name
    layout = {"offsets": "i", "prompt_offsets": "i", "prompt_ids": "i"}
    position = POSITION_COLUMNS | drafter_columns(header.drafters)
    for column, kind in (layout | REQUEST_COLUMNS | position).items():
        if column not in c:
            raise TraceError(f"{name} lacks the column {column!r}")
        if c[column].dtype.kind != kind or c[column].ndim != 1:
            raise TraceError(f"{name} has a column {column!r} of the wrong kind {c[column].dtype}")
    ends = {"offsets": len(c["tokens"]), "prompt_offsets": len(c["prompt_ids"])}
    for column, end in ends.items():
        values = c[column]
        if len(values) < 2 or values[0] != 0 or values[-1] != end or (np.diff(values) < 1).any():
            raise TraceError(f"{name} has no usable {column}: a request needs one prompt and one text token at least")
    sizes = dict.fromkeys(REQUEST_COLUMNS, len(trace)) | dict.fromkeys(position, len(c["tokens"]))
    for column, size in sizes.items():
        if len(c[column]) != size:
            raise TraceError(f"{name} has {len(c[column])} entries in the column {column!r} instead of {size}")
    for column, steps in step_columns(header.drafters).items():
        if column not in c:
            raise TraceError(f"{name} lacks the column {column!r}")
        if c[column].dtype != np.uint8 or c[column].shape != (len(c["tokens"]), steps) or steps > header.k_max:
            raise TraceError(f"{name} has a column {column!r} of the wrong kind or shape {c[column].shape}")
    left = np.repeat(c["offsets"][1:], np.diff(c["offsets"])) - np.arange(len(c["tokens"]))
    for drafter in header.drafters:
        acc, avail = c[f"acc/{drafter.name}"], c[f"avail/{drafter.name}"]
        if (acc < 0).any() or (acc > avail).any() or (acc > left).any() or (avail > header.k_max).any():
            raise TraceError(f"{name} counts accepted tokens of {drafter.name!r} that are more than proposed or left")
    finish = c["finish"]
    lengths, cut = np.diff(c["offsets"]), finish == FINISHES.index("length")
    if (finish < 0).any() or (finish >= len(FINISHES)).any() or (lengths[cut] != c["budget"][cut]).any():
        raise TraceError(f"{name} has requests whose end does not fit their length")
    if (lengths > c["budget"]).any() or header.k_max < 1 or not header.drafters:
        raise TraceError(f"{name} has texts beyond their budget, no drafter, or no K_max")


def runs(agree: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Length of the run of True that starts at each position.

    >>> runs(np.array([True, True, False, True])).tolist()
    [2, 1, 0, 1]
    """
    stops = np.where(agree, len(agree), np.arange(len(agree)))
    following = np.minimum.accumulate(stops[::-1])[::-1]
    lengths: NDArray[np.int64] = following - np.arange(len(agree))
    return lengths
