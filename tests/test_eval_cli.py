"""eval.py as a user meets it: the files it writes, its refusals, and Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

import eval as eval_cli
from assc.actions import ActionTable
from assc.metrics import ROW_KEYS
from assc.registry import make_policy
from policies.artefact import save_policy

ROOT = Path(eval_cli.__file__).parent
PROMPTS = [
    {"id": f"{category}{i}", "category": category, "prompt": f"tell {i} of {category}, tell {i}", "split": split}
    for category in ("a", "b")
    for i, split in enumerate(["held-out", "held-out", "train"])
]


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    return path


def words(workload: Path, *more: object) -> list[str]:
    """A short evaluation of the tiny pair; later words win."""
    small = ["--pair", "tiny", "--workload", workload, "--requests", "2", "--max-new-tokens", "8", "--k-max", "8"]
    return [str(word) for word in (*small, *more)]


def test_explain_alone_evaluates_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert eval_cli.main(["--explain"]) == 0
    printed = capsys.readouterr().out
    assert "speedup" in printed and "acceptance_rate" in printed and "same text" not in printed


def test_results_table_json_markdown_and_curves(
    workload: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, curves = tmp_path / "results" / "out.json", tmp_path / "tb"
    files = ["--json", out, "--markdown", tmp_path / "out.md", "--tensorboard", curves]
    policies = ["--policies", "static:4", "ar", "static:4"]
    assert eval_cli.main(words(workload, *policies, "--requests", 3, *files, "--explain")) == 0
    result = json.loads(out.read_text())
    assert [row["policy"] for row in result["rows"]] == ["static:4", "ar", "static:4"]
    assert all(tuple(row) == ROW_KEYS for row in result["rows"]) and result["same_text"] is True
    assert result["rows"][0]["tokens"] == result["rows"][1]["tokens"] > 0
    meta = result["meta"]
    expected = {"pair": "tiny", "backend": "live", "mode": "greedy", "seed": 0, "requests": 3, "split": "held-out"}
    assert expected.items() <= meta.items() and meta["workload"] == str(workload) and len(meta["workload_hash"]) == 16
    assert {"device", "dtype", "threads", "c", "versions", "time_source"} <= set(meta)
    for detail in result["details"]:
        assert detail["phase_gap"] < 0.05  # E06
    printed = capsys.readouterr()
    assert "static:4" in printed.out and "tokens_per_round:" in printed.out and "same text: yes" in printed.out
    tables = (tmp_path / "out.md").read_text().split("\n\n")
    assert tables[0].count("\n") == 4 and "same text: yes" in tables[-1] and "time check" in tables[-1]
    assert sorted(p.name for p in curves.iterdir()) == ["ar", "comparison", "static-4", "static-4-2"]


def test_modelled_time_repeats_and_sampling(workload: Path, tmp_path: Path) -> None:
    for mode, same in (("gumbel", True), ("rejection", None)):
        out = tmp_path / f"{mode}.json"
        extra = ["--mode", mode, "--time-source", "modelled", "--repeats", 2, "--temperature", "0.7", "--json", out]
        assert eval_cli.main(words(workload, "--policies", "static:2", "--split", "all", *extra)) == 0
        result = json.loads(out.read_text())
        assert result["same_text"] is same and result["meta"]["temperature"] == 0.7
        detail = result["details"][0]
        assert result["meta"]["time_source"] == "modelled" and detail["unexplained_share"] is None
        if same:  # the same text, priced by the same model, costs the same every time
            assert detail["speedup_by_repeat"][0] == pytest.approx(detail["speedup_by_repeat"][1])


def refused(argv: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one sentence on standard error; nothing on standard output, exit code 2."""
    assert eval_cli.main(argv) == 2
    printed = capsys.readouterr()
    sentences = [line for line in printed.err.splitlines() if line.startswith("error: ")]
    assert printed.out == "" and len(sentences) == 1 and "Traceback" not in printed.err
    return sentences[0]


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (["--policies", "ar", "statik:4"], "unknown policy 'statik'"),
        (["--policies", "static:"], "ends with a separator"),
        (["--policies", "static"], "needs k"),
        (["--policies", "static:four"], "not a valid int"),
        (["--policies", "runs/none/policy.zip"], "runs/none/policy.zip"),
        (["--max-new-tokens", "-5"], "--max-new-tokens is -5"),
        (["--max-new-tokens", "0"], "--max-new-tokens is 0"),
        (["--max-new-tokens", "many"], "max-new-tokens"),
        (["--requests", "0"], "number of requests is 0"),
        (["--requests", "-3"], "number of requests is -3"),
        (["--requests", "99"], "only 4 prompts match"),
        (["--seed", "-1"], "--seed and --warmup are 0 or more"),
        (["--repeats", "0"], "--repeats is 1 or more"),
        (["--k-max", "0"], "K_max is 0"),
        (["--policies", "static:9"], "K_max of this decoder is 8"),
        (["--temperature", "0.5"], "--mode greedy takes no --temperature"),
        (["--temperature", "nan", "--mode", "gumbel"], "--temperature is nan"),
        (["--mode", "typical"], "typical"),
        (["--backend", "remote"], "remote"),
        (["--pair", "no-such-pair"], "no-such-pair"),
        (["--device", "abacus"], "abacus"),
        (["--dtype", "float7"], "float7"),
        (["--threads", "0"], "threads is 1 or more"),
        (["--categories", "poems"], "unknown category 'poems'"),
        (["--workload", "mixd"], "no workload 'mixd'"),
        (["--polcies", "ar"], "--polcies"),
        (["--json", "/dev/null/out.json"], "cannot write '/dev/null/out.json'"),
    ],
)
def test_mistakes_are_one_sentence(
    workload: Path, capsys: pytest.CaptureFixture[str], extra: list[str], said: str
) -> None:
    assert said in refused(words(workload, *extra), capsys)


