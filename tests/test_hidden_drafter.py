"""The draft on the target's hidden states: lossless, and what it proposes depends on the committed text alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from assc.core import ROLLBACK, Action, Request
from assc.distill.train import initialise
from assc.drafters.base import drafter_kinds
from assc.drafters.hidden import BLOCK, HiddenDrafter
from assc.drafters.net import HiddenNet, NetShape
from assc.engine import Engine
from assc.kv import ModelRunner
from assc.timing import PhaseTimer
from assc.tiny import EOS_ID, VOCAB_SIZE, tiny_target

TRIMMED = torch.tensor([t for t in range(VOCAB_SIZE) if t % 5 != 3])


def make_net(dtype: torch.dtype = torch.float64, seed: int = 0, target: torch.nn.Module | None = None) -> HiddenNet:
    target = tiny_target(dtype=dtype) if target is None else target
    net = HiddenNet(NetShape.of(target), TRIMMED).double()  # type: ignore[arg-type]
    initialise(net, target, seed)
    return net.to(dtype).attach(target).requires_grad_(False)  # type: ignore[arg-type]


def make_engine(dtype: torch.dtype = torch.float64, lazy: bool | None = None, fixed_width: bool = False) -> Engine:
    target = tiny_target(dtype=dtype)
    drafters = [HiddenDrafter(make_net(dtype, target=target))]
    return Engine(ModelRunner(target), drafters, eos_ids=(), lazy_verify=lazy, fixed_width=fixed_width)


def request(seed: int = 0, n: int = 24, length: int = 9, **sampling: object) -> Request:
    picks = random.Random(seed)
    return Request(tuple(picks.randrange(2, VOCAB_SIZE) for _ in range(length)), n, seed=seed, sampling=sampling)


SAMPLING = [
    {},
    {"mode": "gumbel", "temperature": 0.8},
    {"mode": "gumbel", "temperature": 1.0, "top_p": 0.9, "top_k": 20},
    {"mode": "gumbel", "temperature": 1.0, "repetition_penalty": 1.3, "logit_bias": {7: 2.0}},
]


def play(
    engine: Engine, requests: Sequence[Request], seed: int, *, ks: Sequence[int] = (0, 1, 3, 7, 16)
) -> list[tuple[int, ...]]:
    """Random schedules per row; rollback is K = 0. Some rounds peek first."""
    picks = random.Random(seed)
    batch, timer = engine.start(requests), PhaseTimer(engine.device)
    while any(row.finish is None for row in batch.rows):
        if picks.random() < 0.3:
            engine.peek(batch, [b for b, row in enumerate(batch.rows) if row.finish is None])
        chosen = [picks.choice(ks) for _ in requests]
        outcomes = engine.round(batch, [Action("hidden", k) if k else ROLLBACK for k in chosen], timer)
        for k, outcome in zip(chosen, outcomes, strict=True):
            assert 0 <= outcome.accepted <= outcome.drafted <= k
    return [tuple(row.tokens[row.prompt_length :]) for row in batch.rows]


def test_the_kind_is_registered() -> None:
    assert drafter_kinds()["hidden"] is HiddenDrafter


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("sampling", SAMPLING, ids=str)
def test_output_equals_plain_decoding_for_every_schedule(sampling: dict[str, object], lazy: bool) -> None:
    engine = make_engine(lazy=lazy)
    for seed in range(3):
        asked = request(seed, **sampling)
        plain = play(engine, [asked], 0, ks=(0,))
        assert len(plain[0]) == asked.max_new_tokens
        for schedule in range(3):
            assert play(engine, [asked], schedule) == plain


@pytest.mark.parametrize("sampling", SAMPLING[:2], ids=str)
def test_three_ragged_rows_equal_single_runs(sampling: dict[str, object]) -> None:
    engine = make_engine()
    asked = [request(s, n=20 + s, length=length, **sampling) for s, length in enumerate((3, 40, 17))]
    alone = [play(engine, [r], 0, ks=(0,))[0] for r in asked]
    for schedule in range(3):
        assert play(engine, asked, schedule) == alone


def proposals(engine: Engine, asked: Request, seed: int, k: int = 8) -> dict[int, tuple[int, ...]]:
    """What the drafter proposes from each round's start, over a random schedule that varies how far each round goes."""
    picks = random.Random(seed)
    batch, timer = engine.start([asked]), PhaseTimer(engine.device)
    found: dict[int, tuple[int, ...]] = {}
    while batch.rows[0].finish is None:
        row = batch.rows[0]
        if picks.random() < 0.7:
            found[row.length] = tuple(engine.drafters["hidden"].propose(batch, [k]).tokens[0].tolist())
        engine.round(batch, [Action("hidden", n) if (n := picks.choice((0, 1, 2, 5, 16))) else ROLLBACK], timer)
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("sampling", SAMPLING[:2], ids=str)
def test_a_proposal_depends_on_its_position_alone(dtype: torch.dtype, sampling: dict[str, object]) -> None:
    """Every two schedules agree wherever both proposed: round boundaries and rollbacks leave no trace."""
    engine = make_engine(dtype)
    asked = request(3, n=60, length=2 * BLOCK + 3, **sampling)
    runs = [proposals(engine, asked, seed) for seed in range(6)]
    pooled: dict[int, tuple[int, ...]] = {}
    shared = 0
    for run in runs:
        for position, tokens in run.items():
            shared += position in pooled
            assert pooled.setdefault(position, tokens) == tokens
    assert shared > 60


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_start_logits_are_bitwise_equal_for_every_schedule(dtype: torch.dtype) -> None:
    """Verification is padded to one width, so that the target's own states do not differ in their last bits."""
    engine = make_engine(dtype, fixed_width=True)
    drafter = engine.drafters["hidden"]
    assert isinstance(drafter, HiddenDrafter)
    asked = request(1, n=40, length=20)
    seen: dict[int, torch.Tensor] = {}
    compared = 0
    for seed in range(4):
        picks = random.Random(seed)
        batch, timer = engine.start([asked]), PhaseTimer(engine.device)
        while batch.rows[0].finish is None:
            drafter.peek(batch, [0])
            logits = drafter._starts[0].logits
            length = batch.rows[0].length
            if length in seen:
                compared += 1
                assert torch.equal(seen[length], logits)
            seen[length] = logits.clone()
            k = picks.choice((0, 1, 4, 16))
            engine.round(batch, [Action("hidden", k) if k else ROLLBACK], timer)
    assert compared > 40


