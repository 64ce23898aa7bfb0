"""The draft of a few of the target's layers: a cut head's -inf does no harm anywhere, and the output stays exact."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from checks import check_distribution
from helpers import make_engine, oracle_all, play, request, schedule_of, target_model
from test_hidden_drafter import TRIMMED
from test_replay import ALL, FREE, same

from assc.core import ROLLBACK, Action, Request
from assc.costs import CostModel, DrafterCost
from assc.drafters.layers import few_layers, outer_layers, own_bytes, trimmed_head, trunk
from assc.drafters.model import ModelDrafter, confidence
from assc.drafters.ngram import NgramDrafter
from assc.drafts_measure import describe
from assc.engine import Engine
from assc.errors import ArtefactError, UnsupportedModelError
from assc.kv import ModelRunner
from assc.live import LiveBackend
from assc.observe import Featurizer
from assc.record import header_of
from assc.recorder import record_request
from assc.replay import ReplayBackend
from assc.tiny import VOCAB_SIZE, tiny_target
from assc.trace_build import build_trace

OUTSIDE = sorted(set(range(VOCAB_SIZE)) - set(TRIMMED.tolist()))


def drafter(layers: tuple[int, ...] = (0, 1)) -> ModelDrafter:
    """By default all layers of the target: a draft that is wrong only where its head lacks the token."""
    return ModelDrafter(ModelRunner(few_layers(target_model(), layers, TRIMMED)), "layers")


def test_it_is_the_targets_outer_layers_under_a_cut_head() -> None:
    """Against a model built by hand of the same weights; embeddings are the target's own tensor."""
    target = tiny_target(layers=5, layer_types=["full_attention"] * 5)
    before = {name: weight.clone() for name, weight in target.state_dict().items()}
    generator = torch.get_rng_state()
    draft = few_layers(target, outer_layers(5, 3), TRIMMED)
    assert torch.equal(torch.get_rng_state(), generator)
    by_hand = tiny_target(layers=3)
    state = {k: v for k, v in before.items() if ".layers." not in k}
    for new, old in enumerate((0, 1, 4)):
        part = f"model.layers.{old}."
        state |= {k.replace(part, f"model.layers.{new}."): v for k, v in before.items() if k.startswith(part)}
    by_hand.load_state_dict(state)
    ids = torch.arange(2, 40)[None]
    ours, wanted = draft(ids).logits, by_hand(ids).logits
    assert torch.allclose(ours[..., TRIMMED], wanted[..., TRIMMED], rtol=0, atol=1e-12)
    assert bool(ours[..., OUTSIDE].isneginf().all()) and ours.shape == wanted.shape
    assert draft.model.embed_tokens.weight.data_ptr() == target.model.embed_tokens.weight.data_ptr()
    own = {p.data_ptr() for p in trunk(draft).parameters()}
    assert not own & {p.data_ptr() for p in target.parameters()}
    assert draft.config.num_hidden_layers == 3 == len(draft.config.layer_types)
    draft.to(torch.float32)  # whatever is done to the draft, the target stays as it is
    assert target.config.num_hidden_layers == 5 and target.dtype == torch.float64
    assert all(torch.equal(weight, before[name]) for name, weight in target.state_dict().items())


def test_which_layers_and_which_targets() -> None:
    assert [outer_layers(30, n) for n in (1, 2, 3)] == [[0], [0, 29], [0, 1, 29]]
    assert outer_layers(4, 4) == [0, 1, 2, 3]
    for n in (0, 5):
        with pytest.raises(ArtefactError, match="1 to 4 of them"):
            outer_layers(4, n)
    capped = tiny_target()
    capped.config.final_logit_softcapping = 30.0
    with pytest.raises(UnsupportedModelError, match="caps its scores"):
        few_layers(capped, [0], TRIMMED)


SAMPLING: list[dict[str, Any]] = [
    {},
    {"mode": "gumbel", "temperature": 0.8},
    {"mode": "gumbel", "temperature": 1.0, "top_p": 0.9, "top_k": 90, "min_p": 0.001},
]


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("sampling", SAMPLING, ids=str)
@pytest.mark.parametrize("layers", [(0,), (0, 1)], ids=str)
def test_output_equals_plain_decoding_for_random_schedules(
    layers: tuple[int, ...], sampling: dict[str, Any], lazy: bool
) -> None:
    engine = make_engine(drafter(layers), lazy_verify=lazy)
    asked = [request(n, **sampling) for n in (3, 19, 11)]
    plain = [p.tokens for p in play(engine, asked, [schedule_of("0")] * 3)]
    if len(sampling) < 3:
        assert plain == oracle_all(asked)
    for seed in range(2):
        played = play(engine, asked, [schedule_of("random", seed + b) for b in range(3)])
        assert [p.tokens for p in played] == plain
        single = play(engine, asked[1:2], [schedule_of("random", seed)])[0]
        assert single.tokens == plain[1]


def test_with_all_layers_only_tokens_outside_the_head_are_rejected() -> None:
    """Greedy and gumbel: what the head holds and the target chooses is what the draft chooses."""
    engine = make_engine(drafter())
    for mode in ("greedy", "gumbel"):
        for row in play(engine, [request(9, mode, budget=60)], [schedule_of("4")]):
            assert row.accepted > 0
            start = 0
            for one in row.rounds:
                coming = row.tokens[start : start + one.drafted]
                miss = next((i for i, t in enumerate(coming) if t in OUTSIDE), one.drafted)
                assert one.accepted == miss
                start += len(one.tokens)


