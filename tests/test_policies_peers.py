"""Peers' rules, contextual learners and the guard against sequences worked out by hand and independent rewrites."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import FakeBackend, fake_requests

from assc.actions import ActionTable
from assc.core import ROLLBACK, Action, Observation, Policy, Request, RoundRecord
from assc.errors import ArtefactError, SpecError
from assc.registry import make_policy
from assc.run import run_request
from policies.accept_model import AcceptModel
from policies.artefact import load_artefact, save_policy
from policies.bandit import Bandit
from policies.closed_form import ClosedForm, best_k
from policies.gammatune import GammaTune
from policies.goodput import Goodput
from policies.guard import Guard
from policies.mdp import Mdp, state_of
from policies.ridge import Ridges
from policies.rng import NormalStream, seed_state, uniform
from policies.round_costs import add_round, load_level, prices
from policies.sglang_ema import SglangEma
from policies.window import WindowRule

TABLE = ActionTable.build(["model"], range(1, 17))


def seen(k_max: int = 16, **fields: Any) -> Observation:
    return Observation(0, 1, k_max + 1, k_max, 0.0, (), fields.pop("cost_ratio", 0.1), **fields)


def played(action: Action, accepted: int, drafted: int | None = None, **fields: Any) -> RoundRecord:
    drafted = action.k if drafted is None else drafted
    seconds = fields.pop("seconds", 0.02)
    return RoundRecord(0, 0, action, drafted, accepted, accepted + 1, (), seconds, **fields)


def feed(policy: Policy, accepted: int, drafted: int | None = None, **fields: Any) -> int:
    """Play one round with the policy's own K (or less drafted), and return the K it plans next."""
    action = policy.act(seen())
    accepted = min(accepted, action.k)
    policy.update(played(action, accepted, drafted if action.k else 0, **fields))
    return policy.act(seen()).k


def started(spec: str, table: ActionTable = TABLE) -> Any:
    policy = make_policy(spec, seed=1)
    policy.begin(table)
    return policy


def test_window_by_hand() -> None:
    policy = started("window")
    assert isinstance(policy, WindowRule)
    steps = [  # accepted, K afterwards
        (4, 5),  # 4/4
        (5, 6),  # 9/9
        (0, 6),  # 9/15
        (0, 6),  # 9/21
        (0, 6),  # 9/27
        (0, 3),  # 9/33 = 0.27: half, window emptied
        *[(0, 3)] * 3,  # too few rounds to judge
        (0, 1),  # 0/12
        *[(0, 1)] * 3,
        (0, 0),  # K is 1 already: pause
        *[(0, 0)] * 7,
        (0, 1),  # the eighth rollback round: probe next
        (0, 0),  # the probe is refused
        *[(0, 0)] * 7,
        (0, 1),
        (1, 1),  # the probe is accepted: K = 1
        (1, 2),  # 1/1
    ]
    for i, (accepted, k) in enumerate(steps):
        assert feed(policy, accepted) == k, i


def test_window_does_not_raise_a_cap_that_short_drafts_never_reach() -> None:
    policy = started("window")
    assert [feed(policy, 1, drafted=1) for _ in range(5)] == [4] * 5
    assert feed(policy, 0, drafted=0) == 4


def test_hf_heuristic_by_hand() -> None:
    policy = started("hf_heuristic")
    assert [feed(policy, a) for a in (5, 7, 8, 0, 0)] == [7, 9, 8, 7, 6]
    assert [feed(policy, 0) for _ in range(7)] == [5, 4, 3, 2, 1, 1, 1]
    assert feed(policy, 1) == 3
    assert feed(policy, 2, drafted=2) == 5, "a shortened draft that was accepted counts as full, as in transformers"
    assert feed(policy, 0, drafted=0) == 5
    assert [feed(policy, 16) for _ in range(7)] == [7, 9, 11, 13, 15, 16, 16]


def test_sglang_by_hand() -> None:
    """K = 3, ema 2. Always 3 accepted: ema_n = 3 − 0.8^n, first judged after 15 rounds: 2.965 > 2.5, so K = 5.

    Then nothing accepted: 0.972 ≤ 2.25 but > 0.25: K = 3 at once; 0.318 > 0.25; 0.104 ≤ 0.25: K = 1.
    """
    policy = started("sglang_ema")
    assert isinstance(policy, SglangEma)
    assert [feed(policy, 3) for _ in range(15)] == [3] * 14 + [5]
    assert policy.slots[0][1] == pytest.approx(3 - 0.8**15)
    assert [feed(policy, 0) for _ in range(15)] == [5] * 4 + [3] * 10 + [1]
    policy.begin(TABLE)
    assert policy.act(seen()).k == 1, "the averages are the server's"


