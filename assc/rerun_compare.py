"""Are the results of two runs equal? What names a directory, a time of day or a wall clock is left out."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from assc.errors import AsscError
from assc.manifest import sha256_of

VOLATILE = frozenset(
    {"wall_seconds", "prefill_seconds", "unexplained_share", "command", "git_commit", "versions", "definitions"}
    | {"created", "run_dir", "resume", "trained", "hardware", "machine", "progress"}
)
"""keys that may differ between equal runs"""
HERE = "<run directory>"


@dataclass(frozen=True)
class Difference:
    """One result of both runs."""

    what: str
    equal: bool
    detail: str = ""
    exact: bool = True
    """every number was compared, not the text alone"""


def compare_runs(before: Path, after: Path, command: str) -> list[Difference]:
    """One entry per result that the earlier run has. `AsscError` where it has none."""
    found = list[Difference]()
    named = {
        path.relative_to(before).as_posix(): compare
        for pattern, compare in RESULTS[command].items()
        for path in sorted(before.glob(pattern))
    }
    for name, compare in named.items():
        old, new = before / name, after / name
        if not new.exists():
            found.append(Difference(name, False, "the repeated run has none"))
            continue
        found.append(compare(name, old, new, (before, after)))
    if not found:
        raise AsscError(f"{str(before)!r} holds no result to compare with: the run did not finish")
    return found


Compare = Callable[[str, Path, Path, tuple[Path, Path]], Difference]


def first_difference(one: Any, two: Any, at: str = "") -> str | None:
    """Where two JSON values differ first, and how; None where they are equal. Keys of `VOLATILE` are not looked at.

    >>> first_difference({"a": [1, 2], "created": 1}, {"a": [1, 3], "created": 2})
    'a[1]: 2, then 3'
    """
    if isinstance(one, Mapping) and isinstance(two, Mapping):
        for key in [k for k in {**one, **two} if k not in VOLATILE]:
            if key not in one or key not in two:
                return f"{at}.{key}".lstrip(".") + ": only in one of them"
            if (found := first_difference(one[key], two[key], f"{at}.{key}")) is not None:
                return found
        return None
    if isinstance(one, list) and isinstance(two, list):
        for i, (a, b) in enumerate(zip_longest(one, two)):
            if (found := first_difference(a, b, f"{at}[{i}]")) is not None:
                return found
        return None
    return None if one == two and type(one) is type(two) else f"{at.lstrip('.')}: {one!r}, then {two!r}"


def _read(path: Path, roots: Sequence[Path]) -> Any:
    """JSON in which the names of the run directories are one name."""
    text = path.read_text(encoding="utf-8")
    for name in sorted({str(r) for root in roots for r in (root, root.resolve())}, key=len, reverse=True):
        text = text.replace(json.dumps(name)[1:-1] + "/", HERE + "/").replace(json.dumps(name), json.dumps(HERE))
    return json.loads(text)


def compare_evaluations(name: str, old: Path, new: Path, roots: tuple[Path, Path]) -> Difference:
    """All numbers where time was modelled; the texts where it was measured, and what the speed-ups did."""
    one, two = _read(old, roots), _read(new, roots)
    if one["meta"]["time_source"] == "modelled":
        found = first_difference(one, two)
        return Difference(name, found is None, found or "")
    was, now = ([_texts(detail) for detail in data["details"]] for data in (one, two))
    differs = first_difference(was, now)
    if differs is not None:
        return Difference(name, False, f"texts differ, {differs}", exact=False)
    rounds = [r["policy"] for r, s in zip(one["rows"], two["rows"], strict=True) if r["rounds"] != s["rounds"]]
    told = ["the same texts; measured seconds do not repeat: " + "; ".join(map(_speeds, one["rows"], two["rows"]))]
    told += [f"other rounds with {', '.join(rounds)}"] if rounds else []
    return Difference(name, True, "; ".join(told), exact=False)


def _texts(detail: Mapping[str, Any]) -> list[Any]:
    keys = ("id", "temperature", "repeat", "tokens", "finish")
    return [[request[key] for key in keys] for request in detail["requests"]]


def _speeds(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """How far apart two measurements of one policy are, beside the interval of the first."""
    low, high = old["speedup_ci95"]
    if old["speedup"] is None or new["speedup"] is None or low is None:
        return f"{old['policy']} n/a"
    inside = "inside" if low <= new["speedup"] <= high else "OUTSIDE"
    return f"{old['policy']} {old['speedup']:.3f}x then {new['speedup']:.3f}x ({inside} {low:.3f} to {high:.3f})"


def compare_policies(name: str, old: Path, new: Path, roots: tuple[Path, Path]) -> Difference:
    """The members of two saved policies: weights or state, action table, features.

    Not the path of the cost model: a live run is repeated with the copy of the costs that were fitted to it.
    """
    one, two = _members(old), _members(new)
    for members in (one, two):
        members.get("meta.json", {}).get("training", {}).pop("cost", None)
    found = first_difference(one, two)
    return Difference(name, found is None, found or "")


def _members(path: Path) -> dict[str, Any]:
    """JSON members as values, arrays as their type and bytes."""
    found: dict[str, Any] = {}
    with zipfile.ZipFile(path) as archive:
        for member in sorted(archive.namelist()):
            data = archive.read(member)
            if member.endswith(".json"):
                found[member] = json.loads(data)
            elif member.endswith(".npz"):
                with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
                    found[member] = {n: [str(arrays[n].dtype), arrays[n].tobytes().hex()] for n in arrays.files}
    return found


def compare_traces(name: str, old: Path, new: Path, roots: tuple[Path, Path]) -> Difference:
    """Header (without the date) and every column."""
    from assc.trace_io import digest, read_trace

    one, two = (
        {"header": trace.header.to_json(), **{n: digest(column) for n, column in sorted(trace.columns.items())}}
        for trace in (read_trace(old), read_trace(new))
    )
    found = first_difference(one, two)
    return Difference(name, found is None, found or "")


def compare_folders(name: str, old: Path, new: Path, roots: tuple[Path, Path]) -> Difference:
    """A folder of JSON and other files: all must be equal."""
    names, others = (sorted(p.relative_to(f).as_posix() for p in f.rglob("*") if p.is_file()) for f in (old, new))
    found = first_difference(names, others)
    for inside in names if found is None else []:
        pair = old / inside, new / inside
        if inside.endswith(".json"):
            found = first_difference(_read(pair[0], roots), _read(pair[1], roots), inside)
        elif sha256_of(pair[0]) != sha256_of(pair[1]):
            found = f"{inside} has other bytes"
        if found is not None:
            break
    return Difference(name, found is None, found or "")


RESULTS: dict[str, dict[str, Compare]] = {
    "eval": {
        "eval.json": compare_evaluations,
        **{f"{part}/eval.json": compare_evaluations for part in ("live", "modelled", "synthetic", "switching")},
    },
    "train": {
        f"{part}{name}": compare
        for part in ("", "seed-*/", "trials/*/", "best/", "best/seed-*/")
        for name, compare in (("policy.zip", compare_policies), ("eval.json", compare_evaluations))
    },
    "record": {"trace.npz": compare_traces},
    "distill": {"draft": compare_folders},
}
"""command -> pattern of results in its directory -> how they are compared"""
