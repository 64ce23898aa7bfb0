"""`python -m assc COMMAND`: the tools beside the main job. Each command is a module with `main(argv) -> int`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from assc.cli import UsageError, run_cli

COMMANDS: dict[str, tuple[str, str]] = {
    "doctor": ("assc.doctor", "what this machine can run: device, dtype, versions, model pairs"),
    "record": ("assc.record", "record by position what every drafter would propose"),
    "trace": ("assc.trace_cli", "describe, convert and import traces"),
    "calibrate": ("assc.calibrate_cli", "fit and check the cost model of a pair on this machine"),
    "roofline": ("assc.roofline", "computed costs of pairs and machines that are not at hand"),
    "live-check": ("assc.live_check", "does a policy decide live as it does on a trace, and is it as fast?"),
    "distill": ("assc.distill.command", "make a draft for a target out of what the target writes"),
    "drafts": ("assc.drafts_cli", "judge the drafters of a pair: size, tokens, acceptance, c, memory, best static K"),
    "report": ("assc.report.command", "one self-contained HTML page out of results of eval.py and train_policy.py"),
    "drift": ("assc.drift.command", "regret and recovery of policies on streams whose regime switches"),
    "draft-card": ("assc.distill.card", "measure a draft on held-out prompts and write its model card"),
}
"""command -> module, one line of help; modules are imported only when their command is called"""


def usage() -> str:
    """Help text of the command list."""
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items())
    hint = "python -m assc COMMAND --help lists its options"
    return f"usage: python -m assc COMMAND [OPTIONS]\n\ncommands:\n{rows}\n\n{hint}"


def main(argv: Sequence[str] | None = None) -> int:
    """Hand the words after the command to its module; 2 for an unknown command."""
    words = list(sys.argv[1:] if argv is None else argv)
    return run_cli(lambda: _dispatch(words))


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in {"-h", "--help"}:
        print(usage())
        return 0
    if words[0] not in COMMANDS:
        raise UsageError(f"unknown command {words[0]!r}; known commands: {', '.join(COMMANDS)}")
    module = importlib.import_module(COMMANDS[words[0]][0])
    return int(module.main(words[1:]))


if __name__ == "__main__":
    sys.exit(main())
