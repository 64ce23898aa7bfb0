"""Where an environment's requests come from: a list, shuffled anew for every pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from assc.core import Request
from assc.errors import ArtefactError, RequestError


def fitting(requests: Sequence[Request], max_positions: int | None) -> list[Request]:
    """The requests whose prompt leaves room for a token within the model's positions; `RequestError` if none does."""
    kept = [r for r in requests if max_positions is None or len(r.prompt_ids) < max_positions]
    if requests and not kept:
        raise RequestError(f"every prompt is longer than the {max_positions} positions of the target")
    return kept


class RequestSource:
    """Draws requests without replacement; when the list is used up, a new pass starts in a new order.

    All randomness comes from the generator that the caller hands in.

    >>> source = RequestSource([Request((1,), id="a"), Request((1,), id="b")])
    >>> rng = np.random.default_rng(0)
    >>> sorted(source.next(rng).id for _ in range(2))
    ['a', 'b']
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        if not requests:
            raise RequestError("an environment needs at least one request")
        self.requests = tuple(requests)
        self._waiting: list[int] = []
        self.current: int | None = None
        """index of the request drawn last"""

    def next(self, rng: np.random.Generator) -> Request:
        if not self._waiting:
            self._waiting = [int(i) for i in rng.permutation(len(self.requests))][::-1]
        self.current = self._waiting.pop()
        return self.requests[self.current]

    def restart(self) -> None:
        """Forget the rest of this pass."""
        self._waiting, self.current = [], None

    def state_dict(self) -> dict[str, Any]:
        return {"requests": len(self.requests), "waiting": list(self._waiting), "current": self.current}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["requests"] != len(self.requests):
            raise ArtefactError(
                f"the saved request order is for {state['requests']} requests, but {len(self.requests)} are loaded"
            )
        self._waiting, self.current = [int(i) for i in state["waiting"]], state["current"]
