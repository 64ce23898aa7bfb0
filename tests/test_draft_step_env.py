"""The environments that decide after each drafted token."""

from __future__ import annotations

import warnings
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env
from stable_baselines3.common.env_checker import check_env as sb3_check_env
from test_draft_steps import without_steps
from tiny_traces import COSTS, tiny_engine, tiny_trace

from assc.core import Action
from assc.errors import RequestError, TraceError
from assc.live import LiveBackend
from assc.replay import ReplayBackend
from assc.step_features import STEP_NUMBERS, StepFeaturizer
from assc.steps import Decision
from envs import STEP_LIVE_ID, DraftStepEnv, SpecDecodeEnv

CONTINUE, VERIFY, ROLLBACK = (int(d) for d in Decision)


def replay_env(**options: Any) -> DraftStepEnv:
    trace = tiny_trace()
    return DraftStepEnv(ReplayBackend(trace, COSTS), trace.requests(), **options)


def test_both_checkers_pass_over_real_models() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*different from the unwrapped version.*")
        env = gym.make(STEP_LIVE_ID, pair="tiny", max_new_tokens=6)
        check_env(env, skip_close_check=True)
        sb3_check_env(env.unwrapped)


def test_the_table_of_the_docstring_is_the_vector() -> None:
    text, featurizer = DraftStepEnv.__doc__ or "", StepFeaturizer()
    assert f"shape ({featurizer.size},)" in text and len(featurizer.names) == featurizer.size
    for i, (name, low, high, unit, _) in enumerate(STEP_NUMBERS):
        row = [cell.strip() for cell in next(line for line in text.splitlines() if f"| {name} " in line).split("|")]
        assert row[1:6] == [str(i), name, unit, f"{low:g}", f"{high:g}"]


@pytest.mark.parametrize("reward", ["dinkelbach", "saved", "throughput"])
def test_rewards_add_up_to_those_of_the_rounds(reward: str) -> None:
    """Random decisions here, the same rounds in `SpecDecodeEnv`: equal sums where nothing was discarded."""
    env, trace = replay_env(reward=reward), tiny_trace()
    rounds = SpecDecodeEnv(ReplayBackend(trace, COSTS, k_values=range(1, 17)), trace.requests(), reward=reward)
    rng = np.random.default_rng(0)
    for asked in trace.requests():
        for discards in (False, True):
            vector, _ = env.reset(options={"request": asked})
            total, records, done = 0.0, [], False
            while not done:
                begins = vector[0] == 0
                action = int(rng.choice([0, 0, 0, 1, 2] if discards or begins else [0, 0, 1]))
                vector, gained, terminated, truncated, info = env.step(action)
                assert vector in env.observation_space and isinstance(gained, float)
                total, done = total + gained, terminated or truncated
                if "record" in info:
                    records.append(info["record"])
                else:
                    assert gained == 0.0 and info["drafted"] == round(16 * float(vector[0]))
            if discards:
                assert total == pytest.approx(sum(env.reward(r) for r in records))
                continue
            rounds.reset(options={"request": asked})
            same = sum(rounds.step(rounds.table.index(r.action))[1] for r in records)
            assert total == pytest.approx(same, rel=1e-12)


def test_every_action_is_defined_everywhere() -> None:
    env, trace = replay_env(), tiny_trace()
    env.reset(options={"request": trace.request(0)})
    for action in (VERIFY, ROLLBACK):  # when the round begins both are a plain step that costs no draft
        info = env.step(action)[4]
        assert info["rollback"] and info["discarded"] == 0 and info["draft_seconds"] == 0.0
    for n in range(1, 17):  # continue for ever: K_max verifies by itself
        info = env.step(CONTINUE)[4]
        assert info["drafted"] == n and "record" not in info
    info = env.step(CONTINUE)[4]
    assert info["record"].drafted == 16 and info["record"].action == Action("model", 16)
    env.step(CONTINUE)
    env.step(CONTINUE)
    info = env.step(ROLLBACK)[4]
    assert info["discarded"] == 2 and info["drafted"] == 0 and info["rollback"] and info["draft_seconds"] > 0
    for wrong in (3, -1, 1.0, True, "0"):
        with pytest.raises(ValueError, match="action index"):
            env.step(wrong)
    with pytest.raises(ResetNeeded):
        replay_env().step(0)


def test_live_and_replay_give_the_same_numbers() -> None:
    trace = tiny_trace()
    live = LiveBackend(tiny_engine(), mode="gumbel", cost_model=COSTS, time_source="modelled")
    envs = [DraftStepEnv(b, trace.requests(), m=2) for b in (live, ReplayBackend(trace, COSTS))]
    rng = np.random.default_rng(1)
    for asked in trace.requests()[:2]:
        vectors = [env.reset(options={"request": asked})[0] for env in envs]
        done = False
        while not done:
            assert np.array_equal(*vectors)
            action = int(rng.choice([0, 0, 0, 0, 1, 2]))
            a, b = (env.step(action) for env in envs)
            assert a[1:4] == b[1:4]
            vectors, done = [a[0], b[0]], a[2] or a[3]


def test_state_goes_on_in_the_middle_of_a_round() -> None:
    one, two = replay_env(), replay_env()
    one.reset(seed=3)
    for action in (0, 0, 1, 0, 0, 0):
        one.step(action)
    two.reset(seed=9)
    two.load_state_dict(one.state_dict())
    played = 0
    for action in (0, 1, 0, 2):
        a, b = one.step(action), two.step(action)
        assert np.array_equal(a[0], b[0]) and a[1:4] == b[1:4]
        played += 1
        if a[2] or a[3]:
            break
    assert played > 1


def test_what_cannot_be_is_refused() -> None:
    trace = tiny_trace()
    with pytest.raises(TraceError, match="no confidences per draft step of 'model'"):
        DraftStepEnv(ReplayBackend(without_steps(trace), COSTS), trace.requests())
    with pytest.raises(RequestError, match="got drafter 'none'"):
        replay_env(drafter="none")
    with pytest.raises(RequestError, match="m=-1"):
        replay_env(m=-1)
