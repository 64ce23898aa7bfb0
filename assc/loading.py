"""From a loaded pair to an engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from assc.drafters.artefact import design_of, read_config
from assc.drafters.base import Drafter
from assc.drafters.hidden import HiddenDrafter
from assc.drafters.layers import load_layers
from assc.drafters.model import ModelDrafter
from assc.drafters.net import load_net
from assc.drafters.ngram import NgramDrafter
from assc.engine import Engine
from assc.kv import ModelRunner

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from assc.pairs import LoadedPair


def build_engine(
    pair: LoadedPair,
    *,
    k_max: int = 16,
    drafters: Sequence[Drafter] | None = None,
    chunks: int = 1,
    unload_after: int | None = None,
) -> Engine:
    """An engine over the pair's target, its draft models and learned drafts (if any) and the n-gram drafter.

    The first drafter is the one that policies without a preference use. `chunks` and `unload_after` are the engine's.
    """
    if drafters is None:
        drafters = [ModelDrafter(ModelRunner(model), name) for name, model in pair.drafts.items()]
        drafters += [learned_drafter(folder, pair.target, name) for name, folder in pair.learned.items()]
        drafters = [*drafters, NgramDrafter()]
    return Engine(
        ModelRunner(pair.target),
        drafters,
        k_max=k_max,
        eos_ids=pair.eos_token_ids,
        tokenizer=pair.tokenizer,
        chunks=chunks,
        unload_after=unload_after,
    )


def learned_drafter(folder: Path, target: PreTrainedModel, name: str = "") -> Drafter:
    """The drafter of a learned draft, by default named after its design. Raises `ArtefactError`."""
    design = design_of(read_config(folder))
    if design == "layers":
        return ModelDrafter(ModelRunner(load_layers(folder, target)), name or design)
    return HiddenDrafter(load_net(folder, target), name or design)
