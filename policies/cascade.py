"""Copy when the text recurs, else ask the model."""

from __future__ import annotations

from typing import ClassVar

from assc.actions import ActionTable
from assc.core import ROLLBACK, Action, Observation
from assc.errors import SpecError
from assc.kinds import first_lookup, first_model
from assc.registry import register
from assc.rule_tuning import Grid
from policies.base import BasePolicy


@register("cascade")
class Cascade(BasePolicy):
    """The lookup drafter with `k_ngram` when the last `m` tokens or more have occurred before, else the model.

    The model drafter gets `k_model` tokens; with k_model=0 the rest is plain decoding. A table with a lookup drafter
    only rolls back while nothing recurs, one with a model only always drafts `k_model` with it. `lookup` and `model`
    name the drafters; by default the table's first drafter named like a lookup (ngram, suffix, …) and its first other
    one. Both K are cut to what the decoder can play. `m` above what the decoder's index counts (4 by default) never
    holds. It reads the match at every decision, so no state can lock it in.

    Uses the n-gram match. Source: prompt lookup decoding (Saxena 2023) in front of a draft model, the order of
    llama.cpp's and vLLM's hybrid set-ups; on public traces of two drafters the baseline to beat.

    >>> from assc.actions import ActionTable
    >>> policy = Cascade()
    >>> policy.begin(ActionTable.build(["model", "ngram"], range(1, 17)))
    >>> class Seen: k_max, ngram_match = 16, 3
    >>> str(policy.act(Seen))
    'ngram:10'
    >>> Seen.ngram_match = 2
    >>> str(policy.act(Seen))
    'model:4'
    """

    uses: ClassVar[str] = "N"
    needs = frozenset({"ngram_match"})
    grid: ClassVar[Grid] = {"m": (1, 2, 3, 4), "k_ngram": (4, 8, 12, 16), "k_model": (0, 1, 2, 3, 4)}

    def __init__(
        self,
        m: int = 3,
        k_ngram: int = 10,
        k_model: int = 4,
        lookup: str | None = None,
        model: str | None = None,
    ) -> None:
        if m < 1 or k_ngram < 1 or k_model < 0:
            raise ValueError(f"m and k_ngram are at least 1, k_model 0 or more, got {m}, {k_ngram}, {k_model}")
        self.m, self.k_ngram, self.k_model = m, k_ngram, k_model
        self.lookup, self.model = lookup, model
        self._copy = self._ask = ROLLBACK

    def begin(self, table: ActionTable) -> None:
        super().begin(table)
        for name in (self.lookup, self.model):
            if name is not None and name not in table.drafters:
                raise SpecError(f"policy {self.spec!r} names the drafter {name!r}, known here: {table.describe()}")
        lookup, model = self.lookup or first_lookup(table), self.model or first_model(table)
        self._ask = self._action(table, model, self.k_model)
        self._copy = self._ask if lookup is None else self._action(table, lookup, self.k_ngram)

    @staticmethod
    def _action(table: ActionTable, name: str | None, k: int) -> Action:
        if name is None or k == 0:
            return ROLLBACK
        return Action(name, min(k, max(table.k_values(name))))

    def act(self, observation: Observation) -> Action:
        action = self._copy if (observation.ngram_match or 0) >= self.m else self._ask
        return action.clipped(observation.k_max)
