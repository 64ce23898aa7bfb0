"""Phase times of a round, right on a device that runs ahead of the host and without slowing it down."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter, process_time
from typing import Any

import torch

Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"wall": perf_counter, "cpu": process_time}
"""wall: what passes; cpu: what this process computes, all threads together, whatever else the machine does meanwhile
(right for one thread on a CPU, wrong for anything else)"""


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class PhaseTimer:
    """Adds up seconds per named phase.

    On a CPU the clock is read at the edges of each phase. On CUDA an event is recorded there instead, and `read`
    waits once for the last of them, after the round's own synchronisation. A phase takes the larger of its device
    and its host time, since in a launch-bound round it is the host that decides.
    """

    def __init__(self, device: torch.device, clock: Clock = perf_counter) -> None:
        self._cuda = device.type == "cuda"
        self._device = device
        self._clock = clock
        self._host: dict[str, float] = {}
        self._events: list[tuple[str, Any, Any]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if self._cuda:
            begin, end = _event(), _event()
            begin.record()
        start = self._clock()
        try:
            yield
        finally:
            self._host[name] = self._host.get(name, 0.0) + self._clock() - start
            if self._cuda:
                end.record()
                self._events.append((name, begin, end))

    def now(self) -> float:
        """The clock, after everything launched has finished."""
        if self._cuda:
            torch.cuda.synchronize(self._device)
        return self._clock()

    def read(self) -> dict[str, float]:
        """Seconds per phase since the last call; forgets them."""
        seconds = dict(self._host)
        if self._events:
            self._events[-1][2].synchronize()
            device: dict[str, float] = {}
            for name, begin, end in self._events:
                device[name] = device.get(name, 0.0) + begin.elapsed_time(end) / 1e3
            seconds = {name: max(seconds[name], device.get(name, 0.0)) for name in seconds}
        self._host, self._events = {}, []
        return seconds
