"""Bandits on streams whose best arm is known."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import pytest
from fakes import FakeBackend

from assc.actions import ActionTable
from assc.core import ROLLBACK, Action, Observation, Request, RoundRecord
from assc.errors import ArtefactError
from assc.registry import make_policy
from assc.run import run_request
from policies.arms import ArmSums
from policies.bandit import Bandit

LEARNERS = ("bandit:ucb", "bandit:ts")
K_VALUES = (1, 2, 4, 8, 16)


def learn(
    spec: str, rounds: int, *, seed: int = 0, alpha: float = 0.8, policy: Bandit | None = None, **costs: float
) -> list[RoundRecord]:
    """At least `rounds` rounds of one policy over short requests."""
    policy = policy or bandit(spec, seed)
    engine = FakeBackend(k_values=K_VALUES, alpha=alpha, noise=0.05, noise_seed=seed, **costs)  # type: ignore[arg-type]
    records: list[RoundRecord] = []
    i = 0
    while len(records) < rounds:
        records += run_request(engine, Request((1,), 64, seed=10_000 * seed + i), policy).rounds
        i += 1
    return records[:rounds]


def bandit(spec: str, seed: int = 0) -> Bandit:
    policy = make_policy(spec, seed=seed)
    assert isinstance(policy, Bandit)
    return policy


def throughput(k: int, alpha: float, c: float) -> float:
    """Expected tokens per target step of K drafted tokens, from the geometric law of accepted lengths."""
    return sum(alpha**i for i in range(k + 1)) / (1 + c * k)


def played_throughput(records: list[RoundRecord], alpha: float, c: float) -> float:
    open_rounds = [r for r in records if r.position + 17 <= 64]  # the end of a budget does not leave every arm
    return sum(throughput(r.planned, alpha, c) for r in open_rounds) / len(open_rounds)


@pytest.mark.parametrize("spec", LEARNERS)
@pytest.mark.parametrize(("alpha", "c", "best"), [(0.95, 0.02, 16), (0.6, 0.4, 1), (0.85, 0.2, 4)])
def test_finds_the_best_arm(spec: str, alpha: float, c: float, best: int) -> None:
    """After 600 rounds the rounds played are worth 0.93 of the best arm in 9 of 10 runs or more.

    Seeded, so the outcome is fixed here. Over 100 other seeds the worst of these six cases reached 0.93 in 98 of 100
    runs, so with other seeds a case would fail with a chance of about 2 %. Uniformly random play is worth 0.47,
    0.74 and 0.80 of the best arm. A single variance for all arms (the fault this guards against) fails the first case
    in 9 % of the runs of `ucb`: it stays with K = 4 after one unlucky round of K = 16.
    """
    assert max((0, *K_VALUES), key=lambda k: throughput(k, alpha, c)) == best
    shares = [played_throughput(learn(spec, 600, seed=s, alpha=alpha, c=c)[-150:], alpha, c) for s in range(10)]
    good = [share > 0.93 * throughput(best, alpha, c) for share in shares]
    assert sum(good) >= 9, shares


@pytest.mark.parametrize("spec", [*LEARNERS, "bandit:ucb,discount=0.995", "bandit:ts,window=200"])
@pytest.mark.parametrize("seed", range(3))
def test_V25_hopeless_draft_ends_in_rollback(spec: str, seed: int) -> None:
    records = learn(spec, 300, seed=seed, alpha=0.0, c=0.1, verify_slope=0.02)
    assert sum(r.rollback for r in records[-50:]) > 40
    assert sum(r.seconds for r in records) <= 1.1 * 0.02 * len(records)


@pytest.mark.parametrize("spec", ["bandit:ucb,discount=0.98", "bandit:ts,discount=0.98", "bandit:ucb,window=40"])
def test_S06_forgetting_learner_leaves_rollback(spec: str) -> None:
    """Acceptance jumps from 0 to 0.9: a learner that forgets drafts again within 20 rounds, and goes on drafting."""
    policy = bandit(spec)
    before = learn(spec, 200, alpha=0.0, c=0.1, policy=policy)
    after = learn(spec, 120, alpha=0.9, c=0.1, seed=5, policy=policy)
    assert sum(r.rollback for r in before[-50:]) > 25
    assert any(r.accepted for r in after[:20])
    assert sum(r.rollback for r in after[-50:]) < 15


@pytest.mark.parametrize("alpha", [0.45, 0.5, 0.55])
def test_S06_ucb_settles_at_borderline_acceptance(alpha: float) -> None:
    """No hunting between K = 0 and the largest K: after 400 rounds such jumps are rare."""
    ks = [r.planned for r in learn("bandit:ucb", 600, alpha=alpha, c=0.3) if r.position + 17 <= 64][-100:]
    assert sum({a, b} == {0, 16} for a, b in pairwise(ks)) <= 2


def test_reward_is_the_ratio_of_sums_not_the_mean_of_ratios() -> None:
    """An arm that is rarely very fast has the better mean of ratios and the worse ratio of sums."""
    for algo in ("ucb", "ts"):
        policy = Bandit(algo, seed=1)
        policy.begin(ActionTable.build(["d"], [1]))
        log = []
        for i in range(2000):
            action = policy.act(Observation(0, 1, 9, 8, 0.0, (), 0.1))
            # rollback: 1 token in 1 s. drafting: 2 tokens in 0.2 s, or in 5 s: mean ratio 5.2, ratio of sums 0.77
            seconds = 1.0 if action.rollback else (0.2 if i % 2 else 5.0)
            tokens = 1 if action.rollback else 2
            policy.update(RoundRecord(i, i, action, action.k, tokens - 1, tokens, (), seconds))
            log.append(action.k)
        assert log[-500:].count(0) > 400


def one_observation(k_max: int = 8) -> Observation:
    return Observation(0, 1, k_max + 1, k_max, 0.0, (), 0.1)


@pytest.mark.parametrize("counts", [(50, 5), (5, 50), (200, 199)])
def test_of_two_equal_means_ucb_prefers_the_less_tried(counts: tuple[int, int]) -> None:
    """The bonus has each arm's own count: one scalar added to all arms would fall back to the first of the table."""
    policy = Bandit("ucb")
    policy.begin(ActionTable.build(["x", "y"], [2]))
    for name, n in zip("xy", counts, strict=True):
        for i in range(2 * n):
            policy.update(RoundRecord(0, 0, Action(name, 2), 2, 0, 1 + i % 2, (), 1.0))
    for _ in range(max(counts)):
        policy.update(RoundRecord(0, 0, ROLLBACK, 0, 0, 1, (), 2.0))
    assert policy.act(one_observation()).drafter == ("x" if counts[0] < counts[1] else "y")


