"""The figures of the seed table, and the rows that stand beside them."""

from __future__ import annotations

from dataclasses import dataclass

from assc.stats import Interval


@dataclass(frozen=True)
class Figures:
    """One line of the seed table."""

    mean_k: float
    waste: float
    """share of drafted tokens that are rejected"""
    accepted: float
    """"accepted per step" """
    speedup: float


SEED: dict[str, Figures] = {
    "static:2": Figures(2.0, 0.124, 1.82, 1.65),
    "static:5": Figures(5.0, 0.386, 3.65, 2.24),
    "static:8": Figures(8.0, 0.542, 3.88, 1.82),
    "assc": Figures(4.3, 0.182, 4.28, 2.74),
}
"""67B target, 1.5B draft, 8xH800, 2,000 mixed requests, as told by the article this project starts from"""


@dataclass(frozen=True)
class PartRow:
    """The seed's columns as they were measured or modelled here."""

    strategy: str
    mean_k: float
    waste: float
    accepted: float
    """accepted draft tokens / rounds, without the bonus token"""
    speedup: float | None
    interval: Interval
    first_token: float
    """share of the drafting rounds whose first draft token was accepted"""


@dataclass(frozen=True)
class Part:
    """One way in which the table was made again."""

    name: str
    rows: tuple[PartRow, ...]
    """in the order of `SEED`"""
    conditions: str
    c: float

    def row(self, strategy: str) -> PartRow:
        return next(row for row in self.rows if row.strategy == strategy)
