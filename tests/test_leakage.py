"""What was trained or tuned on cannot be evaluated, unless the rows say so."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import eval as eval_cli
import train_policy
from assc.core import Request
from assc.costs_io import CostFile, write_costs
from assc.leakage import TrainedOn, content_of, draft_leaks
from assc.markov import MARKOV_COSTS, MarkovSource, markov_requests
from assc.registry import make_policy
from assc.replay import ReplayBackend
from assc.trace import DrafterInfo, Trace
from assc.trace_io import write_trace
from policies.artefact import load_artefact, save_policy


def trace_of(splits: Sequence[str]) -> Trace:
    trace = MarkovSource().trace(markov_requests(len(splits), max_new_tokens=16))
    return Trace(trace.header, {**trace.columns, "split": np.array(splits)}, trace.name)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    write_trace(trace_of(["held-out", "train", "train"] * 4), tmp_path / "trace.npz")
    write_costs(CostFile(MARKOV_COSTS), tmp_path / "costs.json")
    return ["--traces", str(tmp_path / "trace.npz"), "--cost", str(tmp_path / "costs.json")]


def saved(path: Path, requests: Sequence[Request], **meta: Any) -> Path:
    policy = make_policy("bandit:ucb")
    table = ReplayBackend(trace_of(["train"]), MARKOV_COSTS).table
    policy.begin(table)
    return save_policy(path, policy, table=table, meta={"trained_on": TrainedOn.of(requests).to_json(), **meta})


def refused(words: Sequence[object], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert eval_cli.main(["--backend", "replay", *map(str, words)]) == 2
    printed = capsys.readouterr()
    (sentence,) = [line for line in printed.err.splitlines() if line.startswith("error: ")]
    assert printed.out == ""
    return sentence


def test_a_policy_trained_on_evaluated_requests_is_refused_or_marked(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = trace_of(["held-out", "train", "train"] * 4)
    held, train = (trace.requests(trace.where(split=s)) for s in ("held-out", "train"))
    bad, good = saved(tmp_path / "bad.zip", [*train, held[1]]), saved(tmp_path / "good.zip", train)
    sentence = refused([*files, "--policies", "ar", good, bad], capsys)
    assert f"{bad} was trained on 1 of the 4 evaluated requests, for example {held[1].id!r}" in sentence
    assert "--allow-leakage" in sentence
    inside = refused([*files, "--policies", f"guard({bad})"], capsys)
    assert "was trained on 1 of the 4" in inside
    out = tmp_path / "out.json"
    words = ["--policies", "ar", str(good), str(bad), f"{bad}@b", "--allow-leakage", "--json", str(out)]
    assert eval_cli.main(["--backend", "replay", *files, *words]) == 0
    assert [row["leaked_requests"] for row in json.loads(out.read_text())["rows"]] == [0, 0, 1, 1]
    printed = capsys.readouterr().out
    twice = ["--policies", "ar", str(bad), str(bad), "--allow-leakage", "--json", str(out)]
    assert eval_cli.main(["--backend", "replay", *files, *twice]) == 0
    assert [row["leaked_requests"] for row in json.loads(out.read_text())["rows"]] == [0, 1, 1]
    capsys.readouterr()
    assert "[LEAKED 1]" in printed and "these rows hold for no others" in printed
    assert eval_cli.main(["--backend", "replay", *files, "--policies", "ar", str(good)]) == 0
    assert "LEAKED" not in capsys.readouterr().out


def test_tuning_is_guarded_by_content_where_splits_lie(
    tmp_path: Path, files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The same prompt under another id in the train split: static:tuned would be tuned on it."""
    trace = trace_of(["held-out", "train"])
    twin = trace.select([0, 0, 1])
    columns = {**twin.columns, "id": np.array(["a", "b", "c"]), "split": np.array(["held-out", "train", "train"])}
    write_trace(Trace(trace.header, columns), tmp_path / "twin.npz")
    words = ["--traces", tmp_path / "twin.npz", *files[2:], "--policies"]
    assert "static:tuned was tuned on 1 of the 1 evaluated requests, for example 'a'" in refused(
        [*words, "static:tuned@x"], capsys
    ).replace("static:tuned@x", "static:tuned")
    assert eval_cli.main(["--backend", "replay", *map(str, words), "ar"]) == 0, "nothing here was tuned"
    training = ["--traces", str(tmp_path / "twin.npz"), *files[2:], "--run-dir", str(tmp_path / "run")]
    assert train_policy.main([*training, "--total-timesteps", "64", "--live-requests", "0"]) == 2
    said = capsys.readouterr().err
    assert "1 of the 1 held-out requests are also in the train split, for example 'a'" in said
    assert not (tmp_path / "run").exists()


