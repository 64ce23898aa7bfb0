"""What a report is made of: a result, a policy in it, a request that it played, and the rounds of a few requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PHASES: tuple[str, ...] = ("draft", "verify", "policy", "other")

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Played:
    """One policy on one request."""

    index: int
    """number of the request in its repeat"""
    id: str
    category: str
    temperature: float | None
    """None in files that don't say"""
    repeat: int
    tokens: float
    seconds: float
    plain_tokens: float
    plain_seconds: float

    @property
    def key(self) -> tuple[int, str, str, int]:
        return self.index, self.id, self.category, self.repeat


@dataclass(frozen=True)
class Bin:
    """Draft positions whose predicted chance of acceptance lies in one tenth."""

    judged: float
    predicted: float
    """mean"""
    accepted: float
    """share"""
    interval: tuple[float | None, float | None]


@dataclass(frozen=True)
class Reliability:
    """How far a policy's predictions of acceptance hold (`assc.reliability`)."""

    judged: float
    accepted_share: float
    brier: float
    brier_constant: float
    calibration_error: float
    bins: tuple[Bin, ...]


@dataclass(frozen=True)
class Entry:
    """One policy of one result."""

    label: str
    result: int
    """index of the result it comes from"""
    row: Row
    """exactly `ROW_KEYS`, None for what the file doesn't have"""
    phases: Mapping[str, float | None]
    """seconds of draft, verify, policy, other"""
    categories: Mapping[str, Row]
    played: tuple[Played, ...]
    """empty in files without numbers per request"""
    reliability: Reliability | None = None
    """None for policies that predict no acceptance"""
    temperatures: Mapping[float, Row] = field(default_factory=dict)
    """empty in files that don't say"""
    given: str = ""
    """label in its file, where the page has another one"""

    @property
    def oracle(self) -> bool:
        return str(self.row["policy"]) == "oracle"

    @property
    def name(self) -> str:
        """Registered name of a spec: `assc` of `assc:variant=diagram`."""
        return str(self.row["policy"]).partition(":")[0]


@dataclass(frozen=True)
class RoundsOf:
    """The rounds of one request under one policy, as columns."""

    policy: str
    finish: str | None
    tokens: tuple[int, ...]
    drafter: tuple[str | None, ...]
    position: tuple[int, ...]
    k: tuple[int, ...]
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    emitted: tuple[int, ...]
    seconds: tuple[float, ...]
    entropy: tuple[float | None, ...]
    chances: tuple[tuple[float, ...], ...] = ()
    """per round the predicted chances of acceptance, position by position; empty where none were predicted"""


@dataclass(frozen=True)
class View:
    """A request whose rounds were stored."""

    id: str
    category: str
    temperature: float | None
    prompt_tokens: int
    runs: tuple[RoundsOf, ...]
    texts: Mapping[str, str] | None
    """token id -> text"""
    token_entropy: tuple[float | None, ...] = ()
    """the target's at each token of the recorded text, empty without a trace"""


@dataclass(frozen=True)
class Learned:
    """A policy that was tuned or trained before the evaluation."""

    label: str
    how: str
    """tuned, trained, or unknown"""
    prompts: float | None
    """that it has learned from"""
    leaked: float | None
    """evaluated requests among them, None where nobody knows"""


@dataclass(frozen=True)
class Guarded:
    """What the leakage guard of eval.py looked at and found (`assc.leakage.told`)."""

    learned: tuple[Learned, ...]
    drafts: tuple[str, ...]
    """a sentence per draft that has learned from evaluated requests"""
    evaluated: float


@dataclass(frozen=True)
class Result:
    """One file or run directory."""

    name: str
    meta: Mapping[str, Any]
    entries: tuple[Entry, ...]
    ladder: Mapping[str, Row | None] | None
    same_text: bool | None
    complete: bool
    views: tuple[View, ...] = ()
    training: Mapping[str, Any] = field(default_factory=dict)
    """`config.json` of a run directory"""
    live: Mapping[str, Any] | None = None
    """`live.json` of a run directory"""
    curves: str | None = None
    """folder of TensorBoard curves"""
    against: str | None = None
    """label of the policy with which the file compares the others besides plain decoding"""
    leakage: Guarded | None = None
    """None in older files"""
    hardware: Mapping[str, Any] = field(default_factory=dict)
    """of the machine that ran it, from `manifest.json` of a run directory"""
