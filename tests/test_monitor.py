"""The health monitor: bands, states, reasons and counts, and that all of it reaches the files."""

from __future__ import annotations

import json
import math
import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeBackend, fake_requests
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import eval as eval_script
from assc.core import ROLLBACK, Action, RoundRecord
from assc.costs_io import CostFile, write_costs
from assc.evaluate import evaluate
from assc.markov import MARKOV_COSTS, MarkovSource, markov_requests
from assc.monitor import MOST_NOTES, OTHERS, Change, HealthMonitor, judge
from assc.registry import make_policy
from assc.replay import ReplayBackend
from assc.run import iter_rounds, run_request
from assc.shipped import shipped_costs, shipped_trace
from assc.tb_eval import EvaluationWriter
from assc.trace_io import write_trace
from assc.trace_rules import balanced_rows


def record(drafted: int = 4, accepted: int = 3, seconds: float = 0.1, draft: float = 0.02, **more: Any) -> RoundRecord:
    action = Action("model", drafted) if drafted else ROLLBACK
    return RoundRecord(0, 0, action, drafted, accepted, accepted + 1, (), seconds, draft_seconds=draft, **more)


def fed(records: list[RoundRecord], **options: Any) -> HealthMonitor:
    monitor = HealthMonitor(options.pop("plain_step", 0.05), **options)
    for one in records:
        monitor.add(one)
    return monitor


def test_bands_are_those_of_the_seeds_with_both_ends_inside() -> None:
    edges = {"acceptance": (0.60, 0.85), "draft_share": (0, 0.40), "speed_up": (1.5, 2.5), "fallback_share": (0, 0.05)}
    for name, (low, high) in edges.items():
        assert [judge({name: v})[name] for v in (low, high, high + 1e-9)] == ["within", "within", "above"]
    assert judge({"acceptance": 0.599, "speed_up": 1.49, "draft_share": None}) == {
        "acceptance": "below",
        "speed_up": "below",
        "draft_share": "unknown",
    }


def test_figures_by_hand_and_the_healthy_state() -> None:
    total = fed([record()] * 32).report()["total"]
    # 3 of 4; 0.02 of 0.1 s; 4 tokens * 0.05 s of plain decoding in 0.1 s
    assert total["figures"] == pytest.approx(
        {"acceptance": 0.75, "draft_share": 0.2, "speed_up": 2.0, "fallback_share": 0.0}
    )
    assert total["state"] == "healthy" and total["reasons"] == total["advice"] == []


@pytest.mark.parametrize(
    ("one", "state", "reason"),
    [
        ({"accepted": 2, "seconds": 0.08}, "degraded", "acceptance 0.50 below 0.60"),
        ({"draft": 0.05}, "degraded", "share of drafting in the time 0.50 above 0.40"),
        ({"seconds": 0.15}, "degraded", "speed-up over plain decoding 1.33 below 1.50"),
        ({"seconds": 0.25}, "failing", "speed-up over plain decoding 0.80 below 1.50"),
    ],
)
def test_each_fault_has_its_state_and_reason(one: dict[str, Any], state: str, reason: str) -> None:
    monitor = fed([record(**one)] * 32)
    assert (monitor.state, monitor.overall) == (state, state)
    assert monitor.report()["total"]["reasons"] == [reason] and reason in monitor.line("x")


def test_more_than_the_band_is_no_fault_where_it_is_good_news() -> None:
    monitor = fed([record(accepted=4, seconds=0.08)] * 32)  # acceptance 1, speed-up 3.1
    total = monitor.report()["total"]
    assert total["state"] == "healthy" and total["bands"]["speed_up"] == total["bands"]["acceptance"] == "above"
    assert total["advice"] == ["acceptance 1.00 above 0.85: K could be larger"]


def test_nothing_is_judged_too_early_and_plain_decoding_has_no_acceptance() -> None:
    assert fed([record(accepted=0)] * 31).state == "unknown" != fed([record(accepted=0)] * 32).state
    plain = fed([record(drafted=0, accepted=0, seconds=0.05, draft=0.0)] * 40)
    figures = plain.report()["total"]["figures"]
    assert figures["acceptance"] is None and figures["speed_up"] == pytest.approx(1.0)
    assert plain.report()["total"]["fallback_rounds"] == 0, "a rollback without a reason is a choice, not a fallback"


