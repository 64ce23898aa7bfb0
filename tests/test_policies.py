"""Every registered policy, and every variant worth naming, through one conformance suite."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from fakes import FakeBackend, fake_requests

from assc.actions import ActionTable
from assc.core import Action, Observation, Policy, Request, RoundRecord
from assc.errors import SpecError
from assc.registry import make_policy, parse_spec, policy_factory, policy_names
from assc.run import run_request
from policies.base import BasePolicy

SPECS = {
    "ar": ["ar"],
    "static": ["static:0", "static:1", "static:4", "static:k=16,drafter=model"],
    "random": ["random", "random:seed=7"],
    "assc": ["assc", "assc:variant=diagram", "assc:k_min=1,k_max=12,init=6,drafter=model"],
    "threshold": ["threshold", "threshold:k_min=0", "threshold:window=3,hot=0.1"],
    "bandit": [
        "bandit:ucb",
        "bandit:ts",
        "bandit:ucb,discount=0.97",
        "bandit:ts,window=20",
        "bandit:ucb,frozen=true",
        "bandit:eps",
        "bandit:eps,window=20",
        "bandit:exp3",
        "bandit:exp3,discount=0.97",
        "bandit:exp3,frozen=true",
    ],
    "window": ["window", "window:window=2,safety=0.6,pause=2", "window:k_min=2,k_max=16,drafter=model"],
    "hf_confidence": ["hf_confidence", "hf_confidence:m=2,t=0.6", "hf_confidence:refit=false,cap=5,drafter=model"],
    "llamacpp": ["llamacpp", "llamacpp:p_min=0.5,n_min=3,n_max=6,m=2", "llamacpp:p_min=0,n_max=3,drafter=model"],
    "svip": ["svip", "svip:h=0.5,cap=4,m=1", "svip:scale=0.3,drafter=model"],
    "adaedl": ["adaedl", "adaedl:adapt=false,lam=0.4,m=2", "adaedl:goal=0.5,step=0.5,cap=4,drafter=model"],
    "draft_verify": [
        "draft_verify",
        "draft_verify:adapt=false,th=0.3,m=2",
        "draft_verify:goal=0.5,step=0.5",
    ],
    "specdecpp": ["specdecpp", "specdecpp:every=2,least=1,reject=6,m=2", "specdecpp:frozen=true,drafter=model,cap=5"],
    "hf_heuristic": ["hf_heuristic", "hf_heuristic:init=1,down=2"],
    "sglang_ema": ["sglang_ema", "sglang_ema:warmup=0,interval=1", "sglang_ema:rows=8,warmup=0,interval=2"],
    "vllm_table": ["vllm_table", "vllm_table:table=1-2:5/3-4:3,rows=3"],
    "goodput": ["goodput", "goodput:window=4,probe=2,k_max=8", "goodput:drafter=model"],
    "closed_form": ["closed_form", "closed_form:alpha=0.1,probe=3"],
    "gammatune": ["gammatune", "gammatune:k_min=2,k_max=8"],
    "cascade": ["cascade", "cascade:m=1,k_ngram=16,k_model=0"],
    "guard": [
        "guard(assc)",
        "guard(static:4):rounds=2,loss=0.5,span=3,settle=4",
        "guard(bandit:ucb,discount=0.97):rounds=1,low=0.9",
        "guard(guard(cascade):span=2):settle=4,share=0.05",
        "guard(hf_confidence):rounds=2,span=3",
    ],
    "linucb": ["linucb", "linucb:frozen=true", "linucb:fields=history_k+position,confidence=true,explore=0.2"],
    "lints": ["lints", "lints:ridge=5"],
    "accept_stop": ["accept_stop", "accept_stop:cap=5,charge=0"],
    "accept_model": ["accept_model", "accept_model:every=2,probe=5,confidence=true", "accept_model:frozen=true"],
    "survival": ["survival", "survival:strata=1,explore=0", "survival:discount=0.9,probe=2", "survival:frozen=true"],
    "mdp": ["mdp", "mdp:every=4,probe=3", "mdp:frozen=true"],
}
CASES = [
    spec for name in policy_names() for spec in SPECS.get(name, [getattr(policy_factory(name), "example", "") or name])
]


def test_every_registered_policy_is_a_case() -> None:
    assert {case.partition(":")[0].partition("(")[0] for case in CASES} == set(policy_names())


every_policy = pytest.mark.parametrize("spec", CASES)


def backend(**changes: object) -> FakeBackend:
    options: dict[str, object] = {"drafters": ("ngram", "model"), "k_values": range(1, 17), "noise": 0.1}
    return FakeBackend(**(options | changes))  # type: ignore[arg-type]


def play(policy: Policy, requests: list[Request], **changes: object) -> list[list[Action]]:
    engine = backend(**changes)
    return [[r.action for r in run_request(engine, request, policy).rounds] for request in requests]


def observation(k_max: int = 16, past: tuple[RoundRecord, ...] = (), temperature: float = 0.0) -> Observation:
    return Observation(len(past), 5, k_max + 1, k_max, temperature, past, 0.1)


def memory(policy: BasePolicy) -> str:
    """Everything that decides the next actions, as text."""
    per_request = {name: repr(getattr(policy, name)) for name in policy.per_request}
    return json.dumps([per_request, policy.state_dict()], sort_keys=True)


def built(spec: str) -> BasePolicy:
    policy = make_policy(spec, seed=3)
    assert isinstance(policy, BasePolicy)
    return policy


def is_online(spec: str) -> bool:
    return bool(built(spec).learned) and "frozen" not in spec


def test_there_are_cases_for_every_policy() -> None:
    assert {parse_spec(spec)[0] for spec in CASES} == set(policy_names())
    assert {"ar", "static", "random", "assc", "threshold", "bandit"} <= set(policy_names())


@every_policy
def test_actions_are_legal_and_plain_ints(spec: str) -> None:
    """B05, B06: rollback or a known drafter with an int 1 <= K <= k_max, whatever the budget leaves."""
    policy, table = built(spec), backend().table
    policy.begin(table)
    past: tuple[RoundRecord, ...] = ()
    for i in range(120):
        k_max = (16, 5, 1, 0, 2, 12)[i % 6]
        action = policy.act(observation(k_max, past, temperature=0.2 * (i % 7)))
        assert type(action.k) is int and 0 <= action.k <= k_max
        assert action.rollback or action.drafter in table.drafters
        accepted = (action.k, 0, action.k // 2)[i % 3]
        record = RoundRecord(
            i, i, action, action.k, accepted, accepted + 1, (1,) * (accepted + 1), 0.02 + 0.002 * action.k
        )
        policy.update(record)
        past = (*past, record)


@every_policy
def test_without_a_drafter_it_decodes_plainly(spec: str) -> None:
    if ("static:" in spec and spec != "static:0") or "drafter=" in spec:
        with pytest.raises(SpecError):
            built(spec).begin(ActionTable.build([]))
        return
    policy = built(spec)
    policy.begin(ActionTable.build([]))
    assert policy.act(observation(0)).rollback


@every_policy
def test_same_seed_same_actions(spec: str) -> None:
    requests = fake_requests(6)
    assert play(make_policy(spec, seed=3), requests) == play(make_policy(spec, seed=3), requests)


@every_policy
def test_T14_requests_do_not_leak_into_each_other(spec: str) -> None:
    """Two identical streams give identical K; a learner (or a random stream) repeats itself after `reset` only."""
    policy, requests = built(spec), fake_requests(6)
    first = play(policy, requests)
    if is_online(spec):
        policy.reset()
    assert play(policy, requests) == first


@every_policy
def test_T14_a_request_does_not_depend_on_the_one_before(spec: str) -> None:
    if is_online(spec):
        pytest.skip("an online learner is meant to depend on earlier requests")
    policy = built(spec)
    last = fake_requests(5)[-1]
    assert play(policy, fake_requests(5))[-1] == play(built(spec), [last])[0]


@every_policy
def test_two_policies_share_nothing(spec: str) -> None:
    alone = play(built(spec), fake_requests(4))
    one, two = built(spec), built(spec)
    play(two, fake_requests(3, seed=9), alpha=0.1)
    assert play(one, fake_requests(4)) == alone


@every_policy
def test_reset_returns_to_construction(spec: str) -> None:
    policy = built(spec)
    fresh = memory(policy)
    play(policy, fake_requests(4))
    policy.reset()
    assert memory(policy) == fresh


@every_policy
def test_state_survives_json(spec: str) -> None:
    policy, requests = built(spec), fake_requests(8)
    play(policy, requests[:4])
    saved = json.loads(json.dumps(policy.state_dict(), allow_nan=False))
    other = built(spec)
    other.load_state_dict(saved)
    assert other.state_dict() == policy.state_dict()
    assert play(other, requests[4:]) == play(policy, requests[4:])
    other.reset()
    assert memory(other) == memory(built(spec))


@every_policy
def test_state_is_a_copy(spec: str) -> None:
    policy = built(spec)
    play(policy, fake_requests(2))
    saved = policy.state_dict()
    before = json.dumps(saved)
    play(policy, fake_requests(2, seed=5))
    assert json.dumps(saved) == before


@every_policy
def test_decisions_are_causal(spec: str) -> None:
    """`act` reads the observation and earlier updates, and changes neither; asking without a declared need is fine."""
    policy, twin = built(spec), built(spec)
    table = backend().table
    policy.begin(table)
    twin.begin(table)
    first = observation(16)
    frozen = repr(first)
    a, b = policy.act(first), twin.act(observation(16))
    assert a == b and repr(first) == frozen
    if "rng" not in policy.learned:
        assert policy.act(first) == a, "a second look at the same moment gives another action"


@every_policy
@pytest.mark.parametrize("seconds", [0.0, math.nan, math.inf, -1.0, 1e300])
def test_B16_strange_seconds_leave_a_working_policy(spec: str, seconds: float) -> None:
    policy = built(spec)
    policy.begin(backend().table)
    for i in range(60):
        action = policy.act(observation(8))
        policy.update(RoundRecord(i, i, action, action.k, action.k, action.k + 1, (), seconds))
    json.dumps(policy.state_dict(), allow_nan=False)
    assert 0 <= policy.act(observation(8)).k <= 8


@every_policy
def test_it_says_what_it_uses(spec: str) -> None:
    cls = type(built(spec))
    assert cls.uses and cls.__doc__ and "Source:" in cls.__doc__ and ">>>" in cls.__doc__ and "Uses " in cls.__doc__


@pytest.mark.parametrize("name", policy_names())
def test_every_policy_is_in_the_docs(name: str) -> None:
    text = (Path(__file__).parents[1] / "docs" / "policies.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith(f"| `{name}")]
    assert rows, f"docs/policies.md has no row for {name}"
    assert any(f"| {getattr(policy_factory(name), 'uses', '')} |" in row for row in rows)


def test_static_above_k_max_names_both() -> None:
    policy = make_policy("static:9")
    with pytest.raises(SpecError, match=r"'static:9' asks for K=9, but K_max of this decoder is 8"):
        policy.begin(ActionTable.build(["ngram"], [1, 2, 4, 8]))


@pytest.mark.parametrize("spec", ["static:4,drafter=none", "assc:drafter=none", "threshold:drafter=none"])
def test_unknown_drafter_is_refused_by_name(spec: str) -> None:
    with pytest.raises(SpecError, match=r"names the drafter 'none'.*ngram"):
        make_policy(spec).begin(ActionTable.build(["ngram"], [4]))


def test_random_is_uniform_over_what_can_be_played() -> None:
    """5000 draws from 5 actions: each within 5 standard deviations (false alarm below 1 in 100,000)."""
    policy = make_policy("random", seed=1)
    policy.begin(ActionTable.build(["ngram"], [1, 2, 3, 4, 8]))
    counts: dict[int, int] = {}
    for _ in range(5000):
        k = policy.act(observation(4)).k
        counts[k] = counts.get(k, 0) + 1
    assert sorted(counts) == [0, 1, 2, 3, 4]
    assert all(abs(n - 1000) < 5 * math.sqrt(5000 * 0.2 * 0.8) for n in counts.values())
    assert play(make_policy("random", seed=1), fake_requests(2)) != play(
        make_policy("random", seed=2), fake_requests(2)
    )
