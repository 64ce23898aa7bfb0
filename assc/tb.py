"""TensorBoard: the same tags for every policy, one subdirectory each, so that their curves overlay."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from assc.core import Totals
from assc.errors import AsscError
from assc.monitor import HealthMonitor
from assc.results import RequestResult, unique_labels, watch

PER_REQUEST = "request/"
"""prefix of the tags that show one request alone; without it a tag is cumulative over the requests so far"""


def scalars_of(totals: Totals, baseline: Totals | None = None) -> dict[str, float]:
    """The shared scalar names and their values; what is undefined (nothing drafted, no time) is left out.

    `tokens_per_gpu_second` counts seconds of the decoding device, on a CPU the CPU's. `speedup` needs `baseline`,
    plain decoding of the same requests.
    """
    values: dict[str, float | None] = {
        "tokens_per_gpu_second": totals.tokens_per_second,
        "acceptance_rate": totals.acceptance_rate,
        "waste_rate": totals.waste_rate,
        "mean_k": totals.mean_k,
        "rollback_rate": totals.rollback_rate,
        "draft_time_share": totals.share("draft"),
        "policy_time_share": totals.share("policy"),
    }
    plain = baseline.tokens_per_second if baseline is not None else None
    if plain and totals.tokens_per_second is not None:
        values["speedup"] = totals.tokens_per_second / plain
    return {name: value for name, value in values.items() if value is not None and math.isfinite(value)}


def directory_names(labels: Sequence[str]) -> tuple[str, ...]:
    """One directory name per label, safe on every file system and distinct.

    >>> directory_names(["ar", "static:4", "runs/x/policy.zip"])
    ('ar', 'static-4', 'runs-x-policy.zip')
    """
    names = [re.sub(r"[^\w.,=+-]+", "-", label).strip("-.") or "policy" for label in labels]
    return tuple(name.replace(" #", "-") for name in unique_labels(names))


def has_events(directory: Path) -> bool:
    """Whether TensorBoard files lie in this directory or below it."""
    return directory.is_dir() and any(directory.rglob("events.out.tfevents.*"))


def fresh_directory(root: Path, names: Sequence[str]) -> Path:
    """`root`, or `root/run-2`, `root/run-3`, … if one of the `names` already holds events there.

    A second run that wrote into the first one's files would start again at step 1 and draw zig-zag curves.
    """
    number, directory = 1, root
    while any(has_events(directory / name) for name in names):
        number += 1
        directory = root / f"run-{number}"
    return directory


HEALTH = "health/"
"""prefix of what the health monitor says of the last rounds"""


class Curve:
    """One run subdirectory. Steps may only grow; every `log` is flushed, so a killed process loses nothing."""

    def __init__(self, directory: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.directory = directory
        self._step = -1
        try:
            self._writer: Any = SummaryWriter(str(directory))
        except OSError as error:
            raise AsscError(f"cannot write TensorBoard files to {str(directory)!r}: {error.strerror}") from None

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Write scalars at `step`; ValueError if it is not above the one before."""
        if step <= self._step:
            raise ValueError(f"steps only grow: {step} after {self._step} in {self.directory}")
        self._step = step
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class EvaluationWriter:
    """Curves of an evaluation over its requests: cumulative tags, and the same under `request/` for each alone.

    Use it as a context manager and give `log` to `evaluate(on_request=…)`. `directory` says where it writes.
    """

    def __init__(self, root: Path, labels: Sequence[str]) -> None:
        names = directory_names(labels)
        self.directory = fresh_directory(root, names)
        self._curves: list[Curve] = []
        try:
            for name in names:
                self._curves.append(Curve(self.directory / name))
        except BaseException:
            self.close()
            raise
        self._sums = [Totals() for _ in names]
        self._monitors = [HealthMonitor() for _ in names]
        self._plain = Totals()
        self._step = 0

    def log(self, result: RequestResult) -> None:
        """One finished request: step n is the n-th request (repeats count on)."""
        self._step += 1
        plain = result.baseline.totals
        self._plain = self._plain + plain
        for i, (curve, run) in enumerate(zip(self._curves, result.runs, strict=True)):
            self._sums[i] = self._sums[i] + run.totals
            alone = {PER_REQUEST + tag: value for tag, value in scalars_of(run.totals, plain).items()}
            watch(self._monitors[i], run, plain)
            health = {HEALTH + tag: value for tag, value in self._monitors[i].scalars().items()}
            curve.log(scalars_of(self._sums[i], self._plain) | alone | health, self._step)

    def close(self) -> None:
        for curve in self._curves:
            curve.close()

    def __enter__(self) -> EvaluationWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
