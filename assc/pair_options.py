"""Which pair, where and how precisely: the options that command lines share, and the loading of what they name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from assc.pairs import LoadedPair


class PairChoice(Protocol):
    """Options of a command line that name a pair (`assc.pairs.load_pair`)."""

    @property
    def pair(self) -> str: ...
    @property
    def target(self) -> str | None: ...
    @property
    def draft(self) -> Sequence[str]: ...
    @property
    def device(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def threads(self) -> int | None: ...


@dataclass(frozen=True, kw_only=True)
class PairOptions:
    """The options themselves, for the dataclass of a command line to inherit."""

    pair: str = "smollm2"
    """model pair; `python -m assc doctor` lists them"""
    target: str | None = None
    """target model instead of the pair's: directory, .gguf file or hub id"""
    draft: tuple[str, ...] = ()
    """drafts to add: directory or hub id of a model, or the folder of a learned draft; NAME=SOURCE names the drafter"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, ..."""
    dtype: str = "auto"
    """auto, bfloat16, float16, float32 or float64"""
    threads: int | None = None
    """torch threads; default: torch's own choice"""


def load_chosen(choice: PairChoice) -> LoadedPair:
    """The pair that the options name; errors are those of `load_pair`.

    Torch and transformers are imported here, since they take seconds: a typing mistake should be told before.
    """
    from assc.pairs import load_pair

    return load_pair(
        choice.pair,
        target=choice.target,
        draft=choice.draft,
        device=choice.device,
        dtype=choice.dtype,
        threads=choice.threads,
    )
