"""Curves of a training run against baselines: both play the same few train requests, now and then, off the record.

Train requests, so that nobody sees the held-out ones before the end. The learner is played greedily, as it will be
saved; baselines that do not learn are played once, and drawn as horizontal lines under the same tags.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from assc.core import Backend, Policy, Request, Totals
from assc.oracle import optimum, tuned_static
from assc.oracle_policy import OraclePolicy
from assc.registry import make_policy
from assc.replay import ReplayBackend
from assc.results import Evaluation
from assc.rounds_json import spread
from assc.run import run_request
from assc.tb import Curve, Setting, directory_names, scalars_of
from assc.tb_layout import HELD_OUT, PROGRESS, training_layout
from assc.tuning import static_spec
from assc.vector_replay import FlatTrace
from policies.training.config import TrainConfig
from policies.training.log import TENSORBOARD_DIR, TrainingLog, curve_folder

if TYPE_CHECKING:
    from policies.training.setup import Problem

METRICS = (PROGRESS + "speedup", PROGRESS + "mean_k", HELD_OUT + "speedup", HELD_OUT + "oracle_fraction")
"""columns of the table "HParams", beside the settings"""
NAMES = {"tokens_per_second": "tokens_per_gpu_second"}
"""key of a row -> name of its scalar, where they differ"""

Player = Callable[[], Policy]
"""makes a policy to play with, the learner's as it is at that moment"""


class Progress:
    """Plays the learner and its baselines on `requests`, every `every` rounds of training."""

    def __init__(
        self,
        folder: Path,
        learner: Curve,
        backend: Backend,
        requests: Sequence[Request],
        baselines: Sequence[tuple[str, Policy]],
        *,
        every: int,
        resumed_at: int | None = None,
    ) -> None:
        self.backend, self.requests, self.every = backend, list(requests), every
        self.learner = learner
        self._last = -1 if resumed_at is None else resumed_at
        names = directory_names([name for name, _ in baselines])
        totals = [self._play(policy) for _, policy in baselines]
        self._plain = next(t for (name, _), t in zip(baselines, totals, strict=True) if name == "ar")
        self.lines = [self._tags(t) for t in totals]
        """the baselines' scalars, the same at every step"""
        self.curves = [Curve(folder / name, resumed_at=resumed_at) for name in names]

    def _play(self, policy: Policy) -> Totals:
        played = (Totals.of(run_request(self.backend, request, policy).rounds) for request in self.requests)
        return sum(played, Totals())

    def _tags(self, totals: Totals) -> dict[str, float]:
        return {PROGRESS + name: value for name, value in scalars_of(totals, self._plain).items()}

    def due(self, step: int) -> bool:
        """Whether a multiple of `every` was passed since the last point; at the start of a run too."""
        return step > self._last and (self._last < 0 or step // self.every > self._last // self.every)

    def log(self, step: int, player: Player, *, always: bool = False) -> None:
        """Write a point if it is due, or `always` unless there is one at this step."""
        if not (self.due(step) or (always and step > self._last)):
            return
        self._last = step
        self.learner.log(self._tags(self._play(player())), step)
        for curve, line in zip(self.curves, self.lines, strict=True):
            curve.log(line, step)

    def close(self) -> None:
        for curve in self.curves:
            curve.close()


def baselines_of(problem: Problem, requests: Sequence[Request]) -> list[tuple[str, Policy]]:
    """Plain decoding, a static action (tuned where there is a trace), ASSC, and the optimum where there is a trace."""
    table = problem.eval_backend.table
    trace, costs = problem.trace, problem.costs
    static = f"static:{min(4, table.k_max)}"
    found = [("ar", make_policy("ar")), (static, make_policy(static)), ("assc", make_policy("assc"))]
    if trace is None or costs is None:
        return found
    flat = FlatTrace(trace, costs)
    train = [trace.rows_by_key[r.id, r.seed, r.temperature] for r in problem.train]
    rows = [trace.rows_by_key[r.id, r.seed, r.temperature] for r in requests]
    found[1] = ("static:tuned", make_policy(static_spec(tuned_static(flat, train, table), table)))
    keys = zip(rows, (r.max_new_tokens for r in requests), strict=True)
    try:
        plans = dict(zip(keys, optimum(flat, rows).plans, strict=True))
    except ValueError:  # a cost model that allows no optimum
        return found
    assert isinstance(problem.eval_backend, ReplayBackend)
    return [*found, ("oracle", OraclePolicy(problem.eval_backend, plans))]


def draw_progress(
    config: TrainConfig, problem: Problem, run_dir: Path, log: TrainingLog, resumed_at: int | None
) -> None:
    """Give the log the curves against baselines that this run asks for, their arrangement, and its settings."""
    if resumed_at is None:
        log.curve.layout(training_layout())
        log.curve.settings(settings_of(config, problem, config.curve_name), METRICS)
    if not config.curve_rounds:
        return
    requests = [problem.train[i] for i in spread(problem.train, config.curve_requests)]
    baselines = baselines_of(problem, requests)
    folder = run_dir / TENSORBOARD_DIR
    log.progress = Progress(
        folder,
        log.curve,
        problem.eval_backend,
        requests,
        baselines,
        every=config.curve_rounds,
        resumed_at=resumed_at,
    )
    if resumed_at is None:
        for (name, _), curve in zip(baselines, log.progress.curves, strict=True):
            curve.settings(settings_of(config, problem, name), METRICS)


def settings_of(config: TrainConfig, problem: Problem, policy: str) -> dict[str, Setting]:
    """The row of a policy in the table "HParams"; what only concerns learning is empty for a baseline."""
    learns = policy == config.curve_name
    return {
        "policy": policy,
        "backend": config.backend,
        "pair": str(problem.description.get("pair") or config.pair),
        "mode": problem.backend.mode,
        "c": problem.backend.cost_ratio,
        "reward": config.reward if learns else "",
        "rounds": config.rounds if learns else 0,
        "seed": config.seed,
    }


def log_held_out(evaluation: Evaluation, config: TrainConfig, run_dir: Path, step: int) -> None:
    """The comparison on held-out requests under the same tags, one point per policy at the end of training."""
    for label, row in zip(evaluation.labels, evaluation.rows(), strict=True):
        name = config.curve_name if label == evaluation.meta.get("trained") else label
        curve = Curve(curve_folder(run_dir, name))
        keys = ("tokens_per_second", "speedup", "acceptance_rate", "waste_rate", "mean_k", "oracle_fraction")
        values = {key: row[key] for key in keys if row[key] is not None}
        curve.log({HELD_OUT + NAMES.get(key, key): float(value) for key, value in values.items()}, step)
        curve.close()
