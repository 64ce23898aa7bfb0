"""A drafter asked at every position of one request's text, by going back to the beginning of what a batch has read."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from assc.batch import Batch
from assc.drafters.base import Confidence, Drafter, Proposal, codes_of
from assc.engine import Engine
from assc.steps import STEP_COLUMNS
from assc.trace import CONFIDENCE

PROBES = (1, 4)
"""tokens that a walked drafter is asked for first: each more only where all of the fewer agree, then K_max"""
STARTS = 16
"""positions of a text at which a drafter drafts side by side to tell its confidences"""

Columns = dict[str, Any]
"""the columns of one request: scalars, and arrays [T] (T tokens of text)"""


@torch.inference_mode()
def walk(engine: Engine, batch: Batch, drafter: Drafter, text: Sequence[int]) -> Columns:
    """Ask a drafter at every position of the text that `batch` has decoded or read, by going back to its beginning.

    The buffers hold what they held when each position was reached, so the answers are those of a live round. A few
    tokens are asked for first, and more of them only where all of these agree; a drafter that gives what it was asked
    for is taken to give K_max.
    """
    row = batch.rows[0]
    known, start = [*row.request.prompt_ids, *text], row.prompt_length
    accepted, available = [], []
    seen: list[Confidence | None] = []
    try:
        drafter.begin(batch)
        for n in range(start, len(known)):
            row.tokens = known[:n]
            drafter.committed(batch)
            if drafter.has_confidence:
                seen.append(drafter.peek(batch, [0])[0])
            most = min(engine.k_max, start + row.budget - n)  # the buffers hold no more, and no round could use it
            asked, proposal = 0, list[int]()
            while len(proposal) == asked < most and agreeing(proposal, known[n:]) == asked:
                if asked:
                    drafter.committed(batch)
                asked = min(most, next((k for k in PROBES if k > asked), most))
                proposal = _asked(drafter, batch, asked)
            available.append(engine.k_max if len(proposal) == asked else len(proposal))
            accepted.append(agreeing(proposal, known[n:]))
            if row.noise is not None:
                row.noise.forget(n)
    finally:
        row.tokens = known
    name = drafter.name
    columns: Columns = {f"acc/{name}": np.array(accepted, np.int8), f"avail/{name}": np.array(available, np.int8)}
    return columns | (confidence_columns(name, seen) if seen else {})


def _asked(drafter: Drafter, batch: Batch, k: int) -> list[int]:
    """What it proposes now."""
    proposal = drafter.propose(batch, [k])
    tokens: list[int] = proposal.tokens[0, : proposal.lengths[0]].tolist()
    return tokens


@torch.inference_mode()
def walk_steps(engine: Engine, batch: Batch, drafter: Drafter, text: Sequence[int], steps: int, starts: int) -> Columns:
    """The confidences of the first `steps` tokens that a drafter drafts at every position of the text.

    What it thinks of tokens behind its first mismatch depends on its own tokens, so it drafts all of them everywhere:
    at `starts` positions side by side, which are the rows of one batch over the buffers of `batch`. If these are all
    tokens that it can be asked for, the columns of `walk` come with them.
    """
    row, name = batch.rows[0], drafter.name
    known, start, end = [*row.request.prompt_ids, *text], row.prompt_length, row.prompt_length + len(text)
    starts = min(starts, len(text))
    wide = Batch([copy.copy(row) for _ in range(starts)], batch.kv, batch.ids.expand(starts, -1), batch.device)
    if batch.hidden is not None:
        wide.hidden = batch.hidden.expand(starts, -1, -1)
    codes = np.zeros((len(STEP_COLUMNS), len(text), steps), np.uint8)
    accepted, available = np.zeros(len(text), np.int8), np.zeros(len(text), np.int8)
    seen: list[Confidence | None] = [None] * len(text)
    for first in range(start, end, starts):
        places = [min(first + b, end - 1) for b in range(starts)]
        for at, own in zip(places, wide.rows, strict=True):
            own.tokens = known[:at]
        if first == start:
            drafter.begin(wide)
        # the buffers hold no more than the budget, and no round could use it
        asked = [min(steps, start + row.budget - at) for at in places]
        told, proposal = _told(drafter, wide, asked)
        drafted = proposal.tokens.tolist()
        for b, at in enumerate(places):
            for j, confidence_ in enumerate(told[b]):
                codes[:, at - start, j] = codes_of(confidence_)
            n = proposal.lengths[b]
            available[at - start] = engine.k_max if n == asked[b] else n
            accepted[at - start] = agreeing(drafted[b][:n], known[at:])
            seen[at - start] = told[b][0] if told[b] else None
        # nothing was committed: what was drafted is forgotten, and the next places are read from the text
        drafter.committed(wide)
    columns: Columns = {f"step_{c}/{name}": codes[i] for i, c in enumerate(STEP_COLUMNS)}
    if steps == engine.k_max:
        columns |= {f"acc/{name}": accepted, f"avail/{name}": available, **confidence_columns(name, seen)}
    return columns


def _told(drafter: Drafter, batch: Batch, ks: Sequence[int]) -> tuple[list[list[Confidence]], Proposal]:
    """Per row the confidences that the drafter tells of the tokens of its whole proposal, and the proposal."""
    told: list[list[Confidence]] = [[] for _ in ks]
    drafting = drafter.propose_steps(batch, ks)
    try:
        shown = next(drafting)
        while True:
            for b, seen in shown.items():
                if seen is not None:
                    told[b].append(seen)
            shown = drafting.send(())
    except StopIteration as done:
        return told, done.value


def agreeing(proposal: Sequence[int], text: Sequence[int]) -> int:
    """Length of the leading run on which both agree."""
    for i, (a, b) in enumerate(zip(proposal, text, strict=False)):
        if a != b:
            return i
    return min(len(proposal), len(text))


def confidence_columns(name: str, seen: Sequence[Confidence | None]) -> dict[str, NDArray[np.float32]]:
    """Entropy, top-1 and margin of the next token at each position, NaN where nothing was told."""
    nothing = Confidence(np.nan, np.nan, np.nan)
    return {f"{c}/{name}": np.array([getattr(s or nothing, c) for s in seen], np.float32) for c in CONFIDENCE}
