"""The draft choice report: every bound of every line on made-up measurements, and the command on the tiny pair."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from test_hidden_drafter import TRIMMED, make_net

from assc.__main__ import main
from assc.core import ROLLBACK, Action, RoundRecord
from assc.costs import CostModel, DrafterCost
from assc.drafters.hidden import HiddenDrafter
from assc.drafters.model import ModelDrafter
from assc.drafters.net import save_net
from assc.drafters.ngram import NgramDrafter
from assc.drafts import (
    ByPosition,
    DrafterFacts,
    DrafterMeasured,
    Load,
    Prediction,
    Speedup,
    TargetFacts,
    best,
    playable,
    predict,
)
from assc.drafts_measure import describe, own_parameters
from assc.drafts_report import ALL, Line, Report, judge
from assc.engine import Engine
from assc.kv import ModelRunner
from assc.live import LiveBackend
from assc.loading import build_engine
from assc.roofline import expected_speedup, profile_costs
from assc.run import run_request
from assc.tiny import tiny_draft, tiny_pair, tiny_target
from assc.workloads import load_workload, make_requests, select
from policies.static import StaticK

TARGET = TargetFacts("llama", 1_000_000, 500, 4_000_000, 30_000, 34_000, 256, 16)
COSTS = CostModel(
    0.010,
    target_per_token=0.0004,
    target_per_kv=2e-6,
    drafters={"d": DrafterCost(0.002, per_catch_up=0.0003, per_call=0.0001)},
    overhead=0.0002,
    per_emitted=0.0001,
)


def counts(first: int, *more: int, n: int = 100, proposed: int | None = None) -> ByPosition:
    """`n` rounds that accepted more than 0, 1, … tokens as often as told."""
    accepted = (first, *more)
    return ByPosition((n,) * len(accepted), (n if proposed is None else proposed,) * len(accepted), accepted)


def drafter(**changes: Any) -> DrafterMeasured:
    facts = DrafterFacts("d", "model", "drafts", "llama", 200_000, 500, 1.0, 900_000)
    whole = DrafterMeasured(
        facts=facts,
        k=2,
        first={"a": counts(70)},
        fixed={"a": counts(70, 50)},
        c=0.2,
        predictions=(Prediction(1, 1.7, 0.01, 1.2, False), Prediction(2, 2.2, 0.012, 1.4, False)),
        measured=Speedup(2, 1.3, 1.1, 1.5),
    )
    own = {key: value for key, value in changes.items() if key in DrafterFacts.__dataclass_fields__}
    rest = {key: value for key, value in changes.items() if key not in own}
    return replace(whole, facts=replace(facts, **own), **rest)


def line(item: str, **changes: Any) -> Line:
    (found,) = [entry for entry in judge(TARGET, drafter(**changes)) if entry.item == item]
    return found


@pytest.mark.parametrize(
    ("kind", "parameters", "verdict", "said"),
    [
        ("model", 250_001, "warn", "above 1/4"),
        ("model", 250_000, "pass", "1/4.0"),
        ("model", 100_000, "pass", "1/10.0"),
        ("model", 99_999, "info", "under the recommended 1/10"),
        ("model", 50_000, "info", "above the limit 1/20"),
        ("model", 49_999, "warn", "under 1/20"),
        ("model", 0, "warn", "0 of 1,000,000"),
        ("hidden", 250_001, "warn", "above 1/4"),
        ("hidden", 250_000, "pass", "only the layer's own"),
        ("hidden", 1_000, "pass", "for independent drafts only"),
        ("lookup", None, "info", "not applicable"),
    ],
)
def test_parameter_ratio(kind: str, parameters: int | None, verdict: str, said: str) -> None:
    found = line("parameter ratio", kind=kind, parameters=parameters)
    assert found.verdict == verdict and said in found.reason
    assert found.value == (None if parameters is None else parameters / 1_000_000)


@pytest.mark.parametrize(
    ("changes", "verdict", "said"),
    [
        ({}, "pass", "both llama"),
        ({"family": "gpt2"}, "warn", "the draft is gpt2, the target llama"),
        ({"kind": "hidden", "family": ""}, "pass", "made for this very llama target"),
        ({"kind": "lookup", "family": ""}, "info", "not applicable"),
    ],
)
def test_family(changes: dict[str, Any], verdict: str, said: str) -> None:
    found = line("family", **changes)
    assert found.verdict == verdict and said in found.reason


@pytest.mark.parametrize(
    ("changes", "verdict", "said"),
    [
        ({"token_ids": 500}, "pass", "same tokenizer, common to both are 500 of the target's 500 ids"),
        ({"token_ids": 80, "kind": "hidden", "coverage": 0.9}, "pass", "head cut to 80 of the target's 500 ids; they"),
        ({"token_ids": 80, "kind": "hidden", "coverage": 0.899}, "warn", "89.9% of the target's text, under 90%"),
        ({"token_ids": None, "kind": "lookup"}, "pass", "every one can be proposed"),
    ],
)
def test_tokens(changes: dict[str, Any], verdict: str, said: str) -> None:
    found = line("tokens", **changes)
    assert found.verdict == verdict and said in found.reason and found.value == changes.get("coverage", 1.0)


def test_acceptance_is_judged_by_its_first_token_for_all_and_for_each_category() -> None:
    tables = {
        "first": {"low": counts(65), "high": counts(66)},
        "fixed": {"low": counts(60, 40), "high": counts(66, 34, proposed=80)},
    }
    low, high, every = (line(f"acceptance{end}", **tables) for end in (", low", ", high", ""))
    assert (low.verdict, high.verdict, every.verdict) == ("warn", "pass", "pass")
    assert "first token 0.650 (65/100), at K=2 0.500 (100/200)" in low.reason and "not above" in low.reason
    assert "at K=2 0.625 (100/160)" in high.reason and every.value == pytest.approx(0.655)
    assert "(131/200), at K=2 0.556 (200/360)" in every.reason
    nothing = {"first": {"a": counts(0, proposed=0)}, "fixed": {"a": counts(0, 0, proposed=0)}}
    assert line("acceptance", **nothing).verdict == "info"
    rare = {"first": {"a": counts(8, proposed=10)}, "fixed": {"a": counts(8, 5, proposed=10)}}
    assert "it proposed in 10 of 100 rounds" in line("acceptance", **rare).reason
    assert line("acceptance", **rare).verdict == "pass", "of what it proposed"
    unnamed = judge(TARGET, drafter(first={"": counts(70)}, fixed={"": counts(70, 50)}))
    assert sum(entry.item.startswith("acceptance") for entry in unnamed) == 1


@pytest.mark.parametrize(("c", "verdict"), [(0.7, "warn"), (0.699, "pass")])
def test_c_below_the_first_token_acceptance_per_round(c: float, verdict: str) -> None:
    assert line("c", c=c).verdict == verdict
    lookup = {"first": {"a": counts(35, proposed=40)}, "fixed": {"a": counts(35, 30, proposed=40)}}
    assert line("c", c=c, kind="lookup", **lookup).verdict == "warn", "0.35 per round, however good the proposals are"
    assert line("c", c=c, first={"a": ByPosition()}).verdict == "info"


def test_memory_names_target_draft_and_verification() -> None:
    found = line("memory")
    assert found.verdict == "info" and found.value == 900_000
    for part in ("target 4.0 MB", "draft 900.0 kB", "verification 64.0 kB", "256 slots 30.0 kB", "17 columns 34.0 kB"):
        assert part in found.reason


@pytest.mark.parametrize(("speedup", "verdict"), [(1.0, "warn"), (1.001, "pass")])
def test_best_static_k(speedup: float, verdict: str) -> None:
    guesses = tuple(Prediction(k, 2.0, 0.01, s, k > 2) for k, s in ((1, 0.9), (2, speedup), (4, speedup)))
    found = line("best static K", predictions=guesses)
    assert found.verdict == verdict and found.value == speedup
    assert found.reason.startswith("K=2 of 1, 2, 4:") and "extrapolated" not in found.reason
    later = (*guesses, Prediction(8, 2.0, 0.01, 2.0, True))
    assert "beyond position 2 extrapolated" in line("best static K", predictions=later).reason
    assert best(later).k == 8


@pytest.mark.parametrize(
    ("measured", "verdict"),
    [
        (Speedup(2, 1.0, 0.9, 1.1), "warn"),
        (Speedup(2, 1.01, 1.0, 1.1), "info"),
        (Speedup(2, 1.5, None, None), "info"),
        (Speedup(2, 1.02, 1.01, 1.1), "pass"),
    ],
)
def test_measured_speedup(measured: Speedup, verdict: str) -> None:
    found = line("measured speed-up", measured=measured)
    assert (found.verdict, found.value) == (verdict, measured.value) and f"K=2: {measured.value:.2f}x" in found.reason


META = {
    "pair": "p", "device": "cpu", "dtype": "float64", "threads": 1, "mode": "greedy", "temperature": 0.0, "seed": 3,
    "workload": "w", "split": "held-out", "requests": 4, "max_new_tokens": 9, "cost_model": {"label": "fitted"},
    "same_text": True,
}  # fmt: skip


def test_text_and_json_hold_conditions_lines_and_counts() -> None:
    whole = Report(META, TARGET, (drafter(), drafter(name="slow", measured=Speedup(1, 0.8, 0.7, 0.9))))
    data = json.loads(json.dumps(whole.to_json(), allow_nan=False))
    assert data["meta"] == META and data["target"] == asdict(TARGET) and list(data["drafters"]) == ["d", "slow"]
    one = data["drafters"]["d"]
    assert [entry["item"] for entry in one["lines"]] == [entry.item for entry in judge(TARGET, drafter())]
    assert one["acceptance"]["first_token"][ALL]["rate"] == 0.7 and one["acceptance"]["k=2"]["a"]["accepted"] == [
        70,
        50,
    ]
    assert one["predictions"][1]["speedup"] == 1.4 and one["measured"]["k"] == 2 and one["c"] == 0.2
    text = whole.to_text()
    for part in (
        "pair p, cpu float64, threads 1, mode greedy",
        "workload w (held-out), 4 requests",
        "c = 0.200",
        "seed 3",
    ):
        assert part in text
    assert "measured" in text and "modelled" in text and text.endswith("fastest measured: d with K=2, 1.30x")
    assert "texts differ" not in text and len(whole.lines) == 18
    slow = Report({**META, "same_text": False}, TARGET, (drafter(measured=Speedup(1, 0.8, 0.7, 0.9)),)).to_text()
    assert slow.endswith("fastest measured: plain decoding") and "texts differ" in slow


def rounds_of(accepted: Sequence[int], k: int, keeps: str, prompt: int) -> list[RoundRecord]:
    """Rounds of static `k` with the catch-up that a drafter of this kind really has, round by round."""
    found: list[RoundRecord] = []
    caught = 0 if keeps == "nothing" else prompt - 1
    for i, a in enumerate(accepted):
        found.append(
            RoundRecord(i, 0, Action("d", k), k, a, a + 1, (1,) * (a + 1), 0.0, catch_up=caught, draft_steps=k)
        )
        caught = {"nothing": 0, "drafts": int(a == k), "committed": a}[keeps]
    return found


@pytest.mark.parametrize("keeps", ["nothing", "drafts", "committed"])
def test_the_prediction_of_a_measured_k_is_the_price_of_its_rounds(keeps: Any) -> None:
    """Independent oracle: each round priced on its own. The last round accepts nothing, so nothing is owed to it."""
    k, prompt, kv = 3, 40, 256
    rounds = rounds_of([3, 0, 2, 3, 1, 3, 0], k, keeps, prompt)
    tokens = sum(r.emitted for r in rounds)
    seconds = sum(COSTS.price(r, kv).seconds for r in rounds)
    facts = DrafterFacts("d", "model", keeps)
    found = predict(ByPosition.of(rounds, k), COSTS, facts, Load(prompt, tokens, kv), k)
    assert found.speedup == pytest.approx(tokens * COSTS.plain_step(kv) / seconds, rel=1e-12)
    assert found.tokens == pytest.approx(tokens / len(rounds)) and not found.extrapolated
    assert predict(ByPosition.of(rounds, k), COSTS, facts, Load(prompt, tokens, kv), 4).extrapolated


def test_independent_tokens_are_extrapolated_as_the_closed_form_says() -> None:
    costs = profile_costs("llama-8b-1b-h100")
    alpha = counts(800_000, 640_000, n=1_000_000)
    for k in (1, 2, 4, 16):
        load = Load(1, 50, costs.kv_reference)
        found = predict(alpha, costs, DrafterFacts("ngram", "lookup"), load, k)
        assert found.speedup == pytest.approx(expected_speedup(costs, "ngram", k, 0.8))


def test_counts_by_position_leave_out_what_the_budget_cut() -> None:
    rounds = [
        RoundRecord(0, 0, Action("d", 3), 3, 2, 3, (1,) * 3, 0.0),
        RoundRecord(1, 3, Action("d", 2), 2, 2, 3, (1,) * 3, 0.0),
        RoundRecord(2, 6, Action("d", 1), 0, 0, 1, (1,), 0.0),
        RoundRecord(3, 7, ROLLBACK, 0, 0, 1, (1,), 0.0),
    ]
    found = ByPosition.of(rounds, 3)
    assert found == ByPosition((3, 2, 1), (2, 2, 1), (2, 2, 0))
    assert (found.rounds, found.drafted, found.rate, found.measured) == (3, 5, 4 / 5, 3)
    proposed, accepted = found.shares(3)  # 2/3, then 2/2 and 1/1 of fewer rounds: never above what came before
    assert proposed == [2 / 3] * 3 and accepted == [2 / 3, 2 / 3, 0.0]
    assert found + ByPosition((1,), (1,), (1,)) == ByPosition((4, 2, 1), (3, 2, 1), (3, 2, 0))
    assert ByPosition().shares(2) == ([0.0, 0.0], [0.0, 0.0]) and ByPosition().rate is None
    assert counts(6, n=10, proposed=8).shares(2)[1] == pytest.approx([0.6, 0.6 * 6 / 8])
    assert playable(16, 48)[-1] == 16 and playable(3, 48) == (1, 2, 3) and playable(16, 2) == (1,)


def test_shared_parameters_are_not_the_drafts_own() -> None:
    target = tiny_target()
    assert own_parameters(tiny_draft(target), target) == sum(p.numel() for p in target.parameters())
    net = make_net(target=target)
    assert own_parameters(net, target) == sum(p.numel() for p in net.parameters())
    draft = tiny_draft(target)
    draft.model.embed_tokens.weight = target.model.embed_tokens.weight
    assert own_parameters(draft, target) == own_parameters(target, target) - target.model.embed_tokens.weight.numel()


def test_coverage_is_the_share_of_the_text_that_a_drafter_can_propose() -> None:
    target = tiny_target()
    drafters = [ModelDrafter(ModelRunner(tiny_draft(target, vocab_size=50))), HiddenDrafter(make_net(target=target))]
    engine = Engine(ModelRunner(target), [*drafters, NgramDrafter()])
    text = [3, 8, 49, 50]  # the draft model ends at 49, the head lacks 3 and 8
    model, hidden, ngram = (describe(d, engine, text, 7) for d in engine.drafters.values())
    assert (model.token_ids, model.coverage, model.family) == (50, 0.75, "llama")
    assert (hidden.token_ids, hidden.coverage) == (len(TRIMMED), 0.5)
    assert (ngram.token_ids, ngram.coverage, ngram.parameters, ngram.memory_bytes) == (None, 1.0, None, 7)


WORDS = ["drafts", "--pair", "tiny", "--device", "cpu", "--requests", "2", "--max-new-tokens", "10", "--k-max", "8"]


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The JSON of a run with all three kinds of drafter, and nothing left beside it."""
    folder = tmp_path_factory.mktemp("drafts")
    save_net(folder / "draft", make_net(), {})
    out = folder / "out" / "report.json"
    assert main([*WORDS, "--draft", str(folder / "draft"), "--json", str(out)]) == 0
    assert [path.name for path in out.parent.iterdir()] == ["report.json"]
    data: dict[str, Any] = json.loads(out.read_text())
    return data


