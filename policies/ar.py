"""Plain decoding."""

from __future__ import annotations

from typing import ClassVar

from assc.core import ROLLBACK, Action, Observation
from assc.registry import register
from policies.base import BasePolicy


@register("ar")
class PlainDecoding(BasePolicy):
    """Always roll back: one target step per token, nothing drafted. The baseline of every speed-up.

    Uses nothing. Source: plain autoregressive decoding, the definition of the baseline.

    >>> from assc.registry import make_policy
    >>> make_policy("ar").act(None) is ROLLBACK
    True
    """

    uses: ClassVar[str] = "-"

    def act(self, observation: Observation) -> Action:
        return ROLLBACK
