"""Any causal language model as a drafter."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from assc.batch import Batch, Row
from assc.drafters.base import Confidence, Drafter, Drafting, Proposal, finish, register_drafter
from assc.drafters.layers import own_bytes
from assc.kv import ModelRunner, StaticKV
from assc.sampling import widen
from assc.verify import sample


def confidence(logits: Tensor) -> Confidence:
    """Entropy, largest probability and its lead over the second of softmax(logits [V]), at temperature 1.

    Logits of -inf (tokens that a cut head lacks) count as probability 0.
    """
    log_p = widen(logits).log_softmax(-1)
    p = log_p.exp()
    entropy = -(p * log_p.clamp(min=torch.finfo(log_p.dtype).min)).sum()
    top = p.topk(min(2, p.shape[-1])).values
    first, second = top[0], (top[1] if top.shape[0] > 1 else top[0] * 0)
    values = torch.stack([entropy, first, first - second]).tolist()
    return Confidence(*values)


def step_confidences(logits: Sequence[Tensor], tokens: Sequence[Tensor]) -> list[Confidence]:
    """`confidence` of several logits [V] at once, each with the probability of the token [] that was drafted from it.

    Tokens are indices into the logits; one beyond them (only the target has it) has probability 0.
    """
    log_p = widen(torch.stack(list(logits))).log_softmax(-1)
    p = log_p.exp()
    entropy = -(p * log_p.clamp(min=torch.finfo(log_p.dtype).min)).sum(-1)
    top = torch.nn.functional.pad(p, (0, 1)).topk(2, -1).values
    chosen = torch.stack(list(tokens)).to(p.device)
    known = chosen.clamp(max=p.shape[-1] - 1)
    prob = p.gather(1, known[:, None])[:, 0] * (chosen == known)
    values = torch.stack([entropy, top[:, 0], top[:, 0] - top[:, 1], prob], dim=1).tolist()
    return [Confidence(*v) for v in values]


def _known(logits: Tensor | None) -> Tensor:
    assert logits is not None, "a row that drafts has logits for its next position"
    return logits


@register_drafter("model")
class ModelDrafter(Drafter):
    """A draft model with its own static buffers, one forward per drafted token.

    After a round its buffer holds the committed tokens that it was fed; what is missing (the last draft token after
    full acceptance, everything after rollbacks, the prompt at first) is fed in one forward when it drafts again.
    The chain of forwards never waits for the host.
    """

    has_confidence = True
    has_step_confidence = True
    keeps = "drafts"
    gives_q = True

    def __init__(self, runner: ModelRunner, name: str = "model") -> None:
        self.name = name
        self.runner = runner
        self._kv: StaticKV | None = None
        self._fed: list[int] = []
        """per row: committed tokens whose keys and values are in the buffer"""
        self._fed_draft: list[int] = []
        """per row: buffer slots written in this round, from the start of the text"""
        self._logits: dict[int, Tensor] = {}
        """per row: raw logits [V] for the position after the committed text"""
        self._work: list[list[int]] = []

    def begin(self, batch: Batch) -> None:
        self._kv = self.runner.new_cache(batch.size, batch.kv.length)
        self._fed = [0] * batch.size
        self._reset_round(batch)

    def _reset_round(self, batch: Batch) -> None:
        self._logits = {}
        self._fed_draft = list(self._fed)
        self._work = [[0, 0] for _ in batch.rows]

    def peek(self, batch: Batch, rows: Sequence[int]) -> dict[int, Confidence]:
        self._catch_up(batch, [r in rows for r in range(batch.size)])
        return {r: confidence(self._logits[r]) for r in rows}

    def propose(self, batch: Batch, ks: Sequence[int]) -> Proposal:
        return finish(self._chain(batch, ks, watched=False))

    def propose_steps(self, batch: Batch, ks: Sequence[int]) -> Drafting:
        return self._chain(batch, ks, watched=True)

    def _chain(self, batch: Batch, ks: Sequence[int], *, watched: bool) -> Drafting:
        if self.runner.max_positions is not None:  # the draft's context may be shorter than the target's
            room = [self.runner.max_positions - row.length for row in batch.rows]
            ks = [max(0, min(k, r)) for k, r in zip(ks, room, strict=True)]
        ks, width = list(ks), max(ks)
        self._catch_up(batch, [k > 0 for k in ks])
        needs_q = any(r.params.mode == "rejection" and not r.params.greedy for r in batch.rows)
        vocab = batch.rows[0].vocab_size
        tokens = batch.ids.new_zeros(batch.size, width)
        exact = torch.float64 if self.runner.dtype == torch.float64 else torch.float32  # as `widen` makes it
        q = torch.zeros(batch.size, width, vocab, dtype=exact, device=batch.device) if needs_q else None
        logits = [self._logits.get(b) for b in range(batch.size)]
        first = batch.positions([row.length for row in batch.rows], 1)
        planned = torch.tensor(ks).to(batch.device, non_blocking=True)[:, None]
        for j in range(width):
            for b, row in enumerate(batch.rows):
                if j < ks[b]:
                    tokens[b, j] = self._choose(batch, row, b, j, logits[b], tokens, q)
                    # a constraint may have no answer behind an end token, and nothing there would ever be used
                    if not row.draft_chain.prefix_free and int(tokens[b, j]) in row.stopper.eos_ids:
                        ks[b] = j + 1
            if watched and (going := [b for b, k in enumerate(ks) if j < k]):
                seen = step_confidences([_known(logits[b]) for b in going], [tokens[b, j] for b in going])
                for b in (yield dict(zip(going, seen, strict=True))):
                    ks[b] = j + 1
            if j + 1 < max(ks):
                junk = batch.kv.length - 1
                positions = first + j if batch.size == 1 else torch.where(j + 1 < planned, first + j, junk)
                logits = self._step(batch, tokens[:, j : j + 1], positions, [j + 1 < k for k in ks])
        return Proposal(tokens, ks, q, [w[0] for w in self._work], [w[1] for w in self._work])

    def _choose(
        self, batch: Batch, row: Row, b: int, j: int, logits: Tensor | None, tokens: Tensor, q: Tensor | None
    ) -> Tensor:
        """The draft token of row b at step j, drawn as the target would draw it, from the draft's distribution."""
        scores = widen(_known(logits)).to(batch.device)[None, : row.vocab_size]
        missing = row.vocab_size - scores.shape[1]
        if missing:  # ids that only the target has: never proposed, but processors may name them
            scores = torch.nn.functional.pad(scores, (0, missing), value=torch.finfo(scores.dtype).min)
        if row.draft_chain.members:
            prefix = batch.ids[b : b + 1, : row.length]
            scores = row.draft_chain(torch.cat([prefix, tokens[b : b + 1, :j]], dim=1), scores)
            # a constraint may allow nothing that a cut head knows; any proposal will do then
            scores = scores.clamp(min=torch.finfo(scores.dtype).min)
        position = row.length + j
        if row.params.greedy:
            return scores[0].argmax()
        assert row.noise is not None
        if row.params.mode == "gumbel":
            return (scores[0] + row.noise.gumbel("target", position)).argmax()
        p = scores[0].softmax(-1)
        if q is not None:
            q[b, j] = p
        return sample(p, row.noise.gumbel("draft", position, row.rounds))

    def _catch_up(self, batch: Batch, wanted: Sequence[bool]) -> None:
        """Feed the committed tokens that the buffers of the wanted rows lack, the last one included."""
        assert self._kv is not None
        rows = [b for b, want in enumerate(wanted) if want and b not in self._logits]
        if not rows:
            return
        lengths = [row.length for row in batch.rows]
        missing = {b: lengths[b] - self._fed[b] for b in rows}
        width = max(missing.values())
        if batch.size == 1 and width > 2:  # cold: the prompt, or a long run of rollbacks
            ids = batch.ids[:, self._fed[0] : lengths[0]].to(self.runner.device)
            ids = ids.clamp(max=self.runner.vocab_size - 1)
            last = self.runner.prefill(self._kv, ids, self._fed[0])
            assert last is not None
            self._logits[0] = last[0]
        else:
            # rows that are not wanted, or lack less, feed tokens again from further back: same keys, same values
            starts = [max(0, lengths[b] - width) if b in missing else self._kv.length - 1 for b in range(batch.size)]
            ids, positions = batch.slices(starts, width)
            logits = self._forward(ids, positions)
            for b in rows:
                self._logits[b] = logits[b, lengths[b] - 1 - starts[b]]
        for b in rows:
            self._fed[b] = self._fed_draft[b] = lengths[b]
            self._work[b][0] += 1
            self._work[b][1] += missing[b] - 1

    def _step(self, batch: Batch, last: Tensor, positions: Tensor, active: Sequence[bool]) -> list[Tensor | None]:
        """Feed one drafted token [B, 1] per row; rows that are not active write to the junk slot."""
        logits = self._forward(last, positions)
        for b, on in enumerate(active):
            if on:
                self._fed_draft[b] += 1
                self._work[b][0] += 1
        return [logits[b, -1] if on else None for b, on in enumerate(active)]

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        assert self._kv is not None
        # an id that only the target's larger vocabulary has is unknown here: any id will do, verification decides
        ids = ids.to(self.runner.device).clamp(max=self.runner.vocab_size - 1)
        return self.runner.forward(self._kv, ids, positions.to(self.runner.device))

    def work(self, row: int) -> tuple[int, int]:
        steps, catch_up = self._work[row]
        return steps, catch_up

    def committed(self, batch: Batch) -> None:
        # Everything fed up to the last committed token is right except that token itself: a correction or bonus
        # is never in the buffer, so the valid part ends at length - 1.
        self._fed = [min(fed, row.length - 1) for fed, row in zip(self._fed_draft, batch.rows, strict=True)]
        self._reset_round(batch)

    def weights(self) -> list[Tensor]:
        model = self.runner.model
        return [t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()]

    def parameter_bytes(self) -> int:
        return self.parking.bytes if self.parking.away else own_bytes(self.runner.model)

    def buffer_bytes(self) -> int:
        return self._kv.memory_bytes() if self._kv is not None else 0

    def forget(self) -> None:
        if self._kv is not None:
            self._kv = self.runner.new_cache(self._kv.rows, self._kv.length)
            self._fed = [0] * self._kv.rows
            self._fed_draft, self._logits = list(self._fed), {}
