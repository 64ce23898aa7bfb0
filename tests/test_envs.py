"""The environment's contract; names carry the ids of public faults (docs/faults.md)."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from fakes import FakeBackend, fake_requests
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from stable_baselines3.common.env_checker import check_env as sb3_check_env
from tiny_traces import COSTS, tiny_trace

import envs
from assc.actions import ActionTable
from assc.core import Action, Request, RoundRecord
from assc.errors import ArtefactError, RequestError, SpecError
from assc.observe import DEFAULT_FIELDS, FIELDS, Featurizer
from envs import LIVE_ID, LIVE_MEASURED_ID, MARKOV_ID, REPLAY_ID, STEP_REPLAY_ID, SpecDecodeEnv
from envs.describe import field_table, reward_table
from envs.rewards import REWARDS, make_reward

DOCS = Path(__file__).parent.parent / "docs" / "environment.md"


class MeasuredFake(FakeBackend):
    """The fake with a time that differs from run to run, as a clock's does."""

    def __init__(self, **options: Any) -> None:
        super().__init__(noise=0.2, noise_seed=int(np.random.SeedSequence().entropy) % 2**32, **options)  # type: ignore[arg-type]
        self.time_source = "measured"


def fake_env(backend: FakeBackend | None = None, *, n: int = 6, tokens: int = 24, **options: Any) -> SpecDecodeEnv:
    return SpecDecodeEnv(backend or FakeBackend(), fake_requests(n, max_new_tokens=tokens), **options)


IDS = sorted(env_id for env_id in gym.registry if env_id.startswith("assc/"))


def make(env_id: str = LIVE_ID, **options: Any) -> gym.Env[Any, Any]:
    """Any registered environment without models: a fake in place of the live ones, a small trace for replay."""
    if env_id in (REPLAY_ID, STEP_REPLAY_ID):
        options = {"trace": tiny_trace(), "cost_model": COSTS, "split": None, **options}
    elif env_id != MARKOV_ID:
        backend: Callable[[], FakeBackend] = MeasuredFake if env_id == LIVE_MEASURED_ID else FakeBackend
        options = {"backend": backend, "requests": fake_requests(5, max_new_tokens=12), **options}
    return gym.make(env_id, **options)


def play(env: gym.Env[Any, Any], actions: list[int] | None = None, seed: int | None = None) -> list[Any]:
    """One episode as a list of (vector, reward, terminated, truncated, info)."""
    env.reset(seed=seed)
    steps: list[Any] = []
    while not steps or not (steps[-1][2] or steps[-1][3]):
        steps.append(env.step(actions[len(steps) % len(actions)] if actions else env.action_space.sample()))
    return steps


