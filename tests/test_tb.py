"""TensorBoard files read back by TensorBoard's own reader."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeBackend, FixedPolicy, fake_requests
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]
from tensorboard.plugin_util import markdown_to_safe_html  # type: ignore[import-untyped]
from tensorboard.plugins.custom_scalar import layout_pb2  # type: ignore[import-untyped]
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData  # type: ignore[import-untyped]
from test_eval_replay import markov_trace

import eval as eval_cli
from assc import evaluate as evaluate_module
from assc.core import Action, Request, RoundRecord, Totals
from assc.costs_io import CostFile, write_costs
from assc.errors import AsscError
from assc.evaluate import evaluate
from assc.markov import MARKOV_COSTS
from assc.registry import make_policy
from assc.results import Evaluation, EvaluationInterrupted
from assc.tb import Curve, directory_names, fresh_directory, scalars_of
from assc.tb_eval import EvaluationWriter, due
from assc.tb_layout import CHARTS, evaluation_layout
from assc.tb_text import MARKS, sample
from assc.trace_io import write_trace

NAMES = {
    "tokens_per_gpu_second",
    "speedup",
    "acceptance_rate",
    "waste_rate",
    "mean_k",
    "tokens_per_round",
    "rollback_rate",
    "draft_time_share",
    "policy_time_share",
}
ROW_KEYS = {"tokens_per_gpu_second": "tokens_per_second"}
"""scalar -> key of the result's row, where their names differ"""


def reader(directory: Path) -> Any:
    """Everything in a run directory, nothing left out."""
    limits = dict.fromkeys(("scalars", "histograms", "tensors", "images"), 0)
    found: Any = EventAccumulator(str(directory), size_guidance=limits)
    return found.Reload()


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """Tag -> (step, value) of everything in a run directory."""
    found = reader(directory)
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def text(directory: Path, tag: str) -> str:
    (event,) = reader(directory).Tensors(f"{tag}/text_summary")
    (found,) = event.tensor_proto.string_val
    return str(found.decode())


POLICIES = ("ar", "static:4", "static:4", "assc")


def logged(root: Path, requests: int = 5, repeats: int = 1) -> tuple[Path, Evaluation]:
    policies = [("ar", make_policy("ar")), ("static:4", FixedPolicy(4)), ("static:4", FixedPolicy(4))]
    policies.append(("assc", make_policy("assc")))
    with EvaluationWriter(root, POLICIES, samples=[1], settings={"seed": 0, "mode": "greedy"}) as writer:
        evaluation = evaluate(
            FakeBackend(noise=0.1), fake_requests(requests), policies, seed=0, repeats=repeats, on_request=writer.log
        )
        writer.finish(evaluation)
    return writer.directory, evaluation


@pytest.fixture(scope="module")
def seven(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Evaluation]:
    """Seven requests, for all the tests that only read."""
    return logged(tmp_path_factory.mktemp("curves"), requests=7)


Logged = tuple[Path, Evaluation]


def test_one_run_per_policy_with_the_same_tags_so_that_curves_overlay(seven: Logged) -> None:
    directory, evaluation = seven
    assert sorted(p.name for p in directory.iterdir()) == ["ar", "assc", "comparison", "static-4", "static-4-2"]
    curves = scalars(directory / "static-4")
    shown = {tag for tag in curves if not tag.startswith("health/")}
    groups = ("over_requests/", "over_tokens/", "request/")
    margins = {f"speedup_interval/{n}" for n in ("speedup", "low", "high")} | {
        f"vs_assc/{n}" for n in ("ratio", "low", "high")
    }
    assert shown == {group + name for group in groups for name in NAMES} | margins
    assert set(scalars(directory / "static-4-2")) == set(curves)
    plain = scalars(directory / "ar")
    assert shown - set(plain) == {group + n for group in groups for n in ("acceptance_rate", "waste_rate")}
    assert {value for _, value in plain["over_requests/speedup"]} == {1.0}
    for i, row in enumerate(evaluation.rows()):
        mine = scalars(directory / directory_names(POLICIES)[i])
        for name in NAMES:
            value = row[ROW_KEYS.get(name, name)]
            for group, step in (("over_requests/", 7), ("over_tokens/", row["tokens"])):
                last = mine.get(group + name, [(step, None)])[-1]  # cumulative: the last point is the row
                assert last == (step, value if value is None else pytest.approx(value, rel=1e-5)), (name, group)
        assert mine["speedup_interval/speedup"][-1] == (7, pytest.approx(row["speedup"], rel=1e-5))
        assert [step for step, _ in mine["speedup_interval/low"]] == [6, 7], (
            "intervals of a few prompts hide all others"
        )
        ends = [mine[f"speedup_interval/{end}"][-1][1] for end in ("low", "high")]
        assert ends == pytest.approx(row["speedup_ci95"], rel=1e-5), "not the interval of the result file"
    alone = evaluation.results[2].runs[1].totals
    assert curves["request/mean_k"][2][1] == pytest.approx(alone.mean_k)


