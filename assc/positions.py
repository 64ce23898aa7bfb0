"""Rounds over a text that is known by position: the rules that replay and the synthetic source share.

They are the live decoder's: what is drafted and accepted, what a drafter must be fed again, what a peek costs, where a
request ends. Seconds always come from a `CostModel`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from assc.core import Action, FinishReason, Mode, Observation, Request, RoundRecord
from assc.costs import CostModel
from assc.errors import RequestError
from assc.groups import check_chunks, judged, played_groups
from assc.trace import CONFIDENCE, FINISHES, Header, Trace
from assc.trace_rules import budget_of, kv_slots, peek_drafter, replay_table, trace_cost_ratio

_DRAFT = frozenset({"draft_entropy", "draft_top1", "draft_margin"})
_TARGET = frozenset({"target_entropy", "target_top1"})


@dataclass(frozen=True)
class Text:
    """One request's text and what is known at each of its positions, as lists: quicker than arrays one by one."""

    tokens: tuple[int, ...]
    finish: FinishReason
    entropy: list[float]
    top1: list[float]
    match: list[int]
    acc: dict[str, list[int]]
    avail: dict[str, list[int]]
    peek: tuple[list[float], ...]
    """entropy, top-1 and margin of the drafter that a peek asks"""

    @classmethod
    def of(cls, trace: Trace, row: int) -> Text:
        c = trace.columns
        part = slice(int(c["offsets"][row]), int(c["offsets"][row + 1]))
        peeker = peek_drafter(trace.header)
        return cls(
            tokens=tuple(c["tokens"][part].tolist()),
            finish=FINISHES[int(c["finish"][row])],
            entropy=c["target_entropy"][part].tolist(),
            top1=c["target_top1"][part].tolist(),
            match=c["match"][part].tolist(),
            acc={d: c[f"acc/{d}"][part].tolist() for d in trace.drafters},
            avail={d: c[f"avail/{d}"][part].tolist() for d in trace.drafters},
            peek=tuple(c[f"{name}/{peeker}"][part].tolist() for name in CONFIDENCE) if peeker is not None else (),
        )


