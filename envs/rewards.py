"""Named rewards of one round. Each is a Python float and always finite.

The figure of merit is Σtokens/Σseconds over all rounds. `throughput` is the plain per-round ratio; summing it does not
add up to the figure of merit (many short rounds sum to more than few long ones). `dinkelbach` and `saved` are linear in
tokens and seconds, so over a request whose text is fixed their sum is a constant minus a multiple of Σseconds.
"""

from __future__ import annotations

import math
import warnings
from typing import ClassVar

from assc.core import RoundRecord
from assc.errors import SpecError

SHORTEST_ROUND = 1e-6
"""seconds; a round that claims to be shorter counts as this long, so that the ratio stays finite"""


class Reward:
    """Turns a `RoundRecord` into a number.

    `plain_step_seconds` is T_ar, the seconds of one round without drafting. A record whose seconds are negative, NaN
    or infinite is counted as T_ar seconds, with a warning.
    """

    name: ClassVar[str]
    unit: ClassVar[str]
    formula: ClassVar[str]

    def __init__(self, plain_step_seconds: float) -> None:
        if not (math.isfinite(plain_step_seconds) and plain_step_seconds > 0):
            raise ValueError(f"plain_step_seconds is a positive number of seconds, got {plain_step_seconds}")
        self.plain_step_seconds = float(plain_step_seconds)

    def __call__(self, record: RoundRecord) -> float:
        seconds = float(record.seconds)
        if not math.isfinite(seconds) or seconds < 0:
            warnings.warn(
                f"round {record.index} reports {seconds} seconds; its reward counts it as one plain step", stacklevel=2
            )
            seconds = self.plain_step_seconds
        return self.value(record.emitted, seconds)

    def value(self, tokens: int, seconds: float) -> float:
        raise NotImplementedError


class Throughput(Reward):
    """The round's tokens per second.

    >>> Throughput(0.02).value(3, 0.05)
    60.0
    """

    name = "throughput"
    unit = "tokens/s"
    formula = "emitted / seconds"

    def value(self, tokens: int, seconds: float) -> float:
        return tokens / max(seconds, SHORTEST_ROUND)


class Dinkelbach(Reward):
    """Tokens minus ρ·seconds, ρ in tokens/s (Dinkelbach 1967: optimal for the ratio when ρ is the optimal ratio).

    ρ starts at 1/T_ar, the speed of plain decoding; `set_rho` moves it, in training to the speed of the policy itself.

    >>> reward = Dinkelbach(0.02)
    >>> reward.value(3, 0.05)
    0.5
    >>> reward.set_rho(60.0)
    >>> reward.value(3, 0.05)
    0.0
    """

    name = "dinkelbach"
    unit = "tokens"
    formula = "emitted - rho * seconds"

    def __init__(self, plain_step_seconds: float) -> None:
        super().__init__(plain_step_seconds)
        self.rho = 1.0 / self.plain_step_seconds

    def set_rho(self, rho: float) -> None:
        """Set ρ, tokens per second of the reference: finite and at least 0."""
        if not (math.isfinite(rho) and rho >= 0):
            raise ValueError(f"rho is a finite number of tokens per second, at least 0, got {rho}")
        self.rho = float(rho)

    def value(self, tokens: int, seconds: float) -> float:
        return tokens - self.rho * seconds


class Saved(Reward):
    """Time saved against plain decoding, in plain steps: (emitted·T_ar − seconds) / T_ar.

    >>> Saved(0.02).value(3, 0.05)
    0.5
    """

    name = "saved"
    unit = "plain steps"
    formula = "(emitted * T_ar - seconds) / T_ar"

    def value(self, tokens: int, seconds: float) -> float:
        return tokens - seconds / self.plain_step_seconds


REWARDS: dict[str, type[Reward]] = {r.name: r for r in (Throughput, Dinkelbach, Saved)}


def make_reward(name: str, plain_step_seconds: float) -> Reward:
    """Build a reward by name; `SpecError` lists the known ones."""
    if name not in REWARDS:
        raise SpecError(f"unknown reward {name!r}; known rewards: {', '.join(REWARDS)}")
    return REWARDS[name](plain_step_seconds)
