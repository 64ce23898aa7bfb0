"""An evaluation in TensorBoard: one run per policy while it is played, and a run `comparison` over all of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np

from assc.core import RoundRecord, Totals
from assc.metrics import Run, columns, per_request
from assc.monitor import HealthMonitor
from assc.results import Evaluation, RequestResult, short_labels, watch
from assc.rounds_json import EntropiesOf, TextOf, known_entropy
from assc.stats import speedup, speedup_interval
from assc.tables import to_markdown
from assc.tb import Curve, Setting, directory_names, fresh_directory, scalars_of
from assc.tb_layout import (
    AGAINST,
    HEALTH,
    INTERVAL,
    OVER_REQUESTS,
    OVER_TOKENS,
    PICTURES,
    REQUEST,
    ROUNDS,
    evaluation_layout,
)
from assc.tb_text import sample

COMPARISON = "comparison"
"""run that holds what is about all policies: table, pictures, arrangement of the custom scalars"""
METRICS = ("speedup", "tokens_per_gpu_second", "acceptance_rate", "mean_k")
"""columns of the table HParams, beside the settings"""
SAMPLES = 3
"""requests whose text is shown"""
GROWTH = 1.5
"""intervals and histograms are written at request 1, 2, 3, … and then whenever their number has grown this much"""


FEWEST = 6
"""prompts before the first interval: of fewer it is so wide that it hides all others"""


def due(step: int) -> bool:
    """Whether a costly point belongs at this step.

    >>> [n for n in range(1, 40) if due(n)]
    [1, 2, 3, 4, 6, 8, 12, 18, 26, 39]
    """
    return step == 1 or math.floor(math.log(step, GROWTH)) > math.floor(math.log(step - 1, GROWTH))


def _name(result: RequestResult) -> str:
    """Tag of a request's text."""
    request = result.request
    return f"text/{request.id or f'request {result.index + 1}'} at temperature {request.temperature:g}"


class _Policy:
    """What was counted of one policy so far."""

    def __init__(self, curve: Curve) -> None:
        self.curve = curve
        self.runs: list[Run] = []
        self.totals = Totals()
        self.entropy = [0.0, 0]
        """sum, and number of rounds where it is known"""
        self.fresh: list[RoundRecord] = []
        """rounds since the last histogram"""
        self.monitor = HealthMonitor()

    def add(self, run: Run, entropies: Sequence[float]) -> list[float]:
        """Count a run; the entropies of its rounds that are known."""
        self.runs.append(run)
        self.totals = self.totals + run.totals
        self.fresh += run.episode.rounds
        found = [h for r in run.episode.rounds if (h := known_entropy(r, entropies)) is not None]
        self.entropy = [self.entropy[0] + sum(found), self.entropy[1] + len(found)]
        return found


