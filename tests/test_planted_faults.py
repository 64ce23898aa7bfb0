"""Planted faults: every one of them makes a check of `checks.py` fail, so those checks can be trusted (T25, E05).

For each fault the check first passes on the code as it is, then must fail, for the reason named.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import count
from typing import Any

import pytest
import torch
from checks import check_cache_lengths, check_distribution, check_exact_text, check_full_acceptance
from helpers import draft_runner, target_runner

from assc import engine as rounds
from assc import verify as rule
from assc.batch import Batch
from assc.drafters.model import ModelDrafter
from assc.kv import ModelRunner
from assc.sampling import Noise

Plant = Callable[[pytest.MonkeyPatch], None]

CHECKS: dict[str, tuple[Callable[[], Any], str]] = {
    "distribution": (check_distribution, "total variation"),
    "distribution, vectorised": (lambda: check_distribution(lazy=False), "total variation"),
    "distribution, one-hot": (lambda: check_distribution("argmax", "plain"), "total variation"),
    "distribution, few tokens": (lambda: check_distribution("few", "plain"), "total variation"),
    "distribution, few tokens, vectorised": (lambda: check_distribution("few", "plain", lazy=False), "total variation"),
    "greedy text": (check_exact_text, "not the plain one"),
    "greedy text, vectorised": (lambda: check_exact_text(lazy=False), "not the plain one"),
    "gumbel text": (lambda: check_exact_text("gumbel"), "not the plain one"),
    "gumbel text, vectorised": (lambda: check_exact_text("gumbel", lazy=False), "not the plain one"),
    "text with a penalty": (lambda: check_exact_text(penalty=1.5), "not the plain one"),
    "full acceptance": (check_full_acceptance, "was rejected"),
    "caches": (lambda: check_cache_lengths(3), "the draft's buffer"),
    "target cache": (lambda: check_cache_lengths(2), "the target's buffers"),
}

FAULTS: list[tuple[str, str, Plant]] = []


def fault(*checks: str) -> Callable[[Plant], Plant]:
    """Register a function that plants one fault; the named checks must each catch it."""

    def add(plant: Plant) -> Plant:
        FAULTS.extend((plant.__name__, check, plant) for check in checks)
        return plant

    return add


@lru_cache(maxsize=len(CHECKS))
def passes_clean(check: str) -> bool:
    CHECKS[check][0]()
    return True


# -- the accept rule and the residual -----------------------------------------------------------------------------


@fault("distribution", "distribution, one-hot")
def always_accept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rule, "accepts", lambda u, p, q: p > 0)


@fault("distribution, vectorised")
def acceptance_number_is_always_small(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Noise, "scalar", lambda *a, **o: 1e-9)


@fault("distribution")
def p_and_q_swapped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rule, "accepts", lambda u, p, q: u * p < q and p > 0)


@fault("distribution")
def accept_if_p_reaches_q(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rule, "accepts", lambda u, p, q: p >= q)


@fault("distribution", "distribution, vectorised", "distribution, one-hot")
def residual_is_p(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rule, "residual", lambda p, q: p)


@fault("distribution")
def residual_removes_the_rejected_token_only(patch: pytest.MonkeyPatch) -> None:
    """E02: p without the drafted token, which is right for one-hot q only."""
    seen: list[float] = []

    def accepts(u: float, p: float, q: float) -> bool:
        seen[:] = [p, q]
        return u * q < p

    def residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        draft = ((p - seen[0]).abs() + (q - seen[1]).abs()).argmin()
        return p.index_fill(0, draft, 0.0)

    patch.setattr(rule, "accepts", accepts)
    patch.setattr(rule, "residual", residual)


@fault("distribution", "distribution, vectorised")
def residual_of_the_wrong_sign(patch: pytest.MonkeyPatch) -> None:
    def residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        rest = (q - p).clamp(min=0) * (p > 0)
        return torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)

    patch.setattr(rule, "residual", residual)


@fault("distribution", "distribution, vectorised")
def residual_is_the_absolute_difference(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rule, "residual", lambda p, q: (p - q).abs() * (p > 0))


# -- the draft's distribution ---------------------------------------------------------------------------------------


def _after_choosing(patch: pytest.MonkeyPatch, change: Callable[..., Any]) -> None:
    inner = ModelDrafter._choose

    def choose(self: Any, batch: Any, row: Any, b: int, j: int, logits: Any, tokens: Any, q: Any) -> Any:
        token = inner(self, batch, row, b, j, logits, tokens, q)
        return token if q is None else change(token, logits, q[b, j])

    patch.setattr(ModelDrafter, "_choose", choose)


@fault("distribution", "distribution, vectorised")
def q_ignores_the_temperature(patch: pytest.MonkeyPatch) -> None:
    """T01, T02: the draft draws after its warpers but reports the raw softmax."""
    _after_choosing(patch, lambda token, logits, q: (q.copy_(logits.softmax(-1)), token)[1])


@fault("distribution")
def draft_takes_its_argmax_and_reports_q(patch: pytest.MonkeyPatch) -> None:
    _after_choosing(patch, lambda token, logits, q: q.argmax())


# -- the noise ------------------------------------------------------------------------------------------------------


@fault("distribution, few tokens", "distribution, few tokens, vectorised")
def gumbel_noise_of_the_target_judged_by_p_over_q(patch: pytest.MonkeyPatch) -> None:
    """The coupled noise of gumbel mode, fed to draft and residual of rejection mode."""
    key = Noise.key
    shared = {"accept": "accept", "draft": "target", "residual": "target"}
    patch.setattr(Noise, "key", lambda self, stream, position, salt=0: key(self, shared[stream], position))


@fault("distribution")
def one_stream_for_draft_and_acceptance(patch: pytest.MonkeyPatch) -> None:
    key = Noise.key
    patch.setattr(Noise, "key", lambda self, stream, position, salt=0: key(self, "draft", position, salt))


@fault("distribution, vectorised")
def the_same_noise_at_every_position(patch: pytest.MonkeyPatch) -> None:
    key = Noise.key
    patch.setattr(Noise, "key", lambda self, stream, position, salt=0: key(self, stream, 0, 0))


@fault("gumbel text", "gumbel text, vectorised")
def noise_by_order_of_the_draws(patch: pytest.MonkeyPatch) -> None:
    """V01: the text of a seed must not depend on how many numbers drafting used up."""
    key, order = Noise.key, count()
    patch.setattr(Noise, "key", lambda self, stream, position, salt=0: key(self, stream, next(order)))


@fault("gumbel text")
def noise_by_position_in_the_block(patch: pytest.MonkeyPatch) -> None:
    judge = rule._verify_lazy

    def verify(context: Any, *rest: Any) -> Any:
        moved = replace(context, length=0, prefix=context.prefix[:, context.length :])
        return judge(moved, *rest)

    patch.setattr(rule, "_verify_lazy", verify)


# -- the accepted run and its prefixes --------------------------------------------------------------------------------


@fault("greedy text, vectorised", "gumbel text, vectorised")
def positions_after_the_first_rejection_count(patch: pytest.MonkeyPatch) -> None:
    """V09: [0, 1, 0, 0] is an accepted run of 0, not of 1."""
    inner = rule._verify_equal

    def verify(context: Any, scores: torch.Tensor, drafted: torch.Tensor) -> Any:
        _, choices = inner(context, scores, drafted)
        return (choices[: drafted.shape[0]] == drafted).long().sum(), torch.cat([drafted, choices[drafted.shape[0] :]])

    patch.setattr(rule, "_verify_equal", verify)


@fault("greedy text", "gumbel text", "distribution")
def one_token_too_many_is_committed(patch: pytest.MonkeyPatch) -> None:
    inner = rounds.Engine._commit

    def commit(self: Any, batch: Any, b: int, verdict: Any, proposal: Any) -> Any:
        tokens = verdict.tokens
        rejected = len(tokens) - 1 < proposal.lengths[b]
        extra = [int(proposal.tokens[b, len(tokens)])] if rejected and len(tokens) < proposal.lengths[b] else []
        return inner(self, batch, b, replace(verdict, tokens=[*tokens, *extra]), proposal)

    patch.setattr(rounds.Engine, "_commit", commit)


@fault("text with a penalty")
def processors_see_the_prefix_of_the_block_start(patch: pytest.MonkeyPatch) -> None:
    """V03: position j of the block must be penalised with the j drafted tokens before it."""
    judge = rule._verify_lazy
    cut = lambda context: replace(context, prefix=context.prefix[:, : context.length])  # noqa: E731
    patch.setattr(rule, "_verify_lazy", lambda context, *rest: judge(cut(context), *rest))


@fault("greedy text", "gumbel text")
def draft_tokens_are_never_checked(patch: pytest.MonkeyPatch) -> None:
    """L05: one path accepts without looking."""

    def verify(context: Any, logits: torch.Tensor, drafted: Sequence[int], q: Any) -> tuple[int, list[int]]:
        return len(drafted), [*drafted, int(logits[-1].argmax())]

    patch.setattr(rule, "_verify_lazy", verify)


# -- the caches -------------------------------------------------------------------------------------------------------


def _committed(patch: pytest.MonkeyPatch, length: Callable[[int, int], int]) -> None:
    """Let `length(slots written, committed tokens)` say what the draft's buffer holds after a round."""

    def committed(self: Any, batch: Batch) -> None:
        self._fed = [length(fed, row.length) for fed, row in zip(self._fed_draft, batch.rows, strict=True)]
        self._reset_round(batch)

    patch.setattr(ModelDrafter, "committed", committed)