def test_sglang_tiers_and_probing() -> None:
    policy = started("sglang_ema:rows=128,warmup=0,interval=2")
    ks = [policy.act(seen(occupancy=n / 128)).k for n in (1, 7, 8, 31, 32, 63, 64, 128)]
    assert ks == [3, 3, 3, 3, 1, 1, 0, 0]
    busy = {"occupancy": 32 / 128}
    ks = []
    for _ in range(12):
        action = policy.act(seen(**busy))
        ks.append(action.k)
        policy.update(played(action, 0))
    assert ks == [1, 1, 0, 0] * 3, "K = 0 is left for one interval, then tried again"
    assert policy.act(seen(occupancy=1 / 128)).k == 3, "another tier keeps its own K"


def test_sglang_against_a_rewrite() -> None:
    """The published rule in other words: thresholds as functions of the candidate index, over random rounds."""
    rng = random.Random(5)
    policy = started("sglang_ema:warmup=2,interval=3")
    steps, k, ema, n = [1, 3, 5, 7], 3, 2.0, 0
    for _ in range(400):
        action = policy.act(seen())
        assert action.k == k
        accepted = rng.randint(0, k) if rng.random() < 0.6 else rng.choice((0, k))
        policy.update(played(action, accepted))
        ema, n = 0.8 * ema + 0.2 * accepted, n + 1
        if n > 2 and (n - 2) % 3 == 0:
            lower = [s for s in steps if s < k]
            fallen = k
            for s in reversed(lower):
                if ema > s - 0.75:
                    break
                fallen = s
            risen = k
            while risen < 7 and ema > risen - 0.5:
                risen += 2
            k = fallen if fallen != k else risen


def test_vllm_table_ranges() -> None:
    policy = started("vllm_table:table=1-2:5/3-4:3/8-9:1,rows=16")
    ks = [policy.act(seen(occupancy=n / 16)).k for n in (1, 2, 3, 4, 5, 7, 8, 9, 10, 16)]
    assert ks == [5, 5, 3, 3, 3, 3, 1, 1, 1, 1], "gaps and the end keep the K before them"
    assert started("vllm_table").act(seen()).k == 3
    assert started("vllm_table:rows=256").act(seen()).rollback
    assert started("vllm_table", ActionTable.build(["model"], [1, 2])).act(seen()).k == 2


@pytest.mark.parametrize("alpha", [0.01, 0.2, 0.5, 0.7, 0.9, 0.99])
@pytest.mark.parametrize("c", [0.0, 0.02, 0.1, 0.4, 1.0])
def test_closed_form_against_the_formula(alpha: float, c: float) -> None:
    """The quoted quotient, evaluated for every K."""

    def worth(k: int) -> float:
        return (1 - alpha ** (k + 1)) / ((1 - alpha) * (1 + (k + 1) * c)) if k else 1.0

    k = best_k(alpha, c, 16)
    assert worth(k) == pytest.approx(max(map(worth, range(17))), rel=1e-9)


def test_closed_form_estimates_by_hand() -> None:
    policy = started("closed_form")
    assert isinstance(policy, ClosedForm)
    policy.update(played(Action("model", 4), 2))
    assert (policy.accepted, policy.rejected) == pytest.approx((0.95 * 3 + 2, 0.95 + 1))
    policy.update(played(Action("model", 4), 1, finish="length"))
    assert policy.rejected == pytest.approx(0.95 * 1.95), "the end of a request proves no rejection"
    policy.update(played(Action("model", 4), 4, draft_seconds=0.4, verify_seconds=0.2))
    assert policy.draft_time[1] / policy.draft_time[0] / policy.verify_time[1] == pytest.approx(0.5)
    for _ in range(40):
        feed(policy, 0)
    assert policy.act(seen()).k in (0, 1)


def test_goodput_positions_by_hand() -> None:
    """Accepted 2 of 4, 4 of 4, 0 of 4: pooled (0.75 + 6) / (1 + 8) = 0.75."""
    policy = started("goodput:k_max=6")
    assert isinstance(policy, Goodput)
    for accepted in (2, 4, 0):
        policy.act(seen())
        policy.update(played(Action("model", 4), accepted))
    expected = [2.75 / 4, 2.75 / 3, 1.75 / 3, 1.75 / 2, 0.75, 0.75]
    assert policy.positions() == pytest.approx(expected)


def test_goodput_follows_the_load() -> None:
    """Same acceptance; verification is free with a few rows and costs a target step per token with many."""
    policy = started("goodput")
    light, heavy = {"occupancy": 1 / 16}, {"occupancy": 1.0}
    for i in range(60):
        for load, slope in ((light, 0.0), (heavy, 0.02)):
            policy.act(seen(**load))
            k = (0, 2, 4, 8)[i % 4]
            action = Action("model", k) if k else ROLLBACK
            cost = 0.02 + slope * k
            accepted = min(k, (0, 1, 2, 5)[i % 3])
            policy.update(
                played(
                    action,
                    accepted,
                    seconds=cost + 0.001 * k,
                    draft_seconds=0.001 * k,
                    verify_seconds=cost,
                    draft_steps=k,
                )
            )
    assert policy.act(seen(**light)).k == 2 and policy.act(seen(**heavy)).rollback
    level = load_level(1.0)
    plain, call, token = prices(policy.costs, level, "model", 0.1)
    assert (plain, call) == pytest.approx((0.02, 0.0), abs=0.002) and token == pytest.approx(0.021, abs=0.002)


