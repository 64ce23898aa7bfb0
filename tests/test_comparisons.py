"""p-values, Holm's adjustment, minimum detectable effect, groups and CSV: against hand-made numbers and their odds."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
from fakes import FakeBackend, FakeClock, FixedPolicy, fake_requests

import eval as eval_cli
from assc.breakdown import to_csv
from assc.comparisons import families
from assc.core import Policy
from assc.costs_io import CostFile, write_costs
from assc.errors import AsscError
from assc.evaluate import evaluate
from assc.markov import MARKOV_COSTS, MarkovSource, markov_requests
from assc.registry import make_policy
from assc.stats import POWER, compare, holm, requests_needed, speedup_interval
from assc.tables import print_evaluation
from assc.trace_io import write_trace

scipy_stats: Any = scipy.stats  # untyped


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def noisy(n: int, effect: float, noise: float, seed: int) -> tuple[np.ndarray, ...]:
    """Requests of unequal length, the policy `effect` times as fast; both carry their own relative noise."""
    draw = rng(seed)
    tokens = draw.choice([64.0, 64.0, 48.0, 30.0], n)
    seconds = tokens * 0.03 / effect * np.exp(draw.normal(0, noise, n))
    return tokens, seconds, tokens, tokens * 0.03 * np.exp(draw.normal(0, noise, n))


# -- p-value and minimum detectable effect ---------------------------------------------------------------------------


def test_the_p_value_is_below_five_per_cent_exactly_where_the_interval_excludes_one() -> None:
    seen = set()
    for seed in range(40):
        data = noisy(12, 1.0 + 0.04 * (seed % 3), 0.05, seed)
        found = compare(*data, rng=rng(seed), resamples=1000)
        assert found.interval == speedup_interval(*data, rng=rng(seed), resamples=1000)
        low, high = found.interval
        assert low is not None and high is not None and found.p_value is not None
        outside = low > 1 or high < 1
        assert (found.p_value < 0.05) == outside
        seen.add(outside)
    assert seen == {True, False}


def test_the_p_value_is_near_that_of_a_paired_t_test() -> None:
    """Equal lengths and small effects: the logarithms of the requests' ratios are all that the bootstrap sees."""
    for seed in range(5):
        tokens = np.full(60, 64.0)
        seconds, base = (np.exp(rng(seed + s).normal(0.01 * (s > 0), 0.03, 60)) for s in (0, 1000))
        found = compare(tokens, seconds, tokens, base, rng=rng(seed), resamples=8000)
        expected = scipy_stats.ttest_1samp(np.log(base / seconds), 0.0).pvalue
        assert found.p_value == pytest.approx(expected, rel=0.35, abs=0.01)


def test_degenerate_comparisons() -> None:
    same = compare([5, 7], [1.0, 2.0], [5, 7], [1.0, 2.0], rng=rng())
    assert (same.ratio, same.interval, same.p_value, same.detectable) == (1.0, (1.0, 1.0), 1.0, 0.0)
    one = compare([5], [1.0], [5], [2.0], rng=rng())
    assert (one.ratio, one.p_value, one.detectable) == (2.0, None, None)
    sure = compare([5, 5, 5], [1.0, 1.0, 1.0], [5, 5, 5], [2.0, 2.0, 2.0], rng=rng(), resamples=999)
    assert sure.p_value == pytest.approx(2 / 1000), "no spread to extrapolate from"
    unlike = compare([5, 50], [1.0, 40.0], [5, 50], [5.0, 2.0], rng=rng(), resamples=999)  # ends beyond all numbers
    numbers = (unlike.ratio, *unlike.interval, unlike.p_value, unlike.detectable)
    assert all(n is not None and np.isfinite(n) for n in numbers) and unlike.p_value is not None
    assert unlike.p_value > 0.05
    large = compare(*noisy(40, 1.5, 0.03, 0), rng=rng(), resamples=999)
    assert large.p_value is not None and 0 < large.p_value < 1e-6, "resamples are too few to show how small it is"
    assert sure.detectable == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("n", [12, 48])
def test_an_effect_of_the_minimum_detectable_size_is_found_with_the_promised_odds(n: int) -> None:
    """The printed size is that of one sample: its mean over samples is planted, and found in 80 % of new ones.

    Were the true odds 0.70 or 0.90, a share outside [0.72, 0.88] of 150 would come up with odds above 1/3 and 3/5;
    for 0.80 itself with odds of 1 in 80 per case (binomial). The seeds are fixed, so the test never flickers.
    """
    noise = 0.05
    sizes = [compare(*noisy(n, 1.0, noise, s), rng=rng(s), resamples=400).detectable for s in range(30)]
    planted = float(np.mean([s for s in sizes if s is not None]))
    hits = 0
    for seed in range(100, 250):
        found = compare(*noisy(n, 1 + planted, noise, seed), rng=rng(seed), resamples=400)
        assert found.p_value is not None
        hits += found.p_value < 0.05
    assert POWER == 0.8 and 0.72 <= hits / 150 <= 0.88


