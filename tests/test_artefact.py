"""Saved policies: same actions in a fresh process, and one readable sentence for everything that is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from fakes import FakeBackend, fake_requests

from assc.actions import ActionTable
from assc.core import Action, Observation, RoundRecord
from assc.errors import ArtefactError
from assc.observe import Featurizer
from assc.registry import make_policy
from assc.run import run_request
from policies.artefact import load_artefact, read_artefact, save_network, save_policy
from policies.base import BasePolicy
from policies.learned import LearnedPolicy, Network, Normaliser

TABLE = ActionTable.build(["ngram", "model"], [1, 2, 4, 8])
FEATURIZER = Featurizer(["history_k", "history_accepted", "acceptance_ema", "target_entropy", "cost_ratio"])


def random_network(seed: int = 0, size: int = FEATURIZER.size, actions: int = len(TABLE)) -> Network:
    rng = np.random.default_rng(seed)
    widths = [size, 32, 16, actions]
    layers = [
        (rng.normal(0, 1, (b, a)).astype(np.float32), rng.normal(0, 1, b).astype(np.float32))
        for a, b in pairwise(widths)
    ]
    return Network(layers, "tanh", Normaliser(rng.normal(0, 1, size), rng.random(size) + 0.1, 1e-8, 10.0))


def observations(n: int = 40, seed: int = 0) -> list[Observation]:
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(n):
        rounds = []
        for i in range(int(rng.integers(0, 8))):
            k = int(rng.integers(0, 9))
            accepted = int(rng.integers(0, k + 1))
            action = Action("ngram", k) if k else Action(None, 0)
            rounds.append(RoundRecord(i, i, action, k, accepted, accepted + 1, (), 0.1))
        entropy = float(rng.random() * 4)
        out.append(Observation(5, 3, 20, 8, 0.0, tuple(rounds), float(rng.random()), target_entropy=entropy))
    return out


def picks(policy: BasePolicy, seen: list[Observation]) -> list[str]:
    policy.begin(TABLE)
    return [str(policy.act(o)) for o in seen]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save_network(
        tmp_path / "policy.zip",
        random_network(),
        kind="ppo",
        featurizer=FEATURIZER,
        table=TABLE,
        meta={"mode": "greedy", "pair": "tiny", "training": {"steps": 7}, "versions": {"torch": "0"}},
    )


FRESH = """
import sys
sys.path.insert(0, sys.argv[2])
from test_artefact import observations, picks
from assc.registry import make_policy
print("|".join(picks(make_policy(sys.argv[1]), observations(seed=3))))
assert not {"stable_baselines3", "torch"} & set(sys.modules), "the deployed policy imports SB3 or torch"
"""


def in_a_fresh_process(path: Path) -> list[str]:
    here = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(here.parent), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", FRESH, str(path), str(here)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().split("|")


def test_network_picks_the_same_actions_in_a_fresh_process(saved: Path) -> None:
    policy = LearnedPolicy(random_network(), FEATURIZER, TABLE)
    expected = picks(policy, observations(seed=3))
    assert len(set(expected)) > 2, "the test network must not be constant"
    assert in_a_fresh_process(saved) == expected
    artefact = read_artefact(saved)
    assert artefact.kind == "ppo" and artefact.meta["training"] == {"steps": 7} and artefact.table == TABLE
    assert {"assc", "numpy", "torch"} <= set(artefact.meta["versions"])


@pytest.mark.parametrize(
    "spec", ["bandit:ucb", "bandit:ts,window=50", "bandit:ucb,frozen=true", "assc:k_max=6", "random"]
)
def test_other_policies_continue_in_a_fresh_process(spec: str, tmp_path: Path) -> None:
    policy = make_policy(spec, seed=2)
    for request in fake_requests(5):
        run_request(FakeBackend(drafters=TABLE.drafters, k_values=(1, 2, 4, 8)), request, policy)
    path = save_policy(tmp_path / "p.zip", policy, table=TABLE, meta={"mode": "greedy"})
    assert isinstance(policy, BasePolicy)
    state = json.dumps(policy.state_dict())
    assert in_a_fresh_process(path) == picks(policy, observations(seed=3))
    loaded = load_artefact(path)
    assert loaded.spec == str(path) and json.dumps(loaded.state_dict()) == state
    for request in fake_requests(2):
        run_request(FakeBackend(drafters=TABLE.drafters, k_values=(1, 2, 4, 8)), request, loaded)
    loaded.reset()
    assert json.dumps(loaded.state_dict()) == state, "reset of a loaded policy returns to what was saved"


def test_a_learner_can_be_saved_frozen(tmp_path: Path) -> None:
    policy = make_policy("bandit:ucb")
    run_request(FakeBackend(k_values=(1, 2, 4, 8)), fake_requests(1)[0], policy)
    path = save_policy(
        tmp_path / "p.zip", policy, table=ActionTable.build(["ngram"], [1, 2, 4, 8]), spec="bandit:ucb,frozen=true"
    )
    loaded = load_artefact(path)
    before = json.dumps(loaded.state_dict())
    run_request(FakeBackend(k_values=(1, 2, 4, 8)), fake_requests(1)[0], loaded)
    assert json.dumps(loaded.state_dict()) == before
    with pytest.raises(ArtefactError, match="saved under the spec"):
        save_policy(tmp_path / "q.zip", loaded, table=TABLE)


def test_B17_deterministic_unless_asked(saved: Path) -> None:
    """The same state 20 times gives one action; sampling is a flag, seeded, and rewound by `reset`."""
    one = observations(1, seed=9)[0]
    assert len(set(picks(load_artefact(saved), [one] * 20))) == 1
    flat = [(w * 0.05, b * 0.05) for w, b in random_network().layers]
    soft = save_network(saved, Network(flat, "tanh"), kind="a2c", featurizer=FEATURIZER, table=TABLE)
    sampling = load_artefact(soft, deterministic=False, seed=1)
    first = picks(sampling, [one] * 50)
    assert len(set(first)) > 3
    sampling.reset()
    assert picks(sampling, [one] * 50) == first
    assert picks(load_artefact(soft, deterministic=False, seed=2), [one] * 50) != first


def test_sampling_has_the_odds_of_the_softmax() -> None:
    """20,000 draws from 3 actions: each count within 5 standard deviations (false alarm below 1 in 100,000)."""
    scores = np.array([0.0, 1.0, 2.0], np.float32)
    table = ActionTable.build(["ngram"], [2, 4])
    network = Network([(np.zeros((3, 1), np.float32), scores)], "relu")
    policy = LearnedPolicy(network, Featurizer(["temperature"]), table, deterministic=False)
    chosen = picks_with(policy, table, 20_000)
    p = np.exp(scores) / np.exp(scores).sum()
    for action, chance in zip(table, p, strict=True):
        assert abs(chosen.count(str(action)) - 20_000 * chance) < 5 * np.sqrt(20_000 * chance * (1 - chance))


def picks_with(policy: BasePolicy, table: ActionTable, n: int) -> list[str]:
    policy.begin(table)
    one = observations(1)[0]
    return [str(policy.act(one)) for _ in range(n)]


def test_a_dqn_has_nothing_to_sample_from(saved: Path) -> None:
    save_network(saved, random_network(), kind="dqn", featurizer=FEATURIZER, table=TABLE)
    with pytest.raises(ArtefactError, match="values, not a distribution"):
        load_artefact(saved, deterministic=False)


@pytest.mark.parametrize("kind", ["network", "bandit"])
def test_B14_action_table_of_another_decoder(saved: Path, tmp_path: Path, kind: str) -> None:
    """The error names both tables; a decoder that can play the actions in another table is fine."""
    if kind == "bandit":
        saved = save_policy(tmp_path / "b.zip", make_policy("bandit:ucb"), table=TABLE)
    policy = load_artefact(saved)
    policy.begin(ActionTable.build(["model", "ngram", "other"], range(1, 17)))
    for table in (ActionTable.build(["ngram", "model"], [1, 2, 4]), ActionTable.build(["ngram"], [1, 2, 4, 8, 16])):
        with pytest.raises(ArtefactError) as caught:
            policy.begin(table)
        assert TABLE.describe() in str(caught.value) and table.describe() in str(caught.value)
        assert str(saved) in str(caught.value)


def test_B16_nothing_bad_is_written(tmp_path: Path) -> None:
    layers = random_network().layers
    bad = Network([(layers[0][0] * np.nan, layers[0][1]), *layers[1:]], "tanh")
    with pytest.raises(ArtefactError, match="NaN"):
        save_network(tmp_path / "p.zip", bad, kind="ppo", featurizer=FEATURIZER, table=TABLE)
    with pytest.raises(ValueError, match="may not set"):
        save_network(
            tmp_path / "p.zip", random_network(), kind="ppo", featurizer=FEATURIZER, table=TABLE, meta={"kind": "x"}
        )
    assert list(tmp_path.iterdir()) == []


def test_a_crash_while_saving_keeps_the_old_file(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved.read_bytes()

    def crash(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(ArtefactError, match="No space left"):
        save_policy(saved, make_policy("assc"), table=TABLE)
    assert saved.read_bytes() == before and list(saved.parent.iterdir()) == [saved]


def test_saving_twice_writes_the_same_bytes(tmp_path: Path) -> None:
    paths = [
        save_network(tmp_path / name, random_network(), kind="ppo", featurizer=FEATURIZER, table=TABLE)
        for name in ("a.zip", "b.zip")
    ]
    assert paths[0].read_bytes() == paths[1].read_bytes()
