"""Stop drafting where one more token is not worth its seconds, by chances learned from recorded text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from assc.actions import ActionTable
from assc.core import ROLLBACK, Action, Observation, RoundRecord
from assc.errors import ArtefactError
from assc.kinds import first_lookup, first_model
from assc.registry import register
from assc.steps import Decision, StepObservation
from assc.text_memory import AHEAD, TextMemory
from policies.accept_heads import (
    ROUND,
    SIZES,
    Head,
    Hits,
    chance,
    dot,
    logistic,
    place_numbers,
    plain_heads,
    round_numbers,
    sound_heads,
    step_numbers,
)
from policies.step_base import BaseStepPolicy
from policies.step_costs import TARGET, TILE, Sums, add_round, check_sums, fitted, rescaled

SECONDS = ("modelled", "fitted")
REFIT = 16
"""rounds of a request between two looks at the costs"""
UNSEEN = [0.0] * AHEAD
"""of a proposed token that was not foreseen"""
LEAST = -0.3
"""what a round of the model is worth at least, in tokens"""
PACE = 1.3
"""tokens per target step before anything was learned"""


@register("accept_stop")
class AcceptStop(BaseStepPolicy):
    """Who drafts, and after each drafted token whether to go on: what gains most tokens − ρ·seconds.

    ρ is the policy's own Σtokens/Σseconds on the text that it was fitted to, so that the best sum is the best ratio
    (Dinkelbach). Against plain decoding, which gains nothing, a round is worth

    - with the lookup, for the best K: Σ_{j≤K} P(1 … j accepted) − ρ·(its call + verifying K);
    - with the model drafter: the expected worth of the tokens it would let be drafted, less ρ·(its call + `charge` of
      the committed tokens that it must read first; they have to be read sooner or later, so not all of it).

    After each token of the model: another one while P(all tokens of this round and one more accepted) > ρ·(a draft
    step + one more column to verify). Else it verifies, or rolls back where not even verifying is worth it. Chances are
    logistic regressions, the worth of entering the model a Poisson regression (`policies.accept_heads`), fitted by
    `train_policy.py --algo accept_stop`; without that the draft's own probabilities are taken at their word. What the
    lookup will propose is foreseen from the committed text, and judged by what followed the same tokens so far
    (`assc.text_memory`).

    `seconds=modelled` (default): the seconds of a round's parts stay those of the cost model that it was fitted with,
    so that it decides live as in replay. `seconds=fitted`: they are fitted to its own rounds as it goes on
    (`policies.step_costs`), for machines whose load changes. Either way c rescales the draft's at once. Without a fit
    they are always learned.

    Limits: what the first drafted token will be is hardly known before it is drafted, and drafting it is most of the
    price, so that knowing better when to stop gains little.

    Uses acceptance history, draft confidence, target entropy, the n-gram match, seconds. Source: this project; trained
    acceptance heads as in SpecDec++ (Huang et al. 2024, arXiv 2405.19715), the ratio after Dinkelbach 1967.

    >>> from assc.actions import ActionTable
    >>> policy = AcceptStop()
    >>> policy.begin(ActionTable.build(["model", "ngram"], range(1, 17)))
    >>> seen = Observation(9, 3, 50, 16, 0.0, (), 0.05, ngram_match=0)
    >>> str(policy.act(seen))
    'model:16'
    >>> [policy.decide(StepObservation(seen, "model", 16, 1, 0.5, p, p, p, p)).name for p in (0.9, 0.05)]
    ['CONTINUE', 'VERIFY']
    """

    uses: ClassVar[str] = "H, C, E, N, seconds"
    learner: ClassVar[bool] = True
    needs = frozenset(
        {"target_entropy", "target_top1", "ngram_match", "committed"}
        | {"step_entropy", "step_top1", "step_margin", "step_prob"}
    )
    learned: ClassVar[tuple[str, ...]] = ("heads", "pace", "sums", "c", "least", "fixed")
    per_request: ClassVar[tuple[str, ...]] = ("hits", "read", "text")

    def __init__(self, cap: int = 16, charge: float = 0.5, seconds: str = "modelled") -> None:
        if not 0.0 <= charge <= 1.0:
            raise ValueError(f"charge is a share from 0 to 1, got {charge}")
        if seconds not in SECONDS:
            raise ValueError(f"seconds is one of {', '.join(SECONDS)}, got {seconds!r}")
        super().__init__(cap)
        self.charge, self.seconds = charge, seconds
        self.heads: dict[str, Head] = plain_heads()
        self.pace = PACE
        self.sums: Sums = {}
        self.fixed = False
        """whether `sums` stay as they are: a fit with seconds=modelled says so"""
        self.c = 0.0
        """cost ratio of the seconds in `sums`, 0 before there are any"""
        self.least = LEAST
        self.text = TextMemory()
        self.hits = Hits()
        self.read = 0
        """tokens of prompt and text that the model drafter had read when it was asked last"""
        self._due = 0
        self._length = 0
        self._x: list[float] = []
        self._all = 1.0
        """chance that all tokens of the round so far are accepted"""
        self._expected = 0.0
        """expected number of accepted ones"""

    def begin(self, table: ActionTable) -> None:
        super().begin(table)
        played = table if self.saved_table is None else self.saved_table
        self._model, self._lookup = first_model(played), first_lookup(played)
        self._due = 0

    def price(self, c: float) -> None:
        """What the parts of a round cost now, in tokens: ρ times their seconds."""
        if self._model in self.sums and self.c > 0.0 and abs(c - self.c) > 0.01 * self.c:
            rescaled(self.sums, self._model, c / self.c)
        self.c = c
        plain, column, tile = fitted(self.sums, TARGET, None)
        call, step, catch = fitted(self.sums, self._model or "", (0.0, c * plain, 0.0))
        ask, _, _ = fitted(self.sums, self._lookup or "", (0.0, 0.0, 0.0))
        rho = self.pace / plain
        self.call_cost, self.step_cost, self.catch_cost = rho * call, rho * step, rho * catch
        self.column_cost, self.tile_cost, self.ask_cost = rho * column, rho * tile, rho * ask
        self._due = REFIT

    def act(self, observation: Observation) -> Action:
        if self._due <= 0:
            self.price(observation.cost_ratio)
        self._due -= 1
        self.hits.observe(observation.ngram_match or 0)
        self._length = observation.prompt_length + observation.position
        if observation.committed is not None:
            self.text.read(observation.committed, observation.prompt_length)
        self._x = x = round_numbers(observation, self.hits, self.text.numbers())
        self.open()
        best, action = 0.0, ROLLBACK
        if observation.k_max < 1:
            return action
        if self._model is not None:
            gain = self.model_gain(x, observation)
            if gain > best:
                best, action = gain, self.draft(self._within(self.cap, self._model), observation, self._model)
        if self._lookup is not None and observation.ngram_match:
            most = min(observation.k_max, self._within(self.cap, self._lookup))
            gain, k = self.lookup_gain(x, self.ahead(most), most)
            if gain > best:
                action = self.draft(k, observation, self._lookup)
        return action

    def open(self) -> None:
        """No token of the round is drafted yet."""
        self._all, self._expected = 1.0, 0.0

    def model_gain(self, x: Sequence[float], observation: Observation) -> float:
        """Expected tokens − ρ·seconds of a round with the model drafter, beyond plain decoding."""
        # the prompt is read once whatever is decided
        behind = self._length - 1 - self.read if self.read else observation.position
        worth = self.least + math.exp(min(dot(self.heads["enter"], x), 5.0))
        return worth - self.call_cost - self.charge * self.catch_cost * max(0, behind)

    def ahead(self, most: int) -> list[list[float]]:
        """Numbers of the tokens that the lookup will propose, as many as are foreseen."""
        return self.text.ahead(self._x[1], self.text.proposal(most))

    def lookup_gain(self, x: Sequence[float], ahead: Sequence[Sequence[float]], most: int) -> tuple[float, int]:
        """The same with the lookup and the best K, and that K."""
        head, survive = self.heads["lookup"], 1.0
        gain, best, k = -self.ask_cost, float("-inf"), 1
        round_, first, rest = head[:ROUND], head[ROUND : 2 * ROUND], head[2 * ROUND :]
        base = dot(round_, x)
        for j in range(1, most + 1):
            far = [*place_numbers(x, j), *(ahead[j - 1] if j <= len(ahead) else UNSEEN)]
            survive *= logistic(base + dot(rest, far) + (dot(first, x) if j == 1 else 0.0))
            gain += survive - self.verifying(j)
            if gain > best:
                best, k = gain, j
        return best, k

    def verifying(self, j: int) -> float:
        """ρ·seconds of verifying a j-th drafted token."""
        return self.column_cost + (self.tile_cost if j == TILE else 0.0)

    def decide(self, step: StepObservation) -> Decision:
        if step.prob is None:
            return Decision.CONTINUE
        return self.judge(self._x, step)

    def judge(self, x: Sequence[float], step: StepObservation) -> Decision:
        """The decision after a token of a round that began with `x`; `open` before the first."""
        numbers = step_numbers(x, step)
        self._all *= chance(self.heads["judge"], numbers)
        self._expected += self._all
        if self._all * chance(self.heads["next"], numbers) > self.step_cost + self.verifying(step.drafted + 1):
            return Decision.CONTINUE
        return Decision.VERIFY if self._expected > self.verified(step.drafted) else Decision.ROLLBACK

    def verified(self, drafted: int) -> float:
        """ρ·seconds of verifying so many drafted tokens, beyond those of a plain step."""
        return self.column_cost * drafted + (self.tile_cost if drafted >= TILE else 0.0)

    def update(self, record: RoundRecord) -> None:
        by_model = record.action.drafter is not None and record.action.drafter == self._model
        self.hits.update(record, by_model)
        if by_model and record.draft_steps:
            self.read = self._length
        if not self.fixed:
            add_round(self.sums, record)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        heads = state.get("heads")
        if not sound_heads(heads):
            raise ArtefactError(f"policy {self.spec!r} expects heads of these sizes: {SIZES}")
        if not check_sums(state.get("sums")):
            raise ArtefactError(f"policy {self.spec!r} expects sums of seconds, nine numbers each")
        super().load_state_dict(state)
        self._due = 0
