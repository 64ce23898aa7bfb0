"""The draft choice report: measurements of drafters in, judged lines, text and JSON out. No torch, no clock.

Bounds that come from elsewhere: the size ratio of an independent draft (1/10 to 1/4 recommended) and a first-token
acceptance above 0.65 are the project's requirements; "some K pays if acceptance > c" is Corollary 3.9 of Leviathan
et al. 2023 (arXiv 2211.17192). `COVERAGE` is this package's own choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from assc.drafts import ByPosition, DrafterMeasured, TargetFacts, best, pooled
from assc.outputs import DRAFTS

Verdict = Literal["pass", "warn", "info"]

RATIO_LOWEST, RATIO_LOW, RATIO_HIGH = 1 / 20, 1 / 10, 1 / 4
"""draft parameters / target parameters: warned under the first and above the last, recommended between the others"""
ACCEPTANCE = 0.65
"""first-token acceptance is recommended to be above it"""
COVERAGE = 0.9
"""share of the target's text that a draft should be able to propose: every other token is a certain rejection"""
ALL = "all categories"
SCHEMA = 1


@dataclass(frozen=True)
class Line:
    """One judged quantity of one drafter. `value` is its number as the JSON keeps it, None where there is none."""

    drafter: str
    item: str
    verdict: Verdict
    value: float | None
    reason: str


def judge(target: TargetFacts, drafter: DrafterMeasured) -> list[Line]:
    """All lines of one drafter, in the order in which they are printed."""
    name = drafter.facts.name
    found = [
        ("parameter ratio", *_ratio(target, drafter)),
        ("family", *_family(target, drafter)),
        ("tokens", *_tokens(target, drafter)),
        *_acceptance(drafter),
        ("c", *_cost(drafter)),
        ("memory", *_memory(target, drafter)),
        ("best static K", *_predicted(drafter)),
        ("measured speed-up", *_measured(drafter)),
    ]
    return [Line(name, *entry) for entry in found]


_Judged = tuple[Verdict, float | None, str]


def _ratio(target: TargetFacts, drafter: DrafterMeasured) -> _Judged:
    own = drafter.facts.parameters
    if own is None:
        return "info", None, "not applicable: a lookup has no parameters"
    ratio = own / target.parameters
    size = f"{own:,} of {target.parameters:,} parameters"
    told = f"1/{1 / ratio:.1f}" if ratio else "0"
    if drafter.facts.kind == "hidden":
        own_only = f"{told}, {size}: only the layer's own, embeddings and head are the target's"
        if ratio > RATIO_HIGH:
            return "warn", ratio, f"{own_only}; above 1/4 a step is too dear"
        why = "it is conditioned on the target's hidden state; the lower bound 1/20 is for independent drafts only"
        return "pass", ratio, f"{own_only}; {why}"
    if ratio > RATIO_HIGH:
        return "warn", ratio, f"{told}, {size}; above 1/4 a draft costs too much of a target step"
    if ratio < RATIO_LOWEST:
        return "warn", ratio, f"{told}, {size}; under 1/20 an independent draft agrees too rarely"
    if ratio < RATIO_LOW:
        return "info", ratio, f"{told}, {size}; under the recommended 1/10, above the limit 1/20"
    return "pass", ratio, f"{told}, {size}; recommended is 1/10 to 1/4"


def _family(target: TargetFacts, drafter: DrafterMeasured) -> _Judged:
    facts = drafter.facts
    if facts.kind == "lookup":
        return "info", None, "not applicable: it copies from prompt and output"
    if facts.kind == "hidden":
        return "pass", None, f"one Llama-style layer made for this very {target.family} target (its fingerprint agrees)"
    if facts.family == target.family:
        return "pass", None, f"draft and target are both {facts.family}"
    return "warn", None, f"the draft is {facts.family}, the target {target.family}: other families agree less often"


def _tokens(target: TargetFacts, drafter: DrafterMeasured) -> _Judged:
    facts = drafter.facts
    if facts.token_ids is None:
        return "pass", facts.coverage, "the target's own tokens, every one can be proposed"
    what = "head cut to" if facts.cut_head or facts.kind == "hidden" else "same tokenizer, common to both are"
    told = f"{what} {facts.token_ids:,} of the target's {target.token_ids:,} ids"
    share = f"they make up {facts.coverage:.1%} of the target's text"
    if facts.coverage < COVERAGE:
        return "warn", facts.coverage, f"{told}; {share}, under {COVERAGE:.0%}: the others are rejected for certain"
    return "pass", facts.coverage, f"{told}; {share}"


def _acceptance(drafter: DrafterMeasured) -> Iterator[tuple[str, Verdict, float | None, str]]:
    """One line for all categories, then one for each."""
    tables = {ALL: (pooled(drafter.first), pooled(drafter.fixed))}
    if len(drafter.first) > 1 or "" not in drafter.first:
        tables |= {name or "(none)": (drafter.first[name], drafter.fixed[name]) for name in sorted(drafter.first)}
    for category, (first, fixed) in tables.items():
        item = "acceptance" if category == ALL else f"acceptance, {category}"
        rate = first.rate
        if rate is None:
            yield item, "info", None, f"nothing was drafted in {first.rounds} rounds of K=1"
            continue
        told = f"first token {_rate(first)}, at K={drafter.k} {_rate(fixed)} (accepted/drafted)"
        if first.drafted < first.rounds:
            told += f"; it proposed in {first.drafted} of {first.rounds} rounds of K=1"
        good = rate > ACCEPTANCE
        yield (
            item,
            "pass" if good else "warn",
            rate,
            f"{told}; {'above' if good else 'not above'} the recommended {ACCEPTANCE}",
        )


