"""Does a policy decide live as it does on a trace? `python -m assc live-check`, and the end of a training run.

The same requests are played from the trace and by real models. In modes greedy and gumbel the text must be the same
and so must every decision, apart from what half precision and another processor change; the measured speed-up stands
beside the modelled one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assc.cli import parse, run_cli
from assc.core import Backend, Episode, Request
from assc.costs import CostModel
from assc.costs_io import read_costs
from assc.device import check_threads
from assc.errors import TraceError
from assc.evaluate import evaluate
from assc.files import write_json
from assc.outputs import LIVE_CHECK, check_outputs
from assc.registry import artefacts_in, make_policy
from assc.replay import ReplayBackend
from assc.results import Evaluation
from assc.shipped import shipped_costs, shipped_trace
from assc.trace import IMPORTED, Trace
from assc.trace_io import read_trace
from assc.trace_rules import balanced_rows

if TYPE_CHECKING:
    from assc.live import LiveBackend

KEPT = ("policy", "tokens", "seconds", "speedup", "speedup_ci95", "acceptance_rate", "mean_k", "rounds")


@dataclass(frozen=True)
class LiveCheck:
    """What came out. Rounds are compared up to the first difference of a request."""

    policy: str
    requests: int
    same_text: int
    """requests whose whole text was the trace's"""
    rounds: int
    """rounds of the replay"""
    same_rounds: int
    """rounds that were the same live: decision, drafted, accepted and emitted tokens"""
    live: dict[str, Any]
    replay: dict[str, Any]
    """rows of the policy; speed-up against plain decoding of the same requests"""
    meta: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        where = f"{self.meta['pair']}, {self.meta['device']} {self.meta['dtype']}, {self.meta['threads']} threads"
        low, high = self.live["speedup_ci95"]
        bounds = "" if low is None else f" (95 % interval {low:.2f} to {high:.2f})"
        measured = _times(self.live["speedup"]) + bounds
        half = self.same_text < self.requests and self.meta["dtype"] in ("bfloat16", "float16")
        why = f"; in {self.meta['dtype']} another processor may round near ties differently (docs/training.md)"
        return (
            f"Live check ({where}, mode {self.meta['mode']}, {self.requests} held-out requests): same text in "
            f"{self.same_text} of {self.requests}, same round in {self.same_rounds} of {self.rounds}; "
            f"speed-up measured {measured}, modelled {_times(self.replay['speedup'])}"
            f"{why if half else ''}"
        )


def _times(speedup: float | None) -> str:
    return "n/a" if speedup is None else f"{speedup:.2f}x"


def held_out_rows(trace: Trace, n: int, seed: int) -> list[int]:
    """`n` held-out requests balanced over categories and temperatures, n or more being all of them."""
    rows = trace.where(split="held-out")
    return rows if n >= len(rows) else balanced_rows(trace, rows, n, seed)


def check_backends(live: LiveBackend, trace: Trace) -> None:
    """`TraceError` where the models could not have recorded the trace."""
    names = tuple(live.engine.drafters)
    if set(names) != set(trace.drafters):
        raise TraceError(
            f"{trace.name} was recorded with the drafters {', '.join(trace.drafters)}, the pair has {', '.join(names)}"
        )


def _same_rounds(one: Episode, two: Episode) -> int:
    """Equal rounds until the first difference."""
    count = 0
    for a, b in zip(one.rounds, two.rounds, strict=False):
        if (a.action, a.drafted, a.accepted, a.tokens) != (b.action, b.drafted, b.accepted, b.tokens):
            break
        count += 1
    return count


