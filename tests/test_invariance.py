"""Same text in bfloat16 too: over static buffers the logits of a position do not depend on the K schedule, bit for bit.

That is a property of the device's kernels, so these tests say whether it holds where they run. Where it does not,
`Engine(fixed_width=True)` makes all rounds one shape. Exact by construction only in that sense: see DESIGN.md.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers import Saboteur, SchedulePolicy, schedule_of

from assc.core import Policy, Request
from assc.drafters.base import Drafter
from assc.drafters.model import ModelDrafter
from assc.drafters.ngram import NgramDrafter
from assc.engine import Engine
from assc.kv import ModelRunner, bucket_length
from assc.live import LiveBackend
from assc.pairs import LoadedPair
from assc.registry import make_policy
from assc.run import run_request
from assc.tiny import tiny_draft, tiny_target
from assc.workloads import load_workload

ADVICE = "the kernels of this device give other bits for another block width: decode with fixed_width=True"


@pytest.fixture(scope="module")
def small() -> Any:
    """A random Llama in bfloat16, larger than `tiny`."""
    return tiny_target(
        layers=3, dtype=torch.bfloat16, hidden_size=128, intermediate_size=256, num_attention_heads=4, vocab_size=400
    )


def logits_by_schedule(
    runner: ModelRunner, text: Sequence[int], start: int, schedule: Any, seed: int, width: int = 0
) -> torch.Tensor:
    """Logits after each position of `text` from `start` on, fed in blocks of K + 1 with rejected tails.

    Of a block a random part is right; the rest are wrong tokens whose keys stay in the buffers until overwritten.
    `width` pads every block.
    """
    draw, kept = random.Random(seed), []
    cache = runner.new_cache(1, bucket_length(len(text)))
    runner.prefill(cache, torch.tensor([text[:start]]))
    while start < len(text):
        k = min(next(schedule), len(text) - 1 - start)
        right = draw.randint(0, k)
        block = list(text[start : start + right + 1])
        block += [draw.randrange(runner.vocab_size) for _ in range(max(k, width) - right)]
        positions = torch.arange(start, start + len(block))[None].clamp(max=cache.length - 1)
        logits = runner.forward(cache, torch.tensor([block]), positions)[0]
        kept.append(logits[: right + 1])
        start += right + 1
    return torch.cat(kept)


def check_bitwise(
    runner: ModelRunner, text: Sequence[int], start: int, schedules: Sequence[Any], widths: Sequence[int] = (0, 16)
) -> None:
    for width in widths:
        plain = logits_by_schedule(runner, text, start, schedule_of("0"), 0, width)
        assert plain.shape[0] == len(text) - start and plain.isfinite().all()
        for seed, schedule in enumerate(schedules):
            other = logits_by_schedule(runner, text, start, schedule_of(schedule, seed), seed, width)
            assert torch.equal(plain, other), (
                f"K schedule {schedule}, padded to {width}: logits differ by {(plain - other).abs().max()}; {ADVICE}"
            )


@pytest.mark.parametrize("start", [1, 20, 150])
def test_logits_are_bitwise_equal_across_schedules_on_a_small_model(small: Any, start: int) -> None:
    draw = random.Random(start)
    text = [draw.randrange(small.config.vocab_size) for _ in range(start + 50)]
    check_bitwise(ModelRunner(small), text, start, ["1", "2", "5", "16", *["random"] * 4])


def texts(engine: Engine, requests: Sequence[Request], policies: Sequence[Policy], mode: Any) -> list[list[int]]:
    """One text per (policy, request), all of them through the public loop; the first policy decodes plainly."""
    backend = LiveBackend(engine, mode=mode)
    found, accepted = [], 0
    for policy in policies:
        for request in requests:
            episode = run_request(backend, request, policy)
            found.append([t for r in episode.rounds for t in r.tokens])
            accepted += sum(r.accepted for r in episode.rounds)
    assert accepted > 0
    return found


def check_same_text(
    runner: ModelRunner, drafters: Sequence[Drafter], requests: Sequence[Request], mode: Any, policies: Sequence[Policy]
) -> None:
    """Policies, and K schedules over a drafter that is right now and then, all emit what plain decoding emits."""
    engine = Engine(runner, drafters)
    n = len(requests)
    found = texts(engine, requests, [make_policy("ar"), *policies], mode)
    plain = found[:n]
    assert found == plain * (len(found) // n), ADVICE
    draw = random.Random(1)
    known = dict(zip([r.prompt_ids for r in requests], plain, strict=True))
    longest = max(r.max_new_tokens for r in requests)
    knowing = Saboteur({p: [*t, *[0] * longest] for p, t in known.items()}, right=lambda b, n: draw.randint(0, 8))
    found = texts(Engine(runner, [knowing]), requests, [SchedulePolicy("draft", k) for k in ("random", "5")], mode)
    assert found == plain * 2, ADVICE


SAMPLING: dict[str, dict[str, Any]] = {"greedy": {}, "gumbel": {"temperature": 0.8, "top_p": 0.95}}


@pytest.mark.parametrize("mode", SAMPLING)
def test_same_text_on_a_small_model(small: Any, mode: str) -> None:
    target, draft = ModelRunner(small), ModelRunner(tiny_draft(small, noise=0.05))
    requests = [
        Request(tuple(random.Random(n).randrange(400) for _ in range(n)), 24, seed=n, sampling=SAMPLING[mode])
        for n in (1, 17, 90)
    ]
    specs = ["static:1", "static:16", "assc", "bandit:ucb", "random"]
    drafters = [ModelDrafter(draft), NgramDrafter(min_n=1)]
    check_same_text(target, drafters, requests, mode, [make_policy(s) for s in specs])


# -- the real model -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real(smollm2: LoadedPair) -> ModelRunner:
    return ModelRunner(smollm2.target)


def test_logits_are_bitwise_equal_across_schedules_on_smollm2(smollm2: LoadedPair, real: ModelRunner) -> None:
    text = smollm2.encode("Rewrite the sentence in the passive voice: The committee has approved the new budget. " * 3)
    check_bitwise(real, text[:60], 40, ["5", "random", "random"], widths=(0,))
    check_bitwise(real, text[:46], 40, ["random"], widths=(16,))


@pytest.mark.parametrize("mode", SAMPLING)
def test_same_text_on_smollm2(smollm2: LoadedPair, real: ModelRunner, mode: str) -> None:
    prompts = [p for p in load_workload("mixed", "held-out") if p.category in ("editing", "chat")]
    shortest = sorted(prompts, key=lambda p: len(p.prompt))[:3]
    requests = [Request(smollm2.encode(p.prompt), 20, seed=n, sampling=SAMPLING[mode]) for n, p in enumerate(shortest)]
    policies = [make_policy("static:6"), make_policy("assc")]
    check_same_text(real, [NgramDrafter(min_n=1)], requests, mode, policies)