def test_the_command_measures_every_drafter(reported: dict[str, Any]) -> None:
    meta = reported["meta"]
    expected = {"pair": "tiny+draft", "device": "cpu", "dtype": "float64", "mode": "greedy", "requests": 2, "seed": 0}
    assert expected.items() <= meta.items() and meta["same_text"] is True and meta["split"] == "held-out"
    assert meta["time"] == {"acceptance": "measured", "speedup": "measured", "c": "modelled", "predictions": "modelled"}
    assert list(reported["drafters"]) == ["model", "hidden", "ngram"] and reported["target"]["k_max"] == 8
    for name, kind in (("model", "model"), ("hidden", "hidden"), ("ngram", "lookup")):
        one = reported["drafters"][name]
        assert one["facts"]["kind"] == kind and set(one["acceptance"]) == {"first_token", "k=4"}
        assert [p["k"] for p in one["predictions"]] == [1, 2, 3, 4, 6, 8] and one["measured"]["value"] > 0
        assert {entry["verdict"] for entry in one["lines"]} <= {"pass", "warn", "info"}
        assert len(one["acceptance"]["first_token"]) == 3 and one["c"] > 0  # two categories and all
    hidden = reported["drafters"]["hidden"]["facts"]
    assert hidden["token_ids"] == len(TRIMMED) and 0.8 < hidden["coverage"] <= 1.0 and hidden["keeps"] == "committed"


