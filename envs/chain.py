"""Episodes of several requests in a row: what a policy meets when it serves a stream of changing requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assc.errors import RequestError
from envs.decode import SpecDecodeEnv


def check_chain(chain: int) -> None:
    """`RequestError` unless an episode has at least one request."""
    if chain < 1:
        raise RequestError(f"an episode has {chain} requests, it must be 1 or more")


class ChainedEnv(SpecDecodeEnv):
    """`SpecDecodeEnv` whose episode is `chain` requests of the source, of whatever categories and temperatures come.

    Between two requests the observation is the first decision point of the next one, and `info` has
    `next_request` (what `reset` would tell) beside the finished request's totals. A request given to
    `reset(options=...)` makes an episode of its own.
    """

    def __init__(self, *args: Any, chain: int = 2, **options: Any) -> None:
        check_chain(chain)
        super().__init__(*args, **options)
        self.chain = chain
        self._left = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        started = super().reset(seed=seed, options=options)
        self._left = self.chain - 1 if self._from_source else 0
        return started

    def step(self, action: Any) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        vector, reward, terminated, truncated, info = super().step(action)
        if (terminated or truncated) and self._left > 0:
            self._left -= 1
            vector, following = self._begin(self.source.next(self.np_random))
            return vector, reward, False, False, {**info, "next_request": following}
        return vector, reward, terminated, truncated, info

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "left": self._left}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict({k: v for k, v in state.items() if k != "left"})
        self._left = int(state["left"])
