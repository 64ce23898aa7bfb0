"""From logits to the distribution that a request asks for, and the noise that samples from it.

All randomness of a request comes from `Noise`, a counter-based generator keyed by (request seed, stream, position):
no global random state is read or written, draws do not depend on the device or on the order of the calls.
"""

from __future__ import annotations

import copy
import math
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as lp

from assc.core import MODES, Mode
from assc.errors import RequestError

GREEDY_BELOW = 1e-5
"""temperatures under this are greedy: dividing by them would overflow"""

LogitsProcessor = Callable[[Tensor, Tensor], Tensor]
"""transformers' contract: (input_ids [1, L], scores [1, V]) -> scores [1, V]"""


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen. Meanings and defaults are those of transformers' `GenerationConfig`.

    `mode` "greedy" goes with temperature 0; "rejection" and "gumbel" sample at `temperature` (0 makes them greedy).
    `processors` are custom logits processors; they run before the warpers, on every position with its own prefix.
    """

    mode: Mode = "greedy"
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    min_new_tokens: int = 0
    logit_bias: dict[int, float] = field(default_factory=dict)
    prefix_allowed_tokens_fn: Callable[[int, Tensor], list[int]] | None = None
    processors: Sequence[LogitsProcessor] = ()

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise RequestError(f"unknown mode {self.mode!r}; modes are {', '.join(MODES)}")
        for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "no_repeat_ngram_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
                raise RequestError(f"{name} is {value!r}, allowed is a finite number")
        limits: list[tuple[str, bool, str]] = [
            ("temperature", self.temperature >= 0, "0 or more"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("top_p", 0 <= self.top_p <= 1, "within 0..1"),
            ("min_p", 0 <= self.min_p <= 1, "within 0..1"),
            ("repetition_penalty", self.repetition_penalty > 0, "above 0"),
            ("no_repeat_ngram_size", self.no_repeat_ngram_size >= 0, "0 (off) or more"),
            ("min_new_tokens", self.min_new_tokens >= 0, "0 or more"),
        ]
        for name, good, allowed in limits:
            if not good:
                raise RequestError(f"{name} is {getattr(self, name)}, allowed is {allowed}")
        if self.mode == "greedy" and self.temperature > 0:
            raise RequestError(
                f"mode greedy takes temperature 0, got {self.temperature}; sample with mode gumbel or rejection"
            )

    @property
    def greedy(self) -> bool:
        return self.mode == "greedy" or self.temperature < GREEDY_BELOW


# Warpers that look at the scores alone: they can be applied to all positions of a block in one call.
_PREFIX_FREE = (
    lp.TemperatureLogitsWarper,
    lp.TopKLogitsWarper,
    lp.TopPLogitsWarper,
    lp.MinPLogitsWarper,
)


class LogitsChain:
    """transformers' processors and warpers in transformers' order: processors, custom ones, warpers.

    `prefix_free` says that no member reads the prefix. Custom processors that keep state see each committed prefix
    once and in order, because verification stops calling them at the first rejection. The draft works on a deep
    copy of them (`for_draft`); a processor that cannot be copied, or has a true attribute `stateful`, is left out of
    the draft, which costs acceptance and never changes the output.
    """

    def __init__(self, members: Sequence[LogitsProcessor]) -> None:
        self.members = tuple(members)
        self.prefix_free = all(isinstance(m, _PREFIX_FREE) for m in self.members)

    @classmethod
    def build(
        cls, params: SamplingParams, *, prompt_length: int, eos_ids: Sequence[int], device: torch.device | str = "cpu"
    ) -> LogitsChain:
        """The chain of one request."""
        chain: list[Any] = []
        if params.logit_bias:
            # as a list of lists, transformers 5.17 refuses token 0
            bias: Any = {(int(t),): float(b) for t, b in params.logit_bias.items()}
            chain.append(lp.SequenceBiasLogitsProcessor(bias))
        if params.repetition_penalty != 1.0:
            chain.append(lp.RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty)))
        if params.no_repeat_ngram_size:
            chain.append(lp.NoRepeatNGramLogitsProcessor(params.no_repeat_ngram_size))
        if params.min_new_tokens and eos_ids:
            chain.append(
                lp.MinNewTokensLengthLogitsProcessor(
                    prompt_length, params.min_new_tokens, list(eos_ids), device=str(device)
                )
            )
        if params.prefix_allowed_tokens_fn is not None:
            chain.append(lp.PrefixConstrainedLogitsProcessor(params.prefix_allowed_tokens_fn, 1))
        chain.extend(params.processors)
        if not params.greedy:
            if params.temperature != 1.0:
                chain.append(lp.TemperatureLogitsWarper(float(params.temperature)))
            if params.top_k:
                chain.append(lp.TopKLogitsWarper(params.top_k))
            if params.top_p < 1.0:
                chain.append(lp.TopPLogitsWarper(max(params.top_p, 0.0)))
            if params.min_p > 0.0:
                chain.append(lp.MinPLogitsWarper(params.min_p))
        return cls(chain)

    def for_draft(self) -> LogitsChain:
        """A copy whose state the draft may spoil without harm to the output."""
        copies = [_copied(m) for m in self.members if not getattr(m, "stateful", False)]
        return LogitsChain([m for m in copies if m is not None])

    def __call__(self, prefix: Tensor, scores: Tensor) -> Tensor:
        """Scores [1, V] (float32 or wider) for the position after `prefix` [1, L]; the input may be overwritten."""
        for member in self.members:
            scores = member(prefix, scores)
        return scores

    def block(self, scores: Tensor) -> Tensor:
        """All rows of `scores` [Q, V] at once; only for a prefix-free chain."""
        for member in self.members:
            scores = member(None, scores)  # type: ignore[arg-type]
        return scores


def _copied(member: LogitsProcessor) -> LogitsProcessor | None:
    """A deep copy; None for an object that has none, such as a compiled grammar matcher."""
    try:
        return copy.deepcopy(member)
    except Exception:  # copying calls foreign code, which raises what it likes
        return None


def widen(logits: Tensor) -> Tensor:
    """A float32 copy of half-precision logits; float64 stays. Always a copy, so chains may write into it."""
    return logits.clone() if logits.dtype in (torch.float32, torch.float64) else logits.float()


_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _mix(value: int) -> int:
    """The splitmix64 finaliser (Steele, Lea and Flood 2014) on a Python int."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


