"""Run directories: what they hold, and that a repeated run gives equal results or says what differs."""

from __future__ import annotations

import json
import shlex
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tiny_traces import tiny_trace

import eval as eval_cli
import train_policy
from assc import rerun as rerun_module
from assc.__main__ import main
from assc.actions import ActionTable
from assc.costs_io import CostFile, write_costs
from assc.eval_config import Config
from assc.manifest import MANIFEST, PACKAGED, data_of, read_manifest, words_of
from assc.markov import MARKOV_COSTS, MarkovSource, markov_requests
from assc.record import Config as RecordConfig
from assc.registry import make_policy
from assc.rerun import command_line
from assc.rerun_compare import compare_evaluations, compare_folders, compare_runs, compare_traces, first_difference
from assc.trace_io import write_trace
from policies.artefact import save_policy
from policies.training.config import TrainConfig


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    write_trace(MarkovSource().trace(markov_requests(12, max_new_tokens=24)), tmp_path / "trace.npz")
    write_costs(CostFile(MARKOV_COSTS), tmp_path / "costs.json")
    return ["--traces", str(tmp_path / "trace.npz"), "--cost", str(tmp_path / "costs.json")]


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A repeated run in this process, since a new one takes seconds to import everything."""
    programs = {"eval": eval_cli.main, "train_policy": train_policy.main, "assc": main}

    def start(words: list[str]) -> int:
        assert words[0] == "-m"
        return programs[words[1]](words[2:])

    monkeypatch.setattr(rerun_module, "start", start)


def evaluated(directory: Path, files: list[str], *more: str) -> Path:
    words = ["--backend", "replay", *files, "--policies", "ar", "static:tuned", "bandit:ts", "random", "oracle"]
    assert eval_cli.main([*words, "--run-dir", str(directory), *more]) == 0
    return directory


def test_an_evaluation_says_what_it_was(files: list[str], tmp_path: Path) -> None:
    run = evaluated(tmp_path / "run", files, "--seed", "3", "--json", str(tmp_path / "elsewhere.json"))
    assert sorted(p.name for p in run.iterdir()) == ["eval.csv", "eval.json", "eval.md", MANIFEST]
    manifest = read_manifest(run)
    assert manifest["command"] == "eval" and manifest["seeds"]["seed"] == 3 and manifest["complete"] is True
    assert len(manifest["seeds"]["requests"]) == 4 and manifest["finished"] >= manifest["started"]
    assert manifest["config"]["policies"][1] == "static:tuned" and manifest["config"]["repeats"] == 1
    assert {"python", "numpy", "assc"} <= set(manifest["versions"]) and "git_commit" in manifest
    assert manifest["hardware"]["cores"] >= 1 and manifest["hardware"]["cpu"]
    assert {name: Path(d["path"]).name for name, d in manifest["data"].items()} == {
        "trace": "trace.npz",
        "cost model": "costs.json",
    }
    assert all(len(d["sha256"]) == 64 for d in manifest["data"].values())


def test_simulated_runs_are_bit_identical_under_a_seed(
    files: list[str], tmp_path: Path, in_process: None, capsys: pytest.CaptureFixture[str]
) -> None:
    run = evaluated(tmp_path / "run", files, "--repeats", "2", "--rounds", "2")
    assert main(["rerun", str(run)]) == 0
    said = capsys.readouterr().out
    assert said.endswith(f"run-rerun equals {run} bit for bit\n")
    report = json.loads((tmp_path / "run-rerun" / "rerun.json").read_text())
    assert report["equal"] is True and report["of"] == str(run)
    # another seed is another result, and the place is named
    other = evaluated(tmp_path / "other", files, "--seed", "1", "--repeats", "2", "--rounds", "2")
    (run / "eval.json").write_bytes((other / "eval.json").read_bytes())
    assert main(["rerun", str(run), "--out", str(tmp_path / "again")]) == 1
    said = capsys.readouterr().out
    assert "eval.json: DIFFERENT (meta.seed: 1, then 0)" in said and f"again DIFFERS FROM {run}" in said


def test_a_training_repeats_to_the_bit_and_a_new_process_agrees(files: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = [*files, "--run-dir", str(run), "--total-timesteps", "128", "--algo", "bandit:ts", "--live-requests", "0"]
    assert train_policy.main(words) == 0
    manifest = read_manifest(run)
    assert manifest["command"] == "train" and manifest["complete"] is True and "trace" in manifest["data"]
    assert main(["rerun", str(run), "--out", str(tmp_path / "again")]) == 0
    report = json.loads((tmp_path / "again" / "rerun.json").read_text())
    assert [(r["what"], r["equal"], r["exact"]) for r in report["results"]] == [
        ("policy.zip", True, True),
        ("eval.json", True, True),
    ]


def test_seeds_are_repeated_as_one_run(files: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Also with a blank in the name of the directory: the command that is told can be pasted."""
    run = tmp_path / "two seeds"
    words = [*files, "--run-dir", str(run), "--total-timesteps", "64", "--algo", "bandit:ts", "--live-requests", "0"]
    assert train_policy.main([*words, "--seeds", "3", "5", "--jobs", "1", "--eval-requests", "0"]) == 0
    manifest = read_manifest(run)
    assert manifest["seeds"] == {"seeds": [3, 5]} and manifest["complete"] is True and "trace" in manifest["data"]
    assert main(["rerun", str(run), "--out", str(tmp_path / "again")]) == 0
    report = json.loads((tmp_path / "again" / "rerun.json").read_text())
    assert [r["what"] for r in report["results"]] == ["seed-3/policy.zip", "seed-5/policy.zip"] and report["equal"]
    told = capfd.readouterr().err
    line = next(x for x in told.splitlines() if x.startswith("running: "))
    assert shlex.split(line)[-2:] == ["--run-dir", str(tmp_path / "again")]


