"""Checks that a correct decoder passes and a faulty one must not: used as tests, and against planted faults.

Each function raises `AssertionError` with its own message. The distribution checks run real drafters, real engine
and real verification over `TableRunner` models with a vocabulary of 8, whose exact distributions are enumerated here
with numpy alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from helpers import (
    CPU,
    Faltering,
    Played,
    Schedule,
    TableRunner,
    make_drafter,
    make_engine,
    oracle_all,
    play,
    prompt,
    request,
    schedule_of,
    target_model,
    target_runner,
)
from transformers import LogitsProcessorList
from transformers.generation import RepetitionPenaltyLogitsProcessor

from assc.batch import Batch, Row
from assc.core import Action, Request
from assc.drafters.base import Drafter
from assc.drafters.model import ModelDrafter
from assc.drafters.ngram import NgramDrafter
from assc.engine import Engine
from assc.timing import PhaseTimer

V = 8
_draw = np.random.default_rng(11)
TARGET_TABLE = _draw.normal(size=(V, V)) * 1.5
DRAFT_TABLE = TARGET_TABLE + _draw.normal(size=(V, V))
_FEW = np.array([[0.1, 0.65, 0.25], [0.5, 0.45, 0.05]])
FEW_TARGET, FEW_DRAFT = (np.tile(np.append(np.log(row), [-60.0] * (V - 3)), (V, 1)) for row in _FEW)
"""three tokens only: the rejected draft says much about its own noise, so a residual that shares it is far off"""
START = (3, 5, 1, 3)
"""the prompt of the distribution checks; its last token begins the chain"""
SAMPLED: dict[str, dict[str, float]] = {
    "plain": {"temperature": 1.0},
    "cold": {"temperature": 0.1},
    "cool": {"temperature": 0.7},
    "hot": {"temperature": 2.0},
    "top_k": {"temperature": 0.7, "top_k": 3},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "min_p": {"temperature": 1.0, "min_p": 0.1},
    "all": {"temperature": 1.5, "top_k": 6, "top_p": 0.9, "min_p": 0.05},
}


class ArgmaxDrafter(ModelDrafter):
    """Drafts the most probable token without telling probabilities: one-hot q from a model."""

    gives_q = False

    def _choose(self, batch: Batch, row: Row, b: int, j: int, logits: Any, *rest: Any) -> torch.Tensor:
        return logits.argmax()


def table_drafter(kind: str) -> Drafter:
    """dense and few: probabilities q; trimmed: q over the first 6 ids; cut: ids 1 and 6 score -inf; argmax and ngram:
    one-hot."""
    if kind == "ngram":
        return NgramDrafter("draft", min_n=1)
    size = 6 if kind == "trimmed" else V
    table = FEW_DRAFT if kind == "few" else DRAFT_TABLE.copy()
    if kind == "cut":
        table[:, [1, 6]] = -np.inf
    runner: Any = TableRunner(torch.tensor(table[:size, :size]))
    return ArgmaxDrafter(runner, "draft") if kind == "argmax" else ModelDrafter(runner, "draft")


def target_table(kind: str) -> np.ndarray:
    """Logits of the target that goes with a kind of drafter."""
    return FEW_TARGET if kind == "few" else TARGET_TABLE


def exact(table: np.ndarray, sampling: Mapping[str, float]) -> np.ndarray:
    """The distribution after each token [V, V], by the definitions of temperature, top-k, top-p and min-p."""
    return np.stack([_exact_row(row / sampling["temperature"], sampling) for row in table])


def _exact_row(scores: np.ndarray, sampling: Mapping[str, float]) -> np.ndarray:
    p = np.exp(scores - scores.max())
    order = np.argsort(-p)
    keep = np.ones(len(p), bool)
    if k := int(sampling.get("top_k", 0)):
        keep[order[k:]] = False
    p = p * keep / (p * keep).sum()
    if (top_p := sampling.get("top_p", 1.0)) < 1:
        before = np.cumsum(p[order]) - p[order]  # a token stays while those above it hold less than top_p
        keep[order[before >= top_p]] = False
        p = p * keep / (p * keep).sum()
    keep &= p >= sampling.get("min_p", 0.0) * p.max()
    return p * keep / (p * keep).sum()


def variation(counts: np.ndarray, p: np.ndarray) -> np.ndarray:
    """Total variation between transition counts [..., V, V] and p, weighted by how often each row was left."""
    expected = counts.sum(-1, keepdims=True) * p
    return 0.5 * np.abs(counts - expected).sum((-2, -1)) / counts.sum((-2, -1))


@lru_cache
def allowed_variation(drafter: str, sampling: str, rows: int, length: int, repeats: int = 200) -> float:
    """Mean + 6 standard deviations of `variation` of chains that do follow the target, simulated.

    The statistic is a sum over 64 cells and close to normal: a right decoder exceeds it with odds near 1e-9 per check.
    Seeds are fixed besides, so a check that passed once goes on passing until someone changes the noise.
    """
    p, draw = exact(target_table(drafter), SAMPLED[sampling]), np.random.default_rng(5)
    state = np.full((repeats, rows), START[-1])
    counts = np.zeros((repeats, V, V))
    which = np.repeat(np.arange(repeats), rows)
    above = p.cumsum(-1)
    for _ in range(length):
        after = np.minimum((draw.random((repeats, rows, 1)) > above[state]).sum(-1), V - 1)
        np.add.at(counts, (which, state.ravel(), after.ravel()), 1)
        state = after
    values = variation(counts, p)
    return float(values.mean() + 6 * values.std())


def sampled(
    drafter: str,
    sampling: str,
    *,
    mode: str = "rejection",
    lazy: bool = True,
    schedule: Schedule = "3",
    rows: int = 250,
    length: int = 80,
    chunks: int = 1,
) -> list[Played]:
    """Decodes `rows` requests of `length` tokens, seeds 0, 1, …, through the whole engine."""
    target: Any = TableRunner(torch.tensor(target_table(drafter)))
    engine = Engine(target, [table_drafter(drafter)], lazy_verify=lazy, chunks=chunks)
    options = {"mode": mode, **SAMPLED[sampling]}
    requests = [Request(START, length, seed=s, sampling=options) for s in range(rows)]
    return play(engine, requests, [schedule_of(schedule, n) for n in range(rows)])


def check_distribution(
    drafter: str = "dense",
    sampling: str = "cool",
    *,
    mode: str = "rejection",
    lazy: bool = True,
    schedule: Schedule = "3",
    rows: int = 100,
    length: int = 60,
    chunks: int = 1,
) -> float:
    """The tokens of many requests follow the target's exact distribution. Returns the acceptance rate."""
    p = exact(target_table(drafter), SAMPLED[sampling])
    played = sampled(
        drafter, sampling, mode=mode, lazy=lazy, schedule=schedule, rows=rows, length=length, chunks=chunks
    )
    counts = np.zeros((V, V))
    for row in played:
        np.add.at(counts, (np.array([START[-1], *row.tokens[:-1]]), np.array(row.tokens)), 1)
    assert counts.sum() == rows * length
    assert not counts[p == 0].any(), "total variation: tokens came out that the target never gives"
    found, allowed = float(variation(counts, p)), allowed_variation(drafter, sampling, rows, length)
    assert found < allowed, f"total variation {found:.4f} is above {allowed:.4f}"
    drafted, accepted = sum(r.drafted for r in played), sum(r.accepted for r in played)
    assert schedule == "0" or 0 < accepted < drafted, "acceptance is not strictly between 0 and 1"
    return accepted / max(1, drafted)


