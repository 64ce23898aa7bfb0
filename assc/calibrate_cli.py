"""`python -m assc calibrate`: fit the cost model of a pair on this machine, save it, and check it on live runs.

With `--check` the rounds that the model is fitted to and the held-out runs that it is compared with take turns, so that
a machine whose speed changes is the same machine for both (`assc.cost_check`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from assc.cli import NOTHING_KEPT, on_ctrl_c, parse, run_cli
from assc.core import Mode, Request
from assc.cost_check import CheckRow, check_table, fit_and_check
from assc.costs_io import CostFile, write_costs
from assc.errors import RequestError
from assc.groups import check_chunks, check_k_max
from assc.outputs import COSTS, check_outputs
from assc.pair_options import PairOptions, load_chosen

if TYPE_CHECKING:
    from assc.pairs import LoadedPair


@dataclass(frozen=True, kw_only=True)
class Config(PairOptions):
    """Options of `python -m assc calibrate`."""

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
    """compare modelled and measured seconds on held-out requests, static K in 0, 2, 4, 8 per drafter, measured in turns
    with what is fitted"""
    check_requests: int = 6
    """requests of the check"""
    check_tokens: int = 48
    """their budget"""
    repeats: int = 3
    """how often the check is measured: tells the run-to-run spread"""
    chunks: int = 1
    """verify drafted tokens in so many groups in the check; the model prices any number of them"""
    clock: Literal["wall", "cpu"] = "wall"
    """cpu: processor time of this process instead of the wall clock, for --threads 1 on a CPU that others use too"""
    workload: str = "mixed"
    """where the check's prompts come from"""


def _check(config: Config) -> None:
    if config.mode == "greedy" and config.temperature > 0:
        raise RequestError("--mode greedy takes --temperature 0; sample with --mode gumbel")
    if min(config.rounds, config.check_requests, config.check_tokens, config.repeats) < 1:
        raise RequestError("--rounds, --check-requests, --check-tokens and --repeats are 1 or more")
    check_k_max(config.k_max)
    check_chunks(config.chunks, config.k_max)
    if not config.budgets or min(config.budgets) < 2:
        raise RequestError("--budgets needs at least one number, each 2 or more")
    check_outputs({"out": config.out}, COSTS)


def calibrate_pair(config: Config) -> int:
    """Fit, print, save, check. 1 when the check fails."""
    import torch

    from assc.calibrate import Measuring
    from assc.live import LiveBackend
    from assc.loading import build_engine
    from assc.timing import CLOCKS

    _check(config)
    pair = load_chosen(config)
    engine = build_engine(pair, k_max=config.k_max, chunks=config.chunks)
    clock = CLOCKS[config.clock]
    if config.clock == "cpu" and (pair.device.type != "cpu" or torch.get_num_threads() != 1):
        raise RequestError("--clock cpu counts processor time: it needs --device cpu and --threads 1")
    measuring = Measuring(engine, budgets=config.budgets, mode=config.mode, temperature=config.temperature, clock=clock)
    rows: list[CheckRow] = []
    if config.check:
        backend = LiveBackend(engine, mode=config.mode, time_source="measured", clock=clock)
        requests = _held_out(config, pair)
        found, rows = fit_and_check(measuring, backend, requests, rounds=config.rounds, repeats=config.repeats)
    else:
        for _ in range(config.rounds):
            measuring.measure()
        found = measuring.fit()
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
    if rows:
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
    if m.target_curve:
        widths = ", ".join(f"{columns}: {1e3 * m.forward(columns):.2f}" for columns, _ in m.target_curve)
        lines.append(f"target by width of the block instead of a line (ms without slots and commitment): {widths}")
    for name, d in m.drafters.items():
        lines.append(
            f"{name}: {1e3 * d.per_call:.3f} ms per call + {1e3 * d.per_step:.3f} per step "
            f"+ {1e3 * d.per_catch_up:.4f} per token caught up; c = {m.cost_ratio(name):.3f}"
        )
    residuals = ", ".join(f"{name} {value:.1%}" for name, value in file.residuals.items())
    return "\n".join([*lines, f"residuals (relative RMS): {residuals or 'none'}"])


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 1 when the check fails, 2 and one sentence for a mistake of the user."""
    description = "Fit the cost model of a pair on this machine."

    def work() -> int:
        with on_ctrl_c(NOTHING_KEPT):
            return calibrate_pair(parse(Config, argv, prog="python -m assc calibrate", description=description))

    return run_cli(work)
