"""What comes with the package: the trace, its cost model, the learned draft. They fit each other and the workload."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import assc
from assc.drafters.artefact import read_config
from assc.oracle import ladder
from assc.pairs import PAIRS, LoadedPair, packaged_draft
from assc.replay import ReplayBackend
from assc.shipped import COSTS, TRACE, shipped_cost_file, shipped_costs, shipped_trace
from assc.token_texts import list_texts, shipped_texts, text_of_trace
from assc.vector_replay import FlatTrace
from assc.workloads import content_hash, draft_prompts, load_workload

DATA = Path(assc.__file__).parent


def test_the_trace_holds_the_whole_workload_at_three_temperatures() -> None:
    trace, prompts = shipped_trace(), load_workload("mixed")
    header, columns = trace.header, trace.columns
    assert header.temperatures == (0.0, 0.7, 1.0) and header.mode == "gumbel" and header.k_max == 16
    assert trace.drafters == ("hidden", "ngram") and trace.positions >= 100_000
    assert header.workload_hash == content_hash(prompts)
    expected = {(p.id, p.category, p.split, t) for p in prompts for t in header.temperatures}
    found = zip(*(columns[n].tolist() for n in ("id", "category", "split", "temperature")), strict=True)
    assert set(found) == expected and len(trace) == len(expected)
    assert header.recheck_mismatches <= trace.positions // 1000
    assert (DATA / TRACE).stat().st_size < 15e6


def test_the_costs_are_those_of_the_drafters() -> None:
    costs = shipped_cost_file()
    assert set(costs.model.drafters) == set(shipped_trace().drafters) and costs.time_source == "measured"
    assert costs.dtype == shipped_trace().header.dtype and costs.pair == "smollm2"
    assert 0 < costs.model.cost_ratio("hidden") < 0.2 and (DATA / COSTS).is_file()


def test_the_ladder_is_in_order() -> None:
    """Plain < tuned static < best static per request < optimum on the packaged trace."""
    trace = shipped_trace()
    flat = FlatTrace(trace, shipped_costs())
    table = ReplayBackend(trace, shipped_costs()).table
    rungs = ladder(flat, trace.where(split="train"), trace.where(split="held-out"), table)
    assert rungs.tuned is not None
    order = [float(x.sum()) for x in (rungs.plain, rungs.tuned, rungs.best_static, rungs.oracle)]
    assert order == sorted(order, reverse=True) and order[0] > 1.2 * order[1] and order[2] > 1.05 * order[3]


def test_the_draft_learned_from_its_own_prompts_alone() -> None:
    folder = packaged_draft(PAIRS["smollm2"].learned["hidden"])
    config = read_config(folder)
    assert content_hash(draft_prompts("mixed")) in json.dumps(config["data"])
    assert sum(f.stat().st_size for f in folder.iterdir()) < 25e6
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "Acceptance on held-out prompts" in card and "license: apache-2.0" in card
    assert config["head_tokens"] == 8192 and config["licence"] == "Apache-2.0"


def test_acceptance_tells_drafts_from_prompts_that_they_learned() -> None:
    """Why the workload has three parts: greedy answers to the draft's own prompts are accepted far more often."""
    trace = shipped_trace()
    c = trace.columns
    owner = np.repeat(np.arange(len(trace)), np.diff(c["offsets"]))
    first = {
        split: (c["acc/hidden"] > 0)[((c["split"] == split) & (c["temperature"] == 0))[owner]].mean()
        for split in ("draft", "train", "held-out")
    }
    assert first["draft"] > first["held-out"] + 0.1
    assert abs(first["train"] - first["held-out"]) < 0.1 and first["held-out"] > 0.25


@pytest.mark.model
def test_the_draft_is_accepted_live(smollm2: LoadedPair) -> None:
    from assc.decoder import SpeculativeDecoder

    decoder = SpeculativeDecoder.from_pair(smollm2, policy="static:drafter=hidden,k=2")
    assert tuple(decoder.engine.drafters) == ("hidden", "ngram")
    result = decoder.generate("List the planets of the solar system, one per line.", max_new_tokens=32)
    plain = decoder.generate("List the planets of the solar system, one per line.", max_new_tokens=32, policy="ar")
    assert result.tokens == plain.tokens and (result.totals.acceptance_rate or 0) > 0.2


def test_texts_of_tokens_are_known_without_a_model() -> None:
    trace, texts = shipped_trace(), shipped_texts()
    assert set(map(int, list_texts(trace, str))) == set(texts), "another trace than the texts were listed for"
    text_of = text_of_trace(trace.header)
    assert text_of is not None and text_of(10**9) == "<1000000000>"
    row = trace.where(split="held-out", categories=("code",), temperatures=(0.0,))[0]
    start, end = (int(trace.columns["offsets"][i]) for i in (row, row + 1))
    assert "".join(map(text_of, trace.columns["tokens"][start:end].tolist())).isprintable() is False, "no line break"
    assert text_of_trace(replace(trace.header, pair="markov")) is None
    assert text_of_trace(replace(trace.header, models={"target": "another"}, pair="unknown")) is None