def test_against_assc_is_the_ratio_of_tokens_per_second(seven: Logged) -> None:
    directory, evaluation = seven
    speeds = [row["tokens_per_second"] for row in evaluation.rows()]
    for name, speed in zip(directory_names(POLICIES), speeds, strict=True):
        curve = scalars(directory / name)
        (step, ratio), (_, low), (_, high) = (curve[f"vs_assc/{tag}"][-1] for tag in ("ratio", "low", "high"))
        assert step == 7 and ratio == pytest.approx(speed / speeds[-1], rel=1e-5) and low <= ratio <= high
    assert curve["vs_assc/low"][-1][1] == curve["vs_assc/high"][-1][1] == 1.0, "ASSC against itself"


def test_steps_are_monotone_over_repeats(tmp_path: Path) -> None:
    directory, _ = logged(tmp_path, requests=3, repeats=2)
    curves = scalars(directory / "static-4")
    for tag, points in curves.items():
        steps = [step for step, _ in points]
        assert steps == sorted(set(steps)), tag
        if tag.startswith(("over_requests/", "request/")):
            assert steps == [1, 2, 3, 4, 5, 6]
    assert [n for n in range(1, 20) if due(n)] == [1, 2, 3, 4, 6, 8, 12, 18]


def test_histograms_of_k_and_accepted_length_hold_every_round_once(seven: Logged) -> None:
    directory, evaluation = seven
    for i, name in enumerate(directory_names(POLICIES)):
        found = reader(directory / name)
        rounds = [r for result in evaluation.results for r in result.runs[i].episode.rounds]
        tags = {"rounds/k": [r.planned for r in rounds]}
        if name != "ar":
            tags["rounds/accepted_length"] = [r.accepted for r in rounds if r.drafted]
        assert set(found.Tags()["histograms"]) == set(tags)
        for tag, expected in tags.items():
            events = found.Histograms(tag)
            assert [e.step for e in events] == [1, 2, 3, 4, 6, 7], "written now and then, and at the end"
            assert sum(e.histogram_value.num for e in events) == len(expected)
            assert sum(e.histogram_value.sum for e in events) == sum(expected)
            for whole in set(expected):  # one bucket per whole number
                count = sum(
                    n
                    for e in events
                    for edge, n in zip(e.histogram_value.bucket_limit, e.histogram_value.bucket, strict=True)
                    if edge == whole + 0.5
                )
                assert count == expected.count(whole), (tag, whole)


def test_every_policy_is_a_row_of_the_table_of_settings(seven: Logged) -> None:
    directory, _ = seven
    for label, name in zip(("ar", "static:4", "static:4", "assc"), directory_names(POLICIES), strict=True):
        data = reader(directory / name).summary_metadata
        parts = {tag: HParamsPluginData.FromString(data[tag].plugin_data.content) for tag in data if "_hparams_" in tag}
        start = parts["_hparams_/session_start_info"].session_start_info.hparams
        assert start["policy"].string_value == label and start["mode"].string_value == "greedy"
        metrics = [m.name.tag for m in parts["_hparams_/experiment"].experiment.metric_infos]
        assert "over_requests/speedup" in metrics and "over_requests/mean_k" in metrics
        assert parts["_hparams_/session_end_info"].session_end_info.status == 1, "not marked as finished"


def test_custom_scalars_show_policy_against_assc(seven: Logged) -> None:
    directory, _ = seven
    (event,) = reader(directory / "comparison").Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
    first, *more = layout.category
    assert first.title == "policy vs ASSC" and [c.title for c in more] == ["over requests", "over committed tokens"]
    assert all(chart.HasField("margin") for chart in first.chart), "bands beside lines are shown last"
    tags = set(scalars(directory / "assc"))
    margins = [series for chart in first.chart for series in chart.margin.series]
    assert len(margins) == 2
    for series in margins:
        assert {series.value, series.lower, series.upper} <= tags
    for category, group in zip(more, ("over_requests", "over_tokens"), strict=True):
        wanted = {tag.strip("^$") for chart in category.chart for tag in chart.multiline.tag}
        assert wanted == {f"{group}/{name}" for name in CHARTS.values()}
        assert wanted - {f"{group}/target_entropy"} <= tags
    assert next(iter(evaluation_layout(False))) == "policy vs plain decoding"


