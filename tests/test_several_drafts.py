"""Several loaded drafts: a drafter that was left alone proposes as one that was always on, unloaded or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import CPU, oracle_all
from helpers import request as asked_for
from test_draft_steps import RandomSteps
from test_hidden_drafter import TRIMMED, make_net

import eval as eval_script
from assc.__main__ import main
from assc.batch import Batch
from assc.core import ROLLBACK, Action, Mode, Request
from assc.costs import CostModel, DrafterCost
from assc.decoder import SpeculativeDecoder
from assc.drafters.base import Drafter
from assc.drafters.hidden import HiddenDrafter
from assc.drafters.layers import few_layers
from assc.drafters.merge import merge
from assc.drafters.model import ModelDrafter
from assc.drafters.ngram import NgramDrafter
from assc.engine import Engine
from assc.errors import PairError, RequestError
from assc.kv import ModelRunner
from assc.live import LiveBackend
from assc.pairs import load_pair, named_drafts
from assc.registry import make_policy
from assc.run import run_request
from assc.timing import PhaseTimer
from assc.tiny import tiny_draft, tiny_target

NAMES = ("model", "hidden", "layers", "ngram")


def make_engine(**options: Any) -> Engine:
    """A target and one drafter of each kind, all in float64, with weights of their own."""
    target = tiny_target()
    drafters: list[Drafter] = [
        ModelDrafter(ModelRunner(tiny_draft(target)), "model"),
        HiddenDrafter(make_net(target=target)),
        ModelDrafter(ModelRunner(few_layers(target, (0, 1), TRIMMED)), "layers"),
        NgramDrafter(max_n=3, min_n=1),
    ]
    return Engine(ModelRunner(target), drafters, **options)


def request(mode: str, length: int = 14, budget: int = 28) -> Request:
    return asked_for(length, mode, budget)


def proposals(engine: Engine, batch: Batch, k: int) -> dict[str, list[int]]:
    """What every drafter would propose now."""
    found = {}
    with torch.inference_mode():
        for name, drafter in engine.drafters.items():
            part = drafter.propose(batch, [k])
            found[name] = part.tokens[0, : part.lengths[0]].tolist()
    return found


@pytest.mark.parametrize("unload_after", [None, 1, 3])
@pytest.mark.parametrize("mode", ["greedy", "gumbel"])
@pytest.mark.parametrize("seed", range(2))
def test_a_drafter_left_cold_proposes_as_one_that_was_always_on(
    mode: Mode, seed: int, unload_after: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random switching between four drafters and rollback, beside an engine whose drafters draft in every round."""
    switching, always = make_engine(unload_after=unload_after), make_engine()
    timer, rng = PhaseTimer(CPU), np.random.default_rng(seed)
    batches = [engine.start([request(mode)]) for engine in (switching, always)]
    spoken: list[list[int]] = []

    def listen(*arguments: Any) -> Any:
        proposal = merge(*arguments)
        if arguments[0] is batches[0]:
            spoken.append(proposal.tokens[0, : proposal.lengths[0]].tolist())
        return proposal

    monkeypatch.setattr("assc.engine.merge", listen)
    longest = dict.fromkeys(NAMES, 0)
    while batches[0].rows[0].finish is None:
        k = int(rng.integers(1, 9))
        name = str(rng.choice([*NAMES, "rollback"]))
        action = ROLLBACK if name == "rollback" else Action(name, k)
        if rng.random() < 0.2:
            switching.peek(batches[0], [0])
        room = min(k, batches[1].rows[0].k_limit)
        expected = proposals(always, batches[1], room) if room else {}
        switching.round(batches[0], [action], timer)
        always.round(batches[1], [ROLLBACK], timer)
        while batches[1].rows[0].length < batches[0].rows[0].length:  # the same text token by token
            proposals(always, batches[1], 1)
            always.round(batches[1], [ROLLBACK], timer)
        if not action.rollback and room:
            assert spoken[-1] == expected[name], f"{name} proposes otherwise after a pause"
            longest[name] = max(longest[name], len(spoken[-1]))
    assert batches[0].rows[0].tokens == batches[1].rows[0].tokens
    assert batches[0].rows[0].tokens[14:] == oracle_all([request(mode)])[0]
    assert sum(n > 1 for n in longest.values()) >= 2, f"this schedule shows nothing: {longest}"


def test_decisions_after_each_token_bring_an_unloaded_draft_back() -> None:
    """One engine that unloads after each idle round, one that never does; loads count where another draft is asked."""
    found = []
    for unload_after in (1, None):
        backend, policy = LiveBackend(make_engine(unload_after=unload_after)), RandomSteps(3, NAMES)
        rounds = run_request(backend, request("greedy", budget=60), policy).rounds
        found.append(([(r.action, r.drafted, r.discarded, r.tokens) for r in rounds], policy.seen))
        assert any(r.loads for r in rounds) == (unload_after is not None)
    assert found[0] == found[1]


