"""Step policies through their conformance suite; `test_policies.py` plays them beside the round-level ones as well."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
from fakes import FakeBackend, fake_requests
from sklearn.metrics import roc_curve
from test_policies import CASES, backend, built, observation

from assc import registry
from assc.core import Action, RoundRecord
from assc.errors import AsscError
from assc.registry import make_policy
from assc.run import run_request
from assc.steps import STEP_FIELDS, Decision, StepObservation, encode, observe_step, step_decider
from policies.hf_confidence import best_threshold

STEP_CASES = [spec for spec in CASES if step_decider(make_policy(spec)) is not None]
every_step_policy = pytest.mark.parametrize("spec", STEP_CASES)


def steps(drafter: str, planned: int, p: float | None, k_max: int = 16) -> list[StepObservation]:
    """A draft of `planned` tokens in which every token has the probability `p` (None: a lookup)."""
    seen: list[StepObservation] = []
    codes = None if p is None else encode(12 * (1 - p), p, p * p, p)
    for drafted in range(1, planned + 1):
        seen.append(observe_step(observation(k_max), drafter, planned, drafted, codes, seen[-1] if seen else None))
    return seen


def test_there_are_step_policies() -> None:
    assert "hf_confidence" in STEP_CASES and "static:4" not in STEP_CASES


@every_step_policy
def test_needs_name_known_fields(spec: str) -> None:
    named = {n for n in built(spec).needs if n.startswith("step_")}
    assert named <= set(STEP_FIELDS), f"known step fields: {STEP_FIELDS}"


@every_step_policy
@pytest.mark.parametrize("p", [None, 0.0, 0.01, 0.3, 0.7, 0.99, 1.0])
def test_every_answer_is_a_decision(spec: str, p: float | None) -> None:
    """Any confidence, and none at all; a draft that goes on for ever ends at what is planned."""
    policy = built(spec)
    policy.begin(backend().table)
    decide = step_decider(policy)
    assert decide is not None
    for i in range(12):
        action = policy.act(observation(16))
        made, decision = 0, Decision.VERIFY
        for step in steps("model" if p is not None else "ngram", max(1, action.k), p):
            made, decision = step.drafted, decide(step)
            assert isinstance(decision, Decision)
            if decision is not Decision.CONTINUE:
                break
        drafted = 0 if decision is Decision.ROLLBACK else made
        accepted = drafted if i % 2 else 0
        record = RoundRecord(
            i, i, Action("model", made), drafted, accepted, accepted + 1, (1,) * (accepted + 1), 0.02,
            discarded=made - drafted,
        )  # fmt: skip
        policy.update(record)


@every_step_policy
def test_decide_leaves_the_observation_alone(spec: str) -> None:
    policy = built(spec)
    policy.begin(backend().table)
    policy.act(observation(16))
    for step in steps("model", 4, 0.9):
        before = repr(step)
        policy.decide(step)  # type: ignore[attr-defined]
        assert repr(step) == before


@every_step_policy
def test_text_and_counts_hold(spec: str) -> None:
    """The text of plain decoding; drafted, accepted and discarded tokens add up to what was asked for."""
    engine, plain = backend(), backend()
    for request in fake_requests(4):
        rounds = run_request(engine, request, built(spec)).rounds
        text = run_request(plain, request, make_policy("ar")).tokens
        assert tuple(t for r in rounds for t in r.tokens) == text
        for r in rounds:
            assert 0 <= r.accepted <= r.drafted and r.drafted + r.discarded <= max(r.planned, 1)
            assert r.rollback == (r.drafted == 0 and (r.discarded > 0 or r.action.rollback))


def test_a_backend_without_steps_is_refused_in_one_sentence() -> None:
    class Rounds(FakeBackend):
        check_steps = None  # type: ignore[assignment]

    with pytest.raises(AsscError, match=r"'hf_confidence' decides .* token, which the backend Rounds cannot"):
        run_request(Rounds(), fake_requests(1)[0], make_policy("hf_confidence"))


def test_hf_confidence_refits_as_a_roc_curve_says() -> None:
    """Against scikit-learn's own curve, on random samples with ties."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        n = int(rng.integers(6, 40))
        p, truth = rng.integers(0, 12, n) / 12, rng.random(n) < 0.6
        truth[:2] = (True, False)
        fpr, tpr, _ = roc_curve(truth, p)
        cost = fpr + 3 * (1 - tpr)
        mine = best_threshold(sorted(p[truth].tolist()), sorted(p[~truth].tolist()))
        assert math.isclose(cost.min(), (p[~truth] >= mine).mean() + 3 * (p[truth] < mine).mean())


def test_hf_confidence_stops_behind_the_first_doubtful_token() -> None:
    engine = backend(drafters=("model",), alpha=0.6, noise=0.0)
    policy = make_policy("hf_confidence:refit=false")
    rounds = run_request(engine, fake_requests(1, max_new_tokens=200)[0], policy).rounds
    # the fake draft gives 0.9 to tokens that will be accepted and 0.3 to others
    assert all(r.accepted in (r.drafted - 1, r.drafted) for r in rounds) and any(r.accepted > 1 for r in rounds)
    assert all(r.accepted == r.drafted - 1 for r in rounds[:-1] if r.drafted < 16)


def test_the_examples_of_the_docs_run(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[1] / "docs" / "step-policies.md").read_text(encoding="utf-8")
    policy, environment = re.findall(r"```python\n(.*?)```", page, re.S)
    registry.load_plugins()
    monkeypatch.setattr(registry, "_factories", dict(registry._factories))  # "cautious" is gone afterwards
    exec(policy, {"__name__": "docs"})
    rounds = run_request(backend(), fake_requests(1)[0], make_policy("cautious:least=0.5")).rounds
    assert any(r.drafted for r in rounds)
    scope: dict[str, object] = {}
    exec(environment, scope)
    assert scope["info"]["record"].drafted == 1  # type: ignore[index]
