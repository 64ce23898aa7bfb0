"""What most policies share."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, ClassVar

from assc.actions import ActionTable
from assc.core import ROLLBACK, Action, Observation, RoundRecord
from assc.errors import ArtefactError, SpecError
from assc.leakage import TrainedOn


def check_playable(needed: ActionTable, table: ActionTable, owner: str) -> None:
    """`ArtefactError` when a decoder with `table` cannot play every action of `needed`.

    A K that the table does not list is fine as long as it is within the limit of its drafter.
    """
    limits = {d: max(table.k_values(d)) for d in table.drafters}
    if any(a.drafter is not None and a.k > limits.get(a.drafter, 0) for a in needed):
        raise ArtefactError(
            f"the saved policy {owner!r} plays {needed.describe()}, but this decoder plays {table.describe()}"
        )


@lru_cache(maxsize=1024)
def drafting(drafter: str, k: int) -> Action:
    """The action, made once: making one takes a good part of a rule's decision."""
    return Action(drafter, k)


def check_value(value: Any, like: Any, owner: str) -> None:
    """`ArtefactError` unless a saved value has the type of the one it replaces and holds finite numbers only."""
    numbers = isinstance(value, int | float) and isinstance(like, int | float)
    if not numbers and not isinstance(value, type(like)):
        raise ArtefactError(f"the saved {owner} is a {type(value).__name__}, expected is a {type(like).__name__}")
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, float) and not math.isfinite(item):
            raise ArtefactError(f"the saved {owner} holds a number that is not finite")
        if isinstance(item, dict | list):
            stack.extend(item.values() if isinstance(item, dict) else item)


class BasePolicy:
    """Base of the controllers: one file each, registered with `@register("name")`.

    A subclass keeps its memory in plain attributes and lists them:

    - `per_request`: names of the attributes that a new request resets to their value after construction;
    - `learned`: names of the attributes that survive requests and are saved by `state_dict` (plain JSON values).

    A constructor refuses bad values with `ValueError`, which `make_policy` turns into a `SpecError`.

    `uses` says what the rule reads: H acceptance history, C draft confidence, E target entropy, L load, N n-gram match.
    """

    spec: str = ""
    needs: frozenset[str] = frozenset()
    uses: ClassVar[str] = ""
    main_parameter: ClassVar[str | None] = None
    example: ClassVar[str] = ""
    per_request: ClassVar[tuple[str, ...]] = ()
    learned: ClassVar[tuple[str, ...]] = ()
    checks: ClassVar[Mapping[str, Callable[[Any], bool]]] = {}
    """name in `learned` -> whether a saved value of it is sound; types and finite numbers are checked anyway"""
    learner: ClassVar[bool] = False
    """True for a policy that fits to rounds, online or beforehand, what an action is worth"""
    privileged: ClassVar[bool] = False
    """True for hindsight policies, which are shown apart"""

    reasons: tuple[str, ...] = ()
    table: ActionTable
    drafter: str | None = None
    """the drafter to use; None: the table's first"""
    saved_table: ActionTable | None = None
    """actions of the artefact this policy was loaded from"""
    trained_on: TrainedOn | None = None
    """prompts it has learned from, as its artefact says; None: from none, or nobody knows"""
    trained_mode: str | None = None
    """mode in which it learned"""
    trained_c: float | None = None
    """cost ratio at which it learned"""
    _initial: dict[str, Any]
    _first: str | None

    def begin(self, table: ActionTable) -> None:
        if self.drafter is not None and self.drafter not in table.drafters:
            raise SpecError(f"policy {self.spec!r} names the drafter {self.drafter!r}, known here: {table.describe()}")
        if self.saved_table is not None:
            check_playable(self.saved_table, table, self.spec)
        self.table = table
        self._first = next(iter(table.drafters), None)
        if not hasattr(self, "_initial"):
            self.mark_initial()
        for name in self.per_request:
            setattr(self, name, copy.deepcopy(self._initial[name]))

    def reset(self) -> None:
        if hasattr(self, "_initial"):
            for name in (*self.per_request, *self.learned):
                setattr(self, name, copy.deepcopy(self._initial[name]))

    def mark_initial(self) -> None:
        """Make the present memory the one that `reset` returns to (a loaded artefact does this)."""
        self._initial = self._snapshot((*self.per_request, *self.learned))

    def act(self, observation: Observation) -> Action:
        raise NotImplementedError

    def update(self, record: RoundRecord) -> None:
        """Learn from a finished round; the default learns nothing."""

    def accept_chances(self, action: Action) -> tuple[float, ...]:
        """Chances that draft positions 1 … K of the action just chosen are accepted, each given those before it.

        Recorded and judged afterwards (`assc.reliability`); the default predicts none.
        """
        return ()

    def state_dict(self) -> dict[str, Any]:
        return self._snapshot(self.learned)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if set(state) != set(self.learned):
            raise ArtefactError(f"policy {self.spec!r} expects the state {sorted(self.learned)}, got {sorted(state)}")
        for name, value in state.items():
            check_value(value, getattr(self, name), f"{name} of policy {self.spec!r}")
            if name in self.checks and not self.checks[name](value):
                raise ArtefactError(f"the saved {name} of policy {self.spec!r} are damaged")
        if not hasattr(self, "_initial"):
            self.mark_initial()
        for name, value in state.items():
            setattr(self, name, copy.deepcopy(value))

    def _snapshot(self, names: tuple[str, ...]) -> dict[str, Any]:
        return {name: copy.deepcopy(getattr(self, name)) for name in names}

    def limit(self, table: ActionTable) -> int:
        """Largest K that `table` allows the drafter of this policy, 0 when there is no drafter."""
        name = self.drafter if self.drafter is not None else next(iter(table.drafters), None)
        return 0 if name is None else max(table.k_values(name))

    def draft(self, k: int, observation: Observation, drafter: str | None = None) -> Action:
        """Draft `k` tokens, cut to what can be played now; rollback if that is nothing.

        Without a name this policy's `drafter` is used, else the table's first.
        """
        k = min(k, observation.k_max)
        name = drafter or self.drafter or self._first
        if k < 1 or name is None:
            return ROLLBACK
        return drafting(name, k)
