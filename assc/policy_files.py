"""Which file a spec means that names a saved policy: a `.zip`, or a run directory of train_policy.py."""

from __future__ import annotations

import os
import re
from pathlib import Path

from assc.errors import ArtefactError

POLICY_FILE = "policy.zip"
"""the finished policy in a run directory of train_policy.py"""


def without_alias(spec: str) -> str:
    """The spec of a row: `static:4@b` is `static:4` under a name of its own. A path that exists has no alias.

    >>> without_alias("static:4@b"), without_alias("runs/a@b/policy.zip")
    ('static:4', 'runs/a@b/policy.zip')
    """
    if os.sep in spec and Path(spec).exists():
        return spec
    found = re.fullmatch(r"(.+)@[\w-]+", spec)
    return found[1].strip() if found else spec


def saved_spec(spec: str, seed: int | None = None) -> str:
    """The spec, with the `policy.zip` of a run directory instead of the directory.

    In a folder of `train_policy.py --seeds` it is the one of `seed`. Raises `ArtefactError` for a directory in which no
    training has finished, or none of this seed, and for a folder of seeds without a `seed`. A directory is told from a
    name by its separator: `./x` or `runs/x`.
    """
    if os.sep not in spec or not Path(spec).is_dir():
        return spec
    saved = Path(spec) / POLICY_FILE
    if saved.is_file():
        return str(saved)
    seeds = seed_files(Path(spec))
    if not seeds:
        what = f"has no {POLICY_FILE}: no training has finished in it" if any(Path(spec).iterdir()) else "is empty"
        raise ArtefactError(f"the run directory {spec!r} {what}")
    known = " ".join(map(str, seeds))
    if seed is None:
        raise ArtefactError(
            f"{spec!r} holds a policy for each of several seeds: play them with --backend replay --policy-seeds "
            f"{known}, or name one, {spec}/seed-{next(iter(seeds))}"
        )
    if seed not in seeds:
        raise ArtefactError(f"{spec!r} holds no finished policy of seed {seed}, only of {known} (--policy-seeds)")
    return str(seeds[seed])


def seed_files(folder: Path) -> dict[int, Path]:
    """seed -> finished policy in a folder of `train_policy.py --seeds`, by seed: `seed-1`, never `seed-01`."""
    found = {p.parent.name.removeprefix("seed-"): p for p in folder.glob(f"seed-*/{POLICY_FILE}")}
    numbers = {int(name): p for name, p in found.items() if name.isdecimal() and name == str(int(name))}
    return dict(sorted(numbers.items()))
