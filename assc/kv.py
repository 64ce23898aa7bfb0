"""Static key/value buffers with row lengths, and the wrapper that runs a transformers model over them.

The buffers are allocated once per batch of requests. A forward writes each row's new keys and values at that row's
own positions; rolling back is only a matter of remembering a smaller length, since a slot's number equals its
position and an additive mask hides every slot beyond the query's own position. Shapes never depend on K schedules,
so the logits of a position do not either, not even in bf16 (measured per device by `tests/test_invariance.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from assc.attention import steady
from assc.errors import UnsupportedModelError

KeepHidden = Callable[[Tensor, Tensor], None]
"""takes positions [B, Q] and final hidden states [B, Q, H]"""

BUCKET = 128
"""buffer lengths are multiples of this many slots"""

PREFILL_CHUNK = 512
"""prompt tokens fed per forward: bounds the mask and activations, and never depends on K"""


def bucket_length(tokens: int) -> int:
    """Slots for `tokens` positions and one junk slot, rounded up to a multiple of `BUCKET`."""
    return -(-(tokens + 1) // BUCKET) * BUCKET


class StaticKV(Cache):
    """Keys and values of B rows: per layer two tensors [B, heads, C, head_dim], allocated at the first write.

    `positions` ([B, Q], int64) must be set before each forward; slot C-1 takes what padding columns write.
    """

    def __init__(self, rows: int, length: int) -> None:
        # Deliberately no super().__init__: the base class would build layer objects that this class replaces.
        self.rows = rows
        self.length = length
        self.positions: Tensor = torch.empty(0)
        self.layers: list[Any] = []  # the base class asks its layers for properties; these buffers have none
        self._keys: list[Tensor | None] = []
        self._values: list[Tensor | None] = []
        self._row_index: Tensor | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write [B, heads, Q, head_dim] at `positions`, return the whole buffers."""
        while len(self._keys) <= layer_idx:
            self._keys.append(None)
            self._values.append(None)
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        if keys is None or values is None:
            keys = self._keys[layer_idx] = self._allocate(key_states)
            values = self._values[layer_idx] = self._allocate(value_states)
        if self.rows == 1:
            keys.index_copy_(2, self.positions[0], key_states)
            values.index_copy_(2, self.positions[0], value_states)
        else:
            if self._row_index is None:
                self._row_index = torch.arange(self.rows, device=key_states.device)[:, None]
            keys[self._row_index, :, self.positions] = key_states.transpose(1, 2)
            values[self._row_index, :, self.positions] = value_states.transpose(1, 2)
        return keys, values

    def _allocate(self, states: Tensor) -> Tensor:
        return states.new_zeros(self.rows, states.shape[1], self.length, states.shape[3])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # positions are always passed explicitly

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        return self.length, 0

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return self.length

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    @property
    def is_compileable(self) -> bool:
        return False

    def __len__(self) -> int:
        return len(self._keys)

    @classmethod
    @torch.inference_mode()
    def join(cls, parts: Sequence[StaticKV]) -> StaticKV:
        """The rows of several buffers of one length, copied side by side."""
        joined = cls(sum(p.rows for p in parts), parts[0].length)
        for name in ("_keys", "_values"):
            layers = zip(*(getattr(p, name) for p in parts), strict=True)
            setattr(joined, name, [torch.cat(layer) if layer[0] is not None else None for layer in layers])
        return joined

    def memory_bytes(self) -> int:
        """Bytes held by the buffers."""
        return sum(t.numel() * t.element_size() for t in (*self._keys, *self._values) if t is not None)


