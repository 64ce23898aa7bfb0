"""The rung of a policy follows from what it declares."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fakes import FakeBackend, FixedPolicy, fake_requests

from assc.actions import ActionTable
from assc.evaluate import evaluate
from assc.registry import make_policy, policy_factory, policy_names
from assc.rungs import RUNGS, rung_of
from policies.artefact import load_artefact, save_policy

EXPECTED = {
    "static:4": "static",
    "random": "random",
    "assc": "history",
    "vllm_table": "history",
    "bandit:ucb": "history",
    "cascade": "confidence",
    "svip": "confidence",
    "guard(assc)": "history",
    "guard(cascade)": "confidence",
    "linucb": "learned",
    "accept_model": "learned",
    "mdp": "learned",
    "specdecpp": "learned",
}


@pytest.mark.parametrize(("spec", "rung"), EXPECTED.items())
def test_rungs_of_what_is_known(spec: str, rung: str) -> None:
    assert rung_of(make_policy(spec)) == rung


@pytest.mark.parametrize("name", policy_names())
def test_every_policy_has_a_rung(name: str) -> None:
    factory: Any = policy_factory(name)
    assert rung_of(make_policy(getattr(factory, "example", "") or name)) in RUNGS


def test_a_saved_policy_is_learned(tmp_path: Path) -> None:
    table = ActionTable.build(["ngram"], [2, 4])
    policy = make_policy("bandit:ucb")
    policy.begin(table)
    assert rung_of(load_artefact(save_policy(tmp_path / "policy.zip", policy, table=table))) == "learned"


def test_the_baseline_is_plain_and_others_need_not_say_anything() -> None:
    policies = [("ar", make_policy("ar")), ("static:0", make_policy("static:0")), ("mute", FixedPolicy(2))]
    rows = evaluate(FakeBackend(), fake_requests(2), policies, seed=0, warmup=0).rows()
    assert [row["rung"] for row in rows] == ["plain", "static", None]


def test_the_docs_name_every_rung() -> None:
    page = (Path(__file__).parents[1] / "docs" / "evaluation.md").read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in page for name in RUNGS)