@pytest.mark.parametrize(("sampling", "lazy"), [("plain", True), ("all", False)])
def test_rejection_keeps_the_targets_distribution_when_ids_score_minus_infinity(sampling: str, lazy: bool) -> None:
    """Odds of a false alarm 1e-9 each (`checks.allowed_variation`); guards a q that is NaN or too large somewhere."""
    check_distribution("cut", sampling, lazy=lazy, rows=60, length=40)


def test_rejection_gives_q_without_what_the_head_lacks() -> None:
    engine = make_engine(drafter((0,)))
    for options in ({}, {"top_k": 90}, {"top_p": 0.9}, {"min_p": 0.01}, {"repetition_penalty": 1.3}):
        asked = request(12, "rejection", **options)
        proposal = engine.drafters["layers"].propose(engine.start([asked]), [6])
        assert proposal.q is not None and not proposal.q[..., OUTSIDE].any()
        assert torch.allclose(proposal.q.sum(-1), torch.ones(1, 6, dtype=proposal.q.dtype))
        assert (proposal.q[0].gather(1, proposal.tokens[0, :, None]) > 0).all()
        assert len(play(engine, [asked], [schedule_of("random")])[0].tokens) == asked.max_new_tokens


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_confidence_of_a_cut_head_is_that_of_its_own_tokens(dtype: torch.dtype) -> None:
    scores = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(0)).to(dtype)
    cut = torch.full_like(scores, -torch.inf)
    cut[TRIMMED] = scores[TRIMMED]
    got, wanted = confidence(cut), confidence(scores[TRIMMED])
    assert np.allclose(
        (got.entropy, got.top1, got.margin), (wanted.entropy, wanted.top1, wanted.margin), rtol=1e-5, atol=0
    )
    one = torch.full((VOCAB_SIZE,), -torch.inf, dtype=dtype)
    one[3] = 2.0
    assert confidence(one) == type(got)(0.0, 1.0, 1.0)


@pytest.mark.parametrize("mode", ["greedy", "gumbel", "rejection"])
def test_a_constraint_that_allows_nothing_the_head_knows(mode: str) -> None:
    """Only ids outside the head are allowed: no NaN is proposed, the output stays the constraint's own.

    The constraint is a custom processor, since that of transformers forces its tokens from some version on.
    """
    asked = request(7, mode, processors=(lambda ids, scores: scores.index_fill(-1, TRIMMED, -torch.inf),))
    engine = make_engine(drafter())
    proposal = engine.drafters["layers"].propose(engine.start([asked]), [4])
    assert proposal.q is None or bool(proposal.q.isfinite().all())
    tokens = play(engine, [asked], [schedule_of("random", 1)])[0].tokens
    assert len(tokens) == asked.max_new_tokens and set(tokens) <= set(OUTSIDE)
    if mode != "rejection":
        assert tokens == play(engine, [asked], [schedule_of("0")])[0].tokens


def test_processors_that_read_the_prefix() -> None:
    engine = make_engine(drafter())
    options = {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "logit_bias": {OUTSIDE[0]: 3.0, 7: -2.0}}
    asked = request(9, "gumbel", **options)
    plain = play(engine, [asked], [schedule_of("0")])[0].tokens
    assert play(engine, [asked], [schedule_of("random", 3)])[0].tokens == plain


def test_the_report_counts_what_the_draft_owns() -> None:
    target = target_model()
    one = drafter((0,))
    engine = Engine(ModelRunner(target), [one])
    text = [TRIMMED[0].item(), TRIMMED[1].item(), OUTSIDE[0], OUTSIDE[1]]
    facts = describe(one, engine, text, 7)
    layer = sum(p.numel() for p in target.model.layers[0].parameters()) + target.model.norm.weight.numel()
    assert (facts.kind, facts.parameters, facts.token_ids, facts.coverage, facts.cut_head) == (
        "model", layer, len(TRIMMED), 0.5, True,
    )  # fmt: skip
    head = trimmed_head(one.runner.model)
    assert head is not None
    assert one.memory_bytes() == own_bytes(one.runner.model) == 8 * (layer + head.rows.numel())


COSTS = CostModel(
    target_fixed=0.02,
    target_per_token=0.0003,
    target_per_kv=1e-6,
    drafters={"layers": DrafterCost(0.002, 0.0004, 0.0005), "ngram": DrafterCost(0.0, per_call=1e-4)},
    overhead=0.0007,
)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("needs", [FREE, ALL], ids=["free", "peeked"])
def test_replay_is_live_through_the_recorders_shortcut(temperature: float, needs: Featurizer) -> None:
    engine = Engine(ModelRunner(target_model()), [drafter((0,)), NgramDrafter()], eos_ids=())
    live = LiveBackend(engine, mode="gumbel", cost_model=COSTS, time_source="modelled")
    header = header_of(engine, mode="gumbel", max_new_tokens=30)
    accepted = 0
    for seed in range(3):
        asked: Request = replace(request(9 + seed, "gumbel", budget=30, temperature=temperature), id=str(seed))
        columns, mismatches = record_request(engine, asked)
        assert not any(np.isnan(columns[f"{c}/layers"]).any() for c in ("entropy", "top1", "margin"))
        replayed = ReplayBackend(build_trace(header, [(asked, "train", columns, mismatches)]), COSTS)
        live.reset(asked)
        replayed.reset(asked)
        rng = np.random.default_rng(seed)
        while not live.done:
            assert (ALL(live.observe(needs.needs)) == ALL(replayed.observe(needs.needs))).all()
            k = int(rng.integers(0, 17))
            action = Action(("layers", "ngram")[rng.integers(2)], k) if k else ROLLBACK
            record = live.step(action)
            same(record, replayed.step(action))
            accepted += record.accepted if action.drafter == "layers" else 0
        assert replayed.done
    assert accepted > 0
