"""Value iteration over a small table of states."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from assc.actions import ActionTable
from assc.core import ROLLBACK, Action, Observation, RoundRecord
from assc.errors import ArtefactError
from assc.observe import EMA_DECAY, EMA_START
from assc.registry import register
from policies import probing
from policies.base import BasePolicy
from policies.round_costs import Costs, add_round, prices, sound_costs

ENTROPY_EDGES = (0.5, 1.5, 3.0)
"""nats of the target's entropy at the last committed token; one more bin where it is unknown"""
POSITION_EDGES = (16, 64)
"""committed tokens"""
EMA_EDGES = (0.35, 0.60, 0.85)
"""average acceptance"""
BINS = (len(ENTROPY_EDGES) + 2, len(POSITION_EDGES) + 1, len(EMA_EDGES) + 1)
STATES = BINS[0] * BINS[1] * BINS[2]
OUTCOMES = 4
"""nothing drafted, first token refused, refused later, all accepted"""

OPTIMISM, TRUST = 0.75, 4.0
"""acceptance of a draft position that nobody has seen, and how many tokens this belief is worth"""
SWEEPS = 25
LOAD = "16"

Counts = dict[str, list[list[list[float]]]]


def state_of(entropy: float | None, position: int, ema: float) -> int:
    """Number of the state.

    >>> state_of(None, 0, 0.75), state_of(0.1, 100, 0.9), STATES
    (50, 11, 60)
    """
    e = BINS[0] - 1 if entropy is None or entropy != entropy else bisect_right(ENTROPY_EDGES, entropy)
    return (e * BINS[1] + bisect_right(POSITION_EDGES, position)) * BINS[2] + bisect_right(EMA_EDGES, ema)


def _chances(counts: NDArray[np.float64], prior: NDArray[np.float64], trust: float) -> NDArray[np.float64]:
    """Chances of the next bin, [..., from, to], from counts of moves and a belief worth `trust` moves."""
    chances: NDArray[np.float64] = (counts + trust * prior) / (counts.sum(axis=-1, keepdims=True) + trust)
    return chances


