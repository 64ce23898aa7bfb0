"""The cost model: recovered from rounds made with known coefficients, measured live, saved and refused when damaged."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_traces import COSTS, tiny_engine, tiny_requests

from assc.__main__ import main
from assc.calibrate import Measuring
from assc.core import ROLLBACK, Action, Mode, RoundRecord
from assc.cost_check import CheckRow, check_table, fit_and_check
from assc.cost_fit import Sample, fit_samples
from assc.costs import CostModel, DrafterCost
from assc.costs_io import CostFile, read_costs, write_costs
from assc.errors import RequestError, TraceError
from assc.live import LiveBackend
from assc.loading import build_engine
from assc.pairs import load_pair
from assc.roofline import PROFILES, describe, expected_speedup, profile_costs
from assc.trace_rules import kv_slots


def rounds_of(model: CostModel, noise: float) -> list[Sample]:
    """Rounds priced by a known model, with noise and a few outliers."""
    rng = np.random.default_rng(0)
    samples = []
    for i in range(240):
        slots, kind, k = (
            128 * int(rng.integers(1, 7)),
            ("model", "ngram", "probe", None)[i % 4],
            1 + int(rng.integers(16)),
        )
        drafted = k if kind else 0
        emitted = 1 + int(rng.integers(drafted + 1))
        record = RoundRecord(
            0, 0, Action(kind, k) if kind else ROLLBACK, drafted, emitted - 1, emitted, (1,) * emitted, 0.0
        )
        if kind == "model":
            record = replace(record, draft_steps=k, catch_up=int(rng.choice([0, 1, 4, 90])))
        draft = model.draft(kind, record.draft_steps, record.catch_up) if kind in ("model", "ngram") else 0.0
        record = model.price(record, slots, draft)
        factor = (1 + noise * rng.standard_normal()) * (8.0 if i % 60 == 7 else 1.0)
        record = replace(record, verify_seconds=record.verify_seconds * factor, draft_seconds=draft * factor)
        samples.append(Sample(record, slots))
    return samples


def test_the_fit_recovers_known_coefficients_in_spite_of_outliers() -> None:
    found = fit_samples(rounds_of(COSTS, noise=0.005), ["model", "ngram"])
    model = found.model
    for drafted, slots, emitted in ((0, 128, 1), (16, 128, 1), (16, 768, 17), (4, 384, 3)):
        assert model.verify(drafted, slots, emitted) == pytest.approx(COSTS.verify(drafted, slots, emitted), rel=0.01)
    for steps, catch_up in ((1, 0), (16, 1), (1, 90)):
        assert model.draft("model", steps, catch_up) == pytest.approx(COSTS.draft("model", steps, catch_up), rel=0.02)
    assert model.draft("ngram", 0) == pytest.approx(COSTS.draft("ngram", 0), rel=0.01)
    assert max(found.residuals.values()) < 0.02


def test_catching_up_is_never_dearer_than_a_step() -> None:
    odd = replace(COSTS, drafters={**COSTS.drafters, "model": DrafterCost(0.001, per_catch_up=0.02)})
    cost = fit_samples(rounds_of(odd, noise=0.0), ["model", "ngram"]).model.drafters["model"]
    assert cost.per_catch_up <= cost.per_step + cost.per_call


def test_measured_rounds_of_the_tiny_pair_are_explained() -> None:
    engine = tiny_engine()
    before = list(engine.drafters)
    measuring = Measuring(engine, budgets=(40, 200))
    backend = LiveBackend(engine, time_source="measured")
    found, rows = fit_and_check(measuring, backend, tiny_requests(2, "greedy", tokens=24), rounds=2, repeats=2)
    assert list(engine.drafters) == before
    assert len({s.slots for s in measuring.samples}) == 2
    model = found.model
    assert model.target_fixed > 0 and set(model.drafters) == {"model", "ngram"} and model.kv_reference >= kv_slots(1)
    assert model.drafters["model"].per_step + model.drafters["model"].per_call > 0
    assert model.drafters["ngram"].per_step == 0 < model.drafters["ngram"].per_call
    assert [r.action for r in rows][:2] == ["rollback", "model:2"] and len(rows) == 7
    assert all(r.measured > 0 and r.modelled > 0 and r.measured_ratio > 0 for r in rows)
    assert rows[0].measured_ratio == rows[0].modelled_ratio == 1.0 and rows[0].ratio_spread == 0.0


def test_a_check_passes_within_five_per_cent_or_the_spread() -> None:
    assert CheckRow("a", 1.0, 1.04, 0.0).passed and not CheckRow("a", 1.0, 1.06, 0.0).passed
    assert CheckRow("a", 1.0, 0.93, 0.08).passed
    assert CheckRow("a", 1.0, 1.2, 0.0, 1.30, 1.35).ratio_passed, "a machine that is slower throughout"
    assert not CheckRow("a", 1.0, 1.0, 0.0, 1.30, 1.40).ratio_passed
    table = check_table([CheckRow("a", 1.0, 1.2, 0.0, 1.3, 1.3)])
    assert "FAIL" in table and "seconds 0 of 1, speed-ups 1 of 1" in table


def test_a_target_that_is_no_line_gets_a_curve_and_a_line_does_not() -> None:
    """Widths 1..17, the cost of every other one moved by 5 to 10 %: the line alone misses them."""
    bumps = tuple((w, 0.0015 * (w % 3)) for w in range(1, 18))
    bent = fit_samples(rounds_of(replace(COSTS, target_curve=bumps), noise=0.003), ["model", "ngram"])
    assert bent.model.target_curve and bent.residuals["verify"] < 0.5 * bent.residuals["verify, a line instead"]
    for width in range(2, 18):
        for slots in (128, 768):
            true = replace(COSTS, target_curve=bumps).verify(width - 1, slots, 1)
            assert bent.model.verify(width - 1, slots, 1) == pytest.approx(true, rel=0.01)
    assert fit_samples(rounds_of(COSTS, noise=0.003), ["model", "ngram"]).model.target_curve == ()


def test_sampled_modes_are_calibrated_in_their_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, float]] = []

    def calibrate(engine: Any, *, mode: str, temperature: float) -> CostModel:
        seen.append((mode, temperature))
        return COSTS

    monkeypatch.setattr("assc.calibrate.calibrate", calibrate)
    pair = load_pair("tiny")
    for mode in ("greedy", "gumbel", "rejection"):
        LiveBackend.from_pair(pair, mode=mode)  # type: ignore[arg-type]
    LiveBackend.from_pair(pair, mode="gumbel", temperature=0.3)
    assert seen == [("greedy", 0.0), ("gumbel", 1.0), ("rejection", 1.0), ("gumbel", 0.3)]


@pytest.mark.parametrize("mode", ["gumbel", "rejection"])
def test_every_mode_can_be_measured(mode: Mode) -> None:
    measuring = Measuring(tiny_engine(), mode=mode, temperature=0.7)
    measuring.measure()
    assert measuring.fit().model.target_fixed > 0 and len(measuring.samples) > 10


def test_bringing_a_draft_back_is_measured_where_drafts_are_unloaded() -> None:
    engine = build_engine(load_pair("tiny"), unload_after=1)
    measuring = Measuring(engine)
    measuring.measure()
    costs = measuring.fit().model.drafters
    assert costs["model"].per_load > 0 == costs["ngram"].per_load
    assert all(m.loaded for m in engine.pool.memory())


def test_files_keep_everything_and_damage_is_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    file = CostFile(COSTS, "tiny", "cpu", "float64", 1, "2026-01-01", {"verify": 0.01})
    write_costs(file, path)
    assert read_costs(path) == file
    bare = tmp_path / "bare.json"
    bare.write_text(json.dumps(COSTS.to_json()))
    assert read_costs(bare).model == COSTS
    text = path.read_text()
    data: dict[str, Any] = json.loads(text)
    for broken in (
        text[: len(text) // 2],
        "[]",
        json.dumps({**data, "schema": 9}),
        json.dumps({**data, "odd": 1}),
        json.dumps({k: v for k, v in data.items() if k != "model"}),
        json.dumps({**data, "model": {**data["model"], "target_fixed": -1}}),
    ):
        path.write_text(broken)
        with pytest.raises(TraceError):
            read_costs(path)
    with pytest.raises(TraceError, match="no cost model at"):
        read_costs(tmp_path / "none.json")


def test_the_command_fits_saves_and_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tiny.json"
    words = ["calibrate", "--pair", "tiny", "--device", "cpu", "--rounds", "1", "--budgets", "40", "--out", str(path)]
    assert main(words) == 0
    assert "c = " in capsys.readouterr().out and read_costs(path).pair == "tiny"
    refused = (["--rounds", "0"], ["--temperature", "1"], ["--budgets", "1"], ["--k-max", "101"], ["--chunks", "0"])
    for more in refused:
        assert main([*words, *more]) == 2


def test_roofline_profiles_are_plausible_and_labelled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in PROFILES:
        costs = profile_costs(name)
        assert costs.label.startswith("modelled") and 0 < costs.cost_ratio("model") < 1
        assert costs.verify(16, 1024) < 1.2 * costs.verify(0, 1024), "at batch 1 verification is nearly free"
        assert profile_costs(name, batch=256).verify(16, 1024) > 1.5 * profile_costs(name, batch=256).verify(0, 1024)
    big = profile_costs("67b-1.5b-8xh800")
    assert 5e-3 < big.verify(0, 1024) < 20e-3, "134 GB over 8 x 3.35 TB/s at 70 %, launches and all-reduces"
    assert "c = " in describe(big) and expected_speedup(big, "ngram", 5, 0.8) > expected_speedup(big, "model", 5, 0.8)
    with pytest.raises(RequestError, match="unknown profile"):
        profile_costs("laptop")
    out = tmp_path / "r.json"
    assert (
        main(["roofline", "--target", "8e9", "--draft", "1e9", "--device", "h100", "--count", "1", "--out", str(out)])
        == 0
    )
    assert read_costs(out).time_source == "modelled"
    assert main(["roofline", "--device", "abacus"]) == 2
    assert main(["roofline", "--dtype", "int3"]) == 2
    capsys.readouterr()


def test_a_target_step_is_never_free() -> None:
    """Seconds in proportion to what was committed: all of them could be the committing, and c infinite."""
    samples = []
    for i in range(40):
        drafted = (0, 1, 2, 4)[i % 4]
        accepted = min(drafted, i % 3)
        seconds = 0.01 * (accepted + 1)
        action = Action("model" if drafted else None, drafted)
        record = RoundRecord(
            i,
            i,
            action,
            drafted,
            accepted,
            accepted + 1,
            (),
            seconds + 0.001 * drafted,
            0.001 * drafted,
            seconds,
            draft_steps=drafted,
        )
        samples.append(Sample(record, 256))
    model = fit_samples(samples, ["model"]).model
    assert model.verify(0, 256) > 0.005 and 0 < model.cost_ratio("model") < 1
