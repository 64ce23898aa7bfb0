"""No output replaces an input, or a file that is no earlier result of the same command."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import eval as eval_cli
from assc import __main__ as module_main
from assc.costs_io import CostFile, write_costs
from assc.markov import MARKOV_COSTS, MarkovSource, markov_requests
from assc.outputs import json_kind
from assc.registry import artefacts_in, make_policy
from assc.replay import ReplayBackend
from assc.trace import Trace
from assc.trace_io import write_trace
from policies.artefact import save_policy

DATA = ["--traces", "trace.npz", "--cost", "costs.json"]
EVAL = ["--backend", "replay", *DATA, "--policies", "ar", "runs/keep/policy.zip", "--requests", "2"]
DRIFT = ["drift", "--scenario", "stationary", "--seeds", "1", "--tokens", "40", *DATA, "--policies", "guard(runs/keep)"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trace = MarkovSource().trace(markov_requests(6, max_new_tokens=24))
    write_trace(Trace(trace.header, {**trace.columns, "split": np.array(["held-out"] * 6)}), Path("trace.npz"))
    write_costs(CostFile(MARKOV_COSTS), Path("costs.json"))
    policy, table = make_policy("bandit:ucb"), ReplayBackend(trace, MARKOV_COSTS).table
    policy.begin(table)
    Path("runs/keep").mkdir(parents=True)
    save_policy(Path("runs/keep/policy.zip"), policy, table=table)
    Path("runs/keep/eval.json").write_text(json.dumps({"meta": {}, "rows": [], "same_text": None}))


def evaluated(*words: str) -> int:
    return eval_cli.main([*EVAL, *words])


def drifted(*words: str) -> int:
    return module_main.main([*DRIFT, *words])


@pytest.mark.parametrize(
    "path", ["runs/keep/policy.zip", "trace.npz", "./costs.json", "runs/../trace.npz", "link.json"]
)
def test_inputs_are_never_replaced(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("link.json").symlink_to("costs.json")
    before = Path(path).read_bytes()
    for command, option in (
        (evaluated, "--json"),
        (evaluated, "--csv"),
        (evaluated, "--markdown"),
        (drifted, "--json"),
    ):
        assert command(option, path) == 2
        printed = capsys.readouterr()
        assert f"{option} {Path(path)} would overwrite an input of this command" in printed.err and not printed.out
    assert Path(path).read_bytes() == before


def test_results_of_a_run_directory_stay(capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs/keep/manifest.json").write_text("{}")
    assert evaluated("--json", "runs/keep/eval.json") == 2
    assert "would overwrite a result of the run directory" in capsys.readouterr().err
    for _ in range(2):
        assert eval_cli.main([*EVAL, "--policies", "runs/keep@x", "--json", "runs/keep/out.json"]) == 0


def test_only_earlier_results_of_the_same_command_are_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    outputs = {"--json": "e.json", "--csv": "e.csv", "--markdown": "e.md"}
    words = [word for pair in outputs.items() for word in pair]
    figure = ["--json", "new/folder/d.json", "--svg", "d.svg"]
    Path("e.json").touch()
    for _ in range(2):
        assert evaluated(*words) == 0, "an empty file, then its own"
    Path("notes.json").write_text("{}")
    Path("notes.svg").write_text('<?xml version="1.0"?><poem/>')
    Path("notes.md").write_text("# Notes")
    for _ in range(2):
        assert drifted(*figure) == 0
    before = {path: path.read_bytes() for path in Path().glob("*.*")}
    capsys.readouterr()
    foreign = (*outputs.values(), "notes.md", "notes.json")
    wrong = [(evaluated, option, path) for option in outputs for path in foreign if outputs[option] != path]
    wrong += [
        (drifted, "--json", "e.json"),
        (drifted, "--svg", "notes.svg"),
        (evaluated, "--json", "new/folder/d.json"),
    ]
    for command, option, path in wrong:
        assert command(option, path) == 2, (option, path)
        said = capsys.readouterr().err
        assert f"error: {option} {path} would overwrite a file that is no earlier result of this command" in said
    assert {path: path.read_bytes() for path in Path().glob("*.*")} == before
    assert drifted("--json", "n.svg", "--svg", "./n.svg") == 2
    assert "--json and --svg both name n.svg" in capsys.readouterr().err
    assert evaluated("--json", "/dev/null") == 2 and "is not a regular file" in capsys.readouterr().err


def test_other_commands_keep_foreign_files_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluated("--json", "e.json") == 0
    before = Path("e.json").read_bytes()
    roofline = ["roofline", "--target", "8e9", "--draft", "1e9", "--device", "h100"]
    Path("other.json").write_bytes(before)
    for words in (
        [*roofline, "--out", "e.json"],
        ["live-check", "--policy", "ar", "--json", "e.json"],
        ["drafts", "--json", "e.json"],
        ["calibrate", "--out", "e.json"],
        ["report", "other.json", "--out", "e.json"],
    ):
        capsys.readouterr()
        assert module_main.main(words) == 2
        assert "e.json would overwrite a file that is no earlier result" in capsys.readouterr().err
    assert Path("e.json").read_bytes() == before
    assert module_main.main([*roofline, "--out", "r.json"]) == module_main.main([*roofline, "--out", "r.json"]) == 0


def test_kinds_and_paths() -> None:
    assert (
        json_kind({"kind": "assc drift"}) == "assc drift" and json_kind({"preset": "seed-table"}) == "assc seed-table"
    )
    assert json_kind({"meta": {}, "rows": [], "same_text": True}) == "assc evaluation"
    assert json_kind([]) is json_kind({}) is json_kind({"meta": 1, "rows": 2}) is None
    assert artefacts_in("guard(guard(runs/keep):span=9)@x") == ("runs/keep/policy.zip",)
    assert artefacts_in("runs/keep/policy.zip@b") == ("runs/keep/policy.zip",) and artefacts_in("runs") == ()
