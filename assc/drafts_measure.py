"""Measures the drafters of a pair for the draft choice report: real decoding through `assc.evaluate`, sizes, costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from assc.core import Action, Mode, Request
from assc.costs import CostModel
from assc.drafters.base import Drafter
from assc.drafters.hidden import HiddenDrafter
from assc.drafters.layers import trimmed_head
from assc.drafters.memory import DrafterMemory
from assc.drafters.model import ModelDrafter
from assc.drafts import (
    ByPosition,
    DrafterFacts,
    DrafterMeasured,
    Load,
    Speedup,
    TargetFacts,
    best,
    playable,
    predict,
)
from assc.engine import Engine
from assc.evaluate import evaluate
from assc.kv import bucket_length
from assc.live import LiveBackend
from assc.pairs import LoadedPair
from assc.registry import make_policy
from assc.results import Evaluation


def make_backend(pair: LoadedPair, *, mode: Mode, temperature: float, k_max: int) -> LiveBackend:
    """A live backend over the pair with measured time and a cost model fitted in this mode at this temperature."""
    from assc.calibrate import calibrate
    from assc.loading import build_engine

    engine = build_engine(pair, k_max=k_max)
    costs = calibrate(engine, mode=mode, temperature=temperature)
    label = {
        "pair": pair.name,
        "device": str(pair.device),
        "dtype": str(pair.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
    }
    return LiveBackend(engine, mode=mode, cost_model=costs, time_source="measured", label=label)


def measure(
    backend: LiveBackend, requests: Sequence[Request], *, k: int, seed: int, progress: bool = True
) -> tuple[dict[str, Any], TargetFacts, tuple[DrafterMeasured, ...]]:
    """Conditions, target and all drafters of the backend over `requests` (budgets of 2 tokens or more).

    First every drafter decodes with static K = 1 and `k`, then with its best predicted K; both times interleaved with
    plain decoding, request by request. Raises `RequestError` for a request that cannot be decoded.
    """
    engine, costs = backend.engine, backend.cost_model
    assert costs is not None, "make_backend fits one"
    names = list(engine.drafters)
    plays = [(name, fixed) for name in names for fixed in sorted({1, k})]
    probing = _evaluate(backend, requests, plays, seed, progress)
    counts = {play: _by_category(probing, i, play[1]) for i, play in enumerate(plays)}
    load = load_of(probing, engine, costs)
    text = [t for result in probing.results for t in result.baseline.episode.tokens]
    longest = max(requests, key=lambda r: len(r.prompt_ids) + r.max_new_tokens)
    target, held = memory(backend, longest)
    facts = [
        replace(describe(engine.drafters[n], engine, text, held[n].held), buffer_bytes=held[n].buffers) for n in names
    ]
    k_values = playable(engine.k_max, max(r.max_new_tokens for r in requests))
    predictions = [
        tuple(predict(sum(counts[f.name, k].values(), ByPosition()), costs, f, load, value) for value in k_values)
        for f in facts
    ]
    chosen = [(f.name, best(p).k) for f, p in zip(facts, predictions, strict=True)]
    final = _evaluate(backend, requests, chosen, seed, progress)
    measured = tuple(
        DrafterMeasured(
            facts=f,
            k=k,
            first=counts[f.name, 1],
            fixed=counts[f.name, k],
            c=costs.cost_ratio(f.name, load.kv),
            predictions=p,
            measured=Speedup(best(p).k, row["speedup"], *row["speedup_ci95"]),
        )
        for f, p, row in zip(facts, predictions, final.rows(), strict=True)
    )
    same = [e.same_text for e in (probing, final)]
    meta = {
        **final.meta,
        "same_text": None if None in same else all(same),
        "mean_prompt_tokens": load.prompt_tokens,
        "mean_new_tokens": load.new_tokens,
        "time": {"acceptance": "measured", "speedup": "measured", "c": "modelled", "predictions": "modelled"},
    }
    return meta, target, measured


def _evaluate(
    backend: LiveBackend, requests: Sequence[Request], plays: Sequence[tuple[str, int]], seed: int, progress: bool
) -> Evaluation:
    policies = [(f"static:{k},drafter={name}", make_policy(f"static:{k},drafter={name}")) for name, k in plays]
    return evaluate(backend, requests, policies, seed=seed, progress=progress)


def _by_category(evaluation: Evaluation, policy: int, k: int) -> Mapping[str, ByPosition]:
    table: dict[str, ByPosition] = {}
    for result in evaluation.results:
        name = result.request.category
        table[name] = table.get(name, ByPosition()) + ByPosition.of(result.runs[policy].episode.rounds, k)
    return table


def load_of(evaluation: Evaluation, engine: Engine, costs: CostModel) -> Load:
    """Means over the requests, as plain decoding met them."""
    prompts = [len(r.request.prompt_ids) for r in evaluation.results]
    texts = [len(r.baseline.episode.tokens) for r in evaluation.results]
    kv = []
    for result, prompt, text in zip(evaluation.results, prompts, texts, strict=True):
        room = engine.target.max_positions
        longest = prompt + result.request.max_new_tokens
        slots = bucket_length(longest if room is None else min(longest, room))
        kv.append(costs.kv(prompt + text // 2, slots))
    count = len(prompts)
    return Load(sum(prompts) / count, sum(texts) / count, sum(kv) / count)


def describe(drafter: Drafter, engine: Engine, text: Sequence[int], memory_bytes: int) -> DrafterFacts:
    """Size and reach of a drafter over `text`, the target's own new tokens. A drafter without weights is a lookup."""
    target = engine.target.model
    if isinstance(drafter, ModelDrafter):
        head = trimmed_head(drafter.runner.model)
        limit = min(drafter.runner.vocab_size, engine.target.vocab_size)
        can = set(range(limit) if head is None else head.token_ids.tolist())
        share = sum(t in can for t in text) / len(text)
        family = str(drafter.runner.model.config.get_text_config().model_type)
        size = own_parameters(drafter.runner.model, target)
        cut = head is not None
        return DrafterFacts(drafter.name, "model", drafter.keeps, family, size, len(can), share, memory_bytes, cut)
    if isinstance(drafter, HiddenDrafter):
        can = set(drafter.net.token_ids.tolist())
        share = sum(t in can for t in text) / len(text)
        size = own_parameters(drafter.net, target)
        return DrafterFacts(drafter.name, "hidden", drafter.keeps, "", size, len(can), share, memory_bytes, True)
    return DrafterFacts(drafter.name, "lookup", drafter.keeps, memory_bytes=memory_bytes)


