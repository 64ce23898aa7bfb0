"""`python -m assc report` and `eval.py --rounds`, on an evaluation of the synthetic source made here."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_eval_replay import markov_trace

import eval as eval_cli
from assc.__main__ import main
from assc.core import RoundRecord
from assc.costs_io import CostFile, write_costs
from assc.markov import MARKOV_COSTS
from assc.metrics import ROW_KEYS
from assc.observe import acceptance_ema
from assc.registry import make_policy
from assc.replay import ReplayBackend
from assc.report.compare import groups_of
from assc.report.figures import COLOURS, shorten, styles
from assc.report.join import read_report
from assc.report.nouns import Entry, Played
from assc.report.page import render
from assc.report.regret import Regret, regret_of
from assc.report.rounds import ema_after, token_rounds
from assc.report.verdicts import HEURISTIC, PLAIN, TUNED, family, judge
from assc.report.words import caution, in_short, line_sentences, percent, times
from assc.run import run_request
from assc.stats import speedup
from assc.trace import Trace
from assc.trace_io import write_trace

ROOT = Path(eval_cli.__file__).parent
POLICIES = ("ar", "static:tuned", "assc", "bandit:ucb", "oracle")
SECTIONS = ("ladder", "groups", "waste", "time", "requests", "regret", "reliability", "provenance")
HOSTILE = '<script>alert("x")</script> & $x^{'


def warm_trace() -> Trace:
    """The synthetic trace with every prompt at two temperatures, and categories in both splits."""
    trace = markov_trace()
    ids = [f"m{i // 2}" for i in range(36)]
    split = ["held-out" if i % 6 < 2 else "train" for i in range(36)]
    category = ["ab"[i // 2 // 3 % 2] for i in range(36)]
    heat = np.array([0.0, 1.0] * 18)
    columns = {"id": np.array(ids), "split": np.array(split), "category": np.array(category), "temperature": heat}
    return Trace(replace(trace.header, mode="gumbel"), {**trace.columns, **columns}, trace.name)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The JSON of eval.py on the warm trace; one evaluation serves all tests."""
    directory = tmp_path_factory.mktemp("evaluated")
    write_trace(warm_trace(), directory / "trace.npz")
    write_costs(CostFile(MARKOV_COSTS, pair="markov", device="none", date="today"), directory / "costs.json")
    out = directory / "out.json"
    files = ["--traces", str(directory / "trace.npz"), "--cost", str(directory / "costs.json"), "--json", str(out)]
    assert eval_cli.main(["--backend", "replay", *files, "--policies", *POLICIES, "--rounds", "2"]) == 0
    data: dict[str, Any] = json.loads(out.read_text())
    return data


@pytest.fixture
def data(shared: dict[str, Any]) -> dict[str, Any]:
    """A copy that a test may change."""
    return deepcopy(shared)


Save = Callable[..., Path]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    def write(content: Any, name: str = "out.json") -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return write