def test_round_costs_of_a_lookup_are_per_call() -> None:
    costs: dict[str, Any] = {}
    for k in (2, 6, 2, 6):
        assert add_round(costs, played(Action("ngram", k), 0, seconds=0.0203, draft_seconds=0.0003), "16")
    plain, call, token = prices(costs, "16", "ngram", 0.5)
    assert (plain, call, token) == pytest.approx((0.02, 0.0003, 0.0))
    assert not add_round(costs, played(ROLLBACK, 0, seconds=math.nan), "16")
    assert prices(costs, "3", "ngram", 0.5) == prices(costs, "16", "ngram", 0.5), "the nearest known load"


def test_gammatune_by_hand() -> None:
    """m: 3, then 0.6·3 + 0.4·6 = 4.2, 2.92, 1.752, 1.0512, 0.63072, 0.378432; K = round(m) + 1."""
    policy = started("gammatune")
    assert isinstance(policy, GammaTune)
    assert [feed(policy, a) for a in (4, 1, 0, 0, 0, 0)] == [5, 4, 3, 2, 2, 1]
    assert policy.mean == pytest.approx(0.378432)
    policy.k, policy.mean = 6, 5.0
    assert feed(policy, 2, drafted=2) == 6, "a short full draft says nothing"


def test_cascade_with_both_or_one_drafter() -> None:
    both = started("cascade:m=2,k_ngram=12,k_model=3", ActionTable.build(["model", "ngram"], [1, 2, 4, 12]))
    assert [str(both.act(seen(ngram_match=n))) for n in (None, 1, 2, 4)] == [
        "model:3",
        "model:3",
        "ngram:12",
        "ngram:12",
    ]
    assert str(both.act(seen(5, ngram_match=3))) == "ngram:5"
    assert both.act(seen(0, ngram_match=3)).rollback
    lookup = started("cascade", ActionTable.build(["ngram"], [1, 8]))
    assert [str(lookup.act(seen(ngram_match=n))) for n in (2, 3)] == ["rollback", "ngram:8"]
    model = started("cascade", ActionTable.build(["hidden"], range(1, 9)))
    assert [str(model.act(seen(ngram_match=n))) for n in (None, 4)] == ["hidden:4", "hidden:4"]
    named = started("cascade:lookup=two,model=one", ActionTable.build(["one", "two"], range(1, 17)))
    assert str(named.act(seen(ngram_match=9))) == "two:10"
    with pytest.raises(SpecError, match=r"names the drafter 'poem'.*model"):
        started("cascade:lookup=poem")


def guard(spec: str) -> Guard:
    policy = started(spec)
    assert isinstance(policy, Guard)
    return policy


DEAR = {"seconds": 0.03, "draft_seconds": 0.01, "verify_seconds": 0.02}
"""a round that costs half a target step more than a plain one"""


def test_guard_local_fallback_by_hand() -> None:
    policy = guard("guard(static:4):rounds=3,loss=1.4,span=4,longest=8,probe=2,probes=2,settle=1000")
    plain = {"seconds": 0.02, "verify_seconds": 0.02}
    assert [feed(policy, 0, **DEAR) for _ in range(2)] == [4, 4]
    assert feed(policy, 1, **DEAR) == 4, "one of four is below 0.5, but two tokens in 1.5 steps pay: the row is over"
    assert [feed(policy, 0, **DEAR) for _ in range(3)] == [4, 4, 0]
    assert policy.reasons == ("guard: 3 or more rounds in a row below acceptance 0.5 lost 1.4 target steps or more",)
    assert [feed(policy, 0, **plain) for _ in range(4)] == [0, 0, 0, 2], "after 4 rollback rounds a probe of 2"
    assert policy.reasons == ("guard: probe after a local fallback",)
    assert [feed(policy, 0, **DEAR) for _ in range(2)] == [2, 0] and policy.reasons == ("guard: the probes failed",)
    assert [feed(policy, 0, **plain) for _ in range(8)] == [0] * 7 + [2], "the second span is twice as long"
    assert feed(policy, 0, **DEAR) == 2, "one more try"
    assert feed(policy, 1, **DEAR) == 4 and policy.reasons == (), "one accepted token pays for the round"
    counts, report = policy.counts, policy.report()
    assert (counts["local"], counts["probes"], counts["fallback_rounds"], counts["requests"]) == (1, 4, 12, 1)
    assert report["figures"]["fallback_share"] == pytest.approx(12 / 22)
    assert report["bands"]["fallback_share"] == "above"