def test_a_bad_line_of_the_workload_is_named(workload: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with workload.open("a") as file:
        file.write('{"prompt": ""}\n')
    assert "line 7 has an empty prompt" in refused(words(workload), capsys)


def test_a_split_without_prompts_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    only = tmp_path / "train.jsonl"
    only.write_text('{"prompt": "x", "split": "train"}\n')
    assert "--split all takes every one" in refused(words(only), capsys)


def test_a_policy_of_another_action_table_is_refused(
    workload: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for table in (ActionTable.build(["ngram"], [2, 16]), ActionTable.build(["other"], [2])):
        policy = make_policy("bandit:ucb")
        policy.begin(table)
        path = save_policy(tmp_path / "policy.zip", policy, table=table)
        sentence = refused(words(workload, "--policies", path), capsys)
        assert "this decoder plays" in sentence and "policy.zip" in sentence


def test_help_lists_the_options_without_loading_torch() -> None:
    code = "import sys, eval; rc = eval.main(['--help']); assert 'torch' not in sys.modules; sys.exit(rc)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    for option in ("--policies", "--pair", "--workload", "--time-source", "--tensorboard", "--json", "--explain"):
        assert option in done.stdout


def points(directory: Path) -> list[int]:
    """Steps of the speed-up curve that can be read now."""
    reader: Any = EventAccumulator(str(directory))
    reader.Reload()
    tag = "over_requests/speedup"
    return [e.step for e in reader.Scalars(tag)] if tag in reader.Tags()["scalars"] else []


def test_k03_ctrl_c_writes_what_is_finished_and_exits_130(workload: Path, tmp_path: Path) -> None:
    """K03: after SIGINT the JSON holds the finished requests, the curves are readable, and the exit code is 130."""
    out, curves = tmp_path / "out.json", tmp_path / "tb"
    long = words(workload, "--policies", "static:2", "--repeats", 10_000, "--json", out, "--tensorboard", curves)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "eval.py", *long], cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + 240
        while not ((curves / "static-2").is_dir() and len(points(curves / "static-2")) >= 2):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130 and "Traceback" not in stderr and "INCOMPLETE" in stdout
    result = json.loads(out.read_text())
    finished = result["details"][0]["requests"]
    assert result["complete"] is False and len(finished) >= 2
    assert result["rows"][0]["tokens"] == sum(r["tokens"] for r in finished)
    assert points(curves / "static-2") == list(range(1, len(finished) + 1))
