"""TensorBoard: the same tags for every policy, one run each, so that their curves overlay ([docs/tensorboard.md])."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from assc.core import Totals
from assc.errors import AsscError
from assc.results import unique_labels

Setting = str | int | float | bool
"""value of a hyperparameter"""


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
        "tokens_per_round": totals.tokens_per_round,
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


def open_writer(directory: Path, resumed_at: int | None = None) -> Any:
    """A `SummaryWriter`; `resumed_at` hides what an earlier process wrote after that step.

    Raises `AsscError` where no file can be written.
    """
    from torch.utils.tensorboard import SummaryWriter

    if any(f".tfevents.{int(time.time())}." in path.name for path in directory.glob("events.out.*")):
        time.sleep(1.0)  # files are read in the order of their names, which begin with the second
    try:
        return SummaryWriter(str(directory), purge_step=None if resumed_at is None else resumed_at + 1)
    except OSError as error:
        raise AsscError(f"cannot write TensorBoard files to {str(directory)!r}: {error.strerror}") from None


class Curve:
    """One TensorBoard run. The steps of a tag only grow; every call is flushed, so a killed process loses nothing."""

    def __init__(self, directory: Path, *, resumed_at: int | None = None, writer: Any = None) -> None:
        """Write to `directory`, through `writer` if there is one already: a run is best read from one file."""
        self.directory = directory
        self._before = -1 if resumed_at is None else resumed_at
        self._last: dict[str, int] = {}
        self._closing: Any = None
        self._writer = writer if writer is not None else open_writer(directory, resumed_at)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Write scalars at `step`; ValueError if it is not above a tag's last one."""
        for tag in values:
            self._advance(tag, step)
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)
        self._writer.flush()

    def histogram(self, tag: str, counts: Sequence[int], step: int) -> None:
        """Distribution of whole numbers ≥ 0, one bucket each; nothing is written for none."""
        if not counts:
            return
        self._advance(tag, step)
        values = np.asarray(counts)
        self._writer.add_histogram(tag, values, step, bins=np.arange(values.max() + 2) - 0.5)
        self._writer.flush()

    def text(self, tag: str, markdown: str, step: int = 0) -> None:
        """Write a text in TensorBoard's Markdown (emphasis, tables, no colours)."""
        self._advance(tag, step)
        self._writer.add_text(tag, markdown, step)
        self._writer.flush()

    def figure(self, tag: str, drawn: Any, step: int = 0) -> None:
        """Write a matplotlib figure as a picture."""
        self._advance(tag, step)
        self._writer.add_figure(tag, drawn, step, close=False)
        self._writer.flush()

    def layout(self, layout: Mapping[str, Mapping[str, Sequence[Any]]]) -> None:
        """Write the arrangement of the page "Custom scalars": category -> chart -> [kind, tags]."""
        self._writer.add_custom_scalars(layout)
        self._writer.flush()

    def settings(self, values: Mapping[str, Setting], metrics: Sequence[str]) -> None:
        """This run's row in the table "HParams"; its `metrics` are the last values of these scalar tags."""
        from torch.utils.tensorboard import summary

        make: Any = summary.hparams  # has no annotations
        experiment, start, self._closing = make(dict(values), dict.fromkeys(metrics, 0.0))
        files = self._writer._get_file_writer()  # add_hparams would make a run of its own
        files.add_summary(experiment)
        files.add_summary(start)
        self._writer.flush()

    def _advance(self, tag: str, step: int) -> None:
        before = self._last.get(tag, self._before)
        if step <= before:
            raise ValueError(f"steps only grow: {tag} at {step} after {before} in {self.directory}")
        self._last[tag] = step

    def close(self) -> None:
        """Close the file; the row of settings is marked as ended."""
        if self._closing is not None:
            self._writer._get_file_writer().add_summary(self._closing)
            self._closing = None
        self._writer.close()
