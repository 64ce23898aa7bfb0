"""Admission of a request: what can be decoded at all becomes a row of a batch, the rest is one sentence."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from assc.batch import Row
from assc.core import Request
from assc.errors import RequestError
from assc.kv import ModelRunner
from assc.sampling import LogitsChain, Noise, SamplingParams
from assc.stopping import Stopper, StoppingCriterion


def admit(
    request: Request, extras: Mapping[str, Any], *, target: ModelRunner, eos_ids: Sequence[int], tokenizer: Any
) -> Row:
    """The row of a request in a batch of `target`; `eos_ids` and `tokenizer` are the engine's.

    `extras` are `stop` strings, `criteria`, `logprobs` and `eos_ids` of this call. Raises `RequestError` for what
    cannot be decoded; costs no forward.
    """
    if not request.prompt_ids:
        raise RequestError("the prompt is empty; give at least one token")
    _check_integer("max_new_tokens", request.max_new_tokens, 1)
    _check_integer("seed", request.seed)  # the lowest 64 bits count
    vocab = target.vocab_size
    if not all(0 <= t < vocab for t in request.prompt_ids):
        raise RequestError(f"the prompt holds token ids outside the target's vocabulary 0..{vocab - 1}")
    room = request.max_new_tokens
    if target.max_positions is not None:
        room = target.max_positions - len(request.prompt_ids)
        if room < 1:
            raise RequestError(
                f"the prompt has {len(request.prompt_ids)} tokens, the target takes at most {target.max_positions - 1}"
            )
    own = extras.get("eos_ids")
    eos_ids = eos_ids if own is None else own
    criteria: Sequence[StoppingCriterion] = extras.get("criteria", ())
    stop: Sequence[str] = extras.get("stop", ())
    params = _params(dict(request.sampling))
    if not all(0 <= t < vocab for t in params.logit_bias):
        raise RequestError(f"logit_bias names token ids outside the target's vocabulary 0..{vocab - 1}")
    chain = LogitsChain.build(params, prompt_length=len(request.prompt_ids), eos_ids=eos_ids, device=target.device)
    return Row(
        request=request,
        params=params,
        chain=chain,
        draft_chain=chain.for_draft(),
        noise=None if params.greedy else Noise(request.seed, vocab, target.device),
        stopper=Stopper(eos_ids=eos_ids, stop=stop, criteria=criteria, tokenizer=tokenizer),
        tokens=list(request.prompt_ids),
        prompt_length=len(request.prompt_ids),
        budget=min(request.max_new_tokens, room),
        vocab_size=vocab,
        cut_by_context=room < request.max_new_tokens,
        logprobs=[] if extras.get("logprobs", False) else None,
    )


def _check_integer(name: str, value: Any, least: int | None = None) -> None:
    """`RequestError` for what is no integer, or below `least`."""
    allowed = "an integer" if least is None else f"an integer of {least} or more"
    try:
        number = operator.index(value)
    except TypeError:
        raise RequestError(f"{name} is {value!r}, allowed is {allowed}") from None
    if isinstance(value, bool) or (least is not None and number < least):
        raise RequestError(f"{name} is {value!r}, allowed is {allowed}")


def _params(sampling: dict[str, Any]) -> SamplingParams:
    try:
        return SamplingParams(**sampling)
    except TypeError:
        known = ", ".join(SamplingParams.__dataclass_fields__)
        raise RequestError(f"unknown sampling option among {sorted(sampling)}; known options: {known}") from None
