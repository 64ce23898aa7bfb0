"""Verification of a batch: target forwards over the drafted tokens of every row, and what they say of each row.

How a single row is judged is `assc.verify`; here is which columns are fed, at once or group by group (`assc.groups`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from assc.batch import Batch
from assc.drafters.base import Proposal
from assc.groups import group_columns
from assc.kv import ModelRunner
from assc.verify import VerifyContext, verify


@dataclass
class Verdict:
    """What verification found for one row: the accepted run and its successor, and the logits [tokens or more, V]."""

    tokens: list[int]
    logits: Tensor
    groups: tuple[int, ...] = ()
    """columns of each target forward, empty where verification is not chunked"""


@dataclass(frozen=True)
class Verification:
    """One round's verification of `proposal` by `target`; `lazy` as in `assc.verify.verify`."""

    target: ModelRunner
    batch: Batch
    proposal: Proposal
    lazy: bool

    def at_once(self, width: int | None = None) -> list[Verdict | None]:
        """One target forward over [last committed token, drafted tokens] of every row; None for finished rows.

        `width` are the drafted tokens that every row is padded to, None: the longest draft.
        """
        batch, lengths = self.batch, self.proposal.lengths
        width = max(lengths) if width is None else width
        self._write_drafts(width)
        logits = self._score([row.length - 1 for row in batch.rows], width + 1)
        verdicts = [
            self._judge(b, logits[b], 0, lengths[b] + 1) if not row.finish else None for b, row in enumerate(batch.rows)
        ]
        # the round's synchronisation
        return [None if v is None else Verdict(_to_host(*v), logits[b]) for b, v in enumerate(verdicts)]

    def in_groups(self, chunks: int, width: int | None = None) -> list[Verdict | None]:
        """The same in at most `chunks` groups: rows that are decided sit the other groups out.

        `width` are the columns that every forward is padded to, None: those of the largest group under way.
        """
        batch, lengths = self.batch, self.proposal.lengths
        self._write_drafts(max(lengths))
        plans = [group_columns(k, chunks) for k in lengths]
        going = [b for b, row in enumerate(batch.rows) if not row.finish]
        verdicts: list[Verdict | None] = [None if row.finish else Verdict([], torch.empty(0)) for row in batch.rows]
        parts: list[list[Tensor]] = [[] for _ in batch.rows]
        group, junk = 0, batch.kv.length - 1
        while going:
            fed = [sum(plan[:group]) for plan in plans]
            columns = max(plans[b][group] for b in going) if width is None else width
            starts = [row.length - 1 + fed[b] if b in going else junk for b, row in enumerate(batch.rows)]
            logits = self._score(starts, columns)
            found = {b: self._judge(b, logits[b], fed[b], plans[b][group]) for b in going}
            for b, (accepted, tokens) in found.items():
                verdict, own = verdicts[b], plans[b][group]
                assert verdict is not None
                new = _to_host(accepted, tokens)
                parts[b].append(logits[b, :own])
                verdict.groups = plans[b][: group + 1]
                last = group + 1 == len(plans[b])
                # another group has its turn only if this one accepted all of its tokens and none of them ends the text
                ended = any(t in batch.rows[b].stopper.eos_ids for t in new[:own])
                if not last and not ended and int(accepted) == own:
                    verdict.tokens += new[:own]
                else:
                    verdict.tokens += new
                    going = [other for other in going if other != b]
            group += 1
        for verdict, part in zip(verdicts, parts, strict=True):
            if verdict is not None:
                verdict.logits = part[0] if len(part) == 1 else torch.cat(part)
        return verdicts

    def _write_drafts(self, width: int) -> None:
        """Put `width` drafted tokens behind the committed ones of every row."""
        if width:
            batch, tokens = self.batch, self.proposal.tokens
            drafted = torch.nn.functional.pad(tokens, (0, max(0, width - tokens.shape[1])))[:, :width]
            batch.ids.scatter_(1, batch.positions([row.length for row in batch.rows], width), drafted)

    def _score(self, starts: Sequence[int], columns: int) -> Tensor:
        """One target forward over `columns` tokens from each row's start; logits [B, columns, V]."""
        batch, hidden = self.batch, self.batch.hidden is not None
        ids, positions = batch.slices(starts, columns)
        logits = self.target.forward(batch.kv, ids, positions, hidden=hidden)
        if hidden:
            batch.keep_hidden(positions, self.target.last_hidden)
        return logits

    def _judge(self, b: int, logits: Tensor, first: int, columns: int) -> tuple[int | Tensor, Tensor]:
        """Judge row b's drafted tokens from `first` on by the first `columns` rows of `logits`."""
        row, proposal = self.batch.rows[b], self.proposal
        part = slice(first, min(first + columns, proposal.lengths[b]))
        context = VerifyContext(
            row.params,
            row.chain,
            row.noise,
            self.batch.ids[b : b + 1],
            row.length + first,
            row.rounds,
            row.stopper.eos_ids,
        )
        q = None if proposal.q is None or proposal.one_hot[b] else proposal.q[b, part]
        return verify(context, logits[:columns], proposal.tokens[b, part], q, lazy=self.lazy)


def _to_host(accepted: int | Tensor, tokens: Tensor) -> list[int]:
    """The accepted run and the token behind it, as ints."""
    if isinstance(accepted, int):
        return [int(t) for t in tokens[: accepted + 1].tolist()]
    count, *values = torch.cat([accepted.reshape(1), tokens]).tolist()
    return [int(t) for t in values[: int(count) + 1]]