def to_gumbel(uniform: Tensor) -> Tensor:
    """Standard Gumbel noise from numbers in (0, 1), in place."""
    return uniform.log_().neg_().log_().neg_()


STREAMS = {"target": 1, "draft": 2, "accept": 3, "residual": 4}


class Noise:
    """Counter-based random numbers of one request, the same on every device.

    A number is splitmix64(id · golden + key) with key = mix(seed, stream, position, salt): independent of what was
    drawn before. Uniform numbers keep 52 bits and are strictly inside (0, 1).
    """

    def __init__(self, seed: int, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.seed = int(seed)  # a numpy integer would overflow below
        self._ids = torch.arange(vocab_size, device=device) * _signed(_GOLDEN)
        self._cached: dict[int, Tensor] = {}

    def of(self, token_ids: Tensor) -> Noise:
        """The same noise for some of the tokens: entry i is the whole noise's entry `token_ids[i]`."""
        part = copy.copy(self)
        part._ids, part._cached = self._ids[token_ids], {}
        return part

    def key(self, stream: str, position: int, salt: int = 0) -> int:
        value = _mix(self.seed + _GOLDEN)
        for part in (STREAMS[stream], position, salt):
            value = _mix(value + (part + 1) * _GOLDEN)
        return value

    def scalar(self, stream: str, position: int, salt: int = 0) -> float:
        """One number in (0, 1), made without touching the device; equal to `uniform(...)[0]`."""
        return ((_mix(self.key(stream, position, salt)) >> 12) + 0.5) * 2.0**-52

    def uniform(self, keys: int | Tensor) -> Tensor:
        """float64 [V] in (0, 1) for one key, or [N, V] for a tensor of keys [N, 1]."""
        x = self._ids + (_signed(keys) if isinstance(keys, int) else keys)
        shifted = torch.empty_like(x)
        # int64 shifts are arithmetic: the mask makes them logical
        for shift, multiplier in ((30, _MIX_1), (27, _MIX_2), (31, None)):
            torch.bitwise_right_shift(x, shift, out=shifted).bitwise_and_((1 << (64 - shift)) - 1)
            x.bitwise_xor_(shifted)
            if multiplier is not None:
                x.mul_(_signed(multiplier))
        # 52 bits and a half: the largest value is still below 1, so the logarithms stay finite
        x.bitwise_right_shift_(12).bitwise_and_((1 << 52) - 1)
        return x.to(torch.float64).add_(0.5).mul_(2.0**-52)

    def gumbel(self, stream: str, position: int, salt: int = 0) -> Tensor:
        """Standard Gumbel noise, float64 [V]. The "target" stream is shared with the draft and kept while in use."""
        shared = stream == "target" and salt == 0
        if shared and position in self._cached:
            return self._cached[position]
        noise = to_gumbel(self.uniform(self.key(stream, position, salt)))
        if shared:
            self._cached[position] = noise
        return noise

    def keys(self, stream: str, positions: Sequence[int], salt: int = 0) -> Tensor:
        """int64 [N, 1] on the device, for `uniform`."""
        values = [[_signed(self.key(stream, p, salt))] for p in positions]
        return torch.tensor(values, dtype=torch.int64).to(self._ids.device, non_blocking=True)

    def forget(self, before: int) -> None:
        """Drop kept noise of positions that are committed."""
        for position in [p for p in self._cached if p < before]:
            del self._cached[position]
