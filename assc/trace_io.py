"""Traces on disk: one compressed `.npz` file to ship, or a folder of `.npy` columns to map into memory.

Both hold the header as JSON and a SHA-256 of every column. A column whose name has a slash is stored with `@`.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assc.errors import TraceError
from assc.trace import SCHEMA, Header, Trace
from assc.trace_build import concatenate

HEADER = "header.json"
SHARDS = "shard-*.npz"


def digest(column: NDArray[Any]) -> str:
    """SHA-256 over dtype, length and bytes."""
    sha = hashlib.sha256(f"{column.dtype.str}|{len(column)}|".encode())
    sha.update(np.ascontiguousarray(column).tobytes())
    return sha.hexdigest()


def _head(trace: Trace) -> str:
    sums = {name: digest(column) for name, column in sorted(trace.columns.items())}
    header = trace.header.to_json()
    return json.dumps({"header": header, "header_sha256": _mark(header), "sha256": sums}, indent=1, sort_keys=True)


def fingerprint(trace: Trace) -> str:
    """SHA-256 of header and columns: the same for a file and a folder of the same trace."""
    return hashlib.sha256(_head(trace).encode()).hexdigest()


def _mark(header: Mapping[str, Any]) -> str:
    """SHA-256 of a header in canonical JSON."""
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()


def write_trace(trace: Trace, path: Path) -> None:
    """Write whole or not at all: a file if `path` ends with .npz, else a folder, which replaces an older one.

    The bytes depend on nothing but the trace. Raises `TraceError` where nothing can be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".npz":
            _write_file(trace, path)
        else:
            _write_folder(trace, path)
    except OSError as error:
        raise TraceError(f"the trace {path} cannot be written: {error.strerror or error}") from None


def _write_file(trace: Trace, path: Path) -> None:
    handle, part = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
                archive.writestr(_entry(HEADER), _head(trace))
                for name, column in sorted(trace.columns.items()):
                    buffer = io.BytesIO()
                    np.save(buffer, column, allow_pickle=False)
                    archive.writestr(_entry(name.replace("/", "@") + ".npy"), buffer.getvalue())
            file.flush()
            os.fsync(file.fileno())
        os.chmod(part, 0o644)
        os.replace(part, path)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise


def _entry(name: str) -> zipfile.ZipInfo:
    """An archive entry without the time of day."""
    entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
    entry.compress_type = zipfile.ZIP_DEFLATED
    return entry


def _write_folder(trace: Trace, path: Path) -> None:
    if path.exists() and not (path.is_dir() and ((path / HEADER).is_file() or not any(path.iterdir()))):
        raise TraceError(f"{path} exists and is no trace, so it is not replaced")
    part = Path(tempfile.mkdtemp(dir=path.parent, prefix=path.name, suffix=".part"))
    try:
        for name, column in trace.columns.items():
            np.save(part / (name.replace("/", "@") + ".npy"), column, allow_pickle=False)
        (part / HEADER).write_text(_head(trace), encoding="utf-8")
        os.chmod(part, 0o755)
        if path.exists():
            shutil.rmtree(path)
        os.replace(part, path)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def read_trace(path: str | Path, *, mmap: bool = False, verify: bool = True) -> Trace:
    """Read a trace: a `.npz` file, a folder of columns, or a folder of recorded shards.

    `mmap` maps the columns of a folder instead of loading them, `verify=False` skips their checksums. Raises
    `TraceError` with one sentence for anything missing, damaged, truncated or of another version.
    """
    path = Path(path)
    if path.is_dir():
        if (path / HEADER).is_file():
            return _read_folder(path, mmap=mmap, verify=verify)
        shards = sorted(path.glob(SHARDS))
        if not shards:
            raise TraceError(f"{path} holds neither a {HEADER} nor recorded shards, so it is no trace")
        return concatenate([read_trace(s, verify=verify) for s in shards], str(path))
    if not path.is_file():
        raise TraceError(f"there is no trace at {path}")
    try:
        with zipfile.ZipFile(path) as archive:
            head = _parse_head(archive.read(HEADER), str(path))
            columns = {n: _load(archive.read(n.replace("/", "@") + ".npy")) for n in head[1]}
    except KeyError as error:
        raise TraceError(f"{path} is no complete trace: {error.args[0]}") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, OSError, NotImplementedError) as error:
        raise TraceError(f"{path} is damaged or truncated or no trace at all ({error})") from None
    return _build(head, columns, str(path), verify)


def _read_folder(path: Path, *, mmap: bool, verify: bool) -> Trace:
    try:
        head = _parse_head((path / HEADER).read_bytes(), str(path))
        columns = {
            n: np.load(path / (n.replace("/", "@") + ".npy"), mmap_mode="r" if mmap else None, allow_pickle=False)
            for n in head[1]
        }
    except FileNotFoundError as error:
        raise TraceError(f"{path} is no complete trace: {Path(error.filename).name} is missing") from None
    except (EOFError, ValueError, OSError) as error:
        raise TraceError(f"{path} is damaged or truncated ({error})") from None
    return _build(head, columns, str(path), verify)


def _load(data: bytes) -> NDArray[Any]:
    column: NDArray[Any] = np.load(io.BytesIO(data), allow_pickle=False)
    return column


def _parse_head(data: bytes, name: str) -> tuple[Header, dict[str, str]]:
    """The header and the checksum of each column."""
    try:
        value = json.loads(data)
        header, sums = value["header"], value["sha256"]
    except (ValueError, KeyError, TypeError):
        raise TraceError(f"{name} has no header that can be read") from None
    if not isinstance(header, Mapping) or not isinstance(sums, Mapping):
        raise TraceError(f"{name} has no header that can be read")
    schema = header.get("schema")
    if isinstance(schema, int) and schema > SCHEMA:
        raise TraceError(f"{name} is a trace of schema {schema}, newer than the {SCHEMA} this program reads; update it")
    found = Header.from_json(header, name)
    if value.get("header_sha256") != _mark(header):
        raise TraceError(f"{name} is damaged: the checksum of its header is wrong")
    return found, dict(sums)


def _build(head: tuple[Header, dict[str, str]], columns: dict[str, NDArray[Any]], name: str, verify: bool) -> Trace:
    header, sums = head
    if verify:
        for column, expected in sums.items():
            if digest(columns[column]) != expected:
                raise TraceError(f"{name} is damaged: the checksum of the column {column!r} is wrong")
    return Trace(header, columns, name)
