"""What a drafter holds, as numbers (no torch here)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DrafterMemory:
    """Bytes of one drafter. Weights shared with the target or with another drafter belong to nobody here."""

    name: str
    parameters: int
    """of its weights, wherever they are"""
    buffers: int
    """keys, values, masks: of the batch at hand"""
    loaded: bool = True
    """whether the weights are on the device; if not, they wait elsewhere and the buffers are free"""

    @property
    def held(self) -> int:
        """bytes on the device now"""
        return self.buffers + (self.parameters if self.loaded else 0)

    def __str__(self) -> str:
        where = "" if self.loaded else " (unloaded)"
        return f"{self.name} {_size(self.parameters)} parameters{where} + {_size(self.buffers)} buffers"


def _size(count: float) -> str:
    return f"{count / 2**20:.1f} MiB"
