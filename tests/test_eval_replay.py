"""eval.py on a recorded trace: rows, ladder, choice of requests, refusals; and that no model library is loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_traces import COSTS, tiny_trace

import eval as eval_cli
from assc import eval_replay
from assc.core import Request
from assc.costs import DrafterCost
from assc.costs_io import CostFile, write_costs
from assc.eval_config import Config, LiveOptions, ReplayOptions
from assc.evaluate import evaluate
from assc.markov import MARKOV_COSTS, MarkovSource, markov_requests
from assc.metrics import ROW_KEYS
from assc.oracle import ladder
from assc.registry import make_policy
from assc.replay import ReplayBackend
from assc.results import EvaluationInterrupted, RequestResult
from assc.run import run_request
from assc.trace import Trace
from assc.trace_io import write_trace
from assc.tuning import static_spec
from assc.vector_replay import FlatTrace
from assc.workloads import Prompt, select
from policies.artefact import save_policy

ROOT = Path(eval_cli.__file__).parent
LADDER = ("ar", "static:tuned", "assc", "threshold", "bandit:ucb", "oracle")
Evaluate = Callable[..., dict[str, Any]]


def markov_trace() -> Trace:
    """36 requests of at most 40 tokens in two categories; every third is held out."""
    requests = [replace(r, category="ab"[i % 2]) for i, r in enumerate(markov_requests(36, max_new_tokens=40))]
    return MarkovSource().trace(requests)


def with_splits(trace: Trace, splits: list[str]) -> Trace:
    return Trace(trace.header, {**trace.columns, "split": np.array(splits)}, trace.name)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    write_trace(markov_trace(), tmp_path / "trace.npz")
    write_costs(CostFile(MARKOV_COSTS, pair="markov", device="none", date="today"), tmp_path / "costs.json")
    return ["--traces", str(tmp_path / "trace.npz"), "--cost", str(tmp_path / "costs.json")]


@pytest.fixture
def two(tmp_path: Path) -> list[str]:
    """The recorded tiny trace: two drafters, three temperatures; the second of three prompts is held out at each."""
    write_trace(with_splits(tiny_trace(), ["train"] * 3 + ["held-out"] * 3 + ["train"] * 3), tmp_path / "two.npz")
    write_costs(CostFile(COSTS), tmp_path / "two.json")
    return ["--traces", str(tmp_path / "two.npz"), "--cost", str(tmp_path / "two.json")]


@pytest.fixture
def result(tmp_path: Path) -> Evaluate:
    """Run eval.py in replay and return its JSON."""

    def run(*words: object) -> dict[str, Any]:
        out = tmp_path / "out.json"
        assert eval_cli.main(["--backend", "replay", *map(str, words), "--json", str(out)]) == 0
        loaded: dict[str, Any] = json.loads(out.read_text())
        return loaded

    return run


def test_rows_ladder_and_provenance(
    files: list[str], result: Evaluate, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = result(*files, "--policies", *LADDER, "--markdown", tmp_path / "out.md", "--explain")
    rows = {row["policy"]: row for row in found["rows"]}
    assert tuple(rows) == LADDER and all(tuple(row) == ROW_KEYS for row in found["rows"])
    assert {row["time_source"] for row in rows.values()} == {"modelled"} and found["same_text"] is True
    assert rows["static:tuned"]["oracle_fraction"] == pytest.approx(0.0, abs=1e-9)
    assert rows["oracle"]["oracle_fraction"] == pytest.approx(1.0) and rows["ar"]["oracle_fraction"] < 0
    static, oracle = (rows[name]["tokens_per_second"] for name in ("static:tuned", "oracle"))
    for row in rows.values():
        by_hand = (row["tokens_per_second"] - static) / (oracle - static)
        assert row["oracle_fraction"] == pytest.approx(by_hand, abs=1e-9)
        assert row["seconds"] >= rows["oracle"]["seconds"] * (1 - 1e-9), "a policy beats the oracle"
    rungs = found["ladder"]
    assert list(rungs) == ["plain", "tuned", "best_static_per_request", "oracle"]
    for rung, name in (("plain", "ar"), ("tuned", "static:tuned"), ("oracle", "oracle")):
        for key in ("seconds", "tokens", "tokens_per_second", "speedup"):
            assert rungs[rung][key] == pytest.approx(rows[name][key]), (rung, key)
    assert rungs["oracle"]["seconds"] < rungs["best_static_per_request"]["seconds"] <= rungs["tuned"]["seconds"]
    action = rungs["tuned"]["action"]
    assert [row["action"] for row in found["rows"]] == [None, action, None, None, None, None]
    meta = found["meta"]
    expected = {"backend": "replay", "time_source": "modelled", "pair": "markov", "device": "none", "dtype": "none"}
    expected |= {"threads": 0, "mode": "greedy", "workload": None, "seed": 0, "requests": 12, "warmup": 0}
    assert expected.items() <= meta.items() and meta["c"] == pytest.approx(MARKOV_COSTS.cost_ratio("model"))
    assert {"action": action, "split": "train", "requests": 24}.items() <= meta["static_tuned"].items()
    assert len(meta["static_tuned"]["tuned_on"]["prompts"]) == 24
    assert meta["trace"]["name"].endswith("trace.npz") and len(meta["trace"]["sha256"]) == 64
    assert meta["cost_file"]["name"].endswith("costs.json") and meta["cost_file"]["date"] == "today"
    assert meta["cost_model"]["label"] == MARKOV_COSTS.label and "numpy" in meta["versions"]
    printed = capsys.readouterr().out
    for text in (f"static:tuned ({action})", "static:best-per-request", "oracle fraction", "100.0 %"):
        assert text in printed and text in (tmp_path / "out.md").read_text()
    assert "oracle_fraction:" in printed and "ladder:" in printed and "time modelled" in printed
    assert "-0.0 %" not in printed


def test_the_tuned_action_is_the_best_one_on_train_requests_alone(files: list[str], result: Evaluate) -> None:
    """Each action is played round by round through the backend."""
    trace = markov_trace()
    backend = ReplayBackend(trace, MARKOV_COSTS)
    found = result(*files, "--policies", "ar", "--categories", "a")
    requests = trace.requests(trace.where(split="train", categories="a"))
    seconds = {}
    for action in backend.table:
        policy = make_policy(static_spec(action, backend.table))
        seconds[str(action)] = sum(run_request(backend, r, policy).seconds for r in requests)
    assert found["ladder"]["tuned"]["action"] == min(seconds, key=lambda name: seconds[name])
    assert found["meta"]["static_tuned"]["requests"] == len(requests) == 12 and found["meta"]["categories"] == {"a": 6}


def test_categories_and_repeats_have_fractions_of_their_own(files: list[str], result: Evaluate) -> None:
    found = result(*files, "--policies", *LADDER, "--repeats", 2)
    once = result(*files, "--policies", *LADDER)
    for row, single in zip(found["rows"], once["rows"], strict=True):
        assert row["tokens"] == 2 * single["tokens"]
        assert row["oracle_fraction"] == pytest.approx(single["oracle_fraction"], abs=1e-9), "a learner began warm"
    assert found["ladder"]["plain"]["tokens"] == 2 * once["ladder"]["plain"]["tokens"]
    for rows in found["by_category"].values():
        assert rows[-1]["oracle_fraction"] == pytest.approx(1.0) and rows[1]["oracle_fraction"] == pytest.approx(0.0)
    assert found["by_category"]["a"][2]["oracle_fraction"] != found["by_category"]["b"][2]["oracle_fraction"]


def test_two_drafters_and_temperatures(two: list[str], result: Evaluate) -> None:
    specs = ["static:drafter=model,k=4", "static:drafter=ngram,k=4", "static:tuned", "static:tuned", "oracle"]
    found = result(*two, "--policies", *specs)
    assert [row["policy"] for row in found["rows"]] == specs and found["same_text"] is True
    assert found["rows"][0]["seconds"] != found["rows"][1]["seconds"]
    assert found["rows"][2]["action"] == found["rows"][3]["action"] == found["ladder"]["tuned"]["action"]
    assert all(r["seconds"] >= found["rows"][-1]["seconds"] * (1 - 1e-9) for r in found["rows"])
    assert found["meta"]["temperature"] == [0.0, 0.5, 1.0] and found["meta"]["requests"] == 3
    hot = result(*two, "--policies", "ar", "--temperatures", 0.5, 1)
    assert hot["meta"]["temperature"] == [0.5, 1.0] and hot["meta"]["static_tuned"]["requests"] == 4


def test_a_smaller_budget_cuts_and_a_larger_one_is_refused(
    files: list[str], result: Evaluate, capsys: pytest.CaptureFixture[str]
) -> None:
    found = result(*files, "--policies", *LADDER, "--max-new-tokens", 9)
    assert found["meta"]["max_new_tokens"] == 9 and {r["tokens"] for r in found["rows"]} == {found["rows"][0]["tokens"]}
    assert found["rows"][0]["tokens"] <= 12 * 9
    assert found["rows"][-1]["seconds"] == pytest.approx(found["ladder"]["oracle"]["seconds"])
    assert found["rows"][1]["seconds"] == pytest.approx(found["ladder"]["tuned"]["seconds"])
    assert "recorded with 40; a trace can only be cut" in refused([*files, "--max-new-tokens", "41"], capsys)


def ids(found: dict[str, Any]) -> list[str]:
    return [r["id"] for r in found["details"][0]["requests"]]


def test_a_number_of_requests_is_balanced_and_the_live_choice(
    files: list[str], two: list[str], result: Evaluate
) -> None:
    found = result(*files, "--policies", "ar", "--requests", 6, "--seed", 3)
    c = markov_trace().columns
    rows = zip(c["id"].tolist(), c["category"].tolist(), c["split"].tolist(), strict=True)
    held = [Prompt(i, category, "", split) for i, category, split in rows if split == "held-out"]
    assert ids(found) == [p.id for p in select(held, 6, 3)] and found["meta"]["categories"] == {"a": 3, "b": 3}
    everything = result(*files, "--policies", "ar", "--requests", 0)
    assert sorted(ids(everything)) == sorted(p.id for p in held)
    several = result(*two, "--policies", "ar", "--requests", 3, "--split", "all", "--categories", "a")
    assert several["meta"]["temperature"] == [0.0, 0.5, 1.0] and len(set(ids(several))) == 1, "not paired"


def test_a_folder_gives_what_the_file_gives(files: list[str], result: Evaluate, tmp_path: Path) -> None:
    one = result(*files, "--policies", "ar", "assc")
    write_trace(markov_trace(), tmp_path / "folder")
    other = result("--traces", tmp_path / "folder", *files[2:], "--policies", "ar", "assc")
    assert one["rows"] == other["rows"] and one["meta"]["trace"]["sha256"] == other["meta"]["trace"]["sha256"]
    changed = with_splits(markov_trace(), ["held-out", "train"] * 18)
    write_trace(changed, tmp_path / "changed.npz")
    third = result("--traces", tmp_path / "changed.npz", *files[2:], "--policies", "ar")
    assert third["meta"]["trace"]["sha256"] != one["meta"]["trace"]["sha256"]


def test_the_packaged_trace_and_costs_are_the_default(result: Evaluate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eval_replay, "shipped_trace", markov_trace)
    monkeypatch.setattr(eval_replay, "shipped_cost_file", lambda: CostFile(MARKOV_COSTS, pair="p"))
    found = result("--policies", "ar")
    assert found["meta"]["requests"] == 12 and found["meta"]["cost_file"]["pair"] == "p"


def test_rejection_is_approximate_and_says_so(
    tmp_path: Path, result: Evaluate, files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    trace = markov_trace()
    hot = {**trace.columns, "temperature": np.ones(len(trace))}
    write_trace(Trace(replace(trace.header, mode="rejection"), hot), tmp_path / "rejection.npz")
    words = ["--traces", str(tmp_path / "rejection.npz"), *files[2:], "--policies", "oracle", "ar"]
    assert "allow it with --approximate" in refused(words, capsys)
    found = result(*words, "--approximate")
    assert found["same_text"] is None and found["meta"]["approximate"] is True
    assert found["meta"]["mode"] == "rejection" and found["rows"][0]["oracle_fraction"] == pytest.approx(1.0)


def test_without_requests_to_tune_on_the_fraction_is_null(
    files: list[str], result: Evaluate, capsys: pytest.CaptureFixture[str]
) -> None:
    for split in ("train", "all"):
        found = result(*files, "--policies", "ar", "oracle", "--split", split)
        assert found["ladder"]["tuned"] is None and "static_tuned" not in found["meta"]
        assert [row["oracle_fraction"] for row in found["rows"]] == [None, None]
        assert found["ladder"]["oracle"]["speedup"] > found["ladder"]["best_static_per_request"]["speedup"] > 1
        printed = capsys.readouterr().out
        assert "oracle fraction: n/a, there are no requests" in printed and "static:best-per-request" in printed
        said = refused([*files, "--policies", "static:tuned", "--split", split], capsys)
        assert (
            said == f"error: static:tuned is tuned on requests of the split 'train', but --split {split} evaluates them"
        )


def test_a_trace_without_train_requests_cannot_tune(
    tmp_path: Path, files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    write_trace(with_splits(markov_trace(), ["held-out"] * 36), tmp_path / "held.npz")
    words = ["--traces", str(tmp_path / "held.npz"), *files[2:], "--policies", "static:tuned"]
    assert "held.npz has none that fit" in refused(words, capsys)


def test_after_ctrl_c_the_ladder_is_that_of_the_finished_requests() -> None:
    trace = markov_trace()
    backend, flat = ReplayBackend(trace, MARKOV_COSTS), FlatTrace(trace, MARKOV_COSTS)
    rows = trace.where(split="held-out")
    rungs = ladder(flat, trace.where(split="train"), rows, backend.table)
    seen: list[Request] = []

    def stop(done: RequestResult) -> None:
        seen.append(done.request)
        if len(seen) == 3:
            raise KeyboardInterrupt

    policies = [("ar", make_policy("ar"))]
    with pytest.raises(EvaluationInterrupted) as caught:
        evaluate(backend, trace.requests(rows), policies, seed=0, warmup=0, on_request=stop, ladder=rungs)
    found = caught.value.evaluation.to_json()
    assert found["complete"] is False and found["rows"][0]["tokens"] == found["ladder"]["plain"]["tokens"] > 0
    assert found["rows"][0]["seconds"] == pytest.approx(found["ladder"]["plain"]["seconds"])


def test_curves_are_written(files: list[str], result: Evaluate, tmp_path: Path) -> None:
    result(*files, "--policies", "static:tuned", "oracle", "--requests", 2, "--tensorboard", tmp_path / "tb")
    assert sorted(p.name for p in (tmp_path / "tb").iterdir()) == ["comparison", "oracle", "static-tuned"]


def test_costs_of_another_machine_are_told(
    files: list[str], result: Evaluate, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result(*files, "--policies", "ar", "--requests", 2)
    assert "the cost model is of" not in capsys.readouterr().out
    write_costs(CostFile(MARKOV_COSTS, pair="markov", device="cuda"), tmp_path / "gpu.json")
    result(*files[:2], "--cost", tmp_path / "gpu.json", "--policies", "ar", "--requests", 2)
    assert "the cost model is of device cuda instead of none" in capsys.readouterr().out


def test_no_model_library_is_imported(files: list[str], tmp_path: Path) -> None:
    policy = make_policy("bandit:ucb")
    table = ReplayBackend(markov_trace(), MARKOV_COSTS).table
    policy.begin(table)
    saved = save_policy(tmp_path / "policy.zip", policy, table=table)
    words = ["--backend", "replay", *files, "--policies", *LADDER, str(saved), "--json", str(tmp_path / "out.json")]
    code = (
        f"import sys, eval; rc = eval.main({words!r}); "
        "heavy = {'torch', 'transformers', 'gymnasium', 'stable_baselines3', 'assc.live', 'assc.engine'}; "
        "assert not heavy & set(sys.modules), heavy & set(sys.modules); sys.exit(rc)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out.json").read_text())["rows"][-1]["policy"] == str(saved)


# -- refusals --------------------------------------------------------------------------------------------------------


def refused(words: list[str], capsys: pytest.CaptureFixture[str], backend: str = "replay") -> str:
    """The one sentence on standard error; nothing on standard output, exit code 2."""
    capsys.readouterr()
    assert eval_cli.main(["--backend", backend, *words]) == 2
    printed = capsys.readouterr()
    sentences = [line for line in printed.err.splitlines() if line.startswith("error: ")]
    assert printed.out == "" and len(sentences) == 1 and "Traceback" not in printed.err
    return sentences[0]


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        *(
            ([f"--{name}", value], f"--{name} makes no sense with --backend replay: the trace and the cost model")
            for name, value in {
                "pair": "tiny",
                "target": "x",
                "draft": "x",
                "workload": "mixed",
                "device": "cpu",
                "dtype": "float32",
                "threads": "1",
                "mode": "greedy",
                "temperature": "0",
                "time-source": "modelled",
                "k-max": "8",
            }.items()
        ),
        (["--temperatures", "0.3"], "has no temperature 0.3, only 0.0"),
        (["--categories", "c"], "has no category 'c', only 'a', 'b'"),
        (["--requests", "-1"], "--requests is -1"),
        (["--requests", "13"], "only 12 prompts match"),
        (["--max-new-tokens", "0"], "--max-new-tokens is 0"),
        (["--policies", "static:17"], "K_max of this decoder is 16"),
        (["--policies", "static:drafter=hidden,k=4"], "names the drafter 'hidden'"),
        (["--policies", "oracle:4"], "unknown policy 'oracle'"),
        (["--policies", "statik:4"], "unknown policy 'statik'"),
        (["--traces", "none.npz"], "there is no trace at none.npz"),
        (["--cost", "none.json"], "there is no cost model at none.json"),
    ],
)
def test_mistakes_are_one_sentence(
    files: list[str], capsys: pytest.CaptureFixture[str], extra: list[str], said: str
) -> None:
    assert said in refused([*files, *extra], capsys)


def test_costs_that_allow_no_oracle_are_refused(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = replace(MARKOV_COSTS, drafters={**MARKOV_COSTS.drafters, "model": DrafterCost(0.001, per_catch_up=0.01)})
    write_costs(CostFile(odd), tmp_path / "odd.json")
    assert "allows no oracle" in refused([*files[:2], "--cost", str(tmp_path / "odd.json")], capsys)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--policies", "ar", "oracle"], "the oracle needs a recorded trace"),
        (["--traces", "x.npz"], "--traces makes no sense with --backend live: it is for --backend replay"),
        (["--cost", "x.json"], "there is no cost model at x.json"),
        (["--temperatures", "0"], "--temperatures makes no sense with --backend live"),
        (["--approximate"], "--approximate makes no sense with --backend live"),
        (["--policies", "static:tuned", "--split", "all"], "but --split all evaluates them"),
    ],
)
def test_live_refuses_what_needs_a_trace(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in refused(["--pair", "tiny", *words], capsys, backend="live")


def test_each_backend_has_its_own_defaults() -> None:
    assert Config().live == LiveOptions() and Config().replay == ReplayOptions()
    given = Config(requests=0, warmup=0, approximate=True, threads=2)
    assert (given.live.requests, given.live.warmup, given.live.threads) == (0, 0, 2) and given.replay.approximate


# -- live ------------------------------------------------------------------------------------------------------------


def test_static_tuned_live_is_tuned_on_train_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = [{"id": f"q{i}", "prompt": f"tell {i} tell {i}", "split": ["held-out", "train"][i % 2]} for i in range(4)]
    (tmp_path / "w.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))
    out = tmp_path / "out.json"
    words = ["--pair", "tiny", "--workload", tmp_path / "w.jsonl", "--requests", 2, "--max-new-tokens", 8, "--k-max", 4]
    words += ["--policies", "static:tuned", "ar", "--time-source", "modelled", "--json", out]
    assert eval_cli.main([str(w) for w in words]) == 0
    found = json.loads(out.read_text())
    tuned, plain = found["rows"]
    assert tuned["policy"] == "static:tuned" and tuned["action"] == found["meta"]["static_tuned"]["action"]
    assert found["meta"]["static_tuned"]["requests"] == 2 and found["ladder"] is None
    assert tuned["oracle_fraction"] is plain["oracle_fraction"] is None and plain["time_source"] == "modelled"
    assert "oracle fraction" not in capsys.readouterr().out
