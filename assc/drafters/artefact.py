"""A learned draft on disk: `config.json` and one safetensors file, written whole and checked when read.

`design` in the configuration says what it is: `hidden` (`assc.drafters.net`) or `layers` (`assc.drafters.layers`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from assc.errors import ArtefactError
from assc.files import write_json

FORMAT = "assc-draft"
VERSION = 1
CONFIG = "config.json"
WEIGHTS_OF = {"hidden": "model.safetensors", "layers": "draft.safetensors"}
"""name of the weights' file by design"""


def fingerprint(embed: Tensor) -> str:
    """SHA-256 of the first rows of a target's embeddings as bfloat16: tells models of one shape apart in any dtype."""
    rows = embed[:64].detach().to("cpu", torch.bfloat16).contiguous().view(torch.int16)
    return hashlib.sha256(rows.numpy().tobytes()).hexdigest()


def write_draft(
    folder: Path, design: str, tensors: Mapping[str, Tensor], embed: Tensor, fields: dict[str, Any]
) -> None:
    """Write `tensors` and the configuration; `embed` are the target's embeddings, `fields` what else to write."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / WEIGHTS_OF[design]
    part = path.with_name(path.name + ".part")
    save_file({k: v.contiguous() for k, v in tensors.items()}, part, metadata={"format": "pt"})
    part.chmod(0o644)  # the writer makes it private
    digest = hashlib.sha256(part.read_bytes()).hexdigest()
    part.replace(path)
    config = {
        "format": FORMAT,
        "version": VERSION,
        "design": design,
        "weights_sha256": digest,
        "target_fingerprint": fingerprint(embed),
        **fields,
    }
    write_json(folder / CONFIG, config)


def is_net(folder: Path) -> bool:
    """Whether a folder holds a learned draft, rather than a model of transformers."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and config.get("format") == FORMAT


def read_config(folder: Path) -> dict[str, Any]:
    """The configuration of an artefact; `ArtefactError` for one that is missing, damaged or of another version."""
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ArtefactError(f"there is no draft in {str(folder)!r}: {CONFIG} is missing") from None
    except (OSError, ValueError) as error:
        raise ArtefactError(f"{str(path)!r} is damaged: {error}") from None
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise ArtefactError(f"{str(path)!r} does not describe a draft of this package")
    if config.get("version") != VERSION:
        raise ArtefactError(
            f"the draft in {str(folder)!r} has version {config.get('version')!r}, this package reads {VERSION}; "
            "update the package or make the draft again with python -m assc distill"
        )
    if design_of(config) not in WEIGHTS_OF:
        raise ArtefactError(
            f"the draft in {str(folder)!r} has the design {design_of(config)!r}, this package knows "
            f"{' and '.join(WEIGHTS_OF)}"
        )
    return config


def design_of(config: Mapping[str, Any]) -> str:
    """The design named in a configuration; the first drafts were all `hidden` and did not say so."""
    return str(config.get("design", "hidden"))


def read_draft(folder: Path, design: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Configuration and tensors of an artefact of this design, the file's hash checked. Raises `ArtefactError`."""
    config = read_config(folder)
    if design_of(config) != design:
        raise ArtefactError(f"the draft in {str(folder)!r} has the design {design_of(config)!r}, not {design!r}")
    path = folder / WEIGHTS_OF[design]
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ArtefactError(f"the draft's weights {str(path)!r} cannot be read: {error.strerror}") from None
    if digest != config.get("weights_sha256"):
        raise ArtefactError(f"{str(path)!r} is truncated or damaged: its SHA-256 differs from the one in {CONFIG}")
    try:
        with safe_open(path, framework="pt") as file:
            return config, {name: file.get_tensor(name) for name in file.keys()}
    except Exception as error:  # safetensors has its own error class per backend
        raise unfitting(folder, error) from None


def unfitting(folder: Path, error: Exception) -> ArtefactError:
    """What to say of weights that no model can be made of."""
    return ArtefactError(f"the draft in {str(folder)!r} does not fit its description: {error}")


def check_shape(embed: Tensor, vocab_size: int, hidden_size: int) -> None:
    """`ArtefactError` unless the target's embeddings have the sizes that the draft was made for."""
    if tuple(embed.shape) != (vocab_size, hidden_size):
        raise ArtefactError(
            f"the draft was made for a target of {vocab_size} tokens and hidden size "
            f"{hidden_size}, this one has {embed.shape[0]} and {embed.shape[1]}"
        )


def check_target(folder: Path, config: Mapping[str, Any], embed: Tensor) -> None:
    """`ArtefactError` unless the draft was made for the target of these embeddings."""
    if config.get("target_fingerprint") != fingerprint(embed):
        raise ArtefactError(
            f"the draft in {str(folder)!r} was made for another target with the same shape "
            f"({config.get('target', {}).get('source', 'unknown')})"
        )
