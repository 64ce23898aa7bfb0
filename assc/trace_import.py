"""Import of public per-position traces: JSONL with accepted lengths at every position of a generated text.

Each line has `prompt_token_ids`, `generated_token_ids` and, per drafter, `acc_<drafter>` with a list `acc_len`: the
tokens that a round at this position would emit, bonus token included, so that the accepted drafts are one fewer.
Optional fields: `id` (or `question_id`), `category`, `split`. Target and draft entropies are unknown (NaN).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from assc.core import Mode, Request
from assc.errors import TraceError
from assc.groups import check_k_max
from assc.trace import FINISHES, DrafterInfo, Header, Trace
from assc.trace_build import Recorded, build_trace
from assc.workloads import assigned_split


def import_jsonl(
    path: Path,
    *,
    mode: Mode = "greedy",
    temperature: float = 0.0,
    lookups: Sequence[str] = ("ngram", "suffix"),
    category: str = "",
    k_max: int = 16,
) -> Trace:
    """Read a JSONL file. `TraceError` names the first line that cannot be used.

    A position at which a lookup accepted nothing may have had no proposal at all; the file does not tell, so the
    lookup is taken to propose there. A position without an entry (some recorders leave out the last) accepts nothing.
    """
    check_k_max(k_max)
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror or error}") from None
    recorded: list[Recorded] = []
    names: tuple[str, ...] = ()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            value = {k.removesuffix(".acc_len"): v for k, v in value.items()}
            found = tuple(sorted(k.removeprefix("acc_") for k in value if k.startswith("acc_")))
            if not found or (names and found != names):
                raise ValueError(f"has the drafters {list(found)}, expected {list(names) or 'at least one acc_<name>'}")
            names = found
            fields = {"mode": mode, "temperature": temperature}
            recorded.append(_request(value, number, names, fields, category=category, k_max=k_max))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reason = f"lacks {error}" if isinstance(error, KeyError) else str(error)
            raise TraceError(f"{path}, line {number} {reason}") from None
    if not recorded:
        raise TraceError(f"{path} holds no trace line")
    drafters = tuple(
        DrafterInfo(n, "lookup") if n.startswith(tuple(lookups)) else DrafterInfo(n, "imported", "drafts")
        for n in names
    )
    header = Header(
        mode=mode,
        k_max=k_max,
        drafters=drafters,
        pair="imported",
        max_new_tokens=max(r[0].max_new_tokens for r in recorded),
        workload=path.name,
        device="unknown",
        dtype="unknown",
    )
    return build_trace(header, recorded)


def _request(
    value: dict[str, Any], number: int, names: Sequence[str], sampling: dict[str, Any], *, category: str, k_max: int
) -> Recorded:
    """One line; raises ValueError worded to follow "line N"."""
    prompt = tuple(int(t) for t in value["prompt_token_ids"])
    tokens = np.array(value["generated_token_ids"], np.int32)
    if not prompt or tokens.ndim != 1 or not len(tokens):
        raise ValueError("needs at least one prompt and one generated token")
    size = len(tokens)
    unknown = np.full(size, np.nan, np.float32)
    columns: dict[str, Any] = {
        "tokens": tokens,
        "finish": FINISHES.index("length"),
        "target_entropy": unknown,
        "target_top1": unknown,
        "match": np.full(size, -1, np.int8),
    }
    for name in names:
        entry = value[f"acc_{name}"]
        lengths = np.array(entry["acc_len"] if isinstance(entry, dict) else entry, np.int64)
        if lengths.ndim != 1 or len(lengths) > size or (lengths < 0).any():
            raise ValueError(f"has {lengths.shape} accepted lengths of {name!r} for {size} tokens")
        acc = np.zeros(size, np.int64)
        acc[: len(lengths)] = np.maximum(lengths - 1, 0)
        columns[f"acc/{name}"] = np.minimum(np.minimum(acc, k_max), size - np.arange(size)).astype(np.int8)
        columns[f"avail/{name}"] = np.full(size, k_max, np.int8)
    identity = str(value.get("id", value.get("question_id", f"line{number}")))
    request = Request(
        prompt, size, seed=number, id=identity, category=str(value.get("category") or category), sampling=sampling
    )
    return request, str(value.get("split") or assigned_split(identity)), columns, 0