def test_rejection_gives_q_over_the_whole_vocabulary_with_zeros_outside_the_head() -> None:
    engine = make_engine()
    batch = engine.start([request(2, mode="rejection", temperature=1.0)])
    proposal = engine.drafters["hidden"].propose(batch, [6])
    assert proposal.q is not None and proposal.q.shape == (1, 6, VOCAB_SIZE)
    outside = torch.ones(VOCAB_SIZE, dtype=torch.bool)
    outside[TRIMMED] = False
    assert not proposal.q[0][:, outside].any()
    assert torch.allclose(proposal.q[0].sum(-1), torch.ones(6, dtype=proposal.q.dtype), atol=1e-5)
    assert (proposal.q[0].gather(1, proposal.tokens[0, :, None]) > 0).all()
    assert len(play(engine, [request(2, mode="rejection", temperature=1.0)], 0)[0]) == 24


def test_gumbel_noise_of_some_tokens_is_the_same_noise() -> None:
    engine = make_engine()
    noise = engine.start([request(0, mode="gumbel", temperature=1.0)]).rows[0].noise
    assert noise is not None
    assert torch.equal(noise.of(TRIMMED).gumbel("target", 11), noise.gumbel("target", 11)[TRIMMED])


def test_peek_tells_the_trimmed_distribution_and_does_not_change_the_proposal() -> None:
    engine = make_engine()
    drafter = engine.drafters["hidden"]
    batch = engine.start([request(5)])
    bare = drafter.propose(batch, [5]).tokens.tolist()
    drafter.begin(batch)
    seen = engine.peek(batch, [0])[0]
    assert 0 < seen.top1 <= 1 and 0 <= seen.margin <= seen.top1 and seen.entropy >= 0
    again = drafter.propose(batch, [5])
    assert again.tokens.tolist() == bare
    assert again.steps == [5]


