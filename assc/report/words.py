"""What the page says in words: numbers as text, verdicts, and the sentences about all requests and each group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from assc.comparisons import ALPHA
from assc.report import figures
from assc.report.compare import row_of
from assc.report.join import Report
from assc.report.nouns import PHASES, Entry, Result
from assc.report.verdicts import Comparison, Line, references
from assc.stats import POWER, Interval

ANSWERS: Mapping[str, str] = {
    "itself": "it is the same policy",
    "faster": "yes, faster",
    "slower": "no, slower",
    "perhaps": "perhaps",
    "open": "not shown",
    "unknown": "cannot be told",
}
"""answers to "is the best policy faster than the other?"; the page explains `perhaps` and `not shown`"""
ROW_ANSWERS: Mapping[str, str] = {
    **{"itself": "the reference", "faster": "faster", "slower": "slower", "perhaps": "perhaps"},
    **{"open": "not shown", "unknown": "cannot be told"},
}
MARKS: Mapping[str, str] = {"faster": "yes", "slower": "no", "perhaps": "maybe", "open": "maybe"}
"""class of a cell that holds the answer"""
CONCLUSIONS: Mapping[str, str] = {
    "faster": "it is faster",
    "slower": "it is slower",
    "perhaps": "perhaps faster: it holds for this comparison alone, not for all of them together",
    "open": "no difference is shown",
}
FEW = 12
"""prompts below which a group is called small"""


# -- numbers ---------------------------------------------------------------------------------------------------------


def times(value: float | None, digits: int = 2) -> str:
    """A ratio: 1.52×."""
    return "n/a" if value is None else f"{value:.{digits}f}×"


def percent(value: float | None) -> str:
    """A share: 12.3 %."""
    return "n/a" if value is None else f"{round(100 * value, 1) + 0.0:.1f} %"


def effect(value: float | None) -> str:
    """A detectable effect; beyond a doubling its size says nothing more.

    >>> effect(0.0412), effect(583.1)
    ('4.1 %', 'more than 100 %')
    """
    return "more than 100 %" if value is not None and value > 1 else percent(value)


def span(interval: Interval, digits: int = 2) -> str:
    """An interval, empty where it is not known."""
    low, high = interval
    return "" if low is None or high is None else f"{low:.{digits}f} to {high:.{digits}f}"


def chance(value: float | None) -> str:
    """A p-value: three digits, or that it is below them.

    >>> chance(0.0312), chance(2e-5), chance(None)
    ('0.031', '<0.001', 'n/a')
    """
    return "n/a" if value is None else "<0.001" if value < 0.001 else f"{value:.3f}"


def equals(value: float | None) -> str:
    """The same after "p": `= 0.031`, `< 0.001`."""
    text = chance(value)
    return f"< {text[1:]}" if text.startswith("<") else f"= {text}"


def shown(value: Any) -> str:
    """Any entry of a file as text."""
    if value is None or value in ("", [], {}):
        return "unknown"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(map(shown, value))
    if isinstance(value, dict):
        return ", ".join(f"{key} {shown(item)}" for key, item in value.items())
    return str(value)


def many(number: float, what: str) -> str:
    """A number with its noun.

    >>> many(1, "prompt"), many(6, "prompt")
    ('1 prompt', '6 prompts')
    """
    return f"{number:.0f} {what}{'' if number == 1 else 's'}"


# -- comparisons -----------------------------------------------------------------------------------------------------


def answer(found: Comparison | None, about: Literal["best", "row"] = "best") -> str:
    """Is the policy (the best one of a group, or that of a row) faster? In a few words, with the ratio."""
    if found is None:
        return "not played"
    words = ANSWERS if about == "best" else ROW_ANSWERS
    if found.verdict in ("itself", "unknown"):
        return words[found.verdict]
    return f"{words[found.verdict]}: {times(found.ratio, 3)}"


def evidence(found: Comparison | None) -> list[str]:
    """What the answer rests on, in lines of a cell."""
    if found is None or found.p_value is None:
        return []
    return [
        f"95 %: {span(found.interval, 3)}",
        f"p {equals(found.p_value)}, Holm {chance(found.p_holm)}",
        f"detectable {effect(found.detectable)}",
    ]


def mark(found: Comparison | None) -> str:
    """Class of the cell of a comparison."""
    return "" if found is None else MARKS.get(found.verdict, "")


def comparison_sentence(found: Comparison, name: str, prompts: int) -> str:
    """One comparison of the best policy in plain words. `name` says what the other one is."""
    who = name if name == found.other else f"{name} ({found.other})"
    if found.verdict == "itself":
        return f"It is {who} itself."
    if found.p_value is None:
        few = f" with {many(prompts, 'prompt')}" if prompts < 2 else " from these results"
        ratio = "" if found.ratio is None else f"{times(found.ratio, 3)}, but "
        return f"Against {who}: {ratio}whether that is chance cannot be told{few}."
    of = "the only comparison" if found.tests == 1 else f"after Holm for {found.tests} comparisons"
    same = found.tests == 1 or chance(found.p_holm) == chance(found.p_value)
    alone = "" if same else f" ({chance(found.p_value)} alone)"
    return (
        f"Against {who}: {times(found.ratio, 3)} ({span(found.interval, 3)}), p {equals(found.p_holm)} {of}"
        f"{alone}: {CONCLUSIONS[found.verdict]}. "
        f"The smallest effect that {many(prompts, 'prompt')} can show: {effect(found.detectable)}."
    )


def line_sentences(report: Report, line: Line) -> list[str]:
    """Everything about one group: who is best, against whom how surely, how far the optimum is, what drafting takes."""
    bounds = span(line.cell.interval)
    among = "all requests" if line.group.kind == "all" else f"{line.group.name}"
    said = [
        f"Best on {among}: {line.best.label}, {times(line.cell.speedup)} plain decoding"
        + (f" (95 % interval {bounds})." if bounds else ".")
    ]
    for other in references(report):
        found = line.against.get(other.key)
        if found is not None and not (other.key == "against" and found.verdict == "itself"):
            said.append(comparison_sentence(found, other.name, line.prompts))
    if line.oracle is not None and line.cell.speedup is not None:
        gap = "" if line.fraction is None else f" and {percent(line.fraction)} of the way from static:tuned to it"
        reached = percent(line.cell.speedup / line.oracle)
        said.append(
            f"Distance to the optimum: the hindsight oracle reaches {times(line.oracle)}; "
            f"the best policy has {reached} of its speed{gap}."
        )
    return said


def in_short(report: Report, lines: Sequence[Line]) -> list[str]:
    """The answers to the questions that a reader comes with, over all requests."""
    if not lines:
        return []
    said = line_sentences(report, lines[0])
    if (time := time_sentence(lines[0].best)) is not None:
        said.append(time)
    return [*said, *(sentence for result in report.results for sentence in leakage_sentences(report, result))]


def time_sentence(entry: Entry) -> str | None:
    """Where the seconds of a policy go, None where the file doesn't say."""
    if any(v is None for v in entry.phases.values()):
        return None
    shares = ", ".join(f"{phase} {100 * figures.share(entry, phase):.1f} %" for phase in PHASES)
    return f"Where does the time of {entry.label} go? {shares} (section 4)."


