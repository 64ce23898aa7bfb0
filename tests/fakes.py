"""A small deterministic `Backend` for tests: no model, no torch, text that does not depend on K.

Token and agreement of every position come from a stream keyed by (request seed, position), so the accepted length
of a round from position s is the leading run of agreements at s, s+1, …: geometric with rate `alpha`, and the same
text comes out of every K schedule. Tests import it with `from fakes import FakeBackend`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from assc.actions import ActionTable
from assc.core import ROLLBACK, Action, FinishReason, Mode, Observation, Request, RoundRecord
from assc.errors import RequestError
from assc.steps import Decision, StepObservation, encode, observe_step

VOCABULARY = 1000


class FakeClock:
    """A clock that moves only when told to: `clock()` reads seconds, `clock.advance(s)` lets time pass."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class FakeBackend:
    """Plays rounds from a seeded stream; seconds are modelled as fixed costs per step (see the parameters).

    alpha: chance that one draft token is accepted, or a mapping category -> chance
    c: seconds of one draft step / seconds of one target step
    step_seconds: seconds of one target step
    verify_slope: extra share of a target step per verified draft token
    noise: relative standard deviation of the seconds of a round (seeded by `noise_seed`, differs in every round)
    eos_at: number of new tokens after which an EOS is emitted, None for never
    text_depends_on_k: plant the fault that the text differs between K schedules
    charge_policy: add the policy's (real, hence nondeterministic) seconds to the round
    clock: every phase advances it, and the phases are measured with it
    cold_seconds: extra seconds of the first request ever played (what a warm-up hides)
    """

    def __init__(
        self,
        *,
        drafters: Sequence[str] = ("ngram",),
        k_values: Sequence[int] = (1, 2, 3, 4, 5, 6, 8, 12, 16),
        alpha: float | Mapping[str, float] = 0.7,
        c: float = 0.1,
        step_seconds: float = 0.02,
        verify_slope: float = 0.0,
        noise: float = 0.0,
        noise_seed: int = 0,
        mode: Mode = "greedy",
        eos_at: int | None = None,
        text_depends_on_k: bool = False,
        charge_policy: bool = False,
        clock: FakeClock | None = None,
        cold_seconds: float = 0.0,
        on_step: Callable[[Request, Action], None] | None = None,
    ) -> None:
        self.table = ActionTable.build(drafters, k_values)
        self.mode: Mode = mode
        self.time_source: Literal["measured", "modelled"] = "modelled"
        self.alpha, self.c, self.step_seconds, self.verify_slope = alpha, c, step_seconds, verify_slope
        self.noise, self._noise = noise, np.random.default_rng(noise_seed)
        self.eos_at, self.text_depends_on_k, self.charge_policy = eos_at, text_depends_on_k, charge_policy
        self.clock, self.cold_seconds, self.on_step = clock, cold_seconds, on_step
        self.resets: list[str] = []
        self._request: Request | None = None
        self._rounds: list[RoundRecord] = []
        self._done = True
        self._opened: tuple[Action, Observation] | None = None
        self._shown: StepObservation | None = None
        self._verdict = Decision.VERIFY

    @property
    def cost_ratio(self) -> float:
        return self.c

    @property
    def plain_step_seconds(self) -> float:
        return self.step_seconds

    def describe(self) -> dict[str, Any]:
        return {"pair": "fake", "device": "cpu", "dtype": "float32", "threads": 1, "mode": self.mode, "c": self.c}

    def check(self, request: Request) -> None:
        if not request.prompt_ids or request.max_new_tokens < 1:
            raise RequestError("a request needs a prompt and a budget of at least 1 token")

    def reset(self, request: Request) -> None:
        self.check(request)
        self._request, self._rounds, self._done = request, [], False
        self.resets.append(request.id)
        rng = np.random.default_rng([request.seed, 1])
        size = request.max_new_tokens + self.table.k_max + 1
        alpha = self.alpha[request.category] if isinstance(self.alpha, Mapping) else self.alpha
        self._text = rng.integers(0, VOCABULARY, size)
        draws = {d: np.random.default_rng([request.seed, 2 + i]) for i, d in enumerate(self.table.drafters)}
        self._agree = {d: r.random(size) < alpha for d, r in draws.items()}

    @property
    def done(self) -> bool:
        return self._done

    @property
    def _position(self) -> int:
        return sum(r.emitted for r in self._rounds)

    def observe(self, needs: frozenset[str] = frozenset()) -> Observation:
        if self._request is None or self._done:
            raise RuntimeError("observe() before reset() or after the end")
        request, position = self._request, self._position
        hint = {d: float(a[position]) for d, a in self._agree.items()}
        agree = next(iter(hint.values()), 0.0)
        optional: dict[str, Any] = {
            "target_entropy": 1.0 - 0.5 * agree,
            "target_top1": 0.5 + 0.3 * agree,
            "draft_entropy": 1.5 - agree,
            "draft_top1": 0.4 + 0.5 * agree,
            "draft_margin": 0.1 + 0.5 * agree,
            "ngram_match": int(3 * agree),
        }
        remaining = request.max_new_tokens - position
        return Observation(
            position=position,
            prompt_length=len(request.prompt_ids),
            remaining=remaining,
            k_max=min(self.table.k_max, max(0, remaining - 1)),
            temperature=request.temperature,
            past=tuple(self._rounds),
            cost_ratio=self.c,
            **{k: v for k, v in optional.items() if k in needs},
        )

    def check_steps(self, needs: frozenset[str]) -> None:
        """Every drafter has confidences here but those named like a lookup."""

    def open_round(self, action: Action) -> StepObservation | None:
        self._opened, self._shown, self._verdict = (action, self.observe()), None, Decision.VERIFY
        return self._next_step()

    def _next_step(self) -> StepObservation | None:
        assert self._opened is not None
        action, decision = self._opened
        made = 0 if self._shown is None else self._shown.drafted
        planned = min(action.k, decision.k_max)
        if made >= planned or action.drafter is None:
            return None
        agree = float(self._agree[action.drafter][self._position + made])
        codes = encode(1.5 - agree, 0.4 + 0.5 * agree, 0.1 + 0.5 * agree, 0.3 + 0.6 * agree)
        lookup = action.drafter.startswith("ngram")
        self._shown = observe_step(decision, action.drafter, planned, made + 1, None if lookup else codes, self._shown)
        return self._shown

    def decide(self, decision: Decision) -> StepObservation | None:
        self._verdict = Decision.VERIFY if decision is Decision.CONTINUE else decision
        return self._next_step() if decision is Decision.CONTINUE else None

    def close_round(self, *, policy_seconds: float = 0.0, reasons: tuple[str, ...] = ()) -> RoundRecord:
        assert self._opened is not None
        (action, _), shown, verdict = self._opened, self._shown, self._verdict
        self._opened = None
        if shown is None:
            return self.step(action, policy_seconds=policy_seconds, reasons=reasons)
        action = Action(action.drafter, shown.drafted)
        if verdict is not Decision.ROLLBACK:
            return self.step(action, policy_seconds=policy_seconds, reasons=reasons)
        record = self.step(ROLLBACK, policy_seconds=policy_seconds, reasons=reasons)
        draft = self._spend(action.k * self.c * self.step_seconds)
        seconds, draft_seconds = record.seconds + draft, record.draft_seconds + draft
        record = replace(
            record,
            action=action,
            discarded=action.k,
            seconds=seconds,
            draft_seconds=draft_seconds,
            draft_steps=action.k,
        )
        self._rounds[-1] = record
        return record

    def _spend(self, seconds: float) -> float:
        """Seconds of a phase: modelled with noise, or measured with the injected clock."""
        if self.noise:
            seconds *= float(np.exp(self.noise * self._noise.standard_normal()))
        if self.clock is None:
            return seconds
        start = self.clock()
        self.clock.advance(seconds)
        return self.clock() - start

    def step(self, action: Action, *, policy_seconds: float = 0.0, reasons: tuple[str, ...] = ()) -> RoundRecord:
        if self._request is None or self._done:
            raise RuntimeError("step() before reset() or after the end")
        if action.k > self.table.k_max or (action.drafter is not None and action.drafter not in self.table.drafters):
            raise RequestError(f"action {action} is beyond the table {self.table.describe()}")
        if self.on_step is not None:
            self.on_step(self._request, action)
        position = self._position
        remaining = self._request.max_new_tokens - position
        drafted = min(action.k, remaining - 1)
        agree = self._agree[action.drafter][position : position + drafted] if action.drafter else np.zeros(0, bool)
        accepted = int(np.argmin(agree)) if not agree.all() else len(agree)
        emitted = accepted + 1
        finish: FinishReason | None = "length" if emitted == remaining else None
        if self.eos_at is not None and position + emitted >= self.eos_at:
            emitted, finish = self.eos_at - position, "eos"
            accepted = min(accepted, emitted)
        tokens = [int(t) for t in self._text[position : position + emitted]]
        if self.text_depends_on_k:
            tokens[-1] += VOCABULARY * action.k
        draft = self._spend(drafted * self.c * self.step_seconds)
        verify = self._spend(self.step_seconds * (1 + self.verify_slope * drafted))
        other = self._spend(self.cold_seconds) if len(self.resets) == 1 and not self._rounds else 0.0
        policy = policy_seconds if self.charge_policy else 0.0
        record = RoundRecord(
            index=len(self._rounds),
            position=position,
            action=action,
            drafted=drafted,
            accepted=accepted,
            emitted=emitted,
            tokens=tuple(tokens),
            seconds=draft + verify + policy + other,
            draft_seconds=draft,
            verify_seconds=verify,
            policy_seconds=policy,
            other_seconds=other,
            draft_steps=drafted,
            finish=finish,
            reasons=reasons,
        )
        self._rounds.append(record)
        self._done = finish is not None
        return record


class FixedPolicy:
    """Plays the same K in every round (nearest one in the table); counts what it saw, to test state handling."""

    needs: frozenset[str] = frozenset()

    def __init__(self, k: int, spec: str = "") -> None:
        self.k, self.spec, self.seen = k, spec or f"fixed:{k}", 0

    def begin(self, table: ActionTable) -> None:
        self._table = table

    def act(self, observation: Observation) -> Action:
        return self._table.nearest(None, self.k)

    def update(self, record: RoundRecord) -> None:
        self.seen += 1

    def reset(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seen = int(state["seen"])


def fake_requests(
    n: int, *, max_new_tokens: int = 48, seed: int = 0, categories: Sequence[str] = ("a", "b")
) -> list[Request]:
    """`n` requests with ids r0, r1, … and prompts of their own that alternate over the categories."""
    return [
        Request(
            (1, seed, i), max_new_tokens, seed=1000 * seed + i, id=f"r{i}", category=categories[i % len(categories)]
        )
        for i in range(n)
    ]