def test_a_learned_draft_is_not_evaluated_on_its_own_prompts(
    tmp_path: Path, files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    trace = trace_of(["draft", "held-out", "train"] * 2)
    write_trace(trace, tmp_path / "independent.npz")
    kinds = (DrafterInfo("model", "hidden", "drafts", confidence=True), trace.header.drafters[1])
    write_trace(Trace(replace(trace.header, drafters=kinds), trace.columns), tmp_path / "learned.npz")
    words = ["--policies", "ar", "--split", "draft", *files[2:], "--traces"]
    assert eval_cli.main(["--backend", "replay", *words, str(tmp_path / "independent.npz")]) == 0
    assert "the draft 'model' was trained on 2 of the 2" in refused([*words, tmp_path / "learned.npz"], capsys)
    requests = trace.requests()
    (leak,) = draft_leaks(requests, [True] + [False] * 5, {"a": "model", "b": "layers"})
    assert leak.requests == (requests[0],) and "the draft 'b'" in str(leak)
    assert (
        draft_leaks(requests, [False] * 6, {"b": "layers"}) == draft_leaks(requests, [True] * 6, {"a": "model"}) == []
    )


def test_training_writes_what_it_learned_from(files: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = [*files, "--run-dir", str(run), "--total-timesteps", "64", "--eval-requests", "0", "--algo", "bandit:ucb"]
    assert train_policy.main(words) == 0
    trace = trace_of(["held-out", "train", "train"] * 4)
    loaded = load_artefact(run / "policy.zip")
    assert loaded.trained_on == TrainedOn.of(trace.requests(trace.where(split="train")))
    assert loaded.trained_mode == "greedy" and len(loaded.trained_on.prompts) == 8
    out = tmp_path / "out.json"
    assert eval_cli.main(["--backend", "replay", *files, "--policies", "ar", str(run), "--json", str(out)]) == 0
    assert [row["policy"] for row in json.loads(out.read_text())["rows"]] == ["ar", str(run)]
    assert eval_cli.main(["--backend", "replay", *files, "--policies", "ar", str(run), "--split", "train"]) == 2


def test_run_directories_without_a_policy_are_refused(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty, other = tmp_path / "empty", tmp_path / "other"
    empty.mkdir(), other.mkdir()
    (other / "config.json").write_text("{}")
    assert refused([*files, "--policies", empty], capsys).endswith("empty' is empty")
    assert "no training has finished in it" in refused([*files, "--policies", other], capsys)


def test_unknown_training_prompts_and_another_mode_are_told(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = make_policy("bandit:ucb")
    table = ReplayBackend(trace_of(["train"]), MARKOV_COSTS).table
    policy.begin(table)
    silent = save_policy(tmp_path / "silent.zip", policy, table=table, meta={"mode": "gumbel", "c": 0.5})
    assert eval_cli.main(["--backend", "replay", *files, "--policies", "ar", str(silent)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "silent.zip does not say what it was trained on" in printed
    assert "silent.zip was trained in mode gumbel, this evaluation is in mode greedy" in printed
    assert "silent.zip was trained at c = 0.500, this evaluation is at c = 0.080" in printed
    out, inside = tmp_path / "out.json", f"guard({silent})"
    assert eval_cli.main(["--backend", "replay", *files, "--policies", "ar", inside, "--json", str(out)]) == 0
    meta = json.loads(out.read_text())["meta"]
    unknown = {"label": inside, "how": "unknown", "prompts": None, "leaked_requests": None}
    assert meta["leakage"]["policies"] == [unknown]
    assert f"{inside} does not say what it was trained on, so leakage cannot be excluded" in meta["notes"]


def test_prompts_are_found_by_content_or_by_id_within_a_workload() -> None:
    one, same, other = Request((1, 2), id="q1"), Request((1, 2), id="zz"), Request((3,), id="q1")
    known = TrainedOn.of([one], "w")
    assert known.among([same, other], "x") == [same], "ids of another workload name other prompts"
    assert known.among([same, other], "w") == [same, other], "another tokenizer gives other ids"
    assert TrainedOn.of([one]).among([other], "") == []
    assert TrainedOn.of([Request((1, 2))]).prompts == {content_of((1, 2)): content_of((1, 2))}
    assert TrainedOn.from_json(json.loads(json.dumps(known.to_json()))) == known
    both = known | TrainedOn.of([other], "v")
    assert both.among([same, other], "v") == [same, other] and both.among([Request((9,), id="q1")], "") == []
    assert both.count == 2 and TrainedOn.from_json(json.loads(json.dumps(both.to_json()))) == both
    assert known | TrainedOn() == TrainedOn() | known == known | known == known
    nested = {"prompts": {}, "others": [{"prompts": {}, "others": [{"prompts": {}}]}]}
    for damaged in (
        nested,
        {"prompts": {}, "others": [1]},
        {"prompts": {}, "others": 1},
        None,
        [],
        {"prompts": 3},
        {"prompts": {"a": 1}},
        {"prompts": {}, "workload_hash": 1},
    ):
        with pytest.raises(ValueError, match="does not list"):
            TrainedOn.from_json(damaged)


def test_a_damaged_list_in_an_artefact_is_one_sentence(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = make_policy("bandit:ucb")
    table = ReplayBackend(trace_of(["train"]), MARKOV_COSTS).table
    policy.begin(table)
    save_policy(tmp_path / "p.zip", policy, table=table, meta={"trained_on": {"prompts": 1}})
    assert "unreadable list of training prompts" in refused([*files, "--policies", tmp_path / "p.zip"], capsys)


def test_aliases_are_the_same_policy(files: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    specs = ["ar", "static:4", "static:4@b", "static:tuned@c", "oracle@d"]
    assert eval_cli.main(["--backend", "replay", *files, "--policies", *specs, "--json", str(out)]) == 0
    rows = {row["policy"]: row for row in json.loads(out.read_text())["rows"]}
    assert list(rows) == specs and rows["static:4"]["seconds"] == rows["static:4@b"]["seconds"]
    assert rows["static:tuned@c"]["action"] is not None and rows["oracle@d"]["oracle_fraction"] == pytest.approx(1.0)