def test_guard_lets_a_cheap_draft_miss_for_long() -> None:
    """The fault this guards against: a bar on acceptance alone stopped a lookup that costs a hundredth of a step."""
    cheap = {"seconds": 0.0202, "draft_seconds": 0.0002, "verify_seconds": 0.02}
    policy = guard("guard(static:8)")
    assert [feed(policy, 0, **cheap) for _ in range(100)] == [8] * 100 and policy.counts["local"] == 0
    dear = guard("guard(static:8):settle=1000")
    assert [feed(dear, 0, **DEAR) for _ in range(7)][-1] == 0 and dear.counts["local"] == 1


@pytest.mark.parametrize("seconds", [0.02, 0.025, 0.05])
def test_guard_bounds_what_a_draft_that_goes_bad_costs(seconds: float) -> None:
    """200 rounds with nothing accepted, each `seconds` against 0.02 plain: at most loss + a round before the first
    fallback, and afterwards 3 probes of at most the same excess per span of 8, 16, 32 and then 64 rounds."""
    policy = guard("guard(static:4)")
    excess = 0.0
    for _ in range(200):
        drafting = not policy.act(seen()).rollback
        cost = seconds if drafting else 0.02
        feed(policy, 0, seconds=cost, draft_seconds=cost - 0.02, verify_seconds=0.02)
        excess += cost / 0.02 - 1
    each = seconds / 0.02 - 1
    assert excess <= 3.0 + each + 5 * 3 * each, (excess, each)


def test_guard_global_fallback_ends_with_the_request() -> None:
    slow = {"seconds": 0.08, "draft_seconds": 0.06, "verify_seconds": 0.02, "draft_steps": 4}
    policy = guard("guard(static:4):settle=3")
    assert [feed(policy, 4, **slow) for _ in range(3)] == [4, 4, 0], "0.015 s per step, a target step takes 0.02 s"
    assert policy.reasons == ("guard: a draft step takes more than 0.5 of a target step",)
    assert policy.counts["global_draft"] == 1
    policy.begin(TABLE)
    assert policy.act(seen()).k == 4
    slow = {"seconds": 0.06, "draft_seconds": 0.03, "verify_seconds": 0.03, "draft_steps": 4}
    policy = guard("guard(static:4):settle=4,rounds=99,loss=1.2")
    assert [feed(policy, 0, **slow) for _ in range(5)] == [4, 4, 4, 4, 0], "each round loses one step, the bar is 4.8"
    assert policy.reasons == ("guard: the request runs below 1 times plain decoding",)
    report = policy.report()
    assert policy.counts["global_speed"] == 1 and report["figures"]["speed_up"] == pytest.approx(5 / 10)
    assert report["bands"]["speed_up"] == "below"


def test_guard_reasons_reach_the_records_and_the_learner_sees_every_round() -> None:
    policy = guard("guard(bandit:ucb):rounds=2,loss=0.5,span=5,settle=1000")
    engine = FakeBackend(drafters=("model",), alpha=0.0, c=0.1)
    rounds = [r for request in fake_requests(4) for r in run_request(engine, request, policy).rounds]
    assert any("in a row below" in reason for r in rounds for reason in r.reasons)
    assert isinstance(policy.inner, Bandit) and policy.inner.arms.total == len(rounds)
    state = json.loads(json.dumps(policy.state_dict()))
    assert state["counts"]["rounds"] == len(rounds) and set(state) == {"counts", "sums", "policy"}
    for damaged in ({**state, "counts": {}}, {**state, "policy": None}, {**state, "sums": {"a": math.nan}}):
        with pytest.raises(ArtefactError):
            guard("guard(bandit:ucb)").load_state_dict(damaged)


def test_guard_passes_on_what_the_policy_needs() -> None:
    assert guard("guard(cascade)").needs == {"ngram_match"}
    assert guard("guard:policy=static:4").act(seen()).k == 4
    with pytest.raises(SpecError, match=r"K=99, but K_max"):
        guard("guard(static:99)")


RECOVER = {  # spec -> rounds within which it must draft again with success
    "window": 12,
    "goodput": 12,
    "closed_form": 12,
    "guard(assc):span=8,settle=100000": 12,
    "sglang_ema:rows=8,warmup=0,interval=2": 12,
    "accept_model": 70,
    "mdp": 70,
    "bandit:eps,discount=0.95": 60,
    "bandit:exp3,discount=0.97": 60,
    "bandit:ucb,discount=0.97": 60,
}


@pytest.mark.parametrize("spec", RECOVER)
def test_S06_rollback_is_never_for_ever(spec: str) -> None:
    """200 rounds in which nothing is accepted, then everything is: each finds out without help."""
    policy = started(spec)
    history: list[int] = []
    for i in range(200 + RECOVER[spec]):
        action = policy.act(seen(8, cost_ratio=0.3))
        accepted = action.k if i >= 200 else 0
        history.append(accepted)
        draft = 0.006 * action.k
        policy.update(
            played(
                action,
                accepted,
                seconds=0.02 + draft,
                draft_seconds=draft,
                verify_seconds=0.02,
                draft_steps=action.k,
            )
        )
    assert any(history[200:])


