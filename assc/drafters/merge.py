"""One proposal out of those of several drafters: each row of a batch chooses its own."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from assc.batch import Batch
from assc.core import Action
from assc.drafters.base import Drafter, Proposal


def merge(
    batch: Batch,
    drafters: Mapping[str, Drafter],
    actions: Sequence[Action],
    asked: Mapping[str, Sequence[int]],
    parts: Mapping[str, Proposal],
    rolled: Collection[int],
) -> Proposal:
    """The proposals `parts` of several drafters side by side, [B, widest]; drafts of the rows of `rolled` are left out.

    `asked` are the tokens that each row wanted of each drafter. `RuntimeError` for a drafter that proposed more.
    """
    width = max([1, *(k for ks in asked.values() for k in ks)])
    merged = Proposal(batch.ids.new_zeros(batch.size, width), [0] * batch.size, None, [], [])
    lengths, steps, catch_up = [0] * batch.size, [0] * batch.size, [0] * batch.size
    discarded = [0] * batch.size
    for name, own in asked.items():
        part = parts[name]
        for b in (b for b, k in enumerate(own) if k):
            n = part.lengths[b]
            if n > own[b]:
                raise RuntimeError(f"drafter {name!r} proposed {n} tokens where at most {own[b]} were asked for")
            steps[b], catch_up[b] = (part.steps[b], part.catch_up[b]) if part.steps else (0, 0)
            if b in rolled:
                discarded[b] = n
                continue
            lengths[b] = n
            merged.tokens[b, :n] = part.tokens[b, :n]
            if part.q is not None:
                if merged.q is None:
                    merged.q = part.q.new_zeros(batch.size, width, part.q.shape[2])
                merged.q[b, :n] = part.q[b, :n]
    one_hot = [a.drafter is not None and not drafters[a.drafter].gives_q for a in actions]
    return Proposal(merged.tokens, lengths, merged.q, steps, catch_up, one_hot, discarded)