@pytest.fixture
def page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run the command, check what holds for every page, and return it."""

    def run(*words: object) -> str:
        out = tmp_path / "report.html"
        assert main(["report", *map(str, words), "--out", str(out)]) == 0, capsys.readouterr().err
        assert "report.html" in capsys.readouterr().out
        html = out.read_text(encoding="utf-8")
        Checked(html)
        assert len(html.encode()) < 3_000_000
        return html

    return run


class Checked(HTMLParser):
    """Well-nested tags, unique ids that references lead to, no script, nothing from outside."""

    VOID = frozenset({"meta", "br", "wbr", "img", "link", "input"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.references: set[str] = set()
        self.texts: list[str] = []
        self.feed(html)
        assert not self.open, self.open
        assert len(self.ids) == len(set(self.ids)), "an id is used twice"
        assert self.references <= set(self.ids), self.references - set(self.ids)
        assert html.count("http") == html.count("http-equiv"), "an address outside of the page"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "iframe", "link", "img", "object", "embed"), tag
        for name, value in attrs:
            assert not name.startswith("on"), (tag, name)
            if name not in ("title", "aria-label"):
                self.references |= set(re.findall(r"url\(#([^)]+)\)", value or ""))
            if name == "id":
                self.ids.append(value or "")
            if name in ("href", "src", "xlink:href"):
                assert name == "href" and value is not None and value.startswith("#"), (tag, value)
                self.references.add(value[1:])
        if tag == "svg":
            assert len(dict(attrs)["aria-label"] or "") > 20
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, tag

    def handle_data(self, text: str) -> None:
        self.texts.append(text)


# -- what is on the page ---------------------------------------------------------------------------------------------


def test_every_section_and_every_number_of_the_rows(data: dict[str, Any], save: Save, page: Callable[..., str]) -> None:
    html = page(save(data))
    for section in SECTIONS:
        assert f'<section id="{section}">' in html
    assert html.count("<svg") == 4 + 2, "ladder, waste, time, regret, and two requests"
    cells = re.findall(r"<td[^>]*>([^<]*)", html)
    for row in data["rows"]:
        assert row["policy"] in cells and f"{row['seconds']:.3f}" in cells and str(row["rounds"]) in cells
        low, high = row["speedup_ci95"]
        assert times(row["speedup"], 3) in cells and f"{low:.3f} to {high:.3f}" in cells
        for key in ("waste_rate", "acceptance_rate", "oracle_fraction", "rollback_rate", "draft_time_share"):
            assert percent(row[key]) in cells, key
        for rows in data["by_category"].values():
            (mine,) = [r for r in rows if r["policy"] == row["policy"]]
            assert times(mine["speedup"]) in cells
    for rung in data["ladder"].values():
        assert times(rung["speedup"], 3) in cells
    assert all(re.sub("_", "_<wbr>", key) in html for key in ROW_KEYS)
    meta = data["meta"]
    for fact in (meta["command"].replace("'", "&#39;"), meta["trace"]["sha256"][:16], "modelled", "gumbel", "markov"):
        assert str(fact) in html
    assert f"{meta['c']:.4f}" in html and meta["git_commit"] is not None and meta["git_commit"] in html
    assert "Best on all requests: " in html and "Best on a: " in html and "Holm" in html and "Per temperature" in html
    assert "hindsight oracle reaches" in html and "Where does the time of" in html
    assert "No policy in the file predicts acceptance" in html


def test_temperatures_categories_and_best(data: dict[str, Any], save: Save) -> None:
    """Cells of a temperature against a sum by hand; the best of each group is the fastest but the oracle."""
    report = read_report([save(data)])
    groups, heats = groups_of(report)
    assert [g.name for g in groups] == ["all", "a", "b"] and [g.name for g in heats] == ["T = 0", "T = 1"]
    found = judge(report, [*groups, *heats])
    cells, lines = found.cells, found.lines
    for heat in heats:
        for detail in data["details"]:
            its = [r for r in detail["requests"] if r["temperature"] == heat.value]
            mine = sum(r["tokens"] for r in its) / sum(r["seconds"] for r in its)
            plain = sum(r["baseline_tokens"] for r in its) / sum(r["baseline_seconds"] for r in its)
            assert cells[detail["label"], heat].speedup == pytest.approx(mine / plain)
    for line in lines:
        (best,) = [label for (label, group), c in cells.items() if group == line.group and c.best]
        speeds = {e.label: cells[e.label, line.group].speedup or 0 for e in report.entries if e.label != "oracle"}
        assert best == line.best.label == max(speeds, key=lambda label: speeds[label])
        assert line.oracle == cells["oracle", line.group].speedup
    fractions = {r["policy"]: r["oracle_fraction"] for r in data["by_category"]["a"]}
    assert lines[1].fraction == fractions[lines[1].best.label]
    hot = {r["policy"]: r["oracle_fraction"] for r in data["by_temperature"]["1"]}
    assert lines[-1].fraction == hot[lines[-1].best.label]


def test_computed_cells_are_those_of_the_file(data: dict[str, Any], save: Save) -> None:
    """A category computed from its requests, as a temperature is, gives the file's speed-up and interval."""
    told, lines = read_report([save(data)]), []
    for content in (data, {**data, "by_category": None, "by_temperature": None}):
        report = read_report([save(content)])
        cells = judge(report, [g for table in groups_of(report) for g in table]).cells
        lines.append({(label, g.name): (c.speedup, *c.interval) for (label, g), c in cells.items()})
    assert set(lines[0]) == set(lines[1]) and told.seed == data["meta"]["seed"]
    for key, values in lines[0].items():
        assert lines[1][key] == pytest.approx(values), key


# -- is it significant? ----------------------------------------------------------------------------------------------


def entry(label: str, seconds: list[float], prompts: int = 12) -> Entry:
    """A policy with these seconds; request i asks prompt i modulo `prompts`, plain decoding takes a second each."""
    played = tuple(Played(i, f"p{i % prompts}", "", 0.0, 0, 10, s, 10, 1.0) for i, s in enumerate(seconds))
    row = {key: None for key in ROW_KEYS} | {"policy": label, "speedup": len(seconds) / sum(seconds)}
    row |= {"speedup_ci95": (None, None)}
    return Entry(label, 0, row, {}, {}, played)