class PositionBackend:
    """A `Backend` over texts that are known by position; where they come from is `text_of`, for subclasses.

    The policy's own seconds are left out of the records, since they are not those of the decoding machine. `chunks` is
    the number of groups in which drafted tokens are verified (`assc.groups`).
    """

    def __init__(
        self,
        header: Header,
        cost_model: CostModel,
        *,
        k_values: Sequence[int] | None = None,
        matches: bool = True,
        chunks: int = 1,
    ) -> None:
        check_chunks(chunks, header.k_max)
        self.header = header
        self.cost_model = cost_model
        self.k_max = header.k_max
        self.chunks = chunks
        self.mode: Mode = header.mode
        self.time_source: Literal["measured", "modelled"] = "modelled"
        self.table = replay_table(header, k_values)
        self.cost_ratio = trace_cost_ratio(header, cost_model)
        self.plain_step_seconds = cost_model.plain_step()
        self.occupancy = 1.0
        self._keeps = {d.name: d.keeps for d in header.drafters}
        self._peeker = peek_drafter(header)
        self._matches = matches
        self._text: Text | None = None
        self._request: Request | None = None
        self._finish: FinishReason | None = None
        self._position = 0

    def use_costs(self, costs: CostModel, occupancy: float = 1.0) -> None:
        """Price the coming rounds with `costs`, and tell policies this share of the batch that decodes."""
        if costs is not self.cost_model or occupancy != self.occupancy:
            self.cost_model, self.occupancy = costs, occupancy
            self.cost_ratio = trace_cost_ratio(self.header, costs)

    @property
    def position(self) -> int:
        """Committed new tokens of the request under way."""
        return self._position

    @property
    def request(self) -> Request:
        """The request under way (or the last one)."""
        if self._request is None:
            raise RuntimeError("no request is running; call reset(request) first")
        return self._request

    def text_of(self, request: Request) -> Text:
        """The text of a request. Raises `RequestError` when it cannot be played."""
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """Provenance for result files."""
        h = self.header
        return {
            "backend": "replay",
            "pair": h.pair,
            "device": h.device,
            "dtype": h.dtype,
            "threads": h.threads,
            "mode": h.mode,
            "c": self.cost_ratio,
            "k_max": h.k_max,
            "chunks": self.chunks,
            "drafters": [d.name for d in h.drafters],
            "time_source": self.time_source,
            "cost_model": self.cost_model.to_json(),
        }

    def check(self, request: Request) -> None:
        """`RequestError` for a request that cannot be played."""
        if request.max_new_tokens < 1:
            raise RequestError(f"max_new_tokens is {request.max_new_tokens}, allowed is 1 or more")
        mode = request.sampling.get("mode", self.mode)
        if mode != self.mode:
            raise RequestError(f"the request asks for mode {mode!r}, this backend decodes in mode {self.mode!r}")
        self.text_of(request)

    def reset(self, request: Request) -> None:
        self.check(request)
        self._text = self.text_of(request)
        self._request = request
        self._prompt = len(request.prompt_ids)
        self._budget = budget_of(self.header, request)
        self._cut: FinishReason = "context" if self._budget < request.max_new_tokens else "length"
        self._slots = kv_slots(self._prompt + self._budget)
        self._temperature = request.temperature
        self._position = 0
        self._finish = None
        self._past: list[RoundRecord] = []
        self._fed = dict.fromkeys(self._keeps, 0)
        self._needs: frozenset[str] = frozenset()
        self._peeked: int | None = None
        """tokens that this round's peek caught up, None without a peek"""

    @property
    def done(self) -> bool:
        if self._text is None:
            raise RuntimeError("no request is running; call reset(request) first")
        return self._finish is not None

    def observe(self, needs: frozenset[str] = frozenset()) -> Observation:
        if self.done:
            raise RuntimeError("the request has ended; call reset(request)")
        text, n = self._text, self._position
        assert text is not None
        self._needs = needs
        remaining = self._budget - n
        if self._peeked is None and self._peeker is not None and not _DRAFT.isdisjoint(needs):
            length = self._prompt + n
            self._peeked = length - self._fed[self._peeker] - 1
            self._fed[self._peeker] = length
        peeked = self._peeked is not None
        target = n > 0 and not _TARGET.isdisjoint(needs)
        return Observation(
            n,
            self._prompt,
            remaining,
            min(self.k_max, remaining - 1),
            self._temperature,
            tuple(self._past),
            self.cost_ratio,
            self.occupancy,
            text.entropy[n - 1] if target else None,
            text.top1[n - 1] if target else None,
            text.peek[0][n] if peeked else None,
            text.peek[1][n] if peeked else None,
            text.peek[2][n] if peeked else None,
            text.match[n] if self._matches and "ngram_match" in needs else None,
        )

    def step(self, action: Action, *, policy_seconds: float = 0.0, reasons: tuple[str, ...] = ()) -> RoundRecord:
        if self.done:
            raise RuntimeError("the request has ended; call reset(request)")
        text, n, costs = self._text, self._position, self.cost_model
        assert text is not None
        if action.k > self.k_max:
            raise RequestError(f"K={action.k} is above K_max={self.k_max} of this trace")
        if action.drafter is not None and action.drafter not in text.acc:
            raise RequestError(f"unknown drafter {action.drafter!r}; this trace has {', '.join(text.acc)}")
        length = self._prompt + n
        drafted = accepted = steps = catch_up = 0
        draft = 0.0
        k, name, peeked = min(action.k, self._budget - n - 1), action.drafter, self._peeked
        if peeked is not None and self._peeker is not None and (k <= 0 or name != self._peeker):
            steps, catch_up = 1, peeked  # a peek whose drafter is not used is paid for all the same
            draft = costs.draft(self._peeker, 1, peeked)
        if k > 0 and name is not None:
            drafted = min(k, text.avail[name][n])
            accepted = min(drafted, text.acc[name][n])
            own_steps, own_catch_up = self._work(name, drafted, accepted, length)
            draft += costs.draft(name, own_steps, own_catch_up)
            steps, catch_up = steps + own_steps, catch_up + own_catch_up
        emitted = min(accepted + 1, len(text.tokens) - n)
        n += emitted
        if n == len(text.tokens) and text.finish not in ("length", "context"):
            self._finish = text.finish
        elif n >= self._budget:
            self._finish = self._cut
        target = not _TARGET.isdisjoint(self._needs)
        kv, discarded = costs.kv(length, self._slots), 0
        groups: tuple[int, ...] = ()
        if self.chunks == 1:
            verify = costs.verify(drafted, kv, emitted)
        else:
            groups = played_groups(drafted, self.chunks, emitted)
            verify = costs.verify_groups(groups, kv, emitted)
            drafted, discarded = judged(drafted, groups), drafted - judged(drafted, groups)
        record = RoundRecord(
            len(self._past),
            self._position,
            action,
            drafted,
            accepted,
            emitted,
            text.tokens[self._position : n],
            draft + verify + costs.overhead,
            draft,
            verify,
            0.0,
            costs.overhead,
            discarded,
            peeked is not None,
            catch_up,
            steps,
            self._finish,
            text.entropy[n - 1] if target else None,
            text.top1[n - 1] if target else None,
            reasons,
            groups,
        )
        self._position, self._peeked = n, None
        self._past.append(record)
        return record

    def _work(self, name: str, drafted: int, accepted: int, length: int) -> tuple[int, int]:
        """Forwards and tokens caught up of a drafter in this round; remembers how much of the text it has read."""
        keeps = self._keeps[name]
        peeked = self._peeked if name == self._peeker else None
        if keeps == "nothing" or (not drafted and peeked is None):
            return 0, 0
        catch_up = peeked if peeked is not None else length - self._fed[name] - 1
        run = min(drafted - 1, accepted) if keeps == "drafts" and drafted else 0
        self._fed[name] = length + run
        return max(1, drafted), catch_up