def test_ucb_index_by_hand() -> None:
    """Two arms: 1 token in 1 s four times; 2 tokens in 1 s and 4 in 1 s. ρ = 10/6, σ² = (0 + 2/5 + 1/4)/(3 + 1 + 1)."""
    arms = ArmSums()
    for _ in range(4):
        arms.add("rollback", 1, 1.0)
    arms.add("d:4", 2, 1.0)
    arms.add("d:4", 4, 1.0)
    rho = arms.rho()
    assert rho == pytest.approx(10 / 6)
    assert arms.mean("rollback", rho) == pytest.approx(1 - 10 / 6)
    assert arms.mean("d:4", rho) == pytest.approx(3 - 10 / 6)
    assert arms.spread(rho) == pytest.approx(math.sqrt(0.65 / 5))


def test_discount_and_window_forget() -> None:
    """Sums of the variants against sums computed from the list of rounds."""
    rounds = [("d:1" if i % 3 else "d:2", 1 + i % 4, 0.1 * (1 + i % 5)) for i in range(100)]
    discounted, windowed = ArmSums(discount=0.9), ArmSums(window=7)
    for arm, tokens, seconds in rounds:
        discounted.add(arm, tokens, seconds)
        windowed.add(arm, tokens, seconds)
    for arm in ("d:1", "d:2"):
        weights = [0.9 ** (99 - i) for i, r in enumerate(rounds) if r[0] == arm]
        assert discounted.count(arm) == pytest.approx(sum(weights))
        tokens = sum(w * r[1] for w, r in zip(weights, (r for r in rounds if r[0] == arm), strict=True))
        assert discounted.sums[arm][1] == pytest.approx(tokens)
        last = [r for r in rounds[-7:] if r[0] == arm]
        assert windowed.count(arm) == len(last) and windowed.sums[arm][2] == pytest.approx(sum(r[2] for r in last))
    for _ in range(500):
        discounted.add("d:1", 1, 0.1)
        windowed.add("d:1", 1, 0.1)
    assert "d:2" not in discounted.sums and "d:2" not in windowed.sums


