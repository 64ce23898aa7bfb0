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
from assc.errors import RequestError, TraceError
from assc.groups import check_chunks, judged, played_groups
from assc.needs import DRAFT_FIELDS, STEP_NEEDS, TARGET_FIELDS
from assc.open_round import OneRound
from assc.position_text import Text as Text
from assc.steps import Codes, Decision, StepObservation, observe_step
from assc.trace import Header
from assc.trace_rules import budget_of, kv_slots, peek_drafter, replay_table, trace_cost_ratio


@dataclass
class _Round:
    """A round token by token: what it may draft, and how far it is."""

    action: Action
    decision: Observation
    most: int
    """tokens that the drafter will propose at most"""
    shown: StepObservation | None = None
    verdict: Decision | None = None
    """how drafting ended; None while it goes on"""

    @property
    def drafting(self) -> bool:
        return self.verdict is None


class PositionBackend(OneRound[_Round]):
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
        self._decision: Observation | None = None
        self._round = None

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
        self._decision = self._round = None

    @property
    def done(self) -> bool:
        if self._text is None:
            raise RuntimeError("no request is running; call reset(request) first")
        return self._finish is not None

    def observe(self, needs: frozenset[str] = frozenset()) -> Observation:
        self._idle()
        text, n = self._text, self._position
        assert text is not None
        self._needs = needs
        remaining = self._budget - n
        if self._peeked is None and self._peeker is not None and not DRAFT_FIELDS.isdisjoint(needs):
            length = self._prompt + n
            self._peeked = length - self._fed[self._peeker] - 1
            self._fed[self._peeker] = length
        peeked = self._peeked is not None
        target = n > 0 and not TARGET_FIELDS.isdisjoint(needs)
        self._decision = Observation(
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
            (*self.request.prompt_ids, *text.tokens[:n]) if "committed" in needs else None,
        )
        return self._decision

    def step(self, action: Action, *, policy_seconds: float = 0.0, reasons: tuple[str, ...] = ()) -> RoundRecord:
        self._idle()
        return self._play(action, reasons)

    # -- token by token ------------------------------------------------------------------------------------------

    def check_steps(self, needs: frozenset[str]) -> None:
        """`TraceError` where step fields are asked for that a drafter with confidences lacks here."""
        missing = [d.name for d in self.header.drafters if d.confidence and not d.steps]
        if missing and needs & STEP_NEEDS:
            raise TraceError(
                f"the policy reads {', '.join(sorted(needs & STEP_NEEDS))}, but this recording has no confidences per "
                f"draft step of {missing[0]!r}; record it again with this version (python -m assc record), without "
                "--steps 0"
            )

    def open_round(self, action: Action) -> StepObservation | None:
        """Begin a round and draft its first token; None where nothing is drafted."""
        self._idle()
        decision = self._decision if self._decision is not None else self.observe()
        self._refuse(action)
        most, name, text = min(action.k, self._budget - self._position - 1), action.drafter, self._text
        assert text is not None
        if name is None or most <= 0:
            most = 0
        else:
            most = min(most, text.avail[name][self._position])
            if name in text.steps and self._needs & STEP_NEEDS:
                most = min(most, text.steps[name].shape[1])  # a trace that keeps fewer steps than K_max ends there
        self._round = _Round(action, decision, most)
        return self._next_step()

    def decide(self, decision: Decision) -> StepObservation | None:
        """What to do after the token shown last; the next one, or None when drafting is over."""
        round_ = self._waiting()
        if Decision(decision) is not Decision.CONTINUE:
            round_.verdict = Decision(decision)
            return None
        return self._next_step()

    def _next_step(self) -> StepObservation | None:
        round_, text = self._round, self._text
        assert round_ is not None and text is not None
        before, name = round_.shown, round_.action.drafter
        made = 0 if before is None else before.drafted
        if made >= round_.most or name is None:
            round_.verdict = Decision.VERIFY
            return None
        codes: Codes | None = None
        if name in text.steps and self._needs & STEP_NEEDS:
            codes = Codes(*text.steps[name][self._position, made].tolist())
        planned = min(round_.action.k, self._budget - self._position - 1)
        round_.shown = observe_step(round_.decision, name, planned, made + 1, codes, before)
        return round_.shown

    def close_round(self, *, policy_seconds: float = 0.0, reasons: tuple[str, ...] = ()) -> RoundRecord:
        """The record of the round that `open_round` began. Raises `RuntimeError` while a token waits for a decision."""
        round_ = self._ended()
        if round_.shown is None:
            return self._play(round_.action, reasons)
        action = Action(round_.shown.drafter, round_.shown.drafted)
        return self._play(action, reasons, discard=round_.verdict is Decision.ROLLBACK)

    # -- what both share -----------------------------------------------------------------------------------------

    def _refuse(self, action: Action) -> None:
        assert self._text is not None
        if action.k > self.k_max:
            raise RequestError(f"K={action.k} is above K_max={self.k_max} of this trace")
        if action.drafter is not None and action.drafter not in self._text.acc:
            raise RequestError(f"unknown drafter {action.drafter!r}; this trace has {', '.join(self._text.acc)}")

    def _play(self, action: Action, reasons: tuple[str, ...], *, discard: bool = False) -> RoundRecord:
        """Play a round whose draft is verified, or with `discard` paid for and thrown away."""
        self._refuse(action)
        text, n, costs = self._text, self._position, self.cost_model
        assert text is not None
        length = self._prompt + n
        drafted = accepted = discarded = steps = catch_up = 0
        draft = 0.0
        k, name, peeked = min(action.k, self._budget - n - 1), action.drafter, self._peeked
        if peeked is not None and self._peeker is not None and (k <= 0 or name != self._peeker):
            steps, catch_up = 1, peeked  # a peek whose drafter is not used is paid for all the same
            draft = costs.draft(self._peeker, 1, peeked)
        if k > 0 and name is not None:
            made = min(k, text.avail[name][n])
            if discard:
                discarded = made
            else:
                drafted, accepted = made, min(made, text.acc[name][n])
            own_steps, own_catch_up = self._work(name, made, accepted, length)
            draft += costs.draft(name, own_steps, own_catch_up)
            steps, catch_up = steps + own_steps, catch_up + own_catch_up
        emitted = min(accepted + 1, len(text.tokens) - n)
        n += emitted
        if n == len(text.tokens) and text.finish not in ("length", "context"):
            self._finish = text.finish
        elif n >= self._budget:
            self._finish = self._cut
        target = not TARGET_FIELDS.isdisjoint(self._needs)
        kv = costs.kv(length, self._slots)
        groups: tuple[int, ...] = ()
        if self.chunks == 1:
            verify = costs.verify(drafted, kv, emitted)
        else:
            groups = played_groups(drafted, self.chunks, emitted)
            verify = costs.verify_groups(groups, kv, emitted)
            seen = judged(drafted, groups)
            drafted, discarded = seen, discarded + drafted - seen
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
        self._position, self._peeked, self._decision = n, None, None
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
