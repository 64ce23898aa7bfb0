"""Microseconds per decision of every registered policy, of a deployed network, and of saved policies.

    python benchmarks/decisions.py
    python benchmarks/decisions.py --also runs/five/seed-0/policy.zip runs/accept/seed-0/policy.zip

Each policy decodes requests of the packaged trace (17 actions, two drafters), and every call is timed by itself, so it
meets real observations, arms that have all been tried, and its own learning. Columns, all of medians:

- `round`: `act` + `update`, what every round pays. A step policy opens its round with `act`;
- `token`: `decide` of a step policy, once for each drafted token;
- `whole`: all calls of a round together.

On a machine that others use too, a wall clock says little. So the policies take turns in blocks of a few dozen rounds
(in an order drawn anew for each pass), and around each block a fixed computation is timed, some Python and some small
numpy like a policy's own. The median of a block is divided by how much slower that reference ran than in the fastest
tenth of all blocks; told is the median over blocks of that, beside the median as the clock showed it (`clock`, of whole
rounds). The time of the clock itself is taken off; the first `warm` rounds are not counted. Goals of the project, each
for `round` and for `token`: rules 5 µs, bandits 15 µs, linear contextual ones 30 µs, accept_model 150 µs, deployed
networks 50 µs.
"""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import cycle, pairwise
from pathlib import Path
from time import perf_counter_ns as clock

import numpy as np
import tyro

from assc.actions import ActionTable
from assc.core import Policy
from assc.observe import Featurizer
from assc.registry import make_policy, policy_factory, policy_names
from assc.replay import ReplayBackend
from assc.rungs import HISTORY, rung_of
from assc.shipped import shipped_costs, shipped_trace
from assc.steps import step_decider
from policies.artefact import save_network
from policies.learned import LearnedPolicy, Network, Normaliser
from policies.linear import LinearBandit

VARIANTS: dict[str, tuple[str, ...]] = {
    "assc": ("assc", "assc:variant=diagram"),
    "bandit": (
        "bandit:ucb",
        "bandit:ucb,discount=0.98",
        "bandit:ucb,window=200",
        "bandit:ts",
        "bandit:ts,discount=0.98",
        "bandit:ts,window=200",
        "bandit:eps",
        "bandit:exp3",
    ),
    "cascade": ("cascade", "cascade:m=1,k_ngram=8,k_model=2"),
    "linucb": ("linucb", "linucb:frozen=true"),
    "accept_model": ("accept_model", "accept_model:frozen=true"),
}
"""name -> specs to time, where the policy's example alone would not do"""
NETWORK = "network 64x64, as PPO's"


@dataclass
class Config:
    """How much to play."""

    rounds: int = 4000
    """rounds that are timed"""
    warm: int = 2000
    """rounds played before"""
    block: int = 50
    """rounds of one policy before the next one has its turn"""
    only: tuple[str, ...] = ()
    """specs to time instead of all"""
    also: tuple[str, ...] = ()
    """saved policies to time too"""


def specs() -> Iterator[str]:
    """One or more specs of every registered policy."""
    for name in policy_names():
        yield from VARIANTS.get(name, (getattr(policy_factory(name), "example", "") or name,))


def goal_of(policy: Policy) -> float | None:
    """Microseconds; None where the project has set none."""
    if isinstance(policy, LearnedPolicy):
        return 50.0 if type(policy) is LearnedPolicy else None
    if isinstance(policy, LinearBandit):
        return 30.0
    if policy.spec.startswith("accept_model"):
        return 150.0
    if getattr(policy, "learner", False):
        return 15.0 if rung_of(policy) == HISTORY else None
    return 5.0


_A, _X = np.arange(17.0 * 7).reshape(17, 7) / 100, np.arange(7.0) / 7


def reference() -> float:
    """A fixed computation of about 20 µs."""
    found, kept = 0.0, {}
    for i in range(40):
        kept[i & 7] = found
        found = 0.9 * found + i / (1.0 + len(kept))
    for _ in range(4):
        scores = _A.dot(_X)
        np.maximum(scores, 0.0, out=scores)
        found += float(np.sqrt(scores)[int(scores.argmax())])
    return found


def reference_time(times: int = 15) -> float:
    """Median nanoseconds of `reference` now."""
    spent = []
    for _ in range(times):
        start = clock()
        reference()
        spent.append(clock() - start)
    return float(np.median(spent))


@dataclass
class Block:
    """Medians of one block in nanoseconds, and the reference around it."""

    round: float
    token: float
    """NaN where nothing was decided per token"""
    whole: float
    reference: float


