"""The recurrent learner: its LSTM step in numpy against sb3-contrib's own predictions, and the memory's lifetime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import FakeBackend, fake_requests
from stable_baselines3.common.vec_env import VecNormalize
from test_sb3_export import FEATURIZER, TABLE, random_weights, vectorised

from assc.errors import ArtefactError, AsscError
from assc.run import run_request
from policies.artefact import load_artefact, read_artefact, save_network
from policies.recurrent import RecurrentNetwork, RecurrentPolicy
from policies.sb3_adapter import export_sb3
from policies.training.config import TrainConfig

contrib = pytest.importorskip("sb3_contrib")


def model_of(venv: Any, **kwargs: Any) -> Any:
    torch.set_num_threads(1)
    options = {"lstm_hidden_size": 12, "net_arch": [8], **kwargs}
    model = contrib.RecurrentPPO(
        "MlpLstmPolicy", venv, n_steps=16, batch_size=16, seed=0, device="cpu", policy_kwargs=options
    )
    random_weights(model)
    return model


@pytest.mark.parametrize("normalise", [False, True])
def test_each_step_equals_the_models_own_with_requests_of_any_length(normalise: bool, tmp_path: Path) -> None:
    venv = vectorised(normalise)
    model = model_of(venv)
    if normalise:
        model.learn(64)  # so that there are statistics
        random_weights(model)
    scaling = venv if isinstance(venv, VecNormalize) else None
    path = export_sb3(model, scaling, path=tmp_path / "p.zip", featurizer=FEATURIZER, table=TABLE)
    network = read_artefact(path).network
    assert isinstance(network, RecurrentNetwork)
    rng = np.random.default_rng(0)
    actions, differing = [], 0
    for length in (1, 2, 7, 20, 3):
        ours, theirs, start = network.lstm.start(), None, np.array([True])
        for _ in range(length):
            x = rng.uniform(FEATURIZER.low, FEATURIZER.high).astype(np.float32)
            scores, *ours = network(x, *ours)
            seen = x if scaling is None else scaling.normalize_obs(x)
            action, theirs = model.predict(seen, state=theirs, episode_start=start, deterministic=True)
            start = np.array([False])
            np.testing.assert_allclose(np.stack(ours), np.concatenate(theirs)[:, 0], rtol=1e-4, atol=1e-5)
            assert int(scores.argmax()) == int(action)
            actions.append(int(action))
            fresh = network(x, *network.lstm.start())[0]
            differing += int(fresh.argmax()) != int(action)
    assert len(set(actions)) > 2 and differing > 0, "the memory decides some of it"


def test_the_memory_starts_empty_with_each_request(tmp_path: Path) -> None:
    path = export_sb3(model_of(vectorised(False)), None, path=tmp_path / "p.zip", featurizer=FEATURIZER, table=TABLE)
    policy = load_artefact(path)
    assert isinstance(policy, RecurrentPolicy)
    backend = FakeBackend(drafters=("ngram", "model"), alpha=0.6, c=0.1)
    first, second = fake_requests(2)
    alone = [str(r.action) for r in run_request(backend, second, policy).rounds]
    moved = policy.output.copy()
    run_request(backend, first, policy)
    assert [str(r.action) for r in run_request(backend, second, policy).rounds] == alone
    np.testing.assert_array_equal(policy.output, moved)
    policy.begin(TABLE)
    assert not policy.output.any() and not policy.cell.any() and moved.any()


def test_damaged_and_foreign_recurrent_networks_are_refused(tmp_path: Path) -> None:
    path = export_sb3(model_of(vectorised(False)), None, path=tmp_path / "p.zip", featurizer=FEATURIZER, table=TABLE)
    network = read_artefact(path).network
    assert isinstance(network, RecurrentNetwork)
    network.lstm.w_x = network.lstm.w_x[:, 1:]
    with pytest.raises(ArtefactError, match="LSTM"):
        save_network(tmp_path / "q.zip", network, kind="recurrent_ppo", featurizer=FEATURIZER, table=TABLE)
    two = model_of(vectorised(False), n_lstm_layers=2)
    with pytest.raises(ArtefactError, match="one layer"):
        export_sb3(two, None, path=tmp_path / "r.zip", featurizer=FEATURIZER, table=TABLE)


def test_without_the_package_it_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("policies.training.config.find_spec", lambda name: None)
    with pytest.raises(AsscError, match=r"pip install 'assc\[recurrent\]'"):
        TrainConfig(algo="recurrent_ppo").check()
