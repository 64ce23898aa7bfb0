"""Vectorised replay against N single environments: observations, rewards and episodes, exactly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from stable_baselines3 import PPO
from tiny_traces import COSTS, tiny_trace

from assc.core import Totals
from assc.costs import CostModel, DrafterCost
from assc.errors import RequestError, TraceError
from assc.loads import Load, scaled
from assc.markov import MARKOV_COSTS, MarkovSource, markov_requests
from assc.observe import DEFAULT_FIELDS, FIELDS
from assc.oracle import optimum
from assc.vector_replay import FlatTrace
from envs.replay import replay_env
from envs.rewards import REWARDS
from envs.vector import ReplayVecEnv, ReplayVectorEnv


def markov_trace(n: int = 12) -> Any:
    return MarkovSource().trace(markov_requests(n, max_new_tokens=40))


@pytest.mark.parametrize("source", ["tiny", "markov"])
@pytest.mark.parametrize("fields", [DEFAULT_FIELDS, tuple(FIELDS)], ids=["free", "all"])
def test_vectors_rewards_and_episodes_are_those_of_single_environments(source: str, fields: tuple[str, ...]) -> None:
    trace, costs = (tiny_trace(), COSTS) if source == "tiny" else (markov_trace(), MARKOV_COSTS)
    rows = trace.where(split="train")
    singles = SyncVectorEnv(
        [lambda: replay_env(trace=trace, cost_model=costs, fields=fields) for _ in range(3)],
        autoreset_mode=AutoresetMode.SAME_STEP,
    )
    many = ReplayVectorEnv(trace, costs, 3, rows=rows, fields=fields)
    assert many.single_action_space == singles.single_action_space
    one, two = singles.reset(seed=7)[0], many.reset(seed=7)[0]
    assert (one == two).all()
    rng = np.random.default_rng(1)
    ended = 0
    for _ in range(150):
        actions = rng.integers(0, many.single_action_space.n, 3)  # type: ignore[attr-defined]
        a, b = singles.step(actions), many.step(actions)
        assert (a[0] == b[0]).all() and (a[1] == b[1]).all() and (a[2] == b[2]).all() and (a[3] == b[3]).all()
        for lane in np.flatnonzero(a[2] | a[3]):
            ended += 1
            assert (a[4]["final_obs"][lane] == b[4]["final_obs"][lane]).all()
    assert ended > 10


def busy(costs: CostModel) -> list[Load]:
    """Three loads with costs of their own in every coefficient."""
    dear = replace(
        costs,
        target_fixed=0.05,
        target_per_token=0.004,
        target_per_kv=3e-6,
        target_per_tile=0.001,
        per_emitted=0.0003,
        overhead=0.002,
        static_kv=not costs.static_kv,
        drafters={n: DrafterCost(2 * d.per_step, 3 * d.per_catch_up, 0.001) for n, d in costs.drafters.items()},
    )
    return [Load(4, scaled(costs, 4).costs), Load(1, costs), Load(32, dear)]


@pytest.mark.parametrize(("chain", "loaded"), [(3, False), (1, True), (2, True)])
@pytest.mark.parametrize("fields", [DEFAULT_FIELDS, tuple(FIELDS)], ids=["free", "all"])
def test_chains_and_loads_are_those_of_single_environments(chain: int, loaded: bool, fields: tuple[str, ...]) -> None:
    """Episodes of several requests and costs that switch under way: numbers, ends and info, for both vector kinds."""
    trace = tiny_trace()
    options: dict[str, Any] = {
        "fields": fields,
        "chain": chain,
        "loads": busy(COSTS) if loaded else (),
        "reward": "saved",
    }
    singles = SyncVectorEnv(
        [lambda: replay_env(trace=trace, cost_model=COSTS, split=None, **options) for _ in range(3)],
        autoreset_mode=AutoresetMode.SAME_STEP,
    )
    many, sb3 = (kind(trace, COSTS, 3, **options) for kind in (ReplayVectorEnv, ReplayVecEnv))
    sb3.seed(7)
    assert (singles.reset(seed=7)[0] == many.reset(seed=7)[0]).all() and (many.lanes.vectors == sb3.reset()).all()
    rng = np.random.default_rng(1)
    ended, inner = 0, 0
    for _ in range(160):
        actions = rng.integers(0, len(many.lanes.table), 3)
        a, b, c = singles.step(actions), many.step(actions), sb3.step(actions)
        assert all((one == two).all() for one, two in zip(a[:4], b[:4], strict=True))
        assert (c[0] == a[0]).all() and (c[1] == a[1].astype(np.float32)).all() and (c[2] == (a[2] | a[3])).all()
        follows = a[4].get("_next_request", np.zeros(3, bool))
        for lane in np.flatnonzero(a[2] | a[3]):
            ended += 1
            assert (a[4]["final_obs"][lane] == b[4]["final_obs"][lane]).all()
            assert (c[3][lane]["terminal_observation"] == a[4]["final_obs"][lane]).all()
        inner += int(follows.sum())
        if chain > 1:
            assert (b[4]["request_ended"] == (follows | a[2] | a[3])).all()
            assert [set(c[3][lane]) for lane in np.flatnonzero(follows)] == [{"finish"}] * int(follows.sum())
    assert ended > 10 and (inner > 10) == (chain > 1)
    if loaded:
        assert len(np.unique(many.lanes.features._occupancies)) == 3


def test_chains_go_on_from_a_saved_state() -> None:
    trace = markov_trace()
    options: dict[str, Any] = {"chain": 3, "loads": busy(MARKOV_COSTS)}
    one, two = (ReplayVecEnv(trace, MARKOV_COSTS, 4, **options) for _ in range(2))
    one.seed(2)
    one.reset()
    rng = np.random.default_rng(1)
    actions = rng.integers(0, len(one.lanes.table), (120, 4))
    for row in actions[:50]:
        one.step(row)
    two.lanes.load_state_dict(*one.lanes.state_dict())
    for row in actions[50:]:
        a, b = one.step(row), two.step(row)
        assert (a[0] == b[0]).all() and (a[1] == b[1]).all() and (a[2] == b[2]).all()


def test_bad_chains_and_loads_are_refused() -> None:
    trace = markov_trace()
    with pytest.raises(RequestError, match="an episode has 0 requests"):
        ReplayVectorEnv(trace, MARKOV_COSTS, 2, chain=0)
    with pytest.raises(TraceError, match="no drafter 'ngram'"):
        lonely = replace(MARKOV_COSTS, drafters={"model": MARKOV_COSTS.drafters["model"]})
        ReplayVectorEnv(trace, MARKOV_COSTS, 2, loads=[Load(1, lonely)])
    with pytest.raises(ValueError, match="one cost model"):
        optimum(FlatTrace(trace, MARKOV_COSTS, loads=busy(MARKOV_COSTS)))


@pytest.mark.parametrize("reward", sorted(REWARDS))
def test_vec_env_of_sb3_agrees_with_the_gymnasium_one(reward: str) -> None:
    trace = markov_trace()
    one, two = (c(trace, MARKOV_COSTS, 4, reward=reward) for c in (ReplayVecEnv, ReplayVectorEnv))
    single = replay_env(trace=trace, cost_model=MARKOV_COSTS, split=None, reward=reward)
    one.seed(3)  # SB3 gives lane i the seed 3 + i
    assert (one.reset() == two.reset(seed=3)[0]).all()
    assert (one.reset() != one.reset()).any(), "every reset would give the same requests"
    one.seed(3)
    vectors = one.reset()
    assert (vectors[0] == single.reset(seed=3)[0]).all()
    rng = np.random.default_rng(1)
    for _ in range(60):
        actions = rng.integers(0, len(one.lanes.table), 4)
        a, b = one.step(actions), two.step(actions)
        _, value, terminated, truncated, _ = single.step(int(actions[0]))
        assert (a[0] == b[0]).all() and np.float32(value) == a[1][0] and a[2][0] == (terminated or truncated)
        if a[2][0]:
            assert a[3][0]["TimeLimit.truncated"] == truncated
            single.reset()
    totals = one.lanes.take_totals()
    assert totals.tokens > 0 and totals.seconds > 0 and one.lanes.take_totals() == Totals()


def test_bad_actions_are_refused() -> None:
    env = ReplayVectorEnv(markov_trace(), MARKOV_COSTS, 2)
    env.reset(seed=0)
    for actions in (np.zeros(2), np.zeros(3, int), np.array([0, 99]), np.array([-1, 0])):
        with pytest.raises(ValueError, match="action"):
            env.step(actions)


def test_ppo_learns_on_it() -> None:
    model = PPO("MlpPolicy", ReplayVecEnv(markov_trace(), MARKOV_COSTS, 8), n_steps=16, batch_size=32, device="cpu")
    model.learn(256)
    assert model.ep_info_buffer is not None and len(model.ep_info_buffer) > 0


def test_a_rejection_trace_is_refused() -> None:
    trace = tiny_trace()
    with pytest.raises(TraceError, match="--approximate"):
        header = type(trace.header)(**{**trace.header.__dict__, "mode": "rejection"})
        ReplayVecEnv(type(trace)(header, trace.columns), COSTS, 2)
