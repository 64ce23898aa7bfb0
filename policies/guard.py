"""Layered fallback around any policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from assc.actions import ActionTable
from assc.core import ROLLBACK, Action, Observation, RoundRecord
from assc.errors import ArtefactError, SpecError
from assc.monitor import judge
from assc.registry import make_policy, register
from assc.steps import step_decider
from policies.base import BasePolicy

COUNTERS = ("rounds", "rejections", "local", "probes", "global_draft", "global_speed", "fallback_rounds", "requests")
SUMS = ("drafted", "accepted", "tokens", "seconds", "draft_seconds")
RUIN = 4.0
"""a whole request is given up when it has lost this many times what a local fallback waits for"""


@register("guard")
class Guard(BasePolicy):
    """Plays `policy` while it does well and rolls back where it does not, in three layers.

    - token: a rejected token is replaced and decoding goes on (the decoder does that); counted as `rejections`.
    - local: `rounds` drafting rounds in a row were poor, and together they lost at least `loss` target steps against
      plain decoding: roll back for `span` rounds, then let the policy draft again with at most `probe` tokens, up to
      `probes` times. The first of these rounds that is not poor ends the fallback; if all are poor another span
      begins, twice as long as the one before, up to `longest`.
    - global, for the rest of the request, judged after `settle` rounds of it: one draft step takes more than `share` of
      a target step (`global_draft`), or the request so far runs under `speed` times plain decoding and has lost 4 times
      `loss` target steps or more by it (`global_speed`). The next request starts afresh.

    A round is poor when accepted/drafted < `low` and it was slower than plain decoding would have been for the tokens
    it emitted. Both: a lookup that drafts 12 tokens for next to nothing is accepted at 20 % and doubles the speed, and
    what five misses cost depends on c. So the bar is loss in target steps, seconds / step - emitted: a dear draft
    reaches it in `rounds` rounds, a cheap one may miss for long. Before it is asked again a local fallback has cost at
    most `loss` + one round.

    The target step is the mean of this request's rollback rounds, and while there are fewer than two of those the mean
    seconds of its rounds outside drafting, which is a little more. A draft step is a forward of the drafter, for
    lookups a drafted token. Rounds with unusable seconds are not judged.

    The wrapped policy sees every round, also those it did not choose, and keeps its own learning. `counts` and
    `report()` tell what happened; every decision that was overruled carries its reason in the round's record
    (`RoundRecord.reasons`). Spec: the policy in parentheses, then the keys of the guard: `guard(assc:k_max=6):span=4`.

    Uses acceptance history, its own seconds, and what the wrapped policy uses. Source: fallback layers of our own; the
    same shape as a circuit breaker with half-open probes (Nygard 2007) and exponential back-off, with the loss summed
    as in a CUSUM test (Page 1954).

    >>> from assc.actions import ActionTable
    >>> policy = Guard("static:4", rounds=2, loss=1.0)
    >>> policy.begin(ActionTable.build(["model"], range(1, 9)))
    >>> class Seen: k_max = 8
    >>> for i in range(2):  # a round of two target steps for one token
    ...     policy.update(RoundRecord(i, i, policy.act(Seen), 4, 0, 1, (), 0.1, draft_seconds=0.05))
    >>> str(policy.act(Seen)), policy.reasons, policy.counts["local"]
    ('rollback', ('guard: 2 or more rounds in a row below acceptance 0.5 lost 1 target steps or more',), 1)
    """

    uses: ClassVar[str] = "H, seconds, and those of the policy"
    main_parameter: ClassVar[str | None] = "policy"
    example: ClassVar[str] = "guard(assc)"
    learned: ClassVar[tuple[str, ...]] = ("counts", "sums")
    per_request: ClassVar[tuple[str, ...]] = (
        "bad",
        "lost",
        "pause",
        "next_span",
        "trials",
        "stopped",
        "why",
        "here",
        "plain",
    )

    def __init__(
        self,
        policy: str,
        low: float = 0.50,
        rounds: int = 5,
        loss: float = 3.0,
        span: int = 8,
        longest: int = 64,
        probe: int = 4,
        probes: int = 3,
        share: float = 0.5,
        speed: float = 1.0,
        settle: int = 16,
        seed: int = 0,
    ) -> None:
        if not (0 <= low <= 1 and share > 0 and speed >= 0 and loss >= 0):
            raise ValueError(
                f"low is in [0, 1], share above 0, speed and loss 0 or more, got {low}, {share}, {speed}, {loss}"
            )
        if min(rounds, span, probe, probes, settle) < 1 or longest < span:
            raise ValueError(
                f"rounds, span, probe, probes and settle are at least 1 and longest at least span, got {rounds}, "
                f"{span}, {probe}, {probes}, {settle} and {longest}"
            )
        try:
            inner = make_policy(policy, seed=seed)
        except SpecError as error:
            raise SpecError(f"inside guard({policy}): {error}") from None
        if not isinstance(inner, BasePolicy):
            raise ValueError(f"guard goes around a policy of this package, not {policy!r}")
        self.inner, self.needs = inner, inner.needs
        if (decide := step_decider(inner)) is not None:
            self.decide = decide
        self.trained_on, self.trained_mode, self.trained_c = inner.trained_on, inner.trained_mode, inner.trained_c
        self.low, self.rounds, self.loss = low, rounds, loss
        self.span, self.longest, self.probe, self.probes = span, longest, probe, probes
        self.share, self.speed, self.settle = share, speed, settle
        self.counts: dict[str, int] = dict.fromkeys(COUNTERS, 0)
        self.sums: dict[str, float] = dict.fromkeys(SUMS, 0.0)
        self.bad, self.lost = 0, 0.0
        """poor rounds in a row, and seconds that they lost"""
        self.stopped, self.why = False, ""
        self.pause = -1
        """rollback rounds left of a local fallback; 0: the next drafting round is a probe; -1: none"""
        self.next_span, self.trials = span, 0
        """rollback rounds of the next local fallback, and failed probes since the last one"""
        self.here: list[float] = [0.0] * 5
        """this request: rounds, tokens, seconds, seconds of drafting, draft steps"""
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
        usable = self._add(record)
        self.inner.update(record)
        if self.stopped:
            return
        if self.pause > 0:
            self.pause -= 1
            self.why = self.why if self.pause else "guard: probe after a local fallback"
        elif drafted:
            excess = record.seconds - record.emitted * self.target_step() if usable else 0.0
            self._local(excess, poor=excess > 0 and record.accepted < self.low * drafted)
        self._judge()

    def _local(self, excess: float, *, poor: bool) -> None:
        """A drafting round that took `excess` seconds more than plain decoding would have."""
        if self.pause == 0:
            self.counts["probes"] += 1
            self.trials += 1
            if not poor:
                self.pause, self.next_span, self.why = -1, self.span, ""
            elif self.trials >= self.probes:
                self._fall_back("guard: the probes failed")
            return
        self.bad, self.lost = (self.bad + 1, self.lost + excess) if poor else (0, 0.0)
        step = self.target_step()
        if self.bad >= self.rounds and self.lost >= self.loss * step:
            self.counts["local"] += 1
            self._fall_back(
                f"guard: {self.rounds} or more rounds in a row below acceptance {self.low:g} lost {self.loss:g} target "
                "steps or more"
            )

    def _fall_back(self, why: str) -> None:
        self.pause, self.why = self.next_span, why
        self.next_span = min(2 * self.next_span, self.longest)
        self.bad, self.lost, self.trials = 0, 0.0, 0

    def _add(self, record: RoundRecord) -> bool:
        """Count a round; False for one whose seconds cannot be used."""
        if not 0.0 < record.seconds <= 1e6:
            return False
        drafting = record.draft_seconds if 0.0 <= record.draft_seconds <= record.seconds else 0.0
        emitted, seconds, drafted = record.emitted, record.seconds, record.drafted
        sums = self.sums
        sums["drafted"] += drafted
        sums["accepted"] += record.accepted
        sums["tokens"] += emitted
        sums["seconds"] += seconds
        sums["draft_seconds"] += drafting
        here = self.here
        here[0] += 1.0
        here[1] += emitted
        here[2] += seconds
        here[3] += drafting
        here[4] += max(record.draft_steps, drafted)
        if record.plain:
            self.plain = [self.plain[0] + 1.0, self.plain[1] + record.seconds]
        return True

    def target_step(self) -> float:
        """Seconds of a plain step in this request as far as known; 0 before the first round."""
        rounds, _, seconds, drafting, _ = self.here
        if self.plain[0] >= 2:
            return self.plain[1] / self.plain[0]
        return (seconds - drafting) / rounds if rounds else 0.0

    def _judge(self) -> None:
        rounds, tokens, seconds, drafting, steps = self.here
        step = self.target_step()
        if rounds < self.settle or step <= 0 or not steps:
            return
        if drafting / steps > self.share * step:
            self._stop("global_draft", f"a draft step takes more than {self.share:g} of a target step")
        elif tokens * step < self.speed * seconds and seconds - tokens * step >= RUIN * self.loss * step:
            self._stop("global_speed", f"the request runs below {self.speed:g} times plain decoding")

    def _stop(self, counter: str, why: str) -> None:
        self.counts[counter] += 1
        self.stopped, self.why = True, f"guard: {why}"

    def report(self) -> dict[str, Any]:
        """Counts, and the figures of `assc.monitor.BANDS` with the state of each.

        A figure is None where nothing was counted; there is no speed-up without a known plain step.
        """
        s, counts = self.sums, self.counts
        step = self.target_step()
        figures = {
            "acceptance": s["accepted"] / s["drafted"] if s["drafted"] else None,
            "draft_share": s["draft_seconds"] / s["seconds"] if s["seconds"] else None,
            "speed_up": s["tokens"] * step / s["seconds"] if s["seconds"] and step else None,
            "fallback_share": counts["fallback_rounds"] / counts["rounds"] if counts["rounds"] else None,
        }
        return {"counts": dict(counts), "figures": figures, "bands": judge(figures)}

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
