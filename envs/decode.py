"""The Gymnasium environment: one episode is one request, one step is one decoding round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from gymnasium.error import ResetNeeded
from numpy.typing import NDArray

from assc.actions import ActionTable
from assc.core import Backend, Observation, Request, RoundRecord, Totals
from assc.errors import RequestError
from assc.observe import DEFAULT_FIELDS, Featurizer
from envs.rewards import Dinkelbach, make_reward
from envs.sources import RequestSource

TERMINATED = frozenset({"eos", "stop", "criteria"})
TRUNCATED = frozenset({"length", "context"})
COUNTS = ("index", "position", "planned", "drafted", "accepted", "emitted", "discarded", "catch_up", "draft_steps")
SECONDS = ("seconds", "draft_seconds", "verify_seconds", "policy_seconds", "other_seconds")


class SpecDecodeEnv(gym.Env[NDArray[np.float32], int]):
    """
    ## Description

    A target model decodes one request per episode. In each step the agent says how many tokens a drafter proposes in
    this round, or rolls back to plain decoding; the target verifies the proposal in one forward and commits the
    leading accepted run plus one token of its own. The goal is the most tokens per second over the whole request.

    ## Action Space

    `Discrete(n)`: an index into the explicit table `env.unwrapped.table`, by default
    K = 1, 2, 3, 4, 6, 8, 12, 16 for each drafter of the backend.

    | Num     | Action                                                         |
    |---------|----------------------------------------------------------------|
    | 0       | rollback: nothing is drafted, one plain target step            |
    | 1 … n-1 | draft K tokens with a drafter, as listed in the table          |

    `step` takes an int, a numpy integer or an integer array of one element; floats, bools and indices out of range
    raise `ValueError`. A K above what is left of the budget is legal and cut to it (`info["planned"]`).

    ## Observation Space

    `Box` of shape (22,), float32, finite, in this order (argument `fields` chooses others, see docs/environment.md):

    | Num   | Field            | Unit             | Min | Max |
    |-------|------------------|------------------|-----|-----|
    | 0-3   | history_k        | K/K_max          | -1  | 1   |
    | 4-7   | history_accepted | accepted/drafted | -1  | 1   |
    | 8-11  | history_rollback | 0 or 1           | -1  | 1   |
    | 12    | acceptance_ema   | rate             | 0   | 1   |
    | 13    | full_streak      | rounds/8         | 0   | 1   |
    | 14    | target_entropy   | nats             | -1  | 12  |
    | 15    | target_top1      | probability      | -1  | 1   |
    | 16    | ngram_match      | tokens/16        | -1  | 1   |
    | 17    | temperature      | 1                | 0   | 2   |
    | 18    | position         | log              | 0   | 1   |
    | 19    | remaining        | tokens/16        | 0   | 1   |
    | 20    | cost_ratio       | c                | 0   | 4   |
    | 21    | occupancy        | rows/rows        | 0   | 1   |

    -1 means "not known (yet)". The vector of a finished episode is made from the last decision point and the last
    round: nothing is decoded to fill it.

    ## Rewards

    A Python float, always finite. `reward=` names one of:

    - `dinkelbach` (default): emitted − ρ·seconds, in tokens; ρ is 1/T_ar at first and moved with `set_rho`
    - `saved`: (emitted·T_ar − seconds)/T_ar, in plain steps (T_ar: seconds of one plain step)
    - `throughput`: emitted/seconds, in tokens/s; its sum is not the figure of merit (docs/environment.md)

    ## Starting State

    The next request of the source, in an order drawn from `np_random` (each request once per pass). `reset(seed=s)`
    starts a new order. `reset(options={"request": Request(...)})` decodes that request, and
    `options={"prompt_ids": [...]}` with optional `max_new_tokens`, `seed`, `sampling` builds one; neither uses up a
    request of the source.

    ## Episode End

    1. Termination: an EOS id, a stop string or a stopping criterion (`info["finish"]` is eos, stop or criteria)
    2. Truncation: the request's `max_new_tokens` or the model's last position (`info["finish"]`: length, context)

    Never both; when both fall on one token, termination wins. `gym.make(..., max_episode_steps=n)` adds a limit in
    rounds. `step` before `reset` and after the end raises `gymnasium.error.ResetNeeded`.

    ## Info

    Every step: `action` (index), `drafter` ("" for rollback), `rollback`, the counts and seconds of the `RoundRecord`
    by name, and `record` itself. The last step adds `finish` and `episode_totals` (a `Totals`). `reset`: `request_id`,
    `category`, `prompt_length`.

    ## Arguments

    | Parameter  | Type                | Default          | Description                                            |
    |------------|---------------------|------------------|--------------------------------------------------------|
    | `backend`  | `Backend`           | required         | plays the rounds                                       |
    | `requests` | sequence of Request | required         | what is decoded                                        |
    | `reward`   | str                 | `"dinkelbach"`   | see Rewards                                            |
    | `fields`   | sequence of str     | `DEFAULT_FIELDS` | names of `assc.observe.FIELDS`                         |
    | `table`    | `ActionTable`       | the backend's    | a part of the backend's table, starting with rollback  |

    The registered ids take the arguments of `envs.live.live_env` instead.

    ## Version History

    * v0: first version
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}  # type: ignore[misc]

    def __init__(
        self,
        backend: Backend,
        requests: Sequence[Request],
        *,
        reward: str = "dinkelbach",
        fields: Sequence[str] = DEFAULT_FIELDS,
        table: ActionTable | None = None,
    ) -> None:
        self.backend = backend
        self.source = RequestSource(requests)
        self.table = backend.table if table is None else table
        for action in self.table:
            backend.table.index(action)
        self.featurizer = Featurizer(fields)
        self.reward = make_reward(reward, backend.plain_step_seconds)
        self.observation_space = gym.spaces.Box(self.featurizer.low, self.featurizer.high, dtype=np.float32)
        self.action_space = gym.spaces.Discrete(len(self.table))  # type: ignore[assignment]
        self._decision: Observation | None = None
        self._records: list[RoundRecord] = []
        self._actions: list[int] = []
        self._from_source = True

    def set_rho(self, rho: float) -> None:
        """Set ρ of the `dinkelbach` reward, in tokens per second; other rewards have no ρ and ignore it."""
        if isinstance(self.reward, Dinkelbach):
            self.reward.set_rho(rho)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.source.restart()
        request = _requested(options)
        self._from_source = request is None
        return self._begin(request or self.source.next(self.np_random))

    def _begin(self, request: Request) -> tuple[NDArray[np.float32], dict[str, Any]]:
        self._decision, self._records, self._actions = None, [], []
        self.backend.reset(request)
        info = {"request_id": request.id, "category": request.category, "prompt_length": len(request.prompt_ids)}
        return self._observe(), info

    def _observe(self) -> NDArray[np.float32]:
        """Move to the next decision point; its vector."""
        self._decision = self.backend.observe(self.featurizer.needs)
        return self.featurizer(self._decision)

    def _last_vector(self, observation: Observation) -> NDArray[np.float32]:
        """The vector of a finished episode."""
        return self.featurizer(observation)

    def step(self, action: Any) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        if self._decision is None:
            raise ResetNeeded("call reset() before step(): no request has been started, or the last one has ended")
        chosen = self.table.from_index(action)
        # cut to what can be played, as deployed policies do, so that `planned` means the same in both
        record = self.backend.step(chosen.clipped(self._decision.k_max))
        self._actions.append(self.table.index(chosen))
        return self._ended(record)

    def _ended(self, record: RoundRecord) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """What `step` returns when a round is over."""
        assert self._decision is not None
        self._records.append(record)
        if record.finish is None:
            vector = self._observe()
        else:
            vector = self._last_vector(_after(self._decision, self._records))
            self._decision = None
        terminated, truncated = record.finish in TERMINATED, record.finish in TRUNCATED
        return vector, self.reward(record), terminated, truncated, self._info(record)

    def _info(self, record: RoundRecord) -> dict[str, Any]:
        info: dict[str, Any] = {
            "action": self._actions[-1],
            "drafter": record.action.drafter or "",
            "rollback": record.rollback,
            "record": record,
        }
        info |= {name: getattr(record, name) for name in (*COUNTS, *SECONDS)}
        if record.finish is not None:
            info |= {"finish": record.finish, "episode_totals": Totals.of(self._records)}
        return info

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on, as JSON types; a request under way is kept as its actions."""
        under_way = self._decision is not None and self._from_source
        return {
            "rng": self.np_random.bit_generator.state,
            "source": self.source.state_dict(),
            "rho": self.reward.rho if isinstance(self.reward, Dinkelbach) else None,
            "actions": list(self._actions) if under_way else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken: a request under way is decoded again by replaying its actions."""
        self.np_random.bit_generator.state = state["rng"]
        self.source.load_state_dict(state["source"])
        if state["rho"] is not None:
            self.set_rho(state["rho"])
        self._decision = None
        if state["actions"] is not None and self.source.current is not None:
            self._begin(self.source.requests[self.source.current])
            for action in state["actions"]:
                self.step(action)


