"""The explicit action table: index 0 is rollback, every other index is one (drafter, K)."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from assc.core import ROLLBACK, Action
from assc.errors import RequestError

DEFAULT_K_VALUES: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16)
K_LIMIT = 100
"""largest K_max of the command lines: a trace stores accepted lengths in 8 bits"""


def check_k_max(k_max: int) -> None:
    """`RequestError` unless `--k-max` is within 1 and `K_LIMIT`."""
    if not 1 <= k_max <= K_LIMIT:
        raise RequestError(f"--k-max is {k_max}, allowed is 1 to {K_LIMIT}")


@dataclass(frozen=True)
class ActionTable:
    """Legal actions in a fixed order. `table[0]` is always `ROLLBACK`.

    >>> table = ActionTable.build(["ngram"], [2, 4])
    >>> [str(a) for a in table]
    ['rollback', 'ngram:2', 'ngram:4']
    >>> table.index(table.nearest("ngram", 3))
    1
    """

    actions: tuple[Action, ...]

    def __post_init__(self) -> None:
        if not self.actions or not self.actions[0].rollback:
            raise ValueError("an action table starts with rollback at index 0")
        if len(set(self.actions)) != len(self.actions):
            raise ValueError("an action table lists each action once")

    @classmethod
    def build(cls, drafters: Sequence[str], k_values: Sequence[int] = DEFAULT_K_VALUES) -> ActionTable:
        """Rollback, then each drafter with each K in ascending order."""
        if any(k < 1 for k in k_values):
            raise RequestError(f"K values of an action table are 1 or more (rollback is index 0), got {list(k_values)}")
        return cls((ROLLBACK, *(Action(d, k) for d in drafters for k in sorted(set(k_values)))))

    def __len__(self) -> int:
        return len(self.actions)

    def __iter__(self) -> Iterator[Action]:
        return iter(self.actions)

    def __getitem__(self, index: int) -> Action:
        return self.actions[index]

    @property
    def drafters(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(a.drafter for a in self.actions if a.drafter is not None))

    @property
    def k_max(self) -> int:
        return max(a.k for a in self.actions)

    def k_values(self, drafter: str) -> tuple[int, ...]:
        return tuple(a.k for a in self.actions if a.drafter == drafter)

    def index(self, action: Action) -> int:
        try:
            return self.actions.index(action)
        except ValueError:
            raise RequestError(f"action {action} is not in the table {self.describe()}") from None

    def nearest(self, drafter: str | None, k: int) -> Action:
        """The listed action for `drafter` with the largest K not above `k`; the smallest one if all are above."""
        if k <= 0 or not self.drafters:
            return ROLLBACK
        name = drafter if drafter is not None else self.drafters[0]
        values = self.k_values(name)
        if not values:
            raise RequestError(f"drafter {name!r} is not in the action table {self.describe()}")
        below = [v for v in values if v <= k]
        return Action(name, max(below) if below else min(values))

    def from_index(self, value: Any) -> Action:
        """Action for an index given as int, numpy integer, or an integer array of one element.

        Floats, bools and out-of-range indices raise ValueError.
        """
        if isinstance(value, np.ndarray) and value.size == 1 and np.issubdtype(value.dtype, np.integer):
            value = value.reshape(())[()]
        if isinstance(value, bool | np.bool_):
            raise ValueError("an action index is an integer, got a bool")
        try:
            index = operator.index(value)
        except TypeError:
            raise ValueError(f"an action index is one integer, got {value!r}") from None
        if not 0 <= index < len(self.actions):
            raise ValueError(f"action index {index} is outside 0..{len(self.actions) - 1}")
        return self.actions[index]

    def describe(self) -> str:
        parts = ["rollback"]
        parts += [f"{d} K in {list(self.k_values(d))}" for d in self.drafters]
        return "[" + "; ".join(parts) + "]"

    def to_json(self) -> list[dict[str, Any]]:
        return [{"drafter": a.drafter, "k": a.k} for a in self.actions]

    @classmethod
    def from_json(cls, rows: Sequence[dict[str, Any]]) -> ActionTable:
        return cls(tuple(Action(r["drafter"], int(r["k"])) for r in rows))
