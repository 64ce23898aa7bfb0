"""A public trace end to end: import, computed costs, training, evaluation, report, as docs/traces.md tells it."""

from __future__ import annotations

import json
from pathlib import Path

import public_trace
import pytest

import eval as eval_script
import train_policy
from assc import __main__ as module_main
from assc.costs_io import read_costs
from assc.errors import RequestError, TraceError
from assc.registry import make_policy
from assc.replay import ReplayBackend
from assc.roofline import read_drafters
from assc.run import run_request
from assc.shipped import shipped_costs
from assc.trace_io import read_trace

PAGE = Path(__file__).parent.parent / "docs" / "traces.md"
COMMANDS = [
    line.strip()
    for line in PAGE.read_text(encoding="utf-8").split("## Public traces")[1].splitlines()
    if line.startswith("    python ")
]
"""what the page says to type, in order"""


def run(command: str, *more: str) -> int:
    words = [*command.split()[1:], *more]
    mains = {"train_policy.py": train_policy.main, "eval.py": eval_script.main}
    return mains[words[0]](words[1:]) if words[0] in mains else module_main.main(words[2:])


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with public.jsonl, public.npz and costs.json; the working directory."""
    monkeypatch.chdir(tmp_path)
    public_trace.write(Path("public.jsonl"), requests=24, tokens=40)
    assert run(COMMANDS[0]) == run(COMMANDS[1]) == 0
    return tmp_path


def test_import_train_and_evaluate(imported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--traces", "public.npz", "--cost", "costs.json"]
    assert run(COMMANDS[2], "--total-timesteps", "64") == 0
    out = capsys.readouterr().out
    assert "pair imported" in out and "Live check" not in out and "no live check" in out
    assert run(COMMANDS[3], "--rounds", "1") == 0
    assert len(COMMANDS) == 4
    assert "the cost model was computed, not measured" in capsys.readouterr().out
    result = json.loads(Path("out.json").read_text(encoding="utf-8"))
    speed = {row["policy"]: row["speedup"] for row in result["rows"]}
    assert result["meta"]["cost_file"]["device"] == "h100"
    assert speed["oracle"] == max(speed.values()) and speed["assc"] > 1
    assert module_main.main(["report", "out.json", "runs/public", "--out", "report.html"]) == 0
    assert module_main.main(["live-check", "--policy", "assc", *common]) == 2
    assert train_policy.main([*common, "--total-timesteps", "64", "--live-check"]) == 2
    assert "imported" in capsys.readouterr().err


def test_an_import_says_where_k_max_is_beyond_what_was_accepted(
    imported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    longest = max(int(read_trace("public.npz").columns[f"acc/{d}"].max()) for d in ("eagle", "suffix"))
    for k_max, told in ((longest + 8, True), (longest, False)):
        capsys.readouterr()
        assert module_main.main(f"trace import public.jsonl --out again.npz --k-max {k_max}".split()) == 0
        assert (f"give --k-max {longest}:" in capsys.readouterr().out) is told


def test_rounds_emit_what_the_file_says(imported: Path) -> None:
    """acc_len counts the bonus token: with K above all lengths a round emits just that many tokens."""
    line = json.loads((imported / "public.jsonl").read_text(encoding="utf-8").splitlines()[5])
    trace = read_trace("public.npz")
    backend = ReplayBackend(trace, read_costs("costs.json").model)
    (row,) = (r for r in range(len(trace)) if trace.columns["id"][r] == line["id"])
    for drafter in ("eagle", "suffix"):
        episode = run_request(backend, trace.request(row), make_policy(f"static:drafter={drafter},k=16"))
        at = 0
        for record in episode.rounds:
            assert record.emitted == line[f"acc_{drafter}"]["acc_len"][at]
            at += record.emitted
        assert episode.tokens == tuple(line["generated_token_ids"])


def test_costs_without_the_drafters_say_how_to_make_them(imported: Path) -> None:
    with pytest.raises(TraceError, match=r"no drafter 'eagle'.*roofline --drafters"):
        ReplayBackend(read_trace("public.npz"), shipped_costs())


def test_lines_of_one_prompt_share_a_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ids, so that a text at another seed cannot be trained on and evaluated too."""
    monkeypatch.chdir(tmp_path)
    lines = [
        {"prompt_token_ids": [n, n + 1], "generated_token_ids": [1, 2], "acc_ngram.acc_len": [1, 1]}
        for n in range(12)
        for _ in range(3)
    ]
    Path("x.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    assert module_main.main("trace import x.jsonl --out x.npz".split()) == 0
    splits = read_trace("x.npz").columns["split"].tolist()
    assert {tuple(splits[i : i + 3]) for i in range(0, 36, 3)} == {("train",) * 3, ("held-out",) * 3}


@pytest.mark.parametrize("word", ["eagle", "=lookup", "eagle=big", "eagle=0", "eagle=nan", "eagle=inf"])
def test_drafters_of_a_roofline_that_cannot_be_read(word: str) -> None:
    with pytest.raises(RequestError, match="NAME=PARAMETERS or NAME=lookup"):
        read_drafters([word])


def test_a_profile_and_its_numbers_contradict(capsys: pytest.CaptureFixture[str]) -> None:
    assert module_main.main("roofline --profile llama-8b-1b-h100 --count 4".split()) == 2
    assert "--profile llama-8b-1b-h100 decides --count" in capsys.readouterr().err
