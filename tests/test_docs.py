"""What the documentation tells a reader to type is run here, at a small size and on the tiny pair."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
import textwrap
from pathlib import Path

import pytest
from tiny_traces import COSTS, tiny_trace

import eval as eval_script
import train_policy
from assc import __main__ as module_main
from assc import registry, seed_table
from assc.costs_io import CostFile, write_costs
from assc.drafters import base as drafters
from assc.markov import MARKOV_COSTS, MarkovSource, markov_requests
from assc.trace_io import write_trace

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
BY_CI = ("pip install", "pytest", "tensorboard ")
"""parts of commands that `.ci/run` runs (the tests themselves, installation), or that start a server"""
SMALL: dict[str, dict[str, str | None]] = {
    "eval": {"--pair": "tiny", "--requests": "2", "--max-new-tokens": "8", "--json": None, "--tensorboard": None},
    "drafts": {"--pair": "tiny", "--requests": "2", "--max-new-tokens": "8", "--json": None},
    "replay": {"--traces": "trace.npz", "--cost": "costs.json", "--json": None, "--tensorboard": None},
    "train": {"--total-timesteps": "64", "--eval-requests": "3", "--live-requests": "0"},
    "train live": {"--pair": "tiny", "--total-timesteps": "32", "--eval-requests": "1", "--max-new-tokens": "8"}
    | {"--eval-max-new-tokens": "8"},
    "drift": {"--seeds": "1", "--tokens": "60", "--segments": "2", "--window": "10", "--json": None, "--svg": None},
    "live-check": {"--pair": "tiny", "--requests": "1", "--traces": "tiny.npz", "--cost": "tiny.json", "--json": None},
}


def commands() -> list[tuple[str, str]]:
    """(page, one command) of every fenced shell block; a command that several pages name is run once."""
    found: dict[str, str] = {}
    for page in PAGES:
        for block in re.findall(r"```(?:bash|sh|console)\n(.*?)```", page.read_text(encoding="utf-8"), re.S):
            joined = block.replace("\\\n", " ")
            for line in joined.splitlines():
                line = line.strip().removeprefix("$ ")
                if line and not line.startswith("#"):
                    for part in line.split("&&"):
                        found.setdefault(part.strip(), page.name)
    return [(page, command) for command, page in found.items()]


def shrink(words: list[str], changes: dict[str, str | None]) -> list[str]:
    """Replace the values of options, add those that are missing; None only redirects an option that is there."""
    words = list(words)
    for option, value in changes.items():
        if option in words:
            at = words.index(option) + 1
            words[at] = value if value is not None else Path(words[at]).name
        elif value is not None:
            words += [option, value]
    return words


def without_models(words: list[str]) -> list[str]:
    """Any pair: the tiny one stands in for the models that are named."""
    kept = list(words)
    for option in ("--target", "--draft"):
        if option in kept:
            at = kept.index(option)
            following = (i for i in range(at + 1, len(kept)) if kept[i].startswith("--"))
            del kept[at : next(following, len(kept))]
    return kept


def write_small_trace() -> None:
    """A synthetic trace and its costs in the working directory, where `SMALL["replay"]` finds them."""
    write_trace(MarkovSource().trace(markov_requests(9, max_new_tokens=16)), Path("trace.npz"))
    write_costs(CostFile(MARKOV_COSTS), Path("costs.json"))


def write_small_result() -> None:
    """An evaluation of the synthetic trace as `out.json` in the working directory."""
    write_small_trace()
    words = "--backend replay --traces trace.npz --cost costs.json --policies ar assc oracle --rounds 1 --json out.json"
    assert eval_script.main(words.split()) == 0


def run(command: str) -> int:
    words = shlex.split(command)
    if words[:2] == ["python", "eval.py"]:
        replay = "replay" in words
        if replay:
            write_small_trace()
        arguments = shrink(words[2:], SMALL["replay" if replay else "eval"])
        if "--preset" in words and not replay:
            write_small_trace()
            arguments += ["--traces", "trace.npz"]
        kept = [w for w in arguments if not w.endswith(".zip")]
        return eval_script.main(without_models(kept))
    if words[:2] == ["python", "train_policy.py"]:
        if "--resume" in words:
            pytest.skip("resuming is tested in test_training.py")
        if "--seeds" in words or "--sweep" in words:
            pytest.skip("seeds and sweeps are run by test_many_runs.py")
        if "live" in words:
            return train_policy.main(shrink(words[2:], SMALL["train live"]))
        files: dict[str, str | None] = {}
        if words[2:] and "accept_stop" not in words:  # these play on the packaged trace
            write_small_trace()
            files = {"--traces": "trace.npz", "--cost": "costs.json"}
        return train_policy.main(shrink(words[2:], {**SMALL["train"], **files}))
    if words[:4] == ["python", "-m", "assc", "live-check"]:
        write_trace(tiny_trace(), Path("tiny.npz"))
        write_costs(CostFile(COSTS), Path("tiny.json"))
        return module_main.main(shrink(words[3:], SMALL["live-check"]))
    if words[:4] == ["python", "-m", "assc", "drafts"]:
        return module_main.main(without_models(shrink(words[3:], SMALL["drafts"])))
    if words[:4] == ["python", "-m", "assc", "drift"]:
        return module_main.main(shrink(words[3:], SMALL["drift"]))
    if words[:4] == ["python", "-m", "assc", "report"]:
        write_small_result()
        files = [Path(w).name if w.endswith((".json", ".html")) else w for w in words[3:] if not w.startswith("runs/")]
        return module_main.main(files)
    if words[:4] == ["python", "-m", "assc", "calibrate"]:
        assert module_main.main(words[3:]) in (0, 1), "1: a check on a busy machine need not pass"
        return 0
    if words[:4] == ["python", "-m", "assc", "rerun"]:
        write_small_trace()
        small = "--backend replay --traces trace.npz --cost costs.json --policies ar assc --run-dir"
        assert eval_script.main([*small.split(), words[4]]) == 0
        return module_main.main(words[3:])
    if words[:3] == ["python", "-m", "assc"]:
        return module_main.main(words[3:])
    raise AssertionError(f"no test runs the documented command {command!r}")


@pytest.mark.parametrize(("page", "command"), commands(), ids=lambda value: value[:60])
def test_documented_command_runs(
    page: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if command.startswith(BY_CI):
        pytest.skip("run by .ci/run, or a server")
    if re.match(r"(python )?benchmarks/", command) or " benchmarks/" in command:
        script = next(w for w in shlex.split(command) if "benchmarks/" in w)
        assert (ROOT / script).is_file()
        pytest.skip("a benchmark: it measures, which is no test's business")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(seed_table, "SYNTHETIC_REQUESTS", 20)
    assert run(command) == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("page", ["docs/extend.md", "docs/engines.md"])
def test_the_python_blocks_of_a_page_run(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafters, "_kinds", dict(drafters._kinds))  # "repeat" is gone afterwards
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.S)
    assert blocks
    for block in blocks:
        exec(compile(block, page, "exec"), {"__name__": page})


def test_the_chinese_readme_keeps_in_step() -> None:
    """The same commands and code, in the same order."""
    english, chinese = (
        re.findall(r"```(\w+)\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), re.S)
        for name in ("README.md", "README.zh.md")
    )
    assert english == chinese


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    assert [p.name for p in (ROOT / "docs").glob("*.md") if p.name != "README.md" and f"({p.name})" not in index] == []


def test_the_readme_python_block_runs(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("backend", ["replay", "live"])
def test_a_policy_in_one_file_as_documented(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "add-a-policy.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", page, re.S)
    (tmp_path / "mine.py").write_text(textwrap.dedent(block), encoding="utf-8")
    replay, live = (c.split() for c in re.findall(r"`python (mine\.py [^`]*)`", page))
    words = [*(replay if backend == "replay" else live), "--requests", "2", "--max-new-tokens", "16"]
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "argv", words)
    registry.load_plugins()
    monkeypatch.setattr(registry, "_factories", dict(registry._factories))  # "mine" is gone afterwards
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(tmp_path / "mine.py"), run_name="__main__")
    assert stop.value.code == 0
    assert "mine:4" in capsys.readouterr().out


def test_the_export_of_the_docs_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", page, re.S)
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "policies.md", "exec"), {})
    assert (tmp_path / "policy.zip").is_file()


def test_links_between_pages_lead_somewhere() -> None:
    for page in [*PAGES, ROOT / "README.zh.md"]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