def test_acceptance_and_memory_are_those_of_plain_static_runs(reported: dict[str, Any]) -> None:
    pair = tiny_pair()
    prompts = select(load_workload("mixed", "held-out"), 2, 0)
    requests = make_requests(prompts, pair.encode, max_new_tokens=10, seed=0)
    backend = LiveBackend(build_engine(pair, k_max=8))
    for name in ("model", "ngram"):
        for k, key in ((1, "first_token"), (4, "k=4")):
            rounds = [r for one in requests for r in run_request(backend, one, StaticK(k, name)).rounds]
            found = reported["drafters"][name]["acceptance"][key][ALL]
            assert sum(found["proposed"]) == sum(r.drafted for r in rounds)
            assert sum(found["accepted"]) == sum(r.accepted for r in rounds)
    target = reported["target"]
    weights = sum(p.numel() for p in pair.target.parameters())
    assert target["parameters"] == weights and target["weight_bytes"] == 8 * weights
    assert target["kv_bytes"] == 2 * 2 * 2 * 8 * target["slots"] * 8, "k and v, layers, heads, width, slots, float64"
    assert target["logit_bytes"] == 9 * 98 * 8
    model, hidden, ngram = (reported["drafters"][n]["facts"]["memory_bytes"] for n in ("model", "hidden", "ngram"))
    assert model == target["weight_bytes"] + target["kv_bytes"] and ngram == 0
    slots = target["slots"]
    buffers = 2 * 2 * 8 * slots + 2 * slots * 8 + slots * 32  # k and v, rotations, true states
    own = sum(p.numel() for p in make_net().parameters())
    assert hidden == 8 * (own + len(TRIMMED) * 32 + buffers)


