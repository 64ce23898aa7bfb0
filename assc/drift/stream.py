"""Play policies over the stream of a scenario, beside the clock of each regime's best static action."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assc.core import Action, Policy
from assc.drift.scenarios import Regime, Scenario
from assc.oracle import optimum, static_table
from assc.replay import ReplayBackend
from assc.run import iter_rounds
from assc.vector_replay import FlatTrace, Floats, Ints

Stop = tuple[int, int]
"""(segment, row of the segment's regime)"""


class Reference:
    """What a regime allows: its best static action with a clock along every text, and the optimum.

    The best static action is the one with the fewest seconds over all requests of the regime, rollback included.
    """

    def __init__(self, regime: Regime) -> None:
        self.regime = regime
        self.backend = ReplayBackend(regime.trace, regime.costs)
        self.backend.use_costs(regime.costs, regime.occupancy)
        table, flat = self.backend.table, FlatTrace(regime.trace, regime.costs)
        totals = static_table(flat, regime.rows, table).sum(0)
        self.best: Action = table[int(totals.argmin())]
        self.plain_seconds, self.best_seconds = float(totals[0]), float(totals.min())
        self.optimal = dict(zip(regime.rows, optimum(flat, regime.rows).seconds.tolist(), strict=True))
        """row -> least seconds"""
        self.requests = dict(zip(regime.rows, regime.trace.requests(regime.rows), strict=True))
        self._clocks: dict[int, Floats] = {}

    @property
    def optimal_seconds(self) -> float:
        return float(sum(self.optimal.values()))

    def clock(self, row: int) -> Floats:
        """Seconds after which the best static action has emitted 0, 1, 2 … tokens, [tokens + 1].

        Within a round of several tokens time passes evenly.
        """
        if row not in self._clocks:
            backend, tokens, seconds = self.backend, [0], [0.0]
            backend.reset(self.requests[row])
            while not backend.done:
                record = backend.step(self.best.clipped(backend.observe().k_max))
                tokens.append(tokens[-1] + record.emitted)
                seconds.append(seconds[-1] + record.seconds)
            self._clocks[row] = np.interp(np.arange(tokens[-1] + 1), tokens, seconds)
        return self._clocks[row]


def draw_stream(scenario: Scenario, tokens: int, seed: int) -> list[Stop]:
    """Requests of each segment in random order, all before any is repeated, until it has `tokens` tokens."""
    rng = np.random.default_rng([seed, 0xD81F7])
    stops: list[Stop] = []
    for segment, number in enumerate(scenario.order):
        regime = scenario.regimes[number]
        lengths = np.diff(regime.trace.columns["offsets"])
        left = tokens
        waiting: list[int] = []
        while left > 0:
            if not waiting:
                waiting = rng.permutation(regime.rows).tolist()
            row = waiting.pop()
            stops.append((segment, row))
            left -= int(lengths[row])
    return stops


@dataclass(frozen=True)
class Played:
    """The rounds of one policy over one stream; arrays [n] with one entry per round."""

    segment: Ints
    tokens: Ints
    seconds: Floats
    reference: Floats
    """seconds of the regime's best static action over the same tokens"""
    optimal: Floats
    """least seconds of the request, in its last round; 0 elsewhere"""
    k: Ints
    """planned"""
    last: NDArray[np.bool_]
    """the round ends a request"""


def rounds(
    policy: Policy, references: Sequence[Reference], order: Sequence[int], stops: Sequence[Stop]
) -> Iterator[Any]:
    """Play the stops; yields the columns of `Played` round by round."""
    for segment, row in stops:
        reference = references[order[segment]]
        backend, clock = reference.backend, reference.clock(row)
        position = 0
        for record in iter_rounds(backend, reference.requests[row], policy):
            after = position + record.emitted
            spent = clock[after] - clock[position]
            optimal = reference.optimal[row] if backend.done else 0.0
            yield segment, record.emitted, record.seconds, spent, optimal, record.planned, backend.done
            position = after


def play(policy: Policy, references: Sequence[Reference], order: Sequence[int], stops: Sequence[Stop]) -> Played:
    """All rounds of a policy over a stream; the policy goes on learning from where it is."""
    columns = list(zip(*rounds(policy, references, order, stops), strict=True))
    kinds = (np.int64, np.int64, np.float64, np.float64, np.float64, np.int64, np.bool_)
    return Played(*(np.array(column, kind) for column, kind in zip(columns, kinds, strict=True)))