class EvaluationWriter:
    """Curves of an evaluation over its requests and tokens, with histograms, intervals, texts and settings.

    Use it as a context manager, give `log` to `evaluate(on_request=…)`, and call `finish` with what came out, also
    after Ctrl-C. Everything is flushed at every request. `directory` says where it writes. `settings` are the
    hyperparameters all policies share, `own` further ones per policy; `seed` is that of the evaluation, so that the
    last intervals are those of its rows. `samples` are the indices of the requests whose text is shown.
    """

    def __init__(
        self,
        root: Path,
        labels: Sequence[str],
        *,
        seed: int = 0,
        settings: Mapping[str, Setting] | None = None,
        own: Sequence[Mapping[str, Setting]] | None = None,
        samples: Sequence[int] = (),
        token_text: TextOf | None = None,
        entropies: EntropiesOf | None = None,
    ) -> None:
        short = short_labels(labels)
        *names, comparison = directory_names([*(short[label] for label in labels), COMPARISON])
        self.directory = fresh_directory(root, [*names, comparison])
        self.labels = tuple(labels)
        self._heuristic = next((i for i, label in enumerate(labels) if label.partition(":")[0] == "assc"), None)
        self._seed, self._text, self._entropies, self._samples = seed, token_text, entropies, frozenset(samples)
        self._curves: list[Curve] = []
        try:
            for name in (*names, comparison):
                self._curves.append(Curve(self.directory / name))
            for i, (label, curve) in enumerate(zip(labels, self._curves, strict=False)):
                more = own[i] if own is not None else {}
                curve.settings({"policy": label, **(settings or {}), **more}, [OVER_REQUESTS + m for m in METRICS])
            self._curves[-1].layout(evaluation_layout(self._heuristic is not None))
        except BaseException:
            self.close()
            raise
        self._policies = [_Policy(curve) for curve in self._curves[:-1]]
        self._plain: list[Run] = []
        self._plain_totals = Totals()
        self._step = 0
        self._judged_at = 0

    def log(self, result: RequestResult) -> None:
        """One finished request: step n is the n-th request (repeats count on)."""
        self._step += 1
        plain = result.baseline.totals
        self._plain.append(result.baseline)
        self._plain_totals = self._plain_totals + plain
        known: Sequence[float] = () if self._entropies is None else self._entropies(result.request)
        for policy, run in zip(self._policies, result.runs, strict=True):
            found = policy.add(run, known)
            alone = scalars_of(run.totals, plain)
            so_far = scalars_of(policy.totals, self._plain_totals)
            if found:
                alone["target_entropy"] = sum(found) / len(found)
            if policy.entropy[1]:
                so_far["target_entropy"] = policy.entropy[0] / policy.entropy[1]
            by_request = {OVER_REQUESTS + n: v for n, v in so_far.items()} | {REQUEST + n: v for n, v in alone.items()}
            watch(policy.monitor, run, plain)
            health = {HEALTH + name: value for name, value in policy.monitor.scalars().items()}
            policy.curve.log(by_request | health, self._step)
            policy.curve.log({OVER_TOKENS + name: value for name, value in so_far.items()}, policy.totals.tokens)
            if result.repeat == 0 and result.index in self._samples:
                policy.curve.text(_name(result), sample(run.episode.rounds, self._text))
        if due(self._step):
            self._histograms()
            self._intervals(FEWEST)

    def _histograms(self) -> None:
        """K and accepted length of the rounds since the last histogram."""
        for policy in self._policies:
            if policy.fresh:
                accepted = [r.accepted for r in policy.fresh if r.drafted]
                policy.curve.histogram(ROUNDS + "k", [r.planned for r in policy.fresh], self._step)
                policy.curve.histogram(ROUNDS + "accepted_length", accepted, self._step)
                policy.fresh.clear()

    def _intervals(self, fewest: int) -> None:
        """Speed-up and ratio to ASSC with their intervals, unless they are written or of fewer prompts."""
        base = columns(per_request(self._plain))
        if self._judged_at == self._step or len(base[0]) < fewest:
            return
        self._judged_at = self._step
        heuristic = None if self._heuristic is None else columns(per_request(self._policies[self._heuristic].runs))
        for policy in self._policies:
            mine = columns(per_request(policy.runs))
            values: dict[str, float] = {}
            for group, name, other in ((INTERVAL, "speedup", base), (AGAINST, "ratio", heuristic)):
                if other is None or (ratio := speedup(*mine, *other)) is None:
                    continue
                low, high = speedup_interval(*mine, *other, rng=np.random.default_rng(self._seed))
                if low is not None and high is not None:
                    values |= {group + name: ratio, group + "low": low, group + "high": high}
            policy.curve.log(values, self._step)

    def finish(self, evaluation: Evaluation) -> str | None:
        """Write what is known at the end: last intervals, the table, pictures. A sentence where those are missing."""
        if not evaluation.results:
            return None
        self._histograms()
        self._intervals(1)
        comparison = self._curves[-1]
        comparison.text("table", to_markdown(evaluation))
        try:
            from assc.report.pictures import pictures_of
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "matplotlib":
                raise
            return 'no pictures in TensorBoard: matplotlib is not installed (pip install "assc[report]")'
        for name, figure in pictures_of(evaluation):
            comparison.figure(PICTURES + name, figure)
        return None

    def close(self) -> None:
        for curve in self._curves:
            curve.close()

    def __enter__(self) -> EvaluationWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