def test_texts_tables_and_pictures(seven: Logged) -> None:
    directory, evaluation = seven
    request = evaluation.results[1].request
    assert [t for t in reader(directory / "assc").Tags()["tensors"] if t.startswith("text/")] == [
        f"text/{request.id} at temperature 0/text_summary"
    ]
    shown = text(directory / "assc", f"text/{request.id} at temperature 0")
    rounds = evaluation.results[1].runs[3].episode.rounds
    accepted = sum(r.accepted for r in rounds)
    body = shown.rpartition("\n\n")[2]
    assert body.count(MARKS["drafted"]) == accepted and f"{accepted} accepted" in shown
    assert all(f"{token} " in body for r in rounds for token in r.tokens)
    assert "| static:4 |" in text(directory / "comparison", "table")
    pictures = reader(directory / "comparison")
    names = ("ladder", "waste and speed", "time", "regret")
    assert set(pictures.Tags()["images"]) == {f"pictures/{name}" for name in names}
    (picture,) = pictures.Images("pictures/ladder")
    assert picture.encoded_image_string[:4] == b"\x89PNG" and picture.width > 500


def test_marks_survive_tensorboards_markdown() -> None:
    """Token texts are shown as they are: no heading, no emphasis, no tag comes out of them."""
    texts = {1: "# not *a* heading", 2: "<b>bold</b>", 3: "a_b_c | d", 4: "\n- no list"}
    action = Action("ngram", 2)
    rounds = [
        RoundRecord(0, 0, action, 2, 2, 3, (1, 2, 3), 1.0),
        RoundRecord(1, 3, action, 2, 0, 1, (4,), 1.0),
    ]
    html = markdown_to_safe_html(sample(rounds, texts.__getitem__))
    for tag in ("<h1", "<em", "<b>", "<li", "<table", "<code"):
        assert tag not in html, tag
    body = html.rpartition("<p>")[2]
    for mark, count in (("drafted", 2), ("bonus", 1), ("correction", 1), ("plain", 0)):
        assert body.count(MARKS[mark]) == count, mark  # type: ignore[index]
    assert "# not *a* heading" in body and "&lt;b&gt;bold&lt;/b&gt;" in body and "a_b_c | d" in body


