"""Streams over a recorded trace whose regime switches: other categories, temperatures, costs, or a spoiled draft.

A `Regime` is a set of requests with the trace and the costs they are played from; a `Scenario` says which regime holds
in which segment of the stream. All segments have the same number of tokens, so every policy decodes the same text in
each of them, however many rounds it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from assc.costs import CostModel
from assc.errors import TraceError
from assc.loads import scaled
from assc.oracle import static_table
from assc.trace import CONFIDENCE, Trace
from assc.trace_rules import replay_table
from assc.vector_replay import FlatTrace, Floats


@dataclass(frozen=True)
class Regime:
    """Requests (`rows` of `trace`) under one kind of circumstances."""

    name: str
    rows: tuple[int, ...]
    trace: Trace
    costs: CostModel
    occupancy: float = 1.0
    """share of the batch that decodes, as policies see it"""


@dataclass(frozen=True)
class Scenario:
    """`order` is the number of the regime in each segment of the stream."""

    name: str
    regimes: tuple[Regime, ...]
    order: tuple[int, ...]


@dataclass(frozen=True)
class Choice:
    """What the builders of scenarios start from."""

    trace: Trace
    costs: CostModel
    split: str | None = "held-out"
    segments: int = 4
    categories: tuple[str, ...] = ()
    """of the scenario `categories`; none: the two of which each is served worst by the other's best static action"""
    rows: int = 32
    """of the busy batch in the scenario `load`"""

    def where(self, *, categories: Sequence[str] = (), temperatures: Sequence[float] = ()) -> tuple[int, ...]:
        return tuple(self.trace.where(split=self.split, categories=categories, temperatures=temperatures))

    def alternating(self, name: str, regimes: Sequence[Regime]) -> Scenario:
        """The regimes in turn, over all segments."""
        return Scenario(name, tuple(regimes), tuple(i % len(regimes) for i in range(self.segments)))


def stationary(choice: Choice) -> Scenario:
    """All requests, shuffled, again and again: one regime, one segment."""
    return Scenario("stationary", (Regime("all requests", choice.where(), choice.trace, choice.costs),), (0,))


def categories(choice: Choice) -> Scenario:
    """Blocks of requests of one category each, at all temperatures of the trace."""
    known = sorted(set(choice.trace.columns["category"].tolist()))
    for name in choice.categories:
        if name not in known:
            raise TraceError(f"{choice.trace.name} has no category {name!r}, only {', '.join(map(repr, known))}")
    names = choice.categories or _most_different(choice, known)
    if len(names) < 2:
        raise TraceError("the scenario 'categories' needs requests of two categories at least")
    regimes = [Regime(n, choice.where(categories=[n]), choice.trace, choice.costs) for n in names]
    return choice.alternating("categories", regimes)


def _most_different(choice: Choice, names: Sequence[str]) -> tuple[str, ...]:
    """The two categories that lose most, relative to their own best static action, under that of the other."""
    flat, table = FlatTrace(choice.trace, choice.costs), replay_table(choice.trace.header)
    c = choice.trace.columns
    fit = np.ones(len(choice.trace), bool) if choice.split is None else c["split"] == choice.split
    rows = {n: np.flatnonzero(fit & (c["category"] == n)) for n in names}
    totals: dict[str, Floats] = {n: static_table(flat, r.tolist(), table).sum(0) for n, r in rows.items() if len(r)}
    lost = {
        (a, b): float(totals[a][totals[b].argmin()] / totals[a].min() * totals[b][totals[a].argmin()] / totals[b].min())
        for a in totals
        for b in totals
        if a < b
    }
    if not lost:
        return tuple(totals)
    first, second = max(lost, key=lost.__getitem__)
    return first, second


def temperature(choice: Choice) -> Scenario:
    """The lowest and the highest temperature of the trace in turn: 0 and 1 in the packaged one."""
    known = sorted(set(choice.trace.columns["temperature"].tolist()))
    if len(known) < 2:
        raise TraceError(f"{choice.trace.name} was recorded at one temperature, the scenario 'temperature' needs two")
    regimes = [
        Regime(f"temperature {t:g}", choice.where(temperatures=[t]), choice.trace, choice.costs)
        for t in (known[0], known[-1])
    ]
    return choice.alternating("temperature", regimes)


def load(choice: Choice) -> Scenario:
    """One row alone, and a batch of `rows` in which each verified token costs more (`assc.loads.scaled`)."""
    busy = scaled(choice.costs, choice.rows)
    regimes = [
        Regime("1 row", choice.where(), choice.trace, choice.costs, 1.0 / choice.rows),
        Regime(f"{choice.rows} rows", choice.where(), choice.trace, busy.costs),
    ]
    return choice.alternating("load", regimes)


def bad_draft(choice: Choice) -> Scenario:
    """Requests at the highest temperature; the drafter of their best static action is spoiled (`spoiled`)."""
    hottest = max(choice.trace.columns["temperature"].tolist())
    rows = choice.where(temperatures=[hottest])
    table = replay_table(choice.trace.header)
    best = static_table(FlatTrace(choice.trace, choice.costs), rows, table).sum(0)
    drafter = next(a.drafter for a in (table[int(i)] for i in best.argsort()) if a.drafter is not None)
    bad = spoiled(choice.trace, drafter)
    regimes = [
        Regime(f"{drafter} as recorded", rows, choice.trace, choice.costs),
        Regime(f"{drafter} spoiled", rows, bad, choice.costs),
    ]
    return choice.alternating("bad-draft", regimes)


def spoiled(trace: Trace, drafter: str) -> Trace:
    """The trace as if this drafter proposed garbage, at the same cost and as sure of itself as before.

    It proposes as many tokens as before (`avail`), of which none is accepted: a token drawn blindly from a vocabulary
    of tens of thousands is right so rarely that zero is what would be recorded. Its confidences are those of other
    positions (a fixed permutation of the column), so that their distribution is unchanged and they tell nothing.
    """
    columns = dict(trace.columns)
    columns[f"acc/{drafter}"] = np.zeros_like(columns[f"acc/{drafter}"])
    shuffled = np.random.default_rng(0xBAD).permutation(trace.positions)
    for name in CONFIDENCE:
        if f"{name}/{drafter}" in columns:
            columns[f"{name}/{drafter}"] = columns[f"{name}/{drafter}"][shuffled]
    return Trace(trace.header, columns, f"{trace.name} with {drafter} spoiled")


SCENARIOS: dict[str, Callable[[Choice], Scenario]] = {
    "stationary": stationary,
    "categories": categories,
    "temperature": temperature,
    "load": load,
    "bad-draft": bad_draft,
}
"""name -> builder"""
