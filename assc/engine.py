"""The decode round: draft K, verify once, accept the leading run, clip to stop and budget, commit."""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from assc.admission import admit
from assc.batch import Batch, Row
from assc.core import Action, Request
from assc.drafters.base import Confidence, Drafter, Proposal
from assc.drafters.merge import merge
from assc.drafters.pool import DrafterPool
from assc.errors import RequestError
from assc.groups import check_chunks, check_k_max, judged
from assc.kv import ModelRunner, bucket_length
from assc.steps import Decision
from assc.timing import PhaseTimer
from assc.verification import Verdict, Verification


@dataclass(frozen=True)
class RowOutcome:
    """What one round did to one row."""

    drafted: int
    accepted: int
    tokens: tuple[int, ...]
    draft_steps: int = 0
    catch_up: int = 0
    groups: tuple[int, ...] = ()
    """columns of each target forward, empty where verification is not chunked"""
    discarded: int = 0
    """drafted tokens that the target never judged: of a draft rolled back, or of groups that had no turn"""


Steps = Generator[Mapping[int, Confidence | None], Mapping[int, Decision], list[RowOutcome]]
"""A round token by token: yields the rows that have just drafted one, is sent a decision for each of them."""


class Engine:
    """Decodes batches of requests with a target and any number of named drafters.

    `k_max` bounds K. `fixed_width` pads every verification to k_max + 1 columns, for devices whose kernels give
    other bits for another number of rows (to those of one group where there are several). `lazy_verify` judges position
    by position (see `assc.verify.verify`). `chunks` is the number of groups in which drafted tokens are verified
    (`assc.groups`); it may be changed between rounds. A drafter that was not asked for `unload_after` rounds is
    unloaded (None: never), and brought back in the round that asks it; both are part of that round's drafting.
    """

    def __init__(
        self,
        target: ModelRunner,
        drafters: Sequence[Drafter],
        *,
        k_max: int = 16,
        eos_ids: Sequence[int] = (),
        tokenizer: Any = None,
        fixed_width: bool | None = None,
        lazy_verify: bool | None = None,
        chunks: int = 1,
        unload_after: int | None = None,
    ) -> None:
        check_k_max(k_max)
        check_chunks(chunks, k_max)
        self.target = target
        self.pool = DrafterPool(drafters, target, unload_after)
        self.drafters: dict[str, Drafter] = self.pool.drafters
        self._hidden = any(d.needs_hidden for d in drafters)
        self.k_max = k_max
        self.chunks = chunks
        self.eos_ids = tuple(eos_ids)
        self.tokenizer = tokenizer
        self._served: weakref.ref[Batch] | None = None
        self.device = target.device
        on_cuda = self.device.type == "cuda"
        self.fixed_width = on_cuda if fixed_width is None else fixed_width
        self.lazy_verify = not on_cuda if lazy_verify is None else lazy_verify

    # -- a batch begins ------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def start(self, requests: Sequence[Request], extras: Mapping[str, Any] | None = None) -> Batch:
        """Check the requests, allocate buffers, prefill all but the last prompt token of each row."""
        rows = [self._admit(request, extras or {}) for request in requests]
        length = bucket_length(max(row.prompt_length + row.budget for row in rows))
        ids = torch.zeros(len(rows), length, dtype=torch.long)
        for b, row in enumerate(rows):
            ids[b, : row.length] = torch.tensor(row.tokens)
        batch = Batch(rows, self.target.new_cache(len(rows), length), ids.to(self.device), self.device)
        # shorter rows write garbage behind their prompt, which later writes replace before anything reads it
        longest = max(row.length for row in rows) - 1
        if self._hidden:
            shape = (len(rows), length, self.target.hidden_size)
            batch.hidden = torch.zeros(shape, dtype=self.target.dtype, device=self.device)
        self.target.prefill(batch.kv, batch.ids[:, :longest], keep_hidden=batch.keep_hidden if self._hidden else None)
        self._serve(batch)
        return batch

    def _serve(self, batch: Batch) -> None:
        """Drafters hold the state of one batch: when batches take turns, they begin again with the one at hand."""
        if self._served is None or self._served() is not batch:
            for drafter in self.drafters.values():
                drafter.begin(batch)
            self._served = weakref.ref(batch)

    def check_request(self, request: Request, extras: Mapping[str, Any] | None = None) -> None:
        """Raise `RequestError` if `start` would refuse the request."""
        self._admit(request, extras or {})

    def _admit(self, request: Request, extras: Mapping[str, Any]) -> Row:
        return admit(request, extras, target=self.target, eos_ids=self.eos_ids, tokenizer=self.tokenizer)

    def check(self, action: Action) -> None:
        """Raise `RequestError` for an action that this engine cannot play."""
        if action.k > self.k_max:
            raise RequestError(f"K={action.k} is above K_max={self.k_max} of this decoder")
        if action.drafter is not None and action.drafter not in self.drafters:
            known = ", ".join(self.drafters) or "none"
            raise RequestError(f"unknown drafter {action.drafter!r}; this decoder has {known}")

    # -- one round -----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def round(self, batch: Batch, actions: Sequence[Action], timer: PhaseTimer) -> list[RowOutcome]:
        """Play one round of every row that has not finished; finished rows return an empty outcome."""
        asked = self._asked(batch, actions)
        with timer.phase("draft"):
            parts = {name: self.pool.awake(name).propose(batch, ks) for name, ks in asked.items()}
            proposal = merge(batch, self.drafters, actions, asked, parts, frozenset())
        return self._finish(batch, proposal, timer)

    @torch.inference_mode()
    def steps(self, batch: Batch, actions: Sequence[Action], timer: PhaseTimer) -> Steps:
        """`round`, with a decision for each row after each of its drafted tokens.

        A row that verifies or rolls back drafts no more; the round goes on once no row drafts.
        """
        asked = self._asked(batch, actions)
        parts: dict[str, Proposal] = {}
        rolled: set[int] = set()
        for name, ks in asked.items():
            with timer.phase("draft"):
                drafting = self.pool.awake(name).propose_steps(batch, ks)
            answer: Iterable[int] | None = None
            while name not in parts:
                with timer.phase("draft"):
                    try:
                        shown = next(drafting) if answer is None else drafting.send(answer)
                    except StopIteration as done:
                        parts[name] = done.value
                        break
                decisions = yield shown
                rolled |= {b for b, decision in decisions.items() if decision is Decision.ROLLBACK}
                answer = [b for b, decision in decisions.items() if decision is not Decision.CONTINUE]
        with timer.phase("draft"):
            proposal = merge(batch, self.drafters, actions, asked, parts, rolled)
        return self._finish(batch, proposal, timer)

    def _asked(self, batch: Batch, actions: Sequence[Action]) -> dict[str, list[int]]:
        """Drafter -> tokens that each row wants of it at most, for the drafters that are asked at all."""
        for action in actions:
            self.check(action)
        self._serve(batch)
        asked: dict[str, list[int]] = {}
        for b, (row, action) in enumerate(zip(batch.rows, actions, strict=True)):
            k = 0 if row.finish else min(action.k, row.k_limit)
            if k and action.drafter is not None:
                asked.setdefault(action.drafter, [0] * batch.size)[b] = k
        return asked

    def _finish(self, batch: Batch, proposal: Proposal, timer: PhaseTimer) -> list[RowOutcome]:
        with timer.phase("verify"):
            verdicts = self._verify(batch, proposal)
        outcomes = []
        for b, row in enumerate(batch.rows):
            verdict = verdicts[b]
            outcomes.append(self._commit(batch, b, verdict, proposal) if verdict else RowOutcome(0, 0, ()))
            row.rounds += 1
        for drafter in self.drafters.values():
            drafter.committed(batch)
        if self.pool.unload_after is not None:
            with timer.phase("draft"):
                self.pool.round_over()
        return outcomes

    def _verify(self, batch: Batch, proposal: Proposal) -> list[Verdict | None]:
        verification = Verification(self.target, batch, proposal, self.lazy_verify)
        if self.chunks == 1:
            return verification.at_once(self.k_max if self.fixed_width else None)
        return verification.in_groups(self.chunks, -(-self.k_max // self.chunks) + 1 if self.fixed_width else None)

    def _commit(self, batch: Batch, b: int, verdict: Verdict, proposal: Proposal) -> RowOutcome:
        """Append the accepted run and its successor up to the first stop."""
        tokens, logits, groups = verdict.tokens, verdict.logits, verdict.groups
        row, start = batch.rows[b], batch.rows[b].length
        batch.ids[b, start : start + len(tokens)] = torch.tensor(tokens).to(self.device)
        for j, token in enumerate(tokens):
            row.tokens.append(token)
            prefix = batch.ids[b : b + 1, : row.length]
            row.finish = row.stopper.check(token, prefix, logits[j][None])
            if row.finish is None and row.remaining <= 0:
                row.finish = "context" if row.cut_by_context else "length"
            if row.finish is not None:
                break
        emitted = row.length - start
        if row.logprobs is not None:
            scores = logits[:emitted].float().log_softmax(-1)
            picked = torch.tensor(row.tokens[start:], device=scores.device)[:, None]
            row.logprobs.extend(scores.gather(1, picked)[:, 0].tolist())
        row.last_logits = logits[emitted - 1]
        if row.noise is not None:
            row.noise.forget(row.length)
        drafted = judged(proposal.lengths[b], groups) if groups else proposal.lengths[b]
        return RowOutcome(
            drafted=drafted,
            accepted=min(len(tokens) - 1, emitted),
            tokens=tuple(row.tokens[start:]),
            draft_steps=proposal.steps[b],
            catch_up=proposal.catch_up[b],
            groups=groups,
            discarded=proposal.discarded[b] + proposal.lengths[b] - drafted,
        )

    # -- what a decision may look at -------------------------------------------------------------------------------

    @property
    def peeker(self) -> Drafter | None:
        """The drafter that `peek` asks: the first that can tell its confidence."""
        return next((d for d in self.drafters.values() if d.has_confidence), None)

    @torch.inference_mode()
    def peek(self, batch: Batch, rows: Sequence[int]) -> dict[int, Confidence]:
        """The next-position confidence of the first drafter that has one."""
        self._serve(batch)
        return self.pool.awake(self.peeker.name).peek(batch, rows) if self.peeker is not None else {}

    def match_length(self, batch: Batch, row: int) -> int | None:
        """The longest suffix match that any drafter reports."""
        self._serve(batch)
        found = [m for d in self.drafters.values() if (m := d.match_length(batch, row)) is not None]
        return max(found) if found else None
