"""The best single action played in all rounds, measured by decoding: `static:tuned` where there is no trace."""

from __future__ import annotations

from collections.abc import Sequence

from assc.actions import ActionTable
from assc.core import ROLLBACK, Action, Backend, Request, Totals
from assc.registry import make_policy
from assc.run import run_request

TUNE_REQUESTS = 4
TUNE_K = (2, 4, 8, 16)
"""K of the sweep: coarse, since it is paid for in decoding"""


def static_spec(action: Action, table: ActionTable) -> str:
    """Spec string of the policy that always plays `action`; the drafter is named where it is not the table's first.

    >>> table = ActionTable.build(["ngram", "hidden"], [4])
    >>> [static_spec(action, table) for action in table]
    ['static:0', 'static:4', 'static:drafter=hidden,k=4']
    """
    if action.drafter in (None, *table.drafters[:1]):
        return f"static:{action.k}"
    return f"static:drafter={action.drafter},k={action.k}"


def tune_static(backend: Backend, requests: Sequence[Request]) -> Action:
    """Rollback or the (drafter, K) with the most tokens per second on these (train) requests, pooled.

    The candidates are interleaved by request. Where time is measured, the first request is played once before.
    """
    table = backend.table
    swept = [k for k in TUNE_K if k <= table.k_max] or [table.k_max]
    candidates = [ROLLBACK, *(Action(d, k) for d in table.drafters for k in swept if k <= max(table.k_values(d)))]
    policies = {action: make_policy(static_spec(action, table)) for action in candidates}
    if backend.time_source == "measured":
        for request in requests[:1]:
            run_request(backend, request, policies[candidates[-1]])
    totals = dict.fromkeys(candidates, Totals())
    for request in requests:
        for action, policy in policies.items():
            totals[action] = totals[action] + Totals.of(run_request(backend, request, policy).rounds)
    return max(candidates, key=lambda action: totals[action].tokens_per_second or 0.0)
