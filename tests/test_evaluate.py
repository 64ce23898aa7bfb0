"""The paired comparison on a backend whose numbers are known by hand."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeBackend, FakeClock, FixedPolicy, fake_requests

import assc.run
from assc.core import ROLLBACK, Action, Backend, Observation, Policy, Request, RoundRecord
from assc.errors import AsscError, RequestError, SpecError
from assc.evaluate import evaluate
from assc.metrics import DEFINITIONS
from assc.registry import make_policy
from assc.results import EvaluationInterrupted, RequestResult
from assc.run import run_request
from assc.tables import print_definitions, print_evaluation, to_markdown


class Script(FixedPolicy):
    """Plays given K values in turn, then rolls back."""

    def __init__(self, ks: Sequence[int]) -> None:
        super().__init__(0, "script")
        self.ks = ks

    def act(self, observation: Observation) -> Action:
        index = len(observation.past)
        return Action("ngram", self.ks[index]) if index < len(self.ks) and self.ks[index] else ROLLBACK


class Learner(FixedPolicy):
    """Drafts one token more with every round it has ever seen."""

    def act(self, observation: Observation) -> Action:
        return self._table.nearest(None, min(16, self.seen))


def fixed(*ks: int) -> list[tuple[str, FixedPolicy]]:
    return [(f"static:{k}", FixedPolicy(k)) for k in ks]


def test_the_fake_keeps_the_contracts() -> None:
    assert isinstance(FakeBackend(), Backend) and isinstance(FixedPolicy(2), Policy)
    texts = {run_request(FakeBackend(), fake_requests(1)[0], FixedPolicy(k)).tokens for k in (0, 1, 5, 16)}
    assert len(texts) == 1


# -- pairing and time ------------------------------------------------------------------------------------------------


def test_policies_are_interleaved_within_each_request_in_a_seeded_order() -> None:
    backend, results = FakeBackend(), list[RequestResult]()
    requests = fake_requests(12)
    evaluate(backend, requests, fixed(1, 2, 3), seed=5, warmup=2, repeats=2, on_request=results.append)
    # 3 policies and the baseline: each request is played four times in a row
    expected = ["r0"] * 4 + ["r1"] * 4 + 2 * [f"r{i}" for i in range(12) for _ in range(4)]
    assert backend.resets == expected
    orders = [r.order for r in results]
    assert len(orders) == 24 and all(sorted(o) == ["ar", "static:1", "static:2", "static:3"] for o in orders)
    assert len(set(orders)) > 5 and orders[:12] != orders[12:]
    again = list[RequestResult]()
    evaluate(FakeBackend(), requests, fixed(1, 2, 3), seed=5, warmup=0, repeats=2, on_request=again.append)
    assert [r.order for r in again] == orders


def test_e08_warm_up_is_excluded() -> None:
    """E08: the first request ever played costs 5 s more; with a warm-up that is in no number."""
    requests = fake_requests(4)
    cold = evaluate(FakeBackend(cold_seconds=5.0), requests, fixed(2), seed=0, warmup=0)
    warm = evaluate(FakeBackend(cold_seconds=5.0), requests, fixed(2), seed=0, warmup=1)
    never = evaluate(FakeBackend(), requests, fixed(2), seed=0, warmup=0)
    assert warm.rows() == never.rows()
    spent = sum(row["seconds"] for row in (cold.rows()[0], cold.baseline_row()))
    usual = sum(row["seconds"] for row in (warm.rows()[0], warm.baseline_row()))
    assert spent == pytest.approx(usual + 5.0)


def test_e06_e08_phases_add_up_to_the_seconds_on_an_injected_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """E06, E08: draft, verify and policy times are those that the clock shows, and nothing is missing."""
    clock = FakeClock()

    class Thinker(FixedPolicy):
        def act(self, observation: Observation) -> Action:
            clock.advance(0.003)
            return super().act(observation)

        def update(self, record: RoundRecord) -> None:
            clock.advance(0.001)

    monkeypatch.setattr(assc.run, "perf_counter", clock)
    backend = FakeBackend(alpha=1.0, c=0.25, step_seconds=0.04, clock=clock, charge_policy=True)
    backend.time_source = "measured"
    requests = fake_requests(3, max_new_tokens=30)
    evaluation = evaluate(backend, requests, [("thinker", Thinker(4))], seed=0, clock=clock)
    row, detail = evaluation.rows()[0], evaluation.details()[0]
    assert row["rounds"] == 18
    assert detail["draft_seconds"] == pytest.approx(18 * 4 * 0.25 * 0.04)
    assert detail["verify_seconds"] == pytest.approx(18 * 0.04)
    # the update after the last round of a request delays no round of it
    assert detail["policy_seconds"] == pytest.approx(18 * 0.003 + 15 * 0.001)
    phases = sum(detail[f"{p}_seconds"] for p in ("draft", "verify", "policy", "other"))
    assert phases == pytest.approx(row["seconds"]) and detail["phase_gap"] < 0.05
    assert detail["wall_seconds"] == pytest.approx(row["seconds"] + 3 * 0.001)
    assert abs(detail["unexplained_share"]) < 0.05
    assert row["policy_time_share"] == pytest.approx(detail["policy_seconds"] / row["seconds"])


def test_e06_phases_that_do_not_add_up_are_reported() -> None:
    """E06: a backend that loses 10 % of its time between the phases is found out."""

    class Leaky(FakeBackend):
        def step(self, action: Action, **rest: Any) -> RoundRecord:
            honest = super().step(action, **rest)
            object.__setattr__(honest, "verify_seconds", honest.verify_seconds - 0.1 * honest.seconds)
            return honest

    evaluation = evaluate(Leaky(), fake_requests(2), fixed(2), seed=0)
    assert evaluation.details()[0]["phase_gap"] == pytest.approx(0.1)
    out = io.StringIO()
    print_evaluation(evaluation, file=out)
    assert "static:2: the phase times miss the total by 10.0 %" in out.getvalue()


def test_e06_spread_over_repeats_is_shown() -> None:
    """E06: three repeats of noisy measurements give three speed-ups, and the pooled one lies between them."""
    evaluation = evaluate(FakeBackend(noise=0.2), fake_requests(4), fixed(4), seed=0, repeats=3)
    spread = evaluation.details()[0]["speedup_by_repeat"]
    assert len(set(spread)) == 3 and min(spread) < evaluation.rows()[0]["speedup"] < max(spread)
    assert evaluation.rows()[0]["tokens"] == 3 * 4 * 48


def test_a_against_a_covers_one_through_the_whole_path() -> None:
    """Two objects of one spec. Coverage is near 0.95; were it 0.90, fewer than 32 of 40 would have odds of 1 in 60."""
    hits = 0
    for seed in range(40):
        backend = FakeBackend(noise=0.1, noise_seed=seed)
        policies = [("ar", make_policy("ar")), ("ar", make_policy("ar"))]
        evaluation = evaluate(backend, fake_requests(12, max_new_tokens=16, seed=seed), policies, seed=seed, warmup=0)
        first, second = evaluation.rows()
        assert first["speedup"] == 1.0 and second["policy"] == "ar"
        low, high = second["speedup_ci95"]
        hits += low <= 1.0 <= high
    assert hits >= 32


def test_the_same_policy_twice_is_labelled_apart_and_gives_the_same_numbers() -> None:
    evaluation = evaluate(FakeBackend(), fake_requests(4), fixed(4, 4), seed=0)
    first, second = evaluation.rows()
    assert first == second and evaluation.labels == ("static:4", "static:4 #2")
    one = FixedPolicy(4)
    with pytest.raises(ValueError, match="listed twice"):
        evaluate(FakeBackend(), fake_requests(2), [("x", one), ("y", one)], seed=0)


def test_policies_learn_across_requests_but_not_from_warm_ups_or_earlier_repeats() -> None:
    learner = Learner(0, "learner")
    learner.seen = 2  # learned before it was handed over
    evaluation = evaluate(FakeBackend(alpha=0.8), fake_requests(5), [("learner", learner)], seed=1, repeats=2, warmup=3)
    first = [r.runs[0].episode for r in evaluation.results if r.repeat == 0]
    second = [r.runs[0].episode for r in evaluation.results if r.repeat == 1]
    assert [e.rounds for e in first] == [e.rounds for e in second]
    assert first[0].rounds[0].planned == 2 and first[-1].rounds[-2].planned > 8


# -- texts -----------------------------------------------------------------------------------------------------------


def test_same_text_is_false_with_the_place_when_texts_differ() -> None:
    result = evaluate(FakeBackend(text_depends_on_k=True, alpha=1.0), fake_requests(2), fixed(4), seed=0).to_json()
    assert result["same_text"] is False
    assert result["text_differences"][0] == {
        "policy": "static:4",
        "id": "r0",
        "repeat": 0,
        "position": 4,
        "length": 48,
        "baseline_length": 48,
    }


def test_same_text_is_false_for_a_text_that_is_only_cut_off() -> None:
    class Cut(FakeBackend):
        """Ends a request early whenever something was drafted."""

        def step(self, action: Action, **rest: Any) -> RoundRecord:
            honest = super().step(action, **rest)
            self._done = self._done or honest.drafted > 0
            return honest

    evaluation = evaluate(Cut(), fake_requests(2), [("script", Script([0, 0, 2]))], seed=0)
    assert evaluation.same_text is False
    difference = evaluation.text_differences()[0]
    assert difference["position"] == difference["length"] < difference["baseline_length"]


def test_same_text_is_null_for_rejection_sampling_only() -> None:
    requests = [Request((1,), 9, i, f"r{i}", sampling={"temperature": 1.0}) for i in range(2)]
    sampled = evaluate(FakeBackend(mode="rejection", text_depends_on_k=True), requests, fixed(4), seed=0)
    assert sampled.same_text is None and sampled.to_json()["text_differences"] == []
    assert evaluate(FakeBackend(mode="gumbel"), requests, fixed(4), seed=0).same_text is True
    assert evaluate(FakeBackend(mode="rejection"), fake_requests(2), fixed(4), seed=0).same_text is True


# -- meta, files, output ---------------------------------------------------------------------------------------------


def test_meta_names_what_the_numbers_depend_on() -> None:
    extra = {"workload": "mixed", "workload_hash": "abc"}
    meta = evaluate(FakeBackend(mode="gumbel"), fake_requests(3), fixed(2), seed=9, repeats=2, meta=extra).meta
    for key in ("pair", "device", "dtype", "threads", "mode", "c", "workload", "seed", "versions", "time_source"):
        assert meta[key] is not None
    assert (meta["backend"], meta["mode"], meta["seed"], meta["requests"]) == ("FakeBackend", "gumbel", 9, 3)
    assert meta["workload_hash"] == "abc" and meta["temperature"] == 0.0 and meta["max_new_tokens"] == 48
    assert {"python", "assc", "torch"} <= set(meta["versions"]) and meta["definitions"] == DEFINITIONS


def test_json_is_strict_atomic_and_can_be_recomputed_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluation = evaluate(FakeBackend(), fake_requests(1), fixed(4), seed=0)
    path = tmp_path / "deep" / "out.json"
    evaluation.write(path)
    result = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert result["rows"][0]["speedup_ci95"] == [None, None]
    parts = result["details"][0]["requests"]
    ours = sum(p["tokens"] for p in parts) / sum(p["seconds"] for p in parts)
    plain = sum(p["baseline_tokens"] for p in parts) / sum(p["baseline_seconds"] for p in parts)
    assert ours / plain == pytest.approx(result["rows"][0]["speedup"])
    before = path.read_text()
    monkeypatch.setattr("os.replace", lambda *paths: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        evaluation.write(path)
    assert path.read_text() == before and [p.name for p in path.parent.iterdir()] == ["out.json"]


def test_results_are_identical_under_a_seed() -> None:
    def once() -> dict[str, Any]:
        result = evaluate(FakeBackend(noise=0.1), fake_requests(6), fixed(2, 4), seed=3, repeats=2).to_json()
        for detail in result["details"]:
            del detail["wall_seconds"]  # the real clock
        return result

    assert once() == once()


def test_table_reads_well_in_a_pipe_and_as_markdown() -> None:
    evaluation = evaluate(
        FakeBackend(), fake_requests(4), [("ar", make_policy("ar")), ("[b]x|y", FixedPolicy(4))], seed=0
    )
    out = io.StringIO()
    print_evaluation(evaluation, file=out, categories=True)
    lines = out.getvalue().splitlines()
    row = next(line for line in lines if "[b]x|y" in line)
    assert all(len(line) <= 200 for line in lines) and f"{evaluation.rows()[1]['speedup']:.3f}x" in row
    assert "c = 0.100" in out.getvalue() and "same text: yes" in out.getvalue() and "\x1b" not in out.getvalue()
    plain = next(line for line in lines if line.strip().startswith("ar "))
    assert plain.count("n/a") == 2  # nothing was accepted or wasted, not 0 %
    markdown = to_markdown(evaluation).split("\n\n")[0].splitlines()
    assert len(markdown) == 4 and all(line.replace("\\|", "").count("|") == 13 for line in markdown)
    explained = io.StringIO()
    print_definitions(explained)
    assert "speedup_ci95: 95 % interval" in explained.getvalue()


# -- refusals and interruption ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"requests": []}, "no request"),
        ({"policies": []}, "no policy"),
        ({"repeats": 0}, "repeats is 0"),
        ({"warmup": -1}, "warmup is -1"),
    ],
)
def test_refusals(change: Mapping[str, Any], said: str) -> None:
    arguments: dict[str, Any] = {"requests": fake_requests(1), "policies": fixed(2), "seed": 0, **change}
    with pytest.raises(AsscError, match=said):
        evaluate(FakeBackend(), **arguments)


def test_what_cannot_be_played_is_refused_before_any_round() -> None:
    backend = FakeBackend()
    with pytest.raises(RequestError, match=r"request 'bad'.*at least 1 token"):
        evaluate(backend, [*fake_requests(3), Request((1,), 0, id="bad")], fixed(2), seed=0)
    with pytest.raises(SpecError, match="K_max"):
        evaluate(backend, fake_requests(3), [("static:17", make_policy("static:17"))], seed=0)
    assert backend.resets == []


def test_ctrl_c_keeps_the_finished_requests() -> None:
    def stop(request: Request, action: Action) -> None:
        if request.id == "r3":
            raise KeyboardInterrupt

    policies = fixed(2, 4)
    with pytest.raises(KeyboardInterrupt) as caught:
        evaluate(FakeBackend(on_step=stop), fake_requests(8), policies, seed=0)
    assert isinstance(caught.value, EvaluationInterrupted)
    evaluation = caught.value.evaluation
    result = evaluation.to_json()
    assert result["complete"] is False and [r["id"] for r in result["details"][0]["requests"]] == ["r0", "r1", "r2"]
    assert {row["tokens"] for row in result["rows"]} == {3 * 48}
    complete = evaluate(FakeBackend(), fake_requests(3), fixed(2, 4), seed=0)
    assert evaluation.rows() == complete.rows()
    out = io.StringIO()
    print_evaluation(evaluation, file=out)
    assert "INCOMPLETE: 3 of 8" in out.getvalue()


def test_ctrl_c_before_the_first_request_still_gives_a_valid_result(tmp_path: Path) -> None:
    def stop(request: Request, action: Action) -> None:
        raise KeyboardInterrupt

    policies = [("ar", make_policy("ar")), *fixed(4)]
    with pytest.raises(EvaluationInterrupted) as caught:
        evaluate(FakeBackend(on_step=stop), fake_requests(2), policies, seed=0)
    caught.value.evaluation.write(tmp_path / "out.json")
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["same_text"] is None and all(row["speedup"] is None for row in result["rows"])
    print_evaluation(caught.value.evaluation, file=io.StringIO())


def test_callbacks_see_every_measured_run() -> None:
    seen: list[str] = []
    evaluate(FakeBackend(), fake_requests(3), fixed(1, 1), seed=0, on_episode=lambda label, episode: seen.append(label))
    assert {label: seen.count(label) for label in seen} == {"ar": 3, "static:1": 3, "static:1 #2": 3}


def test_a_meta_that_cannot_be_written_fails_before_the_first_round() -> None:
    backend = FakeBackend()
    with pytest.raises(TypeError, match="not JSON serializable"):
        evaluate(backend, fake_requests(2), fixed(2), seed=0, meta={"where": Path("x")})
    assert backend.resets == []