def check_exact_text(
    mode: str = "greedy", *, lazy: bool = True, penalty: float = 1.0, lengths: Sequence[int] = (1, 9, 26)
) -> None:
    """A ragged batch with a random schedule gives the text of plain decoding, while drafts are accepted."""
    sampling = {} if penalty == 1.0 else {"repetition_penalty": penalty}
    chain = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(penalty)]) if sampling else None
    requests = [request(n, mode, 20, **sampling) for n in lengths]
    played = play(
        make_engine(make_drafter("model"), lazy_verify=lazy),
        requests,
        [schedule_of("random", n) for n in range(len(lengths))],
    )
    assert [p.tokens for p in played] == oracle_all(requests, processors=chain), "the text is not the plain one"
    assert sum(p.accepted for p in played) > 0, "nothing was accepted"


def check_full_acceptance(mode: str = "greedy") -> None:
    """draft == target: every drafted token of every round is accepted, rollback rounds or not."""
    played = play(make_engine(make_drafter("perfect")), [request(10, mode, 40)], [schedule_of((3, 0, 5, 0, 0, 1))])
    assert all(r.accepted == r.drafted for p in played for r in p.rounds), "a draft equal to the target was rejected"


def check_caches(engine: Engine, batch: Batch, peek: bool = True) -> None:
    """The next logits of target and draft over the used buffers equal forwards of the committed text alone."""
    for b, row in enumerate(batch.rows):
        if row.finish is not None:
            continue
        text = torch.tensor([row.tokens])
        ids, positions = batch.slices([r.length - 1 for r in batch.rows], 1)
        assert ids[b].tolist() == row.tokens[-1:]
        with torch.inference_mode():
            ours = engine.target.forward(batch.kv, ids, positions)[b, -1]
            fresh = target_model()(input_ids=text, use_cache=False).logits[0, -1]
        assert torch.allclose(ours, fresh, rtol=0, atol=1e-10), "the target's buffers are not the committed text"
        drafter = engine.drafters["draft"]
        if peek and isinstance(drafter, ModelDrafter):
            seen = engine.peek(batch, [b])[b]
            with torch.inference_mode():
                p = drafter.runner.model(input_ids=text, use_cache=False).logits[0, -1].softmax(-1)
            first, second = p.topk(2).values.tolist()
            expected = np.array([first, first - second, float(-(p * p.log()).sum())])
            found = np.array([seen.top1, seen.margin, seen.entropy])
            assert np.allclose(found, expected, rtol=0, atol=1e-9), "the draft's buffers are not the committed text"


def check_cache_lengths(k: int) -> None:
    """K drafted, every accepted length 0..K (X02): both buffers are right, and the next round is accepted."""
    for right in range(k + 1):
        drafter = Faltering(target_runner(), "draft")
        engine, timer = make_engine(drafter), PhaseTimer(CPU)
        batch = engine.start([Request(prompt(6), 20)])
        drafter.right = right
        (outcome,) = engine.round(batch, [Action("draft", k)], timer)
        assert (outcome.drafted, outcome.accepted) == (k, right)
        assert batch.rows[0].length == 6 + right + 1
        # the draft was fed the prompt and K - 1 of its tokens; what was accepted of them stays
        assert drafter._fed == [6 + min(right, k - 1)], "the draft's buffer has another length"
        check_caches(engine, batch, peek=right % 2 == 0)
        drafter.right = 10**9
        (outcome,) = engine.round(batch, [Action("draft", 4)], timer)
        assert outcome.accepted == outcome.drafted == 4, "the draft's buffers are not the committed text"
        assert outcome.catch_up == int(right == k)