@pytest.mark.parametrize("env_id", IDS)
def test_b10_g02_both_checkers_pass_on_every_registered_id(env_id: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*different from the unwrapped version.*")
        check_env(make(env_id))
        sb3_check_env(make(env_id).unwrapped)


@pytest.mark.parametrize("env_id", [LIVE_ID, LIVE_MEASURED_ID])
def test_g02_both_checkers_pass_over_real_models(env_id: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*different from the unwrapped version.*")
        env = gym.make(env_id, pair="tiny", max_new_tokens=8)
        check_env(env, skip_close_check=True)  # which would load the models a second time
        sb3_check_env(env.unwrapped)


def test_the_example_of_the_docs_runs() -> None:
    for block in re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL):
        scope: dict[str, Any] = {}
        exec(block, scope)
        assert scope["info"]["rollback"] and scope["vector"] in scope["env"].observation_space


def test_g02_a_measured_clock_would_fail_the_deterministic_id() -> None:
    with pytest.raises(RequestError, match="modelled seconds"):
        gym.make(LIVE_ID, backend=MeasuredFake, requests=fake_requests(2))


def test_ids_are_registered_once_and_point_at_an_importable_entry() -> None:
    envs.register_envs()
    assert gym.spec(LIVE_MEASURED_ID).nondeterministic and not gym.spec(LIVE_ID).nondeterministic


def test_g01_order_comes_from_np_random_only() -> None:
    def ids(env: SpecDecodeEnv) -> list[str]:
        first = env.reset(seed=1)[1]["request_id"]
        return [first, *(env.reset()[1]["request_id"] for _ in range(11))]

    env = fake_env()
    first = ids(env)
    np.random.seed(0)
    assert ids(env) == first == ids(fake_env())
    assert sorted(first[:6]) == sorted(first[6:]) == [f"r{i}" for i in range(6)]  # each once per pass
    assert first[:6] != first[6:]
    env.reset(seed=2)
    assert [env.reset()[1]["request_id"] for _ in range(6)] != first[1:7]


def test_g01_equal_seeds_give_equal_episodes() -> None:
    one, two = play(make(), [3, 0, 5], seed=4), play(make(), [3, 0, 5], seed=4)
    assert len(one) == len(two)
    for a, b in zip(one, two, strict=True):
        assert np.array_equal(a[0], b[0]) and a[1:] == b[1:]


def test_b10_a_thousand_random_steps_stay_in_the_space() -> None:
    env = fake_env(FakeBackend(drafters=("ngram", "model")), fields=tuple(FIELDS))
    env.action_space.seed(0)
    vector, _ = env.reset(seed=0)
    assert vector[env.featurizer.names.index("history_accepted[0]")] == -1  # defined before anything was drafted
    for _ in range(1000):
        assert vector.dtype == np.float32 and vector in env.observation_space and np.isfinite(vector).all()
        vector, _, terminated, truncated, _ = env.step(env.action_space.sample())
        assert vector in env.observation_space
        if terminated or truncated:
            vector, _ = env.reset()


def test_b05_b06_indices_map_to_the_table_and_nothing_else_is_taken() -> None:
    table = ActionTable.build(["ngram"], [2, 4, 8])
    env = fake_env(table=table, tokens=64)
    assert env.action_space == gym.spaces.Discrete(4) and env.action_space.start == 0  # type: ignore[attr-defined]
    for index, action in enumerate((Action(None, 0), Action("ngram", 2), Action("ngram", 4), Action("ngram", 8))):
        env.reset(seed=0)
        assert env.step(index)[4]["record"].action == action
    results = []
    for value in (2, np.int64(2), np.array(2), np.array([2])):
        env.reset(seed=0)
        results.append(env.step(value))
    for result in results[1:]:
        assert np.array_equal(result[0], results[0][0]) and result[1:] == results[0][1:]
    env.reset(seed=0)
    for wrong in (2.0, True, np.True_, -1, 4, np.array([1, 2]), np.array(2.0), "2", None):
        with pytest.raises(ValueError, match="action index"):
            env.step(wrong)
    env.step(1)  # a refused action leaves the episode as it was
    with pytest.raises(RequestError, match="not in the table"):
        fake_env(table=ActionTable.build(["other"], [2]))


def test_k_above_the_budget_is_cut() -> None:
    env = fake_env(tokens=3)
    env.reset(seed=0)
    info = env.step(len(env.table) - 1)[4]
    assert info["planned"] == info["drafted"] == 2


def test_b09_eos_terminates_and_the_budget_truncates_never_both() -> None:
    at_eos = play(fake_env(FakeBackend(eos_at=5)), [0])[-1]
    at_budget = play(fake_env(), [0])[-1]
    both = play(fake_env(FakeBackend(eos_at=24)), [0])[-1]
    assert at_eos[2:4] == (True, False) and at_eos[4]["finish"] == "eos"
    assert at_budget[2:4] == (False, True) and at_budget[4]["finish"] == "length"
    assert both[2:4] == (True, False)


@pytest.mark.parametrize("env_id", IDS)
def test_g06_types_are_pythons_own(env_id: str) -> None:
    for name in REWARDS:
        for step in play(make(env_id, reward=name).unwrapped, [1, 0]):
            assert type(step[1]) is float and type(step[2]) is bool and type(step[3]) is bool


def test_g07_step_outside_an_episode_raises_and_reset_takes_options() -> None:
    env = fake_env()
    with pytest.raises(ResetNeeded, match="reset"):
        env.step(0)
    play(env, [0])
    with pytest.raises(ResetNeeded, match="reset"):
        env.step(0)
    assert env.reset(options={"request": Request((9, 9), 5, seed=3, id="mine")})[1]["request_id"] == "mine"
    assert env.reset(options={"prompt_ids": np.array([4, 5, 6]), "max_new_tokens": 4})[1]["prompt_length"] == 3
    assert [env.step(0)[3] for _ in range(4)] == [False, False, False, True]
    for wrong in ({"prompt": "x"}, {"request": 3}, {"seed": 3}, {"request": Request((1,)), "seed": 3}):
        with pytest.raises(RequestError):
            env.reset(options=wrong)
    with pytest.raises(RequestError):
        env.reset(options={"prompt_ids": []})


def test_g05_a_time_limit_in_rounds_truncates() -> None:
    env = make(max_episode_steps=5)
    steps = play(env, [0], seed=0)
    assert len(steps) == 5 and steps[-1][2:4] == (False, True)
    assert len(play(env.unwrapped, [0], seed=0)) == 12  # the budget of the request


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_g04_no_token_is_lost_or_counted_twice_in_vector_environments(mode: AutoresetMode) -> None:
    lengths = (5, 9)
    vector = SyncVectorEnv([lambda n=n: fake_env(n=3, tokens=n) for n in lengths], autoreset_mode=mode)
    vector.reset(seed=0)
    tokens, from_totals, ended = np.zeros(2, int), np.zeros(2, int), np.zeros(2, int)
    while ended.min() < 3:
        _, _, terminated, truncated, infos = vector.step(np.array([2, 0]))
        for i in range(2):
            end = bool(terminated[i] or truncated[i])
            found = infos["final_info"] if end and mode is AutoresetMode.SAME_STEP else infos
            if found.get("_emitted", np.zeros(2, bool))[i]:
                tokens[i] += found["emitted"][i]
            if end:
                from_totals[i] += found["episode_totals"][i].tokens
                ended[i] += 1
        finished = ended * np.array(lengths)
        assert (from_totals == finished).all() and (tokens >= finished).all() and (tokens < finished + lengths).all()


def test_info_holds_the_record_and_the_totals_at_the_end() -> None:
    steps = play(fake_env(), [4, 0, 2])
    infos = [s[4] for s in steps]
    assert all(i["emitted"] == i["record"].emitted and i["action"] in (4, 0, 2) for i in infos)
    assert not any("episode_totals" in i or "finish" in i for i in infos[:-1])
    totals = infos[-1]["episode_totals"]
    assert totals.tokens == sum(i["emitted"] for i in infos) == 24 and totals.rounds == len(steps)


def test_b13_the_last_vector_of_an_episode_knows_the_last_round() -> None:
    names = fake_env().featurizer.names
    planned = []
    for tokens in range(4, 24):  # some budgets end on a drafted round, some on a rollback
        last = play(fake_env(tokens=tokens), [3])[-1]
        planned.append(last[4]["planned"])
        assert last[0][names.index("remaining")] == 0
        assert last[0][names.index("history_k[0]")] == (1.0 if planned[-1] else 0.0)  # all that could be played
    assert 0 in planned and max(planned) > 0


def record(emitted: int, seconds: float) -> RoundRecord:
    return RoundRecord(0, 0, Action("ngram", 4), 4, emitted - 1, emitted, tuple(range(emitted)), seconds)


def test_rewards_are_what_their_formulas_say() -> None:
    assert make_reward("throughput", 0.02)(record(3, 0.05)) == pytest.approx(60)
    assert make_reward("saved", 0.02)(record(3, 0.05)) == pytest.approx(3 - 2.5)
    dinkelbach = make_reward("dinkelbach", 0.02)
    assert dinkelbach(record(3, 0.05)) == pytest.approx(3 - 50 * 0.05)
    dinkelbach.set_rho(20.0)  # type: ignore[attr-defined]
    assert dinkelbach(record(3, 0.05)) == pytest.approx(3 - 20 * 0.05)
    with pytest.raises(SpecError, match="known rewards: throughput"):
        make_reward("tokens", 0.02)
    for wrong in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="plain_step_seconds"):
            make_reward("saved", wrong)


