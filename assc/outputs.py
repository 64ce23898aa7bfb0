"""May a file be written where a command was told to? Never over an input, and only over its own earlier results."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from assc.cli import UsageError
from assc.files import check_writable
from assc.manifest import MANIFEST

EVALUATION, SEED_TABLE, DRIFT = "assc evaluation", "assc seed-table", "assc drift"
DRAFTS, LIVE_CHECK, COSTS = "assc draft choice report", "assc live check", "assc cost model"
"""kinds of JSON files"""
PAGE = "page"
"""kind of the report"""
_BY_KEYS = {EVALUATION: ("meta", "rows", "same_text"), LIVE_CHECK: ("same_rounds", "live", "replay")}
"""results that do not name their kind are known by their keys"""
_OF_RUNS = frozenset({"eval.json", "eval.md", "eval.csv", "seed-table.json", "seed-table.md"})
"""results that a run directory holds beside its `manifest.json`: a run is never changed afterwards"""
_HEAD = 4096
"""bytes of a file that say what it is, where it is no JSON"""
_STARTS: Mapping[str, Callable[[bytes], bool]] = {
    "markdown": lambda head: re.match(rb"\| (policy|live|modelled|synthetic|switching) \|", head) is not None,
    "csv": lambda head: head.startswith(b"group,value,label,"),
    "prometheus": lambda head: head.startswith(b"# HELP assc_"),
    "svg": lambda head: head.lstrip().startswith((b"<?xml", b"<svg")) and b"<svg" in head,
    PAGE: lambda head: head[:15].lower() == b"<!doctype html>",
    "png": lambda head: head.startswith(b"\x89PNG"),
}
"""option, or kind, that is no JSON -> whether a file begins as what it writes"""


def json_kind(data: Any) -> str | None:
    """Which command made this content of a JSON file: its `kind`, else by its keys; None for anything else."""
    if not isinstance(data, dict):
        return None
    if isinstance(data.get("kind"), str):
        return str(data["kind"])
    if isinstance(data.get("preset"), str):
        return f"assc {data['preset']}"
    return next((kind for kind, keys in _BY_KEYS.items() if all(key in data for key in keys)), None)


def _own(option: str, path: Path, kind: str) -> bool:
    """Whether the file is empty or an earlier result of this option."""
    with path.open("rb") as file:
        head = file.read(_HEAD)
    if not head:
        return True
    begins = _STARTS.get(option, _STARTS.get(kind))
    if begins is not None:
        return begins(head)
    try:
        return json_kind(json.loads(path.read_bytes())) == kind
    except ValueError:  # not JSON, or not UTF-8
        return False


def check_outputs(files: Mapping[str, Path | None], kind: str, inputs: Iterable[str | Path | None] = ()) -> None:
    """Refuse, before anything is played, what may not be written. `files`: option -> path, None where not asked for.

    Each in a file of its own that can be written; none of the `inputs` (files, or folders with what is in them) and no
    result of a run directory; and a file that is there is empty or an earlier result of the same option: of this
    `kind`, where it is JSON. Raises `UsageError` and `AsscError`. Makes the folders that are missing.
    """
    asked = {option: path for option, path in files.items() if path is not None}
    taken: dict[Path, str] = {}
    read = [Path(given).resolve() for given in inputs if given is not None and Path(given).exists()]
    for option, path in asked.items():
        place = path.resolve()
        first = taken.setdefault(place, option)
        if first != option:
            raise UsageError(f"--{first} and --{option} both name {path}; give each a file of its own")
        if not path.exists() or path.is_dir():
            continue
        if any(place == one or one in place.parents for one in read):
            raise UsageError(f"--{option} {path} would overwrite an input of this command; name another file")
        if path.name in _OF_RUNS and (path.parent / MANIFEST).is_file():
            raise UsageError(f"--{option} {path} would overwrite a result of the run directory; name another file")
        if not path.is_file():
            raise UsageError(f"--{option} {path} is not a regular file; name another one")
        if not _own(option, path, kind):
            raise UsageError(
                f"--{option} {path} would overwrite a file that is no earlier result of this command; "
                "remove it or name another one"
            )
    for path in asked.values():
        check_writable(path)
