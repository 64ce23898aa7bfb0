"""Every policy against plain decoding and against a chosen one: ratio, interval, p-value, what could have been seen.

A comparison is paired and clustered by prompt (`assc.stats.compare`). The p-values against one reference are a family
and are adjusted together by Holm's procedure, so that in an evaluation in which nothing differs from the reference some
policy is called faster or slower with odds of at most 5 %. The hindsight optimum is no contestant and in no family.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from assc.metrics import Run, per_request
from assc.stats import POWER, Interval, Paired, compare, holm, requests_needed

if TYPE_CHECKING:
    from assc.results import Evaluation

ALPHA = 0.05
PLANNED = 0.01
"""size of the effect for which the number of prompts is told that would show it"""
ORACLE = "oracle"

Verdict = Literal["faster", "slower", "open", "unknown"]


@dataclass(frozen=True)
class Line:
    """One policy against the reference; the fields are those of `DEFINITIONS` under "comparisons."."""

    label: str
    ratio: float | None
    ci95: Interval
    p_value: float | None
    p_holm: float | None
    verdict: Verdict
    detectable: float | None
    prompts_for_one_percent: int | None


@dataclass(frozen=True)
class Family:
    """All comparisons with one reference."""

    against: str
    prompts: int
    lines: tuple[Line, ...]

    @property
    def tests(self) -> int:
        """Comparisons that the adjustment allows for."""
        return sum(line.p_value is not None for line in self.lines)

    def to_json(self) -> dict[str, Any]:
        told = {"method": "holm", "alpha": ALPHA, "power": POWER, "tests": self.tests, "prompts": self.prompts}
        return {"against": self.against, **told, "rows": [asdict(line) for line in self.lines]}


def families(evaluation: Evaluation) -> list[Family]:
    """The comparisons with plain decoding, and those with `evaluation.against` where that is another policy."""
    plain = _family(evaluation, evaluation.plain_label, evaluation.runs_of(None), evaluation.baseline)
    if evaluation.against is None:
        return [plain]
    at = evaluation.labels.index(evaluation.against)
    if at == evaluation.baseline:
        return [plain]
    return [plain, _family(evaluation, evaluation.against, evaluation.runs_of(at), at)]


def _family(evaluation: Evaluation, name: str, reference: Sequence[Run], own: int | None) -> Family:
    compared = [
        (label, _pair(evaluation.runs_of(i), reference, evaluation.seed))
        for i, label in enumerate(evaluation.labels)
        if i != own and not is_oracle(label)
    ]
    prompts = len(per_request(reference))
    adjusted = iter(holm([pair.p_value for _, pair in compared if pair.p_value is not None]))
    lines = [_line(label, pair, None if pair.p_value is None else next(adjusted), prompts) for label, pair in compared]
    return Family(name, prompts, tuple(lines))


def is_oracle(label: str) -> bool:
    """Whether a row is the hindsight optimum, whatever it is called."""
    return label.partition("@")[0].partition(" #")[0] == ORACLE


def _pair(mine: Sequence[Run], base: Sequence[Run], seed: int) -> Paired:
    ours, theirs = per_request(mine), per_request(base)
    columns = (
        [float(t.tokens) for t in ours],
        [t.seconds for t in ours],
        [float(t.tokens) for t in theirs],
        [t.seconds for t in theirs],
    )
    return compare(*columns, rng=np.random.default_rng(seed))


def _line(label: str, pair: Paired, p_holm: float | None, prompts: int) -> Line:
    detectable = pair.detectable
    return Line(
        label=label,
        ratio=pair.ratio,
        ci95=pair.interval,
        p_value=pair.p_value,
        p_holm=p_holm,
        verdict=_verdict(pair.ratio, p_holm),
        detectable=detectable,
        prompts_for_one_percent=None if detectable is None else requests_needed(detectable, prompts, PLANNED),
    )


def _verdict(ratio: float | None, p_holm: float | None) -> Verdict:
    if ratio is None or p_holm is None:
        return "unknown"
    return "open" if p_holm >= ALPHA else "faster" if ratio > 1 else "slower"