def test_sampled_modes_and_a_small_k(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.json"
    small = ["--requests", "1", "--k-max", "1", "--categories", "chat", "--json", str(out)]
    assert main([*WORDS, "--mode", "rejection", "--temperature", "0.7", *small]) == 0
    data = json.loads(out.read_text())
    assert data["meta"]["temperature"] == 0.7 and data["meta"]["same_text"] is None
    assert set(data["drafters"]["model"]["acceptance"]) == {"first_token", "k=1"}
    assert data["drafters"]["model"]["measured"]["low"] is None, "one request gives no interval"
    printed = capsys.readouterr()
    assert "mode rejection, temperature 0.7" in printed.out and "decoding 1 requests" in printed.err


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (["--pair", "nope"], "unknown pair 'nope'"),
        (["--draft", "/no/such/draft"], "/no/such/draft"),
        (["--requests", "0"], "number of requests is 0"),
        (["--requests", "999"], "999 requests were asked for"),
        (["--categories", "poems"], "unknown category 'poems'"),
        (["--workload", "none.jsonl"], "none.jsonl"),
        (["--max-new-tokens", "1"], "--max-new-tokens is 1"),
        (["--k-max", "0"], "K_max is 0"),
        (["--k", "9"], "--k is 9"),
        (["--k", "0"], "--k is 0"),
        (["--k-max", "20", "--k", "10"], "below --max-new-tokens"),
        (["--seed", "-1"], "--seed is -1"),
        (["--temperature", "0.5"], "--mode greedy takes no --temperature"),
        (["--mode", "gumbel", "--temperature", "nan"], "--temperature is nan"),
        (["--mode", "gumbel", "--temperature", "-1"], "--temperature is -1"),
        (["--device", "abacus"], "abacus"),
        (["--dtype", "int3"], "int3"),
        (["--threads", "0"], "threads is 1 or more"),
        (["--json", "/dev/null/x"], "cannot write"),
        (["--kmax", "3"], "--kmax"),
    ],
)
def test_mistakes_are_one_sentence(extra: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, *extra]) == 2
    printed = capsys.readouterr()
    sentences = [entry for entry in printed.err.splitlines() if entry.startswith("error: ")]
    assert printed.out == "" and len(sentences) == 1 and said in sentences[0] and "Traceback" not in printed.err


def test_a_workload_without_held_out_prompts_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text(json.dumps({"id": "a", "prompt": "hello", "split": "train"}))
    assert main([*WORDS, "--workload", str(path)]) == 2
    assert "is held out" in capsys.readouterr().err
