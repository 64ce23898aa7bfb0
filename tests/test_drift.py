"""Streams that switch: what is played, what it is compared with, and whether learners follow."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import FakeBackend

from assc import __main__ as module_main
from assc.core import Request
from assc.costs_io import CostFile, write_costs
from assc.drift import scenarios
from assc.drift.command import Config, learns, study, warmed
from assc.drift.figure import _slim
from assc.drift.measure import jumps, recovery, regret, relative_speed
from assc.drift.scenarios import SCENARIOS, Choice, spoiled
from assc.drift.stream import Played, Reference, draw_stream, play
from assc.errors import TraceError
from assc.leakage import TrainedOn
from assc.markov import MARKOV_COSTS, MarkovSource, Regime
from assc.oracle_policy import OraclePolicy
from assc.registry import make_policy, policy_names
from assc.run import run_request
from assc.trace import DrafterInfo, Trace
from assc.trace_io import write_trace
from assc.vector_replay import FlatTrace, static_seconds
from policies.artefact import save_policy

EASY = Regime(alpha=0.9, ngram=0.95, hit=0.9, entropy=0.3)
HARD = Regime(alpha=0.6, ngram=0.1, hit=0.2, entropy=3.0)


@cache
def trace(tokens: int = 40) -> Trace:
    """Categories a (easy) and b (hard), each at temperatures 0 and 1, for training and held out."""
    source = MarkovSource((EASY, HARD), stay=0.999, eos=0.0, start={"a": 0, "b": 1})
    requests = [
        Request((1, 2, i), tokens, 10 * i + t, f"r{i}", "ab"[i % 2], {"mode": "greedy", "temperature": float(t)})
        for i in range(12)
        for t in (0, 1)
    ]
    made = source.trace(requests)
    splits = np.repeat(["held-out", "train", "train"] * 4, 2)  # both temperatures of a prompt
    return Trace(made.header, {**made.columns, "split": splits}, made.name)


def choice(**changes: Any) -> Choice:
    return replace(Choice(trace(), MARKOV_COSTS, None, 4), **changes)


@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_streams_hold_the_requests_of_their_regimes(name: str) -> None:
    scenario = SCENARIOS[name](choice())
    stops = draw_stream(scenario, 300, 5)
    assert stops == draw_stream(scenario, 300, 5) != draw_stream(scenario, 300, 6)
    assert scenario.order == ((0,) if name == "stationary" else (0, 1, 0, 1))
    for segment, number in enumerate(scenario.order):
        regime = scenario.regimes[number]
        rows = [row for s, row in stops if s == segment]
        assert set(rows) <= set(regime.rows) and 300 <= 40 * len(rows) < 340
        assert len(set(rows)) == min(len(rows), len(regime.rows)), "one is repeated before all were played"
    c = trace().columns
    first, second = scenario.regimes[0], scenario.regimes[-1]
    if name == "categories":
        assert {first.name, second.name} == {"a", "b"} and set(c["category"][list(first.rows)]) == {first.name}
    if name == "temperature":
        assert [set(c["temperature"][list(r.rows)]) for r in (first, second)] == [{0.0}, {1.0}]
    if name == "load":
        assert first.rows == second.rows and (first.occupancy, second.occupancy) == (1 / 32, 1.0)
        assert second.costs.verify(8, 0) > 2 * first.costs.verify(8, 0)


def test_a_spoiled_draft_costs_as_before_and_is_never_right() -> None:
    whole, bad = trace(), spoiled(trace(), "model")
    assert (bad.columns["acc/model"] == 0).all() and (whole.columns["acc/model"] > 0).any()
    for column, values in whole.columns.items():
        if column in ("entropy/model", "top1/model", "margin/model"):
            assert (np.sort(values) == np.sort(bad.columns[column])).all() and (values != bad.columns[column]).any()
        elif column != "acc/model":
            assert (values == bad.columns[column]).all()
    flat = FlatTrace(bad, MARKOV_COSTS)
    _, tokens, rounds, drafted, accepted = static_seconds(flat, range(len(bad)), "model", 4)
    assert (tokens == rounds).all() and drafted.sum() > 0 and accepted.sum() == 0
    scenario = SCENARIOS["bad-draft"](choice())
    references = [Reference(r) for r in scenario.regimes]
    spoiled_name = scenario.regimes[1].name.split()[0]
    assert references[0].best.drafter == spoiled_name != references[1].best.drafter


def test_the_best_action_has_no_regret_and_the_optimum_none_against_itself() -> None:
    scenario = SCENARIOS["temperature"](choice())
    references = [Reference(r) for r in scenario.regimes]
    stops = draw_stream(scenario, 200, 1)
    for number, reference in enumerate(references):
        flat = FlatTrace(trace(), MARKOV_COSTS)
        sums = [static_seconds(flat, reference.regime.rows, a.drafter, a.k)[0].sum() for a in reference.backend.table]
        assert reference.best == reference.backend.table[int(np.argmin(sums))]
        assert reference.best_seconds == pytest.approx(min(sums)) and reference.plain_seconds == pytest.approx(sums[0])
        row = reference.regime.rows[0]
        alone = static_seconds(flat, [row], reference.best.drafter, reference.best.k)[0][0]
        assert reference.clock(row)[-1] == pytest.approx(alone) and (np.diff(reference.clock(row)) > 0).all()
        own = [stop for stop in stops if scenario.order[stop[0]] == number]
        action = reference.best
        static = play(make_policy(f"static:drafter={action.drafter},k={action.k}"), references, scenario.order, own)
        assert regret(static).best == pytest.approx(0.0, abs=1e-9)
        oracle = play(OraclePolicy(reference.backend), [reference] * 2, (0, 0), [(0, row) for _, row in own])
        assert regret(oracle).optimal == pytest.approx(0.0, abs=1e-9)
    curve = regret(play(make_policy("random"), references, scenario.order, stops))
    assert (np.diff(curve.optimal) >= -1e-12).all() and (curve.optimal >= curve.best - 1e-9).all()
    assert curve.tokens[-1] == 40 * len(stops)


def made(speeds: list[float], segment: list[int] | None = None, k: list[int] | None = None) -> Played:
    """Rounds in which the static action is `speeds` times as fast as the policy would have to be."""
    n = len(speeds)
    zero = np.zeros(n)
    return Played(
        np.array(segment or [0] * n), np.ones(n, np.int64), np.ones(n), np.array(speeds), zero,
        np.array(k or [0] * n), np.zeros(n, bool),
    )  # fmt: skip


def test_recovery_by_hand() -> None:
    slow = made([0.5] * 10 + [1.0] * 30)
    # the last 8 rounds: 7 good and one at 0.5 are worth 0.9375, 8 good 1.0
    assert relative_speed([slow], 0, 8)[:4] == pytest.approx([0.5, 0.5, 0.5, 0.5625])
    assert recovery([slow], 0, 8, 0.05) == 18 and recovery([slow], 0, 8, 0.07) == 17
    assert recovery([made([1.0] * 40)], 0, 8, 0.05) == 8
    lucky = made([1.2] * 8 + [0.5] * 60)
    assert recovery([lucky], 0, 8, 0.05) is None, "fast for a while is not recovered"
    assert recovery([made([1.0] * 5)], 0, 8, 0.05) is None
    pooled = [made([0.5] * 4 + [1.0] * 6), made([1.5] * 4 + [1.0] * 20)]
    assert recovery(pooled, 0, 4, 0.0) == 4 and len(relative_speed(pooled, 0, 4)) == 7
    second = made([0.1] * 5 + [1.0] * 5, [0] * 5 + [1] * 5)
    assert recovery([second], 1, 4, 0.05) == 4 and recovery([second], 0, 4, 0.05) is None


def test_jumps_by_hand() -> None:
    assert jumps([made([1.0] * 6, k=[0, 16, 0, 4, 8, 0])], 16) == pytest.approx(3 / 5)
    ends = replace(made([1.0] * 3, k=[0, 16, 0]), last=np.array([True, False, True]))
    assert jumps([ends], 16) == 1.0 and jumps([made([1.0])], 16) == 0.0


LEARNERS = [
    *(
        "bandit:ucb",
        "bandit:ucb,discount=0.98",
        "bandit:ts,window=60",
        "bandit:ts,discount=0.9",
        "bandit:exp3,discount=0.99",
    ),
    *("bandit:eps", "linucb", "linucb:discount=0.99", "lints:discount=0.995", "accept_model", "mdp", "goodput"),
    *("survival", "survival:strata=1,explore=0.5", "survival:explore=0,share=0"),
    *("closed_form", "sglang_ema", "guard(linucb)"),
]


@pytest.mark.parametrize("spec", LEARNERS)
def test_saved_half_way_a_learner_goes_on_as_if_nothing_had_been(spec: str) -> None:
    """State to JSON and back into a new policy in the middle of a stream, shortly after a switch."""
    scenario = SCENARIOS["temperature"](choice())
    references = [Reference(r) for r in scenario.regimes]
    stops = draw_stream(scenario, 160, 2)
    half = next(i for i, (segment, _) in enumerate(stops) if segment == 1) + 2
    policy, again = make_policy(spec, seed=3), make_policy(spec, seed=3)
    play(policy, references, scenario.order, stops[:half])
    again.begin(references[0].backend.table)
    again.load_state_dict(json.loads(json.dumps(policy.state_dict())))
    one, two = (play(p, references, scenario.order, stops[half:]) for p in (policy, again))
    assert (one.k == two.k).all() and (one.seconds == two.seconds).all() and len(np.unique(one.k)) > 1


def test_a_warm_start_is_a_continued_learner() -> None:
    c = choice(split="held-out")
    assert learns(make_policy("bandit:ucb")) and not learns(make_policy("static:4"))
    policy = warmed("bandit:ucb", 4, c, 20)
    assert (
        policy.state_dict()
        == warmed("bandit:ucb", 4, c, 20).state_dict()
        != warmed("bandit:ucb", 5, c, 20).state_dict()
    )
    assert min(policy.arms.sums[str(a)][0] for a in policy.table) >= 1  # type: ignore[attr-defined]
    result = study(Config("stationary", ("ar", "bandit:ucb"), seeds=2, tokens=300, warm=20, split="held-out"), c)
    assert [row["label"] for row in result["policies"]] == ["ar", "bandit:ucb", "bandit:ucb, warm"]
    pytest.importorskip("matplotlib")
    from assc.drift.figure import draw

    assert len(draw(result).axes) == 1, "one regime has no switches to draw"
    stops = draw_stream(SCENARIOS["stationary"](c), 100, 1)
    references = [Reference(SCENARIOS["stationary"](c).regimes[0])]
    cold, warm = (play(p, references, (0,), stops).k[:9].tolist() for p in (make_policy("bandit:ucb"), policy))
    assert cold == [0, 1, 2, 3, 4, 6, 8, 12, 16] != warm, "a cold learner tries every arm of the table in turn"


# -- gear-hunting and never leaving K = 0 ----------------------------------------------------------------------------

STEADY = {"ar", "static", "random", "vllm_table", "cascade"}
"""policies that do not adapt to acceptance"""
EXPLORERS = {"bandit": ["bandit:ucb,discount=0.98", "bandit:ucb,window=60", "bandit:ts,discount=0.98"]}
ADAPTIVE = [
    s for n in policy_names() if n not in STEADY for s in EXPLORERS.get(n, ["guard(goodput)" if n == "guard" else n])
]


def rounds_of(policy: Any, rounds: int, seed: int, **costs: Any) -> list[Any]:
    backend = FakeBackend(drafters=("model",), **costs)
    found: list[Any] = []
    while len(found) < rounds:
        found += run_request(backend, Request((1,), 96, seed=seed + len(found)), policy).rounds
    return found[:rounds]


@pytest.mark.parametrize("spec", [*ADAPTIVE, "bandit:ucb", "bandit:ts"])
def test_no_hunting_between_rollback_and_the_largest_k(spec: str) -> None:
    """Where drafting is worth about as much as rolling back (α 0.5, c 0.45), hardly a jump from K = 0 to K ≥ 8 or back.

    Seeded, so the outcome is fixed here.
    """
    late = rounds_of(make_policy(spec, seed=1), 600, 7, alpha=0.5, c=0.45)[-300:]
    inside = [(a.planned, b.planned) for a, b in pairwise(late) if b.index]
    assert sum(min(pair) == 0 and max(pair) >= 8 for pair in inside) <= 0.03 * len(inside)


@pytest.mark.parametrize("spec", ADAPTIVE)
def test_nobody_stays_at_rollback_when_drafts_become_good(spec: str) -> None:
    """Acceptance 0 for 300 rounds, then 0.9: within 200 rounds it drafts, and it goes on drafting."""
    policy = make_policy(spec, seed=1)
    rounds_of(policy, 300, 3, alpha=0.0, c=0.2)
    after = rounds_of(policy, 400, 9, alpha=0.9, c=0.1)
    assert any(r.accepted >= 2 for r in after[:200])
    assert sum(r.rollback for r in after[-100:]) < 40


def test_a_slim_drawing_keeps_its_labels() -> None:
    assert _slim('<text x="1.234">discount=0.99</text>') == '<text x="1.2">discount=0.99</text>'


# -- the command -----------------------------------------------------------------------------------------------------


def test_the_command_prints_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_trace(trace(), Path("trace.npz"))
    write_costs(CostFile(MARKOV_COSTS), Path("costs.json"))
    words = "drift --scenario bad-draft --policies ar linucb --seeds 2 --tokens 160 --window 20".split()
    words += "--traces trace.npz --cost costs.json --json out.json --svg out.svg --png out.png --split all".split()
    assert module_main.main(words) == 0
    first = capsys.readouterr().out
    assert "| linucb |" in first and "4 segments, 2 streams" in first
    result = json.loads(Path("out.json").read_text())
    assert [s["from_token"] for s in result["segments"]] == [0, 160, 320, 480]
    assert {"sha256", "name"} <= set(result["trace"]) and result["time_source"] == "modelled"
    ar = result["policies"][0]
    assert ar["curve"]["best"][-1] == pytest.approx(ar["regret_best"], abs=1e-3) and ar["regret_best"] > 0
    assert ar["seconds"] - ar["regret_best"] == pytest.approx(  # all policies are compared with the same seconds
        result["policies"][1]["seconds"] - result["policies"][1]["regret_best"]
    )
    assert Path("out.svg").read_text().startswith("<?xml") and Path("out.svg").stat().st_size < 60_000
    assert Path("out.png").read_bytes()[:4] == b"\x89PNG"
    again = [w for w in words if not w.startswith("--png") and w not in ("--svg", "out.svg", "out.png")]
    assert module_main.main(again) == 0 and capsys.readouterr().out == first
    assert json.loads(Path("out.json").read_text()) == result, "the same command gives the same numbers"


def test_what_a_policy_was_trained_on_is_not_played_unmarked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Saved policies (also by their run directory, also inside guard), warm starts and learned drafts."""
    monkeypatch.chdir(tmp_path)
    splits = np.repeat(["held-out", "train", "draft"] * 4, 2)  # two temperatures of a prompt
    whole = Trace(trace().header, {**trace().columns, "split": splits})
    write_trace(whole, Path("trace.npz"))
    write_costs(CostFile(MARKOV_COSTS), Path("costs.json"))
    table = Reference(scenarios.Regime("one", (0,), whole, MARKOV_COSTS)).backend.table
    held, train = (whole.requests(whole.where(split=name)) for name in ("held-out", "train"))
    for name, learned in (("good", train), ("bad", held[:3]), ("silent", None)):
        policy = make_policy("bandit:ucb")
        policy.begin(table)
        Path("runs", name).mkdir(parents=True)
        meta = {} if learned is None else {"trained_on": TrainedOn.of(learned).to_json()}
        save_policy(Path("runs", name, "policy.zip"), policy, table=table, meta=meta)

    def drift(words: str) -> int:
        common = "--scenario stationary --seeds 1 --tokens 60 --traces trace.npz --cost costs.json --json out.json"
        return module_main.main(["drift", *common.split(), *words.split()])

    shared = 4  # two prompts, each at two temperatures
    for spec in ("runs/bad/policy.zip", "runs/bad", "guard(runs/bad)"):
        assert drift(f"--policies runs/good {spec}") == 2
        said = capsys.readouterr().err
        assert f"{spec} was trained on {shared} of the 8 evaluated requests, for example {held[0].id!r}" in said
        assert "--allow-leakage" in said and not Path("out.json").exists()
    assert drift("--policies runs/good runs/bad runs/bad runs/silent --allow-leakage") == 0
    printed, result = capsys.readouterr().out, json.loads(Path("out.json").read_text())
    assert [row["leaked_requests"] for row in result["policies"]] == [0, shared, shared, 0]
    assert f"| runs/bad [LEAKED {shared}] |" in printed and "these rows hold for no others" in printed
    assert "runs/silent does not say what it was trained on" in printed and result["settings"]["allow_leakage"]
    hows = {e["label"]: (e["how"], e["leaked_requests"]) for e in result["leakage"]["policies"]}
    assert hows == {"runs/good": ("trained", 0), "runs/bad": ("trained", shared), "runs/silent": ("unknown", None)}
    assert drift("--policies bandit:ucb --split train") == 0 and "LEAKED" not in capsys.readouterr().out
    assert drift("--policies bandit:ucb --split train --warm 2") == 2
    assert "bandit:ucb, warm was trained on" in capsys.readouterr().err
    assert drift("--policies runs/good --warm 2") == 0 and "LEAKED" not in capsys.readouterr().out
    kinds = (DrafterInfo("model", "hidden", "drafts", confidence=True), whole.header.drafters[1])
    write_trace(Trace(replace(whole.header, drafters=kinds), whole.columns), Path("trace.npz"))
    assert drift("--policies ar --split draft") == 2 and "the draft 'model' was trained" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--scenario weather", "--scenario is 'weather', it must be one of stationary, categories"),
        ("--seeds 0", "--seeds is 0, it must be 1 or more"),
        ("--within 2", "--within is 2.0, it must be within 0..1"),
        ("--svg picture.png", "must end with .svg"),
        ("--traces trace.npz", "--traces and --cost go together"),
        ("--policies poem", "unknown policy 'poem'"),
        ("--scenario categories --categories poems chat", "has no category 'poems', only 'chat'"),
    ],
)
def test_mistakes_are_one_sentence(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert module_main.main(["drift", *words.split()]) == 2
    assert said in capsys.readouterr().err


def test_scenarios_that_a_trace_cannot_show_are_refused() -> None:
    rows = trace().where(temperatures=[0.0])
    cold = replace(choice(), trace=trace().select(rows))
    with pytest.raises(TraceError, match="one temperature"):
        SCENARIOS["temperature"](cold)
    with pytest.raises(TraceError, match="two categories"):
        SCENARIOS["categories"](replace(choice(), trace=trace().select(trace().where(categories=["a"]))))


def test_step_policies_decide_in_streams_too() -> None:
    """Seconds of a stream are those of `run_request`, also of a policy that decides after each drafted token."""
    row = 0
    reference = Reference(scenarios.Regime("one", (row,), trace(), MARKOV_COSTS))
    spent = play(make_policy("svip"), [reference], [0], [(0, row)]).seconds.sum()
    alone = run_request(reference.backend, reference.requests[row], make_policy("svip"))
    assert spent == pytest.approx(sum(r.seconds for r in alone.rounds), rel=1e-12)
    planned = {r.planned for r in alone.rounds if r.planned}
    assert len(planned) > 1, "it stopped at different lengths"
