"""Which prompts something was trained or tuned on, and whether they are among those that are evaluated.

A policy, a draft or a tuned action does better on prompts that it has learned from, so a result on them says nothing
about others. What was learned from is kept as prompt ids with a hash of each prompt's content, in the artefact itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from assc.core import Request
from assc.errors import AsscError

LEARNED_KINDS = frozenset({"hidden", "layers"})
"""drafters that learned from the split `draft` of a workload"""


class LeakageError(AsscError):
    """Evaluated requests that were trained or tuned on."""


def content_of(prompt_ids: Sequence[int]) -> str:
    """16 hex digits of a prompt's token ids.

    >>> content_of((1, 2, 3))
    '8a6ae15122001229'
    """
    return hashlib.sha256(",".join(map(str, prompt_ids)).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class TrainedOn:
    """Prompts that something has learned from: id (the content hash where there is none) -> content hash."""

    prompts: Mapping[str, str] = field(default_factory=dict)
    workload_hash: str = ""
    """of the whole workload, where it is known: within one workload an id names one prompt"""
    others: tuple[TrainedOn, ...] = ()
    """prompts of other workloads, from which it has learned too"""

    @classmethod
    def of(cls, requests: Iterable[Request], workload_hash: str | None = "") -> TrainedOn:
        """Those of the requests; one prompt at several temperatures is one."""
        hashes = [(r.id, content_of(r.prompt_ids)) for r in requests]
        return cls({name or content: content for name, content in hashes}, workload_hash or "")

    @property
    def count(self) -> int:
        """Number of prompts."""
        return sum(len(part.prompts) for part in (self, *self.others))

    def __or__(self, more: TrainedOn) -> TrainedOn:
        """These prompts and those of `more`, apart by workload, since an id names a prompt within one workload only.

        >>> both = TrainedOn({"a": "1"}, "w") | TrainedOn({"a": "2", "b": "3"}, "w") | TrainedOn({"a": "4"}, "v")
        >>> both.prompts, both.others
        ({'a': '1', '2': '2', 'b': '3'}, (TrainedOn(prompts={'a': '4'}, workload_hash='v', others=()),))
        """
        found: dict[str, dict[str, str]] = {}
        for part in (self, *self.others, more, *more.others):
            known = found.setdefault(part.workload_hash, {})
            for name, content in part.prompts.items():  # one id, two contents: another tokenizer
                known[name if known.get(name, content) == content else content] = content
        parts = [TrainedOn(prompts, workload) for workload, prompts in found.items() if prompts]
        return TrainedOn(parts[0].prompts, parts[0].workload_hash, tuple(parts[1:])) if parts else self

    def to_json(self) -> dict[str, Any]:
        others = {"others": [other.to_json() for other in self.others]} if self.others else {}
        return {"workload_hash": self.workload_hash, "prompts": dict(self.prompts), **others}

    @classmethod
    def from_json(cls, data: Any) -> TrainedOn:
        """ValueError for anything that `to_json` does not make."""
        prompts = data.get("prompts") if isinstance(data, Mapping) else None
        workload = data.get("workload_hash", "") if isinstance(data, Mapping) else None
        texts = isinstance(prompts, Mapping) and all(isinstance(v, str) for v in (*prompts, *prompts.values()))
        others = data.get("others", []) if isinstance(data, Mapping) else None
        flat = isinstance(others, list) and all(isinstance(o, Mapping) and not o.get("others") for o in others)
        if not texts or not isinstance(workload, str) or not flat:
            raise ValueError("it does not list ids and content hashes of prompts")
        return cls(dict(prompts or {}), workload, tuple(map(cls.from_json, others or ())))

    def among(self, requests: Iterable[Request], workload_hash: str | None = "") -> list[Request]:
        """The requests whose prompt is one of these: by content, or by id in the same workload.

        The second finds prompts again that another tokenizer turned into other ids.
        """
        parts = (self, *self.others)
        contents = {content for part in parts for content in part.prompts.values()}
        ids = {
            name
            for part in parts
            if part.workload_hash and part.workload_hash == workload_hash
            for name in part.prompts
        }
        return [r for r in requests if content_of(r.prompt_ids) in contents or r.id in ids]


@dataclass(frozen=True)
class Leak:
    """Evaluated requests from which `what` has learned."""

    label: str | None
    """the policy, None for all of them (a draft)"""
    what: str
    requests: tuple[Request, ...]
    evaluated: int

    def __str__(self) -> str:
        of = f"{len(self.requests)} of the {self.evaluated} evaluated requests"
        return f"{self.what} on {of}, for example {self.requests[0].id or 'the first'!r}"


def _learned(policy: Any, label: str, tuned: Mapping[str, TrainedOn] | None) -> tuple[TrainedOn | None, str]:
    """What a policy has learned from, and how: by what it says itself, and what `tuned` says of its label."""
    known = getattr(policy, "trained_on", None)
    if known is None and tuned is not None and (mine := tuned.get(label.partition("@")[0])) is not None:
        return mine, "tuned"
    return known, "trained"


def policy_leaks(
    policies: Iterable[tuple[str, Any]],
    requests: Sequence[Request],
    workload_hash: str | None,
    tuned: Mapping[str, TrainedOn] | None = None,
) -> list[Leak]:
    """Those of the policies (label and object): by what `policy.trained_on` says, and what `tuned` says of a label."""
    found = []
    for label, policy in policies:
        known, how = _learned(policy, label, tuned)
        if known is not None and (mine := known.among(requests, workload_hash)):
            found.append(Leak(label, f"{label} was {how}", tuple(mine), len(requests)))
    return found


def told(
    policies: Iterable[tuple[str, Any]],
    requests: Sequence[Request],
    workload_hash: str | None,
    tuned: Mapping[str, TrainedOn] | None,
    saved: Container[str],
    drafts: Sequence[Leak],
) -> dict[str, Any]:
    """What the guard looked at and found, for the result file (`meta.leakage`).

    `policies`: per policy that learned beforehand its label, how (trained, tuned, or unknown for one of the `saved`
    that doesn't say), from how many prompts, and how many of the evaluated requests are among them.
    """
    found: list[dict[str, Any]] = []
    for label, policy in policies:
        known, how = _learned(policy, label, tuned)
        if known is not None:
            mine = known.among(requests, workload_hash)
            found.append({"label": label, "how": how, "prompts": known.count, "leaked_requests": len(mine)})
        elif label in saved:
            found.append({"label": label, "how": "unknown", "prompts": None, "leaked_requests": None})
    found = [entry for i, entry in enumerate(found) if entry not in found[:i]]  # once for all seeds
    return {"policies": found, "drafts": [str(leak) for leak in drafts], "evaluated": len(requests)}


def draft_leaks(requests: Sequence[Request], in_draft_split: Sequence[bool], kinds: Mapping[str, str]) -> list[Leak]:
    """A learned drafter (`kinds`: name -> kind) and requests of the split from which drafts learn."""
    learned = [name for name, kind in kinds.items() if kind in LEARNED_KINDS]
    mine = [r for r, theirs in zip(requests, in_draft_split, strict=True) if theirs]
    return [Leak(None, f"the draft {learned[0]!r} was trained", tuple(mine), len(requests))] if learned and mine else []


def check_leaks(leaks: Sequence[Leak], *, allowed: bool) -> None:
    """`LeakageError` with the first leak, unless they are `allowed`."""
    if leaks and not allowed:
        more = f" (and {len(leaks) - 1} more such overlaps)" if len(leaks) > 1 else ""
        raise LeakageError(f"{leaks[0]}{more}; evaluate other requests, or mark the rows with --allow-leakage")


def leaked_counts(leaks: Sequence[Leak], labels: Sequence[str]) -> dict[str, int]:
    """label -> number of evaluated requests that it, or a draft, has learned from."""
    counts = {}
    for label in labels:
        ids = {id(r) for leak in leaks if leak.label in (None, label) for r in leak.requests}
        if ids:
            counts[label] = len(ids)
    return counts


def check_apart(train: Iterable[Request], held_out: Sequence[Request], workload_hash: str | None = "") -> None:
    """`LeakageError` where requests to evaluate are also among those to train on."""
    both = TrainedOn.of(train, workload_hash).among(held_out, workload_hash)
    if both:
        raise LeakageError(
            f"{len(both)} of the {len(held_out)} held-out requests are also in the train split, for example "
            f"{both[0].id!r}; give each prompt one split, or skip the comparison with --eval-requests 0"
        )
