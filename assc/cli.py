"""What all command lines share: one sentence and exit code 2 for a user's mistake, help on demand, a quiet Ctrl-C.

def main(argv: Sequence[str] | None = None) -> int:
    return run_cli(lambda: work(parse(Config, argv, prog="tool", description="Does it.")))
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from assc.errors import AsscError

T = TypeVar("T")

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
"""128 + SIGINT, the shells' convention"""


def say(text: str) -> None:
    """Tell the user on standard error, at once, what is going on."""
    print(text, file=sys.stderr, flush=True)


class UsageError(AsscError):
    """A command line that cannot be read."""


def run_cli(main: Callable[[], int | None]) -> int:
    """Run `main` and return the exit code: its own (None is 0), 2 after an `AsscError` or when the operating
    system refuses a file, 130 after Ctrl-C.

    Other exceptions are faults of the program and pass through with their traceback.
    """
    try:
        return main() or 0
    except AsscError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt as stop:
        print(str(stop) or "interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader, for example `head`, has seen enough; Python would complain while closing
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # a full disk, a folder without permission: nothing that a traceback would explain
        if error.errno is None:
            raise
        where = f" {str(error.filename)!r}" if error.filename is not None else ""
        print(f"error: {error.strerror or error}{where}", file=sys.stderr)
        return EXIT_USER_ERROR
    except SystemExit as stop:  # `--help` of the argument parser
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        print(stop.code, file=sys.stderr)
        return 1


@contextlib.contextmanager
def on_ctrl_c(said: str) -> Iterator[None]:
    """Work that ends with this sentence after Ctrl-C: what is kept of it, and how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(said) from None


NOTHING_KEPT = "stopped before the end: nothing was written"


def parse(config: type[T], argv: Sequence[str] | None = None, *, prog: str, description: str) -> T:
    """Fill the dataclass `config` from command-line words (default: those of this process).

    Raises `UsageError` with one sentence for unknown flags and bad values; `--help` prints and raises `SystemExit(0)`.
    """
    import tyro

    words = list(sys.argv[1:] if argv is None else argv)
    if "-h" in words or "--help" in words:
        return tyro.cli(config, args=words, prog=prog, description=description)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said), _wide_terminal():
            return tyro.cli(config, args=words, prog=prog, description=description)
    except SystemExit:
        raise UsageError(_sentence(said.getvalue(), prog)) from None


@contextlib.contextmanager
def _wide_terminal() -> Iterator[None]:
    """Let the parser write its message without line breaks inside words."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "1000"
    try:
        yield
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before


def _sentence(box: str, prog: str) -> str:
    r"""The first paragraph of a message by tyro, without title, frame (drawn or ASCII) and explanations.

    >>> _sentence("╭─ Oops ──╮\n│ Unknown options: --k │\n│ ──── │\n│ For full help... │\n╰──╯", "tool")
    'unknown options: --k; see tool --help'
    """
    text = re.sub("\x1b\\[[0-9;]*m", "", box)  # colours
    framed = "╭" in text
    lines = [line.strip("│| \t") for line in text.splitlines() if line.strip()[:1] not in ("╭", "╰", "+")]
    rules = [i for i, line in enumerate(lines) if line and not line.strip("─-")]
    start = 0 if framed or not rules else rules[0] + 1  # without a frame the title is the first paragraph
    body: list[str] = []
    for line in lines[start:]:
        if not line.strip("─-"):
            break
        body.append(line)
    message = " ".join(body).rstrip(".") or "the command line cannot be read"
    message = re.sub(r"no type matching (\S+) could be instantiated from \[(.*)\]", r"\2 does not fit \1", message)
    message = message.replace(". Expected", "; expected")
    if hint := re.search(r"Perhaps you meant:\W*(--[\w.-]+)", " ".join(lines)):
        message += f" (perhaps you meant {hint[1]})"
    return f"{message[0].lower()}{message[1:]}; see {prog} --help"
