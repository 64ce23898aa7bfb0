"""What a training run shows and records: a progress bar, TensorBoard scalars, and a polite Ctrl-C."""

from __future__ import annotations

import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from stable_baselines3.common.logger import Logger, TensorBoardOutputFormat
from tqdm import tqdm

from assc.core import Policy, Totals
from assc.tb import Curve, directory_names, open_writer, scalars_of

if TYPE_CHECKING:
    from policies.training.progress import Progress

TENSORBOARD_DIR = "tb"
TAG = "decode"
"""group of our scalars, beside SB3's rollout, train and time"""
SHOWN_ROUNDS = 200
"""counted parts (a round, or one round of all lanes) that the running figures of the progress bar are pooled over"""


class Interrupt:
    """Turns the first Ctrl-C into a request to stop after the round; the second one interrupts at once."""

    def __init__(self) -> None:
        self.requested = False
        self._previous: Any = None

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            self._previous = None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        print("\nCtrl-C: saving a checkpoint after this round (once more to stop at once).", flush=True)


class _TensorBoard(TensorBoardOutputFormat):
    """SB3's writer, but the steps of a tag only grow, also when a run is resumed.

    What an earlier process wrote after the checkpoint is hidden, and a tag is written once for each step.
    """

    def __init__(self, folder: Path, resumed_at: int | None) -> None:
        self.writer = open_writer(folder, resumed_at)
        self._is_closed = False
        self._before = -1 if resumed_at is None else resumed_at
        self._last: dict[str, int] = {}

    def write(self, key_values: dict[str, Any], key_excluded: dict[str, tuple[str, ...]], step: int = 0) -> None:
        new = [key for key in key_values if step > self._last.get(key, self._before)]
        super().write({k: key_values[k] for k in new}, {k: key_excluded[k] for k in new}, step)
        self._last.update(dict.fromkeys(new, step))


def curve_folder(run_dir: Path, name: str) -> Path:
    """Where the curves of a policy of this run are."""
    return run_dir / TENSORBOARD_DIR / directory_names([name])[0]


class TrainingLog:
    """Counts rounds, moves the progress bar and writes our scalars beside SB3's, flushed at every dump."""

    def __init__(
        self,
        run_dir: Path,
        total: int,
        *,
        name: str = "policy",
        unit: str = "round",
        resumed_at: int | None = None,
        progress: bool = True,
    ) -> None:
        """`name` is the policy's in TensorBoard, beside which its baselines stand; `unit` is what `total` counts."""
        folder = curve_folder(run_dir, name)
        board = _TensorBoard(folder, resumed_at)
        self.logger = Logger(str(folder), [board])
        self.curve = Curve(folder, resumed_at=resumed_at, writer=board.writer)
        """the same file, for what is not a scalar of training"""
        self.progress: Progress | None = None
        """curves against baselines, where the run draws some"""
        self.total, self.unit, self._step = total, unit, resumed_at or 0
        self.totals, self.window = Totals(), Totals()
        self._recent: deque[Totals] = deque(maxlen=SHOWN_ROUNDS)
        self._counted = 0
        shown = progress and sys.stderr.isatty()
        self._lines = progress and not shown
        self._bar = tqdm(total=total, initial=resumed_at or 0, unit=unit, disable=not shown, dynamic_ncols=True)

    def add(self, played: Totals, step: int) -> None:
        """Count what was played; `step` is the number of rounds (or decisions) done so far."""
        self.totals, self.window = self.totals + played, self.window + played
        self._recent.append(played)
        before, self._step = self._step, step
        self._bar.update(step - before)
        self._counted += 1
        if self._counted % 20 == 0 and not self._bar.disable:
            self._bar.set_postfix_str(self._figures())
        if self._lines and (step * 10) // self.total > (before * 10) // self.total:
            print(f"  {step} of {self.total} {self.unit}s: {self._figures()}", flush=True)

    def _figures(self) -> str:
        recent = sum(self._recent, Totals())
        speed, accepted = recent.tokens_per_second, recent.acceptance_rate
        parts = [f"{speed:.1f} tokens/s" if speed is not None else "no time passed"]
        parts.append("nothing drafted" if accepted is None else f"acceptance {accepted:.2f}")
        return ", ".join([*parts, f"mean K {recent.mean_k or 0:.1f}"])

    def record_window(self) -> None:
        """Hand the scalars of the rounds since the last call to the logger, for its next dump."""
        if self.window.rounds:
            for name, value in scalars_of(self.window).items():
                self.logger.record(f"{TAG}/{name}", value)
            self.window = Totals()

    def compare(self, step: int, player: Callable[[], Policy], *, always: bool = False) -> None:
        """Draw a point of the curves against baselines if it is due; `player` makes the learner as it is now."""
        if self.progress is not None:
            self.progress.log(step, player, always=always)

    def dump(self, step: int) -> None:
        """Write what is waiting."""
        self.logger.dump(step)

    def state_dict(self) -> dict[str, Any]:
        waiting = {
            name: [float(value), list(self.logger.name_to_excluded.get(name) or ())]
            for name, value in self.logger.name_to_value.items()
        }
        fields = Totals.__dataclass_fields__
        return {
            "totals": {f: getattr(self.totals, f) for f in fields},
            "window": {f: getattr(self.window, f) for f in fields},
            "waiting": waiting,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.totals, self.window = Totals(**state["totals"]), Totals(**state["window"])
        for name, (value, excluded) in state["waiting"].items():
            self.logger.record(name, value, exclude=tuple(excluded) or None)

    def close(self) -> None:
        self._bar.close()
        if self.progress is not None:
            self.progress.close()
        self.curve.close()
        self.logger.close()
