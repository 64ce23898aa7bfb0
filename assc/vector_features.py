"""The featurizer for many requests at once: the same float32 vectors as `assc.observe.Featurizer`, kept up by rounds.

`VectorFeatures` holds the part of the history that the fields read ([N] or [HISTORY, N] arrays) and moves it on after
each round; `tests/test_vector_env.py` compares every number with the single featurizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assc.kinds import is_lookup
from assc.observe import (
    DEFAULT_FIELDS,
    EMA_DECAY,
    EMA_START,
    HISTORY,
    HITS_START,
    MAX_MATCH,
    MAX_POSITION,
    Featurizer,
)
from assc.trace_rules import trace_cost_ratio
from assc.vector_replay import Ints, Played, Rounds

Vectors = NDArray[np.float32]
STALE = ("draft_entropy", "draft_top1", "ngram_match", "match_found", "text", "cost_ratio", "occupancy")
"""fields of a finished request that stay as they were at its last decision point"""


class VectorFeatures:
    """Observations [N, size] of a `Rounds`. Raises `ArtefactError` for fields that it does not know."""

    def __init__(self, rounds: Rounds, fields: Sequence[str] = DEFAULT_FIELDS) -> None:
        self.featurizer = Featurizer(fields)
        self.rounds = rounds
        flat, lanes = rounds.flat, len(rounds.row)
        self.size = self.featurizer.size
        self.k_max = flat.k_max
        header, loads = flat.trace.header, flat.loads
        self.cost_ratio = trace_cost_ratio(header, flat.costs)
        self._cost_ratios = np.array([trace_cost_ratio(header, load.costs) for load in loads])
        self._occupancies = np.array([load.rows / max(other.rows for other in loads) for load in loads])
        longest = int(flat.end.max()) + 1
        self._log_position = np.array([math.log1p(n) / math.log1p(MAX_POSITION) for n in range(longest)])
        self._columns: dict[str, slice] = {}
        at = 0
        for spec in self.featurizer.specs:
            self._columns[spec.name] = slice(at, at + spec.size)
            at += spec.size
        self._draws: dict[str, Callable[[Any], Any]] = {name: getattr(self, f"_{name}") for name in self._columns}
        self.planned = np.full((HISTORY, lanes), -1.0)
        self.ratio = np.full((HISTORY, lanes), -1.0)
        self.rollback = np.full((HISTORY, lanes), -1.0)
        self.ema = np.full(lanes, EMA_START)
        self.streak = np.zeros(lanes, np.int64)
        self.hits = np.full(lanes, HITS_START)
        self._is_model = np.array([not is_lookup(d) for d in flat.drafters])

    def forget(self, lanes: Ints) -> None:
        """New requests begin in these lanes."""
        for history in (self.planned, self.ratio, self.rollback):
            history[:, lanes] = -1.0
        self.ema[lanes] = EMA_START
        self.streak[lanes] = 0
        self.hits[lanes] = HITS_START

    def update(self, drafter: Ints, k: Ints, played: Played) -> None:
        """A round was played with planned K `k` (0: rollback) of the drafter of this number."""
        any_draft = played.drafted > 0
        safe = np.maximum(played.drafted, 1)
        for history in (self.planned, self.ratio, self.rollback):
            history[1:] = history[:-1]
        self.planned[0] = k
        self.ratio[0] = np.where(any_draft, played.accepted / safe, -1.0)
        self.rollback[0] = k == 0
        moved = EMA_DECAY * self.ema + (1 - EMA_DECAY) * played.accepted / safe
        self.ema = np.where(any_draft, moved, self.ema)
        by_model = any_draft & (k > 0) & self._is_model[drafter]
        moved = EMA_DECAY * self.hits + (1 - EMA_DECAY) * (played.accepted > 0)
        self.hits = np.where(by_model, moved, self.hits)
        self.streak = np.where(any_draft & (played.accepted >= played.drafted), self.streak + 1, 0)

    def observe(self, lanes: Any = slice(None), stale: Vectors | None = None) -> Vectors:
        """Vectors of the decision points in `lanes`.

        `stale` are the vectors of the last decision points: with it, what only a decision point would know is taken
        from there (the requests may be finished).
        """
        count = len(self.rounds.row) if isinstance(lanes, slice) else len(lanes)
        vectors = np.empty((count, self.size), np.float32)
        for name, columns in self._columns.items():
            if stale is not None and name in STALE:
                vectors[:, columns] = stale[:, columns]
            else:
                vectors[:, columns] = self._draws[name](lanes)
        np.fmax(vectors, self.featurizer.low, out=vectors)
        np.fmin(vectors, self.featurizer.high, out=vectors)
        return vectors

    def _at(self, lanes: Any) -> Ints:
        """Index into the position columns; a finished text's end counts as its last position."""
        r = self.rounds
        at: Ints = (r.start + np.minimum(r.position, r.end - 1))[lanes]
        return at

    def _remaining_tokens(self, lanes: Any) -> Ints:
        left: Ints = (self.rounds.budget - self.rounds.position)[lanes]
        return left

    def _history_k(self, lanes: Any) -> Any:
        planned = self.planned[:, lanes]
        k_max = np.minimum(self.k_max, np.maximum(self._remaining_tokens(lanes) - 1, 0))
        bound = np.maximum(np.maximum(1, k_max)[None], planned)
        return np.where(planned < 0, -1.0, planned / bound).T

    def _history_accepted(self, lanes: Any) -> Any:
        return self.ratio[:, lanes].T

    def _history_rollback(self, lanes: Any) -> Any:
        return self.rollback[:, lanes].T

    def _acceptance_ema(self, lanes: Any) -> Any:
        return self.ema[lanes, None]

    def _full_streak(self, lanes: Any) -> Any:
        return (np.minimum(self.streak, 8) / 8)[lanes, None]

    def _last(self, values: NDArray[np.float64], lanes: Any) -> Any:
        """`values` at the last committed token, -1 before the first."""
        r = self.rounds
        n = r.position[lanes]
        return np.where(n > 0, values[r.start[lanes] + np.maximum(n - 1, 0)], -1.0)[:, None]

    def _target_entropy(self, lanes: Any) -> Any:
        return self._last(self.rounds.flat.entropy, lanes)

    def _target_top1(self, lanes: Any) -> Any:
        return self._last(self.rounds.flat.top1, lanes)

    def _draft(self, which: int, lanes: Any) -> Any:
        peek = self.rounds.flat.peek
        return -1.0 if not peek else peek[which][self._at(lanes)][:, None]

    def _draft_entropy(self, lanes: Any) -> Any:
        return self._draft(0, lanes)

    def _draft_top1(self, lanes: Any) -> Any:
        return self._draft(1, lanes)

    def _ngram_match(self, lanes: Any) -> Any:
        flat = self.rounds.flat
        return -1.0 if not flat.matches else (np.minimum(flat.match[self._at(lanes)], MAX_MATCH) / MAX_MATCH)[:, None]

    def _match_found(self, lanes: Any) -> Any:
        flat = self.rounds.flat
        return -1.0 if not flat.matches else (flat.match[self._at(lanes)] > 0)[:, None]

    def _text(self, lanes: Any) -> Any:
        rounds = self.rounds
        return rounds.flat.text_numbers(rounds.row[lanes])[self._at(lanes)]

    def _model_hits(self, lanes: Any) -> Any:
        return self.hits[lanes, None]

    def _temperature(self, lanes: Any) -> Any:
        return self.rounds.temperature[lanes, None]

    def _position(self, lanes: Any) -> Any:
        return self._log_position[self.rounds.position[lanes]][:, None]

    def _remaining(self, lanes: Any) -> Any:
        return (np.minimum(self._remaining_tokens(lanes), 16) / 16)[:, None]

    def _cost_ratio(self, lanes: Any) -> Any:
        load = self.rounds.flat.load
        return self.cost_ratio if load is None else self._cost_ratios[load[self._at(lanes)]][:, None]

    def _occupancy(self, lanes: Any) -> Any:
        load = self.rounds.flat.load
        return 1.0 if load is None else self._occupancies[load[self._at(lanes)]][:, None]
