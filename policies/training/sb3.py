"""PPO, A2C and DQN of stable-baselines3, and RecurrentPPO of sb3-contrib, on the environment.

All are resumable to the bit where time is modelled.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from stable_baselines3 import A2C, DQN, PPO
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecNormalize

from assc.core import Backend, Request
from assc.errors import ArtefactError
from policies.artefact import network_policy
from policies.learned import LearnedPolicy
from policies.sb3_adapter import actor_network
from policies.training.checkpoint import Checkpoint, generator_states, restore_generators, write_checkpoint
from policies.training.config import TrainConfig, require_recurrent
from policies.training.imitate import imitate
from policies.training.imitated import BEFORE, learned_before, rule_of
from policies.training.log import Interrupt, TrainingLog
from policies.training.play import Play
from policies.training.settings import parse_settings

CLASSES: dict[str, type[BaseAlgorithm]] = {"ppo": PPO, "a2c": A2C, "dqn": DQN}
ROLLOUT = 256
"""rounds per PPO update on one environment: a live run of 3,000 rounds makes 12 of them"""
LANES_ROLLOUT = {"ppo": 4096, "recurrent_ppo": 4096, "a2c": 1024, "dqn": 32}
"""rounds per update on the lanes of a trace"""
LANES = {"ppo": 64, "recurrent_ppo": 64, "a2c": 64, "dqn": 8}
"""requests under way at once over a trace, at most"""
ON_ROLLOUTS = ("ppo", "recurrent_ppo")
GAMMA = 0.1
"""a round's choice hardly changes what the next rounds can win, since the text is fixed: on recorded SmolLM2 texts the
policies of 3,072 rounds reached 1.82x (modelled, four seeds) with 0.1, 1.79x with 0.5, 1.70x with 0.9"""
STEP_GAMMA = 0.98
"""per draft token: what a decision is worth shows when its round ends, up to 17 decisions later"""
CLONED: dict[str, Any] = {"learning_rate": 3e-4, "ent_coef": 0.002}
CLONED_ROLLOUT = 4
"""after cloning: smaller steps on longer rollouts, by this factor, or what was cloned is lost (docs/training.md)"""
RHO_MEMORY = 0.8
"""share of the older sums that each update of ρ keeps"""
REPORT_ROUNDS = 64
"""fewest rounds that one point of our scalars is pooled over"""


def learner_class(algo: str) -> type[BaseAlgorithm]:
    """The learner's class; `AsscError` where its package is not installed."""
    if algo != "recurrent_ppo":
        return CLASSES[algo]
    require_recurrent()
    from sb3_contrib import RecurrentPPO

    found: type[BaseAlgorithm] = RecurrentPPO
    return found


@dataclass(frozen=True)
class Rollout:
    """Rounds per update, and in how many lanes they are played."""

    rounds: int
    lanes: int

    @property
    def steps(self) -> int:
        """Rounds of each lane."""
        return self.rounds // self.lanes