def test_eps_explores_its_share() -> None:
    """Once all arms are known: 2000 rounds, 10 % of them any of 5 arms. 5 standard deviations: below 1 in 10^5."""
    policy = started("bandit:eps", ActionTable.build(["model"], [1, 2, 3, 4]))
    for k in range(5):
        action = Action("model", k) if k else ROLLBACK
        policy.update(played(action, k, seconds=0.02 if k == 4 else 0.1))
    ks = [policy.act(seen()).k for _ in range(2000)]
    away = sum(k != 4 for k in ks)
    assert abs(away - 160) < 5 * math.sqrt(2000 * 0.08 * 0.92) and set(ks) == {0, 1, 2, 3, 4}


def test_exp3_by_hand() -> None:
    """Two arms, eps 0.1. Gain of one round: (2 − ρ·0.1) / 1.5 with ρ = 20 is 0, then by the second reward."""
    policy = started("bandit:exp3", ActionTable.build(["model"], [2]))
    ks = [policy.act(seen()).k for _ in range(4000)]
    assert abs(ks.count(2) - 2000) < 5 * math.sqrt(1000), "no knowledge, no preference"
    first = policy.act(seen())
    policy.update(played(first, first.k, seconds=0.1))
    assert policy.arms.weights[str(first)] == pytest.approx(0.0), "one round is its own pace"
    second = policy.act(seen())
    p = 0.5
    policy.update(played(second, second.k, seconds=0.05))
    rho = policy.arms.rho()
    gain = (second.k + 1 - rho * 0.05) / 1.5
    assert policy.arms.weights[str(second)] == pytest.approx(0.05 * min(1.0, gain) / p)
    before = dict(policy.arms.weights)
    policy.act(seen())
    policy.update(played(Action("model", 1), 1))
    assert policy.arms.weights == before, "a decision that was not its own moves no weight"


@pytest.mark.parametrize("spec", ["bandit:eps", "bandit:exp3,eps=0.2"])
def test_new_bandits_find_a_clear_winner(spec: str) -> None:
    """K = 8 always pays, the rest does not: most of the last 300 of 3000 rounds. Seeded, so the outcome is fixed."""
    policy = started(spec, ActionTable.build(["model"], [2, 8]))
    ks = []
    for _ in range(3000):
        action = policy.act(seen())
        ks.append(action.k)
        policy.update(played(action, action.k if action.k == 8 else 0, seconds=0.02 + 0.002 * action.k))
    assert ks[-300:].count(8) > 200


def test_normal_stream_is_box_muller_of_the_scalar_stream() -> None:
    state = seed_state(7)
    stream = NormalStream()
    parts, s = [], state
    for n in (3, 100, 50, 1, 128):
        s, z = stream.take(s, n)
        parts.append(z)
    got = np.concatenate(parts)
    for value in got[:200]:
        state, u = uniform(state)
        state, v = uniform(state)
        assert value == pytest.approx(math.sqrt(-2 * math.log(u)) * math.cos(2 * math.pi * v), abs=1e-12)
    many = NormalStream().take(seed_state(1), 20_000)[1]
    assert abs(many.mean()) < 5 / math.sqrt(20_000) and abs(many.var() - 1) < 5 * math.sqrt(2 / 20_000)


