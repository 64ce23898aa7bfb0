"""A learned chance of acceptance per draft position, and the best (drafter, K) under it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from assc.actions import ActionTable
from assc.core import ROLLBACK, Action, Observation, RoundRecord
from assc.errors import ArtefactError
from assc.kinds import first_model, is_lookup
from assc.registry import register
from policies import probing
from policies.arms import LONGEST
from policies.base import BasePolicy
from policies.round_costs import Costs, add_round, load_level, prices, sound_costs, sound_pace
from policies.vectors import LinearFeatures

START = 1.1
"""log-odds before anything is learned: a chance of 0.75"""


OWN = 16
"""draft positions with a constant of their own; those beyond share the last one"""


def of_position(k_max: int) -> NDArray[np.float64]:
    """Regressors of draft positions 1 … k_max that depend on j alone, [k_max, 1 + OWN]: log2(j) / 4 and [j = 1] …"""
    columns = np.zeros((k_max, 1 + OWN))
    columns[:, 0] = np.log2(np.arange(1, k_max + 1)) / 4.0
    columns[np.arange(k_max), 1 + np.minimum(np.arange(k_max), OWN - 1)] = 1.0
    return columns


def rows_of(x: NDArray[np.float64], judged: int) -> NDArray[np.float64]:
    """Regression rows of draft positions 1 … judged: x, x once more where j = 1, and those of the position.

    >>> rows_of(np.array([1.0, 0.5]), 2)[:, :7].tolist()
    [[1.0, 0.5, 1.0, 0.5, 0.0, 1.0, 0.0], [1.0, 0.5, 0.0, 0.0, 0.25, 0.0, 1.0]]
    """
    first = np.zeros((judged, len(x)))
    first[0] = x
    return np.hstack([np.tile(x, (judged, 1)), first, of_position(judged)])


@register("accept_model")
class AcceptModel(BasePolicy):
    """argmax over (drafter, K) of E[tokens] − ρ·E[seconds], with the acceptance of each position predicted.

    Per drafter a logistic regression gives p_j = P(position j is accepted, given that those before it were | x, j).
    Its regressors are x (1 and the fields acceptance_ema, full_streak, target_entropy, target_top1, ngram_match and
    position of the featurizer; with `confidence=true` also the draft's entropy and top-1, whose forward is then paid in
    every round), x again where j = 1, since what is known now says most about the next token, log2(j), and a constant
    of the position.
    E[tokens | K] = 1 + Σ_{k≤K} Π_{j≤k} p_j. E[seconds] is fitted to the policy's own rounds per level of load
    (`policies.round_costs`), before there are any it is 1 + K·c. ρ = Σtokens / Σseconds of this policy at that load,
    discounted by 0.995 per round. Plain decoding is worth 1 − ρ·(seconds of a target step).

    Learning: scikit-learn's SGDClassifier (log loss), `partial_fit` every `every` rounds on what those showed: each
    accepted position, and the first rejected one unless the request ended there; a lookup that proposed nothing counts
    as a rejection at j = 1. Decisions use the plain coefficients, so deployment with `frozen=true` needs numpy only.
    A drafter that was not asked for `probe` rounds is asked for 2 tokens, and again as long as all of them are accepted
    and it would not be asked anyway, so neither rollback nor a drafter is for ever; `frozen=true` does not probe. What
    was seen is learned after 4·`every` rounds at the latest, however few of them drafted.

    Uses acceptance history, target entropy, the n-gram match (and draft confidence if asked), load, the seconds of its
    own rounds. Source: this project; per-position acceptance prediction as in SpecDec++ (Huang et al. 2024, arXiv
    2405.19715), the expected goodput of Liu et al. 2024, arXiv 2406.14066.

    >>> from assc.actions import ActionTable
    >>> policy = AcceptModel()
    >>> policy.begin(ActionTable.build(["ngram", "model"], [1, 2, 4, 8]))
    >>> str(policy.act(Observation(0, 3, 9, 8, 0.0, (), 0.9, ngram_match=3)))
    'ngram:8'
    """

    uses: ClassVar[str] = "H, E, N, L, seconds"
    learner: ClassVar[bool] = True
    learned: ClassVar[tuple[str, ...]] = ("models", "buffer", "costs", "pace", "probes", "waited", "fields")
    checks: ClassVar[Mapping[str, Callable[[Any], bool]]] = {"costs": sound_costs, "pace": sound_pace}
    per_request: ClassVar[tuple[str, ...]] = ("level",)

    def __init__(
        self,
        every: int = 16,
        rate: float = 0.05,
        probe: int = probing.REST,
        share: float = probing.SHARE,
        fields: str = "",
        confidence: bool = False,
        frozen: bool = False,
    ) -> None:
        if every < 1 or not 0 < rate <= 1:
            raise ValueError(f"every is at least 1 and rate in (0, 1], got {every} and {rate}")
        probing.check_setting(probe, share)
        self.every, self.rate, self.probe, self.share, self.frozen = every, rate, probe, share, frozen
        self.features = LinearFeatures(fields, confidence=confidence)
        self.needs = self.features.needs
        self.fields = list(self.features.fields)
        self._size = 2 * self.features.size + 1 + OWN
        self._peeks = not self.needs.isdisjoint({"draft_entropy", "draft_top1"})
        self.models: dict[str, list[float]] = {}
        """drafter -> coefficients of `rows_of`"""
        self.buffer: list[list[Any]] = []
        """rounds not yet learned from: drafter, x, accepted positions, whether one was rejected after them"""
        self.costs: Costs = {}
        self.pace: dict[str, list[float]] = {}
        """level of load -> discounted tokens and seconds"""
        self.probes = probing.fresh_probes()
        self.waited = 0
        """rounds since something was learned"""
        self.level = load_level(1.0)
        self._seen: NDArray[np.float64] | None = None
        self._probe: probing.Probe | None = None
        if not frozen:
            from sklearn.linear_model import SGDClassifier  # slow to import, and not needed to decide

            self._learner: Any = SGDClassifier

    def begin(self, table: ActionTable) -> None:
        super().begin(table)
        played = table if self.saved_table is None else self.saved_table
        self._drafters = played.drafters
        most = max((a.k for a in played), default=0)
        self._positions = of_position(most)
        self._allowed = np.full((len(self._drafters), most), -np.inf)
        for i, d in enumerate(self._drafters):
            self._allowed[i, [k - 1 for k in played.k_values(d)]] = 0.0
        self._k = np.arange(1, most + 1)
        self._seen = None
        self._peeker = first_model(played) if self._peeks else None
        probing.know(self.probes, self._drafters)
        self._extract()

    def _extract(self) -> None:
        """Coefficients as arrays: of x and of x at j = 1 [drafters, size], and the part of j [drafters, k_max]."""
        rows, size = [self.models.get(d, self._fresh()) for d in self._drafters], self.features.size
        weights = np.array(rows).reshape(len(rows), self._size)
        self._weights = np.ascontiguousarray(weights[:, :size])
        self._first_weights = np.ascontiguousarray(weights[:, size : 2 * size])
        self._by_position = weights[:, 2 * size :] @ self._positions.T
        self._priced: tuple[str, float] | None = None

    def _fresh(self) -> list[float]:
        return [START] + [0.0] * (self._size - 1)

    def _price(self, level: str, c: float) -> None:
        """ρ·E[seconds] of every (drafter, K), and the worth of a plain step, at this load."""
        priced = [prices(self.costs, level, d, c) for d in self._drafters]
        plain, _, slope = prices(self.costs, level, None, c)
        peek = priced[self._drafters.index(self._peeker)][2] - slope if self._peeker is not None else 0.0
        tokens, seconds = self.pace.get(level, (0.0, 0.0))
        rho = tokens / seconds if seconds > 0 and self.costs else 1.0 / plain
        calls, steps = np.array([p[1] for p in priced])[:, None], np.array([p[2] for p in priced])[:, None]
        cost = rho * (plain + calls + steps * self._k)
        if self._peeker is not None:  # the model's first forward is paid for whatever is played then
            cost[[d != self._peeker for d in self._drafters]] += rho * peek
        self._first_cost = cost[:, 0] if cost.shape[1] else cost
        self._cost = cost - self._allowed
        self._plain = 1.0 - rho * (plain + peek)
        self._priced = (level, c)

    def chances(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """p_j of every drafter and position, [drafters, k_max]."""
        logits = (self._weights @ x)[:, None] + self._by_position
        logits[:, 0] += self._first_weights @ x
        p: NDArray[np.float64] = 1.0 / (1.0 + np.exp(-np.clip(logits, -30.0, 30.0)))
        return p

    def accept_chances(self, action: Action) -> tuple[float, ...]:
        if self._seen is None or action.drafter not in self._drafters:
            return ()
        return tuple(self.chances(self._seen)[self._drafters.index(action.drafter), : action.k].tolist())

    def tokens(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """E[tokens] for every drafter and K, [drafters, k_max]."""
        expected: NDArray[np.float64] = 1.0 + self.chances(x).cumprod(axis=1).cumsum(axis=1)
        return expected

    def act(self, observation: Observation) -> Action:
        level, c, k_max = load_level(observation.occupancy), observation.cost_ratio, observation.k_max
        self.level = level
        self._probe = None
        self._seen = x = self.features(observation)
        if k_max < 1 or not self._drafters:
            return ROLLBACK
        if self._priced != (level, c):
            self._price(level, c)
        expected = self.tokens(x)
        values = (expected - self._cost)[:, :k_max]
        best = int(values.argmax())
        row, column = divmod(best, values.shape[1])
        worth = float(values[row, column])
        action = Action(self._drafters[row], column + 1) if worth > self._plain else ROLLBACK
        if not self.frozen and (ready := probing.due(self.probes, self.probe)):
            first = (expected[:, 0] - self._first_cost).tolist()
            worth = max(worth, self._plain)
            found = []
            for i, d in enumerate(self._drafters):
                if d in ready and d != action.drafter and probing.can_show(d, observation):
                    found.append(probing.Probe(d, worth - first[i], float(expected[i, 0]) - 1.0))
            self._probe = probing.choose(self.probes, found)
            if self._probe is not None:
                return Action(self._probe.drafter, 1)
        return action

    def update(self, record: RoundRecord) -> None:
        x, self._seen = self._seen, None
        if self.frozen:
            return
        name = record.action.drafter
        probe, self._probe = self._probe, None
        shift = probing.count(self.probes, record, self.share, probe)
        self.waited += 1
        if add_round(self.costs, record, self.level) and record.seconds <= LONGEST:
            tokens, seconds = self.pace.get(self.level, (0.0, 0.0))
            self.pace[self.level] = [0.995 * tokens + record.emitted, 0.995 * seconds + record.seconds]
        self._priced = None
        if name is not None and x is not None:
            missed = record.drafted == 0 and record.planned > 0 and is_lookup(name)
            refused = missed or (record.accepted < record.drafted and record.finish is None)
            if record.accepted or refused:
                self.buffer.append([name, x.tolist(), record.accepted, refused])
        if shift and probe is not None:
            self._raise(probe.drafter, shift)
        if len(self.buffer) >= self.every or (self.buffer and self.waited >= 4 * self.every):
            self._learn()

    def _raise(self, drafter: str, shift: float) -> None:
        """Add to the log-odds of its first token, by the three constants that refusals of it have lowered alike."""
        coefficients = self.models.setdefault(drafter, self._fresh())
        for i in (0, self.features.size, 2 * self.features.size + 1):
            coefficients[i] += shift / 3.0
        self._extract()

    def _learn(self) -> None:
        for name in dict.fromkeys(row[0] for row in self.buffer):
            rows, labels = [], []
            for drafter, x, accepted, refused in self.buffer:
                if drafter == name:
                    judged = accepted + refused
                    rows.append(rows_of(np.array(x), judged))
                    labels.append(np.arange(judged) < accepted)
            self.models[name] = self._fitted(name, np.vstack(rows), np.concatenate(labels).astype(np.int64))
        self.buffer.clear()
        self.waited = 0
        self._extract()

    def _fitted(self, name: str, rows: NDArray[np.float64], labels: NDArray[np.int64]) -> list[float]:
        model = self._learner(
            loss="log_loss", alpha=1e-4, learning_rate="constant", eta0=self.rate, fit_intercept=False, shuffle=False
        )
        model.coef_ = np.array([self.models.get(name, self._fresh())])  # go on from where this drafter was
        model.intercept_ = np.zeros(1)
        model.partial_fit(rows, labels, classes=np.array([0, 1]))
        coefficients: list[float] = model.coef_[0].tolist()
        return coefficients

    def load_state_dict(self, state: Any) -> None:
        if state.get("fields") != self.fields:
            raise ArtefactError(f"policy {self.spec!r} reads {self.fields}, saved was {state.get('fields')}")
        models = state.get("models")
        if not isinstance(models, dict) or any(
            not isinstance(m, list) or len(m) != self._size for m in models.values()
        ):
            raise ArtefactError(f"policy {self.spec!r} expects {self._size} coefficients per drafter")
        probing.check_probes(state.get("probes"), self.spec)
        super().load_state_dict(state)
