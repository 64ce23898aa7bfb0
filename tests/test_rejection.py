"""Rejection and gumbel decoding have the target's distribution (invariant 2): enumerated exactly, and sampled.

The enumeration turns the acceptance noise like a dial through the real `verify`, so it sees errors of 1e-12. The
sampled checks run the whole decoder; `checks.allowed_variation` states their odds of a false alarm (1e-9 each).
Guarded faults: T01, T02, V04, V06, E02, E05, X04, L02.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from checks import (
    DRAFT_TABLE,
    SAMPLED,
    START,
    TARGET_TABLE,
    V,
    check_distribution,
    exact,
    sampled,
    table_drafter,
)
from helpers import TableRunner

from assc import verify as rule
from assc.batch import Batch
from assc.core import Request
from assc.drafters import model as drafting
from assc.engine import Engine
from assc.sampling import LogitsChain, Noise, SamplingParams
from assc.verify import VerifyContext, accepts, residual, sample, verify

LAZY = pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "vectorised"])


# -- exact enumeration through verify -----------------------------------------------------------------------------


class Dial(Noise):
    """Noise whose acceptance numbers are set by hand, by position."""

    u: dict[int, float]

    def scalar(self, stream: str, position: int, salt: int = 0) -> float:
        return self.u[position] if stream == "accept" else super().scalar(stream, position, salt)


class Enumeration:
    """Runs `verify` on one block and tells acceptance odds and the weights of the token that follows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, sampling: dict[str, float], lazy: bool, length: int) -> None:
        self.noise, self.lazy, self.length = Dial(0, V), lazy, length
        self.weights = torch.empty(0)
        params = SamplingParams(mode="rejection", **sampling)  # type: ignore[arg-type]
        chain = LogitsChain.build(params, prompt_length=1, eos_ids=())
        self.context = VerifyContext(params, chain, self.noise, torch.zeros(1, 32, dtype=torch.long), length, 0)

        def record(weights: torch.Tensor, gumbel: torch.Tensor) -> torch.Tensor:
            self.weights = weights.reshape(-1).double()
            return sample(weights, gumbel)

        monkeypatch.setattr(rule, "sample", record)

    def run(self, logits: np.ndarray, drafted: list[int], q: np.ndarray | None, u: list[float]) -> int:
        self.noise.u = {self.length + j: value for j, value in enumerate(u)}
        dense = None if q is None else torch.tensor(q)
        block = torch.tensor(drafted, dtype=torch.long)
        accepted, _ = verify(self.context, torch.tensor(logits), block, dense, lazy=self.lazy)
        return int(accepted)

    def following(self) -> np.ndarray:
        """The distribution from which the last run drew its correction or bonus."""
        return (self.weights / self.weights.sum()).numpy()

    def output(self, logits: np.ndarray, before: list[int], q: np.ndarray, one_hot: bool) -> np.ndarray:
        """The exact distribution of the token at position len(before), drafts there drawn from the last row of q."""
        j, out = len(before), np.zeros(V)
        always = [1e-300] * j
        for x in np.flatnonzero(q[j]):
            given = None if one_hot else q
            low, high = 0.0, 1.0  # the draft is accepted for u below the threshold
            for _ in range(50):
                middle = (low + high) / 2
                hit = self.run(logits, [*before, int(x)], given, [*always, middle]) > j
                low, high = (middle, high) if hit else (low, middle)
            out[x] += q[j, x] * low
            if low < 1 - 1e-12:
                assert self.run(logits, [*before, int(x)], given, [*always, high]) == j
                out += q[j, x] * (1 - low) * self.following()
        return out


