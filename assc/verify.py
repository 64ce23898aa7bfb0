"""The accept rules: one function for every drafter, three modes.

A block of K drafted tokens comes with K+1 rows of target logits. `verify` returns the length of the leading accepted
run and the token that follows it (the correction after a rejection, the bonus after full acceptance).

- greedy: accept iff the draft token is the target's argmax.
- gumbel: accept iff it is argmax(scores + G), G fixed by (request seed, position) (Daliri et al. 2024,
  arXiv 2408.07978). The emitted token never depends on the draft.
- rejection: accept with min(1, p/q), else draw from norm(max(p - q, 0)) (Leviathan et al. 2023, arXiv 2211.17192;
  Chen et al. 2023, arXiv 2302.01318). A drafter without probabilities has q = one-hot.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from assc.sampling import LogitsChain, Noise, SamplingParams, to_gumbel, widen


@dataclass
class VerifyContext:
    """What verification needs to know about one row.

    `prefix` is the row's id buffer [1, C] with the drafted tokens written behind `length` committed ones; `salt` is
    the round's number, which keeps the draws of different rounds in rejection mode independent. Lazy verification
    ends at an accepted id of `eos_ids`: behind it a constraint may have no answer, and nothing is committed there.
    """

    params: SamplingParams
    chain: LogitsChain
    noise: Noise | None
    prefix: Tensor
    length: int
    salt: int
    eos_ids: Collection[int] = ()


def accepts(u: float, p: float, q: float) -> bool:
    """Accept a token of target probability `p` and draft probability `q` with probability min(1, p/q)."""
    return u * q < p


def residual(p: Tensor, q: Tensor) -> Tensor:
    """max(p - q, 0) over the last dimension, not normalised; p itself where nothing remains (p == q)."""
    rest = (p - q).clamp_(min=0.0)
    return torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)


def sample(weights: Tensor, gumbel: Tensor) -> Tensor:
    """Index drawn in proportion to `weights` [..., V], by the Gumbel-max trick."""
    return (weights.double().log() + gumbel).argmax(-1)


def verify(
    context: VerifyContext, logits: Tensor, drafted: Tensor, q: Tensor | None, *, lazy: bool
) -> tuple[int | Tensor, Tensor]:
    """Judge `drafted` [K] against target `logits` [K+1, V]; `q` [K, V] are the draft's probabilities.

    Returns the accepted length and the tokens [accepted + 1 or more]; only the first accepted + 1 count. In a group of
    chunked verification that others follow there are `logits` [K, V] only, and after full acceptance K tokens. `lazy`
    looks at one position after the other and stops at the first rejection: cheapest on a CPU, and needed for
    processors that read the prefix. Otherwise all positions are judged at once without a host synchronisation.
    """
    if lazy or not context.chain.prefix_free:
        accepted, tokens = _verify_lazy(context, logits, drafted.tolist(), q)
        return accepted, torch.tensor(tokens, device=logits.device)
    if logits.shape[0] == drafted.shape[0]:  # no row for a bonus token: any will do, nobody reads its token
        logits = torch.cat([logits, logits[-1:]])
    scores = context.chain.block(widen(logits))
    if context.params.greedy or context.params.mode == "gumbel":
        return _verify_equal(context, scores, drafted)
    return _verify_rejection(context, scores, drafted, q)


def _verify_lazy(
    context: VerifyContext, logits: Tensor, drafted: Sequence[int], q: Tensor | None
) -> tuple[int, list[int]]:
    tokens: list[int] = []
    for j in range(logits.shape[0]):
        draft = drafted[j] if j < len(drafted) else None
        scores = context.chain(context.prefix[:, : context.length + j], widen(logits[j : j + 1]))[0]
        token = _judge(context, scores, context.length + j, draft, None if q is None or draft is None else q[j])
        tokens.append(token if token is not None else int(draft or 0))
        if token is not None and token != draft:
            return j, tokens
        if draft in context.eos_ids:
            return j + 1, [*tokens, tokens[-1]]
    return len(drafted), tokens


def _judge(context: VerifyContext, scores: Tensor, position: int, draft: int | None, q: Tensor | None) -> int | None:
    """The token that the target commits at `position`; None when it takes the drafted one over by p/q."""
    if context.params.greedy:
        return int(scores.argmax())
    assert context.noise is not None
    if context.params.mode == "gumbel":
        return int((scores + context.noise.gumbel("target", position)).argmax())
    p = scores.softmax(-1)
    if draft is not None:
        u = context.noise.scalar("accept", position, context.salt)
        if accepts(u, float(p[draft]), 1.0 if q is None else float(q[draft])):
            return None
        p = residual(p, one_hot(draft, p) if q is None else q.to(p.dtype))
    return int(sample(p, context.noise.gumbel("residual", position, context.salt)))


def one_hot(token: int | Tensor, like: Tensor) -> Tensor:
    """The distribution [V] of a drafter that gives no probabilities."""
    full = torch.zeros_like(like)
    full[token] = 1.0
    return full


def _verify_equal(context: VerifyContext, scores: Tensor, drafted: Tensor) -> tuple[Tensor, Tensor]:
    if not context.params.greedy:
        assert context.noise is not None
        positions = range(context.length, context.length + scores.shape[0])
        scores = scores + to_gumbel(context.noise.uniform(context.noise.keys("target", positions)))
    choices = scores.argmax(-1)
    agree = (choices[: drafted.shape[0]] == drafted).long()
    return agree.cumprod(0).sum(), choices


def _verify_rejection(
    context: VerifyContext, scores: Tensor, drafted: Tensor, q: Tensor | None
) -> tuple[Tensor, Tensor]:
    assert context.noise is not None
    k = drafted.shape[0]
    p = scores.softmax(-1)
    positions = range(context.length, context.length + k + 1)
    full_q = torch.zeros_like(p)
    if q is None:
        full_q[:k].scatter_(1, drafted[:, None], 1.0)
    else:
        full_q[:k] = q.to(p.dtype)
    u = torch.tensor([context.noise.scalar("accept", x, context.salt) for x in positions[:k]], dtype=torch.float64)
    chosen = drafted[:, None]
    agree = u.to(p.device, non_blocking=True) * full_q[:k].gather(1, chosen)[:, 0] < p[:k].gather(1, chosen)[:, 0]
    accepted = agree.long().cumprod(0).sum()
    at = accepted.reshape(1)
    weights = residual(p.index_select(0, at), full_q.index_select(0, at))
    key = context.noise.keys("residual", positions, context.salt).index_select(0, at)
    following = sample(weights, to_gumbel(context.noise.uniform(key)))
    tokens = torch.cat([drafted, drafted.new_zeros(1)]).scatter(0, at, following)
    return accepted, tokens
