"""Tables of the documentation, generated from the code they describe."""

from __future__ import annotations

from collections.abc import Iterable

from assc.observe import DEFAULT_FIELDS, FIELDS, LEARNER_FIELDS
from envs.rewards import REWARDS


def _row(cells: Iterable[object]) -> str:
    return "| " + " | ".join(str(c) for c in cells) + " |"


def field_table() -> str:
    """Every observation field: size, bounds, unit, meaning, and what it needs beyond finished rounds."""
    lines = [_row(("field", "numbers", "min", "max", "unit", "meaning", "default")), "|---|---:|---:|---:|---|---|---|"]
    for spec in FIELDS.values():
        default = "yes" if spec.name in DEFAULT_FIELDS else "learners" if spec.name in LEARNER_FIELDS else "no"
        lines.append(_row((spec.name, spec.size, f"{spec.low:g}", f"{spec.high:g}", spec.unit, spec.doc, default)))
    return "\n".join(lines)


def reward_table() -> str:
    """Every reward: formula and unit."""
    lines = [_row(("reward", "of one round", "unit")), "|---|---|---|"]
    lines += [_row((r.name, f"`{r.formula}`", r.unit)) for r in REWARDS.values()]
    return "\n".join(lines)


if __name__ == "__main__":
    print(field_table(), reward_table(), sep="\n\n")