def _requested(options: Mapping[str, Any] | None) -> Request | None:
    """The request that `reset(options=...)` asks for, None if it asks for none."""
    if not options:
        return None
    known = {"request"} if "request" in options else {"prompt_ids", "max_new_tokens", "seed", "sampling"}
    if unknown := set(options) - known:
        raise RequestError(f"reset() does not know the options {sorted(unknown)}; known here: {sorted(known)}")
    if "request" in options:
        request = options["request"]
        if not isinstance(request, Request):
            raise RequestError(f"options['request'] is an assc.Request, got {type(request).__name__}")
        return request
    if "prompt_ids" not in options:
        raise RequestError("reset(options=...) needs 'request' or 'prompt_ids'")
    return Request(**{**options, "prompt_ids": tuple(int(t) for t in options["prompt_ids"])})


def _after(decision: Observation, records: Sequence[RoundRecord]) -> Observation:
    """What is known when the episode is over: the last decision point moved on by the last round."""
    last = records[-1]
    remaining = decision.remaining - last.emitted
    return replace(
        decision,
        position=decision.position + last.emitted,
        remaining=remaining,
        k_max=min(decision.k_max, max(0, remaining - 1)),
        past=tuple(records),
        target_entropy=last.target_entropy,
        target_top1=last.target_top1,
    )
