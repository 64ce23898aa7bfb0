"""What stable-baselines3 trains on: one environment over any backend, or many lanes over a trace.

Both count what was played and give their whole state, so that a learner goes on after a kill as if nothing had been.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

from assc.actions import ActionTable
from assc.core import Totals
from assc.observe import Featurizer
from assc.step_features import Opening
from envs import DraftStepEnv, SpecDecodeEnv
from envs.vector import ReplayVecEnv

Arrays = dict[str, NDArray[Any]]


class Play(Protocol):
    """An SB3 `VecEnv` of decoding rounds, with its features, its table of actions and its state."""

    venv: VecEnv
    featurizer: Featurizer
    table: ActionTable
    opening: Opening | None
    """how a round begins where decisions are made per draft token"""

    def take_totals(self, infos: Sequence[Mapping[str, Any]]) -> Totals:
        """What the last step played; `infos` are those of that step."""

    def set_rho(self, rho: float) -> None:
        """Move ρ of the `dinkelbach` reward."""

    def state_dict(self) -> tuple[dict[str, Any], Arrays]:
        """All that the next round depends on: what fits into JSON, and arrays."""

    def load_state_dict(self, state: Mapping[str, Any], arrays: Arrays, seed: int) -> None:
        """Go on where `state_dict` was taken."""


class SinglePlay:
    """One environment, one request at a time: any backend."""

    def __init__(self, env: SpecDecodeEnv) -> None:
        self.env = env
        self.monitor = Monitor(env)
        self.venv: VecEnv = DummyVecEnv([lambda: self.monitor])
        self.featurizer, self.table = env.featurizer, env.table
        self.opening: Opening | None = None

    def take_totals(self, infos: Sequence[Mapping[str, Any]]) -> Totals:
        return Totals.of([infos[0]["record"]])

    def set_rho(self, rho: float) -> None:
        self.env.set_rho(rho)

    def state_dict(self) -> tuple[dict[str, Any], Arrays]:
        monitor = {"rewards": [float(r) for r in self.monitor.rewards], "needs_reset": self.monitor.needs_reset}
        return {"env": self.env.state_dict(), "monitor": monitor}, {}

    def load_state_dict(self, state: Mapping[str, Any], arrays: Arrays, seed: int) -> None:
        self.env.reset(seed=seed)
        self.env.load_state_dict(state["env"])
        self.monitor.rewards, self.monitor.needs_reset = state["monitor"]["rewards"], state["monitor"]["needs_reset"]


class StepPlay:
    """Environments that decide per draft token, one after the other in each step."""

    def __init__(self, envs: Sequence[DraftStepEnv]) -> None:
        self.envs = [Monitor(env) for env in envs]
        makers: list[Callable[[], Any]] = [lambda env=env: env for env in self.envs]  # type: ignore[misc]
        self.venv: VecEnv = DummyVecEnv(makers)
        self.featurizer, self.table = envs[0].featurizer, envs[0].opening.table
        self.opening: Opening | None = envs[0].opening

    def take_totals(self, infos: Sequence[Mapping[str, Any]]) -> Totals:
        return Totals.of([info["record"] for info in infos if "record" in info])

    def set_rho(self, rho: float) -> None:
        for env in self.envs:
            _inner(env).set_rho(rho)

    def state_dict(self) -> tuple[dict[str, Any], Arrays]:
        return {
            "envs": [{"env": _inner(e).state_dict(), "rewards": list(map(float, e.rewards))} for e in self.envs]
        }, {}

    def load_state_dict(self, state: Mapping[str, Any], arrays: Arrays, seed: int) -> None:
        for lane, (env, kept) in enumerate(zip(self.envs, state["envs"], strict=True)):
            env.reset(seed=seed + lane)
            _inner(env).load_state_dict(kept["env"])
            env.rewards, env.needs_reset = list(kept["rewards"]), False


def _inner(env: Monitor[Any, Any]) -> DraftStepEnv:
    inner = env.unwrapped
    assert isinstance(inner, DraftStepEnv)
    return inner


class LanesPlay:
    """Many requests of a trace in lockstep."""

    def __init__(self, venv: ReplayVecEnv) -> None:
        self.venv: VecEnv = venv
        self.lanes = venv.lanes
        self.featurizer, self.table = self.lanes.features.featurizer, self.lanes.table
        self.opening: Opening | None = None

    def take_totals(self, infos: Sequence[Mapping[str, Any]]) -> Totals:
        return self.lanes.take_totals()

    def set_rho(self, rho: float) -> None:
        self.lanes.set_rho(rho)

    def state_dict(self) -> tuple[dict[str, Any], Arrays]:
        state, arrays = self.lanes.state_dict()
        return {"lanes": state}, {f"play/{name}": array for name, array in arrays.items()}

    def load_state_dict(self, state: Mapping[str, Any], arrays: Arrays, seed: int) -> None:
        own = {name.removeprefix("play/"): np.asarray(a) for name, a in arrays.items() if name.startswith("play/")}
        self.lanes.load_state_dict(state["lanes"], own)
