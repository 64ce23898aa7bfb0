"""Prompts to decode: the packaged workload, any JSONL file, a balanced choice of them, and requests made of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from assc.core import Request
from assc.errors import RequestError, WorkloadError

Split = Literal["draft", "train", "held-out"]
SPLITS: tuple[Split, ...] = ("draft", "train", "held-out")
"""drafts learn from `draft`, policies are trained and tuned on `train`, results are reported on `held-out`: a draft is
accepted more often on prompts that it has learned from, which would mislead what is tuned there"""

BUILTIN: tuple[str, ...] = ("mixed",)
"""workloads that come with the package"""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One line of a workload. `split` keeps apart what is learned from, tuned on and evaluated (see `SPLITS`)."""

    id: str
    category: str
    prompt: str
    split: Split


def _hash(*parts: object) -> int:
    """A 64-bit number that depends on nothing but the parts (Python's own `hash` differs between processes)."""
    text = "\x1f".join(str(p) for p in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def assigned_split(prompt_id: str) -> Split:
    """The split of a prompt that states none: one third of all ids is held out.

    >>> assigned_split("q7") == assigned_split("q7")
    True
    """
    return "held-out" if _hash("split", prompt_id) % 3 == 0 else "train"


def _text(value: dict[str, Any]) -> str:
    """The prompt of one line; raises ValueError with what is wrong."""
    if "prompt" in value:
        text = value["prompt"]
        if not isinstance(text, str):
            raise ValueError("has a 'prompt' that is not a string")
    elif "turns" in value:
        turns = value["turns"]
        if not isinstance(turns, list) or not turns or not all(isinstance(t, str) for t in turns):
            raise ValueError("has 'turns' that are not a list of at least one string")
        text = turns[0]
    else:
        raise ValueError("has neither 'prompt' nor 'turns'")
    if not text.strip():
        raise ValueError("has an empty prompt")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("has a prompt with half of a surrogate pair, which is no text") from None
    return str(text)


def _parse(raw: bytes) -> Prompt:
    """One line to a `Prompt`; raises ValueError with what is wrong, worded to follow "line N"."""
    try:
        value = json.loads(raw.decode())
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"is not valid JSON ({getattr(error, 'msg', 'nested too deeply')})") from None
    if not isinstance(value, dict):
        raise ValueError(f"is not a JSON object but {type(value).__name__}")
    text = _text(value)
    given = value.get("id", value.get("question_id"))
    if given is not None and (isinstance(given, bool) or not isinstance(given, str | int) or not str(given).strip()):
        raise ValueError(f"has an id that is neither text nor a whole number: {given!r}")
    # without an id the text itself is the identity, so a reordered file keeps its splits and seeds
    prompt_id = str(given).strip() if given is not None else "p" + hashlib.sha256(text.encode()).hexdigest()[:12]
    category = value.get("category", "")
    if not isinstance(category, str):
        raise ValueError(f"has a category that is not a string: {category!r}")
    split = value.get("split")
    if split is not None and split not in SPLITS:
        raise ValueError(f"has the split {split!r}; splits are {', '.join(SPLITS)}")
    return Prompt(prompt_id, category, text, split or assigned_split(prompt_id))


def parse_workload(data: bytes, name: str) -> tuple[Prompt, ...]:
    """All prompts of a JSONL file's bytes; `WorkloadError` names the first bad line. Blank lines are skipped."""
    prompts: dict[str, Prompt] = {}
    lines: dict[str, int] = {}
    # not splitlines(): JSON strings may hold U+2028 and other characters that it takes for line ends
    for number, raw in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not raw.strip():
            continue
        try:
            prompt = _parse(raw)
        except ValueError as error:
            raise WorkloadError(f"workload {name!r}, line {number} {error}") from None
        if prompt.id in prompts:
            raise WorkloadError(
                f"workload {name!r}, line {number} repeats the id {prompt.id!r} of line {lines[prompt.id]}"
            )
        prompts[prompt.id], lines[prompt.id] = prompt, number
    if not prompts:
        raise WorkloadError(f"workload {name!r} is empty: it needs at least one line with 'prompt' or 'turns'")
    return tuple(prompts.values())


