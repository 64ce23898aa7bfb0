"""Predicted chances of acceptance against what happened, by counting of the test's own."""

from __future__ import annotations

import numpy as np
import pytest
from fakes import FakeBackend, fake_requests

from assc.actions import ActionTable
from assc.core import Action, Observation, Request, RoundRecord
from assc.evaluate import evaluate
from assc.registry import make_policy
from assc.reliability import BINS, judged, reliability
from assc.rounds_json import spread
from assc.run import iter_rounds

DRAFT = Action("ngram", 4)


def record(chances: tuple[float, ...], drafted: int, accepted: int, finish: object = None) -> RoundRecord:
    return RoundRecord(0, 0, DRAFT, drafted, accepted, accepted + 1, (), 1.0, finish=finish, accept_chances=chances)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("drafted", "accepted", "finish", "seen", "hits"),
    [
        (4, 2, None, 3, 2),  # two accepted, the third refused, the fourth never judged
        (4, 4, None, 4, 4),
        (4, 0, None, 1, 0),
        (4, 2, "eos", 2, 2),  # the end of the request refuses nothing
        (0, 0, None, 1, 0),  # a lookup without a match
        (2, 2, None, 2, 2),  # an early stop: positions 3 and 4 are not judged
    ],
)
def test_what_a_round_judges(drafted: int, accepted: int, finish: object, seen: int, hits: int) -> None:
    chances = (0.9, 0.8, 0.7, 0.6)
    assert judged(record(chances, drafted, accepted, finish)) == (chances[:seen], hits)
    assert judged(record((), drafted, accepted, finish)) == ((), 0)


def test_numbers_by_hand() -> None:
    """Three positions: 0.95 accepted, 0.95 accepted, 0.35 refused."""
    found = reliability([("p", [record((0.95, 0.95, 0.35), 4, 2)])], seed=0)
    assert found is not None and found["judged"] == 3
    assert [(b["from"], b["judged"], b["accepted"]) for b in found["bins"]] == [(0.3, 1, 0.0), (0.9, 2, 1.0)]
    assert found["brier"] == pytest.approx((0.05**2 + 0.05**2 + 0.35**2) / 3)
    assert found["accepted_share"] == pytest.approx(2 / 3) and found["brier_constant"] == pytest.approx(2 / 9)
    assert found["calibration_error"] == pytest.approx((1 * 0.35 + 2 * 0.05) / 3)
    assert found["bins"][0]["accepted_ci95"] == [None, None], "one prompt shows no spread"
    assert reliability([("p", [record((), 4, 2)])], seed=0) is None and reliability([], seed=0) is None


def test_a_calibrated_predictor_lies_on_the_line_and_a_hopeful_one_below() -> None:
    """800 rounds of one drafted token for 40 prompts, chances uniform. False alarms: each of the 10 intervals misses
    with a chance near 5 %, so fewer than 6 hits have a chance below 1e-5; the seed is fixed besides."""
    rng = np.random.default_rng(0)
    honest, hopeful = [], []
    for prompt in range(40):
        chances = rng.random(20)
        hits = rng.random(20) < chances
        honest.append((prompt, [record((float(p),), 1, int(h)) for p, h in zip(chances, hits, strict=True)]))
        hopeful.append((prompt, [record((float(np.sqrt(p)),), 1, int(h)) for p, h in zip(chances, hits, strict=True)]))
    good, bad = (reliability(units, seed=1) for units in (honest, hopeful))
    assert good is not None and bad is not None and len(good["bins"]) == BINS
    inside = [b["accepted_ci95"][0] <= b["predicted"] <= b["accepted_ci95"][1] for b in good["bins"]]
    assert sum(inside) >= 6
    assert good["calibration_error"] < 0.08 < bad["calibration_error"] and good["brier"] < bad["brier"]
    assert good["brier"] < 0.2 < good["brier_constant"]


@pytest.mark.parametrize("spec", ["accept_model", "goodput", "closed_form", "guard(closed_form)"])
def test_policies_that_predict(spec: str) -> None:
    """Chances are in the record of every drafting round, as many as planned; learning to predict a constant works."""
    backend, policy = FakeBackend(alpha=0.8), make_policy(spec)
    rounds = [r for q in fake_requests(30, max_new_tokens=64) for r in iter_rounds(backend, q, policy)]
    drafting = [r for r in rounds if r.planned]
    assert drafting and all(len(r.accept_chances) == r.planned for r in drafting)
    assert all(0 <= p <= 1 for r in drafting for p in r.accept_chances)
    assert all(r.accept_chances == () for r in rounds if r.rollback)
    late = [p for r in drafting[-50:] for p in judged(r)[0]]
    assert abs(float(np.mean(late)) - 0.8) < 0.12


def test_the_result_holds_it_and_other_policies_have_none() -> None:
    policies = [("ar", make_policy("ar")), ("goodput", make_policy("goodput"))]
    data = evaluate(FakeBackend(alpha=0.7), fake_requests(8), policies, seed=0, warmup=0).to_json()
    plain, mine = data["details"]
    assert plain["accept_reliability"] is None
    found = mine["accept_reliability"]
    assert found["judged"] == sum(b["judged"] for b in found["bins"]) > 20
    assert 0 <= found["calibration_error"] <= 1 and found["bins"][0]["from"] >= 0


def test_a_policy_of_others_without_predictions_runs() -> None:
    class Bare:
        spec, needs = "bare", frozenset[str]()

        def begin(self, table: ActionTable) -> None: ...

        def act(self, observation: Observation) -> Action:
            return Action("ngram", min(2, observation.k_max)) if observation.k_max else Action(None, 0)

        def update(self, record: RoundRecord) -> None: ...

        def reset(self) -> None: ...

    rounds = list(iter_rounds(FakeBackend(), fake_requests(1)[0], Bare()))  # type: ignore[arg-type]
    assert rounds and all(r.accept_chances == () for r in rounds)


def test_requests_to_look_at_are_spread() -> None:
    heat = {0.0: {}, 1.0: {"temperature": 1.0}}
    requests = [
        Request((1,), id=f"{c}{i}", category=c, sampling=heat[t]) for c in "ab" for i in range(2) for t in (0.0, 1.0)
    ]
    assert spread(requests, 0) == [] and spread(requests, 99) == list(range(8))
    first, second, third, fourth = (requests[i] for i in spread(requests, 4))
    chosen = (first, second, third, fourth)
    assert sorted(r.category for r in chosen) == ["a", "a", "b", "b"] and len({r.id for r in chosen}) == 4
    assert sorted(r.temperature for r in chosen) == [0.0, 0.0, 1.0, 1.0]
    assert spread([Request((1,)) for _ in range(3)], 2) == [0, 1], "requests without id stand alone"