def test_verdicts_of_a_clear_an_open_and_a_borderline_case(data: dict[str, Any], save: Save) -> None:
    base = read_report([save(data)])
    noise = np.random.default_rng(0).normal(0, 0.05, 12)
    clear, same = entry("x", [0.5] * 12), entry("assc", list(np.clip(0.5 + noise, 0.1, 1)))
    tuned = entry("static:tuned", [1.0 + 0.1 * n for n in noise])
    report = replace(base, entries=(clear, same, tuned), ladder=None)
    groups, _ = groups_of(report)
    (line,) = judge(report, groups).lines
    assert [g.name for g in groups] == ["all"] and line.best.label in ("x", "assc") and line.prompts == 12
    found = line.against["tuned"]
    assert found.verdict == "faster" and found.tests == 2 and found.p_value is not None and found.p_holm is not None
    assert found.p_value <= found.p_holm < 0.05 and found.detectable is not None
    assert found.ratio == pytest.approx(speedup([10] * 12, [p.seconds for p in line.best.played], [10] * 12,
                                                [p.seconds for p in tuned.played]))  # fmt: skip
    other = family(report, groups, HEURISTIC)["x", groups[0]]
    assert other.verdict == "open" and family(report, groups, HEURISTIC)["assc", groups[0]].verdict == "itself"

    def near(lift: float, policies: int) -> str:
        """The verdict on x beside so many copies of the reference, none of which differs from it."""
        slower = list(0.5 + lift + noise)
        copies = (entry(f"copy {i}", slower) for i in range(policies))
        report = replace(base, entries=(clear, entry("assc", slower), *copies), ladder=None)
        return family(report, groups, HEURISTIC)["x", groups[0]].verdict

    lift = next(x for x in np.linspace(0.0, 0.1, 201) if near(x, 0) == "faster")
    assert near(lift, 20) == "perhaps", "the number of policies is not allowed for"


def test_families_over_all_requests_are_those_of_the_file(data: dict[str, Any], save: Save) -> None:
    """p, p after Holm, interval and detectable effect of every policy, as eval.py stores them."""
    report = read_report([save(data)])
    (everything, *categories), _ = groups_of(report)
    for told, reference in zip(data["comparisons"], (PLAIN, TUNED), strict=True):
        mine = family(report, [everything], reference)
        for row in told["rows"]:
            found = mine[row["label"], everything]
            assert found.ratio == pytest.approx(row["ratio"]) and found.tests == told["tests"]
            assert found.interval == pytest.approx(tuple(row["ci95"]))
            assert found.p_value == pytest.approx(row["p_value"]) and found.p_holm == pytest.approx(row["p_holm"])
            assert found.detectable == pytest.approx(row["detectable"])
            assert found.verdict == row["verdict"] or (found.verdict, row["verdict"]) == ("perhaps", "open")
        # the oracle and the reference itself are no contestants; the categories are a family of their own
        assert len(mine) == len(told["rows"]) + 1
        assert {c.tests for c in family(report, categories, reference).values() if c.verdict != "itself"} == {6}


def test_sentences_answer_the_questions_for_a_category(data: dict[str, Any], save: Save) -> None:
    """Numbers in the words are those of the comparison; small groups are called small."""
    report = read_report([save(data)])
    (_, *categories), _ = groups_of(report)
    lines = judge(report, categories).lines
    line = lines[0]
    said = " ".join(line_sentences(report, line))
    rows = {r["policy"]: r for r in data["by_category"]["a"]}
    best = rows[line.best.label]
    assert f"Best on a: {line.best.label}, {best['speedup']:.2f}× plain decoding" in said
    for key, name in (("tuned", "the tuned static action (static:tuned)"), ("heuristic", "the ASSC heuristic (assc)")):
        found = line.against[key]
        if found.verdict == "itself":
            assert f"It is {name} itself" in said
            continue
        low, high = found.interval
        assert f"Against {name}: {found.ratio:.3f}× ({low:.3f} to {high:.3f}), p " in said
        assert f"after Holm for {found.tests} comparisons" in said
        assert (
            f"The smallest effect that {line.prompts} prompts can show: {100 * (found.detectable or 0):.1f} %" in said
        )
    assert f"has {percent(best['speedup'] / rows['oracle']['speedup'])} of its speed" in said
    few = caution(lines)
    assert few is not None and f"{line.prompts} prompts each, which is few" in few
    assert caution([replace(line, prompts=40)]) is None
    short = " ".join(in_short(report, judge(report, [groups_of(report)[0][0]]).lines))
    assert "Where does the time of" in short and "Leakage: none. static:tuned (tuned on 12 prompts)" in short