@fault("caches")
def draft_cache_keeps_the_rejected_token(patch: pytest.MonkeyPatch) -> None:
    _committed(patch, lambda fed, length: min(fed, length))


@fault("caches")
def draft_cache_trimmed_two_too_many(patch: pytest.MonkeyPatch) -> None:
    _committed(patch, lambda fed, length: max(0, min(fed, length - 1) - 2))


@fault("full acceptance", "caches")
def draft_cache_one_ahead_of_what_was_fed(patch: pytest.MonkeyPatch) -> None:
    """X02: after full acceptance the last draft token is missing, and nobody feeds it."""
    _committed(patch, lambda fed, length: min(fed + 1, length - 1))


@fault("greedy text")
def target_cache_one_behind(patch: pytest.MonkeyPatch) -> None:
    positions = Batch.positions
    patch.setattr(Batch, "positions", lambda self, starts, n: positions(self, [max(0, s - 1) for s in starts], n))


@fault("greedy text")
def all_rows_at_the_position_of_the_first(patch: pytest.MonkeyPatch) -> None:
    """T17: ragged acceptance needs a position per row."""
    positions = Batch.positions
    patch.setattr(Batch, "positions", lambda self, starts, n: positions(self, [starts[0]] * len(starts), n))


@fault("greedy text", "gumbel text", "target cache")
def target_attends_to_the_stale_tail(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(target_runner(), "_hidden", torch.zeros((), dtype=torch.float64))


@fault("full acceptance")
def draft_attends_to_the_stale_tail(patch: pytest.MonkeyPatch) -> None:
    """Output right, acceptance lower (T21, V19): only the draft's mask is broken."""
    init = ModelDrafter.__init__

    def blind(self: Any, runner: ModelRunner, name: str) -> None:
        init(self, ModelRunner(runner.model, probe=False), name)
        self.runner._hidden = torch.zeros((), dtype=torch.float64)

    patch.setattr(ModelDrafter, "__init__", blind)


@pytest.mark.parametrize(("name", "check", "plant"), FAULTS, ids=[f"{name}-{check}" for name, check, _ in FAULTS])
def test_planted_fault_is_caught(name: str, check: str, plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    draft_runner()  # models are built by healthy code
    assert passes_clean(check)
    plant(monkeypatch)
    run, message = CHECKS[check]
    with pytest.raises(AssertionError, match=message):
        run()
