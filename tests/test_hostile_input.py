"""What a careless or hostile user hands over ends in one sentence and exit code 2, early, and nothing is lost."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import eval as eval_script
import train_policy
from assc import __main__ as module_main
from assc.cli import run_cli
from assc.costs_io import CostFile, read_costs, write_costs
from assc.errors import AsscError, TraceError
from assc.files import only_run
from assc.markov import MARKOV_COSTS
from assc.trace_io import read_trace

GOOD = {"prompt_token_ids": [1, 2], "generated_token_ids": [3, 4], "acc_ngram": {"acc_len": [2, 1]}}


def refused(capsys: pytest.CaptureFixture[str], code: int) -> str:
    """The one sentence of a refusal."""
    err = capsys.readouterr().err
    assert code == 2
    assert "Traceback" not in err
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    return line


@pytest.mark.parametrize(
    ("words", "work", "told"),
    [
        ("record --pair tiny --out {new}", "assc.record.record", "finished shards are kept in {new}: add --resume"),
        ("distill --pair tiny --out {new}", "assc.distill.command.distill", "is kept in {new}: add --resume to go on"),
        ("calibrate --pair tiny", "assc.calibrate_cli.calibrate_pair", "nothing was written"),
        ("drafts --pair tiny --json {new}", "assc.drafts_cli.report", "nothing was written"),
        ("drift --scenario temperature", "assc.drift.command.study", "nothing was written"),
    ],
)
def test_ctrl_c_says_what_was_kept(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: str,
    work: str,
    told: str,
) -> None:
    def ctrl_c(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    importlib.import_module(work.rpartition(".")[0])
    monkeypatch.setattr(work, ctrl_c)
    new = tmp_path / "new"
    assert module_main.main(words.format(new=new).split()) == 130
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("stopped") and told.format(new=new) in line and not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"generated_token_ids": [3_000_000_000]}, "generated_token_ids that is no list of whole numbers"),
        ({"generated_token_ids": [1.5, 2]}, "generated_token_ids that is no list"),
        ({"generated_token_ids": []}, "at least one prompt and one generated token"),
        ({"prompt_token_ids": [-1]}, "prompt_token_ids that is no list"),
        ({"prompt_token_ids": [True]}, "prompt_token_ids that is no list"),
        ({"prompt_token_ids": "abc"}, "prompt_token_ids that is no list"),
        ({"acc_ngram": {"acc_len": [10**20, 1]}}, "acc_ngram.acc_len that is no list"),
        ({"acc_ngram": {"acc_len": [float("nan"), 1]}}, "acc_ngram.acc_len that is no list"),
        ({"acc_ngram": {"acc_len": [1, 1, 1]}}, "3 accepted lengths of 'ngram' for 2 tokens"),
        ({"acc_ngram": {}}, "lacks 'acc_len'"),
        ({"acc_": {"acc_len": [1]}}, "acc_ without the name"),
        ({"split": "dev"}, "split 'dev', allowed are draft, train, held-out"),
        (None, "is no JSON object"),
    ],
)
def test_bad_lines_of_an_import(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, object] | None, words: str
) -> None:
    lines = [GOOD, [1, 2] if change is None else {**GOOD, **change}]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    out = tmp_path / "x.npz"
    sentence = refused(capsys, module_main.main(["trace", "import", str(tmp_path / "x.jsonl"), "--out", str(out)]))
    assert "line 2" in sentence and words in sentence
    assert not out.exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--temperature", "nan"], "temperature is nan"),
        (["--temperature", "-1"], "temperature is -1"),
        (["--temperature", "0.7"], "mode greedy has temperature 0"),
        (["--k-max", "1000"], "K_max is 1000"),
    ],
)
def test_bad_options_of_an_import(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    (tmp_path / "x.jsonl").write_text(json.dumps(GOOD), encoding="utf-8")
    words_ = ["trace", "import", str(tmp_path / "x.jsonl"), "--out", str(tmp_path / "x.npz"), *options]
    assert words in refused(capsys, module_main.main(words_))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, "a", None, True])
@pytest.mark.parametrize("place", ["target_fixed", "overhead", "per_step"])
def test_numbers_of_a_cost_model_are_finite(tmp_path: Path, value: object, place: str) -> None:
    """A NaN would spread into every number of the table without a word."""
    path = tmp_path / "costs.json"
    write_costs(CostFile(MARKOV_COSTS), path)
    data = json.loads(path.read_text(encoding="utf-8"))
    first = next(iter(data["model"]["drafters"].values()))
    (first if place == "per_step" else data["model"])[place] = value
    path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(TraceError, match=f"{place} is "):
        read_costs(path)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("record --pair tiny --out {file}", "cannot write"),
        ("record --pair tiny --out {file}/x", "cannot write"),
        ("distill --pair tiny --out {file}", "cannot write"),
        ("distill --pair tiny --out {new} --steps 0", "--steps is 0"),
        ("distill --pair tiny --out {new} --rows 0", "--rows is 0"),
        ("distill --pair tiny --out {new} --learning-rate nan", "--learning-rate is nan"),
        ("distill --pair tiny --out {new} --text {new}/none.txt", "there is no text file"),
        ("live-check --policy assc --threads 0", "threads is 1 or more"),
        ("calibrate --pair tiny --k-max 100000", "K_max is 100000"),
        ("roofline --target nan", "--target"),
    ],
)
def test_mistakes_are_told_before_any_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: str, told: str
) -> None:
    def unexpected(*_: object, **__: object) -> None:
        raise AssertionError("a model is loaded")

    monkeypatch.setattr("assc.pairs.load_pair", unexpected)
    monkeypatch.setattr("assc.distill.command.load_pair", unexpected)
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    words = words.format(file=tmp_path / "file", new=tmp_path / "new")
    assert told in refused(capsys, module_main.main(words.split()))
    assert (tmp_path / "file").read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--seed 99999999999999999999", "--seed is"),
        ("--k-max 100000 --backend live", "K_max is 100000"),
        ("--threads 9999999", "threads is"),
    ],
)
def test_huge_numbers_of_a_training_run(capsys: pytest.CaptureFixture[str], words: str, told: str) -> None:
    assert told in refused(capsys, train_policy.main(words.split()))


def test_huge_numbers_of_an_evaluation(capsys: pytest.CaptureFixture[str]) -> None:
    assert "K_max is 1000000" in refused(capsys, eval_script.main("--pair tiny --k-max 1000000".split()))
    assert "threads" in refused(capsys, eval_script.main("--pair tiny --threads 1000000".split()))


def test_a_full_disk_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    def full() -> int:
        raise OSError(28, "No space left on device", "runs/x/policy.zip")

    assert refused(capsys, run_cli(full)) == "error: No space left on device 'runs/x/policy.zip'"
    with pytest.raises(OSError, match="ours"):  # without a number it is not the system's, so a fault of the program
        run_cli(lambda: (_ for _ in ()).throw(OSError("ours")))


def test_a_folder_takes_one_run_at_a_time(tmp_path: Path) -> None:
    """The lock is between processes and ends with its holder, even when that is killed."""
    hold = (
        "import sys, time; from pathlib import Path; from assc.files import only_run\n"
        "with only_run(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", hold, str(tmp_path)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(AsscError, match="another run is writing"), only_run(tmp_path):
            pass
        holder.kill()
    with only_run(tmp_path):
        assert list(tmp_path.iterdir()) == []


def test_a_closed_pipe_loses_no_file(tmp_path: Path) -> None:
    """`roofline --out costs.json | head -0`: the file is there although nobody reads the table."""
    reader, writer = os.pipe()
    os.close(reader)
    out = tmp_path / "costs.json"
    words = [sys.executable, "-m", "assc", "roofline", "--out", str(out)]
    assert subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, timeout=120).stderr == b""
    os.close(writer)
    assert read_costs(out).time_source == "modelled"


def test_an_import_of_odd_names_is_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = {**GOOD, "acc_a/b": [1, 1], "id": None, "category": 5}
    del line["acc_ngram"]
    (tmp_path / "x.jsonl").write_bytes(b"\xef\xbb\xbf" + json.dumps(line).encode())
    assert module_main.main(["trace", "import", str(tmp_path / "x.jsonl"), "--out", str(tmp_path / "x.npz")]) == 0
    assert read_trace(tmp_path / "x.npz").drafters == ("a/b",)