def test_leakage_is_told(data: dict[str, Any], save: Save, page: Callable[..., str]) -> None:
    leakage = data["meta"]["leakage"]
    assert leakage == {
        "policies": [{"label": "static:tuned", "how": "tuned", "prompts": 12, "leaked_requests": 0}],
        "drafts": [],
        "evaluated": 12,
    }
    leakage["policies"][0]["leaked_requests"] = 3
    leakage["policies"].append({"label": "x.zip", "how": "unknown", "prompts": None, "leaked_requests": None})
    html = page(save(data))
    assert "LEAKAGE: static:tuned was tuned on 3 of the 12 evaluated requests" in html
    assert "x.zip doesn&#39;t say what it was trained on" in html and "Leakage: none" not in html
    del data["meta"]["leakage"]
    assert "the file doesn&#39;t say what the policies have learned from" in page(save(data))


def test_a_prompt_at_several_temperatures_is_one_unit(data: dict[str, Any], save: Save) -> None:
    """Twelve copies of two prompts say no more than the two."""
    base = read_report([save(data)])
    fast, slow = [0.5, 0.9] * 12, [1.0, 1.0] * 12
    copies = replace(base, entries=(entry("x", fast, 2), entry("assc", slow, 2)), ladder=None)
    two = replace(base, entries=(entry("x", fast[:2], 2), entry("assc", slow[:2], 2)), ladder=None)
    wide, narrow = (family(r, groups_of(r)[0], HEURISTIC)["x", groups_of(r)[0][0]].interval for r in (two, copies))
    assert narrow == pytest.approx(wide)


# -- rounds ----------------------------------------------------------------------------------------------------------


def test_rounds_are_those_that_were_played(data: dict[str, Any], save: Save) -> None:
    trace = warm_trace()
    backend, rows = ReplayBackend(trace, MARKOV_COSTS), trace.where(split="held-out")
    rounds = data["rounds"]
    assert [r["index"] for r in rounds["requests"]] == [0, 3], "not of two categories and two temperatures"
    assert rounds["token_texts"] is None
    requests = trace.requests(rows)
    for stored, request in ((r, requests[r["index"]]) for r in rounds["requests"]):
        assert [run["policy"] for run in stored["runs"]] == list(POLICIES) and stored["id"] == request.id
        (run,) = [run for run in stored["runs"] if run["policy"] == "assc"]
        played = run_request(backend, request, make_policy("assc")).rounds
        assert run["position"] == [r.position for r in played] and run["k"] == [r.planned for r in played]
        assert run["drafted"] == [r.drafted for r in played] and run["accepted"] == [r.accepted for r in played]
        assert run["emitted"] == [r.emitted for r in played] and run["finish"] == played[-1].finish
        assert run["tokens"] == [t for r in played for t in r.tokens]
        assert run["seconds"] == pytest.approx([r.seconds for r in played], rel=1e-5)
        names = [None if d < 0 else rounds["drafters"][d] for d in run["drafter"]]
        assert names == [r.action.drafter for r in played]
        start = int(trace.columns["offsets"][backend.row_of(request)])
        last = [start + r.position + r.emitted - 1 for r in played]
        assert run["target_entropy"] == pytest.approx([float(trace.columns["target_entropy"][i]) for i in last], 1e-3)
        assert len(stored["token_entropy"]) == int(trace.columns["offsets"][backend.row_of(request) + 1]) - start
        assert run["accept_chances"] is None
        view = next(
            v for v in read_report([save(data)]).views if (v.id, v.temperature) == (request.id, request.temperature)
        )
        (mine,) = [r for r in view.runs if r.policy == "assc"]
        assert ema_after(mine)[-1] == pytest.approx(acceptance_ema(played))
        check_tokens(list(token_rounds(view, mine, 400)), played, stored["token_entropy"])


def check_tokens(shown: list[Any], played: tuple[RoundRecord, ...], entropies: list[float]) -> None:
    """Kinds and hover texts against the records, by a rule of their own: walk each round token by token."""
    assert len(shown) == len(played)
    for found, record in zip(shown, played, strict=True):
        assert [t.text for t in found.tokens] == [f"{token} " for token in record.tokens]
        for j, token in enumerate(found.tokens):
            if record.drafted == 0:
                assert token.kind == "plain"
            elif j < record.accepted:
                assert token.kind == "drafted"
            else:
                assert token.kind == ("bonus" if record.accepted == record.drafted else "correction")
            assert f"accepted {record.accepted} of {record.drafted} drafted" in token.title
            assert f"K {record.planned} (" in token.title or record.rollback
            assert f"entropy {entropies[record.position + j]:.2f} nats" in token.title
            assert ("acceptance EMA" in token.title) == (token.kind in ("drafted", "correction"))