def own_parameters(model: nn.Module, target: nn.Module) -> int:
    """Parameters of `model` whose storage is not one of the target's; tied ones count once."""
    shared = {p.data_ptr() for p in target.parameters()} if model is not target else set()
    return sum(p.numel() for p in model.parameters() if p.data_ptr() not in shared)


@torch.inference_mode()
def memory(backend: LiveBackend, request: Request) -> tuple[TargetFacts, dict[str, DrafterMemory]]:
    """The target's facts, and bytes of each drafter, held after one round of `request` with each drafter.

    A drafter's bytes include the buffer of the target's hidden states if it is one that needs it.
    """
    engine = backend.engine
    held: dict[str, DrafterMemory] = {}
    for name, drafter in engine.drafters.items():
        backend.reset(request)
        backend.step(Action(name, 1))
        own = held[name] = drafter.memory()
        if drafter.needs_hidden and backend.batch.hidden is not None:
            hidden = backend.batch.hidden.numel() * backend.batch.hidden.element_size()
            held[name] = replace(own, buffers=own.buffers + hidden)
    model, kv = engine.target.model, backend.batch.kv
    item = torch.empty(0, dtype=engine.target.dtype).element_size()
    facts = TargetFacts(
        family=str(model.config.get_text_config().model_type),
        parameters=own_parameters(model, model),
        token_ids=engine.target.vocab_size,
        weight_bytes=sum(p.numel() * p.element_size() for p in model.parameters()),
        kv_bytes=kv.memory_bytes(),
        logit_bytes=(engine.k_max + 1) * engine.target.vocab_size * item,
        slots=kv.length,
        k_max=engine.k_max,
    )
    return facts, held
