"""Stage 1 and 2: texts that the target writes (or is given), and its final hidden states over them.

One file per shard, written whole or not at all, each a function of (settings, shard number) alone, so an interrupted
run goes on where it was and ends with the same files.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from assc.attention import grouped
from assc.distill.generate import ViewedKV, generate
from assc.errors import ArtefactError, AsscError
from assc.kv import ModelRunner
from assc.pairs import LoadedPair
from assc.workloads import Prompt

TEMPERATURES = (0.0, 0.7, 1.0)
OWN_PROMPT_TOKENS = 80
Report = Callable[[str], None]


@dataclass(frozen=True)
class Text:
    """One training text: token ids, how many of them are the prompt, and the temperature of the rest."""

    ids: tuple[int, ...]
    prompt_length: int
    temperature: float


def save_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """A safetensors file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    os.close(handle)
    try:
        save_file({k: v.contiguous() for k, v in tensors.items()}, name, metadata=metadata)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file; `ArtefactError` with a reason for one that is missing or damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}
    except FileNotFoundError:
        raise ArtefactError(f"{str(path)!r} is missing") from None
    except Exception as error:  # safetensors has its own error class per backend
        raise ArtefactError(f"{str(path)!r} is damaged or not a safetensors file: {error}") from None


def write_texts(path: Path, texts: Sequence[Text]) -> None:
    """One shard of texts, whole or not at all."""
    save_tensors(
        path,
        {
            "ids": torch.tensor([t for text in texts for t in text.ids], dtype=torch.int32),
            "lengths": torch.tensor([len(text.ids) for text in texts], dtype=torch.int32),
            "prompts": torch.tensor([text.prompt_length for text in texts], dtype=torch.int32),
            "temperatures": torch.tensor([text.temperature for text in texts], dtype=torch.float32),
        },
    )


def read_texts(path: Path) -> list[Text]:
    """The texts of a shard; `ArtefactError` when it is damaged."""
    data = load_tensors(path)
    texts, start = [], 0
    for n, prompt, heat in zip(
        data["lengths"].tolist(), data["prompts"].tolist(), data["temperatures"].tolist(), strict=True
    ):
        texts.append(Text(tuple(data["ids"][start : start + n].tolist()), prompt, heat))
        start += n
    return texts


def user_prefix(pair: LoadedPair) -> tuple[int, ...]:
    """Ids up to where a user's message begins; without a chat template one end-of-text token."""
    tokenizer: Any = pair.tokenizer
    if not tokenizer.chat_template:
        return (pair.eos_token_ids[0] if pair.eos_token_ids else 0,)
    mark = "MARK"
    text = tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
    return tuple(tokenizer(text.split(mark)[0], add_special_tokens=False)["input_ids"])


def own_prompts(pair: LoadedPair, runner: ModelRunner, n: int, generator: torch.Generator) -> list[str]:
    """`n` user messages that the target writes itself, from its bare template at temperature 1; some may be blank."""
    rows = generate(
        runner,
        [user_prefix(pair)] * n,
        [1.0] * n,
        max_new_tokens=OWN_PROMPT_TOKENS,
        stop_ids=pair.eos_token_ids,
        generator=generator,
    )
    return [pair.decode(row).strip() for row in rows]


def workload_jobs(prompts: Sequence[Prompt], seed: int) -> Iterator[tuple[str, float]]:
    """(message, temperature) without end: every prompt at every temperature, later passes only where it samples."""
    order = random.Random(seed)
    heats: Sequence[float] = TEMPERATURES
    while prompts:
        jobs = [(p.prompt, heat) for p in prompts for heat in heats]
        order.shuffle(jobs)
        yield from jobs
        heats = [heat for heat in heats if heat > 0]


@dataclass(frozen=True)
class DataPlan:
    """What the shards are a function of."""

    prompts: tuple[Prompt, ...]
    rows: int = 64
    """texts per shard, decoded together; half of them answer `prompts`, half the target's own prompts"""
    max_new_tokens: int = 224
    max_prompt_tokens: int = 400
    seed: int = 0


