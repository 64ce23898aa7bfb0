"""Import of public per-position traces: JSONL with accepted lengths at every position of a generated text.

Each line has `prompt_token_ids`, `generated_token_ids` and, per drafter, `acc_<drafter>` with a list `acc_len`: the
tokens that a round at this position would emit, bonus token included, so that the accepted drafts are one fewer.
Optional fields: `id` (or `question_id`), `category`, `split`. Target and draft entropies are unknown (NaN).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import assc
from assc.core import Mode, Request
from assc.errors import TraceError
from assc.groups import check_k_max
from assc.trace import FINISHES, IMPORTED, DrafterInfo, Header, Trace
from assc.trace_build import Recorded, build_trace
from assc.workloads import SPLITS, assigned_split


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
    if not 0 <= temperature < math.inf:
        raise TraceError(f"the temperature is {temperature}, allowed is 0 or more")
    if mode == "greedy" and temperature > 0:
        raise TraceError(f"mode greedy has temperature 0, not {temperature}; name the mode of the recording")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror or error}") from None
    recorded: list[Recorded] = []
    names: tuple[str, ...] = ()
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            if not isinstance(value, dict):
                raise ValueError("is no JSON object")
            value = {k.removesuffix(".acc_len"): v for k, v in value.items()}
            found = tuple(sorted(k.removeprefix("acc_") for k in value if k.startswith("acc_")))
            if "" in found:
                raise ValueError("has a field acc_ without the name of a drafter")
            if not found or (names and found != names):
                raise ValueError(f"has the drafters {list(found)}, expected {list(names) or 'at least one acc_<name>'}")
            names = found
            fields = {"mode": mode, "temperature": temperature}
            recorded.append(_request(value, number, names, fields, category=category, k_max=k_max))
        except KeyError as error:
            raise TraceError(f"{path}, line {number} lacks {error}") from None
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise TraceError(f"{path}, line {number} is no JSON ({error})") from None
        except ValueError as error:
            raise TraceError(f"{path}, line {number} {error}") from None
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
        pair=IMPORTED,
        max_new_tokens=max(r[0].max_new_tokens for r in recorded),
        workload=path.name,
        workload_hash=hashlib.sha256(data).hexdigest()[:16],
        code=assc.__version__,
    )
    return build_trace(header, recorded)


def _request(
    value: dict[str, Any], number: int, names: Sequence[str], sampling: dict[str, Any], *, category: str, k_max: int
) -> Recorded:
    """One line; raises ValueError worded to follow "line N"."""
    prompt = tuple(_counts(value["prompt_token_ids"], "prompt_token_ids").tolist())
    tokens = _counts(value["generated_token_ids"], "generated_token_ids").astype(np.int32)
    if not prompt or not len(tokens):
        raise ValueError("needs at least one prompt and one generated token")
    split = value.get("split") or None
    if split not in (None, *SPLITS):
        raise ValueError(f"has the split {split!r}, allowed are {', '.join(SPLITS)}")
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
        lengths = _counts(entry["acc_len"] if isinstance(entry, dict) else entry, f"acc_{name}.acc_len")
        if len(lengths) > size:
            raise ValueError(f"has {len(lengths)} accepted lengths of {name!r} for {size} tokens")
        acc = np.zeros(size, np.int64)
        acc[: len(lengths)] = np.maximum(lengths - 1, 0)
        columns[f"acc/{name}"] = np.minimum(np.minimum(acc, k_max), size - np.arange(size)).astype(np.int8)
        columns[f"avail/{name}"] = np.full(size, k_max, np.int8)
    named = value.get("id", value.get("question_id"))
    identity = f"line{number}" if named is None else str(named)
    same_prompt = identity if named is not None else str(prompt)  # lines of one prompt belong into one split
    request = Request(
        prompt, size, seed=number, id=identity, category=str(value.get("category") or category), sampling=sampling
    )
    return request, str(split or assigned_split(same_prompt)), columns, 0


def _counts(value: Any, field: str) -> NDArray[np.int64]:
    """A list of whole numbers from 0 that fit into 31 bits; ValueError worded to follow "line N"."""
    good = isinstance(value, list) and all(type(n) is int and 0 <= n < 2**31 for n in value)
    if not good:
        raise ValueError(f"has a {field} that is no list of whole numbers from 0 to 2147483647")
    return np.array(value, np.int64)
