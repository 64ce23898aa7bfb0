"""The draft on hidden states replays as it plays: what it proposes depends on the committed text alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("assc.drafters.hidden")

from test_hidden_drafter import make_net, request
from test_replay import ALL, FREE, same

from assc.core import ROLLBACK, Action
from assc.costs import CostModel, DrafterCost
from assc.drafters.hidden import HiddenDrafter
from assc.drafters.ngram import NgramDrafter
from assc.engine import Engine
from assc.kv import ModelRunner
from assc.live import LiveBackend
from assc.observe import Featurizer
from assc.record import header_of
from assc.recorder import KnownText, record_request
from assc.replay import ReplayBackend
from assc.tiny import tiny_target
from assc.trace_build import build_trace

COSTS = CostModel(
    target_fixed=0.02,
    target_per_token=0.0003,
    target_per_kv=1e-6,
    drafters={"hidden": DrafterCost(0.002, 0.0004, 0.0005), "ngram": DrafterCost(0.0, per_call=1e-4)},
    overhead=0.0007,
)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("needs", [FREE, ALL], ids=["free", "peeked"])
def test_replay_is_live_with_the_hidden_drafter(temperature: float, needs: Featurizer) -> None:
    target = tiny_target()
    drafters = [HiddenDrafter(make_net(target=target)), NgramDrafter()]
    engine = Engine(ModelRunner(target), drafters, eos_ids=())
    live = LiveBackend(engine, mode="gumbel", cost_model=COSTS, time_source="modelled")
    header = header_of(engine, mode="gumbel", max_new_tokens=30)
    for seed in range(4):
        asked = replace(request(seed, n=30, mode="gumbel", temperature=temperature), id=str(seed))
        replayed = ReplayBackend(build_trace(header, [(asked, "train", *record_request(engine, asked))]), COSTS)
        live.reset(asked)
        replayed.reset(asked)
        rng = np.random.default_rng(seed)
        while not live.done:
            assert (ALL(live.observe(needs.needs)) == ALL(replayed.observe(needs.needs))).all()
            k = int(rng.integers(0, 17))
            action = Action(("hidden", "ngram")[rng.integers(2)], k) if k else ROLLBACK
            same(live.step(action), replayed.step(action))
        assert replayed.done


def test_a_known_text_gives_the_same_recording() -> None:
    """Read in blocks instead of decoded: the layer sees the same true states."""
    target = tiny_target()
    engine = Engine(ModelRunner(target), [HiddenDrafter(make_net(target=target)), NgramDrafter()], eos_ids=())
    for seed, heat in ((0, 0.0), (1, 0.8)):
        asked = request(seed, n=30, mode="gumbel", temperature=heat)
        decoded, _ = record_request(engine, asked)
        known = KnownText(tuple(decoded["tokens"].tolist()), decoded["finish"])
        read, mismatches = record_request(engine, asked, known)
        assert mismatches == 0 and read.keys() == decoded.keys()
        for name, column in decoded.items():
            assert np.allclose(read[name], column, rtol=0, atol=0 if np.asarray(column).dtype.kind == "i" else 1e-6), (
                name
            )
    assert decoded["acc/hidden"].max() > 0
