"""Stage 3: the loss of both designs, and the one-layer draft on stored hidden states as a student.

The loss of a position is the cross-entropy from the target's distribution p to the draft's q, summed over the head's
tokens only and not renormalised: sum_head -p_i log q_i. It equals the restricted KL divergence weighted by the mass
that the head covers (plus a constant), so positions whose likely tokens the head lacks, where no draft can be
accepted, count less. With z = W f it is mass * logsumexp(z) - f . (sum_head p_i W_i), so the teacher's whole
distribution enters through one stored vector per position.

For design `hidden` every batch is encoded once from the target's true states and then `self_fed` times more from the
layer's own features, with the keys and values that it would see when it drafts (HASS, arXiv 2408.15766; EAGLE-3,
2503.01840).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from assc.distill.examples import CHUNK, Block, Example
from assc.drafters.net import HiddenNet, save_net


class _HeadLoss(torch.autograd.Function):
    """Mean of mass * logsumexp(W f) - f . label, its gradient made on the way so that logits are never kept."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, head: Tensor, label: Tensor, mass: Tensor) -> Tensor:
        total = features.new_zeros((), dtype=torch.float64)
        gradient = torch.empty_like(features)
        scale = 1.0 / max(1, features.shape[0])
        for first in range(0, features.shape[0], CHUNK):
            part = slice(first, first + CHUNK)
            z = F.linear(features[part].to(head.dtype), head)
            z = z if z.dtype == torch.float64 else z.float()
            lse = z.logsumexp(-1)
            q = z.sub_(lse[:, None]).exp_().mul_((mass[part] * scale)[:, None])
            gradient[part] = (q.to(head.dtype) @ head).to(features.dtype) - label[part] * scale
            total += (mass[part] * lse).sum() - (features[part] * label[part]).sum()
        ctx.save_for_backward(gradient)
        return (total * scale).to(features.dtype)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * outputs[0], None, None, None


def head_loss(features: Tensor, head: Tensor, label: Tensor, mass: Tensor) -> Tensor:
    """The loss at the top of this file, mean over the positions [P]: features and label [P, H], head [N, H]."""
    apply: Any = _HeadLoss.apply
    loss: Tensor = apply(features, head, label, mass)
    return loss


def unroll(
    net: HiddenNet, tokens: Tensor, hidden: Tensor, steps: int, needed: Tensor | None = None
) -> Iterator[Tensor]:
    """Features [B, T, H] of step 1 (all inputs true), 2, ... `steps` (the last s-1 inputs the layer's own).

    Step s at position t stands for the s-th token drafted from position t - s + 1: it sees the true keys up to there
    and, behind, those of the earlier steps. Features are made only where `needed` [B, T] is true, zeros elsewhere:
    of a prompt's positions one layer uses the keys and values alone.
    """
    shape = net.shape
    _, width = tokens.shape
    cos, sin = net.rotations(width)
    group, scale = shape.heads // shape.kv_heads, shape.head_dim**-0.5
    feature = _shift(hidden, 1)
    own: list[tuple[Tensor, Tensor]] = []
    causal = torch.ones(width, width, dtype=torch.bool, device=tokens.device).tril()
    for step in range(1, steps + 1):
        x = net.enter(tokens, feature)
        q, k, v = net.project(x, cos, sin)
        if step == 1:
            first_k, first_v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            attended = F.scaled_dot_product_attention(q, first_k, first_v, is_causal=True)
        else:
            own.append((k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)))
            scores = (q @ first_k.transpose(-1, -2)) * scale
            scores = scores.masked_fill(~causal.tril(1 - step), -torch.inf)
            # the keys of step m (m = 2..step) lie step - m positions back
            shifted = [(_shift(a, step - 1 - i, 2), _shift(b, step - 1 - i, 2)) for i, (a, b) in enumerate(own, 1)]
            extra = torch.cat([(q * a).sum(-1, keepdim=True) * scale for a, _ in shifted], -1)
            weights = torch.cat([scores, extra], -1).softmax(-1).to(v.dtype)
            attended = weights[..., :width] @ first_v
            for i, (_, b) in enumerate(shifted):
                attended = attended + weights[..., width + i, None] * b
        if needed is None:
            out = net.leave(x, attended)
        else:
            some = net.leave(x[needed][None], attended.transpose(1, 2)[needed][None].transpose(1, 2))[0]
            out = some.new_zeros(x.shape).masked_scatter(needed[..., None], some)
        yield out
        feature = _shift(out, 1)


def _shift(x: Tensor, by: int, dim: int = 1) -> Tensor:
    """Move content `by` places up along `dim`, zeros in front."""
    if by == 0:
        return x
    pad = torch.zeros_like(x.narrow(dim, 0, min(by, x.shape[dim])))
    return torch.cat([pad, x.narrow(dim, 0, max(0, x.shape[dim] - by))], dim)


