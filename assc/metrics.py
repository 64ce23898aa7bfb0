"""The numbers of a result table, each with its definition. Pure arithmetic over `Totals` and rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from assc.core import Episode, RoundRecord, Totals
from assc.oracle import Ladder
from assc.reliability import reliability
from assc.rungs import RUNGS
from assc.stats import NO_INTERVAL, Interval, mean_of_ratios, speedup, speedup_interval

ROW_KEYS: tuple[str, ...] = (
    "policy",
    "tokens",
    "seconds",
    "tokens_per_second",
    "speedup",
    "speedup_ci95",
    "acceptance_rate",
    "waste_rate",
    "mean_k",
    "tokens_per_round",
    "rollback_rate",
    "draft_time_share",
    "policy_time_share",
    "rounds",
    "time_source",
    "oracle_fraction",
    "action",
    "leaked_requests",
    "rung",
    "plays",
    "speedup_sd",
)

DEFINITIONS: dict[str, str] = {
    "tokens": "tokens committed, bonus and correction tokens included, over all requests and repeats or seeds",
    "seconds": "seconds of the rounds (draft, verify, policy, other) without the prefill of the prompt, measured or "
    "modelled as meta.time_source says",
    "tokens_per_second": "tokens / seconds, both summed first (a ratio of totals, not a mean of ratios)",
    "speedup": "tokens_per_second of the policy / the same of plain decoding ('ar') through the same engine, on the "
    "same requests, interleaved in the same run",
    "speedup_ci95": "95 % interval of speedup: bootstrap over requests, paired (a prompt's requests at several "
    "temperatures, and all their seeds or repeats, are drawn together), percentiles of the logarithm widened for the "
    "small number of requests; "
    "[null, null] for a single request; not adjusted for the number of policies, see comparisons",
    "acceptance_rate": "accepted / drafted, both summed first; accepted is the leading run after clipping at stop and "
    "budget, the bonus token is not counted, drafted counts verified tokens only; null when nothing was drafted",
    "waste_rate": "1 - acceptance_rate",
    "mean_k": "mean over all rounds of the K that the policy planned, rollback rounds count as 0; of a step policy the "
    "tokens that it let be drafted, discarded ones included",
    "tokens_per_round": "tokens / rounds, both summed first (tau, block efficiency, mean accepted length + 1)",
    "rollback_rate": "rounds in which the policy chose plain decoding, before or after drafting / rounds",
    "draft_time_share": "seconds spent drafting / seconds",
    "policy_time_share": "seconds spent in the policy (deciding and learning) / seconds",
    "rounds": "verification steps of the target, counted one by one",
    "time_source": "measured = the clock of this run; modelled = a cost model priced the counted work",
    "oracle_fraction": "(policy - static:tuned) / (oracle - static:tuned) in tokens_per_second, on the same requests: "
    "0 is the static action tuned on train requests, 1 the hindsight optimum, below 0 is worse than tuning one action; "
    "null without a trace, without requests to tune on, or where the oracle gains nothing",
    "action": "what tuning chose for static:tuned, drafter:K or rollback; null for every other policy",
    "leaked_requests": "evaluated requests from which the policy, or a draft, has learned: 0 unless --allow-leakage, "
    "and what it is worth there says nothing about other prompts",
    "rung": "; ".join(f"{name} = {meaning}" for name, meaning in RUNGS.items())
    + "; by what a policy declares, null for one that declares nothing",
    "plays": "how often each request was played: once per repeat, or once per seed (--policy-seeds: policies made with "
    "the seed, requests in an order drawn by it); a policy that keeps nothing from request to request and takes no "
    "seed is played once, and that counts for every seed",
    "speedup_sd": "standard deviation over seeds or repeats of the speedup of each alone; null for one play",
    "ladder": "rungs that need no policy, on the same requests, null without a trace: plain = no drafting; tuned = the "
    "action with the most tokens per second on train requests, played in all rounds; best_static_per_request = each "
    "request with its own best action, known in hindsight; oracle = the exact minimum of seconds over every schedule "
    "of drafter and K",
    "same_text": "every policy emitted the same token ids for every request; null in mode rejection, where texts "
    "differ by design",
    "health": "per policy, over all rounds (total) and the last 256 (window): acceptance in 0.60..0.85, share of "
    "drafting in the time below 0.40, speed-up over plain decoding of the same requests in 1.5..2.5, rollback rounds "
    "that a policy gave a reason for below 5 % of rounds; state failing = slower than plain decoding, degraded = "
    "outside a band on the side of a fault, unknown = fewer than 32 rounds; triggers = how often the windowed figure "
    "left its band; notes = reasons that the policy gave; memory_peak_bytes = of the device during verification",
    "details.tokens_per_round_mean_of_requests": "mean over requests of tokens / rounds of each request",
    "details.acceptance_rate_mean_of_requests": "mean over the requests that drafted of each one's accepted / drafted",
    "details.mean_drafted": "drafted / rounds in which a token was drafted; below K when the budget, an early stop or "
    "a missing n-gram match cut it",
    "details.acceptance_by_position": "entry j: rounds that accepted draft token j+1 / rounds that drafted it",
    "details.discarded": "tokens drafted but thrown away without being judged by the target (a step policy rolled "
    "back, or chunked verification ended before their group); in no rate, but their seconds are in seconds",
    "details.target_forwards": "forwards of the target in all rounds: above rounds where verification is chunked",
    "details.loads": "unloaded drafts that were brought back for a round",
    "details.wasted_draft_seconds": "sum over rounds of draft seconds * (drafted + discarded - accepted) / (drafted + "
    "discarded)",
    "details.phase_gap": "|draft + verify + policy + other - seconds| / seconds, should be under 0.05",
    "details.wall_seconds": "wall clock of the episodes, prefill and observation included",
    "details.unexplained_share": "(wall - prefill - seconds) / wall for measured time: what no phase accounts for",
    "details.accept_reliability": "for policies that predict acceptance: per tenth of predicted chance the positions "
    "judged, their mean prediction and the share accepted, with 95 % bootstrap intervals over prompts; brier = mean "
    "squared error, brier_constant = that of always predicting the accepted share; null where nothing is predicted",
    "details.speedup_by_repeat": "speedup of each repeat, or of each seed in the order of meta.policy_seeds, alone",
    "by_category, by_temperature": "the same rows for the requests of one category or temperature",
    "comparisons.ratio": "tokens_per_second of the policy / the same of the reference ('against'); ci95 is its "
    "interval, made like speedup_ci95",
    "comparisons.p_value": "two-sided, of the ratio being 1, from the resamples of the interval: below 0.05 where the "
    "95 % interval excludes 1; where the resamples end, of a t test with their standard error",
    "comparisons.p_holm": "p_value adjusted by Holm's procedure for all policies compared with this reference (the "
    "oracle is no contestant)",
    "comparisons.verdict": "faster or slower where p_holm < 0.05, else open; unknown for fewer than two prompts",
    "comparisons.detectable": "minimum detectable effect: the least true difference that this number of prompts shows "
    "with odds of 80 % at the 5 % level, one comparison alone, (t_0.975 + t_0.8) standard errors of log ratio",
    "comparisons.prompts_for_one_percent": "prompts after which a true difference of 1 % would be detectable",
}


@dataclass(frozen=True)
class Run:
    """One policy on one request in one repeat. Seconds of wall clock stand beside the rounds' own seconds."""

    index: int
    """number of the request in the evaluation"""
    repeat: int
    episode: Episode
    wall_seconds: float = 0.0
    prefill_seconds: float = 0.0
    memory_peak: int | None = None
    """bytes of the device in use at once during the rounds, None where nobody knows"""

    @cached_property
    def totals(self) -> Totals:
        return Totals.of(self.episode.rounds)

    def again(self, repeat: int) -> Run:
        """The same play, counted for another repeat."""
        copy = replace(self, repeat=repeat)
        copy.__dict__["totals"] = self.totals
        return copy