def test_an_idle_draft_is_unloaded_and_brought_back_in_the_round_that_asks() -> None:
    engine = make_engine(unload_after=2)
    backend = LiveBackend(engine, mode="greedy")
    before = {name: [w.clone() for w in drafter.weights()] for name, drafter in engine.drafters.items()}
    shared = {w.untyped_storage().data_ptr() for w in engine.target.model.parameters()}
    backend.reset(request("greedy", budget=40))
    first = backend.step(Action("model", 2))
    held = {m.name: m for m in engine.pool.memory()}
    assert first.loads == 0 and all(m.loaded for m in held.values()) and held["model"].buffers > 0
    assert held["hidden"].buffers == held["layers"].buffers == 0, "drafts that were never asked hold no buffers"
    own = {name: held[name].parameters for name in NAMES}
    backend.step(Action("ngram", 2))
    backend.step(Action("ngram", 2))
    held = {m.name: m for m in engine.pool.memory()}
    assert [held[n].loaded for n in NAMES] == [False, False, False, True]
    assert held["model"].held == 0 and held["ngram"].parameters == 0
    for name in ("model", "hidden", "layers"):
        gone = [w for w in engine.drafters[name].weights() if not w.numel()]
        assert gone and held[name].parameters >= own[name] > 0
        kept = [w for w in engine.drafters[name].weights() if w.numel()]
        assert all(w.untyped_storage().data_ptr() in shared for w in kept), "only what is the target's stays"
    record = backend.step(Action("hidden", 2))
    assert record.loads == 1 and record.draft_seconds > 0
    assert engine.drafters["hidden"].loaded and not engine.drafters["model"].loaded
    engine.pool.load_all()
    for name, weights in before.items():
        assert all(torch.equal(a, b) for a, b in zip(weights, engine.drafters[name].weights(), strict=True))
    assert engine.pool.take_loads() == ()


def test_weights_that_two_drafts_share_stay_while_one_of_them_is_used() -> None:
    target = tiny_target()
    model = ModelRunner(tiny_draft(target))
    engine = Engine(ModelRunner(target), [ModelDrafter(model, "a"), ModelDrafter(model, "b")], unload_after=1)
    batch, timer = engine.start([request("greedy")]), PhaseTimer(CPU)
    engine.round(batch, [Action("a", 2)], timer)
    assert not engine.drafters["b"].loaded
    (outcome,) = engine.round(batch, [Action("a", 2)], timer)
    assert outcome.drafted == 2


def test_modelled_time_charges_bringing_back() -> None:
    cost = {n: DrafterCost(0.001, per_call=0.0001, per_load=0.5 if n == "model" else 0.0) for n in NAMES}
    engine = make_engine(unload_after=1)
    backend = LiveBackend(engine, cost_model=CostModel(0.02, drafters=cost), time_source="modelled")
    backend.reset(request("greedy"))
    plain = backend.step(Action("model", 2))
    backend.step(Action("ngram", 2))
    again = backend.step(Action("model", 2))
    assert plain.draft_seconds < 0.1 < 0.5 <= again.draft_seconds and again.loads == 1
    assert engine.pool.memory()[0].loaded


@pytest.mark.parametrize("spec", ["cascade", "cascade:m=1,k_model=3,k_ngram=8", "linucb", "bandit:eps", "random"])
def test_policies_choose_between_the_loaded_drafts_live(spec: str) -> None:
    engine = make_engine(unload_after=4)
    backend = LiveBackend(engine, mode="greedy", cost_model=CostModel(0.02), time_source="measured")
    policy, used, loads = make_policy(spec), set(), 0
    for length in (9, 20):
        asked = request("greedy", length, 32)
        episode = run_request(backend, asked, policy)
        assert list(episode.tokens) == oracle_all([asked])[0]
        used |= {r.action.drafter for r in episode.rounds}
        loads += sum(r.loads for r in episode.rounds)
    if spec.startswith("cascade:m=1"):
        assert {"model", "ngram"} <= used, "cascade copies where the text recurs and asks the model elsewhere"
    if spec in ("random", "bandit:eps"):
        assert set(NAMES) <= used


# -- loading and the command lines ------------------------------------------------------------------------------------


def test_drafts_are_named_and_names_do_not_collide(tmp_path: Path) -> None:
    assert named_drafts([]) == {} and named_drafts(["a=x/y", "b=x/y"]) == {"a": "x/y", "b": "x/y"}
    odd = tmp_path / "k=v"
    odd.mkdir()
    assert named_drafts([str(odd)]) == {"model": str(odd)}, "a path that exists is a path"
    with pytest.raises(PairError, match="cannot be called 'model': x has that name already; give it another as NAME=y"):
        named_drafts(["x", "y"])
    with pytest.raises(PairError, match="cannot be called 'ngram': it is the name of the lookup"):
        named_drafts(["ngram=x"])
    with pytest.raises(PairError, match="names no source"):
        named_drafts(["a="])
    pair = load_pair("tiny", draft=["second=tiny:draft"])
    assert list(pair.drafts) == ["model", "second"] and pair.name == "tiny+tiny:draft"
    with pytest.raises(RequestError, match="after 0 rounds without use, allowed is 1 or more"):
        SpeculativeDecoder.from_pair(pair, unload_after=0)


def test_eval_reports_the_memory_of_each_draft(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--pair", "tiny", "--draft", "second=tiny:draft", "--policies", "ar", "static:drafter=second,k=4"]
    words += ["--requests", "2", "--max-new-tokens", "8", "--unload-after", "2", "--json", str(tmp_path / "o.json")]
    assert eval_script.main(words) == 0
    said = capsys.readouterr().out
    assert "drafts in memory" in said and "second" in said and "(unloaded)" in said
    assert eval_script.main([*words[:6], "--unload-after", "0"]) == 2
    assert "--unload-after is 0" in capsys.readouterr().err


def test_doctor_reports_it_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--check", "tiny", "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "MiB parameters + " in said and "MiB buffers" in said