def test_without_matplotlib_everything_else_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] == "matplotlib" or n.startswith("assc.report.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with EvaluationWriter(tmp_path, ["ar"]) as writer:
        evaluation = evaluate(
            FakeBackend(), fake_requests(2), [("ar", make_policy("ar"))], seed=0, on_request=writer.log
        )
        said = writer.finish(evaluation)
    assert said is not None and "assc[report]" in said
    assert "| ar |" in text(tmp_path / "comparison", "table")


def test_k02_a_used_directory_is_not_written_into_again(tmp_path: Path) -> None:
    """K02: a second run would start at step 1 in the first one's files and draw zig-zag curves."""
    first, _ = logged(tmp_path)
    second, _ = logged(tmp_path)
    assert [first, second] == [tmp_path, tmp_path / "run-2"]
    for directory in (first, second):
        assert len(list((directory / "static-4").iterdir())) == 1
        assert [step for step, _ in scalars(directory / "static-4")["over_requests/speedup"]] == [1, 2, 3, 4, 5]
    assert fresh_directory(tmp_path, ["static-4"]) == tmp_path / "run-3"
    assert fresh_directory(tmp_path, ["another"]) == tmp_path


def test_k02_steps_may_only_grow(tmp_path: Path) -> None:
    curve = Curve(tmp_path)
    curve.log({"x": 1.0}, 5)
    curve.log({"y": 1.0}, 2)  # every tag has an axis of its own
    with pytest.raises(ValueError, match="x at 5 after 5"):
        curve.log({"x": 2.0}, 5)
    curve.close()
    again = Curve(tmp_path, resumed_at=5)
    with pytest.raises(ValueError, match="z at 5 after 5"):
        again.log({"z": 2.0}, 5)
    again.close()


def test_k03_every_request_is_readable_at_once_and_after_ctrl_c(tmp_path: Path) -> None:
    """K03: short and interrupted runs must not leave an empty file."""
    sizes: list[int] = []

    def stop(request: Request, action: Action) -> None:
        if request.id in ("r1", "r2"):
            sizes.append(len(scalars(tmp_path / "static-4").get("over_requests/speedup", [])))
        if request.id == "r2":
            raise KeyboardInterrupt

    with pytest.raises(EvaluationInterrupted), EvaluationWriter(tmp_path, ["static:4"]) as writer:
        evaluate(
            FakeBackend(on_step=stop),
            fake_requests(6, max_new_tokens=4),
            [("static:4", FixedPolicy(4))],
            seed=0,
            on_request=writer.log,
        )
    assert sizes[0] == 1 and sizes[-1] == 2  # flushed while the writer was still open
    assert [step for step, _ in scalars(tmp_path / "static-4")["over_requests/speedup"]] == [1, 2]


def test_k03_a_signal_leaves_curves_that_equal_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """K03: `kill -INT` in the middle of eval.py; what TensorBoard shows is what the JSON says of the finished part."""
    write_trace(markov_trace(), tmp_path / "t.npz")
    write_costs(CostFile(MARKOV_COSTS), tmp_path / "c.json")
    play, played = evaluate_module.run_request, 0

    def killed(*words: Any) -> Any:
        nonlocal played
        played += 1
        if played == 8:  # in the third request of three policies
            os.kill(os.getpid(), signal.SIGINT)
        return play(*words)

    monkeypatch.setattr(evaluate_module, "run_request", killed)
    out, curves = tmp_path / "out.json", tmp_path / "tb"
    words = ["--backend", "replay", "--traces", str(tmp_path / "t.npz"), "--cost", str(tmp_path / "c.json")]
    words += ["--policies", "ar", "assc", "accept_model", "--json", str(out), "--tensorboard", str(curves)]
    assert eval_cli.main(words) == 130
    data = json.loads(out.read_text())
    assert data["complete"] is False and len(data["details"][0]["requests"]) == 2
    for row in data["rows"]:
        mine = scalars(curves / row["policy"])
        assert mine["over_requests/speedup"][-1] == (2, pytest.approx(row["speedup"], rel=1e-5))
        assert mine["over_tokens/mean_k"][-1] == (row["tokens"], pytest.approx(row["mean_k"], rel=1e-5))
        assert mine["speedup_interval/low"][-1] == (2, pytest.approx(row["speedup_ci95"][0], rel=1e-5))
        assert mine["over_requests/target_entropy"][-1][1] > 0  # of the trace
    assert {"table/text_summary", "custom_scalars__config__"} <= set(reader(curves / "comparison").Tags()["tensors"])
    assert "pictures/reliability" in reader(curves / "comparison").Tags()["images"]


def test_b13_statistics_hold_the_last_round_of_each_request(seven: Logged) -> None:
    """B13: what is logged comes from the rounds themselves, so the final round of an episode is in it."""
    directory, evaluation = seven
    totals = [r.runs[1].totals for r in evaluation.results]
    assert sum(t.tokens for t in totals) == sum(len(r.runs[1].episode.tokens) for r in evaluation.results)
    last = evaluation.results[-1].runs[1].episode
    assert last.finish == "length" and last.rounds[-1].seconds > 0
    value = scalars(directory / "static-4")["request/tokens_per_gpu_second"][-1][1]
    assert value == pytest.approx(len(last.tokens) / last.seconds, rel=1e-5)


def test_scalars_leave_out_what_is_undefined() -> None:
    assert scalars_of(Totals()) == {}
    plain = Totals(rounds=4, tokens=4, rollbacks=4, seconds=2.0, verify_seconds=2.0)
    assert scalars_of(plain) == {
        "tokens_per_gpu_second": 2.0,
        "mean_k": 0.0,
        "tokens_per_round": 1.0,
        "rollback_rate": 1.0,
        "draft_time_share": 0.0,
        "policy_time_share": 0.0,
    }
    assert scalars_of(plain, plain)["speedup"] == 1.0 and "speedup" not in scalars_of(plain, Totals())


def test_directory_names_are_safe_and_distinct() -> None:
    names = directory_names(["a:1", "a:1", "../../etc/x", "a/1", "assc:variant=diagram,k_max=6", "..."])
    assert names == ("a-1", "a-1-2", "etc-x", "a-1-3", "assc-variant=diagram,k_max=6", "policy")


def test_an_unwritable_place_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(AsscError, match="cannot write TensorBoard files"):
        EvaluationWriter(tmp_path / "file", ["ar"])
