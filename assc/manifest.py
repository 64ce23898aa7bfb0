"""What a run directory says of itself: enough to repeat the run (`python -m assc rerun`) and to judge a difference.

`manifest.json` is written when the run starts, so that one that died tells what it was, and completed when it ends.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from datetime import datetime, timezone
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from assc.errors import AsscError
from assc.files import git_commit, versions, write_json
from assc.hardware import hardware
from assc.workloads import BUILTIN

MANIFEST = "manifest.json"
SCHEMA = 1
KIND = "assc run"
PACKAGED = "package:"
"""prefix of a path inside the package"""


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's bytes, or of the names and hashes of all files of a folder."""
    if path.is_dir():
        inside = sorted(p for p in path.rglob("*") if p.is_file())
        parts = [f"{p.relative_to(path).as_posix()} {sha256_of(p)}" for p in inside]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()
    sha = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            sha.update(block)
    return sha.hexdigest()


def data_of(paths: Mapping[str, str | Path | None]) -> dict[str, dict[str, str]]:
    """name -> path and hash of every file that a run reads; None is left out, and what is no file (a hub id, a name).

    `package:data/…` names a file that comes with this package.
    """
    found = {}
    for name, given in paths.items():
        digest = None if given is None else hash_now(str(given))
        if digest is not None:
            found[name] = {"path": str(given), "sha256": digest}
    return found


def packaged_workload(name: str) -> str:
    """A workload as `data_of` takes it: a file, or one of those that come with the package."""
    return f"{PACKAGED}data/workloads/{name}.jsonl" if name in BUILTIN else name


def hash_now(path: str) -> str | None:
    """The hash of the data at a path of a manifest, None where nothing is there."""
    if path.startswith(PACKAGED):
        with as_file(files("assc").joinpath(path.removeprefix(PACKAGED))) as inside:
            return sha256_of(inside) if inside.exists() else None
    return sha256_of(Path(path)) if Path(path).exists() else None


def words_of(config: Any, leave_out: Iterable[str] = ()) -> list[str]:
    """The command-line words that make this dataclass of options, without what is at its default.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Options:
    ...     name: str = "a"
    ...     sizes: tuple[int, ...] = ()
    ...     loud: bool = False
    >>> words_of(Options("b", (1, 2), True))
    ['--name', 'b', '--sizes', '1', '2', '--loud']
    """
    words: list[str] = []
    skipped = set(leave_out)
    for field in fields(config):
        value = getattr(config, field.name)
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if field.name in skipped or value == default:
            continue
        flag = field.name.replace("_", "-")
        if isinstance(value, bool):
            switch = "FlagConversionOff" not in str(field.type)
            words += [f"--{flag}" if value else f"--no-{flag}"] if switch else [f"--{flag}", str(value)]
        elif isinstance(value, tuple | list):
            words += [f"--{flag}", *map(str, value)]
        else:
            words += [f"--{flag}", str(value)]
    return words


def start_run(
    directory: Path,
    command: str,
    config: Any,
    *,
    seeds: Mapping[str, Any],
    data: Mapping[str, str | Path | None],
    **more: Any,
) -> None:
    """Write the manifest of a run that begins. `config` is the dataclass of its command line, all of it resolved.

    `command` is a name that `assc.rerun` knows. `seeds` are those that everything random comes from. A directory that
    holds the manifest of a run that is being resumed keeps it.
    """
    if (directory / MANIFEST).is_file():
        return
    content = {
        "schema": SCHEMA,
        "kind": KIND,
        "command": command,
        "words": words_of(config),
        "config": {f.name: _plain(getattr(config, f.name)) for f in fields(config)},
        "working_directory": os.getcwd(),
        "seeds": dict(seeds),
        "data": data_of(data),
        "versions": versions(),
        "git_commit": git_commit(),
        "hardware": hardware(),
        "started": _now(),
        "finished": None,
        **more,
    }
    write_json(directory / MANIFEST, content)


def finish_run(directory: Path, **more: Any) -> None:
    """Complete the manifest: time, the hardware with what is known of it now, and `more`. Without one, nothing."""
    if not (directory / MANIFEST).is_file():
        return
    manifest = read_manifest(directory)
    write_json(directory / MANIFEST, {**manifest, "hardware": hardware(), "finished": _now(), **more})


def read_manifest(directory: Path) -> dict[str, Any]:
    """`AsscError` with one sentence for a directory that is empty, holds no run, or one of another version."""
    path = directory / MANIFEST
    if not directory.is_dir():
        raise AsscError(f"there is no run directory {str(directory)!r}")
    if not path.is_file():
        empty = not any(directory.iterdir())
        raise AsscError(f"{str(directory)!r} is {'empty' if empty else f'no run directory: it has no {MANIFEST}'}")
    try:
        manifest: Any = json.loads(path.read_text(encoding="utf-8"))
        wrong = manifest.get("kind") != KIND or not isinstance(manifest["words"], list)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise AsscError(f"{str(path)!r} is damaged ({error})") from None
    if wrong or manifest.get("schema") != SCHEMA:
        raise AsscError(f"{str(path)!r} is of schema {manifest.get('schema')!r}, this program reads schema {SCHEMA}")
    return dict(manifest)


def check_free(directory: Path) -> None:
    """`AsscError` for a run directory that holds something."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise AsscError(f"{str(directory)!r} exists and is not empty; give a new --run-dir")


def claim_directory(directory: Path) -> None:
    """Make a new run directory, or take an empty one. `AsscError` for one that holds something."""
    try:
        check_free(directory)
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise AsscError(f"the run directory {str(directory)!r} cannot be made ({error.strerror})") from None


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _plain(value: Any) -> Any:
    """A value of a configuration as JSON knows it."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(v) for v in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
