"""The leakage guard of `python -m assc drift`: what a policy learned from beforehand is not among what it plays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from assc.core import Request
from assc.drift.scenarios import Choice, Scenario
from assc.leakage import TrainedOn, check_leaks, draft_leaks, leaked_counts, policy_leaks, told
from assc.policy_files import saved_spec
from assc.registry import make_policy

Run = tuple[str, str, int]
"""(label, spec, train requests of a warm start)"""
LEAKED = "LEAKED: that many of the requests were trained on, so these rows hold for no others"


@dataclass(frozen=True)
class _Learned:
    """Stands for a policy before it is made: what it will have learned from."""

    trained_on: TrainedOn | None


@dataclass(frozen=True)
class Guarded:
    """`leaked`: label -> requests it has learned from, where that is allowed; `told` is for the result file."""

    leaked: dict[str, int]
    told: dict[str, Any]
    notes: tuple[str, ...]
    """sentences for the reader of the table"""


def warm_rows(choice: Choice, requests: int) -> list[int]:
    """The rows of the trace that a warm start of so many requests learns from: each once, before any is repeated."""
    rows = choice.trace.where(split="train")
    return [rows[i % len(rows)] for i in range(requests)]


def _learned(run: Run, choice: Choice) -> list[tuple[str, _Learned]]:
    """Label and what it learned from: when it was saved, and in a warm start."""
    label, spec, warm = run
    found = [(label, _Learned(getattr(make_policy(spec), "trained_on", None)))]
    if warm:
        start = choice.trace.requests(warm_rows(choice, warm))
        found.append((label, _Learned(TrainedOn.of(start, choice.trace.header.workload_hash))))
    return found


def shown_label(row: Mapping[str, Any]) -> str:
    """The name of a result's row, with the mark of one that learned from what it plays."""
    leaked = row["leaked_requests"]
    return f"{row['label']} [LEAKED {leaked}]" if leaked else str(row["label"])


def guarded(runs: Sequence[Run], scenario: Scenario, choice: Choice, *, allowed: bool) -> Guarded:
    """Look through all requests of the regimes. Raises `LeakageError` for an overlap, unless that is `allowed`."""
    played: dict[int, Request] = {}
    for regime in scenario.regimes:
        played |= zip(regime.rows, regime.trace.requests(regime.rows), strict=True)
    requests, header = list(played.values()), choice.trace.header
    policies = [one for run in runs for one in _learned(run, choice)]
    splits = choice.trace.columns["split"]
    kinds = {d.name: d.kind for d in header.drafters}
    drafts = draft_leaks(requests, [splits[row] == "draft" for row in played], kinds)
    leaks = [*policy_leaks(policies, requests, header.workload_hash), *drafts]
    check_leaks(leaks, allowed=allowed)
    leaked = leaked_counts(leaks, [label for label, _ in policies])
    saved = {label for label, spec, warm in runs if not warm and saved_spec(spec).endswith(".zip")}
    found = told(policies, requests, header.workload_hash, None, saved, drafts)
    silent = [entry["label"] for entry in found["policies"] if entry["how"] == "unknown"]
    notes = [f"{label} does not say what it was trained on, so leakage cannot be excluded" for label in silent]
    return Guarded(leaked, found, tuple([LEAKED] * bool(leaked) + notes))
