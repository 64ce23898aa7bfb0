"""Adaptive speculative decoding: a lossless decoder whose draft length is steered by a policy, round by round."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from assc.actions import ActionTable
from assc.core import ROLLBACK, Action, Episode, Observation, Request, RoundRecord, Totals
from assc.errors import AsscError
from assc.registry import make_policy, register

if TYPE_CHECKING:
    from assc.decoder import GenerateResult, SpeculativeDecoder

__version__ = "0.1.0"

__all__ = [
    "ROLLBACK",
    "Action",
    "ActionTable",
    "AsscError",
    "Episode",
    "GenerateResult",
    "Observation",
    "Request",
    "RoundRecord",
    "SpeculativeDecoder",
    "Totals",
    "make_policy",
    "register",
]


def __getattr__(name: str) -> Any:
    """Load what needs torch only when it is asked for."""
    if name in {"SpeculativeDecoder", "GenerateResult"}:
        import assc.decoder

        return getattr(assc.decoder, name)
    raise AttributeError(f"module 'assc' has no attribute {name!r}")