def pooled(runs: Sequence[Run]) -> Totals:
    """Totals over all runs."""
    total = Totals()
    for run in runs:
        total = total + run.totals
    return total


def per_request(runs: Sequence[Run]) -> list[Totals]:
    """Totals of each request over its repeats, in order of the request number.

    One prompt at several temperatures (requests of one id) counts as one: its texts are not independent.
    """
    sums: dict[str | int, Totals] = {}
    for run in sorted(runs, key=lambda run: run.index):
        key = run.episode.request.id or run.index
        sums[key] = sums.get(key, Totals()) + run.totals
    return list(sums.values())


def columns(totals: Sequence[Totals]) -> tuple[list[float], list[float]]:
    """Tokens and seconds, one entry per request, as `assc.stats` takes them."""
    return [float(t.tokens) for t in totals], [t.seconds for t in totals]


def make_row(
    name: str,
    mine: Sequence[Run],
    base: Sequence[Run],
    *,
    seed: int,
    is_baseline: bool,
    measured: bool = True,
    ladder: Ladder | None = None,
    action: str | None = None,
    leaked: int = 0,
    rung: str | None = None,
    once: bool = False,
) -> dict[str, Any]:
    """One row of the table, with exactly `ROW_KEYS`. `mine`, `base` and `ladder` cover the same requests, repeated.

    `once`: what stands in `mine` for several repeats was played in the first alone.
    """
    total = pooled(mine)
    ratio: float | None = None
    interval: Interval = NO_INTERVAL
    if is_baseline and mine:
        ratio, interval = 1.0, (1.0, 1.0)
    elif mine:
        both = (*columns(per_request(mine)), *columns(per_request(base)))
        # the same resamples for every row, so rows are comparable
        ratio, interval = speedup(*both), speedup_interval(*both, rng=np.random.default_rng(seed))
    values = {
        "policy": name,
        "tokens": total.tokens,
        "seconds": total.seconds,
        "tokens_per_second": total.tokens_per_second,
        "speedup": ratio,
        "speedup_ci95": list(interval),
        "acceptance_rate": total.acceptance_rate,
        "waste_rate": total.waste_rate,
        "mean_k": total.mean_k,
        "tokens_per_round": total.tokens_per_round,
        "rollback_rate": total.rollback_rate,
        "draft_time_share": total.share("draft"),
        "policy_time_share": total.share("policy"),
        "rounds": total.rounds,
        "time_source": "measured" if measured else "modelled",
        "oracle_fraction": ladder.fraction(total.seconds) if ladder is not None else None,
        "action": action,
        "leaked_requests": leaked,
        "rung": rung,
        "plays": 1 if once else len({run.repeat for run in mine}),
        "speedup_sd": None if once else _deviation(_by_repeat(mine, base)),
    }
    return {key: values[key] for key in ROW_KEYS}


