"""A trace in the public JSONL form, made here: a chain drafter and a lookup over texts of an imaginary 8B model.

`python tests/public_trace.py FILE.jsonl` writes it. Accepted lengths follow from texts with easy and hard stretches;
as in the public files there is no text, no entropy and no split, and `acc_len` counts the bonus token.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

CHAIN = 7
"""tokens that the chain drafter proposes"""
VOCABULARY = 128_256


def line(number: int, rng: np.random.Generator, tokens: int) -> dict[str, object]:
    """One request: about half of its stretches are copied from before, and easy for both drafters."""
    text, easy = rng.integers(0, VOCABULARY, tokens), np.zeros(tokens, bool)
    copied = np.zeros(tokens, bool)
    at = 0
    while at < tokens:
        end = min(tokens, at + int(rng.integers(6, 20)))
        easy[at:end] = rng.random() < 0.5
        if at > 20 and rng.random() < 0.4:
            start = int(rng.integers(0, at - (end - at))) if at > end - at else 0
            text[at:end] = text[start : start + end - at]
            copied[at + 2 : end] = True
        at = end
    agrees = rng.random(tokens) < np.where(easy, 0.9, 0.45)
    return {
        "id": f"request-{number}",
        "category": ("chat", "code", "maths")[number % 3],
        "prompt_token_ids": rng.integers(0, VOCABULARY, int(rng.integers(5, 40))).tolist(),
        "generated_token_ids": text.tolist(),
        "acc_eagle": {"acc_len": emitted(agrees, CHAIN)},
        "acc_suffix": {"acc_len": emitted(copied, 16)},
    }


def emitted(agrees: np.ndarray, most: int) -> list[int]:
    """Tokens that a round at each position emits: the run of agreements, cut to `most`, and the bonus token."""
    lengths, run = [], 0
    for good in agrees[::-1].tolist():
        run = run + 1 if good else 0
        lengths.append(min(run, most) + 1)
    return lengths[::-1]


def write(path: Path, *, requests: int = 60, tokens: int = 120, seed: int = 0) -> None:
    """Write the file; the same seed gives the same bytes."""
    rng = np.random.default_rng(seed)
    rows = [line(i, rng, tokens) for i in range(requests)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
