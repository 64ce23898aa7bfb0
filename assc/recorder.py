"""Records what every drafter would propose at every position of one request's text.

The text is decoded by the live engine, one request at a time, so it is the live text to the bit in any dtype (or it
is known from an earlier recording and read again). What the drafters would propose is then found in one of three ways:

- an n-gram drafter needs no model: its index walks over the text;
- an independent draft model sees the true prefix until its first mismatch, so one teacher-forced pass gives one
  agreement bit per position, and the accepted length at a start is the run of agreements from there;
- any other drafter is asked itself at every position, in a walk over the decoded text.

The confidences per draft step (docs/step-policies.md) come from a second walk, several positions side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from assc.batch import Batch, Row
from assc.core import ROLLBACK, Action, Request
from assc.drafters.base import Confidence, Drafter
from assc.drafters.model import ModelDrafter, confidence
from assc.drafters.ngram import NgramDrafter
from assc.engine import Engine
from assc.errors import RequestError
from assc.kv import bucket_length
from assc.ngram_index import NgramIndex
from assc.sampling import LogitsChain, widen
from assc.timing import PhaseTimer
from assc.trace import FINISHES, DrafterInfo, runs
from assc.walks import STARTS, Columns, agreeing, confidence_columns, walk, walk_steps

BLOCK = 16
"""tokens per teacher-forced forward: as wide as a verification, so that half-precision logits keep their bits (with 48
columns they did not, on the CPU measured)"""


def drafter_info(drafter: Drafter, steps: int) -> DrafterInfo:
    """What a trace says about a drafter of which the confidences of `steps` draft steps are kept, if it tells them."""
    source = f"max_n={drafter.max_n},min_n={drafter.min_n}" if isinstance(drafter, NgramDrafter) else ""
    kept = steps if drafter.has_step_confidence else 0
    return DrafterInfo(drafter.name, drafter.kind, drafter.keeps, drafter.has_confidence, source, kept)


@dataclass(frozen=True)
class KnownText:
    """The text of a request, recorded before: new tokens and why they ended (an index into `FINISHES`)."""

    tokens: tuple[int, ...]
    finish: int


def record_request(
    engine: Engine,
    request: Request,
    known: KnownText | None = None,
    *,
    steps: int | None = None,
    starts: int = STARTS,
) -> tuple[Columns, int]:
    """All columns of one request, and at how many positions the teacher-forced pass chose another token.

    A text that is `known` is read instead of decoded, in a fraction of the time: it does not depend on the drafters.
    Confidences are kept of the first `steps` draft steps from each position (None: K_max, 0: none), drafted at `starts`
    positions side by side.
    Raises `RequestError` for a request that cannot be decoded, and in mode rejection, whose text depends on K.
    """
    if request.sampling.get("mode") == "rejection":
        raise RequestError("in mode rejection the text depends on K; record in mode gumbel, which samples as well")
    batch = engine.start([request])
    row = batch.rows[0]
    if not row.chain.prefix_free:
        raise RequestError(
            "processors that read the prefix cannot be recorded; take temperature, top_k, top_p or min_p"
        )
    # a subclass may propose by other rules than the class whose shortcut is known, so it is asked itself
    walked = [d for d in engine.drafters.values() if type(d) not in (NgramDrafter, ModelDrafter)]
    if known is None:
        _decode(engine, batch)
        assert row.finish is not None
        text, finish = row.tokens[row.prompt_length :], FINISHES.index(row.finish)
        target, mismatches = _teacher_forced_target(engine, engine.start([request]), text)
    else:
        text, finish = list(known.tokens), known.finish
        target, mismatches = _teacher_forced_target(engine, batch, text)
    columns: Columns = {"tokens": np.array(text, np.int32), "finish": finish, **target}
    columns["match"] = np.full(len(text), -1, np.int8)
    steps = engine.k_max if steps is None else steps
    for drafter in walked:
        if not (drafter.has_step_confidence and steps == engine.k_max):  # else the walk of steps tells all
            columns |= walk(engine, batch, drafter, text)
    for drafter in engine.drafters.values():
        if steps and drafter.has_step_confidence:
            told = walk_steps(engine, batch, drafter, text, steps, starts)
            # what a teacher-forced pass or a walk tells already is not taken twice
            columns |= {name: column for name, column in told.items() if drafter in walked or name.startswith("step_")}
        if type(drafter) is NgramDrafter:
            columns |= _ngram(drafter, request.prompt_ids, text, engine.k_max, columns["match"])
        elif type(drafter) is ModelDrafter:
            columns |= _independent(drafter, engine, request, text)
    return columns, mismatches


def decode_together(engine: Engine, requests: Sequence[Request], rows: int) -> list[KnownText]:
    """The texts of many requests, `rows` of them decoded plainly side by side; a row that has ended waits for the rest.

    Prompts are fed one by one and only requests with buffers of one length meet, so the bits of a row are those of a
    batch of one wherever the device's matrix products do not depend on their number of rows (docs/traces.md).
    """
    plain = Engine(
        engine.target, [], k_max=engine.k_max, eos_ids=engine.eos_ids, tokenizer=engine.tokenizer, fixed_width=False
    )
    by_length: dict[int, list[int]] = {}
    for i, request in enumerate(requests):
        plain.check_request(request)
        by_length.setdefault(bucket_length(len(request.prompt_ids) + request.max_new_tokens), []).append(i)
    texts: dict[int, KnownText] = {}
    timer = PhaseTimer(engine.device)
    for same in by_length.values():
        for first in range(0, len(same), rows):
            part = same[first : first + rows]
            batch = Batch.join([plain.start([requests[i]]) for i in part])
            while any(row.finish is None for row in batch.rows):
                plain.round(batch, [ROLLBACK] * batch.size, timer)
            for i, row in zip(part, batch.rows, strict=True):
                assert row.finish is not None
                texts[i] = KnownText(tuple(row.tokens[row.prompt_length :]), FINISHES.index(row.finish))
    return [texts[i] for i in range(len(requests))]


def _decode(engine: Engine, batch: Batch) -> None:
    """Decode to the end with the cheapest drafter; the text is the same with any."""
    names = sorted(engine.drafters, key=lambda n: engine.drafters[n].has_confidence)
    timer = PhaseTimer(engine.device)
    while batch.rows[0].finish is None:
        engine.round(batch, [Action(names[0], min(8, engine.k_max))], timer)


def _choice(row: Row, chain: LogitsChain, logits: torch.Tensor, position: int, device: torch.device) -> int:
    """The token chosen from logits [V] at an absolute position, by the rule of `assc.verify` and of the draft."""
    scores = chain.block(widen(logits)[None].to(device))[0]
    if row.params.greedy:
        return int(scores.argmax())
    assert row.noise is not None
    row.noise.forget(position)
    return int((scores + row.noise.gumbel("target", position)[: scores.shape[0]]).argmax())


@torch.inference_mode()
def _teacher_forced_target(engine: Engine, batch: Batch, text: Sequence[int]) -> tuple[Columns, int]:
    """Entropy and top-1 of the target at each token, from one pass over the text in blocks.

    `batch` has just been started; afterwards its buffers are those of one that has decoded the text.
    """
    row = batch.rows[0]
    first, known = row.length - 1, [*row.request.prompt_ids, *text]
    batch.ids[0, : len(known)] = torch.tensor(known).to(engine.device)
    seen: list[Confidence] = []
    mismatches = 0
    for start in range(0, len(text), BLOCK):
        size = min(BLOCK, len(text) - start)
        at = first + start
        ids = torch.tensor([known[at : at + size]], device=engine.device)
        positions = torch.arange(at, at + size, device=engine.device)[None]
        logits = engine.target.forward(batch.kv, ids, positions, hidden=batch.hidden is not None)[0]
        if batch.hidden is not None:
            batch.keep_hidden(positions, engine.target.last_hidden)
        seen += [confidence(x) for x in logits]
        mismatches += sum(
            _choice(row, row.chain, x, at + j + 1, engine.device) != known[at + j + 1] for j, x in enumerate(logits)
        )
    columns = {"target_entropy": [s.entropy for s in seen], "target_top1": [s.top1 for s in seen]}
    return {name: np.array(values, np.float32) for name, values in columns.items()}, mismatches


def _ngram(
    drafter: NgramDrafter, prompt: Sequence[int], text: Sequence[int], k_max: int, match: NDArray[np.int8]
) -> Columns:
    """Walk the index over the text; `match` takes the longest match of all n-gram drafters."""
    index = NgramIndex(drafter.max_n, drafter.min_n)
    index.extend(prompt)
    acc, avail = np.zeros(len(text), np.int8), np.zeros(len(text), np.int8)
    for n, token in enumerate(text):
        proposal = index.propose(k_max)
        acc[n], avail[n] = agreeing(proposal, text[n:]), len(proposal)
        match[n] = max(match[n], index.match_length())
        index.extend([token])
    return {f"acc/{drafter.name}": acc, f"avail/{drafter.name}": avail}


@torch.inference_mode()
def _independent(drafter: ModelDrafter, engine: Engine, request: Request, text: Sequence[int]) -> Columns:
    """One teacher-forced pass of a draft model: agreement and confidence at each position."""
    batch = engine.start([request])
    row, runner = batch.rows[0], drafter.runner
    room = len(request.prompt_ids) + len(text)
    if runner.max_positions is not None:
        room = min(room, runner.max_positions)
    known = [min(t, runner.vocab_size - 1) for t in [*request.prompt_ids, *text]][:room]
    cache, prompt = runner.new_cache(1, batch.kv.length), min(row.length, room)
    ids = torch.tensor([known], device=runner.device)
    last = runner.prefill(cache, ids[:, :prompt])
    assert last is not None
    rows = [last[0]]
    for start in range(prompt, len(known) - 1, BLOCK):
        stop = min(start + BLOCK, len(known) - 1)
        at = torch.arange(start, stop, device=runner.device)[None]
        rows += list(runner.forward(cache, ids[:, start:stop], at)[0])
    agree, seen = np.zeros(len(text), bool), []
    for n, logits in enumerate(rows[: len(text)]):
        seen.append(confidence(logits))
        choice = _choice(row, row.draft_chain, logits[: row.vocab_size], row.length + n, engine.device)
        agree[n] = choice == text[n]
    padded: list[Confidence | None] = [*seen, *[None] * (len(text) - len(seen))]
    avail = np.full(len(text), engine.k_max)
    if runner.max_positions is not None:
        avail = np.clip(runner.max_positions - row.length - np.arange(len(text)), 0, engine.k_max)
    acc = np.minimum(runs(agree), avail)
    name = drafter.name
    counts = {f"acc/{name}": acc.astype(np.int8), f"avail/{name}": avail.astype(np.int8)}
    return counts | confidence_columns(name, padded)