def acceptance_by_position(rounds: Sequence[RoundRecord]) -> list[float]:
    """Entry j: share of the rounds with more than j drafted tokens that accepted more than j.

    Not conditional on the token before, so it falls with j even for a constant acceptance per token.
    """
    longest = max((r.drafted for r in rounds), default=0)
    drafted, accepted = (
        np.bincount(counts, minlength=longest + 1)[:0:-1].cumsum()[::-1]
        for counts in ([r.drafted for r in rounds] or [0], [r.accepted for r in rounds] or [0])
    )
    share: list[float] = (accepted / drafted).tolist()
    return share


def _by_repeat(mine: Sequence[Run], base: Sequence[Run]) -> list[float | None]:
    ratios: list[float | None] = []
    for repeat in sorted({s.repeat for s in mine}):
        ours = [s.totals for s in mine if s.repeat == repeat]
        plain = [s.totals for s in base if s.repeat == repeat]
        ratios.append(speedup(*columns(ours), *columns(plain)))
    return ratios


def _deviation(values: Sequence[float | None]) -> float | None:
    """Standard deviation (n - 1) of what is known, None for fewer than two values."""
    known = [v for v in values if v is not None]
    return float(np.std(known, ddof=1)) if len(known) > 1 else None


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def make_details(mine: Sequence[Run], base: Sequence[Run], *, measured: bool, seed: int = 0) -> dict[str, Any]:
    """Further numbers of one policy, defined in `DEFINITIONS` under "details."."""
    total, requests = pooled(mine), per_request(mine)
    rounds = [r for s in mine for r in s.episode.rounds]
    drafting = sum(r.drafted > 0 for r in rounds)
    phases = total.draft_seconds + total.verify_seconds + total.policy_seconds + total.other_seconds
    wall, prefill = sum(s.wall_seconds for s in mine), sum(s.prefill_seconds for s in mine)
    return {
        "planned": total.planned,
        "drafted": total.drafted,
        "accepted": total.accepted,
        "discarded": total.discarded,
        "target_forwards": sum(r.forwards for r in rounds),
        "loads": sum(r.loads for r in rounds),
        "rollbacks": total.rollbacks,
        "mean_drafted": total.drafted / drafting if drafting else None,
        "acceptance_by_position": acceptance_by_position(rounds),
        "acceptance_rate_mean_of_requests": mean_of_ratios(
            [t.accepted for t in requests], [t.drafted for t in requests]
        ),
        "tokens_per_round_mean_of_requests": mean_of_ratios([t.tokens for t in requests], [t.rounds for t in requests]),
        "draft_seconds": total.draft_seconds,
        "verify_seconds": total.verify_seconds,
        "policy_seconds": total.policy_seconds,
        "other_seconds": total.other_seconds,
        "wasted_draft_seconds": sum(
            r.draft_seconds * (1 - r.accepted / made) for r in rounds if (made := r.drafted + r.discarded)
        ),
        "phase_gap": _share(abs(phases - total.seconds), total.seconds),
        "wall_seconds": wall,
        "prefill_seconds": prefill,
        "unexplained_share": _share(wall - prefill - total.seconds, wall) if measured else None,
        "accept_reliability": reliability(
            [(s.episode.request.id or s.index, s.episode.rounds) for s in mine], seed=seed
        ),
        "speedup_by_repeat": _by_repeat(mine, base),
    }
