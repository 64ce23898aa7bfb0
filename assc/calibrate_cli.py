"""`python -m assc calibrate`: fit the cost model of a pair on this machine, save it, and check it on live runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from assc.actions import ActionTable, check_k_max
from assc.cli import parse, run_cli
from assc.core import ROLLBACK, Action, Episode, Mode, Observation, Request
from assc.costs import CostModel
from assc.costs_io import CostFile, write_costs
from assc.errors import RequestError
from assc.files import check_writable

if TYPE_CHECKING:
    from assc.live import LiveBackend
    from assc.pairs import LoadedPair

CHECK_K: tuple[int, ...] = (0, 2, 4, 8)
TOLERANCE = 0.05


@dataclass(frozen=True)
class Config:
    """Options of `python -m assc calibrate`."""

    pair: str = "smollm2"
    """model pair; `python -m assc doctor` lists them"""
    target: str | None = None
    """target model instead of the pair's"""
    draft: str | None = None
    """draft model: directory or hub id"""
    k_max: int = 16
    """largest K measured"""
    mode: Mode = "greedy"
    """verification mode: sampling costs time too"""
    temperature: float = 0.0
    """of sampling; 0 is greedy"""
    rounds: int = 6
    """rounds per shape"""
    budgets: tuple[int, ...] = (64, 400, 800)
    """new tokens of the measured requests: they give buffers of different length"""
    out: Path | None = None
    """JSON file to write"""
    check: bool = False
    """compare modelled and measured seconds on held-out requests, static K in 0, 2, 4, 8 per drafter"""
    check_requests: int = 6
    """requests of the check"""
    check_tokens: int = 48
    """their budget"""
    repeats: int = 2
    """how often the check is measured: tells the run-to-run spread"""
    workload: str = "mixed"
    """where the check's prompts come from"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, ..."""
    dtype: str = "auto"
    """auto, bfloat16, float16, float32 or float64"""
    threads: int | None = None
    """torch threads; default: torch's own choice"""


class _Fixed:
    """The same K in every round, cut to what can be played."""

    needs: frozenset[str] = frozenset()

    def __init__(self, drafter: str | None, k: int) -> None:
        self.action = ROLLBACK if drafter is None else Action(drafter, k)
        self.spec = str(self.action)

    def begin(self, table: ActionTable) -> None: ...

    def act(self, observation: Observation) -> Action:
        return self.action.clipped(observation.k_max)

    def update(self, record: object) -> None: ...

    def reset(self) -> None: ...

    def state_dict(self) -> dict[str, object]:
        return {}

    def load_state_dict(self, state: object) -> None: ...


@dataclass(frozen=True)
class CheckRow:
    """Σseconds of one static action, measured (mean of the repeats) and modelled. `spread` is relative."""

    action: str
    measured: float
    modelled: float
    spread: float

    @property
    def error(self) -> float:
        return self.modelled / self.measured - 1.0

    @property
    def passed(self) -> bool:
        return abs(self.error) <= max(TOLERANCE, self.spread)


def modelled_seconds(costs: CostModel, episode: Episode, slots: int) -> float:
    """What the model says about rounds that were measured."""
    total = 0.0
    prompt = len(episode.request.prompt_ids)
    for record in episode.rounds:
        total += costs.price(record, costs.kv(prompt + record.position, slots)).seconds
    return total


def check_costs(
    backend: LiveBackend, costs: CostModel, requests: Sequence[Request], *, repeats: int = 2
) -> list[CheckRow]:
    """Play static K live, all actions interleaved request by request, and compare."""
    from assc.run import run_request

    k_values = [k for k in CHECK_K if 0 < k <= backend.engine.k_max]
    policies = [_Fixed(None, 0), *(_Fixed(d, k) for d in backend.engine.drafters for k in k_values)]
    measured = [[0.0] * repeats for _ in policies]
    modelled = [0.0 for _ in policies]
    run_request(backend, requests[0], policies[-1])  # warm-up
    for repeat in range(repeats):
        for request in requests:
            for i, policy in enumerate(policies):
                episode = run_request(backend, request, policy)
                measured[i][repeat] += sum(r.seconds - r.policy_seconds for r in episode.rounds)
                modelled[i] += modelled_seconds(costs, episode, backend.batch.kv.length)
    rows = []
    for policy, seconds, model in zip(policies, measured, modelled, strict=True):
        mean = sum(seconds) / repeats
        rows.append(CheckRow(policy.spec, mean, model / repeats, (max(seconds) - min(seconds)) / mean))
    return rows


