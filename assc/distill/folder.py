"""The folder of a run of `python -m assc distill`: whose it is, and whether another run may use its data."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from assc.distill.config import CHECKPOINT_FILE, HEAD_FILE, RUN_FILE, DistillConfig
from assc.distill.data import ShardStore
from assc.errors import AsscError
from assc.files import write_json

_TAKEN_OVER = ("workload", "text", "max_new_tokens", "rows", "head", "tokens")
_DATA_FIELDS = ("pair", "workload", "text", "max_new_tokens", "rows", "head", "seed", "design", "tokens")
"""settings that must not change between a run and its resumption; besides, `layers` for that design, `data`, `start`"""
_TRAINING_FIELDS = ("batch_rows", "learning_rate", "self_fed", "learn_prompts")
"""the same from the first checkpoint on; runs of older versions did not write them down"""


def with_data(config: DistillConfig) -> DistillConfig:
    """With the settings of the run whose data is used, if there is one. Raises `AsscError` unless it can be used."""
    folder = config.data
    if folder is None:
        return config
    if folder.name == "data" and not (folder / RUN_FILE).exists():  # the folder of the shards themselves was meant
        folder = folder.parent
    told = f"the data of {str(folder)!r} cannot be used: "
    try:
        before = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))
        taken = {name: before[name] for name in _TAKEN_OVER} | {"text": tuple(map(Path, before["text"]))}
        pair = before["pair"]
    except FileNotFoundError:
        raise AsscError(f"{told}it holds no {RUN_FILE}; give the folder of an earlier run") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise AsscError(f"{told}its {RUN_FILE} is damaged ({error})") from None
    if pair != config.pair:
        raise AsscError(f"{told}it was made for the pair {pair!r}, not {config.pair!r}")
    if folder.resolve() == config.out.resolve():
        raise AsscError(f"{told}it is the folder of this run itself; give another --out, or leave --data out")
    if not ShardStore(folder / "data").count():
        raise AsscError(f"{told}it holds no shards")
    if not (folder / HEAD_FILE).is_file():
        raise AsscError(f"{told}that run has not finished its data yet ({HEAD_FILE} is missing)")
    return replace(config, data=folder, **taken)


def claim(config: DistillConfig) -> None:
    """Take over the output folder: new, or an interrupted run of the same settings."""
    wanted = {name: getattr(config, name) for name in (*_DATA_FIELDS, *_TRAINING_FIELDS)}
    wanted["text"] = [str(p) for p in config.text]
    if config.design == "layers":
        wanted["layers"] = config.layers
    for name in ("data", "start"):
        if getattr(config, name) is not None:
            wanted[name] = str(getattr(config, name))
    path = config.out / RUN_FILE
    if path.is_file():
        if not config.resume:
            raise AsscError(f"{str(config.out)!r} holds a run already; give --resume to go on, or another folder")
        try:
            before = dict(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise AsscError(f"{str(path)!r} is damaged ({error}); choose another folder") from None
        begun = (config.out / CHECKPOINT_FILE).is_file()
        before |= {name: wanted[name] for name in _TRAINING_FIELDS if not begun or name not in before}
        changed = [name for name in {**wanted, **before} if before.get(name) != wanted.get(name)]
        if changed:
            raise AsscError(
                f"the run in {str(config.out)!r} was started with {changed[0]} {before.get(changed[0])!r}, "
                f"not {wanted.get(changed[0])!r}; use the same settings or another folder"
            )
    write_json(path, wanted)
