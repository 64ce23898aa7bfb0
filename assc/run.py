"""The one loop: decide, run, learn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from time import perf_counter

from assc.core import Backend, Episode, Policy, Request, RoundRecord
from assc.steps import check_policy, play_steps, step_decider


def iter_rounds(backend: Backend, request: Request, policy: Policy) -> Iterator[RoundRecord]:
    """Decode `request` round by round. The policy's own time is part of the next round's record.

    The time a policy spends in `update` is charged to the following round, since it delays that one. A step policy
    (one with `decide`) is asked after each drafted token as well; `AsscError` where the backend cannot do that. A
    policy may have a method `accept_chances(action)`, whose answer for the action it chose goes into the record; it is
    asked off the clock, since no decoder needs it.
    """
    check_policy(backend, policy)
    decide = step_decider(policy)
    backend.reset(request)
    policy.begin(backend.table)
    chances_of = getattr(policy, "accept_chances", None)
    learning = 0.0
    while not backend.done:
        observation = backend.observe(policy.needs)
        start = perf_counter()
        action = policy.act(observation)
        deciding = perf_counter() - start
        spent, reasons = deciding + learning, getattr(policy, "reasons", ())
        chances = chances_of(action) if chances_of is not None and not action.rollback else ()
        if decide is None:
            record = backend.step(action, policy_seconds=spent, reasons=reasons)
        else:
            record = play_steps(backend, action, decide, policy_seconds=spent, reasons=reasons)
        if chances:
            record = replace(record, accept_chances=chances)
        start = perf_counter()
        policy.update(record)
        learning = perf_counter() - start
        yield record


def run_request(backend: Backend, request: Request, policy: Policy) -> Episode:
    """Decode one request to its end."""
    return Episode(request, policy.spec, tuple(iter_rounds(backend, request, policy)))
