"""Train a policy on a speculative decoder, then compare it with baselines: `python train_policy.py --help`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from assc.cli import parse, run_cli


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""

    def work() -> int:
        from policies.training.config import DESCRIPTION, TrainConfig, merge_resumed
        from policies.training.job import train
        from policies.training.seeds import train_seeds
        from policies.training.sweep import sweep

        words = list(sys.argv[1:] if argv is None else argv)
        config = parse(TrainConfig, words, prog="train_policy.py", description=DESCRIPTION)
        config = merge_resumed(config, words)
        job = sweep if config.sweep else train_seeds if config.seeds else train
        return job(config)

    return run_cli(work)


if __name__ == "__main__":
    sys.exit(main())