def loss_of(net: HiddenNet, block: Block, self_fed: int, decay: float, autocast: bool) -> Tensor:
    """Weighted mean of the steps' losses, weights decay^(s-1)."""
    on = block.weight > 0
    place = torch.arange(on.shape[1])
    total, weights = torch.zeros(()), 0.0
    needed = on.clone()
    for s in range(1, self_fed + 1):
        needed |= shift_back(on, s)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for s, feature in enumerate(unroll(net, block.tokens, block.hidden, 1 + self_fed, needed)):
            chosen = on & (place >= s)
            with torch.autocast("cpu", enabled=False):
                features = feature[chosen].to(net.fc.dtype)
                loss = head_loss(features, net.head, block.label[chosen].to(features.dtype), block.mass[chosen])
            total = total + decay**s * loss
            weights += decay**s
    return total / weights


def shift_back(x: Tensor, by: int) -> Tensor:
    """Move content [B, T] `by` places down, zeros behind."""
    if by == 0:
        return x
    return torch.cat([x[:, by:], torch.zeros_like(x[:, :by])], 1)


class HiddenStudent:
    """`HiddenNet` in training (see `assc.distill.loop.Student`)."""

    def __init__(self, net: HiddenNet, self_fed: int, decay: float) -> None:
        self.net = net
        self.dtype = net.fc.dtype
        self._self_fed, self._decay = self_fed, decay
        self._autocast = net.fc.dtype == torch.float32 and net.head.dtype == torch.bfloat16

    def loss(self, block: Block) -> Tensor:
        return loss_of(self.net, block, self._self_fed, self._decay, self._autocast)

    def hits(self, block: Block, steps: int) -> Iterator[Tensor]:
        net, on = self.net, block.weight > 0
        for s, feature in enumerate(unroll(net, block.tokens, block.hidden, steps)):
            # step s at position t belongs to the start t - s
            ends = on & (torch.arange(on.shape[1]) >= s)
            hit = torch.zeros_like(on)
            hit[ends] = net.token_ids[net.logits(feature[ends].to(net.head.dtype)).argmax(-1)] == block.top[ends]
            yield hit

    def save(self, folder: Path, notes: dict[str, Any]) -> None:
        save_net(folder, self.net, notes)


@torch.no_grad()
def initialise(net: HiddenNet, target: Any, seed: int) -> None:
    """Start from the target's last layer (where the target is built of Llama-style layers) and its final norm."""
    generator = torch.Generator().manual_seed(seed)
    for p in net.parameters():
        if p.dim() > 1:
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.5 / p.shape[1] ** 0.5)
    layers = getattr(target.base_model, "layers", None)
    if layers is None:
        return
    layer = layers[-1]
    try:
        attention, mlp = layer.self_attn, layer.mlp
        pieces = {
            "qkv": torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]),
            "out": attention.o_proj.weight,
            "gate_up": torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]),
            "down": mlp.down_proj.weight,
            "norm_attention": layer.input_layernorm.weight,
            "norm_mlp": layer.post_attention_layernorm.weight,
            "norm": target.base_model.norm.weight,
        }
    except AttributeError:
        return
    for name, value in pieces.items():
        parameter = getattr(net, name)
        if parameter.shape == value.shape:
            parameter.copy_(value)


RIDGE = 100.0
FIT_POSITIONS = 200_000


@torch.no_grad()
def fit_mixing(net: HiddenNet, examples: Sequence[Example]) -> None:
    """Set the mixing matrix to the ridge regression of the target's next state on the layer's two inputs.

    The layer's own contribution starts at zero, so training begins where a linear predictor ends: on SmolLM2 that
    predictor alone agrees with the target's argmax at more than one position in five, for seconds of work.
    """
    width, eps = net.shape.hidden_size, net.shape.eps
    dtype = torch.float64 if net.fc.dtype == torch.float64 else torch.float32
    gram = torch.zeros(2 * width, 2 * width, dtype=dtype)
    cross = torch.zeros(2 * width, width, dtype=dtype)
    seen = 0
    for e in examples:
        end = len(e.text.ids) - 1
        if end < 2:
            continue
        token = F.rms_norm(net.embed[torch.tensor(e.text.ids[1:end])].to(dtype), (width,), None, eps)
        feature = F.rms_norm(e.hidden[: end - 1].to(dtype), (width,), None, eps)
        x = torch.cat([token, feature], -1)
        gram += x.T @ x
        cross += x.T @ (e.hidden[1:end].to(dtype) / net.norm.to(dtype))
        seen += end
        if seen > FIT_POSITIONS:
            break
    ridge = RIDGE * min(1.0, seen / 10_000)
    net.fc.copy_(torch.linalg.solve(gram + ridge * torch.eye(2 * width, dtype=dtype), cross).T)
    net.mix_token.fill_(1.0)
    net.mix_feature.fill_(1.0)
    net.out.zero_()
    net.down.zero_()
