"""What an evaluation yields: runs, requests with all their runs, and the whole as rows, details and JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from assc.comparisons import families
from assc.core import Mode, Request, Totals
from assc.files import write_json
from assc.metrics import Run, make_details, make_row
from assc.monitor import HealthMonitor, plain_seconds_of
from assc.oracle import Ladder
from assc.rounds_json import KeptRounds, rounds_json
from assc.rungs import PLAIN

MAX_DIFFERENCES = 20
"""differing texts that are listed; all are counted"""


@dataclass(frozen=True)
class RequestResult:
    """One request under every policy: `runs` in the order of the labels, and the run of plain decoding."""

    index: int
    repeat: int
    request: Request
    runs: tuple[Run, ...]
    baseline: Run
    order: tuple[str, ...] = ()
    """labels in the order they were played"""


def watch(monitor: HealthMonitor, run: Run, plain: Totals) -> None:
    """Show the rounds of a run to a monitor; `plain` is plain decoding of the same request."""
    for record in run.episode.rounds:
        monitor.add(record, plain_seconds=plain_seconds_of(record, plain))
    if run.memory_peak is not None:
        monitor.saw_memory(run.memory_peak)


def unique_labels(names: Sequence[str]) -> tuple[str, ...]:
    """One label per policy, numbered where a name comes twice.

    >>> unique_labels(["ar", "static:4", "static:4"])
    ('ar', 'static:4', 'static:4 #2')
    """
    labels: list[str] = []
    for i, name in enumerate(names):
        earlier = names[:i].count(name)
        labels.append(f"{name} #{earlier + 1}" if earlier else name)
    return tuple(labels)


def short_labels(labels: Sequence[str]) -> dict[str, str]:
    """Label -> a short one for charts and tables: of the path of a saved policy as much from its end as tells it apart.

    >>> short_labels(["assc", "runs/ppo/policy.zip", "a/dqn", "b/dqn", "runs/assc"])
    {'assc': 'assc', 'runs/ppo/policy.zip': 'ppo', 'a/dqn': 'a/dqn', 'b/dqn': 'b/dqn', 'runs/assc': 'runs/assc'}
    """
    paths = {x: x.removesuffix("/policy.zip").split("/") for x in dict.fromkeys(labels)}
    shares = {x: 1 for x in paths}
    while True:
        found = {x: "/".join(paths[x][-shares[x] :]) for x in paths}
        counts = Counter(found.values())
        longer = [x for x in paths if counts[found[x]] > 1 and shares[x] < len(paths[x])]
        if not longer:
            return found if len(set(found.values())) == len(found) else {x: x for x in paths}
        for x in longer:
            shares[x] += 1


@dataclass
class Evaluation:
    """Results of a paired comparison. Only requests that every policy has finished are in it."""

    names: tuple[str, ...]
    """policies as they were given"""
    mode: Mode
    measured: bool
    seed: int
    baseline: int | None
    """index in `names` of the plain decoding that is the baseline, None when it ran unlisted"""
    meta: dict[str, Any] = field(default_factory=dict)
    results: list[RequestResult] = field(default_factory=list)
    complete: bool = True
    ladder: Ladder | None = None
    """rungs for the requests in their order, where there is a trace"""
    actions: Mapping[str, str] = field(default_factory=dict)
    """policy -> the action that tuning chose for it"""
    against: str | None = None
    """label of the policy with which the others are compared besides plain decoding"""
    leaked: Mapping[str, int] = field(default_factory=dict)
    """label -> evaluated requests from which it has learned beforehand"""
    rung: tuple[str | None, ...] = ()
    """rung of each policy (`assc.rungs`); empty: nobody knows"""
    once: set[str] = field(default_factory=set)
    """labels of the policies whose play of the first seed stands for all seeds"""
    kept: KeptRounds | None = None
    """whose rounds go into the file, None for nobody's"""
    policy_reports: list[dict[str, Any] | None] = field(default_factory=list)
    """what each policy says of itself at the end (`guard`), None for one that says nothing"""

    @property
    def labels(self) -> tuple[str, ...]:
        return unique_labels(self.names)

    @property
    def plain_label(self) -> str:
        """What the baseline is called: its label, or its name where it ran unlisted."""
        return "ar" if self.baseline is None else self.labels[self.baseline]

    def _results(self, category: str | None, temperature: float | None = None) -> list[RequestResult]:
        """Finished requests, of one category, of one temperature, or all."""
        return [
            r
            for r in self.results
            if (category is None or r.request.category == category)
            and (temperature is None or r.request.temperature == temperature)
        ]

    def runs_of(self, policy: int | None, category: str | None = None, temperature: float | None = None) -> list[Run]:
        """Runs of one policy (None: the baseline), of one category, of one temperature, or all."""
        return [r.baseline if policy is None else r.runs[policy] for r in self._results(category, temperature)]

    def rows(self, category: str | None = None, temperature: float | None = None) -> list[dict[str, Any]]:
        """One row per policy in the order given, over all requests or those of one category or temperature."""
        return [self._row(name, i, category, temperature) for i, name in enumerate(self.names)]

    def _row(
        self, name: str, policy: int | None, category: str | None = None, temperature: float | None = None
    ) -> dict[str, Any]:
        return make_row(
            name,
            self.runs_of(policy, category, temperature),
            self.runs_of(None, category, temperature),
            seed=self.seed,
            is_baseline=policy == self.baseline or policy is None,
            measured=self.measured,
            ladder=self._ladder(category, temperature),
            action=self.actions.get(name.partition("@")[0]),
            leaked=0 if policy is None else self.leaked.get(self.labels[policy], 0),
            rung=PLAIN if policy in (None, self.baseline) else self.rung[policy] if self.rung else None,
            once=(self.plain_label if policy is None else self.labels[policy]) in self.once,
        )

    def _ladder(self, category: str | None = None, temperature: float | None = None) -> Ladder | None:
        """The ladder of what was finished, of one category, of one temperature, or of all."""
        if self.ladder is None:
            return None
        kept = [r.index for r in self._results(category, temperature)]
        return self.ladder.at(kept) if kept else None

    def rungs(self) -> dict[str, Any] | None:
        """The rungs that need no policy, over the same requests and repeats as the rows; None without a trace."""
        finished = self._ladder()
        return None if finished is None else finished.to_json()

    @property
    def categories(self) -> tuple[str, ...]:
        return tuple(sorted({r.request.category for r in self.results}))

    @property
    def temperatures(self) -> tuple[float, ...]:
        return tuple(sorted({r.request.temperature for r in self.results}))

    def by_category(self) -> dict[str, list[dict[str, Any]]]:
        return {category: self.rows(category) for category in self.categories}

    def by_temperature(self) -> dict[str, list[dict[str, Any]]]:
        """Temperature as text, as JSON needs it -> rows."""
        return {f"{t:g}": self.rows(temperature=t) for t in self.temperatures}

    def baseline_row(self) -> dict[str, Any]:
        """The row of plain decoding, listed or not."""
        return self._row("ar", None)

    def details(self, category: str | None = None, temperature: float | None = None) -> list[dict[str, Any]]:
        """Further numbers per policy in the order given, defined in `DEFINITIONS`."""
        base = self.runs_of(None, category, temperature)
        rows: list[dict[str, Any]] = []
        for i, (name, label) in enumerate(zip(self.names, self.labels, strict=True)):
            numbers = make_details(self.runs_of(i, category, temperature), base, measured=self.measured, seed=self.seed)
            rows.append({"policy": name, "label": label, **numbers})
        return rows

    def health(self) -> list[dict[str, Any]]:
        """`HealthMonitor.report` of each policy in the order given, against plain decoding of the same requests.

        `policy_report` is what the policy counted itself, over all requests since it was handed over.
        """
        reports: list[dict[str, Any]] = []
        for i, (name, label) in enumerate(zip(self.names, self.labels, strict=True)):
            monitor = HealthMonitor()
            for result in self.results:
                watch(monitor, result.runs[i], result.baseline.totals)
            own = self.policy_reports[i] if i < len(self.policy_reports) else None
            reports.append({"policy": name, "label": label, **monitor.report(), "policy_report": own})
        return reports

    def _requests(self, policy: int) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for result in self.results:
            totals, plain = result.runs[policy].totals, result.baseline.totals
            rows.append(
                {
                    "id": result.request.id,
                    "category": result.request.category,
                    "temperature": result.request.temperature,
                    "repeat": result.repeat,
                    "tokens": totals.tokens,
                    "seconds": totals.seconds,
                    "baseline_tokens": plain.tokens,
                    "baseline_seconds": plain.seconds,
                    "rounds": totals.rounds,
                    "drafted": totals.drafted,
                    "accepted": totals.accepted,
                    "finish": result.runs[policy].episode.finish,
                }
            )
        return rows

    def text_differences(self) -> list[dict[str, Any]]:
        """Runs whose token ids are not those of plain decoding, with the first position that differs."""
        found: list[dict[str, Any]] = []
        for result in self.results:
            expected = result.baseline.episode.tokens
            for label, run in zip(self.labels, result.runs, strict=True):
                tokens = run.episode.tokens
                if tokens == expected:  # lengths included: a cut-off text is a different text
                    continue
                pairs = enumerate(zip(tokens, expected, strict=False))
                shorter = min(len(tokens), len(expected))
                position = next((i for i, (a, b) in pairs if a != b), shorter)
                where = {"policy": label, "id": result.request.id, "repeat": result.repeat, "position": position}
                found.append({**where, "length": len(tokens), "baseline_length": len(expected)})
        return found

    @property
    def same_text(self) -> bool | None:
        """Whether all policies emitted the same token ids; None where texts differ by design or nothing finished."""
        sampled = any(r.request.temperature > 0 for r in self.results)
        if not self.results or (self.mode == "rejection" and sampled):
            return None
        return not self.text_differences()

    def to_json(self) -> dict[str, Any]:
        """The content of `out.json`. `meta`, `rows`, `ladder` and `same_text` are the stable part."""
        same, differences = self.same_text, self.text_differences()
        kept = {} if self.kept is None else {"rounds": rounds_json(self.results, self.labels, self.kept)}
        return {
            "meta": dict(self.meta),
            "rows": self.rows(),
            "same_text": same,
            "ladder": self.rungs(),
            "complete": self.complete,
            "by_category": self.by_category(),
            "by_temperature": self.by_temperature(),
            "comparisons": [family.to_json() for family in families(self)],
            "baseline": self.baseline_row(),
            "details": [{**d, "requests": self._requests(i)} for i, d in enumerate(self.details())],
            "health": self.health(),
            "text_differences": [] if same is None else differences[:MAX_DIFFERENCES],
            **kept,
        }

    def write(self, path: Path) -> None:
        """Write `out.json` whole or not at all."""
        write_json(path, self.to_json())


class EvaluationInterrupted(KeyboardInterrupt):
    """Ctrl-C during an evaluation; `evaluation` holds the finished requests and is marked incomplete."""

    def __init__(self, evaluation: Evaluation) -> None:
        super().__init__("evaluation interrupted")
        self.evaluation = evaluation
