"""The same K in every round."""

from __future__ import annotations

from typing import ClassVar

from assc.actions import ActionTable
from assc.core import Action, Observation
from assc.errors import SpecError
from assc.registry import register
from policies.base import BasePolicy


@register("static")
class StaticK(BasePolicy):
    """Draft K tokens in every round, fewer only where the budget or the context ends.

    `static:0` is the same as `ar`. A K above the decoder's K_max is refused when a request begins.

    Uses nothing. Source: Leviathan et al. 2023, arXiv 2211.17192, and Chen et al. 2023, arXiv 2302.01318 (fixed γ).

    >>> from assc.actions import ActionTable
    >>> policy = StaticK(k=4)
    >>> policy.begin(ActionTable.build(["ngram"], [1, 2, 4, 8]))
    >>> class Seen: k_max = 3
    >>> str(policy.act(Seen))
    'ngram:3'
    """

    uses: ClassVar[str] = "-"
    main_parameter: ClassVar[str | None] = "k"
    example: ClassVar[str] = "static:4"

    def __init__(self, k: int, drafter: str | None = None) -> None:
        if k < 0:
            raise ValueError(f"K is 0 or more, got {k}")
        self.k = k
        self.drafter = drafter

    def begin(self, table: ActionTable) -> None:
        super().begin(table)
        if self.k > self.limit(table):
            raise SpecError(
                f"policy {self.spec!r} asks for K={self.k}, but K_max of this decoder is {self.limit(table)}"
            )

    def act(self, observation: Observation) -> Action:
        return self.draft(self.k, observation)
