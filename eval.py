"""Compare policies on held-out prompts: one table, one JSON file, paired by request and interleaved.

python eval.py --policies ar static:4 assc bandit:ucb --requests 24 --json out.json
python eval.py --backend replay --policies ar static:tuned assc threshold bandit:ucb oracle --json out.json
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from assc.cli import EXIT_INTERRUPTED, parse, run_cli
from assc.eval_config import Config, check
from assc.eval_job import play
from assc.eval_live import live_job
from assc.eval_output import begin_run, write_outputs
from assc.eval_replay import replay_job
from assc.files import git_commit
from assc.results import EvaluationInterrupted
from assc.tables import print_definitions, print_evaluation


def run(config: Config, words: Sequence[str] = ()) -> int:
    """Evaluate as configured, print the table, write the files. 130 after Ctrl-C, with what was finished.

    `words` is the command line, for the result file.
    """
    check(config)
    if config.explain:
        print_definitions()
        if list(words) == ["--explain"]:
            return 0
    if config.preset is not None:
        from assc.seed_table import seed_table

        return seed_table(config, words)
    job = replay_job(config) if config.backend == "replay" else live_job(config)
    begin_run(config, job)
    try:
        evaluation = play(config, job)
    except EvaluationInterrupted as stop:
        evaluation = stop.evaluation
    evaluation.kept = job.keep(config.rounds)
    evaluation.meta |= {"command": shlex.join(["python", "eval.py", *words]), "git_commit": git_commit()}
    try:  # files first, since a closed pipe stops the printing; and the table even if the disk is full
        write_outputs(config, evaluation, job.backend)
    finally:
        print_evaluation(evaluation, categories=config.explain, health=config.health)
    return 0 if evaluation.complete else EXIT_INTERRUPTED


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 2 and one sentence for a mistake of the user, 130 after Ctrl-C."""
    description = "Compare policies of speculative decoding, paired by request and interleaved in time."
    words = list(sys.argv[1:] if argv is None else argv)
    return run_cli(lambda: run(parse(Config, words, prog="python eval.py", description=description), words))


if __name__ == "__main__":
    sys.exit(main())
