"""The decode round: draft K, verify once, accept the leading run, clip to stop and budget, commit."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from assc.batch import Batch, Row
from assc.core import Action, Request
from assc.drafters.base import Confidence, Drafter, Proposal
from assc.drafters.pool import DrafterPool
from assc.errors import RequestError
from assc.groups import check_chunks, check_k_max, group_columns, judged
from assc.kv import ModelRunner, bucket_length
from assc.sampling import LogitsChain, Noise, SamplingParams
from assc.steps import Decision
from assc.stopping import Stopper, StoppingCriterion
from assc.timing import PhaseTimer
from assc.verify import VerifyContext, verify


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


@dataclass
class _Verdict:
    """What verification found for one row: the accepted run and its successor, and the logits [tokens or more, V]."""

    tokens: list[int]
    logits: Tensor
    groups: tuple[int, ...] = ()


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
        rows = [self._row(request, dict(extras or {})) for request in requests]
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
        self._row(request, dict(extras or {}))

    def _row(self, request: Request, extras: dict[str, Any]) -> Row:
        if not request.prompt_ids:
            raise RequestError("the prompt is empty; give at least one token")
        _check_integer("max_new_tokens", request.max_new_tokens, 1)
        _check_integer("seed", request.seed)  # the lowest 64 bits count
        vocab = self.target.vocab_size
        if not all(0 <= t < vocab for t in request.prompt_ids):
            raise RequestError(f"the prompt holds token ids outside the target's vocabulary 0..{vocab - 1}")
        room = request.max_new_tokens
        if self.target.max_positions is not None:
            room = self.target.max_positions - len(request.prompt_ids)
            if room < 1:
                raise RequestError(
                    f"the prompt has {len(request.prompt_ids)} tokens, the target takes at most "
                    f"{self.target.max_positions - 1}"
                )
        eos_ids = extras.pop("eos_ids", None)
        eos_ids = self.eos_ids if eos_ids is None else eos_ids
        criteria: Sequence[StoppingCriterion] = extras.pop("criteria", ())
        stop: Sequence[str] = extras.pop("stop", ())
        want_logprobs = extras.pop("logprobs", False)
        params = _params(dict(request.sampling))
        if not all(0 <= t < vocab for t in params.logit_bias):
            raise RequestError(f"logit_bias names token ids outside the target's vocabulary 0..{vocab - 1}")
        chain = LogitsChain.build(
            params, prompt_length=len(request.prompt_ids), eos_ids=eos_ids, device=self.target.device
        )
        return Row(
            request=request,
            params=params,
            chain=chain,
            draft_chain=chain.for_draft(),
            noise=None if params.greedy else Noise(request.seed, vocab, self.device),
            stopper=Stopper(eos_ids=eos_ids, stop=stop, criteria=criteria, tokenizer=self.tokenizer),
            tokens=list(request.prompt_ids),
            prompt_length=len(request.prompt_ids),
            budget=min(request.max_new_tokens, room),
            vocab_size=vocab,
            cut_by_context=room < request.max_new_tokens,
            logprobs=[] if want_logprobs else None,
        )

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
            proposal = self._merged(batch, actions, asked, parts, frozenset())
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
            proposal = self._merged(batch, actions, asked, parts, rolled)
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
            verdicts = self._verify(batch, proposal) if self.chunks == 1 else self._verify_groups(batch, proposal)
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

    def _merged(
        self,
        batch: Batch,
        actions: Sequence[Action],
        asked: Mapping[str, Sequence[int]],
        parts: Mapping[str, Proposal],
        rolled: Collection[int],
    ) -> Proposal:
        """The drafters' proposals side by side; what the rows of `rolled` drafted is left out."""
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
        one_hot = [a.drafter is not None and not self.drafters[a.drafter].gives_q for a in actions]
        return Proposal(merged.tokens, lengths, merged.q, steps, catch_up, one_hot, discarded)

    def _verify(self, batch: Batch, proposal: Proposal) -> list[_Verdict | None]:
        """One target forward over [last committed token, drafted tokens] of every row; None for finished rows."""
        width = self.k_max if self.fixed_width else max(proposal.lengths)
        self._write_drafts(batch, proposal, width)
        logits = self._score(batch, [row.length - 1 for row in batch.rows], width + 1)
        verdicts = [
            self._judge(batch, b, logits[b], proposal, 0, proposal.lengths[b] + 1) if not row.finish else None
            for b, row in enumerate(batch.rows)
        ]
        # the round's synchronisation
        return [None if v is None else _Verdict(_to_host(*v), logits[b]) for b, v in enumerate(verdicts)]

    def _verify_groups(self, batch: Batch, proposal: Proposal) -> list[_Verdict | None]:
        """The same group by group (`assc.groups`): rows that are decided sit the other groups out."""
        self._write_drafts(batch, proposal, max(proposal.lengths))
        plans = [group_columns(k, self.chunks) for k in proposal.lengths]
        going = [b for b, row in enumerate(batch.rows) if not row.finish]
        verdicts: list[_Verdict | None] = [None if row.finish else _Verdict([], _NOTHING) for row in batch.rows]
        parts: list[list[Tensor]] = [[] for _ in batch.rows]
        group, junk = 0, batch.kv.length - 1
        while going:
            fed = [sum(plan[:group]) for plan in plans]
            width = max(plans[b][group] for b in going)
            if self.fixed_width:
                width = -(-self.k_max // self.chunks) + 1
            starts = [row.length - 1 + fed[b] if b in going else junk for b, row in enumerate(batch.rows)]
            logits = self._score(batch, starts, width)
            found = {b: self._judge(batch, b, logits[b], proposal, fed[b], plans[b][group]) for b in going}
            for b, (accepted, tokens) in found.items():
                verdict, columns = verdicts[b], plans[b][group]
                assert verdict is not None
                new = _to_host(accepted, tokens)
                parts[b].append(logits[b, :columns])
                verdict.groups = plans[b][: group + 1]
                last = group + 1 == len(plans[b])
                # another group has its turn only if this one accepted all of its tokens and none of them ends the text
                ended = any(t in batch.rows[b].stopper.eos_ids for t in new[:columns])
                if not last and not ended and int(accepted) == columns:
                    verdict.tokens += new[:columns]
                else:
                    verdict.tokens += new
                    going = [other for other in going if other != b]
            group += 1
        for verdict, part in zip(verdicts, parts, strict=True):
            if verdict is not None:
                verdict.logits = part[0] if len(part) == 1 else torch.cat(part)
        return verdicts

    def _write_drafts(self, batch: Batch, proposal: Proposal, width: int) -> None:
        """Put `width` drafted tokens behind the committed ones of every row."""
        if width:
            drafted = torch.nn.functional.pad(proposal.tokens, (0, max(0, width - proposal.tokens.shape[1])))[:, :width]
            batch.ids.scatter_(1, batch.positions([row.length for row in batch.rows], width), drafted)

    def _score(self, batch: Batch, starts: Sequence[int], columns: int) -> Tensor:
        """One target forward over `columns` tokens from each row's start; logits [B, columns, V]."""
        ids, positions = batch.slices(starts, columns)
        logits = self.target.forward(batch.kv, ids, positions, hidden=self._hidden)
        if self._hidden:
            batch.keep_hidden(positions, self.target.last_hidden)
        return logits

    def _judge(
        self, batch: Batch, b: int, logits: Tensor, proposal: Proposal, first: int, columns: int
    ) -> tuple[int | Tensor, Tensor]:
        """Judge the drafted tokens from `first` on by the first `columns` rows of `logits`."""
        row = batch.rows[b]
        part = slice(first, min(first + columns, proposal.lengths[b]))
        context = VerifyContext(
            row.params,
            row.chain,
            row.noise,
            batch.ids[b : b + 1],
            row.length + first,
            row.rounds,
            row.stopper.eos_ids,
        )
        q = None if proposal.q is None or proposal.one_hot[b] else proposal.q[b, part]
        return verify(context, logits[:columns], proposal.tokens[b, part], q, lazy=self.lazy_verify)

    def _commit(self, batch: Batch, b: int, verdict: _Verdict, proposal: Proposal) -> RowOutcome:
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


_NOTHING = torch.empty(0)


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


def _to_host(accepted: int | Tensor, tokens: Tensor) -> list[int]:
    """The accepted run and the token behind it, as ints."""
    if isinstance(accepted, int):
        return [int(t) for t in tokens[: accepted + 1].tolist()]
    count, *values = torch.cat([accepted.reshape(1), tokens]).tolist()
    return [int(t) for t in values[: int(count) + 1]]