def make_shard(pair: LoadedPair, runner: ModelRunner, plan: DataPlan, number: int) -> tuple[list[Text], Tensor]:
    """The texts of one shard and the target's final hidden states over them, one after the other [N, H]."""
    generator = torch.Generator().manual_seed(plan.seed * 1_000_003 + number)
    given = plan.rows // 2 if plan.prompts else 0
    jobs = workload_jobs(plan.prompts, plan.seed)
    for _ in range(number * given):
        next(jobs)
    chosen = [next(jobs) for _ in range(given)]
    written = own_prompts(pair, runner, plan.rows - given, generator)
    chosen += [(text, TEMPERATURES[i % len(TEMPERATURES)]) for i, text in enumerate(written) if text]
    encoded = [(pair.encode(text), heat) for text, heat in chosen]
    encoded = [(ids, heat) for ids, heat in encoded if len(ids) <= plan.max_prompt_tokens]
    states: list[Tensor] = []
    answers = generate(
        runner,
        [ids for ids, _ in encoded],
        [heat for _, heat in encoded],
        max_new_tokens=plan.max_new_tokens,
        stop_ids=pair.eos_token_ids,
        generator=generator,
        states=states,
    )
    texts = [Text((*ids, *new), len(ids), heat) for (ids, heat), new in zip(encoded, answers, strict=True)]
    return texts, torch.cat(states)


def text_shards(pair: LoadedPair, files: Sequence[Path], *, rows: int, width: int) -> list[list[Text]]:
    """Plain files cut into texts of `width` tokens; the whole of each is trained on."""
    tokenizer: Any = pair.tokenizer
    texts: list[Text] = []
    for path in files:
        try:
            ids = tokenizer(path.read_text(encoding="utf-8"))["input_ids"]
        except (OSError, UnicodeDecodeError) as error:
            raise AsscError(f"the text file {str(path)!r} cannot be read: {error}") from None
        texts += [Text(tuple(ids[i : i + width]), 1, 1.0) for i in range(0, len(ids), width) if len(ids) - i > 8]
    if not texts:
        raise AsscError(f"the text files hold no text: {', '.join(map(str, files))}")
    return [texts[i : i + rows] for i in range(0, len(texts), rows)]


@torch.inference_mode()
def hidden_states(runner: ModelRunner, texts: Sequence[Text], rows: int = 16) -> Tensor:
    """The target's final hidden states (the head's input) of every position, texts one after the other [N, H].

    Only for texts that the target did not write here: `generate` keeps the states on the way.
    """
    order = sorted(range(len(texts)), key=lambda i: len(texts[i].ids))
    found: dict[int, Tensor] = {}
    with grouped(runner.model):
        for first in range(0, len(order), rows):
            part = order[first : first + rows]
            width = max(len(texts[i].ids) for i in part)
            ids = torch.zeros(len(part), width, dtype=torch.long)
            for b, i in enumerate(part):
                ids[b, : len(texts[i].ids)] = torch.tensor(texts[i].ids)
            kv = ViewedKV(len(part), width)
            kv.see(width)
            positions = torch.arange(width, device=runner.device).expand(len(part), -1)
            runner.forward(kv, ids.to(runner.device), positions, keep=1, hidden=True)
            for b, i in enumerate(part):
                found[i] = runner.last_hidden[b, : len(texts[i].ids)].cpu()
    return torch.cat([found[i] for i in range(len(texts))])


class ShardStore:
    """The shards of one run in a folder: `texts-00012.safetensors` and `hidden-00012.safetensors`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def texts_path(self, number: int) -> Path:
        return self.folder / f"texts-{number:05d}.safetensors"

    def hidden_path(self, number: int) -> Path:
        return self.folder / f"hidden-{number:05d}.safetensors"

    def count(self) -> int:
        """Shards from number 0 on without a gap."""
        n = 0
        while self.texts_path(n).is_file():
            n += 1
        return n

    def tokens(self, number: int) -> int:
        return int(load_tensors(self.texts_path(number))["lengths"].sum())


def write_data(
    pair: LoadedPair, runner: ModelRunner, plan: DataPlan, store: ShardStore, tokens: int, report: Report
) -> int:
    """Stage 1: add shards until they hold `tokens` tokens; returns how many shards that takes."""
    total = number = 0
    while total < tokens:
        if not store.texts_path(number).is_file():
            texts, hidden = make_shard(pair, runner, plan, number)
            save_tensors(store.hidden_path(number), {"hidden": hidden})
            write_texts(store.texts_path(number), texts)
        total += store.tokens(number)
        number += 1
        report(f"data: shard {number}, {total:,} of {tokens:,} tokens")
    return number


def write_hidden(runner: ModelRunner, store: ShardStore, shards: int, report: Report) -> None:
    """Stage 2: the teacher's pass over every shard that lacks it."""
    for number in range(shards):
        path = store.hidden_path(number)
        if not path.is_file():
            save_tensors(path, {"hidden": hidden_states(runner, read_texts(store.texts_path(number)))})
            report(f"teacher: shard {number + 1} of {shards}")
