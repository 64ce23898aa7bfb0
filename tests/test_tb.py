"""TensorBoard files read back by TensorBoard's own reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fakes import FakeBackend, FixedPolicy, fake_requests
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

from assc.core import Action, Request, Totals
from assc.errors import AsscError
from assc.evaluate import evaluate
from assc.registry import make_policy
from assc.results import Evaluation, EvaluationInterrupted
from assc.tb import Curve, directory_names, fresh_directory, scalars_of
from assc.tb_eval import EvaluationWriter

TAGS = {
    "tokens_per_gpu_second",
    "speedup",
    "acceptance_rate",
    "waste_rate",
    "mean_k",
    "rollback_rate",
    "draft_time_share",
    "policy_time_share",
}


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """Tag -> (step, value) of everything in a run directory."""
    reader: Any = EventAccumulator(str(directory))
    reader.Reload()
    return {tag: [(e.step, e.value) for e in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def logged(root: Path, requests: int = 5, repeats: int = 1) -> tuple[Path, Evaluation]:
    policies = [("ar", make_policy("ar")), ("static:4", FixedPolicy(4)), ("static:4", FixedPolicy(4))]
    with EvaluationWriter(root, ["ar", "static:4", "static:4"]) as writer:
        evaluation = evaluate(
            FakeBackend(noise=0.1), fake_requests(requests), policies, seed=0, repeats=repeats, on_request=writer.log
        )
    return writer.directory, evaluation


def test_one_run_per_policy_with_the_same_tags_so_that_curves_overlay(tmp_path: Path) -> None:
    directory, evaluation = logged(tmp_path)
    assert sorted(p.name for p in directory.iterdir()) == ["ar", "static-4", "static-4-2"]
    curves = scalars(directory / "static-4")
    assert set(curves) == TAGS | {"request/" + tag for tag in TAGS}
    assert set(scalars(directory / "static-4-2")) == set(curves)
    plain = scalars(directory / "ar")
    assert set(curves) - set(plain) == {
        f"{p}{tag}" for p in ("", "request/") for tag in ("acceptance_rate", "waste_rate")
    }
    assert {value for _, value in plain["speedup"]} == {1.0}
    row = evaluation.rows()[1]
    for tag, key in (("tokens_per_gpu_second", "tokens_per_second"), ("speedup", "speedup"), ("mean_k", "mean_k")):
        step, value = curves[tag][-1]
        assert step == 5 and value == pytest.approx(row[key], rel=1e-5)  # cumulative: the last point is the row
    alone = evaluation.results[2].runs[1].totals
    assert curves["request/mean_k"][2][1] == pytest.approx(alone.mean_k)


def test_steps_are_monotone_over_repeats(tmp_path: Path) -> None:
    directory, _ = logged(tmp_path, requests=3, repeats=2)
    for points in scalars(directory / "static-4").values():
        assert [step for step, _ in points] == [1, 2, 3, 4, 5, 6]


def test_k02_a_used_directory_is_not_written_into_again(tmp_path: Path) -> None:
    """K02: a second run would start at step 1 in the first one's files and draw zig-zag curves."""
    first, _ = logged(tmp_path)
    second, _ = logged(tmp_path)
    third, _ = logged(tmp_path)
    assert [first, second, third] == [tmp_path, tmp_path / "run-2", tmp_path / "run-3"]
    for directory in (first, second, third):
        assert len(list((directory / "static-4").iterdir())) == 1
        assert [step for step, _ in scalars(directory / "static-4")["speedup"]] == [1, 2, 3, 4, 5]
    assert fresh_directory(tmp_path, ["another"]) == tmp_path


def test_k02_steps_may_only_grow(tmp_path: Path) -> None:
    curve = Curve(tmp_path)
    curve.log({"x": 1.0}, 5)
    with pytest.raises(ValueError, match="5 after 5"):
        curve.log({"x": 2.0}, 5)
    curve.close()


def test_k03_every_request_is_readable_at_once_and_after_ctrl_c(tmp_path: Path) -> None:
    """K03: short and interrupted runs must not leave an empty file."""
    sizes: list[int] = []

    def stop(request: Request, action: Action) -> None:
        if request.id in ("r1", "r2"):
            sizes.append(len(scalars(tmp_path / "static-4").get("speedup", [])))
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
    assert [step for step, _ in scalars(tmp_path / "static-4")["speedup"]] == [1, 2]


def test_b13_statistics_hold_the_last_round_of_each_request(tmp_path: Path) -> None:
    """B13: what is logged comes from the rounds themselves, so the final round of an episode is in it."""
    directory, evaluation = logged(tmp_path)
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