class ModelRunner:
    """Runs one causal language model over `StaticKV` buffers.

    Raises `UnsupportedModelError` when the model's state cannot be rolled back by position, or when a short probe
    shows that its logits over static buffers differ from its own plain forward.
    """

    def __init__(self, model: PreTrainedModel, *, probe: bool = True) -> None:
        self.model = model
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        text_config = model.config.get_text_config()
        self.vocab_size = int(text_config.vocab_size)
        self.hidden_size = int(text_config.hidden_size)
        self.max_positions: int | None = _learned_positions(model, text_config)
        self._windows = _attention_windows(model, text_config)
        parameters = inspect.signature(type(model).forward).parameters
        self._cache_name = _cache_parameter(model, parameters)
        self._keeps = "logits_to_keep" in parameters
        self._steady = self.device.type == "cpu"
        """whether to make sure that the bits of a column do not depend on how many columns there are"""
        self.last_hidden: Tensor = torch.empty(0)
        """of the last forward that was asked for it"""
        self._visible = torch.zeros((), dtype=self.dtype, device=self.device)
        self._hidden = torch.full((), torch.finfo(self.dtype).min, dtype=self.dtype, device=self.device)
        if probe:
            self._probe()

    def new_cache(self, rows: int, length: int) -> StaticKV:
        return StaticKV(rows, length)

    @torch.inference_mode()
    def forward(
        self, cache: StaticKV, tokens: Tensor, positions: Tensor, keep: int = 0, *, hidden: bool = False
    ) -> Tensor:
        """Feed `tokens` [B, Q] at `positions` [B, Q]; returns logits [B, keep or Q, V] in the model's dtype.

        `hidden` leaves the final hidden states [B, Q, H], from which the head makes the logits, in `last_hidden`.
        """
        if self._steady and tokens.numel() == 1:  # a matrix product of one row rounds otherwise (assc/attention.py)
            tokens = tokens.expand(1, 2)
            positions = torch.cat([torch.full_like(positions, cache.length - 1), positions], 1)
            logits = self._forward(cache, tokens, positions, keep, hidden)
            if hidden:
                self.last_hidden = self.last_hidden[:, 1:]
            return logits[:, -1:]
        return self._forward(cache, tokens, positions, keep, hidden)

    def _forward(self, cache: StaticKV, tokens: Tensor, positions: Tensor, keep: int, hidden: bool) -> Tensor:
        cache.positions = positions
        arguments: dict[str, Any] = {self._cache_name: cache, "use_cache": True}
        if self.max_positions is not None and cache.length > self.max_positions:
            # only the junk slot lies past the model's last position; its position id must still exist
            positions = positions.clamp(max=self.max_positions - 1)
        if self._keeps:
            arguments["logits_to_keep"] = keep
        hook = self.model.base_model.register_forward_hook(self._remember) if hidden else nullcontext()
        with hook, steady(self.model) if self._steady else nullcontext():
            output = self.model(
                input_ids=tokens, attention_mask=self._mask(cache, cache.positions), position_ids=positions, **arguments
            )
        logits: Tensor = output.logits
        return logits[:, -keep:] if keep and not self._keeps else logits

    def prefill(
        self, cache: StaticKV, tokens: Tensor, start: int = 0, keep_hidden: KeepHidden | None = None
    ) -> Tensor | None:
        """Feed `tokens` [B, N] at positions start.., in chunks; returns the last logits [B, V], None for N = 0.

        `keep_hidden` is called with the positions and final hidden states of each chunk.
        """
        logits: Tensor | None = None
        for first in range(0, tokens.shape[1], PREFILL_CHUNK):
            part = tokens[:, first : first + PREFILL_CHUNK]
            offset = start + first
            positions = torch.arange(offset, offset + part.shape[1], device=self.device).expand(part.shape[0], -1)
            logits = self.forward(cache, part, positions, keep=1, hidden=keep_hidden is not None)[:, -1]
            if keep_hidden is not None:
                keep_hidden(positions, self.last_hidden)
        return logits

    def _remember(self, module: Any, inputs: Any, output: Any) -> None:
        self.last_hidden = output[0]

    def _mask(self, cache: StaticKV, positions: Tensor) -> Any:
        """Additive masks [B, 1, Q, C]: slot s is visible to a query at position t iff t - window < s <= t."""
        slots = torch.arange(cache.length, device=positions.device)
        query = positions[:, None, :, None]
        masks = {
            kind: torch.where(
                (slots <= query) if window is None else ((slots <= query) & (slots > query - window)),
                self._visible,
                self._hidden,
            )
            for kind, window in self._windows.items()
        }
        return masks if len(masks) > 1 else next(iter(masks.values()))

    @torch.inference_mode()
    def _probe(self) -> None:
        """Compare a prompt fed in two uneven parts with a rollback in between to the model's own plain forward."""
        ids = (torch.arange(7, device=self.device) * 3 + 1).remainder(self.vocab_size)[None]
        length = 8
        try:
            plain = self.model(input_ids=ids, use_cache=False).logits[0, -1].double()
            cache = self.new_cache(1, length)
            positions = torch.arange(7, device=self.device)[None]
            self.forward(cache, ids[:, :4], positions[:, :4])
            self.forward(cache, (ids[:, 2:5] + 1).remainder(self.vocab_size), positions[:, 4:7])  # to be rolled back
            static = self.forward(cache, ids[:, 4:], positions[:, 4:], keep=1)[0, -1].double()
        except (TypeError, ValueError, RuntimeError, AttributeError, KeyError, NotImplementedError) as error:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} cannot run over static key/value buffers: {error}"
            ) from error
        both = ~(plain.isneginf() & static.isneginf())  # tokens that a cut head lacks
        plain, static = plain[both], static[both]
        scale = plain.abs().max().clamp(min=1.0)
        tolerance = 1e-6 if self.dtype == torch.float64 else 1e-3 if self.dtype == torch.float32 else 0.1
        difference = ((plain - static).abs().max() / scale).item()
        if not difference <= tolerance:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} gives other logits over static key/value buffers than in its plain "
                f"forward (relative difference {difference:.2g}, allowed {tolerance:g}), so its output could not be "
                "trusted"
            )