def test_without_a_plain_step_it_is_learned_from_rollbacks() -> None:
    assert fed([record()] * 40, plain_step=None).report()["total"]["figures"]["speed_up"] is None
    plain = record(drafted=0, accepted=0, seconds=0.05, draft=0.0)
    found = fed([plain, *[record()] * 39], plain_step=None).report()["total"]["figures"]["speed_up"]
    assert found == pytest.approx((0.05 + 39 * 0.2) / (0.05 + 39 * 0.1))


def test_unusable_seconds_change_no_time() -> None:
    strange = [record(seconds=s) for s in (math.nan, math.inf, -1.0, 0.0)]
    total = fed([record()] * 32 + strange).report()["total"]
    assert total["rounds"] == 36 and total["figures"]["speed_up"] == pytest.approx(2.0)
    json.dumps(total, allow_nan=False)


def test_window_triggers_and_recovery() -> None:
    seen: list[Change] = []
    monitor = HealthMonitor(0.05, window=32, least=8, on_change=seen.append)
    for i in range(200):
        monitor.add(record() if i < 50 or i >= 120 else record(accepted=0, seconds=0.07))
    assert [(c.name, c.fault) for c in seen if c.name == "acceptance"] == [("acceptance", True), ("acceptance", False)]
    assert monitor.triggers["acceptance"] == 1 and monitor.triggers["draft_share"] == 0
    left = next(c for c in seen if c.name == "acceptance")
    assert 50 < left.round <= 60 and left.value < 0.60
    assert monitor.state == "healthy" and monitor.overall == "degraded", "the window forgot, the total did not"
    assert monitor.report()["window"]["figures"]["acceptance"] == pytest.approx(0.75)


def test_a_figure_at_the_edge_does_not_flicker() -> None:
    monitor = HealthMonitor(0.05, window=10, least=10)
    for i in range(400):  # the window's acceptance walks 0.5975, 0.60, 0.6025, …
        monitor.add(record(drafted=40, accepted=24 + i % 3 - 1, seconds=0.8, draft=0.0))
    assert monitor.triggers["acceptance"] <= 1


def test_reasons_are_counted_and_kept_few() -> None:
    rollback = {"drafted": 0, "accepted": 0, "seconds": 0.05, "draft": 0.0}
    rounds = [record(**rollback, reasons=("guard: a",))] * 3 + [record()] + [record(**rollback, reasons=("guard: a",))]
    report = fed(rounds).report()
    assert report["notes"] == {"guard: a": {"times": 2, "rounds": 4}} and report["total"]["fallback_rounds"] == 4
    many = fed([record(reasons=(str(i),)) for i in range(100)])
    assert len(many.notes) == MOST_NOTES + 1 and many.notes[OTHERS]["rounds"] == 100 - MOST_NOTES


def test_memory_peak_and_its_limit() -> None:
    used = iter([5, 9, 7])
    monitor = HealthMonitor(0.05, window=4, least=1, memory=lambda: next(used), memory_limit=8)
    for _ in range(3):
        monitor.add(record())
    assert monitor.memory_peak == 9 and monitor.triggers["memory"] == 1
    assert monitor.state == "degraded" and "memory peak 9 bytes above 8" in monitor.line("x")


def test_bad_options_are_refused() -> None:
    for options in ({"window": 0}, {"least": 300}, {"margin": -1.0}, {"bands": {}}, {"plain_step": math.nan}):
        with pytest.raises(ValueError, match=r"least|plain_step"):
            HealthMonitor(**options)


def test_in_ones_own_loop_it_agrees_with_the_totals() -> None:
    backend, policy = FakeBackend(drafters=("model",), alpha=0.7, c=0.1), make_policy("static:4")
    monitor, rounds = HealthMonitor(backend.plain_step_seconds), []
    for request in fake_requests(4):
        for one in iter_rounds(backend, request, policy):
            monitor.add(one)
            rounds.append(one)
    total = monitor.report()["total"]
    assert total["rounds"] == len(rounds)
    assert total["figures"]["acceptance"] == sum(r.accepted for r in rounds) / sum(r.drafted for r in rounds)


