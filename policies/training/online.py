"""Online learners, bandits and models: trained by letting them decode the train requests with the engine's own loop."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from assc.core import Backend, Policy, Request, Totals
from assc.registry import make_policy
from assc.run import iter_rounds
from assc.trace import Trace
from envs import RequestSource
from policies.training.checkpoint import Checkpoint, write_checkpoint
from policies.training.config import TrainConfig
from policies.training.log import Interrupt, TrainingLog

REPORT_ROUNDS = 64
"""rounds that one point of the scalars is pooled over"""


class OnlineRun:
    """One online learner; a run ends with the request in which the last round falls."""

    def __init__(
        self,
        config: TrainConfig,
        backend: Backend,
        requests: Sequence[Request],
        log: TrainingLog,
        checkpoint: Checkpoint | None,
    ) -> None:
        self.config, self.backend, self.log = config, backend, log
        self.policy: Policy = make_policy(config.algo, seed=config.seed)
        self.source = RequestSource(requests)
        self.rng = np.random.default_rng(config.seed)
        self.steps = 0
        if checkpoint is not None:
            state = checkpoint.state
            self.steps = checkpoint.steps
            self.policy.load_state_dict(state["policy"])
            self.source.load_state_dict(state["source"])
            self.rng.bit_generator.state = state["rng"]
            log.load_state_dict(state["log"])

    @property
    def frozen(self) -> bool:
        """Whether the policy is told to learn nothing while it plays (`frozen=true`)."""
        return bool(getattr(self.policy, "frozen", False))

    @property
    def updates(self) -> int:
        """An online learner learns from every round, a frozen one from none."""
        return 0 if self.frozen else self.steps

    def snapshot(self) -> Checkpoint:
        state: dict[str, Any] = {
            "policy": self.policy.state_dict(),
            "source": self.source.state_dict(),
            "rng": self.rng.bit_generator.state,
            "log": self.log.state_dict(),
        }
        return Checkpoint(self.steps, state)

    def learn_from(self, trace: Trace) -> int:
        """Let a learner that can learn from the draft steps of a trace do so; from how many tokens it has learned."""
        fit: Callable[[Trace], int] | None = getattr(self.policy, "fit", None)
        return 0 if fit is None else fit(trace)

    def player(self) -> Policy:
        """A copy of the learner as it is now: it may go on learning, and is thrown away."""
        policy = make_policy(self.config.algo, seed=self.config.seed)
        policy.load_state_dict(copy.deepcopy(self.policy.state_dict()))
        return policy

    def train(self, interrupt: Interrupt, run_dir: Path) -> bool:
        """Learn what is left to learn; False if Ctrl-C stopped it. Either way the last checkpoint is on disk."""
        saved_at = self.steps
        boundary = self.snapshot()
        while self.steps < self.config.rounds:
            self.log.compare(self.steps, self.player)
            if self.steps - saved_at >= self.config.checkpoint_rounds:
                write_checkpoint(run_dir, boundary)
                saved_at = self.steps
            for record in iter_rounds(self.backend, self.source.next(self.rng), self.policy):
                self.steps += 1
                self.log.add(Totals.of([record]), self.steps)
                if self.log.window.rounds >= REPORT_ROUNDS:
                    self.log.record_window()
                    self.log.dump(self.steps)
                if interrupt.requested:
                    write_checkpoint(run_dir, boundary)
                    return False
            boundary = self.snapshot()
        write_checkpoint(run_dir, self.snapshot())  # before the last dump: a longer run goes on from here
        self.log.compare(self.steps, self.player, always=True)
        self.log.record_window()
        self.log.dump(self.steps)
        return not interrupt.requested