def test_predictions_are_shown_where_the_policy_made_them(
    data: dict[str, Any], save: Save, page: Callable[..., str]
) -> None:
    run = data["rounds"]["requests"][0]["runs"][2]
    run["accept_chances"] = [[0.125] * k for k in run["k"]]
    bins = [{"judged": n, "predicted": p, "accepted": a, "accepted_ci95": c} for n, p, a, c in (
        (30, 0.15, 0.2, [0.1, 0.3]), (10, 0.95, 0.5, [None, None]))]  # fmt: skip
    numbers = {"judged": 40, "accepted_share": 0.275, "brier": 0.2, "brier_constant": 0.199, "calibration_error": 0.15}
    data["details"][2]["accept_reliability"] = {**numbers, "bins": bins}
    html = page(save(data))
    judged = sum(min(a + (a < d), len(c)) for a, d, c in zip(
        run["accepted"], run["drafted"], run["accept_chances"], strict=True))  # fmt: skip
    last_cut = run["drafted"][-1] > run["accepted"][-1] and run["emitted"][-1] == run["accepted"][-1]
    assert html.count("accept probability 0.12 (predicted)") == judged - last_cut
    assert html.count("<svg") == 4 + 2 + 1 and "27.5 %" in html and "0.199" in html and "0.150" in html
    report = read_report([save(data)])
    (found,) = [e.reliability for e in report.entries if e.reliability is not None]
    assert [b.accepted for b in found.bins] == [0.2, 0.5] and found.bins[1].interval == (None, None)