def test_a_draft_that_goes_bad_is_seen_and_guard_tells_why(tmp_path: Path) -> None:
    backend = FakeBackend(drafters=("model",), alpha=0.0, c=0.3)
    specs = ("ar", "static:4", "guard(static:4)")
    with EvaluationWriter(tmp_path, specs) as writer:
        result = evaluate(
            backend,
            fake_requests(6),
            [(s, make_policy(s)) for s in specs],
            seed=0,
            progress=False,
            on_request=writer.log,
        )
    health = {h["label"]: h for h in json.loads(json.dumps(result.to_json(), allow_nan=False))["health"]}
    assert health["static:4"]["total"]["state"] == "failing" and health["static:4"]["policy_report"] is None
    guarded = health["guard(static:4)"]
    own = guarded["policy_report"]["counts"]
    assert own["local"] + own["global_speed"] >= 1
    assert guarded["total"]["fallback_rounds"] == sum(
        r.rollback and bool(r.reasons) for one in result.results for r in one.runs[2].episode.rounds
    )
    assert any(n.startswith("guard: ") for n in guarded["notes"])
    assert guarded["total"]["figures"]["speed_up"] > health["static:4"]["total"]["figures"]["speed_up"]
    curve = EventAccumulator(str(writer.directory / "static-4"))
    curve.Reload()
    states = [e.value for e in curve.Scalars("health/state")]
    assert len(states) == 6 and states[-1] == 3.0 and "health/speed_up" in curve.Tags()["scalars"]


@pytest.fixture
def trace_words(tmp_path: Path) -> list[str]:
    trace, costs = tmp_path / "trace.npz", tmp_path / "costs.json"
    write_trace(MarkovSource().trace(markov_requests(9, max_new_tokens=32)), trace)
    write_costs(CostFile(MARKOV_COSTS), costs)
    return ["--backend", "replay", "--traces", str(trace), "--cost", str(costs), "--policies", "ar", "static:4"]


def test_eval_prints_and_writes_it(trace_words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("prometheus_client")
    out, text = tmp_path / "out.json", tmp_path / "assc.prom"
    assert eval_script.main([*trace_words, "--health", "--json", str(out), "--prometheus", str(text)]) == 0
    assert "health of static:4: " in capsys.readouterr().out
    total = json.loads(out.read_text())["health"][1]["total"]
    lines = text.read_text().splitlines()
    rounds = next(x for x in lines if x.startswith('assc_rounds_total{policy="static:4"}'))
    assert float(rounds.split()[-1]) == total["rounds"] > 0
    assert 'assc_state{policy="ar"} ' in text.read_text() and "assc_triggers_total" in text.read_text()


def test_prometheus_that_is_absent_or_unwritable_is_one_sentence(
    trace_words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert eval_script.main([*trace_words, "--prometheus", str(tmp_path)]) == 2
    monkeypatch.setattr("assc.prometheus.find_spec", lambda name: None)
    assert eval_script.main([*trace_words, "--prometheus", str(tmp_path / "a.prom")]) == 2
    assert "pip install 'assc[prometheus]'" in capsys.readouterr().err


def test_prometheus_endpoint() -> None:
    pytest.importorskip("prometheus_client")
    from assc.prometheus import serve_prometheus

    monitor = fed([record()] * 40)
    server, thread = serve_prometheus({"x": monitor}, port=0)
    try:
        address = f"http://127.0.0.1:{server.server_port}/metrics"
        with urllib.request.urlopen(address, timeout=10) as answer:
            text = answer.read().decode()
        assert 'assc_acceptance{policy="x"} 0.75' in text and 'assc_rounds_total{policy="x"} 40.0' in text
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def test_the_loop_of_the_docs_runs(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("prometheus_client")
    page = (Path(__file__).parent.parent / "docs" / "monitor.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", page, re.S)
    backend, (request,) = FakeBackend(drafters=("model",), alpha=0.7, c=0.1), fake_requests(1)
    names = {"backend": backend, "request": request, "policy": make_policy("assc"), "iter_rounds": iter_rounds}
    exec(compile(block.replace("port=9464", "port=0"), "monitor.md", "exec"), names)
    assert capsys.readouterr().out.startswith("assc: ")


def test_guard_does_not_slow_a_healthy_policy_on_the_packaged_trace() -> None:
    """The fault this guards against: `guard(cascade)` was 21 % slower than `cascade`. Deterministic, no odds."""
    trace = shipped_trace()
    backend = ReplayBackend(trace, shipped_costs())
    requests = trace.requests(balanced_rows(trace, trace.where(split="held-out"), 48, 0))
    seconds = {}
    for spec in ("cascade", "guard(cascade)"):
        policy = make_policy(spec)
        seconds[spec] = sum(run_request(backend, request, policy).seconds for request in requests)
    assert seconds["guard(cascade)"] <= 1.01 * seconds["cascade"]