def _read(name_or_path: str) -> bytes:
    if name_or_path in BUILTIN:
        return files("assc").joinpath("data", "workloads", f"{name_or_path}.jsonl").read_bytes()
    try:
        return Path(name_or_path).read_bytes()
    except FileNotFoundError:
        raise WorkloadError(
            f"there is no workload {name_or_path!r}: give {', '.join(BUILTIN)} or the path of a JSONL file"
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise WorkloadError(f"the workload {name_or_path!r} cannot be read: {reason}") from None


def load_workload(name_or_path: str | Path, split: Split | None = None) -> tuple[Prompt, ...]:
    """A built-in workload (`mixed`) or a JSONL file with `prompt` or `turns` (the first turn is used) per line.

    Optional fields: `id` or `question_id`, `category`, `split`. A missing split is assigned by a hash of the id.
    `WorkloadError` for a missing file, a bad line (named by number), or when nothing is left in `split`.
    """
    name = str(name_or_path)
    prompts = parse_workload(_read(name), name)
    if split is None:
        return prompts
    chosen = tuple(p for p in prompts if p.split == split)
    if not chosen:
        raise WorkloadError(f"workload {name!r} has no prompt in the split {split!r}")
    return chosen


def draft_prompts(name_or_path: str | Path) -> tuple[Prompt, ...]:
    """What a draft learns from: the split `draft`, or `train` where a workload has none."""
    prompts = load_workload(name_or_path)
    return tuple(p for p in prompts if p.split == "draft") or load_workload(name_or_path, "train")


def content_hash(prompts: Iterable[Prompt]) -> str:
    """Hash of ids, categories, texts and splits in their order: 16 hex digits for provenance."""
    digest = hashlib.sha256()
    for p in prompts:
        digest.update(json.dumps([p.id, p.category, p.prompt, p.split]).encode())
    return digest.hexdigest()[:16]


def only_categories(prompts: Sequence[Prompt], categories: Sequence[str]) -> tuple[Prompt, ...]:
    """The prompts of these categories, all of them when none is named; `WorkloadError` for an unknown one."""
    known = sorted({p.category for p in prompts})
    unknown = [c for c in categories if c not in known]
    if unknown:
        raise WorkloadError(f"unknown category {unknown[0]!r}; this workload has {', '.join(map(repr, known))}")
    return tuple(p for p in prompts if not categories or p.category in categories)


class Choosable(Protocol):
    """What `select` looks at."""

    @property
    def id(self) -> str: ...

    @property
    def category(self) -> str: ...


C = TypeVar("C", bound=Choosable)


def select(prompts: Sequence[C], n: int, seed: int) -> tuple[C, ...]:
    """`n` prompts, balanced over the categories and interleaved, chosen by `seed` alone.

    A smaller `n` gives a prefix of a larger one. `WorkloadError` when `n` is below 1 or more than there are.
    """
    if n < 1:
        raise WorkloadError(f"the number of requests is {n}, it must be 1 or more")
    if n > len(prompts):
        raise WorkloadError(f"{n} requests were asked for, but only {len(prompts)} prompts match")
    ranked = sorted(prompts, key=lambda p: (_hash(seed, "prompt", p.id), p.id))
    turns: dict[str, int] = {}
    places: list[tuple[int, int, str, C]] = []
    for prompt in ranked:
        turn = turns.get(prompt.category, 0)
        turns[prompt.category] = turn + 1
        places.append((turn, _hash(seed, "category", prompt.category), prompt.category, prompt))
    places.sort(key=lambda place: place[:3])
    return tuple(place[3] for place in places[:n])


def request_seed(seed: int, prompt_id: str) -> int:
    """Seed of one prompt's tokens, 32 bits: the same for every policy, and independent of the other prompts."""
    return _hash("request", seed, prompt_id) >> 32


def make_requests(
    prompts: Sequence[Prompt],
    encode: Callable[[str], Sequence[int]],
    *,
    max_new_tokens: int,
    seed: int,
    sampling: Mapping[str, Any] | None = None,
) -> list[Request]:
    """Requests for `evaluate` and for training. `encode` turns a prompt into ids of the target's tokenizer.

    Raises `RequestError` when the budget is below 1 token or a prompt encodes to nothing.
    """
    if max_new_tokens < 1:
        raise RequestError(f"max_new_tokens is {max_new_tokens}, it must be 1 or more")
    empty = Request((), max_new_tokens, sampling=dict(sampling or {}))
    requests: list[Request] = []
    for p in prompts:
        ids = tuple(int(i) for i in encode(p.prompt))
        if not ids:
            raise RequestError(f"prompt {p.id!r} encodes to no tokens")
        requests.append(replace(empty, prompt_ids=ids, seed=request_seed(seed, p.id), id=p.id, category=p.category))
    return requests
