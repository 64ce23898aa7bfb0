"""Asking again a drafter that one has stopped using: within a share of the time, and where it displaces least.

Who does not draft learns nothing about drafts. A probe asks a drafter for one token in a round in which the learner
would do something else. By the learner's own estimate it loses

    loss = worth of what would be played − worth of the probe    tokens, worth = E[tokens] − ρ·E[seconds]

Every round earns `share` of its tokens, which at the learner's own pace ρ is `share` of its seconds; a probe is played
once the earnings cover its loss. So rounds in which rollback is best come first, and a dear draft is probed more
rarely. Between two probes of a drafter lie `rest` rounds at least; but where an accepted probe is worth no less than
what it displaces, it is free as long as it is accepted, and is repeated at once.

The probes of a drafter also go through a CUSUM test of "accepted with chance p₁ = (1 + p₀) / 2" against the learner's
p₀ (Page 1954; as a reason for a bandit to start anew: Liu, Lee and Shroff 2018, arXiv 1711.03539). When it says that
the drafter has become better, the learner should forget what it knows of it: its evidence is as old as its last
regular use, however few probes there were since.

The memory is a plain dictionary, so that `state_dict` can save it:

    {"credit": tokens, "again": drafter or "", "idle": {drafter: rounds}, "better": {drafter: log-likelihood ratio}}
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from assc.core import Observation, RoundRecord
from assc.errors import ArtefactError
from assc.kinds import is_lookup

Probes = dict[str, Any]

SHARE = 0.01
"""of the time, that probes may lose"""
REST = 4
"""rounds without the drafter before it is probed"""
SAVED = 2.0
"""earnings are kept up to so many of the cheapest probes"""
FLOOR = 0.01
"""tokens that are always kept"""
CERTAIN = 4.0
"""log-likelihood ratio at which a drafter counts as better than believed"""
RAREST = 0.02
"""chances below are taken for this one"""


class Probe(NamedTuple):
    """One token of a drafter, as the learner sees it."""

    drafter: str
    loss: float
    """tokens"""
    believed: float
    """chance that the token is accepted"""


def fresh_probes() -> Probes:
    """Before anything was played."""
    return {"credit": 0.0, "again": "", "idle": {}, "better": {}}


def check_setting(probe: int, share: float) -> None:
    """`ValueError` for rounds below 1 or a share outside 0..1."""
    if probe < 1 or not 0.0 <= share < 1.0:
        raise ValueError(f"probe is 1 or more rounds and share within 0..1, got {probe} and {share}")


def check_probes(state: Any, owner: str) -> None:
    """`ArtefactError` unless a saved memory is what this module makes."""
    try:
        good = set(state) == {"credit", "again", "idle", "better"} and isinstance(state["again"], str)
        numbers = [state["credit"], *state["idle"].values(), *state["better"].values()]
        good = good and all(isinstance(v, int | float) and math.isfinite(v) for v in numbers)
        good = good and all(v >= 0 for v in (*state["idle"].values(), *state["better"].values()))
    except (KeyError, TypeError, AttributeError):
        good = False
    if not good:
        raise ArtefactError(f"the saved probes of {owner!r} are damaged")


def know(state: Probes, drafters: Iterable[str]) -> None:
    """Count these drafters from now on."""
    for name in drafters:
        state["idle"].setdefault(name, 0)


def due(state: Probes, rest: int) -> list[str]:
    """Drafters that may be probed now: not asked for `rest` rounds, or accepted in the last probe."""
    again = state["again"]
    return [d for d, n in state["idle"].items() if n >= rest or d == again]


def can_show(drafter: str, observation: Observation) -> bool:
    """Whether a probe would show anything: a lookup without a match proposes nothing."""
    return observation.ngram_match != 0 or not is_lookup(drafter)


def choose(state: Probes, candidates: Sequence[Probe]) -> Probe | None:
    """The probe to play in this round, if any.

    `candidates` are drafters of `due` that can be asked for a token now and would not be asked anyway.

    >>> probes = fresh_probes()
    >>> probes["credit"] = 0.1
    >>> choose(probes, [Probe("model", 0.2, 0.0)]), choose(probes, [Probe("ngram", 0.1, 0.0)])
    (None, Probe(drafter='ngram', loss=0.1, believed=0.0))
    """
    if not candidates:
        return None
    for probe in candidates:
        if probe.drafter == state["again"] and probe.loss + probe.believed <= 1.0:
            return probe
    probe = min(candidates, key=lambda p: p.loss)
    state["credit"] = min(state["credit"], SAVED * max(probe.loss, 0.0) + FLOOR)
    return probe if probe.loss <= state["credit"] > 0.0 else None


def count(state: Probes, record: RoundRecord, share: float, probe: Probe | None = None) -> float:
    """Count a finished round, which was this probe or none.

    Returns the log-odds by which the probed drafter has turned out better than believed, 0 where it has not.
    """
    name, idle = record.action.drafter, state["idle"]
    for d in idle:
        idle[d] = 0 if d == name else idle[d] + 1
    state["credit"] += share * record.emitted
    if name is None:
        return 0.0
    if name == state["again"]:
        state["again"] = ""
    if probe is None or probe.drafter != name:
        state["better"].pop(name, None)  # in regular use the learner judges it
        return 0.0
    if not record.drafted or (record.accepted < record.drafted and record.finish is not None):
        return 0.0
    accepted = record.accepted == record.drafted
    lost = probe.loss + probe.believed - accepted
    state["credit"] -= max(lost, 0.0)
    if accepted and lost <= 0.0:
        state["again"] = name
    believed = min(max(probe.believed, RAREST), 1.0 - RAREST)
    better = (1.0 + believed) / 2.0
    ratio = math.log(better / believed) if accepted else math.log((1.0 - better) / (1.0 - believed))
    evidence = max(0.0, state["better"].get(name, 0.0) + ratio)
    if evidence < CERTAIN:
        state["better"][name] = evidence
        return 0.0
    state["better"].pop(name, None)
    return math.log(better / (1.0 - better)) - math.log(believed / (1.0 - believed))
