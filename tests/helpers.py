"""What the decoder's tests share: small models, drafters that misbehave on purpose, a round player and an oracle.

Tests import it with `from helpers import …`. The oracle decodes with plain forwards of the whole text: no cache, no
engine code but the noise itself.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from assc.actions import ActionTable
from assc.batch import Batch
from assc.core import ROLLBACK, Action, Observation, Request, RoundRecord
from assc.drafters.base import Drafter, Proposal
from assc.drafters.model import ModelDrafter
from assc.drafters.ngram import NgramDrafter
from assc.engine import Engine, RowOutcome
from assc.kv import ModelRunner, StaticKV
from assc.sampling import Noise
from assc.timing import PhaseTimer
from assc.tiny import VOCAB_SIZE, tiny_draft, tiny_target

CPU = torch.device("cpu")
Schedule = str | Sequence[int]
SCHEDULES: tuple[str, ...] = ("0", "1", "2", "5", "16", "random")
"""the K schedules of DESIGN.md; "random" draws 0..8 per round, rollback rounds included"""


def schedule_of(name: Schedule, seed: int = 0) -> Iterator[int]:
    """An endless K schedule: a constant, "random" (0..8), or a list that repeats."""
    if name == "random":
        draw = random.Random(seed)
        while True:
            yield draw.randint(0, 8)
    values = [int(name)] if isinstance(name, str) else list(name)
    while True:
        yield from values


@lru_cache(maxsize=1)
def target_model() -> LlamaForCausalLM:
    return tiny_target()


@lru_cache(maxsize=1)
def target_runner() -> ModelRunner:
    return ModelRunner(target_model())


@lru_cache(maxsize=4)
def draft_runner(noise: float | None = None, vocab_size: int | None = None) -> ModelRunner:
    options = {} if noise is None else {"noise": noise}
    return ModelRunner(tiny_draft(target_model(), vocab_size=vocab_size, **options))


def prompt(length: int) -> tuple[int, ...]:
    """A prompt in which pieces recur, so that prompt lookup has something to find; never `<eos>`."""
    draw = random.Random(length)
    words = [[draw.randrange(2, VOCAB_SIZE) for _ in range(3)] for _ in range(3)]
    return tuple(t for _ in range(length) for t in draw.choice(words))[:length]


def request(length: int, mode: str = "greedy", budget: int = 20, **sampling: Any) -> Request:
    """A request with a prompt of `length` tokens; sampled modes get temperature 0.6 unless told otherwise."""
    temperature = {} if mode == "greedy" else {"temperature": 0.6}
    options = {"mode": mode, **temperature, **sampling}
    return Request(prompt(length), budget, seed=1000 + length, id=f"{mode}-{length}", sampling=options)


class Saboteur(Drafter):
    """Knows the text and proposes it wrongly: `right(b, round)` true tokens, then wrong ones.

    `truth` maps prompts to their new tokens. Without `right` every token is wrong: the adversary.
    """

    kind = "saboteur"

    def __init__(self, truth: Mapping[tuple[int, ...], Sequence[int]], right: Any = None, name: str = "draft") -> None:
        self.name, self.truth, self.right, self.round = name, truth, right, 0

    def begin(self, batch: Batch) -> None:
        self.round = 0

    def propose(self, batch: Batch, ks: Sequence[int]) -> Proposal:
        tokens = torch.zeros(batch.size, max(ks), dtype=torch.long)
        for b, (row, k) in enumerate(zip(batch.rows, ks, strict=True)):
            good = 0 if self.right is None else self.right(b, self.round)
            coming = self.truth[row.request.prompt_ids][row.new_tokens :]
            for j in range(k):
                tokens[b, j] = coming[j] if j < good else (coming[j] + 1) % row.vocab_size
        self.round += 1
        return Proposal(tokens, list(ks))


class Faltering(ModelDrafter):
    """A model drafter that is wrong from step `right` on, and feeds its own wrong tokens to its own cache."""

    right: int = 10**9

    def _choose(self, batch: Batch, row: Any, b: int, j: int, *rest: Any) -> Tensor:
        token = super()._choose(batch, row, b, j, *rest)
        return token if j < self.right else (token + 1) % row.vocab_size


DRAFTERS: tuple[str, ...] = ("model", "ngram", "perfect", "adversary")
"""kinds for `make_drafter`; "perfect" drafts with the target itself, "saboteur" (besides) is right now and then"""


def make_drafter(kind: str, requests: Sequence[Request] = ()) -> Drafter:
    """A fresh drafter called "draft"."""
    if kind == "model":
        return ModelDrafter(draft_runner(), "draft")
    if kind == "ngram":
        return NgramDrafter("draft", max_n=3, min_n=1)
    if kind == "perfect":
        return ModelDrafter(target_runner(), "draft")
    truth = {r.prompt_ids: oracle_all([r])[0] for r in requests}
    draw = random.Random(7)
    return Saboteur(truth, right=None if kind == "adversary" else lambda b, n: draw.randint(0, 8))


def make_engine(drafter: Drafter, **options: Any) -> Engine:
    return Engine(target_runner(), [drafter], **options)


@dataclass
class Played:
    """What decoding one row gave: its new tokens, the K of each round and what came of it."""

    tokens: list[int] = field(default_factory=list)
    planned: list[int] = field(default_factory=list)
    rounds: list[RowOutcome] = field(default_factory=list)

    @property
    def accepted(self) -> int:
        return sum(r.accepted for r in self.rounds)

    @property
    def drafted(self) -> int:
        return sum(r.drafted for r in self.rounds)


def play(
    engine: Engine, requests: Sequence[Request], schedules: Sequence[Iterator[int]], each_round: Any = None
) -> list[Played]:
    """Decode `requests` as one batch to their ends, every row with its own K schedule.

    Checks invariant 4 in every round. `each_round(batch)` is called after each round.
    """
    (name,) = engine.drafters
    batch, timer = engine.start(requests), PhaseTimer(CPU)
    rows = [Played() for _ in requests]
    while any(row.finish is None for row in batch.rows):
        before = [row.length for row in batch.rows]
        ks = [next(s) if row.finish is None else 0 for s, row in zip(schedules, batch.rows, strict=True)]
        running = [row.finish is None for row in batch.rows]
        outcomes = engine.round(batch, [Action(name, k) if k else ROLLBACK for k in ks], timer)
        for b, outcome in enumerate(outcomes):
            if not running[b]:
                assert outcome == RowOutcome(0, 0, ()), "a finished row must stay as it is"
                continue
            assert 0 <= outcome.accepted <= outcome.drafted <= ks[b]
            assert len(outcome.tokens) >= 1 and len(outcome.tokens) - outcome.accepted in (0, 1)
            assert batch.rows[b].length == before[b] + len(outcome.tokens)
            if (noise := batch.rows[b].noise) is not None:  # memory: noise of committed positions is dropped
                assert all(position >= batch.rows[b].length for position in noise._cached)
            rows[b].planned.append(ks[b])
            rows[b].rounds.append(outcome)
        if each_round is not None:
            each_round(batch)
    for b, row in enumerate(batch.rows):
        rows[b].tokens = row.tokens[row.prompt_length :]
        assert sum(len(r.tokens) for r in rows[b].rounds) == len(rows[b].tokens)
    return rows


_known: dict[Any, list[int]] = {}


def oracle_all(requests: Sequence[Request], model: Any = None, processors: Any = None) -> list[list[int]]:
    """Plain decoding to the budget without engine or cache: one forward of the whole text per token.

    `processors` is called like transformers' `LogitsProcessorList`. Results over the tiny target without processors
    are kept. All rows advance together, right-padded, which a causal model does not notice.
    """
    plain = model is None and processors is None
    keys = [_key(r) for r in requests]
    if plain and all(k in _known for k in keys):
        return [_known[k] for k in keys]
    model = target_model() if model is None else model
    texts = [list(r.prompt_ids) for r in requests]
    noises = [Noise(r.seed, model.config.vocab_size) for r in requests]
    for _ in range(max(r.max_new_tokens for r in requests)):
        padded = [t + [0] * (max(map(len, texts)) - len(t)) for t in texts]
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor(padded), use_cache=False).logits
        for b, (text, r) in enumerate(zip(texts, requests, strict=True)):
            scores = logits[b, len(text) - 1].double()[None].clone()
            if processors is not None:
                scores = processors(torch.tensor([text]), scores)
            if r.temperature:
                if processors is None:
                    scores = scores / r.temperature
                scores = scores + noises[b].gumbel("target", len(text))
            text.append(int(scores[0].argmax()))
    new = [t[len(r.prompt_ids) :][: r.max_new_tokens] for t, r in zip(texts, requests, strict=True)]
    if plain:
        _known.update(zip(keys, new, strict=True))
    return new


def _key(r: Request) -> Any:
    return r.prompt_ids, r.max_new_tokens, r.seed, tuple(sorted(r.sampling.items()))


class TableRunner:
    """Stands in for `ModelRunner`: the logits after a token are one row of a table [V, V], whatever came before."""

    def __init__(self, table: Tensor) -> None:
        self.table = table.double()
        self.vocab_size = int(table.shape[1])
        self.max_positions, self.device, self.dtype = None, CPU, torch.float64

    def new_cache(self, rows: int, length: int) -> StaticKV:
        return StaticKV(rows, length)

    def forward(self, cache: StaticKV, tokens: Tensor, positions: Tensor, keep: int = 0, **options: Any) -> Tensor:
        return self.table[tokens][:, -keep:]

    def prefill(self, cache: StaticKV, tokens: Tensor, start: int = 0, **options: Any) -> Tensor | None:
        return self.table[tokens[:, -1]] if tokens.shape[1] else None


class SchedulePolicy:
    """Plays a K schedule with one drafter through the public loop; `needs` are observation fields it reads."""

    def __init__(self, drafter: str, ks: Schedule, needs: frozenset[str] = frozenset(), seed: int = 0) -> None:
        self.spec, self.needs, self._ks, self.drafter = f"schedule:{ks}", needs, schedule_of(ks, seed), drafter

    def begin(self, table: ActionTable) -> None:
        pass

    def act(self, observation: Observation) -> Action:
        k = min(next(self._ks), observation.k_max)
        return Action(self.drafter, k) if k else ROLLBACK

    def update(self, record: RoundRecord) -> None:
        pass

    def reset(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass
