"""What the tests of public faults share: tiny models, K schedules as policies, and plain `generate` as the oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from scipy.stats import chisquare
from transformers import LlamaForCausalLM, PreTrainedModel

from assc.actions import ActionTable
from assc.batch import Batch
from assc.core import ROLLBACK, Action, Observation, Request, RoundRecord
from assc.decoder import GenerateResult, SpeculativeDecoder
from assc.distill.train import initialise
from assc.drafters.base import Drafter, Proposal
from assc.drafters.hidden import HiddenDrafter
from assc.drafters.model import ModelDrafter
from assc.drafters.net import HiddenNet, NetShape
from assc.drafters.ngram import NgramDrafter
from assc.engine import Engine, RowOutcome
from assc.kv import ModelRunner
from assc.timing import PhaseTimer
from assc.tiny import tiny_draft, tiny_target

KS = (0, 1, 2, 7)
"""S05: K = 0 and K = 1 are normal values"""


class Schedule:
    """A policy that plays a list of K (repeated for ever), or of (drafter, K)."""

    needs: frozenset[str] = frozenset()
    spec = "schedule"

    def __init__(self, *ks: int | tuple[str, int], needs: frozenset[str] = frozenset()) -> None:
        self.ks, self.needs, self.played = ks, needs, 0

    def begin(self, table: ActionTable) -> None:
        self.table, self.played = table, 0

    def act(self, observation: Observation) -> Action:
        item = self.ks[self.played % len(self.ks)]
        self.played += 1
        first = self.table.drafters[0] if self.table.drafters else None
        drafter, k = item if isinstance(item, tuple) else (first, item)
        return Action(drafter, k) if k and drafter is not None else ROLLBACK

    def update(self, record: RoundRecord) -> None: ...

    def reset(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Scripted(Drafter):
    """A drafter without probabilities that proposes what a function says: (committed tokens, K) -> tokens."""

    def __init__(self, propose: Callable[[list[int], int], list[int]], name: str = "scripted") -> None:
        self.name, self._propose = name, propose

    def begin(self, batch: Batch) -> None: ...

    def propose(self, batch: Batch, ks: Sequence[int]) -> Proposal:
        drafts = [self._propose(list(row.tokens), k) if k else [] for row, k in zip(batch.rows, ks, strict=True)]
        width = max(map(len, drafts))
        padded = [d + [0] * (width - len(d)) for d in drafts]
        tokens = torch.tensor(padded, dtype=torch.long).reshape(len(drafts), width)
        return Proposal(tokens.to(batch.device), [len(d) for d in drafts])


@cache
def target() -> LlamaForCausalLM:
    """The float64 target of most tests, built once and never written to."""
    return tiny_target()


@cache
def noisy() -> LlamaForCausalLM:
    """A draft that agrees with `target()` often, not always."""
    return tiny_draft(target())


@cache
def stranger() -> LlamaForCausalLM:
    """A draft that never saw the target: nearly everything it proposes is rejected."""
    return tiny_target(seed=99)


_probed: dict[int, PreTrainedModel] = {}


def runner(model: PreTrainedModel) -> ModelRunner:
    """A new runner; the probe at loading runs once per model."""
    made = ModelRunner(model, probe=id(model) not in _probed)
    _probed[id(model)] = model
    return made


def decoder(
    model: PreTrainedModel | None = None,
    draft: PreTrainedModel | Sequence[Drafter] | None = None,
    *,
    tokenizer: Any = None,
    eos: Sequence[int] = (),
    k_max: int = 16,
    **options: Any,
) -> SpeculativeDecoder:
    """A decoder whose first drafter is `draft` (default: the target itself, so that every block is accepted)."""
    model = target() if model is None else model
    draft = model if draft is None else draft
    drafters = [ModelDrafter(runner(draft))] if isinstance(draft, PreTrainedModel) else list(draft)
    engine = Engine(runner(model), drafters, k_max=k_max, eos_ids=eos, tokenizer=tokenizer, **options)
    return SpeculativeDecoder(engine, policy=Schedule(8))


def ngram(**options: Any) -> list[Drafter]:
    return [NgramDrafter(**options)]


def hidden() -> list[Drafter]:
    """An untrained layer on the hidden states of `target()`; its head lacks every fifth token."""
    kept = torch.tensor([t for t in range(target().config.vocab_size) if t % 5 != 3])
    net = HiddenNet(NetShape.of(target()), kept).double()
    initialise(net, target(), 0)
    return [HiddenDrafter(net.attach(target()).requires_grad_(False))]


def run(machine: SpeculativeDecoder, prompt: Sequence[int], *ks: int, n: int = 24, **options: Any) -> GenerateResult:
    """Decode under a K schedule (default: K = 8 in every round) and check what holds for every generation."""
    result = machine.generate(prompt, policy=Schedule(*(ks or (8,))), max_new_tokens=n, **options)
    check(result)
    return result


def check(result: GenerateResult) -> None:
    """The invariants of every finished generation (DESIGN.md, number 4)."""
    rounds = result.episode.rounds
    assert result.tokens == result.episode.tokens and sum(r.emitted for r in rounds) == len(result.tokens)
    assert [r.position for r in rounds] == [sum(r.emitted for r in rounds[:i]) for i in range(len(rounds))]
    for r in rounds:
        assert 0 <= r.accepted <= r.drafted <= r.planned and r.emitted >= 1
        assert r.emitted == r.accepted + 1 or (r.finish is not None and r.emitted == r.accepted)
        assert (r.finish is None) == (r is not rounds[-1])
    if result.logprobs is not None:
        assert len(result.logprobs) == len(result.tokens)


def mean_accepted(result: GenerateResult) -> float:
    """Accepted tokens per round that drafted: a test of blocks says nothing where this is 0."""
    drafting = [r for r in result.episode.rounds if r.drafted]
    return sum(r.accepted for r in drafting) / len(drafting) if drafting else 0.0


_known: dict[tuple[Any, ...], tuple[Any, tuple[int, ...]]] = {}


def generate(model: Any, prompt: Sequence[int], n: int = 24, *, eos: Any = None, **options: Any) -> tuple[int, ...]:
    """The oracle: transformers' own plain greedy decoding, new tokens only. Answers without options are kept."""
    key = (id(model), tuple(prompt), n, str(eos))
    if not options and key in _known:
        return _known[key][1]
    plain = not options
    ids = torch.tensor([list(prompt)])
    if eos is not None:
        options["eos_token_id"] = eos
    options = {"do_sample": False, "use_cache": True, "pad_token_id": 0, **options}
    saved = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = None  # an argument of None would mean "as configured"
    try:
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, **options)
    finally:
        model.generation_config.eos_token_id = saved
    answer = tuple(out[0, len(prompt) :].tolist())
    if plain:
        _known[key] = (model, answer)  # the model is kept with it, so that its id stays its own
    return answer


