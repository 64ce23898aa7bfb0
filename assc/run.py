"""The one loop: decide, run, learn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from time import perf_counter

from assc.core import Backend, Episode, Policy, Request, RoundRecord


def iter_rounds(backend: Backend, request: Request, policy: Policy) -> Iterator[RoundRecord]:
    """Decode `request` round by round. The policy's own time is part of the next round's record.

    The time a policy spends in `update` is charged to the following round, since it delays that one. A policy may
    have a method `accept_chances(action)`, whose answer for the action it chose goes into the record; it is asked off
    the clock, since no decoder needs it.
    """
    backend.reset(request)
    policy.begin(backend.table)
    chances_of = getattr(policy, "accept_chances", None)
    learning = 0.0
    while not backend.done:
        observation = backend.observe(policy.needs)
        start = perf_counter()
        action = policy.act(observation)
        deciding = perf_counter() - start
        chances = chances_of(action) if chances_of is not None and not action.rollback else ()
        record = backend.step(action, policy_seconds=deciding + learning, reasons=getattr(policy, "reasons", ()))
        if chances:
            record = replace(record, accept_chances=chances)
        start = perf_counter()
        policy.update(record)
        learning = perf_counter() - start
        yield record


def run_request(backend: Backend, request: Request, policy: Policy) -> Episode:
    """Decode one request to its end."""
    return Episode(request, policy.spec, tuple(iter_rounds(backend, request, policy)))
