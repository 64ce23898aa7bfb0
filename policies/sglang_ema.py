"""SGLang's adaptive number of draft steps."""

from __future__ import annotations

from typing import ClassVar

from assc.core import Action, Observation, RoundRecord
from assc.registry import register
from policies.base import BasePolicy

TIERS: tuple[tuple[int, tuple[int, ...], float], ...] = (
    (1, (1, 3, 5, 7), -0.25),
    (8, (0, 1, 3), 0.0),
    (32, (0, 1), 0.0),
    (64, (0,), 0.0),
)
"""from this batch size on: the candidate K, and what is added to the bar for stepping down"""


@register("sglang_ema")
class SglangEma(BasePolicy):
    """The average accepted length moves K along a short list of candidates; each batch-size tier has its own list.

    Lists: 1, 3, 5, 7 from 1 row on; 0, 1, 3 from 8; 0, 1 from 32; 0 from 64. Each tier starts at `init` if it lists
    that, else in the middle of its list, with ema = K − 1. After a round with K > 0: ema ← (1 − α)·ema + α·accepted.
    After `warmup` rounds, every `interval` rounds:

    1. K = 0: probe with the next candidate;
    2. go down while ema ≤ previous − 0.5 + h (h = −0.25 in the first tier, else 0; a previous candidate 0 has the bar
       0.5);
    3. if that did not move, go up while ema > K − 0.5.

    Rows are `rows` (size of the full batch) times the observation's occupancy; with the default of 1 the first tier
    is the only one. The averages are the server's, so they live on from request to request, as there. A K = 0 round
    counts for the interval, so that tiers with more than one candidate never stop probing.

    Uses acceptance history and load. Source: SGLang 0.5.23, `speculative/adaptive_spec_params.py` (EMA strategy, with
    its default configuration; its padding of the batch size to captured graphs is left out).

    >>> from assc.actions import ActionTable
    >>> policy = SglangEma(warmup=0, interval=1)
    >>> policy.begin(ActionTable.build(["model"], range(1, 9)))
    >>> policy.update(RoundRecord(0, 0, Action("model", 3), 3, 3, 4, (), 0.1)), policy.slots[0]
    (None, [3, 2.2, 1])
    """

    uses: ClassVar[str] = "H, L"
    learned: ClassVar[tuple[str, ...]] = ("slots",)
    per_request: ClassVar[tuple[str, ...]] = ("tier",)

    def __init__(
        self,
        alpha: float = 0.2,
        warmup: int = 10,
        interval: int = 5,
        init: int = 3,
        rows: int = 1,
        drafter: str | None = None,
    ) -> None:
        if not 0 < alpha <= 1:
            raise ValueError(f"alpha is in (0, 1], got {alpha}")
        if warmup < 0 or interval < 1 or init < 0 or rows < 1:
            raise ValueError(
                f"warmup and init are 0 or more, interval and rows at least 1, got {warmup}, {init}, {interval}, {rows}"
            )
        self.alpha, self.warmup, self.interval, self.rows, self.drafter = alpha, warmup, interval, rows, drafter
        starts = [init if init in steps else steps[len(steps) // 2] for _, steps, _ in TIERS]
        self.slots: list[list[float]] = [[k, k - 1.0, 0] for k in starts]
        """per tier: K, ema, rounds"""
        self.tier = 0

    def act(self, observation: Observation) -> Action:
        batch = self.rows * observation.occupancy + 1e-9
        tier = 0
        while tier + 1 < len(TIERS) and batch >= TIERS[tier + 1][0]:
            tier += 1
        self.tier = tier
        return self.draft(int(self.slots[tier][0]), observation)

    def update(self, record: RoundRecord) -> None:
        slot = self.slots[self.tier]
        if slot[0] > 0 and record.drafted:
            slot[1] = (1 - self.alpha) * slot[1] + self.alpha * record.accepted
        elif slot[0] > 0:
            return
        slot[2] += 1
        late = slot[2] - self.warmup
        if late > 0 and late % self.interval == 0:
            self._move(slot, *TIERS[self.tier][1:])

    def _move(self, slot: list[float], steps: tuple[int, ...], hysteresis: float) -> None:
        at = old = steps.index(int(slot[0]))
        if slot[0] == 0:
            slot[0] = steps[min(1, len(steps) - 1)]
            if slot[0] > 0 and slot[1] < 0:
                slot[1] = slot[0] - 1.0
            return
        while at > 0 and slot[1] <= max(0.5, steps[at - 1] - 0.5) + hysteresis:
            at -= 1
        while at >= old and at + 1 < len(steps) and slot[1] > steps[at] - 0.5:
            at += 1
        slot[0] = steps[at]
