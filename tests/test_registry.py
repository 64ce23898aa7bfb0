"""Spec strings: what is read, and the one sentence for what cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from assc.actions import ActionTable
from assc.core import Policy
from assc.errors import ArtefactError, SpecError
from assc.policy_files import without_alias
from assc.registry import make_policy, parse_spec, policy_names, register
from policies.artefact import save_policy
from policies.assc_rule import AsscRule
from policies.bandit import Bandit
from policies.guard import Guard
from policies.random_k import RandomK
from policies.static import StaticK
from policies.threshold import ThresholdRule
from policies.training.config import TrainConfig


@pytest.mark.parametrize("spec", ["static:4", "static:k=4", " static:4 ", "static: 4", "static:k = 4"])
def test_main_parameter_and_spaces(spec: str) -> None:
    policy = make_policy(spec)
    assert isinstance(policy, StaticK) and policy.k == 4 and policy.spec == spec.strip()


def test_types_come_from_the_constructor() -> None:
    policy = make_policy("bandit:ts,discount=0.5,frozen=TRUE,seed=3")
    assert isinstance(policy, Bandit)
    assert (policy.algo, policy.arms.discount, policy.frozen) == ("ts", 0.5, True)
    rule = make_policy("assc:variant=diagram,k_max=6,drafter=model")
    assert isinstance(rule, AsscRule) and (rule.k_max, rule.halve_below, rule.drafter) == (6, 0.45, "model")
    window = make_policy("threshold:window=9,up=1")
    assert isinstance(window, ThresholdRule) and (window.window, window.up) == (9, 1.0)


def test_seed_of_the_spec_wins() -> None:
    def state(spec: str, seed: int) -> object:
        policy = make_policy(spec, seed=seed)
        assert isinstance(policy, RandomK)
        return policy.rng

    assert state("random:seed=5", 1) == state("random", 5) != state("random", 1)


WRONG = {
    "": "has no name",
    ":4": "has no name",
    "nonesuch": "unknown policy 'nonesuch'; known policies: accept_model, accept_stop, ",
    "static": "policy 'static' needs k, for example 'static:4'",
    "bandit": "policy 'bandit' needs algo, for example 'bandit:ucb'",
    "static:": "ends with a separator",
    "static:4,": "malformed at ''",
    "static:,4": "malformed at ''",
    "static:k=": "malformed at 'k='",
    "static:=4": "malformed at '=4'",
    "static:4,4": "malformed at '4'",
    "static:4,k=4": "gives 'k' twice",
    "static:k=4,k=5": "malformed at 'k=5'",
    "static:four": "'four', which is not a valid int",
    "static:4.0": "not a valid int",
    "static:-1": "K is 0 or more, got -1",
    "static:k=4,speed=2": "takes no key 'speed'; its keys: k, drafter",
    "ar:4": "takes no value '4' without a key; its keys: none",
    "ar:k=4": "takes no key 'k'",
    "assc:diagram": "takes no value 'diagram' without a key",
    "assc:variant=poem": "variant is one of code, diagram, got 'poem'",
    "assc:k_min=5": "k_min <= init <= k_max must hold, got 5, 4, 8",
    "assc:k_min=0": "1 <= k_min",
    "assc:beta=nan": "beta is in [0, 1)",
    "assc:beta=1": "beta is in [0, 1)",
    "assc:high=0.4": "low <= high",
    "threshold:window=0": "window and probe are at least 1, got 0 and 8",
    "threshold:up=0.5": "down <= up",
    "threshold:up=nan": "down <= up",
    "threshold:hot=nan": "hot is a temperature",
    "threshold:init=9": "k_min <= init <= k_max",
    "bandit:exp4": "the algorithm is one of ucb, ts, exp3, eps, got 'exp4'",
    "bandit:ucb,discount=0": "discount is in (0, 1]",
    "bandit:ucb,discount=nan": "discount is in (0, 1]",
    "bandit:ucb,explore=inf": "explore are 0 or more",
    "bandit:ucb,window=-1": "window and explore are 0 or more",
    "bandit:ucb,window=9,discount=0.9": "give one of them",
    "bandit:ucb,frozen=maybe": "not a valid bool",
    "bandit:eps,eps=0": "eps is the share of rounds that explore, in (0, 1], got 0.0",
    "bandit:exp3,window=9": "exp3 forgets by discount",
    "window:safety=0.9": "0 <= safety <= bar <= 1",
    "window:pause=0": "window and pause are at least 1, got 8 and 0",
    "window:k_min=0": "1 <= k_min <= init <= k_max",
    "hf_heuristic:up=0": "init, up and down are at least 1, got 5, 0, 1",
    "sglang_ema:alpha=0": "alpha is in (0, 1], got 0.0",
    "sglang_ema:rows=0": "rows at least 1",
    "vllm_table:table=1-8": "table is written like 1-64:3/65-128:1/129-512:0 (first-last:K), got '1-8'",
    "vllm_table:table=2-8:1": "rise from 1 on without overlap",
    "vllm_table:table=1-8:4/8-9:1": "rise from 1 on without overlap",
    "goodput:window=0": "window and probe are at least 1",
    "closed_form:alpha=1": "alpha is the acceptance to begin with, in (0, 1), got 1.0",
    "closed_form:discount=nan": "discount in (0, 1]",
    "gammatune:eta=0": "eta is in (0, 1], got 0.0",
    "cascade:m=0": "m and k_ngram are at least 1",
    "cascade:k=4": "takes no key 'k'; its keys: m, k_ngram, k_model, lookup, model",
    "guard": "policy 'guard' needs policy, for example 'guard(assc)'",
    "guard()": "has wrong parentheses; write name(spec) or name(spec):key=value,key=value",
    "guard(assc": "has wrong parentheses",
    "guard(assc)x": "has wrong parentheses",
    "guard(assc):": "ends with a separator",
    "guard(nonesuch)": "inside guard(nonesuch): unknown policy 'nonesuch'",
    "guard(guard(static:x))": "inside guard(guard(static:x)): inside guard(static:x): the policy spec 'static:x' gives",
    "guard(assc:beta=2)": "inside guard(assc:beta=2): the policy spec 'assc:beta=2' is refused: beta is in [0, 1)",
    "guard(assc):policy=ar": "malformed at 'policy=ar'",
    "guard(assc):low=2": "low is in [0, 1]",
    "guard(assc):span=0": "rounds, span, probe, probes and settle are at least 1",
    "assc(ar)": "policy 'assc' is not one that goes around another, so it takes no (ar)",
    "linucb:ridge=0": "ridge above 0",
    "linucb:fields=poem": "fields are names joined by +, unknown observation field ['poem']",
    "accept_model:rate=0": "rate in (0, 1]",
    "mdp:gamma=1": "gamma is in [0, 1)",
    "mdp:every=0": "every is at least 1",
}


@pytest.mark.parametrize("spec", WRONG)
def test_wrong_specs_are_one_sentence(spec: str) -> None:
    with pytest.raises(SpecError) as caught:
        make_policy(spec)
    assert WRONG[spec] in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 450


def test_a_missing_artefact_is_named() -> None:
    with pytest.raises(ArtefactError, match=r"'no/such/policy.zip' does not exist"):
        make_policy("no/such/policy.zip")


def test_a_run_directory_is_the_policy_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever a spec is read, also with an @ in its name; `./x` is a directory, `x` a name."""
    run, policy = tmp_path / "a@b", make_policy("bandit:ucb")
    table = ActionTable.build(["model"], (1, 2))
    policy.begin(table)
    run.mkdir()
    save_policy(run / "policy.zip", policy, table=table)
    assert make_policy(str(run)).spec == make_policy(f" {run} ").spec == str(run / "policy.zip")
    inside = make_policy(f"guard({run}):span=9")
    assert isinstance(inside, Guard) and inside.inner.spec == str(run / "policy.zip")
    TrainConfig(imitate=str(run)).check()
    assert without_alias(str(run)) == str(run) and without_alias(f"{run}@c") == str(run)
    assert without_alias(str(tmp_path / "no@b")) == str(tmp_path / "no")
    monkeypatch.chdir(tmp_path)
    assert make_policy("./a@b").spec == "./a@b/policy.zip".removeprefix("./")
    Path("run").mkdir()
    with pytest.raises(SpecError, match=r"unknown policy 'run'.*\(the directory is \./run\)"):
        make_policy("run")
    with pytest.raises(ArtefactError, match="is empty"):
        make_policy("guard(./run)")


def test_parsing_keeps_order_and_text() -> None:
    assert parse_spec("name:a=1,b= x ,c=y=z") == ("name", {"a": "1", "b": "x", "c": "y=z"})
    assert parse_spec("name") == ("name", {})


def test_names_are_sorted_and_every_policy_keeps_the_contract() -> None:
    names = policy_names()
    assert list(names) == sorted(names)
    for spec in ("ar", "static:1", "random", "assc", "threshold", "bandit:ts"):
        assert isinstance(make_policy(spec), Policy)


def test_a_name_is_registered_once() -> None:
    with pytest.raises(SpecError, match=r"registered twice, in .* and "):
        register("ar")(StaticK)
