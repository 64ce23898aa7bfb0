"""Checkpoints of a training run: one zip file, replaced atomically, with all that the next round depends on.

`state.json` holds counters, request order, generators and normalisation; `model.zip` is SB3's own save (network,
optimiser, counters), `replay.npz` the replay buffer of off-policy learners, `policy.json` the state of a bandit.
"""

from __future__ import annotations

import io
import json
import os
import random
import tempfile
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from assc.errors import ArtefactError

CHECKPOINT_FILE = "checkpoint.zip"
FORMAT = 1


@dataclass
class Checkpoint:
    """Contents of a checkpoint; `steps` is the number of training rounds done."""

    steps: int
    state: dict[str, Any]
    model: bytes | None = None
    replay: dict[str, NDArray[Any]] = field(default_factory=dict)


def write_checkpoint(run_dir: Path, checkpoint: Checkpoint) -> Path:
    """Write beside the old checkpoint, then replace it, so that a crash leaves one of the two whole."""
    content = {"format": FORMAT, "steps": checkpoint.steps, "state": checkpoint.state}
    handle, temporary = tempfile.mkstemp(dir=run_dir, prefix=".checkpoint.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
                archive.writestr("state.json", json.dumps(content))
                if checkpoint.model is not None:
                    archive.writestr("model.zip", checkpoint.model)
                if checkpoint.replay:
                    buffer = io.BytesIO()
                    np.savez(buffer, **checkpoint.replay)  # type: ignore[arg-type]
                    archive.writestr("replay.npz", buffer.getvalue())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, run_dir / CHECKPOINT_FILE)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return run_dir / CHECKPOINT_FILE


def read_checkpoint(run_dir: Path) -> Checkpoint:
    """The last checkpoint of a run. `ArtefactError` if there is none or it is damaged."""
    path = run_dir / CHECKPOINT_FILE
    if not path.is_file():
        raise ArtefactError(f"{run_dir} cannot be resumed: it has no {CHECKPOINT_FILE}")
    try:
        with zipfile.ZipFile(path) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        content = json.loads(members["state.json"])
        if content["format"] != FORMAT:
            raise ArtefactError(f"{path} has format {content['format']}, this version reads format {FORMAT}")
        replay = {}
        if "replay.npz" in members:
            with np.load(io.BytesIO(members["replay.npz"]), allow_pickle=False) as arrays:
                replay = {name: arrays[name] for name in arrays.files}
        return Checkpoint(int(content["steps"]), content["state"], members.get("model.zip"), replay)
    except (OSError, zipfile.BadZipFile, zlib.error, EOFError, KeyError, TypeError, ValueError) as error:
        raise ArtefactError(f"{path} is damaged ({error}); start a new run") from None


def generator_states() -> dict[str, Any]:
    """States of the global generators that the learners draw from (Python, numpy, torch on the CPU)."""
    kind, keys, position, has_gauss, cached = np.random.get_state()
    version, internal, gauss = random.getstate()
    return {
        "numpy": [kind, [int(k) for k in np.asarray(keys)], position, has_gauss, cached],
        "python": [version, list(internal), gauss],
        "torch": torch.get_rng_state().tolist(),
    }


def restore_generators(states: Mapping[str, Any]) -> None:
    """Put the generators back where `generator_states` found them."""
    kind, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(torch.tensor(states["torch"], dtype=torch.uint8))