def _check(config: Config) -> None:
    if config.mode == "greedy" and config.temperature > 0:
        raise RequestError("--mode greedy takes --temperature 0; sample with --mode gumbel")
    if min(config.rounds, config.check_requests, config.check_tokens, config.repeats, config.k_max) < 1:
        raise RequestError("--rounds, --check-requests, --check-tokens, --repeats and --k-max are 1 or more")
    check_k_max(config.k_max)
    if not config.budgets or min(config.budgets) < 2:
        raise RequestError("--budgets needs at least one number, each 2 or more")
    if config.out is not None:
        check_writable(config.out)


def calibrate_pair(config: Config) -> int:
    """Fit, print, save, check. 1 when the check fails."""
    import torch

    from assc.calibrate import fit_costs
    from assc.live import LiveBackend
    from assc.loading import build_engine
    from assc.pairs import load_pair

    _check(config)
    pair = load_pair(
        config.pair,
        target=config.target,
        draft=config.draft,
        device=config.device,
        dtype=config.dtype,
        threads=config.threads,
    )
    engine = build_engine(pair, k_max=config.k_max)
    found = fit_costs(
        engine,
        rounds=config.rounds,
        budgets=config.budgets,
        mode=config.mode,
        temperature=config.temperature,
    )
    file = CostFile(
        found.model,
        pair=pair.name,
        device=str(pair.device),
        dtype=str(pair.dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        residuals=found.residuals,
    )
    if config.out is not None:  # before the printing, which a closed pipe stops
        write_costs(file, config.out)
    print(describe(file))
    if config.out is not None:
        print(f"written to {config.out}")
    if not config.check:
        return 0
    backend = LiveBackend(engine, mode=config.mode, cost_model=found.model, time_source="measured")
    rows = check_costs(backend, found.model, _held_out(config, pair), repeats=config.repeats)
    print(check_table(rows))
    return 0 if all(r.passed for r in rows) else 1


def _held_out(config: Config, pair: LoadedPair) -> list[Request]:
    from assc.workloads import load_workload, make_requests, select

    prompts = load_workload(config.workload, "held-out")
    chosen = select(prompts, min(config.check_requests, len(prompts)), 0)
    sampling = {"mode": config.mode, "temperature": config.temperature}
    return make_requests(chosen, pair.encode, max_new_tokens=config.check_tokens, seed=0, sampling=sampling)


def describe(file: CostFile) -> str:
    """The coefficients in milliseconds, c and the residuals."""
    m = file.model
    lines = [
        f"{file.pair}, {file.dtype} on {file.device}, {file.threads} threads, {file.date} ({m.label})",
        f"target: {1e3 * m.target_fixed:.3f} ms + {1e3 * m.target_per_token:.4f} per verified token "
        f"+ {1e3 * m.target_per_tile:.3f} beyond 16 columns "
        f"+ {1e6 * m.target_per_kv:.3f} us per slot + {1e3 * m.per_emitted:.4f} per committed token; "
        f"overhead {1e3 * m.overhead:.3f} ms",
    ]
    for name, d in m.drafters.items():
        lines.append(
            f"{name}: {1e3 * d.per_call:.3f} ms per call + {1e3 * d.per_step:.3f} per step "
            f"+ {1e3 * d.per_catch_up:.4f} per token caught up; c = {m.cost_ratio(name):.3f}"
        )
    residuals = ", ".join(f"{name} {value:.1%}" for name, value in file.residuals.items())
    return "\n".join([*lines, f"residuals (relative RMS): {residuals or 'none'}"])


def check_table(rows: Sequence[CheckRow]) -> str:
    """Measured against modelled seconds, one line per static action."""
    lines = [f"{'static':<14} {'measured':>9} {'modelled':>9} {'error':>7} {'spread':>7}"]
    for r in rows:
        verdict = "pass" if r.passed else "FAIL"
        lines.append(
            f"{r.action:<14} {r.measured:>8.3f}s {r.modelled:>8.3f}s {r.error:>+7.1%} {r.spread:>7.1%} {verdict}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 1 when the check fails, 2 and one sentence for a mistake of the user."""
    description = "Fit the cost model of a pair on this machine."
    return run_cli(
        lambda: calibrate_pair(parse(Config, argv, prog="python -m assc calibrate", description=description))
    )
