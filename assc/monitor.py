"""Is speculation healthy? A monitor for any policy and backend: give it the records of rounds, ask it for a verdict.

    monitor = HealthMonitor(plain_step=backend.plain_step_seconds)
    for record in iter_rounds(backend, request, policy):
        monitor.add(record)
    print(monitor.line("assc"))

It needs nothing but records, so it also fits into an engine loop that is not ours.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from assc.bands import BANDS as BANDS
from assc.bands import Band
from assc.bands import judge as judge
from assc.core import RoundRecord, Totals

State = Literal["unknown", "healthy", "degraded", "failing"]
STATES: tuple[State, ...] = ("unknown", "healthy", "degraded", "failing")
"""in the order of `HealthMonitor.scalars`'s number"""


FAILING_SPEED_UP = 1.0
"""below it plain decoding would be faster"""
MOST_NOTES = 32
"""different reasons that are counted apart"""
OTHERS = "(other reasons)"


def plain_seconds_of(record: RoundRecord, plain: Totals) -> float | None:
    """Seconds that plain decoding takes for a round's tokens, from the totals of plain decoding of its request."""
    return record.emitted * plain.seconds / plain.tokens if plain.tokens and plain.seconds > 0 else None


@dataclass(frozen=True)
class Change:
    """The windowed figure `name` left its band on the side of a fault (`fault`), or came back."""

    round: int
    """rounds that the monitor had seen"""
    name: str
    value: float
    fault: bool