def live_check(
    live: LiveBackend, trace: Trace, costs: CostModel, spec: str, requests: Sequence[Request], *, seed: int = 0
) -> LiveCheck:
    """Play `requests` of the trace with the policy `spec` and with plain decoding, from the trace and live.

    A policy that learns from the clock (the bandits) starts from one state in both, then learns from other seconds, so
    its decisions may differ. Raises `TraceError` for models of another kind.
    """
    check_backends(live, trace)

    def play(backend: Backend, warmup: int) -> Evaluation:
        policies = [("ar", make_policy("ar")), (spec, make_policy(spec, seed=seed))]
        return evaluate(backend, requests, policies, seed=seed, warmup=warmup)

    replayed, played = play(ReplayBackend(trace, costs), 0), play(live, 1)
    pairs = [(a.runs[1].episode, b.runs[1].episode) for a, b in zip(replayed.results, played.results, strict=True)]
    return LiveCheck(
        policy=spec,
        requests=len(requests),
        same_text=sum(a.tokens == b.tokens for a, b in pairs),
        rounds=sum(len(a.rounds) for a, _ in pairs),
        same_rounds=sum(_same_rounds(a, b) for a, b in pairs),
        live=_row(played),
        replay=_row(replayed),
        meta={**played.meta, "trace": trace.name, "trace_dtype": trace.header.dtype, "trace_code": trace.header.code},
    )


def _row(evaluation: Evaluation) -> dict[str, Any]:
    row = evaluation.rows()[1]
    return {name: row[name] for name in KEPT}


def live_backend(
    trace: Trace, costs: CostModel, pair: str, *, draft: Sequence[str] = (), threads: int | None = None
) -> LiveBackend:
    """The pair in the trace's dtype and mode, with the trace's K_max and the costs that features are made of.

    Without `threads` torch uses those of the recording: in bfloat16 their number can change the text.
    """
    from assc.live import LiveBackend
    from assc.pairs import load_pair

    if trace.header.pair == IMPORTED:
        raise TraceError(
            f"{trace.name} was imported: the models that wrote it are not known, so nothing can play it live"
        )
    loaded = load_pair(
        pair, draft=draft, dtype=trace.header.dtype or "auto", threads=threads or trace.header.threads or None
    )
    return LiveBackend.from_pair(
        loaded, mode=trace.header.mode, k_max=trace.header.k_max, time_source="measured", cost_model=costs
    )


@dataclass(frozen=True)
class Config:
    """Options of `python -m assc live-check`."""

    policy: str
    """spec string or saved .zip file"""
    pair: str = "smollm2"
    """model pair that the trace was recorded with"""
    draft: tuple[str, ...] = ()
    """drafts to add: directory or hub id of a model, or the folder of a learned draft; NAME=SOURCE names the drafter"""
    traces: str | None = None
    """trace; default: the one that comes with the package"""
    cost: Path | None = None
    """cost model of the replay; default: the package's"""
    requests: int = 24
    """held-out requests, balanced over categories and temperatures"""
    seed: int = 0
    """chooses the requests"""
    threads: int | None = None
    """torch threads; default: those of the recording, since in bfloat16 their number can change the text"""
    json: Path | None = None
    """write the result to this file"""


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 2 and one sentence for a mistake of the user."""

    def work() -> int:
        config = parse(
            Config, argv, prog="python -m assc live-check", description="Compare live with replayed decisions."
        )
        if config.requests < 1:
            raise TraceError(f"--requests is {config.requests}, allowed is 1 or more")
        check_threads(config.threads)
        make_policy(config.policy)
        check_outputs({"json": config.json}, LIVE_CHECK, [config.traces, config.cost, *artefacts_in(config.policy)])
        trace = shipped_trace() if config.traces is None else read_trace(config.traces)
        costs = shipped_costs() if config.cost is None else read_costs(config.cost).model
        requests = trace.requests(held_out_rows(trace, config.requests, config.seed))
        live = live_backend(trace, costs, config.pair, draft=config.draft, threads=config.threads)
        result = live_check(live, trace, costs, config.policy, requests, seed=config.seed)
        print(result)
        if config.json is not None:
            write_json(config.json, result.to_json())
        return 0

    return run_cli(work)
