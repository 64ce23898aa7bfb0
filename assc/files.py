"""Small helpers around result files."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import tempfile
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from assc.errors import AsscError

VERSIONED: tuple[str, ...] = ("assc", "torch", "transformers", "numpy", "scipy", "gymnasium", "stable-baselines3")
"""packages whose versions belong to a result"""
_NUMBERS = re.compile(r"\[\n[-+.\deE,\snul]*\]")
"""a list of numbers and nulls as `json.dumps` folds it: one line each (no string of JSON has a raw line break)"""


def versions() -> dict[str, str]:
    """Version of Python and of the packages that matter; those not installed are left out."""
    found = {"python": platform.python_version()}
    for name in VERSIONED:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def git_commit() -> str | None:
    """Commit of the source tree this module runs from, None when it is an installed package."""
    root = Path(__file__).parent.parent
    if not (root / "train_policy.py").is_file() or not (root / "pyproject.toml").is_file():
        return None
    try:
        result = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip() or None if result.returncode == 0 else None


def check_writable(path: Path) -> None:
    """`AsscError` unless a file can be made at `path`: told before hours of work, not after. Makes parent folders."""
    try:
        if path.is_dir():
            raise IsADirectoryError(0, "it is a folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise AsscError(f"cannot write {str(path)!r}: {error.strerror or error}") from None


def write_text(path: Path, text: str) -> None:
    """`write_bytes` in UTF-8."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file whole or not at all: a reader never sees half of it, and an old version survives a crash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _umask() -> int:
    """The process's umask; mkstemp ignores it and makes files private."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write strict JSON (NaN and infinity are refused with ValueError), indented, whole or not at all."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    write_text(path, _NUMBERS.sub(lambda found: f"[{' '.join(found[0][1:-1].split())}]", text) + "\n")
