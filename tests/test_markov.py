"""The synthetic source: seeded, stated rates, its trace replays it; switching loads and chained episodes over it."""

from __future__ import annotations

from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from tiny_traces import COSTS, tiny_trace

from assc.core import ROLLBACK, Action, Backend, Request, RoundRecord
from assc.errors import RequestError
from assc.loads import Load, LoadedBackend, roofline_loads, scaled
from assc.markov import MARKOV_COSTS, REGIMES, MarkovBackend, MarkovSource, Regime, markov_requests
from assc.replay import ReplayBackend
from envs import REPLAY_ID
from envs.replay import replay_env

NEEDS = frozenset({"draft_entropy", "target_entropy", "ngram_match"})


def play(backend: Backend, request: Request, k: int = 4) -> list[RoundRecord]:
    backend.reset(request)
    records: list[RoundRecord] = []
    while not backend.done:
        backend.observe(NEEDS)
        records.append(backend.step(Action(("model", "ngram")[len(records) % 2], k)))
    return records


def test_its_trace_replays_it() -> None:
    requests = markov_requests(12, max_new_tokens=60)
    source, replayed = MarkovBackend(), ReplayBackend(MarkovSource().trace(requests), MARKOV_COSTS)
    for request in requests:
        assert play(source, request) == play(replayed, request)


def test_a_text_depends_on_the_seed_alone_and_is_a_prefix_of_a_longer_one() -> None:
    short, long = (MarkovSource(eos=0.0).draw(Request((1,), n, seed=5)) for n in (100, 400))
    assert (short["tokens"] == long["tokens"][:100]).all()
    assert (short["target_entropy"] == long["target_entropy"][:100]).all()
    assert (MarkovSource(eos=0.0).draw(Request((9, 9), 100, seed=5))["tokens"] == short["tokens"]).all()
    assert (MarkovSource(eos=0.0).draw(Request((1,), 100, seed=6))["tokens"] != short["tokens"]).any()


@pytest.mark.parametrize("regime", REGIMES)
def test_rates_are_those_of_the_regime(regime: Regime) -> None:
    """40,000 positions: five standard deviations of a rate are at most 0.0125 (false alarm below 1e-6)."""
    source = MarkovSource((regime,), eos=0.0)
    draws = [source.draw(Request((1,), 4000, seed=s)) for s in range(10)]
    hits = np.concatenate([d["avail/ngram"] > 0 for d in draws])
    first = np.concatenate([d["acc/model"] > 0 for d in draws])
    copied = np.concatenate([d["acc/ngram"] > 0 for d in draws])[hits]
    entropy = np.concatenate([d["target_entropy"] for d in draws])
    assert abs(first.mean() - regime.alpha) < 0.0125 and abs(hits.mean() - regime.hit) < 0.0125
    assert abs(copied.mean() - regime.ngram) < 0.0125 * (len(hits) / hits.sum()) ** 0.5
    assert abs(entropy.mean() / regime.entropy - 1) < 0.0125


def test_entropy_tells_something_about_acceptance() -> None:
    columns = MarkovSource(eos=0.0).draw(Request((1,), 4000, seed=1))
    agree = columns["acc/model"] > 0
    for name in ("target_entropy", "entropy/model"):
        assert columns[name][agree].mean() < 0.8 * columns[name][~agree].mean()


def test_regimes_last() -> None:
    pure = (replace(REGIMES[0], alpha=1.0), replace(REGIMES[0], alpha=0.0))
    agree = MarkovSource(pure, stay=0.95, eos=0.0).draw(Request((1,), 4000, seed=1))["acc/model"] > 0
    switches = int((agree[1:] != agree[:-1]).sum())
    assert 60 < switches < 145, "expected 4000 * 0.05 / 2 = 100, standard deviation about 10"


def test_categories_choose_the_first_regime_and_bad_parameters_are_refused() -> None:
    source = MarkovSource(stay=1.0, eos=0.0, start={"easy": 0, "hard": 2})
    draws = [source.draw(Request((1,), 2000, seed=3, category=c)) for c in ("easy", "hard")]
    easy, hard = (d["target_entropy"].mean() for d in draws)
    assert easy < 0.5 < 2.5 < hard
    with pytest.raises(ValueError, match=r"within 0\.\.1"):
        MarkovSource(stay=1.5)
    with pytest.raises(RequestError, match="4096"):
        MarkovBackend().reset(Request((1,), 5000))


# -- switching loads and chained episodes ----------------------------------------------------------------------------


def test_loads_switch_with_the_position_and_every_policy_meets_the_same() -> None:
    loads = roofline_loads("llama-8b-1b-h100", (1, 64))
    requests = markov_requests(8, max_new_tokens=200)
    backend = LoadedBackend(MarkovBackend(MarkovSource(eos=0.0)), loads, stay=0.9)
    seen: dict[tuple[int, int], float] = {}
    for k in (0, 3):
        for i, request in enumerate(requests):
            backend.reset(request)
            while not backend.done:
                observation = backend.observe()
                assert observation.occupancy in (1 / 64, 1.0)
                assert seen.setdefault((i, observation.position), observation.occupancy) == observation.occupancy
                record = backend.step(Action("model", k) if k else ROLLBACK)
                costs = loads[int(observation.occupancy == 1.0)].costs
                assert observation.cost_ratio == costs.cost_ratio("model")
                kv = 3 + observation.position
                assert record.verify_seconds == costs.verify(record.drafted, kv, record.emitted)
    assert 0.2 < np.mean([o == 1.0 for o in seen.values()]) < 0.8
    with pytest.raises(ValueError, match="at least one load"):
        LoadedBackend(MarkovBackend(), [])


def test_scaled_loads_make_verification_dearer() -> None:
    assert scaled(COSTS, 1).costs.verify(8, 0) == COSTS.verify(8, 0)
    assert scaled(COSTS, 16).costs.verify(8, 0) > 2 * COSTS.verify(8, 0) and "assumed" in scaled(COSTS, 16).costs.label


@pytest.mark.filterwarnings("ignore:.*different from the unwrapped version.*")
def test_chained_episodes_run_through_several_requests() -> None:
    env = replay_env(trace=tiny_trace(), cost_model=COSTS, split=None, chain=3)
    env.reset(seed=1)
    ends, done = [], False
    while not done:
        _, _, terminated, truncated, info = env.step(env.action_space.sample())
        done = terminated or truncated
        if "finish" in info:
            ends.append(info.get("next_request", {}).get("request_id"))
    assert len(ends) == 3 and ends[-1] is None and None not in ends[:-1]
    options = {"trace": tiny_trace(), "cost_model": COSTS, "chain": 2, "loads": [Load(1, COSTS), scaled(COSTS, 8)]}
    check_env(gym.make(REPLAY_ID, **options))
    with pytest.raises(RequestError, match="1 or more"):
        replay_env(trace=tiny_trace(), cost_model=COSTS, chain=0)
