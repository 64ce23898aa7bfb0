"""Networks of stable-baselines3 models, carried over exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from stable_baselines3 import A2C, DQN, PPO, SAC
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
from torch import nn

from assc.actions import ActionTable
from assc.errors import ArtefactError
from assc.observe import Featurizer
from policies.artefact import read_artefact
from policies.sb3_adapter import export_sb3

TABLE = ActionTable.build(["ngram", "model"], [1, 2, 4, 8])
FEATURIZER = Featurizer()


class Noise(gym.Env[NDArray[np.float32], int]):
    """Random observations within the featurizer's bounds; reward 1 for the action that the first number names."""

    def __init__(self, actions: gym.Space[Any] | None = None, size: int | None = None) -> None:
        low, high = FEATURIZER.low[:size], FEATURIZER.high[:size]
        self.observation_space = gym.spaces.Box(low, high, dtype=np.float32)
        self.action_space = actions or gym.spaces.Discrete(len(TABLE))  # type: ignore[assignment]
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return self.observation_space.sample(), float(np.sum(action) == 3), False, self.steps >= 10, {}


def vectorised(normalise: bool, **options: Any) -> Any:
    env = DummyVecEnv([lambda: Noise(**options)])
    return VecNormalize(env, norm_reward=False, clip_obs=2.0) if normalise else env


def random_weights(model: Any) -> None:
    """Weights so large that the actions differ from observation to observation."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.policy.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.5 if parameter.ndim == 2 else 0.2))


CASES = [
    (PPO, {"n_steps": 32, "batch_size": 16}, {}),
    (PPO, {"n_steps": 32, "batch_size": 16}, {"net_arch": {"pi": [24], "vf": [8, 8]}, "activation_fn": nn.ReLU}),
    (PPO, {"n_steps": 32, "batch_size": 16}, {"net_arch": [], "share_features_extractor": False}),
    (A2C, {}, {"net_arch": [16, 16, 16]}),
    (DQN, {"learning_starts": 8, "buffer_size": 100}, {}),
    (DQN, {"learning_starts": 8, "buffer_size": 100}, {"net_arch": [], "activation_fn": nn.Tanh}),
]


@pytest.mark.parametrize(("algorithm", "options", "policy_kwargs"), CASES)
@pytest.mark.parametrize("normalise", [False, True])
def test_B17_same_action_as_predict(
    algorithm: Any, options: dict[str, Any], policy_kwargs: dict[str, Any], normalise: bool, tmp_path: Path
) -> None:
    """200 random observations, some far outside what was seen: the numpy network and SB3 agree on every action."""
    env = vectorised(normalise)
    model = algorithm("MlpPolicy", env, policy_kwargs=policy_kwargs, device="cpu", seed=0, **options)
    model.learn(64)
    random_weights(model)
    path = export_sb3(model, env if normalise else None, path=tmp_path / "p.zip", featurizer=FEATURIZER, table=TABLE)
    artefact = read_artefact(path)
    assert artefact.network is not None and artefact.kind == algorithm.__name__.lower()
    assert {"torch", "stable-baselines3", "gymnasium"} <= set(artefact.meta["versions"])
    rng = np.random.default_rng(1)
    batch = rng.uniform(FEATURIZER.low, FEATURIZER.high, (200, FEATURIZER.size)).astype(np.float32)
    batch[:20] *= 50
    ours = [int(artefact.network(vector).argmax()) for vector in batch]
    theirs = [int(model.predict(env.normalize_obs(v) if normalise else v, deterministic=True)[0]) for v in batch]
    assert ours == theirs and len(set(ours)) > 2


def ppo(**options: Any) -> Any:
    kwargs = options.pop("policy_kwargs", None)
    return PPO("MlpPolicy", vectorised(False, **options), n_steps=8, batch_size=8, device="cpu", policy_kwargs=kwargs)


def test_what_cannot_be_carried_over_is_refused(tmp_path: Path) -> None:
    """B05: also a Discrete that does not start at 0, whose actions would all be shifted."""
    path = tmp_path / "p.zip"

    def export(model: Any) -> None:
        export_sb3(model, None, path=path, featurizer=FEATURIZER, table=TABLE)

    with pytest.raises(ArtefactError, match="Tanh or ReLU"):
        export(ppo(policy_kwargs={"activation_fn": nn.SiLU}))
    with pytest.raises(ArtefactError, match="9 actions from 0"):
        export(ppo(actions=gym.spaces.Discrete(len(TABLE), start=1)))
    with pytest.raises(ArtefactError, match="9 actions from 0"):
        export(ppo(actions=gym.spaces.Discrete(3)))
    with pytest.raises(ArtefactError, match="the featurizer makes"):
        export(ppo(size=4))
    with pytest.raises(ArtefactError, match="SAC"):
        export(SAC("MlpPolicy", vectorised(False, actions=gym.spaces.Box(-1, 1, (1,))), device="cpu", buffer_size=10))
    broken = ppo()
    with torch.no_grad():
        broken.policy.action_net.weight[0, 0] = float("nan")
    with pytest.raises(ArtefactError, match="NaN"):
        export(broken)
    assert not path.exists()
