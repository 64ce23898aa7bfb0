"""Vectorised replay: N requests in lockstep as an SB3 `VecEnv` and as a Gymnasium `VectorEnv`.

Both give the observations, rewards and episodes of N single environments over the same requests (a test), several
hundred thousand rounds per second.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv

from assc.costs import CostModel
from assc.trace import FINISHES, Trace
from assc.vector_replay import GOING
from envs.decode import TRUNCATED
from envs.lanes import ReplayLanes

CUT = np.array([f in TRUNCATED for f in FINISHES])
"""[finish code] whether it cuts the episode instead of ending it"""


class ReplayVectorEnv(VectorEnv[NDArray[np.float32], NDArray[np.int64], NDArray[Any]]):
    """Gymnasium `VectorEnv` with same-step autoreset: `infos["final_obs"]` holds the last vectors of ended episodes.

    `reset(seed=s)` gives lane i the seed s + i, as `SyncVectorEnv` does. With `chain` above 1 an episode goes on over
    several requests, and `infos["request_ended"]` [N] says where one ended. `options` of `ReplayLanes` are keyword
    arguments here.
    """

    def __init__(self, trace: Trace, cost_model: CostModel, num_envs: int = 64, **options: Any) -> None:
        self.lanes = ReplayLanes(trace, cost_model, num_envs, **options)
        self.num_envs = num_envs
        self.single_observation_space = gym.spaces.Box(self.lanes.low, self.lanes.high, dtype=np.float32)
        self.single_action_space = gym.spaces.Discrete(len(self.lanes.table))
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.metadata = {"render_modes": [], "autoreset_mode": AutoresetMode.SAME_STEP}

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        seeds = seed if isinstance(seed, list) else [None if seed is None else seed + i for i in range(self.num_envs)]
        if len(seeds) != self.num_envs:
            raise ValueError(f"{self.num_envs} seeds are needed, got {len(seeds)}")
        return self.lanes.reset([gym.utils.seeding.np_random(s)[0] for s in seeds]).copy(), {}

    def step(
        self, actions: NDArray[np.int64]
    ) -> tuple[NDArray[np.float32], NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        played, rewards, done, last, _ = self.lanes.step(actions)
        terminated, truncated = np.zeros(self.num_envs, bool), np.zeros(self.num_envs, bool)
        truncated[done] = CUT[played.finish[done]]
        terminated[done] = ~truncated[done]
        infos: dict[str, Any] = {"emitted": played.emitted, "seconds": played.seconds}
        if len(done):
            final = np.full(self.num_envs, None, dtype=object)
            episode_return, length = np.zeros(self.num_envs), np.zeros(self.num_envs, np.int64)
            for i, lane in enumerate(done):
                final[lane] = last[i]
                episode_return[lane], length[lane] = self.lanes.take_episode(int(lane))
            flags = terminated | truncated
            infos |= {"final_obs": final, "_final_obs": flags, "episode": {"r": episode_return, "l": length}}
            infos["_episode"] = flags
        if self.lanes.chain > 1:
            infos["request_ended"] = played.finish != GOING
        return self.lanes.vectors, rewards, terminated, truncated, infos


class ReplayVecEnv(VecEnv):
    """SB3 `VecEnv`. `infos[i]` of an ended episode has `terminal_observation`, `episode` and `finish`; others are {}.

    With `chain` above 1 a request that ends inside an episode has `finish` alone.

    `lanes.take_totals()` counts the rounds played since its last call; their Σtokens/Σseconds moves ρ. `options` of
    `ReplayLanes` are keyword arguments here.
    """

    def __init__(self, trace: Trace, cost_model: CostModel, num_envs: int = 64, **options: Any) -> None:
        self.lanes = ReplayLanes(trace, cost_model, num_envs, **options)
        space = gym.spaces.Box(self.lanes.low, self.lanes.high, dtype=np.float32)
        self._actions: NDArray[Any] = np.zeros(num_envs, np.int64)
        self._generators: list[np.random.Generator] | None = None
        super().__init__(num_envs, space, gym.spaces.Discrete(len(self.lanes.table)))

    def reset(self) -> NDArray[np.float32]:
        """Start all lanes; seeds given by `seed` hold for the first reset after it."""
        if self._generators is None or any(s is not None for s in self._seeds):
            self._generators = [gym.utils.seeding.np_random(s)[0] for s in self._seeds]
        self._reset_seeds()
        return self.lanes.reset(self._generators).copy()

    def step_async(self, actions: NDArray[Any]) -> None:
        self._actions = actions

    def step_wait(self) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.bool_], list[dict[str, Any]]]:
        played, rewards, done, last, rows = self.lanes.step(self._actions)
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        ended = np.zeros(self.num_envs, bool)
        ended[done] = True
        if self.lanes.chain > 1:
            for lane in np.flatnonzero(played.finish != GOING):
                infos[lane] = {"finish": FINISHES[int(played.finish[lane])]}
        for i, lane in enumerate(done):
            episode_return, length = self.lanes.take_episode(int(lane))
            code = int(played.finish[lane])
            infos[lane] = {
                "terminal_observation": last[i],
                "TimeLimit.truncated": bool(CUT[code]),
                "episode": {"r": episode_return, "l": length, "t": 0.0},
                "finish": FINISHES[code],
                "row": int(rows[i]),
            }
        return self.lanes.vectors, rewards.astype(np.float32), ended, infos

    def close(self) -> None:
        """Nothing is held open."""

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [getattr(self.lanes, attr_name, None)] * len(list(self._get_indices(indices)))

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        setattr(self.lanes, attr_name, value)

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        """Call a method of the lanes once (`set_rho`, for example)."""
        return [getattr(self.lanes, method_name)(*args, **kwargs)]

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        return [False] * len(list(self._get_indices(indices)))
