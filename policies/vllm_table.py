"""vLLM's dynamic speculation: K by batch size."""

from __future__ import annotations

from typing import ClassVar

from assc.actions import ActionTable
from assc.core import Action, Observation
from assc.registry import register
from policies.base import BasePolicy

DEFAULT_TABLE = "1-64:3/65-128:1/129-512:0"


def read_table(text: str) -> list[tuple[int, int, int]]:
    """Ranges of batch sizes with their K. Raises `ValueError` where vLLM would refuse them.

    >>> read_table("1-2:5/3-4:3/5-8:1")
    [(1, 2, 5), (3, 4, 3), (5, 8, 1)]
    """
    ranges: list[tuple[int, int, int]] = []
    for part in text.split("/"):
        sizes, _, k = part.partition(":")
        start, dash, last = sizes.partition("-")
        try:
            ranges.append((int(start), int(last if dash else start), int(k)))
        except ValueError:
            raise ValueError(f"table is written like {DEFAULT_TABLE} (first-last:K), got {part!r}") from None
    end = 0
    for first, high, tokens in ranges:
        if not end < first <= high or tokens < 0 or (end == 0 and first != 1):
            raise ValueError(f"the ranges of table rise from 1 on without overlap and K is 0 or more, got {text!r}")
        end = high
    return ranges


@register("vllm_table")
class VllmTable(BasePolicy):
    """K is looked up by the number of rows that decode; beyond the ranges, and in gaps, the K of the range before.

    `table` is written `first-last:K/first-last:K`. Rows are `rows` (size of the full batch) times the observation's
    occupancy. A K of 0 depends on the load alone, so it ends when the load falls; nothing is learned, nothing probed.

    Uses load. Source: vLLM, `num_speculative_tokens_per_batch_size` (`vllm/v1/spec_decode/dynamic/utils.py`); the
    default is the example of its documentation of dynamic speculative decoding.

    >>> from assc.actions import ActionTable
    >>> policy = VllmTable(table="1-2:5/3-4:3/5-8:1", rows=8)
    >>> policy.begin(ActionTable.build(["model"], range(1, 9)))
    >>> class Seen: k_max, occupancy = 8, 0.5
    >>> str(policy.act(Seen))
    'model:3'
    """

    uses: ClassVar[str] = "L"

    def __init__(self, table: str = DEFAULT_TABLE, rows: int = 1, drafter: str | None = None) -> None:
        if rows < 1:
            raise ValueError(f"rows is at least 1, got {rows}")
        self.ranges, self.rows, self.drafter = read_table(table), rows, drafter
        self._cap = 0

    def begin(self, table: ActionTable) -> None:
        super().begin(table)
        self._cap = self.limit(table)

    def act(self, observation: Observation) -> Action:
        batch, k = max(1, round(self.rows * observation.occupancy)), 0
        for low, _, value in self.ranges:
            if low > batch:
                break
            k = value
        return self.draft(min(k, self._cap), observation)
