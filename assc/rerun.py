"""`python -m assc rerun DIR`: repeat a run into a new directory and say whether the results are equal.

Each run directory says in `manifest.json` what was run, with which options, on which data. Runs in modelled time on a
trace repeat to the bit on one machine; where seconds were measured the texts must be equal and the seconds cannot be.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from assc.cli import EXIT_INTERRUPTED, parse, run_cli, say
from assc.errors import AsscError
from assc.files import git_commit, versions, write_json
from assc.manifest import hash_now, read_manifest
from assc.rerun_compare import Difference, compare_runs

REPORT = "rerun.json"
COSTS = "costs.json"


@dataclass(frozen=True)
class Command:
    """How a command is started, which option names its directory, and which options only write elsewhere."""

    program: tuple[str, ...]
    directory: str
    left_out: frozenset[str] = frozenset()


COMMANDS: dict[str, Command] = {
    "eval": Command(("eval",), "run-dir", frozenset({"json", "markdown", "csv", "tensorboard", "prometheus"})),
    "train": Command(("train_policy",), "run-dir", frozenset({"resume"})),
    "record": Command(("assc", "record"), "out", frozenset({"resume"})),
    "distill": Command(("assc", "distill"), "out", frozenset({"resume"})),
}


@dataclass(frozen=True)
class Config:
    """Options of `python -m assc rerun`."""

    directory: Path
    """run directory of eval.py --run-dir, train_policy.py, record or distill, first on the command line or named"""
    out: Path | None = None
    """new directory of the repeated run; default: DIRECTORY-rerun, or -rerun-2, ... where that exists"""
    force: bool = False
    """go on where data has changed since the run; the results will hardly be equal"""


def command_line(manifest: Mapping[str, Any], directory: Path, out: Path) -> list[str]:
    """The words that repeat a run into `out`. `AsscError` for a command that this version does not know."""
    command = COMMANDS.get(str(manifest["command"]))
    if command is None:
        known = ", ".join(COMMANDS)
        raise AsscError(f"{str(directory)!r} was made by {manifest['command']!r}; what can be repeated: {known}")
    words = _without(list(map(str, manifest["words"])), {*command.left_out, command.directory})
    fitted = directory / COSTS
    live = manifest["config"].get("backend") == "live"
    if live and "--cost" not in words and fitted.is_file():  # a calibration would fit other costs
        words += ["--cost", str(fitted)]
    return ["-m", *command.program, *words, f"--{command.directory}", str(out)]


def _without(words: list[str], options: set[str]) -> list[str]:
    """The words without these options and their values."""
    kept: list[str] = []
    dropping = False
    for word in words:
        if word.startswith("--"):
            dropping = word.removeprefix("--") in options
        if not dropping:
            kept.append(word)
    return kept


def changed_data(manifest: Mapping[str, Any]) -> list[str]:
    """One sentence for each file that is missing or another one than in the run."""
    found = []
    for name, entry in manifest["data"].items():
        now = hash_now(entry["path"])
        if now is None:
            where = manifest["working_directory"]
            found.append(f"the {name} {entry['path']} is not here (the run was started in {where})")
        elif now != entry["sha256"]:
            found.append(f"the {name} {entry['path']} has changed since the run")
    return found


def conditions(manifest: Mapping[str, Any]) -> list[str]:
    """What differs between then and now besides the data: versions, code, machine."""
    now, before = versions(), manifest["versions"]
    found = [f"{n} is {now.get(n)}, was {v}" for n, v in before.items() if now.get(n) != v]
    commit = git_commit()
    if commit != manifest["git_commit"]:
        found.append(f"the code is at commit {commit}, was at {manifest['git_commit']}")
    return found


def rerun(config: Config) -> int:
    """Repeat the run; 0 if the results are equal, 1 if not."""
    manifest = read_manifest(config.directory)
    out = config.out or _free(config.directory)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise AsscError(f"{str(out)!r} exists and is not empty; give another --out")
    words = command_line(manifest, config.directory, out)
    changed = changed_data(manifest)
    if changed and not config.force:
        raise AsscError(f"{changed[0]}, so the run cannot be repeated; --force runs it all the same")
    differing = [*changed, *conditions(manifest)]
    for sentence in differing:
        say(f"note: {sentence}")
    say(f"running: {shlex.join(['python', *words])}")
    code = start(words)
    if code == EXIT_INTERRUPTED:
        return code
    if code:
        raise AsscError(f"the repeated run failed with exit code {code}")
    found = compare_runs(config.directory, out, str(manifest["command"]))
    _write(out, config.directory, found, differing)
    print(_verdict(found, config.directory, out))
    return 0 if all(f.equal for f in found) else 1


def start(words: Sequence[str]) -> int:
    """Run Python with these words in a process of its own; its exit code."""
    return subprocess.run([sys.executable, *words]).returncode


def _free(directory: Path) -> Path:
    base = directory.with_name(directory.name + "-rerun")
    number, path = 1, base
    while path.exists():
        number += 1
        path = base.with_name(f"{base.name}-{number}")
    return path


def _write(out: Path, before: Path, found: Sequence[Difference], notes: Sequence[str]) -> None:
    equal = all(f.equal for f in found)
    content = {"of": str(before), "equal": equal, "results": [asdict(f) for f in found], "notes": list(notes)}
    write_json(out / REPORT, content)


def _verdict(found: Sequence[Difference], before: Path, out: Path) -> str:
    lines = [f"{f.what}: {'equal' if f.equal else 'DIFFERENT'}{f' ({f.detail})' if f.detail else ''}" for f in found]
    equal = all(f.equal for f in found)
    exact = " bit for bit" if equal and all(f.exact for f in found) else ""
    return "\n".join([*lines, f"{out} {'equals' if equal else 'DIFFERS FROM'} {before}{exact}"])


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 0 equal, 1 different, 2 and one sentence for a mistake of the user."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and not words[0].startswith("-"):
        words.insert(0, "--directory")  # the directory may stand alone in front
    description = "Repeat a run into a new directory and say whether the results are equal."
    return run_cli(lambda: rerun(parse(Config, words, prog="python -m assc rerun", description=description)))
