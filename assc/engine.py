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
from assc.errors import RequestError
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
    discarded: int = 0


Steps = Generator[Mapping[int, Confidence | None], Mapping[int, Decision], list[RowOutcome]]
"""A round token by token: yields the rows that have just drafted one, is sent a decision for each of them."""


class Engine:
    """Decodes batches of requests with a target and any number of named drafters.

    `k_max` bounds K. `fixed_width` pads every verification to k_max + 1 columns, for devices whose kernels give
    other bits for another number of rows. `lazy_verify` judges position by position (see `assc.verify.verify`).
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
    ) -> None:
        if k_max < 1:
            raise RequestError(f"K_max is {k_max}, allowed is 1 or more")
        if len({d.name for d in drafters}) != len(drafters):
            raise RequestError(f"two drafters share a name: {[d.name for d in drafters]}")
        self.target = target
        self.drafters: dict[str, Drafter] = {d.name: d for d in drafters}
        self._hidden = any(d.needs_hidden for d in drafters)
        self.k_max = k_max
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
            parts = {name: self.drafters[name].propose(batch, ks) for name, ks in asked.items()}
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
            drafting = self.drafters[name].propose_steps(batch, ks)
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
            logits = self._score(batch, proposal)
            verdicts = [
                self._judge(batch, b, logits[b], proposal) if not row.finish else None
                for b, row in enumerate(batch.rows)
            ]
            committed = [None if v is None else _to_host(*v) for v in verdicts]  # the round's synchronisation
        outcomes = []
        for b, row in enumerate(batch.rows):
            tokens = committed[b]
            outcomes.append(self._commit(batch, b, tokens, logits[b], proposal) if tokens else RowOutcome(0, 0, ()))
            row.rounds += 1
        for drafter in self.drafters.values():
            drafter.committed(batch)
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

    def _score(self, batch: Batch, proposal: Proposal) -> Tensor:
        """One target forward over [last committed token, drafted tokens] of every row; logits [B, Q, V]."""
        width = self.k_max if self.fixed_width else max(proposal.lengths)
        starts = [row.length - 1 for row in batch.rows]
        if width:
            drafted = torch.nn.functional.pad(proposal.tokens, (0, max(0, width - proposal.tokens.shape[1])))[:, :width]
            behind = batch.positions([s + 1 for s in starts], width)
            batch.ids.scatter_(1, behind, drafted)
        ids, positions = batch.slices(starts, width + 1)
        logits = self.target.forward(batch.kv, ids, positions, hidden=self._hidden)
        if self._hidden:
            batch.keep_hidden(positions, self.target.last_hidden)
        return logits

    def _judge(self, batch: Batch, b: int, logits: Tensor, proposal: Proposal) -> tuple[int | Tensor, Tensor]:
        row, k = batch.rows[b], proposal.lengths[b]
        eos_ids = row.stopper.eos_ids
        context = VerifyContext(row.params, row.chain, row.noise, batch.ids[b : b + 1], row.length, row.rounds, eos_ids)
        q = None if proposal.q is None or proposal.one_hot[b] else proposal.q[b, :k]
        return verify(context, logits[: k + 1], proposal.tokens[b, :k], q, lazy=self.lazy_verify)

    def _commit(self, batch: Batch, b: int, tokens: list[int], logits: Tensor, proposal: Proposal) -> RowOutcome:
        """Append `tokens` (accepted run and its successor) up to the first stop."""
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
        return RowOutcome(
            drafted=proposal.lengths[b],
            accepted=min(len(tokens) - 1, emitted),
            tokens=tuple(row.tokens[start:]),
            draft_steps=proposal.steps[b],
            catch_up=proposal.catch_up[b],
            discarded=proposal.discarded[b],
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
        return self.peeker.peek(batch, rows) if self.peeker is not None else {}

    def match_length(self, batch: Batch, row: int) -> int | None:
        """The longest suffix match that any drafter reports."""
        self._serve(batch)
        found = [m for d in self.drafters.values() if (m := d.match_length(batch, row)) is not None]
        return max(found) if found else None


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