def test_a_planted_three_per_cent_is_found_where_the_printed_effect_is_below_three_per_cent() -> None:
    """3 % is more than 4 standard errors, found with odds above 0.99: fewer than 36 of 40 hits once in 10,000."""
    found = [compare(*noisy(96, 1.03, 0.045, seed), rng=rng(seed), resamples=400) for seed in range(40)]
    printed = [f.detectable for f in found if f.detectable is not None]
    assert np.mean(printed) < 0.03 and sum(f.p_value is not None and f.p_value < 0.05 for f in found) >= 36


def test_requests_needed_grow_with_the_square() -> None:
    assert requests_needed(0.02, 50, 0.01) == pytest.approx(4 * 50, rel=0.05)
    data = noisy(40, 1.0, 0.05, 0)
    four = tuple(np.tile(column, 4) for column in data)
    sizes = [compare(*d, rng=rng(), resamples=4000).detectable for d in (data, four)]
    assert sizes[0] is not None and sizes[1] is not None and sizes[1] == pytest.approx(sizes[0] / 2, rel=0.1)


def test_holm_by_hand_and_its_family_wise_error() -> None:
    assert holm([]) == [] and holm([0.04]) == [0.04]
    assert holm([0.01, 0.02, 0.5]) == pytest.approx([0.03, 0.04, 0.5])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    # 10 true null hypotheses: some p below 0.05 in 40 % of the families, some adjusted one in 5 %.
    # 1000 families: more than 72 with odds of 1 in 800 (binomial).
    families_ = rng(1).random((1000, 10))
    assert (families_.min(1) < 0.05).mean() > 0.3
    assert sum(min(holm(list(p))) < 0.05 for p in families_) <= 72


# -- the evaluation --------------------------------------------------------------------------------------------------


def listed(*labels: str) -> list[tuple[str, Policy]]:
    return [(label, make_policy(label.partition("@")[0])) for label in labels]


def test_a_against_a_under_an_alias_covers_one_at_the_nominal_rate() -> None:
    """Coverage is near 0.95. Were it 0.93, fewer than 50 of 60 would come up with odds of 1 in 200 (binomial)."""
    hits = 0
    for seed in range(60):
        backend = FakeBackend(noise=0.2, noise_seed=seed)
        requests = fake_requests(12, max_new_tokens=16, seed=seed)
        labels = ("static:4", "static:4@b")
        evaluation = evaluate(backend, requests, listed(*labels), seed=seed, warmup=0, against="static:4")
        plain, own = families(evaluation)
        assert [line.label for line in plain.lines] == list(labels) and plain.against == "ar"
        (twin,) = own.lines
        low, high = twin.ci95
        assert twin.label == "static:4@b" and low is not None and high is not None
        hits += low <= 1.0 <= high
    assert hits >= 50


def test_families_know_their_tests_and_leave_the_oracle_out() -> None:
    names = ["ar", "static:2", "static:4", "oracle", "oracle@b"]
    policies: list[tuple[str, Policy]] = [(n, FixedPolicy(int(n[-1]) if n[-1].isdigit() else 1)) for n in names]
    evaluation = evaluate(FakeBackend(noise=0.05), fake_requests(12), policies, seed=0, against="static:4")
    plain, own = families(evaluation)
    assert [line.label for line in plain.lines] == ["static:2", "static:4"] and plain.tests == 2
    assert [line.label for line in own.lines] == ["ar", "static:2"] and own.against == "static:4"
    raw = [line.p_value for line in plain.lines if line.p_value is not None]
    assert [line.p_holm for line in plain.lines] == holm(raw)
    assert plain.lines[1].ratio == evaluation.rows()[2]["speedup"] and plain.lines[1].verdict == "faster"
    assert own.lines[0].ratio == pytest.approx(1 / evaluation.rows()[2]["speedup"]) and own.lines[0].verdict == "slower"
    written = evaluation.to_json()["comparisons"]
    assert written[1]["against"] == "static:4" and written[1]["tests"] == 2 and written[1]["prompts"] == 12
    assert set(written[0]["rows"][0]) == {
        name.removeprefix("comparisons.") for name in evaluation.meta["definitions"] if name.startswith("comparisons.")
    } | {"label", "ci95"}
    with pytest.raises(AsscError, match="'static:9' is not among the policies"):
        evaluate(FakeBackend(), fake_requests(2), listed("ar"), seed=0, against="static:9")


