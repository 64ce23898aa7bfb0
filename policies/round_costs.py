"""What a round costs, learned from finished rounds: a policy knows no cost model, but it sees its own seconds.

For each level of load (the share of the batch that decodes, in sixteenths) the memory keeps discounted sums of the
seconds outside drafting against the tokens verified, and per drafter of the seconds of drafting per draft forward, or
per call where a drafter has no forwards (a lookup). It is a plain dictionary, so that `state_dict` can save it:

    {"16": {"verify": [n, Σd, Σs, Σd², Σd·s], "model": [calls, forwards, seconds]}}

Before anything was measured a target step is 1, a verified token is free and a draft forward is the observation's c.
Only ratios of what `prices` returns mean anything then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from assc.core import RoundRecord
from assc.kinds import is_lookup
from policies.arms import LONGEST

Costs = dict[str, Any]
VERIFY = "verify"
LEVELS = 16
MEMORY = 0.98
"""kept of the sums from round to round: about the last 50 rounds count"""
RIDGE = 0.5
"""tokens²: holds the slope of verification at 0 until rounds of several lengths were seen"""


def load_level(occupancy: float) -> str:
    """The key of a load.

    >>> load_level(1.0), load_level(0.25)
    ('16', '4')
    """
    return "16" if occupancy == 1.0 else str(round(LEVELS * occupancy))


def add_round(costs: Costs, record: RoundRecord, level: str) -> bool:
    """Count one round; False, and nothing is counted, when its seconds are not a usable number."""
    if not 0.0 < record.seconds <= LONGEST:
        return False
    drafting = record.draft_seconds if 0.0 <= record.draft_seconds <= record.seconds else 0.0
    rows = costs.get(level)
    if rows is None:
        rows = costs[level] = {VERIFY: [0.0] * 5}
    d, s = record.drafted, record.seconds - drafting
    n, sd, ss, sdd, sds = rows[VERIFY]
    sdd, sds = MEMORY * sdd + d * d, MEMORY * sds + d * s
    rows[VERIFY] = [MEMORY * n + 1.0, MEMORY * sd + d, MEMORY * ss + s, sdd, sds]
    name = record.action.drafter
    if name is not None and d:
        lookup = is_lookup(name)
        if lookup and record.peeked:
            return True  # the seconds are those of another drafter's first forward
        forwards = float(record.draft_steps or (0 if lookup else d))
        calls, before, spent = rows.get(name, (0.0, 0.0, 0.0))
        rows[name] = [MEMORY * calls + 1.0, MEMORY * before + forwards, MEMORY * spent + drafting]
    return True


def prices(costs: Costs, level: str, drafter: str | None, c: float) -> tuple[float, float, float]:
    """Seconds of a plain step, of a call of the drafter, and of each drafted token (its forward and verification).

    A round with K tokens of the drafter costs their sum with the third taken K times. A load never seen takes the
    prices of the nearest one.

    >>> prices({}, "16", "model", 0.1)
    (1.0, 0.0, 0.1)
    >>> from assc.core import Action
    >>> costs: Costs = {}
    >>> for k in (0, 2, 4) * 99:
    ...     action = Action("model" if k else None, k)
    ...     r = RoundRecord(0, 0, action, k, 0, 1, (), 2 + 0.3 * k, draft_seconds=0.2 * k, draft_steps=k)
    ...     _ = add_round(costs, r, "16")
    >>> [round(v, 2) for v in prices(costs, "16", "model", 0.1)]
    [2.0, 0.0, 0.3]
    """
    rows = _rows(costs, level)
    if rows is None:
        return 1.0, *_unmeasured(drafter, c)
    slope, plain = _verification(rows)
    return plain, *_drafting(rows, drafter, slope, plain, c)


def price_list(
    costs: Costs, level: str, drafters: Sequence[str | None], c: float
) -> tuple[list[tuple[float, float]], float]:
    """Seconds of a call and of each drafted token of every drafter, and those of a plain step, as `prices` says."""
    rows = _rows(costs, level)
    if rows is None:
        return [_unmeasured(drafter, c) for drafter in drafters], 1.0
    slope, plain = _verification(rows)
    return [_drafting(rows, drafter, slope, plain, c) for drafter in drafters], plain


def _rows(costs: Costs, level: str) -> Any:
    """The sums of this level or of the nearest one; None before anything was measured."""
    rows = costs.get(level)
    if rows is None and costs:
        rows = costs[min(costs, key=lambda known: abs(int(known) - int(level)))]
    return None if rows is None or rows[VERIFY][2] <= 0.0 else rows


def _unmeasured(drafter: str | None, c: float) -> tuple[float, float]:
    return 0.0, 0.0 if drafter is None or is_lookup(drafter) else max(c, 0.0)


def _verification(rows: Any) -> tuple[float, float]:
    """Seconds of a verified token, and of a plain step."""
    n, sd, ss, sdd, sds = rows[VERIFY]
    slope = max(0.0, (sds - sd * ss / n) / (sdd - sd * sd / n + RIDGE))
    return slope, max((ss - slope * sd) / n, 0.1 * ss / n)


def _drafting(rows: Any, drafter: str | None, slope: float, plain: float, c: float) -> tuple[float, float]:
    """Seconds of a call of the drafter, and of each drafted token with its verification."""
    if drafter is None:
        return 0.0, slope
    calls, forwards, seconds = rows.get(drafter, (0.0, 0.0, 0.0))
    if not forwards and is_lookup(drafter):
        return seconds / calls if calls else 0.0, slope
    return 0.0, slope + (seconds + c * plain) / (forwards + 1.0)


def sound_costs(value: Any) -> bool:
    """Whether a saved value is what `add_round` makes."""
    if not isinstance(value, dict) or not all(key.isdigit() and isinstance(r, dict) for key, r in value.items()):
        return False
    rows = [(n, len(row) if isinstance(row, list) else 0, row) for r in value.values() for n, row in r.items()]
    sized = all(VERIFY in r for r in value.values()) and all(size == (5 if n == VERIFY else 3) for n, size, _ in rows)
    return sized and all(isinstance(v, int | float) and v >= 0 for _, _, row in rows for v in row)


def sound_pace(value: Any) -> bool:
    """Whether a saved value is discounted [tokens, seconds] per level of load."""
    return isinstance(value, dict) and all(
        key.isdigit() and isinstance(r, list) and len(r) == 2 and all(isinstance(v, int | float) and v >= 0 for v in r)
        for key, r in value.items()
    )
