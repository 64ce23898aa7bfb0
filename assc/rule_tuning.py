"""`NAME:tuned`: a rule with the parameters that are best on the train requests of a trace.

Tried are the values that the policy's class lists in `grid` (parameter -> values), or, where it lists none, every
drafter (parameter `drafter`) and a few bounds of K (`k_max`). One parameter at a time is varied, all of them twice
over, from the default values on; a value is kept if Σtokens/Σseconds over the train requests is larger. So a rule that
an unlucky default makes slow is not mistaken for a slow rule. `static:tuned` is exact instead (`assc.oracle`).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from assc.core import Backend, Request, Totals
from assc.errors import SpecError
from assc.registry import make_policy, parse_spec, policy_factory, policy_names
from assc.run import run_request

SUFFIX = "tuned"
K_BOUNDS = (2, 4, 8, 12, 16)
PASSES = 2

Grid = Mapping[str, Sequence[Any]]


def is_tuned_rule(spec: str) -> bool:
    """Whether `spec` asks for a rule tuned on train requests.

    >>> [is_tuned_rule(s) for s in ("cascade:tuned", "static:tuned", "cascade:m=2", "runs/tuned.zip")]
    [True, False, False, False]
    """
    return spec.endswith(f":{SUFFIX}") and spec.count(":") == 1 and not spec.startswith("static:")


def grid_of(spec: str, drafters: Sequence[str] = (), k_max: int = max(K_BOUNDS)) -> Grid:
    """What is tried for `NAME:tuned`. Raises `SpecError` for a policy without parameters to tune."""
    name, _ = parse_spec(spec)
    factory = policy_factory(name)
    listed: Grid | None = getattr(factory, "grid", None)
    if listed is not None:
        return listed
    known = inspect.signature(factory).parameters
    grid = {"drafter": tuple(drafters), "k_max": tuple(k for k in K_BOUNDS if k <= k_max)}
    grid = {key: values for key, values in grid.items() if key in known}
    if not grid:
        able = [n for n in policy_names() if n != "static" and _tunable(n)]
        raise SpecError(f"the policy {name!r} has nothing to tune; policies that have: {', '.join(able)}")
    return grid


def _tunable(name: str) -> bool:
    factory = policy_factory(name)
    parameters = inspect.signature(factory).parameters
    return hasattr(factory, "grid") or "drafter" in parameters or "k_max" in parameters


def tuned_rule(spec: str, backend: Backend, requests: Sequence[Request], *, seed: int = 0) -> str:
    """The spec with the best parameters on these (train) requests.

    Raises `SpecError` for a policy without parameters to tune.
    """
    name, _ = parse_spec(spec)
    table = backend.table
    scores: dict[str, float] = {}

    def score(chosen: Mapping[str, Any]) -> float:
        own = f"{name}:{','.join(f'{k}={v}' for k, v in sorted(chosen.items()))}" if chosen else name
        if own not in scores:
            try:
                policy = make_policy(own, seed=seed)
            except SpecError:  # values that do not go together, such as k_max below k_min
                scores[own] = -1.0
            else:
                total = Totals()
                for request in requests:
                    total = total + Totals.of(run_request(backend, request, policy).rounds)
                scores[own] = total.tokens_per_second or 0.0
        return scores[own]

    best: dict[str, Any] = {}
    score(best)
    for _ in range(PASSES):
        for key, values in grid_of(spec, table.drafters, table.k_max).items():
            for value in values:
                if score({**best, key: value}) > score(best):
                    best = {**best, key: value}
    return max(scores, key=lambda own: scores[own])