@pytest.mark.parametrize("spec", LEARNERS)
def test_frozen_neither_learns_nor_explores(spec: str) -> None:
    policy = bandit(spec)
    learn(spec, 400, alpha=0.9, c=0.05, policy=policy)
    frozen = bandit(spec + ",frozen=true")
    frozen.load_state_dict(policy.state_dict())
    state = json.dumps(frozen.state_dict())
    records = learn(spec, 100, alpha=0.0, policy=frozen)
    assert json.dumps(frozen.state_dict()) == state
    assert len({r.planned for r in records if r.position + 17 <= 64}) == 1
    unlearned = bandit(spec + ",frozen=true")
    unlearned.begin(ActionTable.build(["d"], [4]))
    assert unlearned.act(one_observation()).rollback


def test_arms_of_other_drafters_are_kept_apart() -> None:
    policy = Bandit("ucb")
    policy.begin(ActionTable.build(["x", "y"], [2]))
    for i in range(300):
        action = policy.act(one_observation())
        good = action.drafter == "y"
        policy.update(RoundRecord(i, i, action, action.k, 2 * good, 1 + 2 * good, (), 1.0 + 0.1 * action.k))
    assert policy.act(one_observation()) == Action("y", 2)


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"arms": {}, "rng": 1},
        {"arms": {"sums": {}, "recent": []}, "rng": "x"},
        {"arms": {"sums": {"d:1": [1, 2, 3]}, "recent": []}, "rng": 1},
        {"arms": {"sums": {"d:1": [1, 1, math.nan, 1, 1, 1]}, "recent": []}, "rng": 1},
        {"arms": {"sums": {"d:1": [0, 1, 1, 1, 1, 1]}, "recent": []}, "rng": 1},
        {"arms": {"sums": {"d:1": [1, 1, -1, 1, 1, 1]}, "recent": []}, "rng": 1},
        {"arms": {"sums": [], "recent": []}, "rng": 1},
        {"arms": {"sums": {}, "recent": [[1]]}, "rng": 1},
        {"arms": {"sums": {"what": [1, 1, 1, 1, 1, 1]}, "recent": []}, "rng": 1},
        {"arms": None, "rng": 1},
    ],
)
def test_damaged_state_is_refused_and_leaves_the_learner_alone(state: dict[str, object]) -> None:
    policy = bandit("bandit:ucb")
    before = policy.state_dict()
    with pytest.raises(ArtefactError):
        policy.load_state_dict(state)
    assert policy.state_dict() == before


def test_a_window_state_under_another_window() -> None:
    wide, narrow = ArmSums(window=50), ArmSums(window=5)
    for i in range(80):
        wide.add(f"d:{1 + i % 2}", 1 + i % 3, 0.1)
    narrow.from_json(json.loads(json.dumps(wide.to_json())))
    assert narrow.total == 5 and len(narrow.recent) == 5
    again = ArmSums(window=50)
    again.from_json(wide.to_json())
    assert again.sums == wide.sums and again.recent == wide.recent
    plain = ArmSums()
    plain.from_json(wide.to_json())
    assert plain.sums == wide.sums and not plain.recent
    with pytest.raises(ArtefactError, match="without a window"):
        narrow.from_json(plain.to_json())
