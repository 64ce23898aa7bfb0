"""`python -m assc report RESULT... --out report.html`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from assc.cli import UsageError, parse, run_cli
from assc.errors import AsscError
from assc.files import write_text
from assc.outputs import PAGE, check_outputs
from assc.report.checked import clean
from assc.report.join import Report, read_report

EXTRA = ("matplotlib", "jinja2", "markupsafe")
"""packages of the optional extra `report`"""


@dataclass(frozen=True)
class Config:
    """Options of `report`."""

    results: tuple[Path, ...]
    """run directories of train_policy.py and files of eval.py --json, first on the command line or after --results"""
    out: Path = Path("report.html")
    """page to write"""
    requests: int = 3
    """stored requests (eval.py --rounds) that are shown round by round"""
    ids: tuple[str, ...] = ()
    """ids of the stored requests to show round by round, instead of the first --requests"""
    title: str = ""
    """heading of the page"""


def chosen(report: Report, ids: Sequence[str]) -> Report:
    """Only the stored requests of these ids. `UsageError` for one that is not stored."""
    known = sorted({view.id for view in report.views})
    for name in ids:
        if name not in known:
            stored = f"those are {', '.join(known)}" if known else "none are (eval.py --rounds N stores some)"
            raise UsageError(f"--ids names {name!r}, whose rounds are not stored: {stored}")
    return replace(report, views=tuple(view for view in report.views if view.id in ids))


def write_report(config: Config) -> None:
    """Read, render, write whole or not at all. Raises `AsscError` for what the user can mend."""
    if config.requests < 0:
        raise UsageError(f"--requests is {config.requests}, it must be 0 or more")
    if config.out.resolve() in {path.resolve() for path in config.results}:
        raise UsageError(f"--out {config.out} would overwrite a result")
    check_outputs({"out": config.out}, PAGE)
    report = read_report(config.results)
    try:
        from assc.report.page import render
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in EXTRA:
            raise
        raise AsscError(f'the report needs {error.name}, which is not installed: pip install "assc[report]"') from None
    if config.ids:
        report = chosen(report, config.ids)
    page = render(report, requests=len(report.views) if config.ids else config.requests, title=clean(config.title))
    write_text(config.out, page)
    print(f"{config.out} ({len(page.encode()) / 1e6:.2f} MB, {len(report.entries)} policies)")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 2 and one sentence for a mistake of the user."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and not words[0].startswith("-"):
        words.insert(0, "--results")  # the files may stand alone in front

    def work() -> None:
        write_report(parse(Config, words, prog="python -m assc report", description="One HTML page out of results."))

    return run_cli(work)
