"""`eval.py --policy-seeds`: one row pooled over seeds, an order of requests for each, artefacts by seed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import FakeBackend, FixedPolicy, fake_requests

import eval as eval_cli
from assc.core import Policy
from assc.costs_io import CostFile, write_costs
from assc.errors import AsscError
from assc.evaluate import evaluate, request_order
from assc.markov import MARKOV_COSTS, MarkovSource, markov_requests
from assc.policy_files import seed_files
from assc.registry import make_policy
from assc.replay import ReplayBackend
from assc.report.join import read_report
from assc.results import EvaluationInterrupted, RequestResult
from assc.stats import speedup_interval
from assc.tables import parts_of
from assc.trace_io import write_trace
from policies.artefact import save_policy

Evaluate = Callable[..., dict[str, Any]]
SPECS = ("ar", "static:tuned", "assc", "bandit:ts", "linucb", "random", "oracle")


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    requests = [replace(r, category="ab"[i % 2]) for i, r in enumerate(markov_requests(36, max_new_tokens=40))]
    write_trace(MarkovSource().trace(requests), tmp_path / "trace.npz")
    write_costs(CostFile(MARKOV_COSTS), tmp_path / "costs.json")
    return ["--backend", "replay", "--traces", str(tmp_path / "trace.npz"), "--cost", str(tmp_path / "costs.json")]


@pytest.fixture
def result(files: list[str], tmp_path: Path) -> Evaluate:
    def run(*words: object) -> dict[str, Any]:
        out = tmp_path / "out.json"
        assert eval_cli.main([*files, *map(str, words), "--json", str(out)]) == 0
        loaded: dict[str, Any] = json.loads(out.read_text())
        return loaded

    return run


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert eval_cli.main(words) == 2
    (sentence,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error: ")]
    return sentence


def played(found: dict[str, Any], row: int, seed: int) -> list[dict[str, Any]]:
    return [r for r in found["details"][row]["requests"] if r["repeat"] == seed]


def test_a_row_is_pooled_over_its_seeds(result: Evaluate) -> None:
    found = result("--policies", *SPECS, "--policy-seeds", 0, 1, 2)
    rows, details = found["rows"], found["details"]
    assert found["meta"]["policy_seeds"] == [0, 1, 2] and found["meta"]["repeats"] == 3 and found["same_text"] is True
    assert {row["policy"]: row["plays"] for row in rows} == dict(zip(SPECS, (1, 1, 1, 3, 3, 3, 1), strict=True))
    for row, detail in zip(rows, details, strict=True):
        assert row["tokens"] == sum(r["tokens"] for r in detail["requests"]) == rows[0]["tokens"]
        assert row["seconds"] == pytest.approx(sum(r["seconds"] for r in detail["requests"]))
        each = detail["speedup_by_repeat"]
        expected = None if row["plays"] == 1 else pytest.approx(float(np.std(each, ddof=1)))
        assert len(each) == 3 and row["speedup_sd"] == expected
    assert rows[3]["speedup_sd"] > 0 and found["ladder"]["plain"]["tokens"] == rows[0]["tokens"]
    assert rows[-1]["oracle_fraction"] == pytest.approx(1.0)
    assert all(by[3]["speedup_sd"] > 0 and by[3]["plays"] == 3 for by in found["by_category"].values())


def test_the_interval_draws_a_prompt_with_all_its_seeds(result: Evaluate) -> None:
    found = result("--policies", "bandit:ts", "--policy-seeds", 0, 1)
    by_prompt: dict[str, list[float]] = {}
    for request in found["details"][0]["requests"]:
        sums = by_prompt.setdefault(request["id"], [0.0] * 4)
        for i, key in enumerate(("tokens", "seconds", "baseline_tokens", "baseline_seconds")):
            sums[i] += request[key]
    assert len(by_prompt) == found["comparisons"][0]["prompts"] == 12
    columns = [list(column) for column in zip(*(by_prompt[i] for i in sorted(by_prompt)), strict=True)]
    low, high = found["rows"][0]["speedup_ci95"]
    again = speedup_interval(*columns, rng=np.random.default_rng(0))  # the order of the prompts moves the ends a little
    assert list(again) == pytest.approx([low, high], abs=0.02)
    assert found["comparisons"][0]["rows"][0]["ratio"] == pytest.approx(found["rows"][0]["speedup"])


def test_each_seed_has_an_order_and_a_policy_of_its_own(result: Evaluate) -> None:
    found = result("--policies", "random", "static:4", "--policy-seeds", 5, 2)
    orders = [[r["id"] for r in played(found, 0, seed)] for seed in (0, 1)]
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1])
    by_id = [{r["id"]: r["seconds"] for r in played(found, 0, seed)} for seed in (0, 1)]
    assert by_id[0] != by_id[1], "both seeds drew the same actions"
    fixed = [{r["id"]: r["seconds"] for r in played(found, 1, seed)} for seed in (0, 1)]
    assert fixed[0] == fixed[1]
    alone = result("--policies", "random", "static:4", "--policy-seeds", 2)
    assert played(alone, 0, 0) == [{**r, "repeat": 0} for r in played(found, 0, 1)], "a seed depends on the others"
    assert alone["rows"][0]["speedup_sd"] is None and alone["rows"][0]["plays"] == 1


def test_request_orders_are_permutations_that_differ() -> None:
    orders = [request_order(seed, 9) for seed in range(4)]
    assert all(sorted(order) == list(range(9)) for order in orders) and len(set(map(tuple, orders))) == 4


class Counting(FixedPolicy):
    """Counts the requests that it begins; takes no seed and keeps no state unless told."""

    def __init__(self, k: int, keeps: bool = False) -> None:
        super().__init__(k)
        self.keeps, self.begun = keeps, 0

    def begin(self, table: Any) -> None:
        super().begin(table)
        self.begun += 1

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.begun} if self.keeps else {}

    def load_state_dict(self, state: Any) -> None:
        """Nothing to load."""


class Seeded(Counting):
    def __init__(self, k: int, seed: int = 0) -> None:
        super().__init__(k)


@pytest.mark.parametrize(
    ("make", "plays"),
    [
        (lambda seed: Counting(2), [1, 0]),
        (lambda seed: Counting(2, keeps=True), [1, 1]),
        (lambda seed: Seeded(2, seed), [1, 1]),
        (lambda seed: Counting(2 + seed) if seed else FixedPolicy(2), [None, 1]),
    ],
)
def test_only_what_would_repeat_itself_is_played_once(make: Callable[[int], Any], plays: list[int | None]) -> None:
    by_seed = {seed: [("mine", make(seed))] for seed in (0, 1)}
    evaluation = evaluate(FakeBackend(), fake_requests(5), by_seed, seed=0, warmup=0)
    for seed, expected in enumerate(plays):
        begun = getattr(by_seed[seed][0][1], "begun", None)
        assert expected is None or begun == 1 + 5 * expected, "one begin is that of the set-up"
    assert evaluation.rows()[0]["plays"] == (1 if plays == [1, 0] else 2)
    assert len(evaluation.runs_of(0)) == 10 and evaluation.baseline_row()["plays"] == 1


def test_after_ctrl_c_the_finished_part_of_a_seed_counts() -> None:
    seen: list[RequestResult] = []

    def stop(done: RequestResult) -> None:
        seen.append(done)
        if len(seen) == 7:
            raise KeyboardInterrupt

    by_seed: dict[int, list[tuple[str, Policy]]] = {s: [("bandit", make_policy("bandit:ts", seed=s))] for s in (0, 1)}
    with pytest.raises(EvaluationInterrupted) as caught:
        evaluate(FakeBackend(), fake_requests(5), by_seed, seed=0, warmup=0, on_request=stop)
    found = caught.value.evaluation.to_json()
    assert found["complete"] is False and [r["repeat"] for r in found["details"][0]["requests"]] == [0] * 5 + [1] * 2
    assert [r.index for r in seen[:5]] == request_order(0, 5) and found["rows"][0]["plays"] == 2


def test_seeds_of_unlike_policies_and_repeats_are_refused() -> None:
    unlike = {0: [("a", FixedPolicy(2))], 1: [("b", FixedPolicy(2))]}
    with pytest.raises(ValueError, match="same policies"):
        evaluate(FakeBackend(), fake_requests(2), unlike, seed=0)
    with pytest.raises(AsscError, match="repeats is 1, got 2"):
        evaluate(FakeBackend(), fake_requests(2), {0: [("a", FixedPolicy(2))]}, seed=0, repeats=2)


# -- folders of train_policy.py --seeds ------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Static-like policies of two seeds: bandits that know another arm each."""
    requests = markov_requests(6, max_new_tokens=40)
    backend = ReplayBackend(MarkovSource().trace(requests), MARKOV_COSTS)
    for seed, spec in ((0, "threshold:k_min=8,init=8"), (3, "threshold:init=1,k_max=1")):
        policy = make_policy(spec)
        policy.begin(backend.table)
        (tmp_path / "five" / f"seed-{seed}").mkdir(parents=True)
        save_policy(tmp_path / "five" / f"seed-{seed}" / "policy.zip", policy, table=backend.table)
    (tmp_path / "five" / "seed-0.log").write_text("done")
    (tmp_path / "five" / "seed-9").mkdir()
    return tmp_path / "five"


