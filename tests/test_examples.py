"""The scripts in examples/ run as they stand."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from assc import registry

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_every_example_is_run_here() -> None:
    assert {p.stem for p in EXAMPLES.glob("*.py")} == {"record_train_evaluate", "own_policy"}


def test_record_train_evaluate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["record_train_evaluate.py", str(tmp_path / "example")])
    runpy.run_path(str(EXAMPLES / "record_train_evaluate.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("oracle ")
    assert (tmp_path / "example" / "run" / "policy.zip").is_file()


def test_own_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["own_policy.py", "--requests", "8", "--max-new-tokens", "24", "--json", str(tmp_path / "out.json")]
    monkeypatch.setattr(sys, "argv", words)
    registry.load_plugins()
    monkeypatch.setattr(registry, "_factories", dict(registry._factories))  # "sure" is gone afterwards
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(EXAMPLES / "own_policy.py"), run_name="__main__")
    assert stop.value.code == 0
    assert "sure:bar=0.8,most=3" in capsys.readouterr().out
    assert (tmp_path / "out.json").is_file()