@LAZY
@pytest.mark.parametrize("sampling", ["plain", "cold", "top_k", "top_p", "min_p", "all"])
def test_e02_accept_and_residual_paths_sum_to_the_target(
    sampling: str, lazy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Σ over drafts, accepted or replaced, == p to 1e-12, at the first and the second position of a block."""
    enumeration = Enumeration(monkeypatch, SAMPLED[sampling], lazy, length=5)
    p, q = exact(TARGET_TABLE, SAMPLED[sampling]), exact(DRAFT_TABLE, SAMPLED[sampling])
    for row in (0, 3):
        one = enumeration.output(TARGET_TABLE[[row, 1]], [], q[[row]], one_hot=False)
        np.testing.assert_allclose(one, p[row], rtol=0, atol=1e-12)
        first = int(q[row].argmax())
        if p[row, first] > 0:
            two = enumeration.output(TARGET_TABLE[[row, first, 0]], [first], q[[row, first]], one_hot=False)
            np.testing.assert_allclose(two, p[first], rtol=0, atol=1e-12)
        # a drafter without probabilities: whatever it proposes, the output is p
        for x in (0, 5):
            hot = np.eye(V)[[x]]
            np.testing.assert_allclose(
                enumeration.output(TARGET_TABLE[[row, x]], [], hot, one_hot=True), p[row], rtol=0, atol=1e-12
            )


@LAZY
@pytest.mark.parametrize(
    ("p", "q"),
    [
        ([0.3, 0.5, 0.2, 0, 0, 0, 0, 0], [0.3, 0.5, 0.2, 0, 0, 0, 0, 0]),
        ([0.125] * 8, [0.125] * 8),
        ([0.3, 0.5, 0.2, 0, 0, 0, 0, 0], [0, 0, 0, 0.5, 0.5, 0, 0, 0]),
        ([0.3, 0.5, 0.2, 0, 0, 0, 0, 0], [0.9, 0, 0.1, 0, 0, 0, 0, 0]),
        ([1, 0, 0, 0, 0, 0, 0, 0], [0.01] * 7 + [0.93]),
        ([0.2, 0.2, 0.2, 0.2, 0.2, 0, 0, 0], [1e-12, 1 - 1e-12, 0, 0, 0, 0, 0, 0]),
    ],
    ids=["equal", "uniform", "disjoint", "q-zero-where-p-positive", "certain-target", "nearly-one-hot-q"],
)
def test_e02_special_cases(p: list[float], q: list[float], lazy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    enumeration = Enumeration(monkeypatch, {"temperature": 1.0}, lazy, length=5)
    with np.errstate(divide="ignore"):
        logits = np.log(np.array([p, p]))
    out = enumeration.output(logits, [], np.array([q]), one_hot=False)
    np.testing.assert_allclose(out, p, rtol=0, atol=1e-12)
    if p == q:
        assert all(enumeration.run(logits, [x], np.array([q]), [1 - 1e-12]) == 1 for x in np.flatnonzero(p))


@LAZY
def test_full_acceptance_draws_the_bonus_from_the_target(lazy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    enumeration = Enumeration(monkeypatch, SAMPLED["all"], lazy, length=5)
    p, q = exact(TARGET_TABLE, SAMPLED["all"]), exact(DRAFT_TABLE, SAMPLED["all"])
    a, b = int(p[0].argmax()), int(p[int(p[0].argmax())].argmax())
    for drafted in ([], [a], [a, b]):
        rows = [0, *drafted]
        assert enumeration.run(TARGET_TABLE[rows], drafted, q[rows[:-1]], [1e-300] * len(drafted)) == len(drafted)
        np.testing.assert_allclose(enumeration.following(), p[rows[-1]], rtol=0, atol=1e-12)


def test_e02_residual_and_accept_rule_by_hand() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2, 0.0]).double(), torch.tensor([0.2, 0.6, 0.1, 0.1]).double()
    assert residual(p, q).tolist() == pytest.approx([0.3, 0.0, 0.1, 0.0])
    assert residual(p, p).tolist() == p.tolist()  # nothing remains: p itself
    assert accepts(0.49, 0.3, 0.6) and not accepts(0.51, 0.3, 0.6)
    assert accepts(1 - 2**-53, 0.3, 0.3) and accepts(1 - 2**-53, 0.9, 0.3)
    assert not accepts(2**-53, 0.0, 0.3)  # p = 0 is never accepted, whatever u
    assert not accepts(0.5, 0.0, 0.0)  # nor if a drafter claims never to propose it


@LAZY
@pytest.mark.parametrize("mode", ["greedy", "rejection", "gumbel"])
def test_x04_l02_temperature_zero_takes_the_most_probable_token(mode: str, lazy: bool) -> None:
    """p(a)=.3, p(b)=.5, q(a)=.2: 'accept if p >= q' would emit a. Temperature 0 and 1e-8 are greedy."""
    for temperature in (0.0, 1e-8) if mode != "greedy" else (0.0,):
        params = SamplingParams(mode=mode, temperature=temperature)  # type: ignore[arg-type]
        logits = torch.tensor([[0.3, 0.5, 0.2], [0.1, 0.1, 0.8]]).double().log()
        chain = LogitsChain.build(params, prompt_length=1, eos_ids=())
        context = VerifyContext(params, chain, None, torch.zeros(1, 8, dtype=torch.long), 1, 0)
        q = torch.tensor([[0.2, 0.7, 0.1]]).double()
        for drafted, expected in (([0], [1]), ([1], [1, 2])):
            accepted, tokens = verify(context, logits, torch.tensor(drafted), q, lazy=lazy)
            assert [int(t) for t in tokens[: int(accepted) + 1]] == expected


# -- what the drafter reports ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dense", "trimmed"])
@pytest.mark.parametrize("sampling", SAMPLED)
def test_t01_t02_reported_q_is_what_the_draft_was_drawn_from(
    kind: str, sampling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit, and equal to the processed distribution of the draft's own table."""
    drawn: list[torch.Tensor] = []
    monkeypatch.setattr(drafting, "sample", lambda p, g: (drawn.append(p.clone()), sample(p, g))[1])
    drafter, target = table_drafter(kind), TableRunner(torch.tensor(TARGET_TABLE))
    engine = Engine(target, [drafter])  # type: ignore[arg-type]
    options = {"mode": "rejection", **SAMPLED[sampling]}
    batch: Batch = engine.start([Request(START, 9, seed=s, sampling=options) for s in range(4)])
    size = 6 if kind == "trimmed" else V
    proposal = drafter.propose(batch, [3] * 4)
    assert proposal.q is not None and len(drawn) == 12
    expected = exact(DRAFT_TABLE[:size, :size], SAMPLED[sampling])
    for j in range(3):
        for b in range(4):
            q, weights = proposal.q[b, j], drawn[4 * j + b]
            assert torch.equal(q, weights) and not q[size:].any()
            last = int(proposal.tokens[b, j - 1]) if j else START[-1]
            np.testing.assert_allclose(q[:size].numpy(), expected[last], rtol=0, atol=1e-12)


# -- sampled through the whole decoder ----------------------------------------------------------------------------


def test_first_two_tokens_have_the_exact_distribution() -> None:
    """20,000 requests of two tokens, K = 1 (the budget's limit): accepted + bonus, or corrected + plain round."""
    check_distribution("dense", "cool", rows=20_000, length=2)


@pytest.mark.parametrize(("drafter", "lazy"), [("dense", False), ("ngram", True)])
def test_twenty_thousand_successive_tokens_have_the_exact_distribution(drafter: str, lazy: bool) -> None:
    check_distribution(drafter, "plain", lazy=lazy, rows=250, length=80)


CASES = [
    ("dense", "hot", "3", True),
    ("dense", "cold", "random", False),
    ("dense", "top_k", "3", False),
    ("dense", "top_p", "2", True),
    ("dense", "min_p", "3", False),
    ("dense", "all", "random", True),
    ("trimmed", "plain", "2", True),
    ("trimmed", "top_p", "3", False),
    ("argmax", "plain", "3", True),
    ("argmax", "top_k", "2", False),
    ("ngram", "cold", "3", True),
    ("ngram", "min_p", "random", False),
]


@pytest.mark.parametrize(("drafter", "sampling", "schedule", "lazy"), CASES, ids=["-".join(map(str, c)) for c in CASES])
def test_successive_tokens_have_the_exact_distribution(drafter: str, sampling: str, schedule: str, lazy: bool) -> None:
    """6,000 transitions each."""
    check_distribution(drafter, sampling, lazy=lazy, schedule=schedule, rows=100, length=60)


@pytest.mark.parametrize("drafter", ["dense", "trimmed", "ngram"])
@pytest.mark.parametrize("sampling", SAMPLED)
def test_lazy_and_vectorised_verification_draw_the_same_tokens(drafter: str, sampling: str) -> None:
    lazy, other = (sampled(drafter, sampling, lazy=z, schedule="random", rows=3, length=40) for z in (True, False))
    assert lazy == other and any(row.accepted for row in lazy)


@pytest.mark.parametrize("sampling", ["plain", "all"])
def test_plain_sampling_has_the_exact_distribution(sampling: str) -> None:
    check_distribution("dense", sampling, schedule="0", rows=150, length=60)


@pytest.mark.parametrize(("drafter", "lazy"), [("dense", True), ("trimmed", False), ("ngram", True)])
def test_gumbel_mode_has_the_exact_distribution_too(drafter: str, lazy: bool) -> None:
    check_distribution(drafter, "cool", mode="gumbel", lazy=lazy, rows=100, length=60)


def test_rejection_accepts_more_than_gumbel_and_no_more_than_the_overlap_allows() -> None:
    """At K = 1 the acceptance rate of p/q is E Σ min(p, q), the largest possible (coupling inequality)."""
    p, q = exact(TARGET_TABLE, SAMPLED["cool"]), exact(DRAFT_TABLE, SAMPLED["cool"])
    overlap = np.minimum(p, q).sum(-1)
    found: dict[str, Any] = {}
    for mode in ("rejection", "gumbel"):
        found[mode] = check_distribution("dense", "cool", mode=mode, schedule="1", rows=100, length=60)
    # pooled over roughly 4,000 rounds: the standard deviation of either rate is below 0.008
    assert found["gumbel"] < found["rejection"] < overlap.max()
    assert found["rejection"] > overlap.min()
