"""What a reader must know beside the tables of an evaluation, in sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from assc.drafters.memory import DrafterMemory
from assc.results import Evaluation


def _machines(meta: Mapping[str, Any]) -> str | None:
    """A sentence where the seconds were computed, or are those of another machine than that of the recording."""
    costs = meta.get("cost_file") or {}
    if costs.get("time_source") == "modelled":
        label = (meta.get("cost_model") or {}).get("label") or "modelled"
        return f"the cost model was computed, not measured: {label}"
    known = [key for key in ("pair", "device", "dtype", "threads") if costs.get(key) and meta.get(key)]
    other = [f"{key} {costs[key]} instead of {meta[key]}" for key in known if costs[key] != meta[key]]
    return f"the cost model is of {', '.join(other)}, where the trace was recorded" if other else None


def notes(evaluation: Evaluation) -> list[str]:
    """What a reader must know beside the table: texts that differ, missing parts, phases that do not add up."""
    found: list[str] = []
    if evaluation.baseline is None:
        rate = evaluation.baseline_row()["tokens_per_second"]
        found.append(f"plain decoding: {'n/a' if rate is None else f'{rate:.1f}'} tokens per second")
    if any(row["leaked_requests"] for row in evaluation.rows()):
        found.append("LEAKED: that many of the requests were trained or tuned on, so these rows hold for no others")
    found += evaluation.meta.get("notes", [])
    machines = _machines(evaluation.meta)
    if machines is not None:
        found.append(machines)
    held = evaluation.meta.get("drafter_memory")
    if held:
        found.append(f"drafts in memory at the end: {', '.join(str(DrafterMemory(**m)) for m in held)}")
    if evaluation.ladder is not None and evaluation.ladder.tuned is None:
        found.append("oracle fraction: n/a, there are no requests of the split 'train' apart from those evaluated")
    same = evaluation.same_text
    if same is None:
        found.append("same text: not comparable (sampled by rejection, or nothing finished)")
    elif same:
        found.append("same text: yes, every policy emitted the same tokens for every request")
    else:
        differing = evaluation.text_differences()
        first = differing[0]
        found.append(
            f"same text: NO, {len(differing)} runs differ from plain decoding, the first is {first['policy']} on "
            f"{first['id']} at token {first['position']}"
        )
    if not evaluation.complete:
        total = evaluation.meta["requests"] * evaluation.meta["repeats"]
        found.append(f"INCOMPLETE: {len(evaluation.results)} of {total} requests were finished")
    found += _seeds(evaluation)
    details = evaluation.details()
    thrown = [f"{d['label']} {d['discarded']}" for d in details if d["discarded"]]
    if thrown:
        found.append(f"tokens discarded unjudged: {', '.join(thrown)} (in no rate, paid for in the seconds)")
    for detail in details:
        gap = detail["phase_gap"]
        if gap is not None and gap > GAP:
            found.append(f"{detail['label']}: the phase times miss the total by {100 * gap:.1f} %")
    found += _wall(evaluation)
    return found


def _seeds(evaluation: Evaluation) -> list[str]:
    """What the seeds and the column `sd` mean."""
    seeds = evaluation.meta.get("policy_seeds")
    several = "repeats" if seeds is None else f"seeds {' '.join(map(str, seeds))}"
    if evaluation.meta["repeats"] < 2:
        return []
    found = [
        f"sd: standard deviation of the speed-up over the {several}; the 95 % interval draws prompts with all of them"
    ]
    if seeds is not None:
        found[0] += "; each seed has its own order of requests"
    if evaluation.once:
        found.append(
            "once: keeps nothing from request to request and takes no seed, so it is played for the first seed alone"
        )
    return found


GAP = 0.05
"""share of the time that no phase may leave unexplained without a warning"""


def _wall(evaluation: Evaluation) -> list[str]:
    """Do the phases and the prefill make up the wall clock? For measured time only."""
    open_shares = {d["label"]: d["unexplained_share"] for d in evaluation.details()}
    shares = {label: share for label, share in open_shares.items() if share is not None}
    if not shares:
        return []
    low, high = (100 * (1 - end(shares.values())) for end in (max, min))
    found = [f"time check: prefill and phases make up {low:.1f} to {high:.1f} % of each policy's wall time"]
    return found + [
        f"WARNING, {label}: {100 * share:.1f} % of the wall time is in no phase, more than {100 * GAP:g} %"
        for label, share in shares.items()
        if abs(share) > GAP
    ]
