"""The ladder of docs/results.md out of a result of `eval.py`: one Markdown line per policy, by speed-up.

    python benchmarks/ladder_table.py runs/ladder/eval.json

The last column compares with the policy of `--against`, verdicts after Holm's correction.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import tyro

HEAD = ("policy", "rung", "speed-up", "95 % interval", "sd", "of the way", "accepted", "mean K", "tokens/round")


def percent(value: float | None) -> str:
    return "n/a" if value is None else f"{round(100 * value, 1) + 0.0:.1f} %"


def cells(row: dict[str, Any], found: dict[str, Any] | None) -> list[str]:
    """One line; `found` is the comparison of this policy."""
    low, high = row["speedup_ci95"]
    action = f" ({row['action']})" if row["action"] else ""
    spread = "once" if row["speedup_sd"] is None else f"{row['speedup_sd']:.3f}"
    against = "–"
    if found is not None:
        start, end = found["ci95"]
        against = f"{found['ratio']:.3f} ({start:.3f} to {end:.3f}), {found['verdict']}"
    return [
        f"`{row['policy']}`{action}",
        row["rung"],
        f"{row['speedup']:.3f}×",
        f"{low:.3f} to {high:.3f}",
        spread,
        percent(row["oracle_fraction"]),
        percent(row["acceptance_rate"]),
        f"{row['mean_k']:.1f}",
        f"{row['tokens_per_round']:.2f}",
        against,
    ]


def main(result: Annotated[Path, tyro.conf.Positional]) -> None:
    """Print the table of this eval.json."""
    data = json.loads(result.read_text(encoding="utf-8"))
    family = data["comparisons"][-1]
    compared = {line["label"]: line for line in family["rows"]}
    labels = [detail["label"] for detail in data["details"]]
    lines = sorted(zip(labels, data["rows"], strict=True), key=lambda one: one[1]["speedup"])
    print("| " + " | ".join((*HEAD, f"against `{family['against']}`")) + " |")
    print("|---|---|---:|---|---:|---:|---:|---:|---:|---|")
    for label, row in lines:
        print("| " + " | ".join(cells(row, compared.get(label))) + " |")
    best = data["ladder"]["best_static_per_request"]
    print(f"\nBest static action of each request in hindsight: {best['speedup']:.3f}×.")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