def prompts(count: int, *, vocab: int = 98, low: int = 1, high: int = 12, seed: int = 0) -> Iterator[list[int]]:
    """Random prompts of random length."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        length = int(torch.randint(low, high + 1, (), generator=generator))
        yield torch.randint(1, vocab, (length,), generator=generator).tolist()


def play(
    engine: Engine, requests: Sequence[Request], choose: Callable[[int, int], Action], **extras: Any
) -> tuple[Batch, list[list[RowOutcome]]]:
    """Decode a batch to its end; `choose(round, row)` gives the actions. Returns the batch and outcomes per row."""
    batch, timer = engine.start(requests, extras), PhaseTimer(engine.device)
    outcomes: list[list[RowOutcome]] = [[] for _ in requests]
    for number in range(10_000):
        if all(row.finish for row in batch.rows):
            return batch, outcomes
        played = engine.round(batch, [choose(number, b) for b in range(batch.size)], timer)
        for mine, outcome, row in zip(outcomes, played, batch.rows, strict=True):
            if outcome.tokens:
                mine.append(outcome)
            else:
                assert row.finish is not None
    raise AssertionError("the batch never ended")


def new_tokens(batch: Batch) -> list[tuple[int, ...]]:
    return [tuple(row.tokens[row.prompt_length :]) for row in batch.rows]


DRAWS = 800
"""texts per statistical test"""


def first_two(
    machine: SpeculativeDecoder, prompt: Sequence[int], *, k: int = 3, draws: int = DRAWS, **sampling: Any
) -> tuple[torch.Tensor, float]:
    """Counts [V, V] of the first two tokens over `draws` seeds, and the mean accepted length of the first round."""
    engine, name = machine.engine, next(iter(machine.engine.drafters))
    sampling = {"mode": "rejection", **sampling}
    requests = [Request(tuple(prompt), k + 1, seed=seed, sampling=sampling) for seed in range(draws)]
    batch, timer = engine.start(requests, {"eos_ids": ()}), PhaseTimer(engine.device)
    played = engine.round(batch, [Action(name, k)] * draws, timer)
    engine.round(batch, [ROLLBACK if row.new_tokens > 1 else Action(name, k - 1) for row in batch.rows], timer)
    vocab = engine.target.vocab_size
    counts = torch.zeros(vocab, vocab, dtype=torch.float64)
    for first, second, *_ in new_tokens(batch):
        counts[first, second] += 1
    return counts, sum(o.accepted for o in played) / draws


def warped(p: torch.Tensor, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> torch.Tensor:
    """Top-k, then top-p, then min-p of one distribution, written from their definitions."""
    p = p.clone()
    order = sorted(range(len(p)), key=lambda i: -float(p[i]))
    if top_k:
        p[order[top_k:]] = 0
        p /= p.sum()
    if top_p < 1:
        kept, mass = 0, 0.0
        while mass < top_p:  # the smallest set of likeliest tokens that reaches top_p
            mass += float(p[order[kept]])
            kept += 1
        p[order[kept:]] = 0
        p /= p.sum()
    p[p < min_p * p.max()] = 0
    return p / p.sum()


def exact_two(model: Any, prompt: Sequence[int], *, temperature: float = 1.0, **kept: Any) -> torch.Tensor:
    """Probabilities [V, V] of the first two tokens, by enumeration with plain forwards."""

    def row(ids: Sequence[int]) -> torch.Tensor:
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0, -1].double()
        return warped((logits / temperature).softmax(-1), **kept)

    first = row(prompt)
    return torch.stack([first[t] * row([*prompt, t]) if first[t] > 0 else first * 0 for t in range(len(first))])


def p_value(counts: torch.Tensor, p: torch.Tensor) -> float:
    """Chi-square test of counts against probabilities; cells that expect fewer than 5 are pooled.

    0 if anything fell on a cell of probability 0. The tests ask for more than 1e-4: that is the odds of a false alarm
    for other seeds; with the seeds fixed a test passes always or never.
    """
    counts, p = counts.reshape(-1), p.reshape(-1)
    if bool((counts[p == 0] > 0).any()):
        return 0.0
    expected = p * counts.sum()
    large = expected >= 5
    seen = [*counts[large].tolist(), float(counts[~large].sum())]
    wanted = [*expected[large].tolist(), float(expected[~large].sum())]
    if wanted[-1] < 1:  # next to nothing is pooled: leave it to the largest cell
        seen[0], wanted[0] = seen[0] + seen.pop(), wanted[0] + wanted.pop()
    return float(chisquare(seen, wanted).pvalue) if len(seen) > 1 else 1.0
