"""A one-layer draft conditioned on the target's last hidden state, saved and loaded.

After EAGLE (Li et al. 2024, arXiv 2401.15077). At position t the layer reads the token at t and the feature that
predicted it (the target's final hidden state at t-1, the input of its head; zeros at t = 0) and gives a feature for
t+1 in the same space, so that its own output can stand in for the target's when it drafts further. Embeddings and
head are the target's own; the head is cut to the frequent tokens `token_ids`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from assc.attention import grouped_attention
from assc.drafters.artefact import CONFIG as CONFIG
from assc.drafters.artefact import VERSION as VERSION
from assc.drafters.artefact import WEIGHTS_OF, check_shape, check_target, read_draft, unfitting, write_draft
from assc.errors import UnsupportedModelError

WEIGHTS = WEIGHTS_OF["hidden"]


@dataclass(frozen=True)
class NetShape:
    """Sizes of the layer; those of the target unless somebody wants it smaller."""

    vocab_size: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    eps: float = 1e-5
    rope_theta: float = 10000.0

    @classmethod
    def of(cls, model: PreTrainedModel) -> NetShape:
        """The shape of one layer of a target."""
        config: Any = model.config.get_text_config()
        heads = int(config.num_attention_heads)
        rope = getattr(config, "rope_parameters", None) or {}
        return cls(
            vocab_size=int(config.vocab_size),
            hidden_size=int(config.hidden_size),
            heads=heads,
            kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
            head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
            intermediate=int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size),
            eps=float(getattr(config, "rms_norm_eps", 1e-5)),
            rope_theta=float(rope.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0),
        )


def shared_weights(target: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Embeddings and head [V, H] that a draft takes over from its target. Raises `UnsupportedModelError`."""
    model: Any = target
    embed, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or getattr(head, "bias", None) is not None:
        raise UnsupportedModelError(f"{type(target).__name__} has no plain linear head that a draft could share")
    return embed.weight.detach(), head.weight.detach()


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """`F.linear`, a single row beside a copy of itself: alone it may be rounded otherwise (assc/attention.py)."""
    if x.numel() == x.shape[-1]:
        return F.linear(x.reshape(1, -1).expand(2, -1), weight)[:1].reshape(*x.shape[:-1], -1)
    return F.linear(x, weight)


class HiddenNet(nn.Module):
    """The layer. Its parameters are what an artefact stores; `embed` [V, H] and `head` [N, H] come from the target."""

    embed: Tensor
    head: Tensor
    token_ids: Tensor

    def __init__(self, shape: NetShape, token_ids: Tensor) -> None:
        super().__init__()
        self.shape = shape
        width, inner = shape.hidden_size, shape.intermediate
        self.mix_token = nn.Parameter(torch.ones(width))
        self.mix_feature = nn.Parameter(torch.ones(width))
        self.fc = nn.Parameter(torch.zeros(width, 2 * width))
        self.norm_attention = nn.Parameter(torch.ones(width))
        self.qkv = nn.Parameter(torch.zeros((shape.heads + 2 * shape.kv_heads) * shape.head_dim, width))
        self.out = nn.Parameter(torch.zeros(width, shape.heads * shape.head_dim))
        self.norm_mlp = nn.Parameter(torch.ones(width))
        self.gate_up = nn.Parameter(torch.zeros(2 * inner, width))
        self.down = nn.Parameter(torch.zeros(width, inner))
        self.norm = nn.Parameter(torch.ones(width))
        self.register_buffer("token_ids", token_ids.long(), persistent=False)
        self.register_buffer("embed", torch.empty(0), persistent=False)
        self.register_buffer("head", torch.empty(0), persistent=False)

    def attach(self, target: PreTrainedModel) -> HiddenNet:
        """Take embeddings and head from the target (the embeddings without a copy). Raises `UnsupportedModelError`."""
        embed, head = shared_weights(target)
        check_shape(embed, self.shape.vocab_size, self.shape.hidden_size)
        self.to(device=embed.device)
        self.embed = embed
        self.head = head[self.token_ids]
        return self

    # -- the parts, shared by drafting and training ------------------------------------------------------------------

    def enter(self, tokens: Tensor, features: Tensor) -> Tensor:
        """Residual stream [..., H] from token ids [...] and features [..., H]."""
        width, eps = (self.shape.hidden_size,), self.shape.eps
        token = F.rms_norm(F.embedding(tokens, self.embed).to(self.fc.dtype), width, self.mix_token, eps)
        feature = F.rms_norm(features.to(self.fc.dtype), width, self.mix_feature, eps)
        return linear(torch.cat([token, feature], -1), self.fc)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, heads, Q, D], keys and values [B, kv_heads, Q, D]; `cos`, `sin` broadcast to [B, 1, Q, D]."""
        s = self.shape
        y = linear(F.rms_norm(x, (s.hidden_size,), self.norm_attention, s.eps), self.qkv)
        y = y.view(*x.shape[:2], s.heads + 2 * s.kv_heads, s.head_dim).transpose(1, 2)
        both = _rotate(y[:, : s.heads + s.kv_heads], cos, sin)
        return both[:, : s.heads], both[:, s.heads :], y[:, s.heads + s.kv_heads :]

    def leave(self, x: Tensor, attended: Tensor) -> Tensor:
        """Features [B, Q, H] from the residual stream and the heads' outputs [B, heads, Q, D]."""
        width, eps = (self.shape.hidden_size,), self.shape.eps
        x = x + linear(attended.transpose(1, 2).flatten(2), self.out)
        gate, up = linear(F.rms_norm(x, width, self.norm_mlp, eps), self.gate_up).chunk(2, -1)
        x = x + linear(F.silu(gate) * up, self.down)
        return F.rms_norm(x, width, self.norm, eps)

    def rotations(self, length: int) -> tuple[Tensor, Tensor]:
        """cos and sin [length, D] of the rotary position embedding, in the parameters' dtype."""
        s = self.shape
        wide = torch.float64 if self.fc.dtype == torch.float64 else torch.float32
        frequency = s.rope_theta ** (-torch.arange(0, s.head_dim, 2, dtype=wide) / s.head_dim)
        angle = torch.arange(length, dtype=wide)[:, None] * frequency
        angle = torch.cat([angle, angle], -1).to(self.fc.device)
        return angle.cos().to(self.fc.dtype), angle.sin().to(self.fc.dtype)

    def logits(self, features: Tensor) -> Tensor:
        """Scores [..., N] of the tokens `token_ids`."""
        return linear(features, self.head)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


