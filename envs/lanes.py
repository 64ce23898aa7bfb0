"""Streams of requests over a trace, in lockstep: what both vector environments are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assc.actions import ActionTable
from assc.core import Totals
from assc.costs import CostModel
from assc.errors import ArtefactError, RequestError
from assc.loads import Load
from assc.observe import DEFAULT_FIELDS, Featurizer
from assc.trace import Trace
from assc.trace_rules import replay_table
from assc.vector_features import VectorFeatures
from assc.vector_replay import GOING, FlatTrace, Floats, Ints, Played, Rounds
from envs.chain import check_chain
from envs.rewards import SHORTEST_ROUND, Dinkelbach, Reward, Throughput, make_reward

_DRAFT = frozenset({"draft_entropy", "draft_top1", "draft_margin"})


class ReplayLanes:
    """N endless streams of requests over one trace: what both vector environments are made of.

    Lane i draws its requests as a single environment with seed `seeds[i]` would: all of them in a random order, then
    again in a new order. `chain` of them make an episode, and under `loads` (`assc.loads`) the costs switch while a
    request is decoded, as in `envs.replay.replay_env`. Rewards are those of `envs.rewards`.
    """

    def __init__(
        self,
        trace: Trace,
        cost_model: CostModel,
        num_envs: int,
        *,
        rows: Sequence[int] | None = None,
        reward: str = "dinkelbach",
        fields: Sequence[str] = DEFAULT_FIELDS,
        k_values: Sequence[int] | None = None,
        max_new_tokens: int | None = None,
        approximate: bool = False,
        chain: int = 1,
        loads: Sequence[Load] = (),
    ) -> None:
        if num_envs < 1:
            raise RequestError(f"the number of environments is {num_envs}, it must be 1 or more")
        check_chain(chain)
        self.flat = FlatTrace(trace, cost_model, max_new_tokens=max_new_tokens, approximate=approximate, loads=loads)
        self.rows: Ints = np.arange(len(trace)) if rows is None else np.array(rows, np.int64)
        if not len(self.rows):
            raise RequestError("an environment needs at least one request")
        self.table = _table(trace, k_values)
        self._drafter, self._k = self.flat.actions(self.table)
        self.reward: Reward = make_reward(reward, (loads[0].costs if loads else cost_model).plain_step())
        self.num_envs = num_envs
        self.fields = tuple(fields)
        self._generators: list[np.random.Generator] = []
        self._orders: NDArray[np.int64] = np.zeros((num_envs, len(self.rows)), np.int64)
        self._next = np.zeros(num_envs, np.int64)
        self.chain = chain
        self._left = np.full(num_envs, chain - 1)
        """[N] requests still to come in the episode of a lane"""
        self.rounds, self.features = self._lanes(self.rows[np.zeros(num_envs, np.int64)])
        self.low, self.high = self.features.featurizer.low, self.features.featurizer.high
        self.totals = Totals()
        """over all rounds since `take_totals`"""

    def _lanes(self, rows: Ints) -> tuple[Rounds, VectorFeatures]:
        peek = not _DRAFT.isdisjoint(Featurizer(self.fields).needs)
        rounds = Rounds(self.flat, rows, peek=peek)
        return rounds, VectorFeatures(rounds, self.fields)

    def reset(self, generators: Sequence[np.random.Generator]) -> NDArray[np.float32]:
        """Start all lanes; lane i draws from `generators[i]` from now on."""
        self._generators = list(generators)
        self._next[:] = len(self.rows)
        self._left[:] = self.chain - 1
        self.rounds, self.features = self._lanes(self._draw(np.arange(self.num_envs)))
        self.total_reward = np.zeros(self.num_envs)
        self.lengths = np.zeros(self.num_envs, np.int64)
        self.rounds.look()
        self.vectors = self.features.observe()
        return self.vectors

    def _draw(self, lanes: Ints) -> Ints:
        """The next request of each lane."""
        for lane in lanes[self._next[lanes] >= len(self.rows)]:
            self._orders[lane] = self.rows[self._generators[lane].permutation(len(self.rows))]
            self._next[lane] = 0
        rows: Ints = self._orders[lanes, self._next[lanes]]
        self._next[lanes] += 1
        return rows

    def step(self, actions: Any) -> tuple[Played, Floats, Ints, NDArray[np.float32], Ints]:
        """One round of every lane; finished lanes begin their next request at once.

        Returns the round, rewards [N], the lanes [F] whose episode is over, their last vectors [F, size] and their rows
        [F]; `vectors` then holds the next decision points. Lanes that begin another request of their episode have
        `played.finish` of the last one.
        """
        index = np.asarray(actions)
        if index.shape != (self.num_envs,) or index.dtype.kind not in "iu":
            raise ValueError(f"actions are {self.num_envs} integers, got {index.dtype} of shape {index.shape}")
        if index.min() < 0 or index.max() >= len(self.table):
            raise ValueError(f"action indices are within 0..{len(self.table) - 1}, got {index.min()}..{index.max()}")
        # cut to what can be played, as the single environment does
        k = np.minimum(self._k[index], self.rounds.budget - self.rounds.position - 1)
        played = self.rounds.play(self._drafter[index], k)
        self.features.update(self._drafter[index], k, played)
        rewards = reward_values(self.reward, played)
        self.total_reward += rewards
        self.lengths += 1
        self.totals = self.totals + totals_of(k, played)
        ended = np.flatnonzero(played.finish != GOING)
        done = ended[self._left[ended] == 0] if self.chain > 1 else ended
        last, rows = self.vectors[done], self.rounds.row[done]
        if len(ended):
            self._left[ended] -= 1
            self._left[done] = self.chain - 1
            last = self.features.observe(done, stale=last)
            self.rounds.restart(ended, self._draw(ended))
            self.features.forget(ended)
        self.rounds.look()
        self.vectors = self.features.observe()
        return played, rewards, done, last, rows

    def take_totals(self) -> Totals:
        """What was played since the last call: its Σtokens/Σseconds is the figure of merit."""
        totals, self.totals = self.totals, Totals()
        return totals

    def set_rho(self, rho: float) -> None:
        """Set ρ of the `dinkelbach` reward, in tokens per second; other rewards ignore it."""
        if isinstance(self.reward, Dinkelbach):
            self.reward.set_rho(rho)

    def state_dict(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """All that the next round depends on, after `reset`: what fits into JSON, and arrays."""
        arrays = {name: np.array(getattr(owner, attribute)) for name, owner, attribute in self._state()}
        rho = self.reward.rho if isinstance(self.reward, Dinkelbach) else None
        return {"generators": [g.bit_generator.state for g in self._generators], "rho": rho}, arrays

    def load_state_dict(self, state: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        """Go on where `state_dict` was taken. `ArtefactError` for the state of other lanes or requests."""
        if arrays["lanes/orders"].shape != self._orders.shape or set(arrays["lanes/orders"][0]) - set(self.rows):
            raise ArtefactError("the saved state is of another number of lanes or of other requests")
        self.reset([np.random.default_rng() for _ in range(self.num_envs)])
        for generator, saved in zip(self._generators, state["generators"], strict=True):
            generator.bit_generator.state = saved
        for name, owner, attribute in self._state():
            setattr(owner, attribute, np.array(arrays[name]))
        self.rounds.resume()
        if state["rho"] is not None:
            self.set_rho(state["rho"])

    def _state(self) -> list[tuple[str, Any, str]]:
        """Name, owner and attribute of each array that changes."""
        own = [("lanes", self, a) for a in ("_orders", "_next", "_left", "total_reward", "lengths", "vectors")]
        rounds = [("rounds", self.rounds, a) for a in ("row", "position", "fed", "_peeked")]
        features = [("features", self.features, a) for a in ("planned", "ratio", "rollback", "ema", "streak", "hits")]
        return [(f"{group}/{a.removeprefix('_')}", owner, a) for group, owner, a in (*own, *rounds, *features)]

    def take_episode(self, lane: int) -> tuple[float, int]:
        """Return and length of the episode that ended in a lane."""
        sums = float(self.total_reward[lane]), int(self.lengths[lane])
        self.total_reward[lane], self.lengths[lane] = 0.0, 0
        return sums


def totals_of(k: Ints, played: Played) -> Totals:
    """One round of all lanes, pooled; `k` [N] is what was planned."""
    seconds, draft, verify = (float(x.sum()) for x in (played.seconds, played.draft_seconds, played.verify_seconds))
    return Totals(
        rounds=len(k),
        tokens=int(played.emitted.sum()),
        drafted=int(played.drafted.sum()),
        accepted=int(played.accepted.sum()),
        planned=int(k.sum()),
        rollbacks=int((k == 0).sum()),
        seconds=seconds,
        draft_seconds=draft,
        verify_seconds=verify,
        other_seconds=seconds - draft - verify,
    )


def _table(trace: Trace, k_values: Sequence[int] | None) -> ActionTable:
    """All actions of the replay backend, or those with `k_values`."""
    full = replay_table(trace.header)
    return full if k_values is None else ActionTable.build(full.drafters, k_values)


def reward_values(reward: Reward, played: Played) -> Floats:
    """`reward` of every lane, by the formulas of `envs.rewards`."""
    seconds = np.maximum(played.seconds, SHORTEST_ROUND) if isinstance(reward, Throughput) else played.seconds
    if isinstance(reward, Throughput):
        return np.asarray(played.emitted / seconds)
    if isinstance(reward, Dinkelbach):
        return np.asarray(played.emitted - reward.rho * seconds)
    return np.asarray(played.emitted - seconds / reward.plain_step_seconds)
