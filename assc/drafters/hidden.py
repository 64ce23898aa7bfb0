"""A one-layer draft that reads the target's last hidden state (see `assc.drafters.net`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from assc.batch import Batch, Row
from assc.drafters.base import Confidence, Drafter, Drafting, Proposal, finish, register_drafter
from assc.drafters.model import confidence, step_confidences
from assc.drafters.net import HiddenNet, LayerKV
from assc.drafters.parking import bytes_of
from assc.sampling import Noise, widen
from assc.verify import sample

BLOCK = 16
"""committed positions are encoded in forwards of exactly this many columns"""
NARROW = 4
"""columns where no more positions are lacking, on a CPU: its bits are the same from 4 columns on (assc/attention.py)"""


@dataclass
class _Start:
    """What a row drafts from: logits [N] of the next position and the feature [H] behind them."""

    logits: Tensor
    feature: Tensor


@register_drafter("hidden")
class HiddenDrafter(Drafter):
    """Drafts with `HiddenNet` over its own static buffers of one layer.

    Committed positions are encoded from the target's true states, in blocks of `BLOCK` (or `NARROW`) columns that end
    at the last committed token; what a block feeds again it writes again unchanged. So a proposal depends on the
    committed text alone, not on where rounds began. Only the tokens drafted behind it use the layer's own features.
    The chain never waits for the host.
    """

    has_confidence = True
    has_step_confidence = True
    gives_q = True
    needs_hidden = True
    keeps = "committed"

    def __init__(self, net: HiddenNet, name: str = "hidden") -> None:
        self.name = name
        self.net = net
        self._kv: LayerKV | None = None
        self._encoded: list[int] = []
        """per row: committed positions that were encoded from true states"""
        self._starts: dict[int, _Start] = {}
        self._noise: dict[int, Noise] = {}
        self._work: list[list[int]] = []

    def begin(self, batch: Batch) -> None:
        assert batch.hidden is not None, "the engine keeps the target's hidden states for drafters that need them"
        self._kv = None  # made when it first drafts: a draft that is never chosen needs no buffers
        self._encoded = [0] * batch.size
        # rows that share a noise (the recorder's do) share its part as well
        parts = {id(n): n.of(self.net.token_ids) for row in batch.rows if (n := row.noise) is not None}
        self._noise = {b: parts[id(row.noise)] for b, row in enumerate(batch.rows) if row.noise is not None}
        self._reset_round(batch)

    def _reset_round(self, batch: Batch) -> None:
        self._starts = {}
        self._work = [[0, 0] for _ in batch.rows]

    @torch.inference_mode()
    def peek(self, batch: Batch, rows: Sequence[int]) -> dict[int, Confidence]:
        self._catch_up(batch, rows)
        return {b: confidence(self._starts[b].logits) for b in rows}

    def propose(self, batch: Batch, ks: Sequence[int]) -> Proposal:
        return finish(self._chain(batch, ks, watched=False))

    def propose_steps(self, batch: Batch, ks: Sequence[int]) -> Drafting:
        return self._chain(batch, ks, watched=True)

    @torch.inference_mode()
    def _chain(self, batch: Batch, ks: Sequence[int], *, watched: bool) -> Drafting:
        ks, width = list(ks), max(ks)
        rows = [b for b, k in enumerate(ks) if k > 0]
        self._catch_up(batch, rows)
        needs_q = any(r.params.mode == "rejection" and not r.params.greedy for r in batch.rows)
        tokens = batch.ids.new_zeros(batch.size, width)
        exact = torch.float64 if self.net.fc.dtype == torch.float64 else torch.float32  # as `widen` makes it
        shape = (batch.size, width, batch.rows[0].vocab_size)
        q = torch.zeros(shape, dtype=exact, device=batch.device) if needs_q else None
        starts = [self._starts.get(b) for b in range(batch.size)]
        spare = self.net.fc.new_zeros(self.net.shape.hidden_size)
        features = torch.stack([spare if s is None else s.feature for s in starts])[:, None]
        logits: list[Tensor | None] = [None if s is None else s.logits for s in starts]
        first = batch.positions([row.length for row in batch.rows], 1)
        planned = torch.tensor(ks).to(batch.device, non_blocking=True)[:, None]
        kv = self._kv
        for j in range(width):
            going, choices = list[int](), list[Tensor]()
            for b in rows:
                scores = logits[b]
                if j < ks[b] and scores is not None:
                    choice = self._choose(batch, batch.rows[b], b, j, scores, tokens, q)
                    tokens[b, j] = self.net.token_ids[choice]
                    going.append(b)
                    choices.append(choice)
                    self._work[b][0] += j > 0
                    # a constraint may have no answer behind an end token, and nothing there would ever be used
                    row = batch.rows[b]
                    if not row.draft_chain.prefix_free and int(tokens[b, j]) in row.stopper.eos_ids:
                        ks[b] = j + 1
            if watched and going:
                seen = step_confidences([s for b in going if (s := logits[b]) is not None], choices)
                for b in (yield dict(zip(going, seen, strict=True))):
                    ks[b] = j + 1
            if j + 1 < max(ks):
                junk = batch.kv.length - 1
                positions = first + j if batch.size == 1 else torch.where(j + 1 < planned, first + j, junk)
                assert kv is not None, "catching up made it"
                features = kv.forward(tokens[:, j : j + 1], features, positions)
                logits = list(self.net.logits(features[:, 0]).unbind(0))
        return Proposal(tokens, ks, q, [w[0] for w in self._work], [w[1] for w in self._work])

    def _catch_up(self, batch: Batch, rows: Sequence[int]) -> None:
        """Encode the committed positions that the buffers of `rows` lack, up to the last committed token."""
        assert batch.hidden is not None
        rows = [b for b in rows if b not in self._starts]
        if not rows:
            return
        if self._kv is None:
            self._kv = LayerKV(self.net, batch.size, batch.kv.length)
        lengths = [row.length for row in batch.rows]
        lacking = max(lengths[b] - self._encoded[b] for b in rows)
        size = NARROW if lacking <= NARROW and batch.device.type == "cpu" else BLOCK
        # at least one block: asked again where nothing was committed since (the recorder does), it answers the same
        blocks = max(1, -(-lacking // size))
        features = torch.empty(0)
        wanted = torch.tensor([b in rows for b in range(batch.size)]).to(batch.device, non_blocking=True)[:, None]
        for i in range(blocks, 0, -1):
            at = batch.positions([n - i * size for n in lengths], size)
            tokens = batch.ids.gather(1, at.clamp(min=0))
            before = (at - 1).clamp(min=0)[..., None].expand(-1, -1, batch.hidden.shape[2])
            given = batch.hidden.gather(1, before) * (at > 0)[..., None]
            # columns in front of the text, and rows that are not wanted, write to the slot that nobody reads
            at = torch.where(wanted & (at >= 0), at, batch.kv.length - 1)
            features = self._kv.forward(tokens, given, at)[:, -1]
        logits = self.net.logits(features)
        for b in rows:
            self._starts[b] = _Start(logits[b], features[b])
            self._work[b][0] += 1
            self._work[b][1] += max(0, lengths[b] - self._encoded[b] - 1)
            self._encoded[b] = lengths[b]

    def _choose(
        self, batch: Batch, row: Row, b: int, j: int, logits: Tensor, tokens: Tensor, q: Tensor | None
    ) -> Tensor:
        """The draft token of row b at step j, as an index into the trimmed head, drawn as the target would draw it."""
        ids, position = self.net.token_ids, row.length + j
        scores = widen(logits)
        if row.draft_chain.members and row.draft_chain.prefix_free:
            scores = row.draft_chain.block(scores[None])[0]
        elif row.draft_chain.members:  # processors index by token id: give them the whole vocabulary
            whole = scores.new_full((1, row.vocab_size), -torch.inf)
            whole[0, ids] = scores
            prefix = torch.cat([batch.ids[b : b + 1, : row.length], tokens[b : b + 1, :j]], dim=1)
            # a constraint may allow nothing that the head knows; any proposal will do then
            scores = row.draft_chain(prefix, whole)[0, ids].clamp(min=torch.finfo(scores.dtype).min)
        if row.params.greedy:
            return scores.argmax()
        if row.params.mode == "gumbel":
            return (scores + self._noise[b].gumbel("target", position)).argmax()
        p = scores.softmax(-1)
        if q is not None:
            q[b, j, ids] = p.to(q.dtype)
        return sample(p, self._noise[b].gumbel("draft", position, row.rounds))

    def work(self, row: int) -> tuple[int, int]:
        steps, catch_up = self._work[row]
        return steps, catch_up

    def committed(self, batch: Batch) -> None:
        # what was encoded from true states stays true; drafted slots behind it are encoded again before they are read
        for b, noise in self._noise.items():
            noise.forget(batch.rows[b].length)
        self._reset_round(batch)

    def weights(self) -> list[Tensor]:
        return [t for t in (*self.net.parameters(), *self.net.buffers()) if t.is_floating_point()]

    def parameter_bytes(self) -> int:
        return self.parking.bytes if self.parking.away else bytes_of([*self.net.parameters(), self.net.head])

    def buffer_bytes(self) -> int:
        return self._kv.memory_bytes() if self._kv is not None else 0

    def forget(self) -> None:
        self._kv, self._starts = None, {}
        self._encoded = [0] * len(self._encoded)