def test_the_wall_clock_is_checked_against_the_phases() -> None:
    class Leaky(FakeBackend):
        """Time passes in every observation, in no phase."""

        lost = 0.0

        def observe(self, needs: frozenset[str] = frozenset()) -> Any:
            assert self.clock is not None
            self.clock.advance(self.lost)
            return super().observe(needs)

    for lost, warned in ((0.0, False), (0.1, True)):
        clock = FakeClock()
        backend = Leaky(clock=clock)
        backend.lost = lost
        backend.time_source = "measured"
        evaluation = evaluate(backend, fake_requests(3), listed("static:4"), seed=0, clock=clock)
        out = io.StringIO()
        print_evaluation(evaluation, file=out)
        assert "time check: prefill and phases make up" in out.getvalue()
        assert ("WARNING, static:4:" in out.getvalue()) == warned


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    requests = [r for r in markov_requests(36, max_new_tokens=24)]
    trace = MarkovSource().trace(requests)
    c = dict(trace.columns)
    c["category"] = np.array(["ab"[i // 3 % 2] for i in range(36)])
    c["temperature"] = np.array([0.0, 0.7, 1.0] * 12, dtype=c["temperature"].dtype)
    c["split"] = np.array([["held-out", "train"][i // 6 % 2] for i in range(36)])
    write_trace(type(trace)(trace.header, c, trace.name), tmp_path / "trace.npz")
    write_costs(CostFile(MARKOV_COSTS), tmp_path / "costs.json")
    return ["--backend", "replay", "--traces", str(tmp_path / "trace.npz"), "--cost", str(tmp_path / "costs.json")]


def test_groups_in_json_csv_and_on_the_screen(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, table = tmp_path / "out.json", tmp_path / "out.csv"
    words = ["--policies", "ar", "static:tuned", "assc", "oracle", "--json", str(out), "--csv", str(table), "--explain"]
    assert eval_cli.main([*files, *words, "--repeat", "2", "--markdown", str(tmp_path / "out.md")]) == 0
    found = json.loads(out.read_text())
    assert found["meta"]["repeats"] == 2 and set(found["by_temperature"]) == {"0", "0.7", "1"}
    for groups in (found["by_category"], found["by_temperature"]):
        for key in ("tokens", "seconds", "rounds"):
            for i, row in enumerate(found["rows"]):
                assert sum(rows[i][key] for rows in groups.values()) == pytest.approx(row[key])
    assert [f["against"] for f in found["comparisons"]] == ["ar", "static:tuned"]
    lines = list(csv.DictReader(table.open()))
    assert len(lines) == 4 * (1 + 2 + 3) and {line["group"] for line in lines} == {"all", "category", "temperature"}
    for line, row in zip(lines, found["rows"], strict=False):
        assert line["label"] == row["policy"] and float(line["speedup"]) == row["speedup"]
        assert [float(line["speedup_low"]), float(line["speedup_high"])] == row["speedup_ci95"]
    cold = next(x for x in lines if (x["value"], x["label"]) == ("0.7", "assc"))
    assert float(cold["seconds"]) == found["by_temperature"]["0.7"][2]["seconds"] and cold["action"] == ""
    printed = capsys.readouterr().out
    for text in ("speed-up by group", "T = 0.7", "against static:tuned", "verdicts hold at 5 %", "temperature 0.7"):
        assert text in printed
    assert "comparisons.detectable:" in printed and "| speed-up by group |" in (tmp_path / "out.md").read_text()


def test_csv_of_names_with_commas() -> None:
    evaluation = evaluate(FakeBackend(), fake_requests(2), [('a,"b', FixedPolicy(2))], seed=0)
    first = next(csv.DictReader(io.StringIO(to_csv(evaluation))))
    assert first["label"] == 'a,"b' and first["oracle_fraction"] == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--against", "static:4"], "--against static:4 is not among --policies ar assc"),
        (["--against", "static:4"], "list it there too"),
        (["--preset", "seed-table"], "--preset seed-table has its own policies"),
        (["--policies", "svip@"], "'svip@' is the policy 'svip' under another name"),
        (["--policies", "svip@a.b"], "as SPEC@NAME with a NAME of letters, digits, _ and -"),
        (["--policies", "nobody@x"], "unknown policy 'nobody'"),
        (["--json", "out", "--csv", "./out"], "--json and --csv both name out; give each a file of its own"),
        (["--markdown", "out", "--prometheus", "out"], "--markdown and --prometheus both name out"),
    ],
)
def test_refusals(files: list[str], words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert eval_cli.main([*files, "--policies", "ar", "assc", *words]) == 2
    assert said in capsys.readouterr().err


def test_against_nobody_and_somebody(files: list[str], tmp_path: Path) -> None:
    for words, families_ in ((["none"], ["ar"]), (["ar"], ["ar"]), (["assc"], ["ar", "assc"])):
        out = tmp_path / "out.json"
        specs = ["--policies", "ar", "static:tuned", "assc", "--json", str(out)]
        assert eval_cli.main([*files, *specs, "--against", *words]) == 0
        assert [f["against"] for f in json.loads(out.read_text())["comparisons"]] == families_


def test_plain_decoding_need_not_be_listed_to_be_compared_with(files: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert eval_cli.main([*files, "--policies", "assc", "--against", "ar", "--json", str(out)]) == 0
    (told,) = json.loads(out.read_text())["comparisons"]
    assert told["against"] == "ar" and [row["label"] for row in told["rows"]] == ["assc"]


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [("threads", "two", "threads 'two', it must be a whole number"), ("residuals", 3, "an object of numbers")],
)
def test_cost_files_of_wrong_types(
    files: list[str], key: str, value: object, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    assert eval_cli.main([*files, "--policies", "ar"]) == 2
    assert said in capsys.readouterr().err