def test_a_result_of_one_trial_that_differs_is_named(tmp_path: Path) -> None:
    """Patterns find what is in a group; a missing one is a difference."""
    before, after = tmp_path / "a", tmp_path / "b"
    for folder in (before, after):
        for seed in (0, 1):
            (folder / f"seed-{seed}").mkdir(parents=True)
            with zipfile.ZipFile(folder / f"seed-{seed}" / "policy.zip", "w") as archive:
                archive.writestr("policy.json", json.dumps({"weight": seed}))
                cost = None if folder == before else "a/costs.json"  # a live run is repeated with its fitted costs
                archive.writestr("meta.json", json.dumps({"training": {"cost": cost}}))
    assert all(d.equal for d in compare_runs(before, after, "train"))
    (after / "seed-1" / "policy.zip").unlink()
    found = compare_runs(before, after, "train")
    assert [(d.what, d.equal) for d in found] == [("seed-0/policy.zip", True), ("seed-1/policy.zip", False)]


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    """Nine different prompts in three splits."""
    lines = [
        {"id": f"q{i}", "prompt": f"tell {i} of {i * i} stones", "split": ("train", "held-out", "draft")[i % 3]}
        for i in range(9)
    ]
    path = tmp_path / "w.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_recordings_and_live_evaluations_of_the_tiny_pair_repeat(
    prompts: str, tmp_path: Path, in_process: None, capsys: pytest.CaptureFixture[str]
) -> None:
    record = ["--pair", "tiny", "--workload", prompts, "--split", "all", "--temperatures", "0", "1"]
    assert main(["record", *record, "--max-new-tokens", "8", "--out", str(tmp_path / "recorded")]) == 0
    assert main(["rerun", str(tmp_path / "recorded")]) == 0
    assert capsys.readouterr().out.endswith(f"equals {tmp_path / 'recorded'} bit for bit\n")
    live = ["--pair", "tiny", "--workload", prompts, "--requests", "3", "--max-new-tokens", "6"]
    assert eval_cli.main([*live, "--policies", "ar", "static:2", "--run-dir", str(tmp_path / "live")]) == 0
    assert main(["rerun", str(tmp_path / "live")]) == 0
    said = capsys.readouterr().out
    assert "the same texts; measured seconds do not repeat: ar 1.000x then 1.000x" in said
    assert said.endswith(f"live-rerun equals {tmp_path / 'live'}\n"), "measured seconds are called equal bit for bit"