@pytest.mark.parametrize("discount", [1.0, 0.99])
def test_ridge_against_the_normal_equations(discount: float) -> None:
    """Weighted least squares over all rounds of a drafter; discounting happens in blocks of 32 rounds."""
    rng = np.random.default_rng(0)
    ridges = Ridges(4, 2.0, discount)
    ridges.know("ngram", [2])
    ridges.know("model", [1, 4])
    rows: dict[str, list[tuple[int, Any, Any]]] = {"ngram": [], "model": []}
    for i in range(80):
        drafter, x = ("ngram", "model")[i % 2], rng.normal(size=4)
        told = rng.integers(0, 4, size=2 * len(ridges.ks[drafter])).astype(float)
        ridges.add(drafter, x, told)
        rows[drafter].append((i, x, told))
    x = rng.normal(size=4)
    gains, drafted, variances = ridges.estimate(x)
    for n, (drafter, arms) in enumerate({"ngram": [0], "model": [1, 2]}.items()):
        weights = [discount ** (32 * (2 - i // 32)) for i, *_ in rows[drafter]]  # 80 rounds: two blocks are over
        data = list(zip(weights, rows[drafter], strict=True))
        a = 2.0 * np.eye(4) + sum(w * np.outer(v, v) for w, (_, v, _) in data)
        expected = np.array([x @ np.linalg.solve(a, sum(w * t * v for w, (_, v, told) in data for t in [told[j]]))
                             for j in range(2 * len(arms))])  # fmt: skip
        assert np.concatenate([gains[arms], drafted[arms]]) == pytest.approx(expected)
        assert variances[n] == pytest.approx(x @ np.linalg.solve(a, x))
    saved = Ridges(4, 2.0, discount)
    saved.from_json(json.loads(json.dumps(ridges.to_json())))
    for one in (ridges, saved):
        for _ in range(20):  # over the end of a block
            one.add("ngram", x, np.array([1.0, 2.0]))
    assert (saved.inverse == ridges.inverse).all() and saved.since == ridges.since
    forgetful, plain = Ridges(4, 2.0, 0.9), Ridges(4, 2.0)
    plain.know("ngram", [2])
    plain.add("ngram", x, np.array([1.0, 2.0]))
    forgetful.from_json(plain.to_json())
    assert forgetful.gram == pytest.approx(x[None, :, None] * x, abs=1e-9)


def test_ridges_start_anew_for_another_action_table() -> None:
    ridges = Ridges(2, 1.0)
    ridges.know("ngram", [2])
    ridges.know("model", [1, 4])
    for drafter, told in (("ngram", [1.0, 2.0]), ("model", [1.0, 3.0, 1.0, 4.0])):
        ridges.add(drafter, np.ones(2), np.array(told))
    before = ridges.estimate(np.ones(2))
    ridges.know("ngram", [2])
    assert [a.tolist() for a in ridges.estimate(np.ones(2))] == [a.tolist() for a in before], "nothing new"
    ridges.know("ngram", [2, 8])
    gains, drafted, _ = ridges.estimate(np.ones(2))
    assert gains.tolist() == [*before[0][1:], 0.0, 0.0] and drafted.tolist() == [*before[1][1:], 0.0, 0.0]


def test_linear_bandits_price_time_at_the_load_of_now() -> None:
    """The gain of a draft is learned once; a busy batch changes its price, and no arm must be tried again for that."""
    policy = started("linucb", ActionTable.build(["model"], [1, 4, 8]))

    def play(rounds: int, occupancy: float, slope: float) -> list[int]:
        ks = []
        for i in range(rounds):
            k_max = 8 if i % 8 else 2  # as at the end of a budget: only two lengths can tell what a token costs
            action = policy.act(replace(seen(k_max), occupancy=occupancy))
            ks.append(action.k)
            accepted = min(action.k, (0, 8, 3, 8)[i % 4])
            cost = 0.001 * action.k
            timed = {"draft_seconds": cost, "draft_steps": action.k}
            policy.update(played(action, accepted, seconds=0.02 + cost + slope * action.k, **timed))
        return ks

    assert sum(k >= 4 for k in play(200, 0.25, 0.0)[-50:]) > 40
    busy = play(60, 1.0, 0.05)
    assert sum(k == 0 for k in busy[-40:]) > 30
    assert sum(k >= 4 for k in play(20, 0.25, 0.0)) > 14


def test_linucb_bonus_belongs_to_the_arm() -> None:
    """Of two arms with the same rewards the less tried one wins."""
    policy = started("linucb:share=0", ActionTable.build(["x", "y"], [2]))
    for name, n in (("x", 40), ("y", 4)):
        for i in range(n):
            policy.act(seen())
            policy.update(played(Action(name, 2), 1 + i % 2, seconds=0.02))
    for _ in range(60):
        policy.act(seen())
        policy.update(played(ROLLBACK, 0, seconds=0.03))
    assert policy.act(seen()).drafter == "y"


def contextual(policy: Policy, rounds: int, signal: str) -> list[tuple[bool, int]]:
    """A stream in which a signal tells whether a draft will be accepted in full or not at all: (good, K) per round."""
    rng = random.Random(3)
    log = []
    for i in range(rounds):
        good = rng.random() < 0.5
        fields = {"ngram_match": 4 if good else 0} if signal == "match" else {"target_entropy": 0.1 if good else 4.0}
        action = policy.act(Observation(i, 3, 9, 8, 0.0, (), 0.2, **fields))  # type: ignore[arg-type]
        log.append((good, action.k))
        accepted, cost = action.k if good else 0, 0.004 * action.k
        policy.update(
            played(
                action,
                accepted,
                seconds=0.02 + cost,
                draft_seconds=cost,
                verify_seconds=0.02,
                draft_steps=action.k,
            )
        )
    return log


@pytest.mark.parametrize(("spec", "signal"), [("linucb", "match"), ("lints", "match"), ("linucb", "entropy")])
def test_linear_bandits_use_the_context(spec: str, signal: str) -> None:
    log = contextual(started(spec, ActionTable.build(["model"], [1, 4, 8])), 900, signal)[-200:]
    good, bad = [k for g, k in log if g], [k for g, k in log if not g]
    assert sum(k >= 4 for k in good) > 0.9 * len(good) and sum(k == 0 for k in bad) > 0.9 * len(bad)


@pytest.mark.parametrize(
    ("spec", "signal"), [("accept_model", "match"), ("accept_model", "entropy"), ("mdp", "entropy")]
)
def test_models_use_the_context(spec: str, signal: str) -> None:
    policy = started(f"{spec}:share=0", ActionTable.build(["model"], [1, 2, 4, 8]))  # no probes of what is bad
    log = contextual(policy, 900, signal)[-200:]
    good, bad = [k for g, k in log if g], [k for g, k in log if not g]
    assert sum(k >= 4 for k in good) > 0.9 * len(good) and sum(k == 0 for k in bad) > 0.9 * len(bad)


def test_accept_model_learns_the_chances() -> None:
    """Two kinds of context with chances 0.9 and 0.3 per token: the predicted E[tokens] come near the geometric sums."""
    policy = started("accept_model", ActionTable.build(["model"], [8]))
    assert isinstance(policy, AcceptModel)
    rng = random.Random(2)

    def at(good: bool) -> Observation:
        return Observation(0, 3, 9, 8, 0.0, (), 0.05, ngram_match=4 if good else 0, target_entropy=1.0)

    for i in range(3000):
        good = i % 2 == 0
        policy.act(at(good))
        accepted = 0
        while accepted < 8 and rng.random() < (0.9 if good else 0.3):
            accepted += 1
        policy.update(played(Action("model", 8), accepted))
    for good, alpha in ((True, 0.9), (False, 0.3)):
        expected = policy.tokens(policy.features(at(good)))[0]
        assert expected[0] == pytest.approx(1 + alpha, abs=0.12)
        assert expected[-1] == pytest.approx(sum(alpha**j for j in range(9)), rel=0.25)


def test_accept_model_step_is_stochastic_gradient_descent() -> None:
    """Coefficients after one learning step against the update rule written out (alpha 1e-4, constant rate)."""
    policy = started("accept_model:every=2,rate=0.1", ActionTable.build(["model"], [4]))
    x = policy.features(seen(ngram_match=4, target_entropy=1.5))
    for accepted in (2, 0):
        policy.act(seen(ngram_match=4, target_entropy=1.5))
        policy.update(played(Action("model", 4), accepted))
    w = np.array([1.1] + [0.0] * 2 * len(x) + [0.0] * 16)
    for j, label in ((1, 1), (2, 1), (3, 0), (1, 0)):
        row = np.concatenate([x, x if j == 1 else 0 * x, [math.log2(j) / 4], np.eye(16)[j - 1]])
        slope = label - 1 / (1 + math.exp(-row @ w))
        w = w * (1 - 0.1 * 1e-4) + 0.1 * slope * row
    assert policy.models["model"] == pytest.approx(w.tolist(), abs=1e-9)


def test_accept_model_prefers_the_drafter_that_has_something() -> None:
    """The lookup proposes only where the text recurs; a missing proposal is learned as nothing accepted."""
    policy = started("accept_model", ActionTable.build(["ngram", "model"], [1, 2, 4, 8]))
    rng = random.Random(4)
    log = []
    for i in range(1500):
        hit = rng.random() < 0.5
        action = policy.act(Observation(i, 3, 9, 8, 0.0, (), 0.2, ngram_match=4 if hit else 0))
        log.append((hit, action))
        lookup = action.drafter == "ngram"
        drafted = (action.k if hit else 0) if lookup else action.k
        accepted = drafted if lookup else min(drafted, 2)
        cost = 0.0 if lookup else 0.001 * drafted
        policy.update(played(action, accepted, drafted, seconds=0.02 + cost, draft_seconds=cost, draft_steps=drafted))
    late = log[-300:]
    assert sum(a.drafter == ("ngram" if hit else "model") for hit, a in late) > 0.9 * len(late)
    frozen = started("accept_model:frozen=true", policy.table)
    frozen.load_state_dict(json.loads(json.dumps(policy.state_dict())))
    frozen.begin(policy.table)
    assert frozen.act(seen(8, ngram_match=4)).drafter == "ngram"
    with pytest.raises(ArtefactError, match="reads"):
        started("accept_model:fields=position").load_state_dict(policy.state_dict())


def test_mdp_states_cover_the_table() -> None:
    entropies = [None, math.nan, 0.0, 0.5, 1.4, 2.0, 9.0]
    states = {state_of(e, p, a) for e in entropies for p in (0, 16, 500) for a in (0.0, 0.5, 0.7, 1.0)}
    assert states == set(range(60))


def test_mdp_without_a_future_is_the_myopic_choice() -> None:
    """gamma 0: argmax of tokens − ρ·seconds, worked out from the acceptance that was fed in."""
    policy = started("mdp:gamma=0,every=1000000", ActionTable.build(["model"], [1, 2, 4, 8]))
    assert isinstance(policy, Mdp)
    observation = seen(8, target_entropy=1.0)
    rng = random.Random(1)
    for _ in range(2000):
        policy.act(observation)
        accepted = 0
        while accepted < 8 and rng.random() < 0.6:
            accepted += 1
        policy.update(played(Action("model", 8), accepted, seconds=0.04, draft_seconds=0.02, draft_steps=8))
    policy._solve()
    policy.ema = 0.5
    rho, survive = policy.pace[0] / policy.pace[1], [0.6**j for j in range(9)]
    worth = {k: sum(survive[: k + 1]) - rho * (0.02 + 0.0025 * k) for k in (0, 1, 2, 4, 8)}
    assert policy.act(observation).k == max(worth, key=worth.__getitem__)


@pytest.mark.parametrize("spec", ["linucb", "lints", "accept_model", "mdp"])
def test_damaged_states_are_refused(spec: str) -> None:
    policy = started(spec)
    engine = FakeBackend(drafters=("model",))
    for request in fake_requests(3):
        run_request(engine, request, policy)
    state = policy.state_dict()
    for key in state:
        for value in (None, "poem", math.nan, [math.nan], {"model": [1]}):
            if isinstance(value, dict) and key in ("costs", "pace", "plan"):
                continue
            with pytest.raises(ArtefactError):
                started(spec).load_state_dict({**state, key: value})
    with pytest.raises(ArtefactError):
        started(spec).load_state_dict({})


@pytest.mark.parametrize(
    "spec", ["linucb:frozen=true", "lints:frozen=true", "accept_model:frozen=true", "mdp:frozen=true"]
)
def test_frozen_learners_do_not_change(spec: str) -> None:
    learner = started(spec.partition(":")[0])
    engine = FakeBackend(drafters=("model",))
    for request in fake_requests(6):
        run_request(engine, request, learner)
    frozen = started(spec)
    frozen.load_state_dict(learner.state_dict())
    before = json.dumps(frozen.state_dict())
    for request in fake_requests(3, seed=4):
        run_request(engine, request, frozen)
    assert json.dumps(frozen.state_dict()) == before


@pytest.mark.parametrize("spec", ["accept_model", "linucb", "goodput", "closed_form", "mdp"])
def test_hopeless_drafts_end_in_rollback(spec: str) -> None:
    policy = started(spec)
    engine = FakeBackend(drafters=("model",), alpha=0.0, c=0.2)
    rounds = [r for i in range(12) for r in run_request(engine, Request((1,), 64, seed=i), policy).rounds]
    assert sum(r.rollback for r in rounds[-200:]) > 160


@pytest.mark.parametrize(
    "spec", ["accept_model", "goodput", "closed_form", "mdp", "linucb", "gammatune", "hf_heuristic"]
)
def test_easy_drafts_get_long_ones(spec: str) -> None:
    policy = started(spec)
    engine = FakeBackend(drafters=("model",), alpha=0.97, c=0.05)
    rounds = [r for i in range(20) for r in run_request(engine, Request((1,), 96, seed=i), policy).rounds]
    late = [r.planned for r in rounds[-100:] if r.position + 17 <= 96]
    assert sum(late) / len(late) > 7


@pytest.mark.parametrize(
    "spec",
    ["guard(bandit:ucb,discount=0.9):span=3", "linucb", "lints", "accept_model:every=4", "mdp:every=8", "goodput"],
)
def test_a_saved_learner_goes_on_where_it_was(spec: str, tmp_path: Path) -> None:
    def play(policy: Policy, requests: list[Request]) -> list[Action]:
        engine = FakeBackend(drafters=("ngram", "model"))
        return [r.action for q in requests for r in run_request(engine, q, policy).rounds]

    learner, engine = make_policy(spec, seed=2), FakeBackend(drafters=("ngram", "model"))
    play(learner, fake_requests(6))
    path = save_policy(tmp_path / "policy.zip", learner, table=engine.table)
    loaded = load_artefact(path)
    expected = play(learner, fake_requests(4, seed=8))
    assert play(loaded, fake_requests(4, seed=8)) == expected
    loaded.reset()
    assert play(loaded, fake_requests(4, seed=8)) == expected
    assert make_policy(f"guard({path})").needs == learner.needs


@pytest.mark.parametrize(
    ("spec", "damage"),
    [
        ("survival", {"pace": "x"}),
        ("survival", {"pace": {"16": [1.0]}}),
        ("survival", {"costs": [1]}),
        ("survival", {"costs": {"16": {"verify": [1.0]}}}),
        ("survival", {"probes": {"credit": 0.0, "again": "", "idle": {"model": -1e308}, "better": {}}}),
        ("linucb", {"pace": [1]}),
        ("linucb", {"costs": "q"}),
        ("linucb", {"costs": {"16": {}}}),
        ("accept_model", {"costs": {"x": {"verify": [1.0] * 5}}}),
        ("mdp", {"pace": [1.0]}),
        ("goodput", {"costs": {"16": {"verify": [-1.0] * 5}}}),
    ],
)
def test_damaged_seconds_are_refused_in_one_sentence(spec: str, damage: dict[str, Any]) -> None:
    policy = make_policy(spec)
    policy.begin(ActionTable.build(["model"], [1, 2]))
    with pytest.raises(ArtefactError):
        policy.load_state_dict(policy.state_dict() | damage)
