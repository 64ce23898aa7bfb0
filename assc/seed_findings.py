"""What of the seed table agrees with the tables made here and what does not, with the reasons that can be reckoned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from assc.seed_fit import TwoStates
from assc.seed_nouns import SEED, Figures, Part, PartRow

STATIC = tuple(name for name in SEED if name != "assc")
SPARED = 0.5
"""share of the waste that the seed's assc spares, from which on sparing agrees"""
TOLERANCE = 0.05
"""relative difference below which a figure counts as the seed's"""


@dataclass(frozen=True)
class Finding:
    """One statement; `agrees` is None for a remark that explains."""

    text: str
    agrees: bool | None = None

    def __str__(self) -> str:
        return {True: "agrees: ", False: "does not agree: ", None: "remark: "}[self.agrees] + self.text


def findings(parts: Sequence[Part], processes: Mapping[str, TwoStates], profile_c: float) -> list[Finding]:
    """All statements. `processes` are fits to the seed's waste rates by part, `profile_c` is the c of its pair."""
    found = [finding for part in parts for finding in _of_part(part)]
    return [*found, _identity(), _implied(profile_c), *_acceptance(parts), *_fits(processes, parts)]


def _of_part(part: Part) -> list[Finding]:
    order = sorted(part.rows, key=lambda row: -(row.speedup or 0.0))
    told = " > ".join(f"{row.strategy} {row.speedup or 0:.2f}x" for row in order)
    seed_order = sorted(SEED, key=lambda name: -SEED[name].speedup)
    best = order[0].strategy == seed_order[0]
    wastes = [part.row(name).waste for name in STATIC]
    rising = wastes == sorted(wastes)
    mine, theirs = spared(part.rows), spared_by_seed()
    near = [name for name in SEED if _close(part.row(name), SEED[name])]
    return [
        Finding(
            f"{part.name}: {order[0].strategy} is the fastest ({told}); the seed has {' > '.join(seed_order)}", best
        ),
        Finding(
            f"{part.name}: waste {'rises' if rising else 'does not rise'} with static K "
            f"({', '.join(f'{100 * w:.0f} %' for w in wastes)}), as in the seed (12, 39, 54 %)",
            rising,
        ),
        Finding(
            f"{part.name}: assc wastes {abs(100 * mine):.1f} points {'less' if mine >= 0 else 'MORE'} than static K at "
            f"its own mean K would (interpolated), in the seed {100 * theirs:.1f} points less",
            mine > SPARED * theirs,
        ),
        Finding(
            f"{part.name}: speed-ups within {100 * TOLERANCE:.0f} % of the seed's: {', '.join(near) or 'none'}",
            len(near) == len(SEED),
        ),
    ]


def _close(row: PartRow, figures: Figures) -> bool:
    return row.speedup is not None and abs(row.speedup / figures.speedup - 1) <= TOLERANCE


def spared(rows: Sequence[PartRow]) -> float:
    """Waste rate of static K at assc's mean K, interpolated between the static rows, less assc's own."""
    by_name = {row.strategy: (row.mean_k, row.waste) for row in rows}
    return _spared(by_name)


def spared_by_seed() -> float:
    """The same of the seed's figures."""
    return _spared({name: (figures.mean_k, figures.waste) for name, figures in SEED.items()})


def _spared(rows: Mapping[str, tuple[float, float]]) -> float:
    ks, wastes = zip(*(rows[name] for name in STATIC), strict=True)
    mean_k, waste = rows["assc"]
    return float(np.interp(mean_k, ks, wastes)) - waste


def _identity() -> Finding:
    """Accepted per step is mean K times one minus the waste, whatever the models."""
    told = [
        f"{name} {figures.mean_k * (1 - figures.waste):.2f} instead of {figures.accepted:.2f}"
        for name, figures in SEED.items()
    ]
    return Finding(
        "accepted per step = mean K x (1 - waste) whatever the models are, and holds in every table made here; the "
        f"seed's own columns miss it: {', '.join(told)}",
        False,
    )


def implied_c(figures: Figures) -> float:
    """Cost of a drafted token in target steps, if a step commits accepted + 1 tokens and costs 1 + K c.

    >>> round(implied_c(Figures(4.0, 0.25, 3.0, 2.0)), 2)
    0.25
    """
    return ((figures.accepted + 1) / figures.speedup - 1) / figures.mean_k


def _implied(profile_c: float) -> Finding:
    values = {name: implied_c(figures) for name, figures in SEED.items()}
    told = ", ".join(f"{name} {value:.2f}" for name, value in values.items())
    return Finding(
        f"the seed's speed-ups and accepted tokens imply a cost per drafted token of {told} target steps, if a step "
        f"commits accepted + 1 tokens; computed for its pair and machine: c = {profile_c:.2f}"
    )


def _acceptance(parts: Sequence[Part]) -> list[Finding]:
    """Why waste and speed-up differ: the draft's acceptance and c."""
    return [
        Finding(
            f"{part.name}: the first draft token is accepted in {100 * part.row('static:2').first_token:.0f} % of the "
            f"rounds of static:2 at c = {part.c:.3f}; the seed's waste at K = 2 needs about "
            f"{100 * _constant(1 - SEED['static:2'].waste):.0f} %"
        )
        for part in parts
    ]


def _constant(rate: float) -> float:
    """The constant acceptance per token whose rate at K = 2 is this: (a + a²) / 2 = rate."""
    return float((-1 + np.sqrt(1 + 8 * rate)) / 2)


def _fits(processes: Mapping[str, TwoStates], parts: Sequence[Part]) -> list[Finding]:
    """No acceptance process of two states has the seed's three waste rates."""
    found = []
    ks = [int(name.partition(":")[2]) for name in STATIC]
    for name, process in processes.items():
        mine = [process.waste(k) for k in ks]
        worst = max(abs(w - SEED[static].waste) for w, static in zip(mine, STATIC, strict=True))
        low, high = sorted(process.alphas)
        text = (
            f"{name}: the closest two-state source has the waste rates {_percents(mine)} instead of "
            f"{_percents([SEED[static].waste for static in STATIC])} (acceptance {100 * low:.0f} % and "
            f"{100 * high:.0f} % per token, {100 * process.stay:.1f} % of the tokens keep their state): off by "
            f"{100 * worst:.0f} points"
        )
        found.append(Finding(text, worst <= 0.02))
        row = next((part.row("assc") for part in parts if part.name == name), None)
        if row is not None:
            text = (
                f"{name}: assc plays mean K {row.mean_k:.1f} and wastes {100 * row.waste:.0f} %, in the seed "
                f"{SEED['assc'].mean_k:.1f} and {100 * SEED['assc'].waste:.0f} %"
            )
            near = abs(row.mean_k - SEED["assc"].mean_k) < 0.25 and abs(row.waste - SEED["assc"].waste) < 0.02
            found.append(Finding(text, near))
    return found


def _percents(values: Sequence[float]) -> str:
    return ", ".join(f"{100 * v:.0f} %" for v in values)
