"""The environment per draft token: one step is one decision inside a decoding round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.error import ResetNeeded
from numpy.typing import NDArray

from assc.actions import checked_index
from assc.core import ROLLBACK, Request
from assc.errors import RequestError
from assc.observe import DEFAULT_FIELDS
from assc.step_features import Opening, StepFeaturizer
from assc.steps import Decision, StepBackend, StepObservation
from envs.decode import SpecDecodeEnv


class DraftStepEnv(SpecDecodeEnv):
    """
    ## Description

    A target model decodes one request per episode, in rounds; a step is a decision inside a round. It is asked once
    when the round begins and then after each drafted token: draft one more, have the target verify what there is, or
    throw it away and decode one token plainly. The goal is the most tokens per second over the whole request.

    ## Action Space

    `Discrete(3)`, the numbers of `assc.steps.Decision`:

    | Num | Action   | when the round begins      | after a drafted token                                         |
    |-----|----------|----------------------------|---------------------------------------------------------------|
    | 0   | continue | draft the first token      | draft one more; where no more can be drafted, verify          |
    | 1   | verify   | one plain target step      | verify the drafted tokens, the last one included              |
    | 2   | rollback | one plain target step      | discard the drafted tokens unverified, one plain target step  |

    Every action is legal everywhere. Continue ends in a verification by itself at K_max, at the end of the budget, and
    where a lookup's match ends; where nothing can be drafted at all it is one plain target step.

    ## Observation Space

    `Box` of shape (30,), float32, finite: the numbers below, then those of `SpecDecodeEnv` (argument `fields`) for the
    round's beginning.

    | Num | Field        | Unit        | Min | Max | -1 / 0 means                        |
    |-----|--------------|-------------|-----|-----|-------------------------------------|
    | 0   | drafted      | tokens/16   | 0   | 1   | 0: the round begins                 |
    | 1   | left         | tokens/16   | 0   | 1   | tokens that may still be drafted    |
    | 2   | lookup       | 0 or 1      | -1  | 1   | -1: the round begins                |
    | 3   | step_entropy | nats        | -1  | 12  | -1: a lookup, or the round begins   |
    | 4   | step_top1    | probability | -1  | 1   | the same                            |
    | 5   | step_margin  | probability | -1  | 1   | the same                            |
    | 6   | step_prob    | probability | -1  | 1   | the same                            |
    | 7   | step_product | probability | -1  | 1   | the same                            |

    ## Rewards

    0 until the round ends, then the reward of the whole round as `SpecDecodeEnv` gives it (`reward=`: `dinkelbach`,
    `saved`, `throughput`), discarded drafts paid for. Rewards over an episode therefore add up to those of the same
    rounds there, whichever is named.

    ## Starting State, Episode End

    As in `SpecDecodeEnv`: a request of the source; termination at an EOS, a stop string or a criterion, truncation at
    the budget or the last position.

    ## Info

    Every step: `action` and `drafted` (tokens of the round so far). A step that ends a round has what
    `SpecDecodeEnv` tells of it, `record` among it; the last step of an episode `finish` and `episode_totals` too.

    ## Arguments

    | Parameter  | Type                | Default          | Description                                              |
    |------------|---------------------|------------------|----------------------------------------------------------|
    | `backend`  | `StepBackend`       | required         | plays the rounds                                         |
    | `requests` | sequence of Request | required         | what is decoded                                          |
    | `reward`   | str                 | `"dinkelbach"`   | see Rewards                                              |
    | `fields`   | sequence of str     | `DEFAULT_FIELDS` | names of `assc.observe.FIELDS`                           |
    | `drafter`  | str                 | first model      | who drafts                                               |
    | `m`        | int                 | 0                | above 0: rounds whose last m tokens or more have         |
    |            |                     |                  | occurred before are drafted by the first lookup, up to 10|

    Raises `TraceError` for a trace without confidences per draft step.

    ## Version History

    * v0: first version
    """

    def __init__(
        self,
        backend: StepBackend,
        requests: Sequence[Request],
        *,
        reward: str = "dinkelbach",
        fields: Sequence[str] = DEFAULT_FIELDS,
        drafter: str | None = None,
        m: int = 0,
    ) -> None:
        super().__init__(backend, requests, reward=reward, fields=fields)
        if not hasattr(backend, "open_round"):
            raise RequestError(f"the backend {type(backend).__name__} cannot be asked after each drafted token")
        self.step_backend = backend
        self.opening = Opening.of(backend.table, drafter, m=m)
        self.step_featurizer = StepFeaturizer(fields)
        self.step_needs = self.step_featurizer.needs | self.opening.needs
        backend.check_steps(self.step_needs)
        self.observation_space = gym.spaces.Box(self.step_featurizer.low, self.step_featurizer.high, dtype=np.float32)
        self.action_space = gym.spaces.Discrete(len(Decision))  # type: ignore[assignment]
        self._shown: StepObservation | None = None

    def _begin(self, request: Request) -> tuple[NDArray[np.float32], dict[str, Any]]:
        self._shown = None
        return super()._begin(request)

    def _observe(self) -> NDArray[np.float32]:
        self._decision = self.backend.observe(self.step_needs)
        return self.step_featurizer(self._decision)

    def step(self, action: Any) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        if self._decision is None:
            raise ResetNeeded("call reset() before step(): no request has been started, or the last one has ended")
        decision = Decision(checked_index(action, len(Decision)))
        if self._shown is None:
            opened = self.opening.action(self._decision) if decision is Decision.CONTINUE else ROLLBACK
            shown = self.step_backend.open_round(opened)
        else:
            shown = self.step_backend.decide(decision)
        self._actions.append(int(decision))
        if shown is not None:
            self._shown = shown
            info = {"action": int(decision), "drafted": shown.drafted}
            return self.step_featurizer(self._decision, shown), 0.0, False, False, info
        self._shown = None
        return self._ended(self.step_backend.close_round())

    def _last_vector(self, observation: Any) -> NDArray[np.float32]:
        return self.step_featurizer(observation)