def drafting(line: Line) -> float | None:
    """Share of the seconds that the best policy of a group spends drafting, None where the file doesn't say."""
    row = row_of(line.best, line.group)
    return None if row is None else row["draft_time_share"]


def caution(lines: Sequence[Line]) -> str | None:
    """What few prompts per group mean for this table; None where every group has many, or none is known."""
    groups = [x for x in lines if x.group.kind != "all" and x.prompts]
    if not groups or min(x.prompts for x in groups) >= FEW:
        return None
    low, high = min(x.prompts for x in groups), max(x.prompts for x in groups)
    known = [c.detectable for x in groups for c in x.against.values() if c.detectable is not None and c.other != "ar"]
    sizes = f" (here {effect(min(known))} to {effect(max(known))})" if known else ""
    number = f"{low}" if low == high else f"{low} to {high}"
    return (
        f"These groups have {number} prompts each, which is few: an interval by prompt is wide, and an effect below "
        f"the detectable size{sizes} is missed more often than with odds of {100 * (1 - POWER):.0f} %. "
        "“Not shown” says that the data are few, not that the policies are equal. A p far below 0.01 of so few prompts "
        "rests on effects that are not very skewed between them."
    )


def families_note(report: Report, lines: Sequence[Line]) -> str:
    """For how many comparisons the verdicts of a table allow."""
    sizes = {r.name: next((x.against[r.key].tests for x in lines if r.key in x.against), 0) for r in references(report)}
    told = ", ".join(f"{size} against {name}" for name, size in sizes.items() if size)
    return (
        f"“yes” and “no” hold at {100 * ALPHA:g} % for all comparisons with one reference together (Holm; {told}: "
        "every policy in every group is counted, so choosing the best one on these requests is allowed for), “perhaps” "
        "for the one comparison alone, and “not shown” means that the 95 % interval of the ratio contains 1. "
        f"Detectable: the least true difference that so many prompts show with odds of {100 * POWER:g} %, one "
        "comparison alone."
    )


# -- leakage ---------------------------------------------------------------------------------------------------------


def leakage_sentences(report: Report, result: Result) -> list[str]:
    """Were the requests that something was tuned or trained on kept apart from the evaluated ones?"""
    of = f" of {result.name}" if len(report.results) > 1 else ""
    found = result.leakage
    if found is None:
        return [f"Leakage{of}: the file doesn't say what the policies have learned from."]
    said, labels = [], {e.given: e.label for e in report.entries}
    apart = [x for x in found.learned if x.leaked == 0]
    if apart:
        names = ", ".join(
            f"{labels.get(x.label, x.label)} ({x.how} on {many(x.prompts or 0, 'prompt')})" for x in apart
        )
        said.append(f"Leakage{of}: none. {names}: no evaluated prompt is among those, by content and by id.")
    for x in found.learned:
        label = labels.get(x.label, x.label)
        if x.leaked is None:
            said.append(f"Leakage{of}: {label} doesn't say what it was trained on, so leakage can't be excluded.")
        elif x.leaked:
            said.append(
                f"LEAKAGE{of}: {label} was {x.how} on {x.leaked:.0f} of the {found.evaluated:.0f} evaluated "
                "requests; its numbers say nothing about other prompts."
            )
    said += [f"LEAKAGE{of}: {text}." for text in found.drafts]
    return said or [f"Leakage{of}: none; no policy has learned from requests beforehand, no draft from evaluated ones."]