@pytest.mark.parametrize("name", list(REWARDS))
def test_b16_rewards_are_finite_even_for_broken_clocks(name: str) -> None:
    reward = make_reward(name, 0.02)
    assert np.isfinite(reward(record(17, 0.0)))
    for broken in (float("nan"), float("inf"), -1.0):
        with pytest.warns(UserWarning, match="counts it as one plain step"):
            assert reward(record(3, broken)) == pytest.approx(reward(record(3, 0.02)))


def test_state_dict_continues_in_mid_episode_exactly() -> None:
    env, other = fake_env(), fake_env()
    env.reset(seed=3)
    for action in (2, 0, 5):
        env.step(action)
    env.set_rho(12.5)
    other.load_state_dict(env.state_dict())
    for action in (4, 1, 0) * 20:
        a, b = env.step(action), other.step(action)
        assert np.array_equal(a[0], b[0]) and a[1:] == b[1:]
        if a[2] or a[3]:
            assert env.reset()[1] == other.reset()[1]
    with pytest.raises(ArtefactError, match="request order"):
        fake_env(n=3).load_state_dict(env.state_dict())


def test_docs_hold_the_generated_tables() -> None:
    text = DOCS.read_text(encoding="utf-8")
    assert field_table() in text and reward_table() in text  # python -m envs.describe prints them


def test_docstring_lists_the_fields_as_they_are() -> None:
    document = SpecDecodeEnv.__doc__ or ""
    featurizer, at = Featurizer(DEFAULT_FIELDS), 0
    assert f"shape ({featurizer.size},)" in document
    rows = [[c.strip() for c in line.strip().strip("|").split("|")] for line in document.splitlines() if "|" in line]
    for spec in featurizer.specs:
        num = str(at) if spec.size == 1 else f"{at}-{at + spec.size - 1}"
        assert [num, spec.name, spec.unit, f"{spec.low:g}", f"{spec.high:g}"] in rows
        at += spec.size


def test_a_module_in_front_of_an_id_registers_it() -> None:
    """In a fresh process, where nobody has imported the package."""
    code = "import gymnasium; gymnasium.make('envs:assc/SpecDecode-Markov-v0').reset(seed=0); print('made')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "made", done.stderr
