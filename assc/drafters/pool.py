"""The drafters of an engine: which of them are loaded, who was left idle, and what they hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from assc.drafters.base import Drafter
from assc.drafters.memory import DrafterMemory
from assc.drafters.parking import storages
from assc.errors import RequestError

if TYPE_CHECKING:
    from assc.kv import ModelRunner


class DrafterPool:
    """Named drafters beside one target. One that was not asked for `unload_after` rounds is unloaded (None: never)."""

    def __init__(self, drafters: Sequence[Drafter], target: ModelRunner, unload_after: int | None = None) -> None:
        if len({d.name for d in drafters}) != len(drafters):
            raise RequestError(f"two drafters share a name: {[d.name for d in drafters]}")
        if unload_after is not None and unload_after < 1:
            raise RequestError(f"drafts are unloaded after {unload_after} rounds without use, allowed is 1 or more")
        self.drafters: dict[str, Drafter] = {d.name: d for d in drafters}
        self.unload_after = unload_after
        self._target = target
        self._idle = dict.fromkeys(self.drafters, 0)
        """rounds since a drafter was asked; -1: it was, in the round under way"""
        self._loads: list[str] = []

    def awake(self, name: str) -> Drafter:
        """The drafter, about to be asked: brought back if it was unloaded."""
        drafter = self.drafters[name]
        self._idle[name] = -1
        if not drafter.loaded:
            drafter.load()
            self._loads.append(name)
        return drafter

    def round_over(self) -> None:
        """Count who was not asked in this round, and unload those for whom it was one too many."""
        for name in self._idle:
            self._idle[name] += 1
            if self._idle[name] == self.unload_after:
                self.unload(name)

    def unload(self, name: str) -> None:
        """Unload one drafter now; what it shares with the target or with other drafters stays."""
        model = getattr(self._target, "model", None)
        kept = storages(t for d in self.drafters.values() if d.name != name for t in d.weights())
        if model is not None:
            kept |= storages((*model.parameters(), *model.buffers()))
        self.drafters[name].unload(kept)

    def load_all(self) -> None:
        """Bring every unloaded draft back, for whoever uses the models besides the engine."""
        for drafter in self.drafters.values():
            drafter.load()

    def take_loads(self) -> tuple[str, ...]:
        """Drafters that were brought back since the last call."""
        loads, self._loads = tuple(self._loads), []
        return loads

    def memory(self) -> tuple[DrafterMemory, ...]:
        """Bytes of each drafter, as things are now."""
        return tuple(drafter.memory() for drafter in self.drafters.values())
