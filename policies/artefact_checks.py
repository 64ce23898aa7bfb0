"""Defensive reading of saved policies: every function ends in good data or in one `ArtefactError`."""

from __future__ import annotations

import io
import json
import os
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray

from assc.errors import ArtefactError
from policies.learned import ACTIVATIONS, Network, Normaliser
from policies.recurrent import Lstm, RecurrentNetwork

LARGEST_MEMBER = 64 * 2**20
"""bytes; a policy network is far smaller, so a larger member is damage or an attack"""

EXPECTED = ("meta.json", "weights.npz", "state.json")


def refuse(path: str, what: str) -> NoReturn:
    """Raise the one kind of error that a bad artefact gives."""
    raise ArtefactError(f"the saved policy {path!r} {what}")


def read_members(path: str) -> dict[str, bytes]:
    """The known members of the zip at `path`, checksums verified; other members are not read."""
    if not os.path.isfile(path):
        refuse(path, "does not exist" if not os.path.exists(path) else "is not a file")
    members: dict[str, bytes] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            for info in archive.infolist():
                if info.filename not in EXPECTED:
                    continue
                if info.file_size > LARGEST_MEMBER:
                    refuse(path, f"has a {info.filename} of {info.file_size} bytes, more than a policy can need")
                members[info.filename] = archive.read(info)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError):
        refuse(path, "is not a readable zip file (damaged, truncated, or something else)")
    except OSError as error:
        refuse(path, f"cannot be read: {error.strerror or error}")
    if "meta.json" not in members:
        hint = "; it is a stable-baselines3 model, export it with policies.sb3_adapter.export_sb3"
        refuse(path, "has no meta.json" + (hint if "policy.pth" in names else ""))
    return members


def read_json(path: str, members: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """The JSON object in a member. NaN and infinities are refused: they are not JSON."""

    def constant(text: str) -> NoReturn:
        raise ValueError(f"it contains {text}")

    if name not in members:
        refuse(path, f"has no {name}")
    try:
        value = json.loads(members[name], parse_constant=constant)
    except (ValueError, RecursionError) as error:
        refuse(path, f"has an unreadable {name} ({error})")
    if not isinstance(value, dict):
        refuse(path, f"has a {name} that is not a JSON object")
    return value


def read_arrays(path: str, members: Mapping[str, bytes]) -> dict[str, NDArray[Any]]:
    """The arrays of `weights.npz`, read without pickle."""
    if "weights.npz" not in members:
        refuse(path, "has no weights.npz")
    try:
        archive = np.load(io.BytesIO(members["weights.npz"]), allow_pickle=False)
        if not isinstance(archive, NpzFile):
            refuse(path, "has an unreadable weights.npz")
        with archive, zipfile.ZipFile(io.BytesIO(members["weights.npz"])) as contents:
            if sum(int(info.file_size) for info in contents.infolist()) > LARGEST_MEMBER:
                refuse(path, "has a weights.npz larger than a policy can need")
            arrays = {name: np.asarray(archive[name]) for name in archive.files}
    except ArtefactError:
        raise
    except Exception:  # numpy's readers of headers and zips raise a dozen kinds; all of them mean damage
        refuse(path, "has an unreadable weights.npz")
    if not all(a.dtype.kind == "f" for a in arrays.values()):
        refuse(path, "has weights that are not floating-point numbers")
    return arrays


def build_network(
    path: str, arrays: Mapping[str, NDArray[Any]], activation: object, size: int, actions: int
) -> Network | RecurrentNetwork:
    """The network of w0, b0, w1, … (and mean, var, eps, clip), checked against the sizes of both its ends.

    With lstm_x, lstm_h and lstm_b these layers stand behind an LSTM.
    """
    if activation not in ACTIVATIONS:
        refuse(path, f"has the activation {activation!r}, known are {', '.join(ACTIVATIONS)}")
    if not all(bool(np.isfinite(a).all()) for a in arrays.values()):
        refuse(path, "has weights that are NaN or infinite")
    lstm = _lstm(path, arrays, size)
    layers: list[tuple[NDArray[np.float32], NDArray[np.float32]]] = []
    width = size if lstm is None else lstm.hidden
    while f"w{len(layers)}" in arrays:
        w, b = arrays[f"w{len(layers)}"], arrays.get(f"b{len(layers)}")
        if w.ndim != 2 or b is None or b.shape != w.shape[:1] or w.shape[1] != width:
            shapes = f"{list(w.shape)} and {None if b is None else list(b.shape)}"
            refuse(path, f"has layer {len(layers)} of shapes {shapes}, where {width} inputs were expected")
        layers.append((w.astype(np.float32), b.astype(np.float32)))
        width = w.shape[0]
    if not layers or width != actions:
        refuse(path, f"has a network with {width if layers else 'no'} outputs for {actions} actions")
    scaling = _normaliser(path, arrays, size)
    if lstm is None:
        return Network(layers, str(activation), scaling)
    return RecurrentNetwork(lstm, Network(layers, str(activation)), scaling)


def _lstm(path: str, arrays: Mapping[str, NDArray[Any]], size: int) -> Lstm | None:
    names = ("lstm_x", "lstm_h", "lstm_b")
    present = [arrays[n].astype(np.float32) for n in names if n in arrays]
    if not present:
        return None
    hidden = present[1].shape[-1] if len(present) == 3 and present[1].ndim else 0
    if not hidden or [a.shape for a in present] != [(4 * hidden, size), (4 * hidden, hidden), (4 * hidden,)]:
        refuse(path, f"has an incomplete LSTM, or one that is not for {size} inputs")
    return Lstm(*present)


def _normaliser(path: str, arrays: Mapping[str, NDArray[Any]], size: int) -> Normaliser | None:
    names = ("mean", "var", "eps", "clip")
    present = [n for n in names if n in arrays]
    if not present:
        return None
    shapes = {"mean": (size,), "var": (size,), "eps": (), "clip": ()}
    if present != list(names) or any(arrays[n].shape != shapes[n] for n in names):
        refuse(path, f"has an incomplete observation scaling, or one that is not for {size} numbers")
    mean, var = (arrays[n].astype(np.float64) for n in ("mean", "var"))
    eps, clip = float(arrays["eps"]), float(arrays["clip"])
    if not (bool((var >= 0).all()) and eps > 0 and clip > 0):
        refuse(path, "has an observation scaling with a negative variance, eps or clip")
    return Normaliser(mean, var, eps, clip)
