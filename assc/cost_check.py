"""Is a round as dear as the cost model says? Static actions live against the model, measured in turns with its fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from assc.core import ROLLBACK, Action, Episode, Request
from assc.costs import CostModel
from assc.registry import make_policy
from assc.run import run_request
from assc.tuning import static_spec

if TYPE_CHECKING:
    from assc.calibrate import Measuring
    from assc.cost_fit import Calibration
    from assc.live import LiveBackend

CHECK_K: tuple[int, ...] = (0, 2, 4, 8)
TOLERANCE = 0.05


@dataclass(frozen=True)
class CheckRow:
    """Σseconds of one static action, measured (mean of the repeats) and modelled, and the same as speed-ups.

    `spread` and `ratio_spread` are (largest - smallest of the repeats) / mean.
    """

    action: str
    measured: float
    modelled: float
    spread: float
    measured_ratio: float = 1.0
    """Σseconds of plain decoding / Σseconds of this action; the tokens are the same"""
    modelled_ratio: float = 1.0
    ratio_spread: float = 0.0

    @property
    def error(self) -> float:
        return self.modelled / self.measured - 1.0

    @property
    def ratio_error(self) -> float:
        return self.modelled_ratio / self.measured_ratio - 1.0

    @property
    def passed(self) -> bool:
        return abs(self.error) <= max(TOLERANCE, self.spread)

    @property
    def ratio_passed(self) -> bool:
        return abs(self.ratio_error) <= max(TOLERANCE, self.ratio_spread)


def modelled_seconds(costs: CostModel, episode: Episode, slots: int) -> float:
    """What the model says about rounds that were measured, over buffers of so many `slots`."""
    prompt = len(episode.request.prompt_ids)
    return sum(costs.price(r, costs.kv(prompt + r.position, slots)).seconds for r in episode.rounds)


class Check:
    """Static actions on the same requests, live and interleaved; compared with a model at the end."""

    def __init__(self, backend: LiveBackend, requests: Sequence[Request]) -> None:
        k_values = [k for k in CHECK_K if 0 < k <= backend.engine.k_max]
        actions = [ROLLBACK, *(Action(d, k) for d in backend.engine.drafters for k in k_values)]
        self.backend, self.requests = backend, requests
        self.actions = [str(action) for action in actions]
        self._policies = [make_policy(static_spec(action, backend.table)) for action in actions]
        self._played: list[list[list[tuple[Episode, int]]]] = []
        """[repeat][action] -> episodes and the slots of their buffers"""
        for policy in self._policies[-1:]:
            run_request(backend, requests[0], policy)  # a warm-up

    def play(self, repeat: int, request: int) -> None:
        """All actions on one of the requests, in another order each time."""
        while len(self._played) <= repeat:
            self._played.append([[] for _ in self._policies])
        for i in np.random.default_rng([repeat, request]).permutation(len(self._policies)):
            episode = run_request(self.backend, self.requests[request], self._policies[i])
            self._played[repeat][i].append((episode, self.backend.batch.kv.length))

    def rows(self, costs: CostModel) -> list[CheckRow]:
        """Measured against modelled, plain decoding first."""
        repeats = self._played
        measured = np.array([[sum(_decoding(e) for e, _ in part) for part in repeat] for repeat in repeats])
        priced = [[sum(modelled_seconds(costs, e, n) for e, n in part) for part in repeat] for repeat in repeats]
        mean, modelled, ratios = measured.mean(0), np.array(priced).mean(0), measured[:, :1] / measured
        return [
            CheckRow(
                action,
                float(mean[i]),
                float(modelled[i]),
                _spread(measured[:, i]),
                float(mean[0] / mean[i]),
                float(modelled[0] / modelled[i]),
                _spread(ratios[:, i]),
            )
            for i, action in enumerate(self.actions)
        ]


def _decoding(episode: Episode) -> float:
    return sum(r.seconds - r.policy_seconds for r in episode.rounds)


def _spread(values: NDArray[np.float64]) -> float:
    return float((values.max() - values.min()) / values.mean())


def fit_and_check(
    measuring: Measuring, backend: LiveBackend, requests: Sequence[Request], *, rounds: int, repeats: int
) -> tuple[Calibration, list[CheckRow]]:
    """Measure for the fit and play static K live in turns; then fit, and compare the model with what was played."""
    check = Check(backend, requests)
    turns = [(repeat, i) for repeat in range(repeats) for i in range(len(requests))]
    done = 0
    for turn, (repeat, i) in enumerate(turns, 1):
        check.play(repeat, i)
        while done < rounds * turn // len(turns):
            measuring.measure()
            done += 1
    found = measuring.fit()
    return found, check.rows(found.model)


def check_table(rows: Sequence[CheckRow]) -> str:
    """Measured against modelled seconds and speed-ups, one line per static action."""
    columns = f"{'measured':>9} {'modelled':>9} {'error':>7} {'spread':>7}     "
    lines = [f"{'static':<14} {columns} {columns.replace('measured', 'speed-up')}".rstrip()]
    for r in rows:
        seconds = f"{r.measured:>8.3f}s {r.modelled:>8.3f}s {r.error:>+7.1%} {r.spread:>7.1%} {_verdict(r.passed)}"
        ratio = f"{r.measured_ratio:>8.3f}x {r.modelled_ratio:>8.3f}x {r.ratio_error:>+7.1%} {r.ratio_spread:>7.1%}"
        lines.append(f"{r.action:<14} {seconds} {ratio} {_verdict(r.ratio_passed)}")
    good, ratios = sum(r.passed for r in rows), sum(r.ratio_passed for r in rows)
    bar = f"{TOLERANCE:.0%} or the spread between repeats"
    return "\n".join([*lines, f"within {bar}: seconds {good} of {len(rows)}, speed-ups {ratios} of {len(rows)}"])


def _verdict(passed: bool) -> str:
    return "pass" if passed else "FAIL"
