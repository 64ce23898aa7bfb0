"""docs/faults.md: every id has one line, and every test named there exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "faults.md"

IDS = {
    "T": "01 02 03 04 05 06 07 08 09 10 11 12 13 14 15 16 17 18 19 21 22 23 24 25",
    "V": "01 03 04 05 06 08 09 11 12 13 14 15 16 17 18 19 20 22 23 24 25 26 27 28",
    "S": "02 03 04 05 06",
    "L": "02 03 04 05 06 07 08 09",
    "E": "02 03 04 05 06 07 08",
    "X": "02 04 05",
    "B": "01 02 04 05 06 07 08 09 10 11 12 13 14 15 16 17",
    "G": "01 02 04 05 06 07",
    "K": "01 02 03",
}
"""the numbers are those of the list that the faults were collected in; it has gaps"""


def lines() -> list[tuple[str, str, str]]:
    """(id, fault, tests or reason) of every line of the tables."""
    rows = re.findall(r"^\| ([A-Z]\d\d) \| (.*?) \| (.*?) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return [(str(a), str(b), str(c)) for a, b, c in rows]


def existing() -> set[str]:
    """Names of all test functions of this directory, read without importing them."""
    return {
        node.name
        for path in TESTS.glob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_every_id_has_exactly_one_line() -> None:
    assert [row[0] for row in lines()] == [letter + n for letter, numbers in IDS.items() for n in numbers.split()]


def test_every_line_names_tests_that_exist_or_gives_a_reason() -> None:
    known = existing()
    for name, fault, rest in lines():
        tests = re.findall(r"`(test_\w+)`", rest)
        missing = [test for test in tests if test not in known]
        assert not missing, f"{name} names tests that do not exist: {missing}"
        assert fault and (tests or len(rest) > 20), f"{name} has neither a test nor a reason"


def test_an_id_can_be_run_by_its_name() -> None:
    """`pytest -k T03` finds something for every line that names tests."""
    for name, _, rest in lines():
        tests = re.findall(r"`(test_\w+)`", rest)
        if tests:
            assert any(f"_{name.lower()}_" in f"_{test.lower()}_" for test in tests), f"no test is named after {name}"
