"""Rows and details against numbers worked out by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from fakes import FakeBackend, FixedPolicy, fake_requests

from assc.core import ROLLBACK, Action, Episode, Observation, Request, RoundRecord
from assc.evaluate import evaluate
from assc.metrics import ROW_KEYS, Run, make_details, make_row
from assc.registry import make_policy


class Script(FixedPolicy):
    """Plays given K values in turn, then rolls back."""

    def __init__(self, ks: Sequence[int]) -> None:
        super().__init__(0, "script")
        self.ks = ks

    def act(self, observation: Observation) -> Action:
        index = len(observation.past)
        return Action("ngram", self.ks[index]) if index < len(self.ks) and self.ks[index] else ROLLBACK


def fixed(*ks: int) -> list[tuple[str, FixedPolicy]]:
    return [(f"static:{k}", FixedPolicy(k)) for k in ks]


def record(drafted: int, accepted: int, *, k: int | None = None, discarded: int = 0, emitted: int = 0) -> RoundRecord:
    k = drafted if k is None else k
    action = Action("ngram", k) if k else ROLLBACK
    emitted = emitted or accepted + 1
    return RoundRecord(0, 0, action, drafted, accepted, emitted, (7,) * emitted, 1.0, 0.25, 0.75, discarded=discarded)


def run_of(index: int, *rounds: RoundRecord) -> Run:
    return Run(index, 0, Episode(fake_requests(1)[0], "x", tuple(rounds)))


def test_rows_have_exactly_the_promised_keys_in_the_given_order() -> None:
    policies = [("static:4", FixedPolicy(4)), ("ar", make_policy("ar")), ("static:2", FixedPolicy(2))]
    result = evaluate(FakeBackend(), fake_requests(6), policies, seed=0).to_json()
    assert [row["policy"] for row in result["rows"]] == ["static:4", "ar", "static:2"]
    assert all(tuple(row) == ROW_KEYS for row in result["rows"])
    assert result["same_text"] is True and result["complete"] is True
    plain = result["rows"][1]
    assert plain["speedup"] == 1.0 and plain["speedup_ci95"] == [1.0, 1.0] and plain["rollback_rate"] == 1.0
    assert plain["acceptance_rate"] is plain["waste_rate"] is None and plain["mean_k"] == 0.0
    assert plain["draft_time_share"] == 0.0 and plain["tokens_per_round"] == 1.0


def test_speedup_by_hand() -> None:
    """Everything accepted, K = 4, c = 0.1, 40 tokens: 8 rounds of 1.4 steps against 40 steps."""
    backend = FakeBackend(alpha=1.0, c=0.1, step_seconds=0.02)
    row = evaluate(backend, fake_requests(3, max_new_tokens=40), fixed(4), seed=0).rows()[0]
    assert row["tokens"] == 120 and row["rounds"] == 24
    assert row["seconds"] == pytest.approx(24 * 0.02 * 1.4)
    assert row["speedup"] == pytest.approx(40 / (8 * 1.4))
    assert row["speedup_ci95"] == pytest.approx([row["speedup"]] * 2)
    assert row["draft_time_share"] == pytest.approx(0.4 / 1.4) and row["mean_k"] == 4 and row["tokens_per_round"] == 5


def test_plain_decoding_always_runs_but_is_listed_only_on_request() -> None:
    backend = FakeBackend(alpha=0.5)
    requests = fake_requests(5)
    hidden = evaluate(backend, requests, fixed(3), seed=0)
    shown = evaluate(backend, requests, [("ar", make_policy("ar")), *fixed(3)], seed=0)
    assert [r["policy"] for r in hidden.rows()] == ["static:3"]
    assert hidden.rows()[0] == shown.rows()[1]
    assert hidden.baseline_row() == shown.rows()[0]


def test_v11_pooled_and_mean_of_requests_are_both_reported_and_defined() -> None:
    """V11: two requests of 5 and 200 tokens, nothing accepted in the first and everything in the second, K = 4.

    First: five rounds that draft 4, 3, 2, 1, 0 (the budget cuts them). Second: 40 rounds of 4 accepted + bonus.
    """
    backend = FakeBackend(alpha={"short": 0.0, "long": 1.0})
    requests = [Request((1,), 5, 0, "r0", "short"), Request((1,), 200, 1, "r1", "long")]
    result = evaluate(backend, requests, fixed(4), seed=0).to_json()
    row, detail = result["rows"][0], result["details"][0]
    assert (row["tokens"], row["rounds"]) == (205, 45)
    assert row["tokens_per_round"] == pytest.approx(205 / 45)
    assert detail["tokens_per_round_mean_of_requests"] == pytest.approx((1 + 5) / 2)
    assert row["acceptance_rate"] == pytest.approx(160 / 170) and row["waste_rate"] == pytest.approx(10 / 170)
    assert detail["acceptance_rate_mean_of_requests"] == pytest.approx((0 + 1) / 2)
    assert detail["acceptance_by_position"] == pytest.approx([40 / 44, 40 / 43, 40 / 42, 40 / 41])
    definitions = result["meta"]["definitions"]
    assert "summed first" in definitions["tokens_per_round"] and "mean over requests" in json.dumps(definitions)
    assert set(ROW_KEYS) - {"policy"} <= set(definitions)
    assert all(name.removeprefix("details.") in detail for name in definitions if name.startswith("details."))


def test_v14_rounds_are_counted_when_k_changes() -> None:
    """V14: K sequence 3, 0, 5, 1."""
    result = evaluate(
        FakeBackend(alpha=1.0), fake_requests(1, max_new_tokens=13), [("script", Script([3, 0, 5, 1]))], seed=0
    ).to_json()
    row, detail = result["rows"][0], result["details"][0]
    assert row["rounds"] == 4 and detail["drafted"] == 9 and detail["planned"] == 9
    assert row["mean_k"] == 9 / 4 and row["rollback_rate"] == 1 / 4 and row["acceptance_rate"] == 1.0


def test_l03_discarded_tokens_are_in_no_rate() -> None:
    """L03: 8 tokens drafted, 5 of them thrown away by a gate, 3 verified, 2 accepted."""
    runs = [run_of(0, record(3, 2, k=8, discarded=5))]
    row, detail = make_row("x", runs, runs, seed=0, is_baseline=False), make_details(runs, runs, measured=True)
    assert row["acceptance_rate"] == pytest.approx(2 / 3) and row["mean_k"] == 8
    assert (detail["drafted"], detail["accepted"], detail["discarded"]) == (3, 2, 5)


def test_a_draft_rolled_back_is_paid_for_and_in_no_rate() -> None:
    """Two rounds of the same draft seconds: one accepted 2 of 4, one threw 4 away unverified."""
    thrown = record(0, 0, k=4, discarded=4)
    runs = [run_of(0, record(4, 2, k=4), thrown)]
    row, detail = make_row("x", runs, runs, seed=0, is_baseline=False), make_details(runs, runs, measured=True)
    assert thrown.rollback and row["acceptance_rate"] == row["rollback_rate"] == 0.5 and row["seconds"] == 2.0
    assert (detail["drafted"], detail["discarded"], detail["rollbacks"]) == (4, 4, 1)
    assert detail["wasted_draft_seconds"] == pytest.approx(0.25 * 0.5 + 0.25)


def test_l04_drafted_length_stands_beside_the_acceptance() -> None:
    """L04: acceptance 1 is no feat when only 1 of 8 planned tokens was drafted; empty rounds do not dilute."""
    timid = [run_of(0, record(1, 1, k=8), record(0, 0, k=8), record(1, 1, k=8))]
    detail = make_details(timid, timid, measured=True)
    assert detail["mean_drafted"] == 1.0 and detail["planned"] == 24
    backend = FakeBackend(alpha=1.0)
    full = evaluate(backend, fake_requests(2, max_new_tokens=90), fixed(8), seed=0).details()[0]
    assert full["mean_drafted"] == 8.0


def test_nothing_drafted_gives_null_rates_not_zero() -> None:
    runs = [run_of(0, record(0, 0, k=4), record(0, 0))]
    row, detail = make_row("x", runs, runs, seed=0, is_baseline=False), make_details(runs, runs, measured=True)
    assert row["acceptance_rate"] is row["waste_rate"] is detail["mean_drafted"] is None
    assert row["mean_k"] == 2.0 and detail["acceptance_by_position"] == []
    assert detail["acceptance_rate_mean_of_requests"] is None


def test_by_category_adds_up() -> None:
    backend = FakeBackend(alpha={"a": 0.9, "b": 0.1})
    result = evaluate(backend, fake_requests(8), fixed(2, 5), seed=0).to_json()
    assert set(result["by_category"]) == {"a", "b"} and result["meta"]["categories"] == {"a": 4, "b": 4}
    for i, row in enumerate(result["rows"]):
        parts = [rows[i] for rows in result["by_category"].values()]
        for key in ("tokens", "rounds", "seconds"):
            assert sum(p[key] for p in parts) == pytest.approx(row[key])
    assert result["by_category"]["a"][1]["speedup"] > result["by_category"]["b"][1]["speedup"]
