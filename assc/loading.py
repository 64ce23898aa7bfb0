"""From a loaded pair to an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from assc.drafters.base import Drafter
from assc.drafters.hidden import HiddenDrafter
from assc.drafters.model import ModelDrafter
from assc.drafters.net import load_net
from assc.drafters.ngram import NgramDrafter
from assc.engine import Engine
from assc.kv import ModelRunner

if TYPE_CHECKING:
    from assc.pairs import LoadedPair


def build_engine(pair: LoadedPair, *, k_max: int = 16, drafters: Sequence[Drafter] | None = None) -> Engine:
    """An engine over the pair's target, its draft models and learned drafts (if any) and the n-gram drafter.

    The first drafter is the one that policies without a preference use.
    """
    if drafters is None:
        drafters = [ModelDrafter(ModelRunner(model), name) for name, model in pair.drafts.items()]
        drafters += [HiddenDrafter(load_net(folder, pair.target), name) for name, folder in pair.learned.items()]
        drafters = [*drafters, NgramDrafter()]
    return Engine(ModelRunner(pair.target), drafters, k_max=k_max, eos_ids=pair.eos_token_ids, tokenizer=pair.tokenizer)