def _cache_parameter(model: PreTrainedModel, parameters: Any) -> str:
    """`cache` in transformers 5.24 and later, `past_key_values` before."""
    for name in ("cache", "past_key_values"):
        if name in parameters:
            return name
    raise UnsupportedModelError(
        f"{type(model).__name__} keeps no key/value cache that can be rolled back by position; "
        "use a decoder-only attention model"
    )


def _learned_positions(model: PreTrainedModel, config: Any) -> int | None:
    """The hard limit of positions: the table of learned position embeddings, or the configured maximum.

    A rotary scaling that changes with the length ends at its first change: behind it the keys of one position would
    depend on the block that it was fed in, hence on K.
    """
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if rope.get("rope_type") in {"dynamic", "longrope"}:
        original = getattr(config, "original_max_position_embeddings", None)
        known = (limit, original, rope.get("original_max_position_embeddings"))
        limit = min((x for x in known if x), default=None)
    return int(limit) if limit else None


def _attention_windows(model: PreTrainedModel, config: Any) -> dict[str, int | None]:
    """Window per attention kind (None: unlimited). More than one kind: the model takes a dict of masks."""
    kinds = list(getattr(config, "layer_types", None) or [])
    if "local" in (getattr(config, "attention_layers", None) or []):  # GPT-Neo computes its window from lengths
        raise UnsupportedModelError(f"{type(model).__name__} builds the mask of its local layers itself")
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    foreign = sorted({k for k in kinds if k not in ("full_attention", "sliding_attention")})
    if foreign or getattr(model, "_is_stateful", False) or getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{type(model).__name__} has layers whose state cannot be rolled back by position "
            f"({', '.join(foreign) or 'recurrent or encoder state'}); use a decoder-only attention model"
        )
    if window is None or (kinds and "sliding_attention" not in kinds):
        return {"full_attention": None}
    if not kinds:
        return {"full_attention": int(window)}
    if _takes_mask_dict(model):
        return {"full_attention": None, "sliding_attention": int(window)}
    if len(set(kinds)) == 1:
        return {"sliding_attention": int(window)}
    raise UnsupportedModelError(
        f"{type(model).__name__} mixes full and sliding attention but takes one mask for all layers, "
        "so a prepared mask cannot serve it"
    )


def _takes_mask_dict(model: PreTrainedModel) -> bool:
    """Whether the model's code accepts {layer kind: mask}, as models with several kinds of layers do."""
    return "attention_mask, dict)" in inspect.getsource(inspect.getmodule(type(model)))  # type: ignore[arg-type]
