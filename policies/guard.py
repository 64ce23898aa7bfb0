"""Layered fallback around any policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from assc.actions import ActionTable
from assc.core import ROLLBACK, Action, Observation, RoundRecord
from assc.errors import ArtefactError, SpecError
from assc.registry import make_policy, register
from policies.base import BasePolicy

HEALTH: dict[str, tuple[float, float]] = {
    "acceptance": (0.60, 0.85),
    "draft_share": (0.0, 0.40),
    "speed_up": (1.5, 2.5),
    "fallback_share": (0.0, 0.05),
}
"""bands in which a run counts as healthy"""

COUNTERS = ("rounds", "rejections", "local", "probes", "global_draft", "global_speed", "fallback_rounds", "requests")
SUMS = ("drafted", "accepted", "tokens", "seconds", "draft_seconds")


@register("guard")
class Guard(BasePolicy):
    """Plays `policy` while it does well and rolls back where it does not, in three layers.

    - token: a rejected token is replaced and decoding goes on (the decoder does that); counted as `rejections`.
    - local: `rounds` rounds in a row that drafted had accepted/drafted < `low`: roll back for `span` rounds, then
      draft `probe` tokens once; if they are accepted at `low` or better the policy goes on, else another span begins.
    - global, for the rest of the request, judged after `settle` rounds of it: a drafted token takes more than `share`
      of a target step (`global_draft`), or the request so far was slower than plain decoding would have been, under
      `speed` times it (`global_speed`). The next request starts afresh.

    The target step is the mean of this request's rollback rounds, and while there are fewer than two of those the mean
    seconds of its rounds outside drafting, which is a little more. Rounds with unusable seconds are not judged.

    The wrapped policy sees every round, also those it did not choose, and keeps its own learning. `counts` and
    `report()` tell what happened; every decision that was overruled carries its reason in the round's record
    (`RoundRecord.reasons`). Spec: the policy in parentheses, then the keys of the guard: `guard(assc:k_max=6):span=8`.

    Uses acceptance history, its own seconds, and what the wrapped policy uses. Source: fallback layers and health
    bands of our own; the same shape as a circuit breaker with half-open probes (Nygard 2007).

    >>> from assc.actions import ActionTable
    >>> policy = Guard("static:4", rounds=2)
    >>> policy.begin(ActionTable.build(["model"], range(1, 9)))
    >>> class Seen: k_max = 8
    >>> for i in range(2):
    ...     policy.update(RoundRecord(i, i, policy.act(Seen), 4, 0, 1, (), 0.1))
    >>> str(policy.act(Seen)), policy.reasons, policy.counts["local"]
    ('rollback', ('guard: 2 rounds in a row below acceptance 0.5',), 1)
    """

    uses: ClassVar[str] = "H, seconds, and those of the policy"
    main_parameter: ClassVar[str | None] = "policy"
    example: ClassVar[str] = "guard(assc)"
    learned: ClassVar[tuple[str, ...]] = ("counts", "sums")
    per_request: ClassVar[tuple[str, ...]] = ("bad", "pause", "stopped", "why", "here", "plain")

    def __init__(
        self,
        policy: str,
        low: float = 0.50,
        rounds: int = 5,
        span: int = 16,
        probe: int = 2,
        share: float = 0.5,
        speed: float = 1.0,
        settle: int = 16,
        seed: int = 0,
    ) -> None:
        if not (0 <= low <= 1 and share > 0 and speed >= 0):
            raise ValueError(f"low is in [0, 1], share above 0, speed 0 or more, got {low}, {share}, {speed}")
        if min(rounds, span, probe, settle) < 1:
            raise ValueError(f"rounds, span, probe and settle are at least 1, got {rounds}, {span}, {probe}, {settle}")
        try:
            inner = make_policy(policy, seed=seed)
        except SpecError as error:
            raise SpecError(f"inside guard({policy}): {error}") from None
        if not isinstance(inner, BasePolicy):
            raise ValueError(f"guard goes around a policy of this package, not {policy!r}")
        self.inner, self.needs = inner, inner.needs
        self.low, self.rounds, self.span, self.probe = low, rounds, span, probe
        self.share, self.speed, self.settle = share, speed, settle
        self.counts: dict[str, int] = dict.fromkeys(COUNTERS, 0)
        self.sums: dict[str, float] = dict.fromkeys(SUMS, 0.0)
        self.bad, self.stopped, self.why = 0, False, ""
        self.pause = -1
        """rollback rounds left of a local fallback; 0: the next drafting round is a probe; -1: none"""
        self.here: list[float] = [0.0] * 5
        """this request: rounds, tokens, seconds, seconds of drafting, drafted tokens"""
        self.plain: list[float] = [0.0, 0.0]
        """this request: rollback rounds and their seconds"""

    def begin(self, table: ActionTable) -> None:
        super().begin(table)
        self.inner.begin(table)
        self.counts["requests"] += 1

    def reset(self) -> None:
        super().reset()
        self.inner.reset()

    def mark_initial(self) -> None:
        super().mark_initial()
        self.inner.mark_initial()

    def act(self, observation: Observation) -> Action:
        self.reasons = (self.why,) if self.why else ()
        if self.stopped or self.pause > 0:
            return ROLLBACK
        action = self.inner.act(observation)
        if self.pause == 0 and action.k > self.probe:
            action = Action(action.drafter, self.probe)
        self.reasons += self.inner.reasons
        return action

    def accept_chances(self, action: Action) -> tuple[float, ...]:
        """Those of the policy inside, whose draft it is."""
        return self.inner.accept_chances(action)

    def update(self, record: RoundRecord) -> None:
        counts, drafted = self.counts, record.drafted
        counts["rounds"] += 1
        counts["rejections"] += record.accepted < drafted
        counts["fallback_rounds"] += self.stopped or self.pause > 0
        self._add(record)
        self.inner.update(record)
        if self.stopped:
            return
        if self.pause > 0:
            self.pause -= 1
            self.why = self.why if self.pause else "guard: probe after a local fallback"
        elif drafted:
            poor = record.accepted < self.low * drafted
            if self.pause == 0:
                counts["probes"] += 1
                self.pause, self.why = (self.span, "guard: the probe failed") if poor else (-1, "")
                self.bad = 0
            else:
                self.bad = self.bad + 1 if poor else 0
                if self.bad >= self.rounds:
                    counts["local"] += 1
                    self.bad, self.pause = 0, self.span
                    self.why = f"guard: {self.rounds} rounds in a row below acceptance {self.low:g}"
        self._judge()

    def _add(self, record: RoundRecord) -> None:
        if not 0.0 < record.seconds <= 1e6:
            return
        drafting = record.draft_seconds if 0.0 <= record.draft_seconds <= record.seconds else 0.0
        added = (record.drafted, record.accepted, record.emitted, record.seconds, drafting)
        for name, value in zip(SUMS, added, strict=True):
            self.sums[name] += value
        here = (1.0, record.emitted, record.seconds, drafting, record.drafted)
        self.here = [a + b for a, b in zip(self.here, here, strict=True)]
        if record.rollback:
            self.plain = [self.plain[0] + 1.0, self.plain[1] + record.seconds]

    def target_step(self) -> float:
        """Seconds of a plain step in this request as far as known; 0 before the first round."""
        rounds, _, seconds, drafting, _ = self.here
        if self.plain[0] >= 2:
            return self.plain[1] / self.plain[0]
        return (seconds - drafting) / rounds if rounds else 0.0

    def _judge(self) -> None:
        rounds, tokens, seconds, drafting, drafted = self.here
        step = self.target_step()
        if rounds < self.settle or step <= 0 or not drafted:
            return
        if drafting / drafted > self.share * step:
            self._stop("global_draft", f"a drafted token takes more than {self.share:g} of a target step")
        elif tokens * step < self.speed * seconds:
            self._stop("global_speed", f"the request runs below {self.speed:g} times plain decoding")

    def _stop(self, counter: str, why: str) -> None:
        self.counts[counter] += 1
        self.stopped, self.why = True, f"guard: {why}"

    def report(self) -> dict[str, Any]:
        """Counts, the figures of `HEALTH` (None where nothing was counted; no speed-up without a known plain step)."""
        s, counts = self.sums, self.counts
        step = self.target_step()
        figures = {
            "acceptance": s["accepted"] / s["drafted"] if s["drafted"] else None,
            "draft_share": s["draft_seconds"] / s["seconds"] if s["seconds"] else None,
            "speed_up": s["tokens"] * step / s["seconds"] if s["seconds"] and step else None,
            "fallback_share": counts["fallback_rounds"] / counts["rounds"] if counts["rounds"] else None,
        }
        healthy = {n: None if v is None else HEALTH[n][0] <= v <= HEALTH[n][1] for n, v in figures.items()}
        return {"counts": dict(counts), "figures": figures, "healthy": healthy}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "policy": self.inner.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        own = {k: v for k, v in state.items() if k != "policy"}
        if not isinstance(state.get("policy"), dict) or set(own.get("counts", ())) != set(COUNTERS):
            raise ArtefactError(f"policy {self.spec!r} expects its counts and the state of the policy inside")
        if not hasattr(self, "_initial"):
            self.mark_initial()  # before the policy inside has anything that `reset` must not return to
        self.inner.load_state_dict(state["policy"])
        super().load_state_dict(own)
