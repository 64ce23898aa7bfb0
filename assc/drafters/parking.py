"""Where the weights of a draft wait while nobody drafts with it.

Weights on an accelerator wait in the host's memory. On a CPU, where that would save nothing, they wait in an unnamed
file in the cache folder, which the system deletes with the process. They are copied once: weights never change here.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import IO

import numpy as np
import torch
from torch import Tensor

from assc.convert import cache_dir
from assc.errors import AsscError


def storages(tensors: Iterable[Tensor]) -> set[int]:
    """Addresses of the memory behind tensors: equal ones are shared."""
    return {t.untyped_storage().data_ptr() for t in tensors if t.numel()}


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of distinct tensors."""
    return sum({id(t): t.numel() * t.element_size() for t in tensors}.values())


@dataclass
class _Parked:
    tensor: Tensor
    shape: torch.Size
    host: Tensor | None
    """the copy in the host's memory, None where it lies in the file"""
    offset: int = 0
    size: int = 0


class Parking:
    """Takes weights off their device and brings them back, in place: whoever holds the tensors holds them still."""

    def __init__(self) -> None:
        self._parked: list[_Parked] = []
        self._file: IO[bytes] | None = None
        self.away = False
        self.bytes = 0
        """of the weights that this has taken"""

    def park(self, tensors: Iterable[Tensor], keep: Collection[int] = ()) -> None:
        """Free `tensors`, except those whose memory is among the addresses `keep`."""
        with torch.inference_mode(False):
            if not self._parked:
                for tensor in {id(t): t for t in tensors}.values():
                    if tensor.numel() and tensor.untyped_storage().data_ptr() not in keep:
                        self._parked.append(self._copy(tensor))
                self.bytes = sum(p.size for p in self._parked)
            for parked in self._parked:
                parked.tensor.data = torch.empty(0, dtype=parked.tensor.dtype, device=parked.tensor.device)
        self.away = True

    def _copy(self, tensor: Tensor) -> _Parked:
        plain, size = tensor.detach(), tensor.numel() * tensor.element_size()
        if tensor.device.type != "cpu":
            return _Parked(tensor, tensor.shape, plain.to("cpu"), size=size)
        try:
            if self._file is None:
                cache_dir().mkdir(parents=True, exist_ok=True)
                self._file = tempfile.TemporaryFile(dir=cache_dir())
            offset = self._file.seek(0, 2)
            self._file.write(plain.contiguous().flatten().view(torch.uint8).numpy().data)
            self._file.flush()
        except OSError as error:
            raise AsscError(f"a draft cannot be unloaded into {cache_dir()}: {error.strerror}") from None
        return _Parked(tensor, tensor.shape, None, offset, size)

    def restore(self) -> None:
        """Bring everything back, bit by bit what it was."""
        with torch.inference_mode(False):
            for parked in self._parked:
                parked.tensor.data = self._read(parked)
        self.away = False

    def _read(self, parked: _Parked) -> Tensor:
        tensor = parked.tensor
        if parked.host is not None:
            return parked.host.to(tensor.device)
        assert self._file is not None
        self._file.seek(parked.offset)
        raw = np.fromfile(self._file, np.uint8, parked.size)
        return torch.from_numpy(raw).view(tensor.dtype).reshape(parked.shape)