def rollout_of(
    config: TrainConfig, *, vectorised: bool, checkpoint: Checkpoint | None = None, cloned: bool = False
) -> Rollout:
    """Never more than the whole run; a resumed run keeps what it was started with."""
    if checkpoint is not None:
        return Rollout(int(checkpoint.state["rollout"]), int(checkpoint.state["lanes"]))
    if not vectorised:
        return Rollout(
            min({"ppo": ROLLOUT, "recurrent_ppo": ROLLOUT, "a2c": 16, "dqn": 4}[config.algo], config.rounds), 1
        )
    rounds = min(LANES_ROLLOUT[config.algo] * (CLONED_ROLLOUT if cloned else 1), config.rounds)
    lanes = min(LANES[config.algo], max(1, rounds // 4))
    return Rollout(rounds // lanes * lanes, lanes)


def _minibatch(rollout: int, most: int = 64) -> int:
    """The largest divisor of the rollout up to `most`, so that no minibatch is cut; a tiny rollout itself."""
    best = max(d for d in range(1, min(most, rollout) + 1) if rollout % d == 0)
    return best if best >= min(16, rollout) else rollout


def learner_settings(config: TrainConfig, rollout: Rollout, *, cloned: bool = False) -> dict[str, Any]:
    """Hyperparameters for a small network: a few thousand rounds of one decoder, or many of a trace's lanes.

    A network that has been `cloned` from a rule moves on in smaller steps.
    """
    n, total, many = rollout.steps, config.rounds, rollout.lanes > 1
    shared = {"policy": "MlpPolicy", "gamma": gamma_of(config), "seed": config.seed, "device": "cpu", "verbose": 0}
    if config.algo in ON_ROLLOUTS:
        own: dict[str, Any] = {
            "n_steps": n,
            "batch_size": _minibatch(rollout.rounds, 512 if many else 64),
            "n_epochs": 10,
            "learning_rate": 1e-3,
            "gae_lambda": 0.9,
            "ent_coef": 0.01,
        }
        own |= CLONED if cloned else {}
        if cloned and many:
            own["batch_size"] = _minibatch(rollout.rounds, 512 * CLONED_ROLLOUT)
        if config.algo == "recurrent_ppo":  # the LSTM walks through each minibatch step by step: fewer, larger ones
            own |= {"policy": "MlpLstmPolicy", "n_epochs": 5}
            own["batch_size"] = _minibatch(rollout.rounds, 1024 if many else 128)
    elif config.algo == "a2c":
        own = {"n_steps": n, "learning_rate": 7e-4, "gae_lambda": 0.9, "ent_coef": 0.01}
    else:
        own = {
            "learning_rate": 1e-3,
            "buffer_size": min(total, 50_000),
            "learning_starts": min(2000 if many else 200, total // 5),
            "batch_size": 256 if many else 64,
            "train_freq": n,
            "target_update_interval": 200,
            "exploration_fraction": 0.3,
        }
    kwargs: dict[str, Any] = {"net_arch": [64, 64]}
    if config.algo == "recurrent_ppo":
        kwargs = {"net_arch": [64], "lstm_hidden_size": 64, "enable_critic_lstm": False}
    chosen = parse_settings(config.algo, config.set)
    kwargs |= {name: chosen.pop(name) for name in ("net_arch", "lstm_hidden_size") if name in chosen}
    if "batch_size" in chosen and config.algo != "dqn":
        chosen["batch_size"] = _minibatch(rollout.rounds, chosen["batch_size"])
    return {**shared, **own, **chosen, "policy_kwargs": kwargs}


def gamma_of(config: TrainConfig) -> float:
    """Discount from one decision to the next."""
    usual = STEP_GAMMA if config.granularity == "step" else GAMMA
    return float(parse_settings(config.algo, config.set).get("gamma", usual))


class Sb3Run:
    """One learner, its environment and its log; `snapshot` and `restore` move all of it through a checkpoint."""

    def __init__(
        self, config: TrainConfig, play: Play, rollout: Rollout, log: TrainingLog, checkpoint: Checkpoint | None
    ) -> None:
        self.config, self.play, self.rollout, self.log = config, play, rollout, log
        # Observations are bounded by design and stay as they are. Scaled by their statistics, the first rounds of a
        # request (no history: -1 everywhere) lie far out and learn the opposite of the rest, and a field that never
        # moved in training (c) throws the network off its range when it differs later.
        self.venv = VecNormalize(play.venv, norm_obs=False, gamma=gamma_of(config))
        self.rho_sums = [0.0, 0.0]
        self.rule = rule_of(config, play.table)
        """what the network is to imitate before it plays"""
        self.before = learned_before(self.rule, None if checkpoint is None else checkpoint.state)
        """what the imitated policy had learned from; None: it doesn't say"""
        if checkpoint is None:
            settings = learner_settings(config, rollout, cloned=self.rule is not None)
            self.model = learner_class(config.algo)(env=self.venv, **settings)
        else:
            self._restore(checkpoint)
        self.model.set_logger(log.logger)

    @property
    def steps(self) -> int:
        return int(self.model.num_timesteps)

    @property
    def updates(self) -> int:
        return int(self.model._n_updates)

    def imitate(self, backend: Backend, requests: Sequence[Request]) -> str | None:
        """Clone `rule` into the fresh network; the rule as tuned, None without one."""
        if self.rule is None:
            return None
        return imitate(self.model, self.rule, backend, requests, self.play.featurizer, self.config.seed)

    def player(self) -> LearnedPolicy:
        """The greedy policy as it is now, as it would be saved."""
        _, network = actor_network(self.model, self.venv)
        return network_policy(network, self.play.featurizer, self.play.table, self.play.opening)

    def train(self, interrupt: Interrupt, run_dir: Path) -> bool:
        """Learn what is left to learn; False if Ctrl-C stopped it. Either way the last checkpoint is on disk."""
        left = self.config.rounds - self.steps
        callback = _Callback(self, interrupt, run_dir)
        if left > 0:
            self.model.learn(
                left,
                callback=callback,
                log_interval=1 if self.config.algo in ON_ROLLOUTS else 4,
                reset_num_timesteps=self.steps == 0,
            )
        if callback.stopped:
            return False
        write_checkpoint(run_dir, self.snapshot())  # before the last dump: a longer run goes on from here
        self.log.compare(self.steps, self.player, always=True)
        self.log.record_window()
        self.log.dump(self.steps)
        return not interrupt.requested

    def snapshot(self) -> Checkpoint:
        """The state at a rollout's start: what happens from here depends on nothing else."""
        buffer = io.BytesIO()
        self.model.save(buffer)
        returns = self.venv.ret_rms
        played, arrays = self.play.state_dict()
        state = {
            "play": played,
            "normalise": {
                "returns": [float(returns.mean), float(returns.var), float(returns.count)],
                "running": self.venv.returns.tolist(),
            },
            "rho_sums": self.rho_sums,
            BEFORE: None if self.before is None else self.before.to_json(),
            "rollout": self.rollout.rounds,
            "lanes": self.rollout.lanes,
            "log": self.log.state_dict(),
            "generators": generator_states(),
            "exploration": self.model.action_space.np_random.bit_generator.state,
        }
        return Checkpoint(self.steps, state, buffer.getvalue(), self._replay() | self._memory() | arrays)

    def _memory(self) -> dict[str, Any]:
        """The state of a recurrent network in every lane, which loading a model of sb3-contrib would clear."""
        states = getattr(self.model, "_last_lstm_states", None)
        if states is None:
            return {}
        return {f"lstm/{i}": tensor.cpu().numpy() for i, tensor in enumerate((*states.pi, *states.vf))}

    def _restore_memory(self, arrays: Mapping[str, Any]) -> None:
        states = getattr(self.model, "_last_lstm_states", None)
        if states is not None:
            a, b, c, d = (torch.from_numpy(np.array(arrays[f"lstm/{i}"])) for i in range(4))
            self.model._last_lstm_states = type(states)((a, b), (c, d))  # type: ignore[attr-defined]

    def _replay(self) -> dict[str, Any]:
        if not isinstance(self.model, DQN):
            return {}
        stored = self.model.replay_buffer
        assert stored is not None
        end = stored.buffer_size if stored.full else stored.pos
        names = ("observations", "next_observations", "actions", "rewards", "dones", "timeouts")
        arrays: dict[str, Any] = {name: getattr(stored, name)[:end] for name in names}
        return arrays | {"pos": np.array(stored.pos), "full": np.array(stored.full)}

    def _restore(self, checkpoint: Checkpoint) -> None:
        if checkpoint.model is None:
            raise ArtefactError("the checkpoint holds no network; it was written by another kind of learner")
        self.model = learner_class(self.config.algo).load(
            io.BytesIO(checkpoint.model), env=self.venv, device="cpu", force_reset=False
        )
        if isinstance(self.model, DQN) and checkpoint.replay:
            stored, arrays = self.model.replay_buffer, dict(checkpoint.replay)
            assert stored is not None
            stored.pos, stored.full = int(arrays.pop("pos")), bool(arrays.pop("full"))
            for name, array in arrays.items():
                if not name.startswith("play/"):
                    getattr(stored, name)[: len(array)] = array
        state = checkpoint.state
        normalise, returns = state["normalise"], self.venv.ret_rms
        mean, var, returns.count = normalise["returns"]
        returns.mean, returns.var = np.array(mean, dtype=np.float64), np.array(var, dtype=np.float64)
        self.venv.returns = np.array(normalise["running"], dtype=np.float64)
        self.play.load_state_dict(state["play"], checkpoint.replay, self.config.seed)
        self._restore_memory(checkpoint.replay)
        self.rho_sums = state["rho_sums"]
        self.log.load_state_dict(state["log"])
        restore_generators(state["generators"])
        self.model.action_space.np_random.bit_generator.state = state["exploration"]  # loading has seeded it anew


class _Callback(BaseCallback):
    """Counts rounds, moves ρ, writes checkpoints at the start of rollouts, and stops on Ctrl-C."""

    def __init__(self, run: Sb3Run, interrupt: Interrupt, run_dir: Path) -> None:
        super().__init__()
        self.run, self.interrupt, self.run_dir = run, interrupt, run_dir
        self.stopped = False
        self._saved_at = run.steps
        self._saved_on_request = False
        self._boundary: Checkpoint | None = None
        self._on_policy = not isinstance(run.model, DQN)

    def _on_rollout_start(self) -> None:
        self.run.log.compare(self.run.steps, self.run.player)
        due = self.run.steps - self._saved_at >= self.run.config.checkpoint_rounds
        if due or self._on_policy or self.interrupt.requested:
            self._boundary = self.run.snapshot()
        if (due or self.interrupt.requested) and self._boundary is not None:
            write_checkpoint(self.run_dir, self._boundary)
            self._saved_at = self.run.steps
            self._saved_on_request = self.interrupt.requested

    def _on_step(self) -> bool:
        self.run.log.add(self.run.play.take_totals(self.locals["infos"]), self.num_timesteps)
        if not self.interrupt.requested:
            return True
        if self._on_policy and self._boundary is not None:
            write_checkpoint(self.run_dir, self._boundary)
            self.stopped = True
        self.stopped = self.stopped or self._saved_on_request  # off policy: at the start of the next rollout
        return not self.stopped

    def _on_rollout_end(self) -> None:
        log, run = self.run.log, self.run
        if log.window.rounds < min(REPORT_ROUNDS, run.config.rounds):
            return
        tokens, seconds = log.window.tokens, log.window.seconds
        run.rho_sums = [RHO_MEMORY * run.rho_sums[0] + tokens, RHO_MEMORY * run.rho_sums[1] + seconds]
        if run.rho_sums[1] > 0:
            run.play.set_rho(run.rho_sums[0] / run.rho_sums[1])
        log.record_window()