def test_a_distilled_draft_repeats(prompts: str, tmp_path: Path, in_process: None) -> None:
    words = ["--pair", "tiny", "--workload", prompts, "--tokens", "60", "--max-new-tokens", "12", "--rows", "4"]
    assert main(["distill", *words, "--head", "80", "--steps", "2", "--out", str(tmp_path / "run")]) == 0
    assert main(["rerun", str(tmp_path / "run"), "--out", str(tmp_path / "again")]) == 0
    report = json.loads((tmp_path / "again" / "rerun.json").read_text())
    assert [(r["what"], r["equal"], r["exact"]) for r in report["results"]] == [("draft", True, True)]


def test_changed_data_is_refused(files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = evaluated(tmp_path / "run", files)
    write_costs(CostFile(MARKOV_COSTS, date="tomorrow"), tmp_path / "costs.json")
    assert main(["rerun", str(run)]) == 2
    assert "costs.json has changed since the run, so the run cannot be repeated" in capsys.readouterr().err
    (tmp_path / "trace.npz").unlink()
    assert main(["rerun", str(run)]) == 2
    assert "trace.npz is not here (the run was started in" in capsys.readouterr().err


def test_a_changed_artefact_inside_another_policy_is_refused(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = ActionTable.build(["model", "ngram"], (1, 2, 4))
    inside = save_policy(tmp_path / "inside.zip", make_policy("bandit:ucb"), table=table)
    label, run = f"guard(guard({inside}):span=9)", tmp_path / "run"
    words = ["--backend", "replay", *files, "--policies", "ar", label, "--run-dir", str(run)]
    assert eval_cli.main(words) == 0
    assert read_manifest(run)["data"][label]["path"] == str(inside)
    save_policy(inside, make_policy("bandit:ts"), table=table)
    assert main(["rerun", str(run)]) == 2
    assert "inside.zip has changed since the run" in capsys.readouterr().err


def test_what_is_no_run_is_refused(files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, empty, other = evaluated(tmp_path / "run", files), tmp_path / "empty", tmp_path / "other"
    empty.mkdir(), other.mkdir()
    (other / "a.txt").write_text("x")
    damaged, future = tmp_path / "damaged", tmp_path / "future"
    damaged.mkdir(), future.mkdir()
    (damaged / MANIFEST).write_text("{")
    (future / MANIFEST).write_text(json.dumps({"schema": 9, "kind": "assc run", "words": []}))
    for directory, said in (
        (empty, "is empty"),
        (other, "is no run directory: it has no manifest.json"),
        (tmp_path / "nowhere", "there is no run directory"),
        (damaged, "is damaged"),
        (future, "is of schema 9, this program reads schema 1"),
    ):
        assert main(["rerun", str(directory)]) == 2
        assert said in capsys.readouterr().err
    assert main(["rerun", str(run), "--out", str(other)]) == 2
    assert "exists and is not empty" in capsys.readouterr().err
    words = ["--backend", "replay", *files, "--policies", "ar", "--run-dir", str(run)]
    assert eval_cli.main(words) == 2
    assert "exists and is not empty; give a new --run-dir" in capsys.readouterr().err


def test_words_make_the_configuration_again() -> None:
    from assc.cli import parse

    configs: list[Any] = [
        Config(policies=("ar", "static:4@b"), backend="replay", temperatures=(0.0, 0.7), explain=True, repeats=3),
        TrainConfig(algo="bandit:ucb", peek=True, progress=False, seed=4, cost=Path("c.json")),
        RecordConfig(out=Path("x"), temperatures=(1.0,), categories=("a", "b"), resume=True),
    ]
    for config in configs:
        assert parse(type(config), words_of(config), prog="x", description="x") == config


def test_command_lines_write_elsewhere_and_reuse_fitted_costs(tmp_path: Path) -> None:
    (tmp_path / "costs.json").write_text("{}")
    words = ["--policies", "ar", "x", "--json", "o.json", "--csv", "o.csv", "--seed", "2", "--run-dir", "old"]
    manifest = {"command": "eval", "words": words, "config": {"backend": "live"}}
    line = command_line(manifest, tmp_path, Path("new"))
    kept = ["-m", "eval", "--policies", "ar", "x", "--seed", "2"]
    assert line == [*kept, "--cost", str(tmp_path / "costs.json"), "--run-dir", "new"]
    manifest = {"command": "distill", "words": ["--out", "a", "--resume", "--steps", "3"], "config": {}}
    assert command_line(manifest, tmp_path, Path("b")) == ["-m", "assc", "distill", "--steps", "3", "--out", "b"]


def test_measured_runs_must_have_the_same_texts_and_cannot_have_the_same_seconds(tmp_path: Path) -> None:
    def result(seconds: float, finish: str) -> dict[str, Any]:
        request = {"id": "q", "temperature": 0.0, "repeat": 0, "tokens": 5, "finish": finish, "seconds": seconds}
        row = {"policy": "assc", "speedup": 1 / seconds, "speedup_ci95": [0.9, 1.1], "rounds": 3}
        return {"meta": {"time_source": "measured"}, "rows": [row], "details": [{"requests": [request]}]}

    paths = [tmp_path / f"{i}.json" for i in range(3)]
    for path, data in zip(paths, (result(1.0, "eos"), result(0.8, "eos"), result(1.0, "length")), strict=True):
        path.write_text(json.dumps(data))
    roots = (tmp_path / "a", tmp_path / "b")
    same = compare_evaluations("eval.json", paths[0], paths[1], roots)
    assert same.equal and not same.exact and "assc 1.000x then 1.250x (OUTSIDE 0.900 to 1.100)" in same.detail
    other = compare_evaluations("eval.json", paths[0], paths[2], roots)
    assert not other.equal and "'eos', then 'length'" in other.detail


def test_traces_and_folders_are_compared_without_their_dates(tmp_path: Path) -> None:
    from dataclasses import replace

    trace = tiny_trace()
    for name, created in (("a", "monday"), ("b", "tuesday")):
        write_trace(type(trace)(replace(trace.header, created=created), trace.columns), tmp_path / f"{name}.npz")
    roots = (tmp_path, tmp_path)
    assert compare_traces("t", tmp_path / "a.npz", tmp_path / "b.npz", roots).equal
    write_trace(trace.select([0, 1]), tmp_path / "b.npz")
    assert not compare_traces("t", tmp_path / "a.npz", tmp_path / "b.npz", roots).equal
    for name in ("c", "d"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "w.bin").write_bytes(b"1")
        (tmp_path / name / "config.json").write_text(json.dumps({"a": 1, "versions": name}))
    assert compare_folders("d", tmp_path / "c", tmp_path / "d", roots).equal
    (tmp_path / "d" / "w.bin").write_bytes(b"2")
    assert compare_folders("d", tmp_path / "c", tmp_path / "d", roots).detail == "w.bin has other bytes"
    assert first_difference({"a": 1}, {"b": 1}) == "a: only in one of them" and first_difference([1], [1, 2])


def test_data_hashes(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    found = data_of(
        {"a": tmp_path / "f", "none": None, "hub": "owner/model", "w": PACKAGED + "data/workloads/mixed.jsonl"}
    )
    assert set(found) == {"a", "w"} and found["a"]["sha256"].startswith("2d711642b726b044")


def test_words_of_defaults_is_nothing() -> None:
    @dataclass
    class Nothing:
        a: int = 1

    assert words_of(Nothing()) == []


def test_a_run_directory_that_is_taken_is_told_before_anything_is_played(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there").write_text("something")
    words = ["--backend", "replay", "--policies", "ar", "cascade:tuned", "--run-dir", str(tmp_path)]
    assert eval_cli.main(words) == 2
    told = capsys.readouterr()
    assert "exists and is not empty" in told.err and "tuning" not in told.out + told.err