def test_a_folder_of_seeds_plays_the_artefact_of_each(folder: Path, result: Evaluate, tmp_path: Path) -> None:
    found = result("--policies", folder, "--policy-seeds", 0, 3, "--run-dir", tmp_path / "run")
    (row,), detail = found["rows"], found["details"][0]
    assert row["policy"] == str(folder) and row["rung"] == "learned" and row["plays"] == 2
    for at, seed in enumerate((0, 3)):
        alone = result("--policies", folder / f"seed-{seed}")
        assert detail["speedup_by_repeat"][at] == pytest.approx(alone["rows"][0]["speedup"])
    assert row["speedup_sd"] > 0.01
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    names = [name for name in manifest["data"] if str(folder) in name]
    assert names == [f"{folder} seed 0", f"{folder} seed 3"] and manifest["config"]["policy_seeds"] == [0, 3]
    assert "--policy-seeds 0 3" in " ".join(manifest["words"])
    notes = [n for n in found["meta"]["notes"] if "trained on" in n]
    assert len(notes) == 1, "said once for each seed"


def test_seeds_are_taken_by_their_canonical_names_only(folder: Path) -> None:
    for name in ("seed-03", "seed-x", "seed-\u0661"):
        shutil.copytree(folder / "seed-0", folder / name)
    assert seed_files(folder) == {seed: folder / f"seed-{seed}" / "policy.zip" for seed in (0, 3)}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "holds a policy for each of several seeds: play them with --backend replay --policy-seeds 0 3, or name"),
        (["--policy-seeds", "0", "1"], "holds no finished policy of seed 1, only of 0 3 (--policy-seeds)"),
        (["--policy-seeds", "0", "9"], "holds no finished policy of seed 9, only of 0 3"),
        (["--policy-seeds", "0", "0"], "--policy-seeds are different numbers of 0 or more, got 0 0"),
        (["--policy-seeds", "-1"], "--policy-seeds are different numbers of 0 or more, got -1"),
        (["--policy-seeds", "0", "3", "--repeats", "2"], "--policy-seeds plays once for each seed, so it takes no"),
    ],
)
def test_mistakes_are_one_sentence(
    words: list[str], said: str, files: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refused([*files, "--policies", str(folder), *words], capsys)


def test_live_and_presets_take_no_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--pair", "tiny", "--policy-seeds", "0", "1"]
    assert "--policy-seeds makes no sense with --backend live: it is for --backend replay" in refused(words, capsys)
    preset = ["--preset", "seed-table", "--backend", "replay", "--policy-seeds", "0"]
    assert "--preset seed-table takes no --policy-seeds" in refused(preset, capsys)


# -- what is printed and written -------------------------------------------------------------------------------------


def test_outputs_agree(result: Evaluate, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--policies", "ar", "assc", "bandit:ts", "--policy-seeds", 0, 1, "--rounds", 1)
    found = result(
        *words, "--csv", tmp_path / "o.csv", "--markdown", tmp_path / "o.md", "--tensorboard", tmp_path / "tb"
    )
    printed, markdown = capsys.readouterr().out, (tmp_path / "o.md").read_text()
    sd = f"{found['rows'][2]['speedup_sd']:.3f}"
    for text in (printed, markdown):
        assert "x 2 seeds" in text and "sd: standard deviation of the speed-up over the seeds 0 1" in text
        (bandit,) = [x for x in text.splitlines() if "history" in x and "bandit:ts" in x]
        (rule,) = [x for x in text.splitlines() if "history" in x and "assc" in x]
        assert sd in bandit and "once" in rule
    header, *lines = (tmp_path / "o.csv").read_text().splitlines()
    cells = dict(zip(header.split(","), lines[2].split(","), strict=True))
    assert (
        cells["plays"] == "2"
        and cells["rung"] == "history"
        and float(cells["speedup_sd"]) == float(found["rows"][2]["speedup_sd"])
    )
    entries = read_report([tmp_path / "out.json"]).entries
    assert [e.row["plays"] for e in entries] == [1, 1, 2] and [len(e.played) for e in entries] == [24, 24, 24]


def test_narrow_terminals_get_the_table_in_parts() -> None:
    columns, lines = ["policy", *"abcdef"], [["static:4", *("12345678",) * 6]]
    for width in (20, 40, 80):
        parts = parts_of(columns, lines, width)
        assert [c for part, _ in parts for c in part[1:]] == list("abcdef")
        assert all(part[0] == "policy" and cells[0][0] == "static:4" for part, cells in parts)
        assert all(len(part) == 2 or sum(len(x) + 3 for x in cells[0]) <= width for part, cells in parts)
    assert len(parts_of(columns, lines, 200)) == 1