def test_the_first_step_reads_the_true_state_of_the_position_before() -> None:
    """Against the training code: the draft's first logits equal step 1 of `unroll`, its second those of step 2."""
    from assc.distill.train import unroll

    engine = make_engine()
    drafter = engine.drafters["hidden"]
    assert isinstance(drafter, HiddenDrafter)
    asked = request(4, length=30)
    batch = engine.start([asked])
    tokens = drafter.propose(batch, [4]).tokens[0].tolist()
    ids = torch.tensor([[*asked.prompt_ids, *tokens]])
    hidden = engine.target.model.base_model(ids[:, : len(asked.prompt_ids) - 1]).last_hidden_state
    hidden = torch.nn.functional.pad(hidden, (0, 0, 0, 1 + len(tokens)))  # states of drafted tokens are never read
    last = len(asked.prompt_ids) - 1
    with torch.no_grad():
        for step, feature in enumerate(unroll(drafter.net, ids, hidden, 4)):
            logits = drafter.net.logits(feature[0, last + step])
            assert int(TRIMMED[logits.argmax()]) == tokens[step]


def test_a_request_of_one_prompt_token_and_a_second_request_after_it() -> None:
    engine = make_engine()
    short = replace(request(0, n=12), prompt_ids=(5,))
    assert play(engine, [short], 1) == play(engine, [short], 0, ks=(0,))
    asked = request(8, n=12)
    assert play(engine, [asked], 1) == play(make_engine(), [asked], 0, ks=(0,))


def test_end_of_text_can_be_drafted() -> None:
    target = tiny_target()
    drafter = HiddenDrafter(make_net(target=target))
    assert EOS_ID in TRIMMED.tolist()
    engine = Engine(ModelRunner(target), [drafter], eos_ids=(EOS_ID,))
    asked = request(6, n=100, mode="gumbel", temperature=1.0)
    assert play(engine, [asked], 2) == play(engine, [asked], 0, ks=(0,))


@pytest.mark.parametrize("mode", ["gumbel", "rejection"])
def test_a_constraint_that_allows_nothing_the_head_knows(mode: str) -> None:
    """Only ids outside the head are allowed: every draft is refused, the output stays the constraint's own."""
    outside = [t for t in range(VOCAB_SIZE) if t not in TRIMMED.tolist()]

    def allowed(batch_id: int, prefix: torch.Tensor) -> list[int]:
        return outside

    asked = request(0, n=12, mode=mode, temperature=1.0, prefix_allowed_tokens_fn=allowed)
    tokens = play(make_engine(), [asked], 1)[0]
    assert len(tokens) == 12 and set(tokens) <= set(outside)


def test_asked_again_at_the_same_place_it_answers_the_same() -> None:
    """The recorder asks for a few tokens first, then for K_max, with nothing committed in between."""
    engine = make_engine()
    drafter = engine.drafters["hidden"]
    batch, timer = engine.start([request(3)]), PhaseTimer(engine.device)
    for k in (2, 0, 5):
        engine.round(batch, [Action("hidden", k) if k else ROLLBACK], timer)
        few = drafter.propose(batch, [4]).tokens[0].tolist()
        drafter.committed(batch)
        assert drafter.propose(batch, [16]).tokens[0, :4].tolist() == few
        drafter.committed(batch)
