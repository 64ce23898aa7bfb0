"""Fast decisions are the plain ones: every choice against the formulas written out over the list of all rounds."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import numpy as np
import pytest

from assc.core import Action, Observation, RoundRecord
from assc.markov import MarkovBackend, markov_requests
from assc.observe import HISTORY, Featurizer
from assc.registry import make_policy
from policies.bandit import Bandit
from policies.goodput import Goodput
from policies.ridge import Ridges
from policies.rng import normal, seed_state, uniform
from policies.round_costs import prices

PRIOR = 0.25
FORGOTTEN = 1e-6


class Plain:
    """A bandit that keeps every round, with its weight, and sums all of them anew for every decision."""

    def __init__(self, algo: str, discount: float, window: int, explore: float, seed: int) -> None:
        self.algo, self.discount, self.window, self.explore = algo, discount, window, explore
        self.rounds: list[tuple[str, int, float]] = []
        self.rng = seed_state(seed)

    def sums(self) -> dict[str, Any]:
        kept = self.rounds[-self.window :] if self.window else self.rounds
        weights = self.discount ** np.arange(len(kept) - 1, -1, -1.0)
        found: dict[str, Any] = {}
        for (arm, t, s), w in zip(kept, weights, strict=True):
            if w < 1e-9:
                continue
            found[arm] = found.get(arm, 0.0) + w * np.array([1.0, t, s, t * t, t * s, s * s])
        return {arm: row for arm, row in found.items() if row[0] > FORGOTTEN}

    def choose(self, playable: list[Action]) -> Action:
        sums = self.sums()
        total = sum(sums.values()) if sums else np.zeros(6)
        rho = total[1] / total[2] if total[2] > 0 else 0.0
        squares, freedom = PRIOR, 1.0
        for arm, (n, t, s, tt, ts, ss) in sums.items():
            k = 0 if arm == "rollback" else int(arm.split(":")[1])
            squares += max(0.0, tt - 2 * rho * ts + rho * rho * ss - (t - rho * s) ** 2 / n) / (k + 1)
            freedom += max(0.0, n - 1.0)
        spread = math.sqrt(squares / freedom)
        values = []
        draw = 0.0
        if self.algo == "eps":
            self.rng, draw = uniform(self.rng)
        for a in playable:
            n, t, s = sums[str(a)][:3] if str(a) in sums else (0.0, 0.0, 0.0)
            if self.algo == "ts":
                self.rng, z = normal(self.rng)
                noise = self.explore * spread * z * math.sqrt((a.k + 1) / (n + 1))
                values.append((t - rho * s) / (n + 1) + noise)
            elif n == 0:
                return a
            elif self.algo == "eps":
                values.append((t - rho * s) / n)
            else:
                values.append(
                    (t - rho * s) / n + self.explore * spread * math.sqrt(2 * math.log1p(total[0]) * (a.k + 1) / n)
                )
        if self.algo == "eps" and draw < 0.1:
            return playable[int(draw / 0.1 * len(playable))]
        return playable[int(np.argmax(values))]


@pytest.mark.parametrize("algo", ["ucb", "ts", "eps"])
@pytest.mark.parametrize("forget", ["", ",discount=0.9", ",discount=0.99", ",window=60"])
def test_bandits_decide_as_the_formulas_over_all_rounds(algo: str, forget: str) -> None:
    """discount=0.9 forgets arms and scales the columns back (weight above 10⁹ after 197 rounds)."""
    settings = dict(part.split("=") for part in forget.strip(",").split(",") if part)
    plain = Plain(algo, float(settings.get("discount", 1.0)), int(settings.get("window", 0)), 0.5, seed=4)
    policy = make_policy(f"bandit:{algo},explore=0.5{forget}", seed=4)
    backend = MarkovBackend(k_values=[1, 2, 4, 8])
    decisions = 0
    for request in markov_requests(9, max_new_tokens=60):
        backend.reset(request)
        policy.begin(backend.table)
        while not backend.done:
            observation = backend.observe()
            action = policy.act(observation)
            assert action == plain.choose([a for a in backend.table if a.k <= observation.k_max])
            record = backend.step(action)
            policy.update(record)
            plain.rounds.append((str(action), record.emitted, record.seconds))
            decisions += 1
    assert decisions > 200
    assert isinstance(policy, Bandit)
    for arm, row in plain.sums().items():
        assert policy.arms.sums[arm] == pytest.approx(row.tolist(), rel=1e-5, abs=1e-9)


def test_goodput_plans_as_the_formula_over_its_window() -> None:
    policy = make_policy("goodput:window=20")
    assert isinstance(policy, Goodput)
    backend = MarkovBackend()
    history: list[tuple[int, int]] = []
    for i, request in enumerate(markov_requests(8, max_new_tokens=60)):
        backend.reset(request)
        policy.begin(backend.table)
        while not backend.done:
            observation = backend.observe()
            action = policy.act(observation)
            cap = 16
            reached = [sum(judged >= j for _, judged in history) for j in range(1, cap + 1)]
            passed = [sum(accepted >= j for accepted, _ in history) for j in range(1, cap + 1)]
            pooled = (0.75 + sum(passed)) / (1.0 + sum(reached))
            chances = [(pooled + p) / (1.0 + r) for p, r in zip(passed, reached, strict=True)]
            assert policy.positions() == pytest.approx(chances)
            plain, call, token = prices(policy.costs, "16", "model", observation.cost_ratio)
            speeds = [1.0 / plain]
            speeds += [(1 + sum(np.cumprod(chances)[:k])) / (plain + call + k * token) for k in range(1, cap + 1)]
            best = int(np.argmax(speeds))
            assert action.k == min(best, observation.k_max) or (best == 0 and action.k == 1)
            record = backend.step(action)
            policy.update(record)
            if record.drafted:
                judged = record.accepted + (record.accepted < record.drafted and record.finish is None)
                history = [*history, (record.accepted, judged)][-20:]
        if i == 4:  # a restored state is counted anew
            state = json.loads(json.dumps(policy.state_dict()))
            policy = make_policy("goodput:window=20")
            policy.begin(backend.table)
            policy.load_state_dict(state)
            assert isinstance(policy, Goodput)


def test_history_fields_by_hand() -> None:
    first = RoundRecord(0, 0, Action("ngram", 4), 4, 1, 2, (7, 8), 0.06)
    past = [
        first,
        RoundRecord(1, 2, Action(None, 0), 0, 0, 1, (7,), 0.05),
        RoundRecord(2, 3, Action("ngram", 8), 2, 2, 3, (), 0.05),
    ]
    fields = Featurizer(["history_k", "history_accepted", "history_rollback"])
    seen = Observation(6, 3, 9, 6, 0.0, past, 0.1)
    assert fields(seen).reshape(3, HISTORY) == pytest.approx(
        np.array([[1.0, 0.0, 4 / 6, -1.0], [1.0, -1.0, 0.25, -1.0], [0.0, 1.0, 0.0, -1.0]])
    )
    many = Observation(6, 3, 9, 6, 0.0, [first] * 9, 0.1)
    assert fields(many)[4:8].tolist() == [0.25] * 4


def plain_linear(policy: Any, backend: MarkovBackend, rounds: list[dict[str, Any]], observation: Any) -> Any:
    """The scores of `linucb` (explore 1) over the list of all rounds, arm by arm, and the playable actions.

    What a round says of another K than its own is counted token by token; each further token after a fully accepted
    draft counts half of the one before.
    """
    x = policy.features(observation)
    tokens = seconds = 0.0
    for r in rounds:
        tokens, seconds = 0.995 * tokens + r["emitted"], 0.995 * seconds + r["seconds"]
    base = prices(policy.costs, "16", None, observation.cost_ratio)[0]
    rho = tokens / seconds if seconds else 1.0 / base
    actions = [a for a in backend.table if a.k <= observation.k_max]
    scores = []
    for a in actions:
        mine = [r for r in rounds if r["action"].drafter == a.drafter and not r["finished"] and a.k]
        gram = sum((np.outer(r["x"], r["x"]) for r in mine), np.eye(len(x)))
        gains, drafts = np.zeros(len(x)), np.zeros(len(x))
        for r in mine:
            k, gain = r["action"].k, float(min(a.k, r["accepted"]))
            if r["accepted"] == r["drafted"] == k:
                gain += sum(0.5 ** (j - k) for j in range(k + 1, a.k + 1))
            gains += gain * r["x"]
            drafts += (a.k if r["drafted"] == k else min(a.k, r["drafted"])) * r["x"]
        gain, drafted = np.linalg.solve(gram, gains) @ x, np.linalg.solve(gram, drafts) @ x
        _, call, token = prices(policy.costs, "16", a.drafter, observation.cost_ratio)
        width = 0.5 * math.sqrt(a.k + 1) * (a.k > 0) * math.sqrt(x @ np.linalg.solve(gram, x))
        scores.append((gain - rho * (call + token * drafted) + width) if a.k else 0.0)
    return actions, scores, x


def test_linucb_decides_as_the_formulas_over_all_rounds() -> None:
    policy = make_policy("linucb:explore=1,share=0")
    backend = MarkovBackend(k_values=[1, 2, 4, 8])
    rounds: list[dict[str, Any]] = []
    for request in markov_requests(8, max_new_tokens=60):
        backend.reset(request)
        policy.begin(backend.table)
        while not backend.done:
            observation = backend.observe(policy.needs)
            actions, scores, x = plain_linear(policy, backend, rounds, observation)
            action = policy.act(observation)
            assert scores[actions.index(action)] >= max(scores) - 1e-9
            record = backend.step(action)
            policy.update(record)
            rounds.append({"action": action, "x": x, "accepted": record.accepted, "drafted": record.drafted})
            rounds[-1] |= {"emitted": record.emitted, "seconds": record.seconds, "finished": record.finish is not None}
    assert len(rounds) > 150 and len({r["action"] for r in rounds}) >= 9, "of 11"


def test_a_copy_of_ridge_regressions_learns_apart() -> None:
    """Views of the original's arrays must not travel into a copy (`reset` and `state_dict` copy)."""
    ridges = Ridges(2, 1.0)
    for drafter in ("a", "b"):
        ridges.know(drafter, [1])
    ridges.add("a", np.array([1.0, 2.0]), np.array([3.0, 4.0]))
    before, other = json.dumps(ridges.to_json()), copy.deepcopy(ridges)
    other.add("a", np.array([1.0, -1.0]), np.array([1.0, 1.0]))
    assert json.dumps(ridges.to_json()) == before != json.dumps(other.to_json())
    x = np.array([0.5, 1.0])
    loaded = Ridges(2, 1.0)
    loaded.from_json(json.loads(json.dumps(other.to_json())))
    assert all((a == b).all() for a, b in zip(other.estimate(x), loaded.estimate(x), strict=True))
    assert not (ridges.estimate(x)[0] == other.estimate(x)[0]).all()
