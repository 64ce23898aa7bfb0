"""What most policies share."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, ClassVar

from assc.actions import ActionTable
from assc.core import ROLLBACK, Action, Observation, RoundRecord
from assc.errors import ArtefactError


class BasePolicy:
    """Base of the controllers: one file each, registered with `@register("name")`.

    A subclass keeps its memory in plain attributes and lists them:

    - `per_request`: names of the attributes that a new request resets to their value after construction;
    - `learned`: names of the attributes that survive requests and are saved by `state_dict`.

    `uses` says what the rule reads: H acceptance history, C draft confidence, E target entropy, L load, N n-gram match.
    """

    spec: str = ""
    needs: frozenset[str] = frozenset()
    uses: ClassVar[str] = ""
    main_parameter: ClassVar[str | None] = None
    example: ClassVar[str] = ""
    per_request: ClassVar[tuple[str, ...]] = ()
    learned: ClassVar[tuple[str, ...]] = ()
    privileged: ClassVar[bool] = False
    """True for hindsight policies, which are shown apart"""

    reasons: tuple[str, ...] = ()
    table: ActionTable
    drafter: str | None
    _initial: dict[str, Any]

    def begin(self, table: ActionTable) -> None:
        self.table = table
        if not hasattr(self, "_initial"):
            self._initial = self._snapshot((*self.per_request, *self.learned))
        for name in self.per_request:
            setattr(self, name, copy.deepcopy(self._initial[name]))

    def reset(self) -> None:
        if hasattr(self, "_initial"):
            for name in (*self.per_request, *self.learned):
                setattr(self, name, copy.deepcopy(self._initial[name]))

    def act(self, observation: Observation) -> Action:
        raise NotImplementedError

    def update(self, record: RoundRecord) -> None:
        """Learn from a finished round; the default learns nothing."""

    def state_dict(self) -> dict[str, Any]:
        return self._snapshot(self.learned)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if set(state) != set(self.learned):
            raise ArtefactError(f"policy {self.spec!r} expects the state {sorted(self.learned)}, got {sorted(state)}")
        if not hasattr(self, "_initial"):
            self._initial = self._snapshot((*self.per_request, *self.learned))
        for name, value in state.items():
            setattr(self, name, copy.deepcopy(value))

    def _snapshot(self, names: tuple[str, ...]) -> dict[str, Any]:
        return {name: copy.deepcopy(getattr(self, name)) for name in names}

    def draft(self, k: int, observation: Observation, drafter: str | None = None) -> Action:
        """Draft `k` tokens, cut to what can be played now; rollback if that is nothing.

        Without a name the table's first drafter is used.
        """
        k = min(k, observation.k_max)
        names = self.table.drafters
        if k < 1 or not names:
            return ROLLBACK
        return Action(drafter if drafter is not None else names[0], k)