class LayerKV:
    """Static keys and values [B, kv_heads, C, D] of the layer, and what every forward over them needs."""

    def __init__(self, net: HiddenNet, rows: int, length: int) -> None:
        s = net.shape
        self.net = net
        self.length = length
        self.keys = net.fc.new_zeros(rows, s.kv_heads, length, s.head_dim)
        self.values = torch.zeros_like(self.keys)
        self._rows = torch.arange(rows, device=self.keys.device)[:, None]
        self._cos, self._sin = net.rotations(length)
        self._slots = torch.arange(length, device=self.keys.device)
        self._visible = net.fc.new_zeros(())
        self._hidden = net.fc.new_full((), torch.finfo(net.fc.dtype).min)

    def forward(self, tokens: Tensor, features: Tensor, positions: Tensor) -> Tensor:
        """Encode [B, Q] tokens at `positions`; features [B, Q, H] for the positions behind them."""
        net = self.net
        x = net.enter(tokens, features)
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]
        q, k, v = net.project(x, cos, sin)
        if tokens.shape[0] == 1:
            self.keys.index_copy_(2, positions[0], k)
            self.values.index_copy_(2, positions[0], v)
        else:
            self.keys[self._rows, :, positions] = k.transpose(1, 2)
            self.values[self._rows, :, positions] = v.transpose(1, 2)
        # a query at position t sees the slots up to t
        mask = torch.where(self._slots <= positions[:, None, :, None], self._visible, self._hidden)
        attended = grouped_attention(q, self.keys, self.values, mask)
        return net.leave(x, attended)

    def memory_bytes(self) -> int:
        """Bytes held: keys and values, and the rotations."""
        held = (self.keys, self.values, self._cos, self._sin)
        return sum(t.numel() * t.element_size() for t in held)


# -- the artefact ----------------------------------------------------------------------------------------------------


def save_net(folder: Path, net: HiddenNet, notes: dict[str, Any]) -> None:
    """Write weights (bfloat16; float64 when the net is float64) and configuration of a net that is attached."""
    dtype = torch.float64 if net.fc.dtype == torch.float64 else torch.bfloat16
    tensors = {name: p.detach().to("cpu", dtype) for name, p in net.named_parameters()}
    tensors["token_ids"] = net.token_ids.to("cpu", torch.int32)
    fields = {"kind": "hidden", "shape": asdict(net.shape), "head_tokens": int(net.token_ids.shape[0]), **notes}
    write_draft(folder, "hidden", tensors, net.embed, fields)


def load_net(folder: Path, target: PreTrainedModel) -> HiddenNet:
    """The draft of an artefact, in the target's dtype and on its device. Raises `ArtefactError`."""
    config, tensors = read_draft(folder, "hidden")
    try:
        net = HiddenNet(NetShape(**config["shape"]), tensors.pop("token_ids")).to(target.dtype)
        net.load_state_dict(tensors)
    except Exception as error:  # KeyError, TypeError or RuntimeError
        raise unfitting(folder, error) from None
    net = net.attach(target).eval().requires_grad_(False)
    check_target(folder, config, net.embed)
    return net