def test_chosen_requests(
    data: dict[str, Any], save: Save, page: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save(data)
    html = page(path, "--ids", "m3")
    assert "Request m3" in html and "Request m0" not in html
    assert "'m1', whose rounds are not stored: those are m0, m3" in refused(
        [str(path), "--ids", "m1"], tmp_path, capsys
    )


def test_token_texts_and_hover_are_on_the_page(data: dict[str, Any], save: Save, page: Callable[..., str]) -> None:
    ids = {t for r in data["rounds"]["requests"] for run in r["runs"] for t in run["tokens"]}
    data["rounds"]["token_texts"] = {str(i): f"<b>w{i}</b>\n" for i in ids}
    html = page(save(data), "--requests", 1)
    first = data["rounds"]["requests"][0]["runs"][0]["tokens"][0]
    assert f"&lt;b&gt;w{first}&lt;/b&gt;⏎" in html and "<b>w" not in html and "has no texts" not in html
    runs = data["rounds"]["requests"][0]["runs"]
    assert html.count("</i>") == sum(len(run["tokens"]) for run in runs) + 4, "a token or one of the 4 keys is missing"
    assert html.count("round 1: ") == sum(run["emitted"][0] for run in runs) and "Request m0" in html
    assert "the file has no texts" in page(save({**data, "rounds": {**data["rounds"], "token_texts": None}}))


def test_rounds_are_stored_on_demand_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace(warm_trace(), tmp_path / "t.npz")
    write_costs(CostFile(MARKOV_COSTS), tmp_path / "c.json")
    words = ["--backend", "replay", "--traces", str(tmp_path / "t.npz"), "--cost", str(tmp_path / "c.json")]
    words += ["--policies", "ar", "static:2"]
    assert eval_cli.main([*words, "--rounds", "1"]) == 2 and "no --json is given" in capsys.readouterr().err
    assert eval_cli.main([*words, "--json", str(tmp_path / "o.json"), "--rounds", "-1"]) == 2
    capsys.readouterr()
    assert eval_cli.main([*words, "--json", str(tmp_path / "o.json")]) == 0
    plain = json.loads((tmp_path / "o.json").read_text())
    assert "rounds" not in plain and plain["meta"]["command"].startswith("python eval.py --backend replay")
    assert eval_cli.main([*words, "--json", str(tmp_path / "r.json"), "--rounds", "3", "--repeats", "2"]) == 0
    stored = json.loads((tmp_path / "r.json").read_text())
    assert len({r["index"] for r in stored["rounds"]["requests"]}) == 3, "the first repeat alone is stored"
    text = (tmp_path / "r.json").read_text()
    assert re.search(r'"k": \[[\d, ]+\]\n? *,', text) or re.search(r'"k": \[[\d, ]+\],', text), "numbers are folded"


def test_live_rounds_have_texts(tmp_path: Path) -> None:
    prompts = [{"id": f"q{i}", "prompt": f"tell {i} tell {i}", "split": "held-out"} for i in range(2)]
    (tmp_path / "w.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))
    out = tmp_path / "out.json"
    words = ["--pair", "tiny", "--workload", tmp_path / "w.jsonl", "--requests", 2, "--max-new-tokens", 8]
    words += ["--policies", "ar", "assc", "--rounds", 1, "--json", out]
    assert eval_cli.main([str(w) for w in words]) == 0
    stored = json.loads(out.read_text())
    (request,) = stored["rounds"]["requests"]
    texts = stored["rounds"]["token_texts"]
    assert {str(t) for run in request["runs"] for t in run["tokens"]} == set(texts)
    assert stored["meta"]["machine"] and stored["ladder"] is None
    html = render(read_report([out]))
    assert "No ladder in the file" in html and "No tuned static action" in html and "round 1: " in html


# -- regret ----------------------------------------------------------------------------------------------------------


def test_regret_ends_at_the_difference_of_the_rows(data: dict[str, Any], save: Save) -> None:
    found = regret_of(read_report([save(data)]))
    assert isinstance(found, Regret) and found.against == "oracle"
    seconds = {row["policy"]: row["seconds"] for row in data["rows"]}
    for label, curve in found.curves.items():
        assert curve[0] == 0 and len(curve) == 1 + len(data["details"][0]["requests"])
        assert curve[-1] == pytest.approx(seconds[label] - seconds["oracle"])


@pytest.mark.parametrize(("dropped", "against"), [(["oracle"], "static:tuned"), (["oracle", "static:tuned"], "plain")])
def test_regret_without_an_oracle(dropped: list[str], against: str, data: dict[str, Any], save: Save) -> None:
    found = regret_of(read_report([save(without(data, dropped))]))
    assert isinstance(found, Regret) and found.against.startswith(against)


def without(data: dict[str, Any], policies: list[str]) -> dict[str, Any]:
    keep = [i for i, row in enumerate(data["rows"]) if row["policy"] not in policies]
    groups = {
        key: {name: [rows[i] for i in keep] for name, rows in data[key].items()}
        for key in ("by_category", "by_temperature")
    }
    rows, details = ([data[key][i] for i in keep] for key in ("rows", "details"))
    return {**data, "rows": rows, "details": details, **groups}


def test_texts_of_other_lengths_have_no_regret(data: dict[str, Any], save: Save, page: Callable[..., str]) -> None:
    data["details"][0]["requests"][0]["tokens"] += 1
    assert "different numbers of tokens" in page(save(data))


# -- several results, old files --------------------------------------------------------------------------------------


def renamed(data: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    """Another result: the same with one policy under another name and slower."""
    changed = deepcopy(data)
    i = [row["policy"] for row in data["rows"]].index(old)
    rows = [changed["rows"][i], *(rows[i] for rows in changed["by_category"].values())]
    for row in rows:
        row["policy"] = new
    changed["details"][i] |= {"policy": new, "label": new}
    for request in changed["details"][i]["requests"]:
        request["seconds"] *= 1.5
    for request in changed["rounds"]["requests"]:
        request["runs"][i]["policy"] = new
    return changed


def test_results_of_one_trace_are_joined(data: dict[str, Any], save: Save, page: Callable[..., str]) -> None:
    first, second = save(data, "one.json"), save(renamed(data, "bandit:ucb", "runs/y/policy.zip"), "two.json")
    report = read_report([first, second])
    assert [e.label for e in report.entries] == [*POLICIES, "y"], "equal policies are shown once"
    assert report.entries[-1].given == "runs/y/policy.zip" and [len(v.runs) for v in report.views] == [6, 6]
    assert "2 results joined" in page(first, second)
    slower = renamed(data, "bandit:ucb", "bandit:ucb")
    third = read_report([first, save(slower, "three.json")])
    assert [e.label for e in third.entries] == [
        "ar", "static:tuned", "assc", "bandit:ucb [one]", "oracle", "bandit:ucb [three]"
    ]  # fmt: skip


def test_measured_results_are_not_compared_across_runs(data: dict[str, Any], save: Save, page: Any) -> None:
    data["meta"]["time_source"] = "measured"
    other = renamed(data, "bandit:ucb", "fast")
    other["meta"]["cost_model"] = {"another": "calibration"}  # of no weight where time is measured
    first, second = save(data, "one.json"), save(other, "two.json")
    report = read_report([first, second])
    assert report.entries[0].label == "ar [one]" and len(report.entries) == 10
    (group, *_), _ = groups_of(report)
    found = family(report, [group], HEURISTIC)
    assert found["bandit:ucb", group].other == "assc [one]" and found["fast", group].other == "assc [two]"
    alone = replace(report, entries=tuple(e for e in report.entries if e.label != "assc [two]"))
    lonely = family(alone, [group], HEURISTIC)
    assert lonely["fast", group].verdict == "unknown" and lonely["bandit:ucb", group].verdict != "unknown"
    assert "measured in separate runs" in page(first, second)


def test_a_run_directory(data: dict[str, Any], save: Save, page: Callable[..., str], tmp_path: Path) -> None:
    del data["rounds"]
    save(data, "run/eval.json")
    save({"config": {"algo": "ppo", "seed": 7}, "git_commit": "abc123", "versions": {}}, "run/config.json")
    row = {"policy": "p", "speedup": 1.25, "speedup_ci95": [1.1, 1.4], "seconds": 2.0, "acceptance_rate": 0.5}
    live = {"policy": "run/policy.zip", "requests": 3, "same_text": 2, "rounds": 40, "same_rounds": 39}
    save({**live, "live": row, "replay": row, "meta": {}}, "run/live.json")
    (tmp_path / "run/tb").mkdir()
    html = page(tmp_path / "run")
    assert "ppo, seed 7" in html and "tensorboard --logdir" in html and "same text in 2 of 3 requests" in html
    assert "1.25×" in html and "No rounds in the file" in html


def test_an_old_file_lacks_sections_with_a_sentence(data: dict[str, Any], save: Save, page: Callable[..., str]) -> None:
    """Only what the first version wrote: meta and rows without the later columns."""
    for row in data["rows"]:
        for key in ("time_source", "oracle_fraction", "action", "policy_time_share"):
            del row[key]
    html = page(save({"meta": data["meta"], "rows": data["rows"]}))
    for said in ("No ladder in the file", "no seconds per phase", "No rounds in the file", "no regret curve"):
        assert said in html
    for detail in data["details"]:
        for request in detail["requests"]:
            del request["temperature"]
    assert "does not say at which temperature" in page(save(data))


# -- hostile input ---------------------------------------------------------------------------------------------------


def test_hostile_names_are_escaped(data: dict[str, Any], save: Save, page: Callable[..., str]) -> None:
    name = f'{HOSTILE} id="x" url(#y)\x00\ud800'
    text = json.dumps(data).replace('"bandit:ucb"', json.dumps(name)).replace('"m0"', json.dumps(f"id {name}"))
    text = text.replace('"a"', json.dumps(name)).replace('"today"', json.dumps(name))
    changed = json.loads(text)
    changed["meta"] |= {"pair": name, "command": name, "dtype": {name: [name, None, 1.5, True]}, "requests": name}
    changed["rounds"]["drafters"] = [name for _ in changed["rounds"]["drafters"]]
    html = page(save(changed), "--title", name)
    assert "<script" not in html and "&lt;script&gt;" in html and "\x00" not in html and "onerror" not in html


def test_labels_in_charts() -> None:
    assert shorten("x" * 60).endswith("…") and len(shorten("x" * 60)) == 34
    many = [entry(f"p{i}", [1.0]) for i in range(20)]
    assert len({styles(many)[e.label] for e in many}) == 20 > len(COLOURS)


def speedup_is(data: dict[str, Any], number: str) -> str:
    """The file with this in the place of the first speed-up."""
    return re.sub(r'(?<="speedup": )[\d.]+', number, json.dumps(data), count=1)


DAMAGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no object": lambda d: [1, 2],
    "no meta": lambda d: {**d, "meta": None},
    "no mode": lambda d: {**d, "meta": {**d["meta"], "mode": None}},
    "no rows": lambda d: {**d, "rows": []},
    "rows of text": lambda d: {**d, "rows": ["a"]},
    "endless": lambda d: speedup_is(d, "1e999"),
    "nan": lambda d: speedup_is(d, "NaN"),
    "huge": lambda d: speedup_is(d, "1" + "0" * 400),
    "truth": lambda d: {**d, "rows": [{**r, "speedup": True} for r in d["rows"]]},
    "interval": lambda d: {**d, "rows": [{**r, "speedup_ci95": [1]} for r in d["rows"]]},
    "few details": lambda d: {**d, "details": d["details"][:1]},
    "categories": lambda d: {**d, "by_category": {"a": []}},
    "ladder": lambda d: {**d, "ladder": {"plain": 1}},
    "rounds": lambda d: {**d, "rounds": {"drafters": [], "requests": [{}]}},
    "texts": lambda d: {**d, "rounds": {**d["rounds"], "token_texts": {"1": 2}}},
    "reliability": lambda d: {**d, "details": [{**x, "accept_reliability": {"judged": 1}} for x in d["details"]]},
    "entropies": lambda d: {
        **d,
        "rounds": {**d["rounds"], "requests": [{**r, "token_entropy": ["x"]} for r in d["rounds"]["requests"]]},
    },
    "cut": lambda d: json.dumps(d)[:-100],
    "empty": lambda d: "",
    "policy": lambda d: json.dumps({"schema": 1, "kind": "assc cost model"}),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_and_foreign_files_are_refused(
    damage: str, data: dict[str, Any], save: Save, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save(DAMAGES[damage](data))
    assert str(path) in refused([str(path)], tmp_path, capsys)


@pytest.mark.parametrize(
    "column", ["position", "drafter", "k", "drafted", "accepted", "emitted", "seconds", "target_entropy", "tokens"]
)
def test_damaged_rounds_are_refused(
    column: str, data: dict[str, Any], save: Save, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = data["rounds"]["requests"][0]["runs"][1]
    run[column] = [*run[column], 99]
    assert "rounds of 'static:tuned'" in refused([str(save(data))], tmp_path, capsys)
    run[column] = [*run[column][:-2], "x"]
    assert "is no result" in refused([str(save(data))], tmp_path, capsys)


@pytest.mark.parametrize("chances", ["x", [[0.5]], [[2.0]], [0.5], [["x"]]])
def test_damaged_predictions_are_refused(
    chances: Any, data: dict[str, Any], save: Save, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = data["rounds"]["requests"][0]["runs"][2]
    fits = isinstance(chances, list) and chances != [[0.5]]
    run["accept_chances"] = chances * len(run["k"]) if fits else chances
    assert "is no result" in refused([str(save(data))], tmp_path, capsys)


def refused(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The one sentence on standard error; exit code 2 and no page."""
    out = tmp_path / "refused.html"
    assert main(["report", *words, "--out", str(out)]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("error: ") == 1 and printed.err.count("\n") == 1
    assert not out.exists()
    return printed.err


def test_results_that_do_not_belong_together(
    data: dict[str, Any], save: Save, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = save(data, "one.json")
    for key, value, said in (
        ("mode", "greedy", "verification mode differs (gumbel and greedy)"),
        ("time_source", "measured", "time source differs"),
        ("cost_model", {"target_fixed": 1}, "cost model differs"),
        ("trace", {"sha256": "0" * 64}, "trace differs"),
        ("max_new_tokens", 7, "budget of tokens differs"),
        ("k_max", 3, "largest K of the action table differs"),
        ("drafters", ["model"], "set of drafters differs"),
        ("pair", "other", "pair differs"),
    ):
        other = save({**data, "meta": {**data["meta"], key: value}}, "two.json")
        assert said in refused([str(one), str(other)], tmp_path, capsys)
    for detail in data["details"]:
        detail["requests"] = detail["requests"][:-1]
    assert "choice of requests differs" in refused([str(one), str(save(data, "two.json"))], tmp_path, capsys)


def test_mistakes_are_one_sentence(
    data: dict[str, Any], save: Save, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(save(data))
    (tmp_path / "empty").mkdir()
    assert "there is no result at" in refused([str(tmp_path / "none.json")], tmp_path, capsys)
    assert "has no eval.json" in refused([str(tmp_path / "empty")], tmp_path, capsys)
    assert "is given twice" in refused([path, path], tmp_path, capsys)
    assert "--requests is -1" in refused([path, "--requests", "-1"], tmp_path, capsys)
    assert "--colour" in refused([path, "--colour", "1"], tmp_path, capsys)
    assert main(["report", path, "--out", path]) == 2 and "overwrite a result" in capsys.readouterr().err
    assert json.loads(Path(path).read_text()) == data
    assert main(["report", "--out", str(tmp_path / "x.html")]) == 2 and "results" in capsys.readouterr().err


@pytest.mark.parametrize("package", ["matplotlib", "jinja2"])
def test_a_missing_extra_is_named(package: str, data: dict[str, Any], save: Save, tmp_path: Path) -> None:
    code = (
        f"import sys; sys.modules[{package!r}] = None; from assc.__main__ import main; "
        f"sys.exit(main(['report', {str(save(data))!r}, '--out', {str(tmp_path / 'r.html')!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and 'pip install "assc[report]"' in done.stderr and package in done.stderr
    assert done.stderr.count("\n") == 1 and not (tmp_path / "r.html").exists()


def test_no_model_library_is_imported_and_the_page_is_the_same_again(
    data: dict[str, Any], save: Save, tmp_path: Path
) -> None:
    pages = []
    for name in ("one", "two"):
        words = ["report", str(save(data)), "--out", str(tmp_path / f"{name}.html")]
        code = (
            f"import sys; from assc.__main__ import main; rc = main({words!r}); "
            "heavy = {'torch', 'transformers', 'gymnasium', 'matplotlib.pyplot', 'tensorboard'} & set(sys.modules); "
            "assert not heavy, heavy; sys.exit(rc)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0 and not done.stderr, done.stderr
        pages.append((tmp_path / f"{name}.html").read_bytes())
    assert pages[0] == pages[1]