@dataclass
class Player:
    """A policy on its own way through the train requests."""

    name: str
    policy: Policy
    empty: float
    """nanoseconds that reading the clock twice takes"""
    blocks: list[Block] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    """every round, as the clock showed it"""

    def __post_init__(self) -> None:
        trace = shipped_trace()
        self.backend = ReplayBackend(trace, shipped_costs())
        order = np.random.default_rng(0).permutation(trace.where(split="train"))
        self.requests = cycle(trace.requests(order.tolist()))
        self.decide = step_decider(self.policy)
        self.fresh = True

    def play(self, rounds: int) -> tuple[list[float], list[float], list[float]]:
        """Nanoseconds of act + update, of each decide, and of all calls of a round, of so many rounds."""
        outer, tokens, whole = list[float](), list[float](), list[float]()
        policy, backend = self.policy, self.backend
        for _ in range(rounds):
            if self.fresh or backend.done:
                backend.reset(next(self.requests))
                policy.begin(backend.table)
                self.fresh = False
            observation = backend.observe(policy.needs)
            start = clock()
            action = policy.act(observation)
            spent = clock() - start - self.empty
            deciding = 0.0
            if self.decide is None:
                record = backend.step(action)
            else:
                step = backend.open_round(action)
                while step is not None:
                    start = clock()
                    decision = self.decide(step)
                    tokens.append(clock() - start - self.empty)
                    deciding += tokens[-1]
                    step = backend.decide(decision)
                record = backend.close_round()
            start = clock()
            policy.update(record)
            outer.append(spent + clock() - start - self.empty)
            whole.append(outer[-1] + deciding)
        return outer, tokens, whole

    def block(self, rounds: int) -> None:
        """Play and keep a block."""
        before = reference_time()
        outer, tokens, whole = self.play(rounds)
        around = (before + reference_time()) / 2
        token = float(np.median(tokens)) if tokens else float("nan")
        self.blocks.append(Block(float(np.median(outer)), token, float(np.median(whole)), around))
        self.whole += whole

    def told(self, fastest: float) -> dict[str, float]:
        """Microseconds at the reference's fastest pace, and as the clock showed them."""
        pace = np.array([fastest / b.reference for b in self.blocks])
        columns = {n: np.array([getattr(b, n) for b in self.blocks]) * pace for n in ("round", "token", "whole")}
        told = {n: float(np.nanmedian(c)) / 1e3 if np.isfinite(c).any() else float("nan") for n, c in columns.items()}
        return told | {"clock": float(np.median(self.whole)) / 1e3}


def network(folder: Path) -> Path:
    """A saved 64x64 actor over the default fields, with observation scaling and random weights."""
    featurizer, rng = Featurizer(), np.random.default_rng(0)
    table = ReplayBackend(shipped_trace(), shipped_costs()).table
    sizes = [featurizer.size, 64, 64, len(table)]
    layers = [(rng.normal(0, 0.1, (b, a)).astype(np.float32), np.zeros(b, np.float32)) for a, b in pairwise(sizes)]
    scaling = Normaliser(np.zeros(featurizer.size), np.ones(featurizer.size), 1e-8, 10.0)
    net = Network(layers, "tanh", scaling)
    return save_network(folder / "policy.zip", net, kind="ppo", featurizer=featurizer, table=ActionTable(table.actions))


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    empty = float(np.median([-clock() + clock() for _ in range(2001)]))
    with tempfile.TemporaryDirectory() as folder:
        made = {spec: make_policy(spec) for spec in (*(config.only or specs()), *config.also)}
        if not config.only:
            made[NETWORK] = make_policy(str(network(Path(folder))))
    players = [Player(name, policy, empty) for name, policy in made.items()]
    for player in players:
        player.play(config.warm)
    order = np.random.default_rng(1)
    for _ in range(max(1, config.rounds // config.block)):
        for i in order.permutation(len(players)):
            players[i].block(config.block)
    paces = [b.reference for player in players for b in player.blocks]
    fastest = float(np.quantile(paces, 0.1))
    slow = float(np.median(paces)) / fastest
    where = f"Python {platform.python_version()}, numpy {np.__version__}"
    print(f"{where}; µs, medians over {config.rounds} rounds in blocks of {config.block}")
    print(f"reference {fastest / 1e3:.1f} µs at its fastest, in the median block {slow:.2f} times as long")
    width = max(len(player.name) for player in players)
    print(f"{'policy':{width}s} {'round':>7s} {'token':>7s} {'whole':>7s} {'clock':>7s} {'goal':>5s}")
    for player in players:
        told, goal = player.told(fastest), goal_of(player.policy)
        cells = " ".join(f"{told[n]:7.1f}" if told[n] == told[n] else f"{'-':>7s}" for n in ("round", "token", "whole"))
        worst = float(np.nanmax([told["round"], told["token"]]))
        verdict = "    -" if goal is None else f"{goal:5.0f} {'met' if worst <= goal else 'MISSED'}"
        print(f"{player.name:{width}s} {cells} {told['clock']:7.1f} {verdict}")


if __name__ == "__main__":
    main()
