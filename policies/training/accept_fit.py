"""Fitting `accept_stop` to the train requests of a trace: what every drafter would have done at every decision point.

Batches of rounds are played by the policy as it is, half of them with another action, so that positions and histories
are those it meets; the trace then says how both drafters would have fared there, whoever was asked. After each batch:
the chances (logistic regressions), then the worth of entering the model under the stop rule that they make (ridge),
then ρ, which is the Σtokens/Σseconds of the policy itself on the train requests. Few batches reach the fixed point.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.linear_model import LogisticRegression, PoissonRegressor

from assc.core import ROLLBACK, Action, Observation, Request, Totals
from assc.errors import SpecError
from assc.kinds import first_lookup, first_model
from assc.positions import Text
from assc.registry import make_policy
from assc.replay import ReplayBackend
from assc.run import iter_rounds, run_request
from assc.steps import Codes, Decision, StepObservation, observe_step
from envs import RequestSource
from policies.accept_heads import lookup_numbers, step_numbers
from policies.accept_stop import UNSEEN, AcceptStop
from policies.step_costs import TARGET, fitted
from policies.training.checkpoint import Checkpoint, write_checkpoint
from policies.training.config import TrainConfig
from policies.training.log import Interrupt, TrainingLog

BATCH = 8_000
"""rounds between two fits"""
EXPLORE = 0.5
"""chance that a round is played otherwise than the policy would"""
STRENGTH = {"judge": 1.0, "next": 0.01, "lookup": 1.0}
"""C of the logistic regressions: how little they are regularised"""
FLATNESS = 1e-3
Point = tuple[Text, int, list[float], Observation, list[list[float]]]
"""a decision point: the text, position in it, the round's numbers, what was observed, numbers of the lookup's tokens"""


class Explorer(AcceptStop):
    """Plays as the policy does, or, now and then, anything else, and keeps the decision points."""

    def __init__(self, backend: ReplayBackend, rng: np.random.Generator, cap: int, charge: float) -> None:
        super().__init__(cap, charge)
        self.backend, self.rng = backend, rng
        self.points: list[Point] = []
        self.forced = 0

    def act(self, observation: Observation) -> Action:
        action, self.forced = super().act(observation), 0
        text, n = self.backend.text_of(self.backend.request), observation.position
        most = min(self.cap, text.acc[self._lookup][n] + 1) if self._lookup is not None else 0
        self.points.append((text, n, self._x, observation, self.ahead(most)))
        if observation.k_max < 1 or self.rng.random() >= EXPLORE:
            return action
        kind = self.rng.random()
        if kind < 0.2:
            return ROLLBACK
        if self._lookup is not None and observation.ngram_match and kind > 0.6:
            return self.draft(int(self.rng.integers(1, self.cap + 1)), observation, self._lookup)
        self.forced = min(int(self.rng.integers(1, 5)), observation.k_max)
        return ROLLBACK if self._model is None else self.draft(self.forced, observation, self._model)

    def decide(self, step: StepObservation) -> Decision:
        if step.prob is None or not self.forced:
            return super().decide(step)
        return Decision.CONTINUE if step.drafted < self.forced else Decision.VERIFY


def drafted_at(point: Point, drafter: str, most: int) -> Iterator[StepObservation]:
    """The first `most` tokens that a model drafter drafts there, as a step policy sees them."""
    text, n, _, observation, _ = point
    shown: StepObservation | None = None
    for j in range(min(most, text.steps[drafter].shape[1])):
        codes = Codes(*text.steps[drafter][n, j].tolist())
        shown = observe_step(observation, drafter, most, j + 1, codes, shown)
        yield shown


def room(point: Point, cap: int) -> int:
    """Draft tokens that the text and the budget have room for and whose fate is known."""
    text, n, _, observation, _ = point
    return min(cap, observation.k_max, len(text.tokens) - n - 1)


class AcceptRun:
    """A fit of `accept_stop`, in batches, so that it can be stopped and gone on with."""

    def __init__(
        self,
        config: TrainConfig,
        backend: Any,
        requests: Sequence[Request],
        log: TrainingLog,
        checkpoint: Checkpoint | None,
    ) -> None:
        policy = make_policy(config.algo, seed=config.seed)
        assert isinstance(policy, AcceptStop) and isinstance(backend, ReplayBackend)
        backend.check_steps(policy.needs)
        model, lookup = first_model(backend.table), first_lookup(backend.table)
        if model is None or lookup is None:
            raise SpecError(f"accept_stop needs a model and a lookup drafter, known here: {backend.table.describe()}")
        self.config, self.backend, self.log, self.policy = config, backend, log, policy
        self.requests, self.model, self.lookup = requests, model, lookup
        self.source = RequestSource(requests)
        self.rng = np.random.default_rng(config.seed)
        self.steps = self.updates = 0
        if checkpoint is not None:
            state = checkpoint.state
            self.steps, self.updates = checkpoint.steps, state["updates"]
            self.policy.load_state_dict(state["policy"])
            self.source.load_state_dict(state["source"])
            self.rng.bit_generator.state = state["rng"]
            log.load_state_dict(state["log"])

    def snapshot(self) -> Checkpoint:
        """All that the next batch depends on."""
        state: dict[str, Any] = {
            "policy": self.policy.state_dict(),
            "updates": self.updates,
            "source": self.source.state_dict(),
            "rng": self.rng.bit_generator.state,
            "log": self.log.state_dict(),
        }
        return Checkpoint(self.steps, copy.deepcopy(state))

    def player(self) -> AcceptStop:
        """A copy of the policy as it is now."""
        policy = make_policy(self.config.algo, seed=self.config.seed)
        assert isinstance(policy, AcceptStop)
        policy.load_state_dict(self.policy.state_dict())
        return policy

    def train(self, interrupt: Interrupt, run_dir: Path) -> bool:
        """Play and fit what is left; False if Ctrl-C stopped it. Either way the last batch is on disk."""
        write_checkpoint(run_dir, self.snapshot())
        while self.steps < self.config.rounds:
            self.log.compare(self.steps, self.player)
            points = self.collect(interrupt)
            if points is None:
                return False
            self.fit(points)
            self.updates += 1
            self.log.record_window()
            self.log.dump(self.steps)
            write_checkpoint(run_dir, self.snapshot())
        self.log.compare(self.steps, self.player, always=True)
        return not interrupt.requested

    def collect(self, interrupt: Interrupt) -> list[Point] | None:
        """Decision points of one batch, None after Ctrl-C."""
        explorer = Explorer(self.backend, self.rng, self.policy.cap, self.policy.charge)
        explorer.spec = self.policy.spec
        explorer.load_state_dict(self.policy.state_dict() | {"fixed": False})
        while len(explorer.points) < min(BATCH, self.config.rounds):
            for record in iter_rounds(self.backend, self.source.next(self.rng), explorer):
                self.steps += 1
                self.log.add(Totals.of([record]), self.steps)
                if interrupt.requested:
                    return None
        self.policy.sums = copy.deepcopy(explorer.sums)
        self.policy.c = explorer.c
        return explorer.points

    def fit(self, points: Sequence[Point]) -> None:
        """New heads and a new ρ."""
        rows: dict[str, list[list[float]]] = {name: [] for name in STRENGTH}
        labels: dict[str, list[bool]] = {name: [] for name in STRENGTH}
        for point in points:
            text, n, x, observation, ahead = point
            most = room(point, self.policy.cap)
            accepted = min(most, text.acc[self.model][n])
            for step in drafted_at(point, self.model, min(most, accepted + 1)):
                numbers, j = step_numbers(x, step), step.drafted
                rows["judge"].append(numbers)
                labels["judge"].append(accepted >= j)
                if accepted >= j and j < most:
                    rows["next"].append(numbers)
                    labels["next"].append(accepted > j)
            if observation.ngram_match:
                accepted = min(most, text.acc[self.lookup][n])
                for j in range(1, min(most, accepted + 1) + 1):
                    rows["lookup"].append(lookup_numbers(x, j, ahead[j - 1] if j <= len(ahead) else UNSEEN))
                    labels["lookup"].append(accepted >= j)
        for name, strength in STRENGTH.items():
            if len(set(labels[name])) == 2:  # else there is nothing to tell apart
                untyped: Any = LogisticRegression
                learner = untyped(C=strength, fit_intercept=False, max_iter=500)
                self.policy.heads[name] = learner.fit(np.array(rows[name]), np.array(labels[name])).coef_[0].tolist()
        self.policy.fixed = self.policy.seconds == "modelled"
        self.fit_entering(points)
        self.fit_pace()

    def fit_entering(self, points: Sequence[Point]) -> None:
        """The head `enter`: what rounds of the model were worth under the stop rule, the call's own price apart."""
        policy = self.policy
        policy.begin(self.backend.table)
        policy.price(self.backend.cost_ratio)
        rows, worth = [], []
        for point in points:
            text, n, x, _, _ = point
            most, kept, drafted = room(point, policy.cap), False, 0
            policy.open()
            for step in drafted_at(point, self.model, most):
                decision = policy.judge(x, step)
                drafted, kept = step.drafted, decision is not Decision.ROLLBACK
                if decision is not Decision.CONTINUE:
                    break
            if drafted:
                gained = min(drafted, text.acc[self.model][n]) - policy.verified(drafted) if kept else 0.0
                rows.append(x)
                worth.append(gained - policy.step_cost * drafted)
        if rows:
            policy.least = -2.0 * (policy.step_cost + policy.column_cost)
            untyped: Any = PoissonRegressor
            above = np.maximum(np.array(worth) - policy.least, 0.0)
            learner = untyped(alpha=FLATNESS, fit_intercept=False, max_iter=300).fit(np.array(rows), above)
            policy.heads["enter"] = learner.coef_.tolist()

    def fit_pace(self) -> None:
        """ρ in tokens per plain step, of the policy as it now plays the train requests."""
        total, player = Totals(), self.player()
        for request in self.requests:
            total = total + Totals.of(run_request(self.backend, request, player).rounds)
        plain, _, _ = fitted(player.sums, TARGET, None)
        self.policy.pace = total.tokens / total.seconds * plain