@dataclass(slots=True)
class _Sums:
    """Counts of rounds; `plain` are the seconds that plain decoding takes for `priced` seconds' tokens."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    fallbacks: int = 0
    seconds: float = 0.0
    draft: float = 0.0
    plain: float = 0.0
    priced: float = 0.0

    def move(self, part: _Sums, sign: int = 1) -> None:
        self.rounds += sign * part.rounds
        self.drafted += sign * part.drafted
        self.accepted += sign * part.accepted
        self.fallbacks += sign * part.fallbacks
        self.seconds += sign * part.seconds
        self.draft += sign * part.draft
        self.plain += sign * part.plain
        self.priced += sign * part.priced

    def figures(self) -> dict[str, float | None]:
        return {
            "acceptance": self.accepted / self.drafted if self.drafted else None,
            "draft_share": self.draft / self.seconds if self.seconds > 0 else None,
            "speed_up": self.plain / self.priced if self.priced > 0 else None,
            "fallback_share": self.fallbacks / self.rounds if self.rounds else None,
        }


class HealthMonitor:
    """Figures of `BANDS` over the last `window` rounds and over all, with a state, reasons and counts.

    `plain_step`: seconds of one plain step (`Backend.plain_step_seconds`); without it, and where `add` is not told
    the plain seconds of a round, they are the mean of the rollback rounds seen so far, and the speed-up is unknown
    while there are none. Nothing is judged before `least` rounds. `memory()` gives the bytes that the device used at
    most, asked after each round; `memory_limit` makes exceeding that many a fault. `on_change` is called when a
    windowed figure leaves its band on the side of a fault and when it comes back, `margin` (relative) inside it, so
    that a figure at the edge does not flicker.

    A fallback is a rollback round whose record carries a reason, as those of `guard` do. Rounds with unusable seconds
    (negative, NaN, infinite) count in no time.
    """

    def __init__(
        self,
        plain_step: float | None = None,
        *,
        window: int = 256,
        least: int = 32,
        margin: float = 0.02,
        bands: Mapping[str, Band] = BANDS,
        memory: Callable[[], int | None] | None = None,
        memory_limit: int | None = None,
        on_change: Callable[[Change], None] | None = None,
    ) -> None:
        if not 1 <= least <= window or margin < 0 or set(bands) != set(BANDS):
            raise ValueError(f"1 <= least <= window, margin >= 0 and all bands are needed, got {least}, {window}")
        if plain_step is not None and not 0 < plain_step < float("inf"):
            raise ValueError(f"plain_step is a positive number of seconds, got {plain_step}")
        self.plain_step, self.size, self.least, self.margin = plain_step, window, least, margin
        self.bands, self.memory, self.memory_limit, self.on_change = dict(bands), memory, memory_limit, on_change
        self.total, self.recent = _Sums(), _Sums()
        self.memory_peak: int | None = None
        """bytes"""
        self.triggers: dict[str, int] = dict.fromkeys((*BANDS, "memory"), 0)
        """how often each figure, over the window, left its band on the side of a fault"""
        self.notes: dict[str, dict[str, int]] = {}
        """reason given by the policy -> how often it began, and in how many rounds it stood"""
        self._window: deque[_Sums] = deque()
        self._faults: dict[str, bool] = dict.fromkeys((*BANDS, "memory"), False)
        self._plain = [0, 0.0]
        self._before: tuple[str, ...] = ()

    def add(self, record: RoundRecord, *, plain_seconds: float | None = None) -> None:
        """Count a round. `plain_seconds`: what plain decoding takes for its tokens, where that is known better."""
        part = self._part(record, plain_seconds)
        self.total.move(part)
        self.recent.move(part)
        self._window.append(part)
        if len(self._window) > self.size:
            self.recent.move(self._window.popleft(), -1)
        if self.total.rounds % self.size == 0:  # differences of floats drift; sums do not
            self.recent = _Sums()
            for one in self._window:
                self.recent.move(one)
        self._note(record.reasons)
        if self.memory is not None and (used := self.memory()) is not None:
            self.saw_memory(used)
        self._watch()

    def saw_memory(self, peak: int) -> None:
        """Bytes that were in use at once."""
        self.memory_peak = max(peak, self.memory_peak or 0)
        if self.memory_limit is not None and self.memory_peak > self.memory_limit and not self._faults["memory"]:
            self._change("memory", float(self.memory_peak), True)

    def _part(self, record: RoundRecord, plain_seconds: float | None) -> _Sums:
        part = _Sums(1, record.drafted, record.accepted, int(record.rollback and bool(record.reasons)))
        if not 0.0 < record.seconds < float("inf"):
            return part
        part.seconds = record.seconds
        part.draft = record.draft_seconds if 0.0 <= record.draft_seconds <= record.seconds else 0.0
        if record.plain:
            self._plain = [self._plain[0] + 1, self._plain[1] + record.seconds]
        known, count = self.plain_step, self._plain[0]
        step = known if known is not None else self._plain[1] / count if count else None
        plain = plain_seconds if plain_seconds is not None else None if step is None else record.emitted * step
        if plain is not None and 0.0 <= plain < float("inf"):
            part.plain, part.priced = plain, record.seconds
        return part

    def _note(self, reasons: tuple[str, ...]) -> None:
        for reason in reasons:
            known = reason if reason in self.notes or len(self.notes) < MOST_NOTES else OTHERS
            count = self.notes.setdefault(known, {"times": 0, "rounds": 0})
            count["rounds"] += 1
            count["times"] += reason not in self._before
        self._before = reasons

    def _watch(self) -> None:
        if self.recent.rounds < self.least:
            return
        for name, value in self.recent.figures().items():
            if value is None:
                continue
            band, was = self.bands[name], self._faults[name]
            slack = (self.margin if "above" in band.faults else -self.margin) if was else 0.0
            fault = band.state(value * (1 + slack)) in band.faults
            if fault != was:
                self._change(name, value, fault)

    def _change(self, name: str, value: float, fault: bool) -> None:
        self._faults[name] = fault
        self.triggers[name] += fault
        if self.on_change is not None:
            self.on_change(Change(self.total.rounds, name, value, fault))

    @property
    def state(self) -> State:
        """Of the window: failing = plain decoding would be faster, degraded = a fault, unknown = too few rounds."""
        return self._state(self.recent)

    @property
    def overall(self) -> State:
        """The same over all rounds."""
        return self._state(self.total)

    def _state(self, sums: _Sums) -> State:
        if sums.rounds < self.least:
            return "unknown"
        speed_up = sums.figures()["speed_up"]
        if speed_up is not None and speed_up < FAILING_SPEED_UP:
            return "failing"
        return "degraded" if self._reasons(sums) else "healthy"

    def _reasons(self, sums: _Sums) -> list[str]:
        """One clause for each fault."""
        found = []
        for name, value in sums.figures().items():
            band = self.bands[name]
            side = band.state(value)
            if value is not None and side in band.faults:
                found.append(f"{band.text} {value:.2f} {side} {band.low if side == 'below' else band.high:.2f}")
        if self.memory_limit is not None and (self.memory_peak or 0) > self.memory_limit:
            found.append(f"memory peak {self.memory_peak} bytes above {self.memory_limit}")
        return found

    def _advice(self, sums: _Sums) -> list[str]:
        figures = sums.figures()
        sides = {n: self.bands[n].state(v) for n, v in figures.items()}
        return [
            f"{b.text} {figures[n]:.2f} {sides[n]} {b.high:.2f}: {b.advice}"
            for n, b in self.bands.items()
            if b.advice and sides[n] == "above"
        ]

    def _summary(self, sums: _Sums) -> dict[str, Any]:
        figures = sums.figures()
        return {
            "state": self._state(sums),
            "reasons": self._reasons(sums) if sums.rounds >= self.least else [],
            "advice": self._advice(sums) if sums.rounds >= self.least else [],
            "rounds": sums.rounds,
            "figures": figures,
            "bands": judge(figures, self.bands),
            "fallback_rounds": sums.fallbacks,
        }

    def report(self) -> dict[str, Any]:
        """All of it, for JSON: `total` and `window` (the last rounds), triggers, notes, bytes at most."""
        return {
            "total": self._summary(self.total),
            "window": self._summary(self.recent),
            "triggers": dict(self.triggers),
            "notes": {reason: dict(count) for reason, count in self.notes.items()},
            "memory_peak_bytes": self.memory_peak,
        }

    def scalars(self) -> dict[str, float]:
        """The windowed figures that are known, the state as its index in `STATES`, and the number of triggers."""
        known = {name: value for name, value in self.recent.figures().items() if value is not None}
        numbers = {"state": float(STATES.index(self.state)), "triggers": float(sum(self.triggers.values()))}
        return known | numbers | ({"memory_peak_bytes": float(self.memory_peak)} if self.memory_peak else {})

    def line(self, label: str) -> str:
        """One line for people, over all rounds.

        >>> HealthMonitor().line("assc")
        'assc: unknown, 0 rounds'
        """
        return health_line(label, self.report())


def health_line(label: str, report: Mapping[str, Any]) -> str:
    """The line of a `HealthMonitor.report`."""
    total = report["total"]
    parts = [f"{label}: {total['state']}, {total['rounds']} rounds", *total["reasons"], *total["advice"]]
    if total["fallback_rounds"]:
        parts.append(f"fallback in {total['fallback_rounds']} rounds")
    parts += [f"{reason} ({n['times']} times, {n['rounds']} rounds)" for reason, n in report["notes"].items()]
    if report["memory_peak_bytes"]:
        parts.append(f"memory peak {report['memory_peak_bytes'] / 2**20:.0f} MiB")
    return "; ".join(parts)
