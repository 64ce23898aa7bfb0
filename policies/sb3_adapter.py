"""From a trained stable-baselines3 model to an artefact that needs neither SB3 nor torch.

Both libraries are imported when a model is exported, never when a policy is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assc.actions import ActionTable
from assc.errors import ArtefactError
from assc.observe import Featurizer
from assc.step_features import Opening, StepFeaturizer
from assc.steps import Decision
from policies.artefact import package_versions, save_network
from policies.learned import Network, Normaliser
from policies.recurrent import Lstm, RecurrentNetwork

Layer = tuple[NDArray[np.float32], NDArray[np.float32]]


def export_sb3(
    model: Any,
    vecnormalize: Any | None,
    *,
    path: str | os.PathLike[str],
    featurizer: Featurizer,
    table: ActionTable,
    meta: Mapping[str, Any] | None = None,
    opening: Opening | None = None,
) -> Path:
    """Save the greedy policy of a PPO, A2C or DQN model with `MlpPolicy`, or of sb3-contrib's RecurrentPPO with
    `MlpLstmPolicy`, as an artefact, and return its path.

    `vecnormalize` is the `VecNormalize` wrapper the model was trained in, None without one. `featurizer` and `table`
    are those of its environment, `opening` is given for a `DraftStepEnv`. Raises `ArtefactError` for models and
    networks it cannot carry over exactly.
    """
    kind, network = actor_network(model, vecnormalize)
    if opening is None:
        _check_spaces(model, featurizer.size, len(table))
    else:
        _check_spaces(model, StepFeaturizer(featurizer.fields).size, len(Decision))
    description = dict(meta or {})
    description["versions"] = package_versions("torch", "stable-baselines3", "sb3-contrib", "gymnasium") | dict(
        description.get("versions", {})
    )
    return save_network(path, network, kind=kind, featurizer=featurizer, table=table, meta=description, opening=opening)


def actor_network(model: Any, vecnormalize: Any | None) -> tuple[str, Network | RecurrentNetwork]:
    """The kind of an SB3 model, and its network from observation to logits (PPO, A2C) or values (DQN)."""
    from stable_baselines3 import A2C, DQN, PPO
    from stable_baselines3.common.torch_layers import FlattenExtractor

    classes = {"ppo": PPO, "a2c": A2C, "dqn": DQN}
    if type(model).__module__.startswith("sb3_contrib."):
        from sb3_contrib import RecurrentPPO

        classes["recurrent_ppo"] = RecurrentPPO
    kind = next((name for name, cls in classes.items() if isinstance(model, cls)), None)
    if kind is None:
        raise ArtefactError(f"only PPO, A2C, DQN and RecurrentPPO models can be exported, got {type(model).__name__}")
    policy = model.policy
    if kind == "dqn":
        extractor, modules = policy.q_net.features_extractor, list(policy.q_net.q_net)
    else:
        extractor = getattr(policy, "pi_features_extractor", policy.features_extractor)
        modules = [*policy.mlp_extractor.policy_net, policy.action_net]
    if type(extractor) is not FlattenExtractor:
        raise ArtefactError(f"only MlpPolicy can be exported, got the features extractor {type(extractor).__name__}")
    layers, activation = _layers(modules)
    if kind == "recurrent_ppo":
        return kind, RecurrentNetwork(_lstm(policy.lstm_actor), Network(layers, activation), _normaliser(vecnormalize))
    return kind, Network(layers, activation, _normaliser(vecnormalize))


def _lstm(module: Any) -> Lstm:
    """One layer of torch's LSTM, its two biases added up."""
    if module.num_layers != 1 or module.bidirectional or module.proj_size or not module.bias:
        raise ArtefactError(f"only an LSTM of one layer in one direction can be exported, got {module}")
    named = {name: value.detach().cpu().numpy().astype(np.float32) for name, value in module.named_parameters()}
    return Lstm(named["weight_ih_l0"], named["weight_hh_l0"], named["bias_ih_l0"] + named["bias_hh_l0"])


def _layers(modules: Iterable[Any]) -> tuple[list[Layer], str]:
    from torch import nn

    layers: list[Layer] = []
    activations: list[str] = []
    for module in modules:
        if isinstance(module, nn.Linear) and len(activations) == len(layers):
            weight = module.weight.detach().cpu().numpy().astype(np.float32)
            bias = np.zeros(weight.shape[0], np.float32) if module.bias is None else module.bias.detach().cpu().numpy()
            layers.append((weight, bias.astype(np.float32)))
        elif isinstance(module, nn.Tanh | nn.ReLU) and len(activations) == len(layers) - 1:
            activations.append("tanh" if isinstance(module, nn.Tanh) else "relu")
        else:
            raise ArtefactError(f"only Linear layers with Tanh or ReLU between them can be exported, got {module}")
    if len(set(activations)) > 1 or len(activations) != len(layers) - 1:
        raise ArtefactError(f"only one activation, between the layers, can be exported, got {activations}")
    return layers, activations[0] if activations else "tanh"


def _normaliser(vecnormalize: Any | None) -> Normaliser | None:
    if vecnormalize is None or not vecnormalize.norm_obs:
        return None
    rms = vecnormalize.obs_rms
    if not hasattr(rms, "mean"):
        raise ArtefactError("only the observation scaling of a Box space can be exported")
    mean, var = (np.array(v, dtype=np.float64) for v in (rms.mean, rms.var))
    return Normaliser(mean, var, float(vecnormalize.epsilon), float(vecnormalize.clip_obs))


def _check_spaces(model: Any, size: int, n: int) -> None:
    from gymnasium.spaces import Box, Discrete

    actions, observations = model.action_space, model.observation_space
    if not isinstance(actions, Discrete) or actions.n != n or actions.start != 0:
        raise ArtefactError(f"the model acts in {actions}, the action table has {n} actions from 0")
    if not isinstance(observations, Box) or observations.shape != (size,):
        raise ArtefactError(f"the model observes {observations}, the featurizer makes {size} numbers")