def _rate(counts: ByPosition) -> str:
    rate = counts.rate
    return "n/a" if rate is None else f"{rate:.3f} ({sum(counts.accepted)}/{counts.drafted})"


def _cost(drafter: DrafterMeasured) -> _Judged:
    first, c = pooled(drafter.first), drafter.c
    step = "one call" if drafter.facts.kind == "lookup" else "one draft step"
    told = f"{c:.4f}: {step} / one target step"
    if not first.rounds:
        return "info", c, f"{told}; without acceptance it says nothing"
    alpha = first.accepted[0] / first.rounds
    if alpha > c:
        return "pass", c, f"{told}; below the first tokens accepted per round ({alpha:.3f}), so some K can pay"
    return "warn", c, f"{told}; not below the first tokens accepted per round ({alpha:.3f}), so no K is sure to pay"


def _memory(target: TargetFacts, drafter: DrafterMeasured) -> _Judged:
    own, buffers = drafter.facts.memory_bytes, drafter.facts.buffer_bytes
    verify = target.kv_bytes + target.logit_bytes
    return (
        "info",
        float(own),
        f"target {size(target.weight_bytes)}, draft {size(own)} (parameters {size(own - buffers)}, buffers "
        f"{size(buffers)}), verification {size(verify)} "
        f"(keys and values of {target.slots} slots {size(target.kv_bytes)}, logits of {target.k_max + 1} columns "
        f"{size(target.logit_bytes)})",
    )


def _predicted(drafter: DrafterMeasured) -> _Judged:
    top = best(drafter.predictions)
    told = (
        f"K={top.k} of {', '.join(str(p.k) for p in drafter.predictions)}: {top.speedup:.2f}x predicted, "
        f"{top.tokens:.2f} tokens in {1e3 * top.seconds:.3g} ms per round"
    )
    if top.extrapolated:
        told += f" (acceptance beyond position {pooled(drafter.fixed).measured} extrapolated)"
    if top.speedup > 1:
        return "pass", top.speedup, told
    return "warn", top.speedup, f"{told}; plain decoding is predicted to be as fast or faster"


def _measured(drafter: DrafterMeasured) -> _Judged:
    found = drafter.measured
    told = f"K={found.k}: {found.value:.2f}x"
    if found.low is not None and found.high is not None:
        told += f", 95 % interval {found.low:.2f} to {found.high:.2f}"
    if found.value <= 1:
        return "warn", found.value, f"{told}; not faster than plain decoding"
    if found.low is None or found.low <= 1:
        return "info", found.value, f"{told}; faster, but not shown by so few requests"
    return "pass", found.value, f"{told}; faster than plain decoding on the same prompts"


def size(count: float) -> str:
    """Bytes for people.

    >>> size(999), size(2_500_000)
    ('999 B', '2.5 MB')
    """
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= limit:
            return f"{count / limit:.1f} {unit}"
    return f"{count:.0f} B"


@dataclass(frozen=True)
class Report:
    """The whole report. `meta` holds the conditions: pair, device, dtype, threads, mode, workload, requests, …"""

    meta: Mapping[str, Any]
    target: TargetFacts
    drafters: tuple[DrafterMeasured, ...]

    @property
    def lines(self) -> tuple[Line, ...]:
        return tuple(line for drafter in self.drafters for line in judge(self.target, drafter))

    def to_json(self) -> dict[str, Any]:
        """The conditions, and per drafter its lines and every number behind them."""
        return {
            "schema": SCHEMA,
            "kind": DRAFTS,
            "meta": dict(self.meta),
            "target": asdict(self.target),
            "drafters": {
                d.facts.name: {
                    "lines": [_without_drafter(line) for line in judge(self.target, d)],
                    "facts": asdict(d.facts),
                    "c": d.c,
                    "acceptance": {
                        "first_token": _counts(d.first),
                        f"k={d.k}": _counts(d.fixed),
                    },
                    "predictions": [asdict(p) for p in d.predictions],
                    "measured": asdict(d.measured),
                }
                for d in self.drafters
            },
        }

    def to_text(self) -> str:
        """Conditions, then a block per drafter."""
        m, t = self.meta, self.target
        rows = [
            f"pair {m['pair']}, {m['device']} {m['dtype']}, threads {m['threads']}, mode {m['mode']}, temperature "
            f"{m['temperature']:g}; target {t.family}, {t.parameters:,} parameters",
            f"workload {m['workload']} ({m['split']}), {m['requests']} requests of up to {m['max_new_tokens']} new "
            f"tokens, seed {m['seed']}",
            f"acceptance and speed-up are measured; c and best static K are modelled ({m['cost_model']['label']})",
        ]
        if m.get("same_text") is False:
            rows.append("texts differ between drafters and plain decoding: speed-ups are not of the same text")
        for d in self.drafters:
            lines = judge(t, d)
            width = max(len(line.item) for line in lines)
            rows.append(f"\n{d.facts.name}, c = {d.c:.3f}")
            rows += [f"  {line.verdict}  {line.item:<{width}}  {line.reason}" for line in lines]
        fastest = max(self.drafters, key=lambda d: d.measured.value)
        rows.append(
            f"\nfastest measured: {fastest.facts.name} with K={fastest.measured.k}, {fastest.measured.value:.2f}x"
            if fastest.measured.value > 1
            else "\nfastest measured: plain decoding"
        )
        return "\n".join(rows)


def _without_drafter(line: Line) -> dict[str, Any]:
    return {key: value for key, value in asdict(line).items() if key != "drafter"}


def _counts(table: Mapping[str, ByPosition]) -> dict[str, Any]:
    """Per category, and for all of them, the counts by position and their rate."""
    entries: Sequence[tuple[str, ByPosition]] = [(ALL, pooled(table)), *sorted(table.items())]
    return {name: {"rate": counts.rate, **asdict(counts)} for name, counts in entries}
