"""What only a CUDA device can show. Skipped elsewhere; `benchmarks/gpu_check.sh` runs them on a one-GPU machine."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from assc.core import ROLLBACK, Action, Request
from assc.drafters.model import ModelDrafter
from assc.drafters.ngram import NgramDrafter
from assc.engine import Engine
from assc.kv import ModelRunner
from assc.sampling import Noise
from assc.timing import PhaseTimer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


def random_llama(seed: int, layers: int, dtype: torch.dtype) -> LlamaForCausalLM:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=4096,
            hidden_size=512,
            intermediate_size=1024,
            num_hidden_layers=layers,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=1024,
            eos_token_id=None,
            bos_token_id=None,
        )
        return LlamaForCausalLM(config).to(device="cuda", dtype=dtype).eval().requires_grad_(False)


def engine_of(dtype: torch.dtype) -> Engine:
    target = ModelRunner(random_llama(0, 4, dtype))
    drafters = [ModelDrafter(ModelRunner(random_llama(1, 1, dtype))), NgramDrafter(), ModelDrafter(target, "self")]
    return Engine(target, drafters)


def decode(engine: Engine, request: Request, schedule: list[tuple[str, int]]) -> tuple[list[int], int, int]:
    batch = engine.start([request])
    timer = PhaseTimer(engine.device)
    drafted = accepted = 0
    while batch.rows[0].finish is None:
        name, k = schedule[batch.rows[0].rounds % len(schedule)]
        outcome = engine.round(batch, [Action(name, k) if k else ROLLBACK], timer)[0]
        drafted, accepted = drafted + outcome.drafted, accepted + outcome.accepted
    return batch.rows[0].tokens, drafted, accepted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("mode", "temperature"), [("greedy", 0.0), ("gumbel", 1.0)])
def test_every_schedule_gives_the_plain_text(dtype: torch.dtype, mode: str, temperature: float) -> None:
    engine = engine_of(dtype)
    choose = random.Random(3)
    for seed in range(4):
        prompt = tuple(choose.randrange(4096) for _ in range(12))
        request = Request(prompt, 48, seed=seed, sampling={"mode": mode, "temperature": temperature})
        plain, _, _ = decode(engine, request, [("ngram", 0)])
        accepted = 0
        for name in ("model", "ngram", "self"):
            schedule = [(name, choose.randrange(17)) for _ in range(7)]
            text, _, a = decode(engine, request, schedule)
            accepted += a
            assert text == plain, (name, schedule)
        assert accepted > 0


def test_a_draft_equal_to_the_target_is_always_accepted() -> None:
    engine = engine_of(torch.float32)
    request = Request((1, 2, 3), 64, sampling={"mode": "greedy"})
    _, drafted, accepted = decode(engine, request, [("self", 5), ("self", 0), ("self", 3)])
    assert drafted == accepted > 0


def test_the_draft_chain_does_not_wait_for_the_host() -> None:
    engine = engine_of(torch.float32)
    batch = engine.start([Request((1, 2, 3, 4), 64, sampling={"mode": "gumbel", "temperature": 1.0})])
    timer = PhaseTimer(engine.device)
    engine.round(batch, [Action("model", 4)], timer)  # warm: the prompt is in the draft's buffers
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.inference_mode():
            proposal = engine.drafters["model"].propose(batch, [6])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert proposal.tokens.shape == (1, 6)


def test_noise_is_the_same_on_cpu_and_cuda() -> None:
    cpu, cuda = Noise(7, 4096), Noise(7, 4096, "cuda")
    key = cpu.key("target", 11)
    assert torch.equal(cpu.uniform(key), cuda.uniform(key).cpu())
