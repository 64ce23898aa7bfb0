"""Paired, interleaved comparison of policies: every request is decoded by all of them, one right after the other."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import numpy as np
from tqdm import tqdm

from assc.core import Backend, Episode, Policy, Request
from assc.errors import AsscError, RequestError
from assc.files import versions
from assc.metrics import DEFINITIONS, Run
from assc.oracle import Ladder
from assc.registry import make_policy
from assc.results import Evaluation, EvaluationInterrupted, RequestResult, unique_labels
from assc.run import run_request
from assc.rungs import rung_of
from assc.steps import check_policy

BASELINE = "ar"
"""name of the policy that always runs: plain decoding through the same engine"""

Policies = Sequence[tuple[str, Policy]]
"""name and policy of each row"""
OnEpisode = Callable[[str, Episode], None]
OnRequest = Callable[[RequestResult], None]


def _check(
    requests: Sequence[Request],
    by_seed: Sequence[Policies],
    repeats: int,
    warmup: int,
    against: str | None,
) -> None:
    policies = by_seed[0] if by_seed else ()
    if any([name for name, _ in other] != [name for name, _ in policies] for other in by_seed):
        raise ValueError("every seed needs the same policies under the same names")
    if not requests:
        raise RequestError("there is no request to evaluate, give at least one")
    if not policies:
        raise AsscError("there is no policy to evaluate, give at least one")
    if against is not None and against not in unique_labels([name for name, _ in policies]):
        raise AsscError(f"{against!r} is not among the policies that are evaluated, so nothing can be compared with it")
    if repeats < 1 or warmup < 0:
        raise AsscError(f"repeats is {repeats} (1 or more) and warmup is {warmup} (0 or more)")
    objects = [id(policy) for listed in by_seed for _, policy in listed]
    if len(set(objects)) < len(objects):
        raise ValueError("one policy object is listed twice; its copies would share what they learn, make two objects")


def check_requests(backend: Backend, requests: Sequence[Request]) -> None:
    """Let the backend refuse a request (too long, say) before hours of work; one without `check` tells later."""
    check = getattr(backend, "check", None)
    if check is None:
        return
    for request in requests:
        try:
            check(request)
        except RequestError as error:
            raise RequestError(f"request {request.id!r}: {error}") from None


def _meta(
    backend: Backend, requests: Sequence[Request], *, seed: int, repeats: int, warmup: int, extra: Mapping[str, Any]
) -> dict[str, Any]:
    """Provenance of a result: what the backend says of itself, then this evaluation, then `extra`."""
    describe = getattr(backend, "describe", None)
    temperatures = sorted({r.temperature for r in requests})
    categories = [r.category for r in requests]
    return {
        **dict.fromkeys(("pair", "device", "dtype", "threads")),
        "backend": type(backend).__name__,
        **(describe() if describe is not None else {}),
        "mode": backend.mode,
        "c": backend.cost_ratio,
        "time_source": backend.time_source,
        "seed": seed,
        "requests": len(requests),
        "repeats": repeats,
        "warmup": warmup,
        "max_new_tokens": max(r.max_new_tokens for r in requests),
        "temperature": temperatures[0] if len(temperatures) == 1 else temperatures,
        "categories": {c: categories.count(c) for c in sorted(set(categories))},
        "workload": None,
        "versions": versions(),
        "definitions": DEFINITIONS,
        **extra,
    }


class _Players:
    """The policies with the state they came with, and the backend that they share."""

    def __init__(
        self,
        backend: Backend,
        policies: Sequence[tuple[str, Policy]],
        clock: Callable[[], float],
        on_episode: OnEpisode,
    ) -> None:
        names = tuple(name for name, _ in policies)
        self.backend, self.clock, self.on_episode = backend, clock, on_episode
        self.baseline = names.index(BASELINE) if BASELINE in names else None
        self.labels = list(unique_labels(names))
        self.policies = [policy for _, policy in policies]
        if self.baseline is None:
            self.labels.append(BASELINE)
            self.policies.append(make_policy(BASELINE))
        for policy in self.policies:
            check_policy(backend, policy)  # what does not fit is refused before any work, as a K or an artefact below
            policy.begin(backend.table)
        self._states = [copy.deepcopy(policy.state_dict()) for policy in self.policies]

    def restore(self) -> None:
        """Back to what each policy knew when it was handed over: warm-ups and repeats teach nothing."""
        for policy, state in zip(self.policies, self._states, strict=True):
            policy.load_state_dict(copy.deepcopy(state))

    def play(self, request: Request, policy: int, index: int = 0, repeat: int = 0) -> Run:
        start = self.clock()
        try:
            episode = run_request(self.backend, request, self.policies[policy])
        except RequestError as error:
            raise RequestError(f"request {request.id!r} with policy {self.labels[policy]!r}: {error}") from None
        wall = self.clock() - start
        prefill = float(getattr(self.backend, "prefill_seconds", 0.0))
        return Run(index, repeat, episode, wall, prefill, getattr(self.backend, "memory_peak", None))

    def reports(self, count: int) -> list[dict[str, Any] | None]:
        """What the first `count` policies say of themselves."""
        found = [getattr(policy, "report", None) for policy in self.policies[:count]]
        return [report() if callable(report) else None for report in found]

    def fixed_as_in(self, first: _Players) -> frozenset[int]:
        """Policies that would repeat their play of `first`: the same rule, which keeps no state and takes no seed."""
        return frozenset(
            i
            for i, (mine, other) in enumerate(zip(self.policies, first.policies, strict=True))
            if (type(mine), mine.spec) == (type(other), other.spec)
            and not any((self._states[i], first._states[i], other.state_dict()))
            and "seed" not in inspect.signature(type(mine)).parameters
        )

    def play_all(
        self,
        request: Request,
        index: int,
        repeat: int,
        seed: int,
        bar: Any,
        fixed: frozenset[int] = frozenset(),
        first: RequestResult | None = None,
    ) -> RequestResult:
        """All policies on one request in an order that `seed` shuffles anew for each request.

        Those in `fixed` are not played: their runs in `first` count again.
        """
        order = np.random.default_rng([seed, repeat, index]).permutation(len(self.policies))
        runs: dict[int, Run] = {}
        for i in map(int, order):
            bar.set_postfix_str(self.labels[i], refresh=False)
            if first is not None and i in fixed:
                runs[i] = (*first.runs, first.baseline)[i].again(repeat)
            else:
                runs[i] = self.play(request, i, index, repeat)
            bar.update()
            self.on_episode(self.labels[i], runs[i].episode)
        hidden = self.baseline is None
        plain = runs[len(self.policies) - 1 if self.baseline is None else self.baseline]
        listed = tuple(runs[i] for i in range(len(self.policies) - hidden))
        return RequestResult(index, repeat, request, listed, plain, tuple(self.labels[i] for i in map(int, order)))


def request_order(seed: int, count: int) -> list[int]:
    """The order in which the requests come for a seed of the policies.

    >>> request_order(0, 6) != request_order(1, 6), sorted(request_order(1, 6))
    (True, [0, 1, 2, 3, 4, 5])
    """
    return [int(i) for i in np.random.default_rng([ORDERS, seed]).permutation(count)]


ORDERS = 0x0DE5
"""keeps the orders apart from what else is drawn by small seeds"""


@contextmanager
def _bar(total: int, shown: bool) -> Iterator[Any]:
    # disable=None: silent when stderr is not a terminal
    with tqdm(total=total, desc="evaluate", unit="run", disable=None if shown else True, leave=False) as bar:
        yield bar


def evaluate(
    backend: Backend,
    requests: Sequence[Request],
    policies: Policies | Mapping[int, Policies],
    *,
    seed: int,
    repeats: int = 1,
    warmup: int = 1,
    progress: bool = True,
    on_episode: OnEpisode | None = None,
    on_request: OnRequest | None = None,
    meta: Mapping[str, Any] | None = None,
    actions: Mapping[str, str] | None = None,
    ladder: Ladder | None = None,
    against: str | None = None,
    leaked: Mapping[str, int] | None = None,
    clock: Callable[[], float] = perf_counter,
) -> Evaluation:
    """Compare policies on the same requests, paired by request and interleaved in time.

    Plain decoding always runs as the baseline; it is a row when `("ar", policy)` is listed. The order of the
    policies is shuffled for each request by `seed`. The first `warmup` requests are first played once by every
    policy and thrown away. A policy learns across the requests of one repeat; before each repeat it returns to the
    state in which it was handed over. The same name may be listed twice (A/A) with two objects.

    A mapping seed -> policies plays everything once for each seed instead, each with policies of its own and with the
    requests in another order (`request_order`). Its seeds are repeats in all results, `meta.policy_seeds` names them. A
    policy that keeps no state from request to request and takes no seed is played for the first seed only.

    `on_episode(label, episode)` is called after each run, `on_request(result)` once all policies have finished a
    request. `meta` is added to the result's own. `actions` says what tuning chose for a policy, `ladder` what the same
    requests take without a policy (`assc.oracle.ladder`), `leaked` of how many requests a label has learned beforehand;
    all only go into the result. `against` is the label of a policy with which the others are compared besides plain
    decoding. `clock` (seconds) measures the wall time around each episode.

    Raises `AsscError` for input that cannot be evaluated, and `EvaluationInterrupted` (a `KeyboardInterrupt` that
    carries the finished part) on Ctrl-C.
    """
    seeded = isinstance(policies, Mapping)
    by_seed = policies if isinstance(policies, Mapping) else {0: policies}
    if seeded and repeats != 1:
        raise AsscError(f"seeds of the policies are played once each, so repeats is 1, got {repeats}")
    _check(requests, list(by_seed.values()), repeats, warmup, against)
    check_requests(backend, requests)
    told = on_episode or (lambda label, episode: None)
    plan = [
        (_Players(backend, listed, clock, told), request_order(s, len(requests)) if seeded else range(len(requests)))
        for s, listed in by_seed.items()
    ] * repeats
    players = plan[0][0]
    extra = {**(meta or {}), **({"policy_seeds": list(by_seed)} if seeded else {})}
    count = len(players.labels) - (players.baseline is None)
    evaluation = Evaluation(
        names=tuple(name for name, _ in next(iter(by_seed.values()))),
        mode=backend.mode,
        measured=backend.time_source == "measured",
        seed=seed,
        baseline=players.baseline,
        meta=_meta(backend, requests, seed=seed, repeats=len(plan), warmup=warmup, extra=extra),
        complete=False,
        ladder=ladder,
        actions=dict(actions or {}),
        against=against,
        leaked=dict(leaked or {}),
        rung=tuple(rung_of(policy) for policy in players.policies[:count]),
    )
    json.dumps(evaluation.meta, allow_nan=False)  # what could not be written fails now, not after hours of work
    warming = list(requests[:warmup])
    first: dict[int, RequestResult] = {}
    try:
        with _bar((len(warming) + len(plan) * len(requests)) * len(players.policies), progress) as bar:
            for request in warming:
                for i in range(len(players.policies)):
                    players.play(request, i)
                    bar.update()
            for repeat, (playing, order) in enumerate(plan):
                playing.restore()
                fixed = playing.fixed_as_in(plan[0][0]) if seeded and repeat else frozenset()
                evaluation.once |= {playing.labels[i] for i in fixed}
                for index in order:
                    result = playing.play_all(requests[index], index, repeat, seed, bar, fixed, first.get(index))
                    first.setdefault(index, result)
                    evaluation.results.append(result)
                    if on_request is not None:
                        on_request(result)
                players = playing
    except KeyboardInterrupt:
        raise EvaluationInterrupted(evaluation) from None
    finally:
        evaluation.policy_reports = players.reports(count)
    evaluation.complete = True
    return evaluation