@register("mdp")
class Mdp(BasePolicy):
    """The optimal action of a Markov decision process whose table is estimated as it goes.

    States: entropy bin of the target (below 0.5, 1.5, 3.0 nats, above, unknown) x position bin (below 16, 64 tokens,
    above) x bin of the acceptance average (below 0.35, 0.60, 0.85, above; the featurizer's average). Actions: the
    table. Reward: tokens − ρ·seconds with ρ the policy's own Σtokens/Σseconds, future rounds discounted by `gamma`.

    Estimated from finished rounds: per state and drafter the acceptance of each draft position given the ones before
    (drawn by 4 tokens' weight to its mean over the states, and that to 0.75, so that what is untried looks good); how
    the entropy bin and the average's bin move after each of four outcomes (nothing drafted, first token refused,
    refused later, all accepted), and the position bin by itself. Entropy moves after an outcome are drawn to those
    after any, else an outcome nobody has seen would be believed to change nothing. One round tells about every K, since
    the accepted length for a smaller K follows from it. Seconds as in `policies.round_costs`. Every `every` rounds the
    table is solved anew by 25 sweeps of value iteration, after which counts are multiplied by `memory`.

    A drafter that was not asked for `probe` rounds is asked for 2 tokens. `frozen=true` plays the table it was given
    (a saved policy) and neither learns nor probes.

    Uses acceptance history, target entropy, the seconds of its own rounds. Source: in the manner of JointAdaSpec
    (levvius/adaptive-speculative-decoding), with the length as the only decision so that it stays lossless; value
    iteration: Bellman 1957, Puterman 1994.

    >>> from assc.actions import ActionTable
    >>> policy = Mdp()
    >>> policy.begin(ActionTable.build(["model"], [1, 2, 4, 8]))
    >>> str(policy.act(Observation(0, 3, 9, 8, 0.0, (), 0.1)))
    'model:8'
    """

    uses: ClassVar[str] = "H, E, seconds"
    learner: ClassVar[bool] = True
    needs = frozenset({"target_entropy"})
    learned: ClassVar[tuple[str, ...]] = (
        *("reached", "passed", "entropy_moves", "position_moves", "ema_moves"),
        *("costs", "pace", "plan", "probes", "rounds"),
    )
    checks: ClassVar[Mapping[str, Callable[[Any], bool]]] = {
        "costs": sound_costs,
        "pace": lambda pace: len(pace) == 2 and min(pace) >= 0,
    }
    per_request: ClassVar[tuple[str, ...]] = ("ema", "seen", "pending")

    def __init__(
        self,
        gamma: float = 0.9,
        every: int = 64,
        memory: float = 0.95,
        probe: int = probing.REST,
        share: float = probing.SHARE,
        frozen: bool = False,
    ) -> None:
        if not (0 <= gamma < 1 and 0 < memory <= 1):
            raise ValueError(f"gamma is in [0, 1) and memory in (0, 1], got {gamma} and {memory}")
        if every < 1:
            raise ValueError(f"every is at least 1, got {every}")
        probing.check_setting(probe, share)
        self.gamma, self.every, self.memory, self.frozen = gamma, every, memory, frozen
        self.probe, self.share = probe, share
        self.reached: dict[str, list[list[float]]] = {}
        self.passed: dict[str, list[list[float]]] = {}
        """drafter -> [state][position]: tokens judged there, and accepted"""
        self.entropy_moves = np.zeros((OUTCOMES, BINS[0], BINS[0])).tolist()
        self.position_moves = np.zeros((BINS[1], BINS[1])).tolist()
        self.ema_moves = np.zeros((OUTCOMES, BINS[2], BINS[2])).tolist()
        self.costs: Costs = {}
        self.pace = [0.0, 0.0]
        self.plan: dict[str, str] = {}
        """state -> action, as text; empty: not solved yet"""
        self.probes = probing.fresh_probes()
        self.rounds = 0
        self.ema, self.seen, self.pending = EMA_START, -1, [-1, 0]
        self._c = 0.0
        self._probe: probing.Probe | None = None

    def begin(self, table: ActionTable) -> None:
        super().begin(table)
        self._played = table if self.saved_table is None else self.saved_table
        self._limits = {d: max(table.k_values(d)) for d in table.drafters}
        self._longest = self._played.k_max
        for d in self._played.drafters:
            for counts in (self.reached, self.passed):
                rows = counts.setdefault(d, [[0.0] * self._longest for _ in range(STATES)])
                for row in rows:
                    row.extend([0.0] * (self._longest - len(row)))
        probing.know(self.probes, self._played.drafters)
        self._adopt()

    def _adopt(self) -> None:
        known = {str(a): a for a in self._played}
        self._actions = [known.get(self.plan.get(str(s), ""), ROLLBACK) for s in range(STATES)]

    def act(self, observation: Observation) -> Action:
        if not self._limits:
            return ROLLBACK
        if not self.plan:
            self._c = observation.cost_ratio
            self._solve()
        self.seen = s = state_of(observation.target_entropy, observation.position, self.ema)
        self._c = observation.cost_ratio
        action = self._actions[s].clipped(observation.k_max)
        self._probe = None
        if not self.frozen and (ready := probing.due(self.probes, self.probe)):
            self._probe = self._probed(ready, s, action, observation)
            if self._probe is not None:
                return self.draft(1, observation, self._probe.drafter)
        return action

    def _probed(self, ready: list[str], s: int, action: Action, o: Observation) -> probing.Probe | None:
        """The probe to play instead of this action, if one is due and can be paid."""
        if o.k_max < 1:
            return None
        tokens, seconds = self.pace
        rho = tokens / seconds if seconds > 0 else 1.0 / prices(self.costs, LOAD, None, self._c)[0]
        worth, found = self._worth(s, action, rho)[0], []
        for d in ready:
            if d in self._limits and d != action.drafter and probing.can_show(d, o):
                value, chance = self._worth(s, Action(d, 1), rho)
                found.append(probing.Probe(d, worth - value, chance))
        return probing.choose(self.probes, found)

    def _worth(self, s: int, action: Action, rho: float) -> tuple[float, float]:
        """E[tokens] − ρ·E[seconds] of one round in a state, and the chance that its first token is accepted."""
        base, call, token = prices(self.costs, LOAD, action.drafter, self._c)
        if action.drafter is None:
            return 1.0 - rho * base, 0.0
        run = self._survival(action.drafter, s)
        return 1.0 + float(run[: action.k].sum()) - rho * (base + call + action.k * token), float(run[0])

    def _survival(self, drafter: str, s: int | None = None) -> NDArray[np.float64]:
        """Chances that the first 1, 2 … tokens of a drafter are all accepted, [states, positions] or of one state."""
        reached, passed = np.array(self.reached[drafter]), np.array(self.passed[drafter])
        mean = (OPTIMISM * TRUST + passed.sum(axis=0)) / (TRUST + reached.sum(axis=0))
        if s is not None:
            reached, passed = reached[s], passed[s]
        chances: NDArray[np.float64] = ((mean * TRUST + passed) / (TRUST + reached)).cumprod(axis=-1)
        return chances

    def update(self, record: RoundRecord) -> None:
        drafted, accepted, name = record.drafted, record.accepted, record.action.drafter
        s, self.seen = self.seen, -1
        if drafted:
            self.ema = EMA_DECAY * self.ema + (1 - EMA_DECAY) * accepted / drafted
        if self.frozen:
            return
        probe, self._probe = self._probe, None
        better = probing.count(self.probes, record, self.share, probe)
        if add_round(self.costs, record, LOAD):
            self.pace = [0.995 * self.pace[0] + record.emitted, 0.995 * self.pace[1] + record.seconds]
        before, outcome = self.pending
        if s >= 0 and before >= 0:
            self._moved(before, outcome, s)
        self.pending = [s, 0 if not drafted else 3 if accepted == drafted else 1 if accepted == 0 else 2]
        if s >= 0 and name in self.reached and (drafted or record.planned):
            judged = accepted + (drafted == 0 or (accepted < drafted and record.finish is None))
            for j in range(min(judged, self._longest)):
                self.reached[name][s][j] += 1.0
            for j in range(min(accepted, self._longest)):
                self.passed[name][s][j] += 1.0
        if better and probe is not None:
            for counts in (self.reached, self.passed):
                counts[probe.drafter] = np.zeros_like(counts[probe.drafter]).tolist()
        self.rounds += 1
        if self.rounds % self.every == 0:
            self._solve()
            self._forget()
        elif better:
            self._solve()

    def _moved(self, before: int, outcome: int, after: int) -> None:
        (e, p, m), (e2, p2, m2) = (np.unravel_index(s, BINS) for s in (before, after))
        self.entropy_moves[outcome][e][e2] += 1.0
        self.position_moves[p][p2] += 1.0
        self.ema_moves[outcome][m][m2] += 1.0

    def _forget(self) -> None:
        if self.memory < 1:
            for counts in (self.reached, self.passed):
                for d, rows in counts.items():
                    counts[d] = (self.memory * np.array(rows)).tolist()
            for name in ("entropy_moves", "position_moves", "ema_moves"):
                setattr(self, name, (self.memory * np.array(getattr(self, name))).tolist())

    def _outcomes(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Expected reward [states, actions] and chances of the outcomes [states, actions, OUTCOMES]."""
        actions = self._played.actions
        reward, chance = np.empty((STATES, len(actions))), np.zeros((STATES, len(actions), OUTCOMES))
        tokens, seconds = self.pace
        plain = prices(self.costs, LOAD, None, self._c)[0]
        rho = tokens / seconds if seconds > 0 else 1.0 / plain
        reward[:, 0], chance[:, 0, 0] = 1.0 - rho * plain, 1.0
        survive = {d: self._survival(d) for d in self._played.drafters}
        for i, a in enumerate(actions):
            if a.drafter is not None:
                run, (base, call, token) = survive[a.drafter], prices(self.costs, LOAD, a.drafter, self._c)
                reward[:, i] = 1.0 + run[:, : a.k].sum(axis=1) - rho * (base + call + a.k * token)
                chance[:, i, 1], chance[:, i, 3] = 1.0 - run[:, 0], run[:, a.k - 1]
                chance[:, i, 2] = run[:, 0] - run[:, a.k - 1]
        return reward, chance

    def _solve(self) -> None:
        reward, chance = self._outcomes()
        counts = [np.array(m) for m in (self.entropy_moves, self.position_moves, self.ema_moves)]
        anyhow = _chances(counts[0].sum(axis=0), np.eye(BINS[0]), 1.0)
        e = _chances(counts[0], anyhow, TRUST)
        p, m = (_chances(x, np.eye(x.shape[-1]), 1.0) for x in counts[1:])
        value = np.zeros(BINS)
        quality = reward
        for _ in range(SWEEPS if self.gamma else 0):
            later = np.einsum("omc,oepc->oepm", m, np.einsum("oea,apc->oepc", e, np.einsum("pb,abc->apc", p, value)))
            quality = reward + self.gamma * np.einsum("sko,os->sk", chance, later.reshape(OUTCOMES, STATES))
            value = quality.max(axis=1).reshape(BINS)
        best = quality.argmax(axis=1)
        self.plan = {str(s): str(self._played.actions[a]) for s, a in enumerate(best.tolist())}
        self._adopt()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        try:
            for part in ("reached", "passed"):
                good = all(len(rows) == STATES for rows in state[part].values())
                shapes = [np.array(rows, dtype=np.float64).ndim for rows in state[part].values()]
                if not good or any(n != 2 for n in shapes):
                    raise ValueError
            for name in ("entropy_moves", "position_moves", "ema_moves"):
                if np.array(state[name], dtype=np.float64).shape != np.array(getattr(self, name)).shape:
                    raise ValueError
        except (KeyError, TypeError, ValueError, AttributeError):
            raise ArtefactError(f"the saved state of {self.spec!r} does not have its {STATES} states") from None
        probing.check_probes(state.get("probes"), self.spec)
        super().load_state_dict(state)
