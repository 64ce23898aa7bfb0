"""`accept_stop`: its stop rule against brute force, its prices, its fit to a trace, and replay equal to live."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_policies import backend, observation
from tiny_traces import COSTS, tiny_engine, tiny_trace

from assc.actions import ActionTable
from assc.core import ROLLBACK, Action, Observation, RoundRecord
from assc.costs_io import CostFile, write_costs
from assc.errors import ArtefactError, AsscError, RequestError
from assc.live import LiveBackend
from assc.registry import make_policy
from assc.replay import ReplayBackend
from assc.run import run_request
from assc.steps import Decision, StepObservation
from assc.trace_io import write_trace
from policies.accept_heads import ROUND, SIZES, STEP, Hits, chance, logistic, lookup_numbers
from policies.accept_stop import AcceptStop
from policies.artefact import load_artefact, read_artefact
from policies.step_costs import TARGET, Sums, add_round, fitted, rescaled
from policies.training.config import TrainConfig
from policies.training.job import train

CHANCES = (0.9, 0.5, 0.2)
"""what the draft may say of a token; on the tiny model below it is right, and tells nothing of the next one"""


def known(step_cost: float, column: float, mean: float) -> AcceptStop:
    """A policy that knows the tiny model: tokens are accepted as often as the draft says, `mean` of those to come."""
    policy = AcceptStop()
    policy.begin(ActionTable.build(["model", "ngram"], range(1, 17)))
    policy.heads["next"] = [math.log(mean / (1 - mean))] + [0.0] * (STEP - 1)
    policy.sums = {}
    policy.price(0.1)
    policy.step_cost, policy.column_cost, policy.tile_cost = step_cost, column, 0.0
    return policy


def shown(p: float, j: int) -> StepObservation:
    return StepObservation(observation(), "model", 16, j, 0.5, p, p, p, p)


def stop_at(policy: AcceptStop, chances: tuple[float, ...]) -> int:
    policy.open()
    for j, p in enumerate(chances, 1):
        if policy.judge([0.0] * 14, shown(p, j)) is not Decision.CONTINUE:
            return j
    return len(chances)


@pytest.mark.parametrize(("step_cost", "column"), [(0.05, 0.02), (0.2, 0.05), (0.4, 0.02)])
def test_stops_where_brute_force_over_all_rules_does(step_cost: float, column: float) -> None:
    """Backward induction over every sequence of chances: the best any rule can gain, and the rule's own gain.

    Where a token's chance tells nothing of the next one's, looking one token ahead is at most slightly short of it.
    """
    horizon, mean = 6, sum(CHANCES) / len(CHANCES)

    def best(survive: float, j: int) -> float:
        """Expected further gain of the optimal rule when j tokens are drafted that survive with this chance."""
        if j == horizon:
            return 0.0
        ahead = sum(survive * p + best(survive * p, j + 1) for p in CHANCES) / len(CHANCES)
        return max(0.0, ahead - step_cost - column)

    first = sum(p + best(p, 1) for p in CHANCES) / len(CHANCES) - step_cost - column
    policy, gained = known(step_cost, column, mean), []
    for chances in product(CHANCES, repeat=horizon):
        k = stop_at(policy, chances)
        gained.append(sum(math.prod(chances[:i]) for i in range(1, k + 1)) - (step_cost + column) * k)
    assert first >= np.mean(gained) - 1e-9
    assert first - np.mean(gained) < 0.02, "tokens per round short of the best rule"
    fixed = [
        sum(mean**i for i in range(1, k + 1)) - (step_cost + column) * k for k in range(1, horizon + 1)
    ]  # any K that is planned beforehand
    assert np.mean(gained) >= max(fixed) - 1e-9


def test_rolls_back_where_verifying_costs_more_than_it_can_gain() -> None:
    policy = known(0.05, 0.5, 0.5)
    policy.open()
    assert policy.judge([0.0] * 14, shown(0.2, 1)) is Decision.ROLLBACK
    policy.open()
    assert policy.judge([0.0] * 14, shown(0.6, 1)) is Decision.VERIFY


def test_lookup_gets_the_k_that_gains_most() -> None:
    policy = known(0.05, 0.03, 0.5)
    policy.heads["lookup"] = [0.0] * len(policy.heads["lookup"])
    policy.heads["lookup"][0] = math.log(0.8 / 0.2)
    x = [1.0] + [0.0] * (ROUND - 1)
    gains = [sum(0.8**i for i in range(1, k + 1)) - 0.03 * k for k in range(1, 17)]
    gain, k = policy.lookup_gain(x, [], 16)
    assert k == int(np.argmax(gains)) + 1 and gain == pytest.approx(max(gains))
    assert policy.lookup_gain(x, [], 3)[1] == 3


def test_the_lookups_chances_are_those_of_the_fitted_rows() -> None:
    """What is summed up piece by piece when it decides is the head over the numbers that it was fitted to."""
    rng = np.random.default_rng(0)
    policy = known(0.05, 0.0, 0.5)
    policy.heads["lookup"] = rng.normal(size=len(policy.heads["lookup"])).tolist()
    x, ahead = rng.normal(size=ROUND).tolist(), rng.normal(size=(3, 5)).tolist()
    chances = [chance(policy.heads["lookup"], lookup_numbers(x, j, ahead[j - 1])) for j in (1, 2, 3)]
    worth = [sum(math.prod(chances[: i + 1]) for i in range(k)) - policy.ask_cost for k in (1, 2, 3)]
    assert policy.lookup_gain(x, ahead, 3) == (pytest.approx(max(worth)), 3)
    assert logistic(-1000.0) == 0.0


def test_a_token_that_followed_before_makes_the_lookup_bolder() -> None:
    """The same match: where the text has always gone on like that, more is copied than where it went on otherwise."""
    policy = known(0.05, 0.06, 0.5)
    policy.heads["lookup"] = [0.0] * len(policy.heads["lookup"])
    policy.heads["lookup"][-5] = 4.0  # of how often the proposed token has followed the two before it

    def planned(prompt: tuple[int, ...]) -> int:
        policy.begin(policy.table)
        policy.price(0.1)
        policy.column_cost = 0.3
        seen = Observation(0, len(prompt), 50, 16, 0.0, (), 0.1, ngram_match=2, committed=prompt)
        action = policy.act(seen)
        return action.k if action.drafter == "ngram" else 0

    always, varied = (1, 2, 3) * 9 + (1, 2), (1, 2, 3, 1, 2, 4, 1, 2, 5, 1, 2, 6, 1, 2)
    assert planned(always) > planned(varied)


def test_seconds_are_found_again_and_follow_c() -> None:
    sums: Sums = {}
    rng = np.random.default_rng(0)
    for i in range(200):
        k, catch = int(rng.integers(0, 17)), int(rng.integers(0, 9))
        draft = 0.004 + 0.002 * k + 0.0001 * catch if k else 0.0
        rest = 0.05 + 0.0007 * k + 0.004 * (k >= 16)
        action = Action("model" if k else None, k)
        add_round(
            sums,
            RoundRecord(i, i, action, k, 0, 1, (1,), draft + rest, draft, rest, catch_up=catch, draft_steps=k),
        )
    assert fitted(sums, "model", (0, 0, 0)) == pytest.approx((0.004, 0.002, 0.0001), rel=0.02)
    assert fitted(sums, TARGET, None) == pytest.approx((0.05, 0.0007, 0.004), rel=0.02)
    rescaled(sums, "model", 3.0)
    assert fitted(sums, "model", (0, 0, 0)) == pytest.approx((0.012, 0.006, 0.0003), rel=0.02)


def test_a_dearer_draft_is_asked_for_less() -> None:
    def drafted(c: float) -> int:
        policy = AcceptStop()
        policy.begin(backend().table)
        policy.act(Observation(9, 3, 50, 16, 0.0, (), c, ngram_match=0))
        return stop_at(policy, (0.8,) * 16)

    counts = [drafted(c) for c in (0.02, 0.1, 0.3, 0.9)]
    assert counts == sorted(counts, reverse=True) and counts[0] > counts[-1]


def test_hits_of_the_lookup_are_seen_without_asking_it() -> None:
    hits = Hits()
    hits.observe(3)
    hits.update(RoundRecord(0, 0, Action("model", 2), 2, 1, 2, (1, 2), 0.1), True)
    hits.observe(5)  # the match has grown by the two tokens
    assert hits.run == 2 and hits.lookup > 0.5 and hits.model > 0.5
    hits.update(RoundRecord(1, 2, Action(None, 0), 0, 0, 1, (3,), 0.1), False)
    hits.observe(0)
    assert hits.run == 0


# -- fitting -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("accept")
    trace, costs = folder / "tiny.npz", folder / "costs.json"
    source = tiny_trace(n=6)
    ids = sorted(set(source.columns["id"].tolist()))
    held = set(ids[4:])
    source.columns["split"] = np.array(["held-out" if i in held else "train" for i in source.columns["id"].tolist()])
    write_trace(source, trace)
    write_costs(CostFile(COSTS), costs)
    return trace, costs


def config(files: tuple[Path, Path], run_dir: Path | None, **changes: object) -> TrainConfig:
    options: dict[str, object] = {
        "algo": "accept_stop",
        "traces": str(files[0]),
        "cost": files[1],
        "run_dir": run_dir,
        "total_timesteps": 120,
        "eval_requests": 0,
        "curve_every": 0,
        "progress": False,
    }
    return TrainConfig(**(options | changes))  # type: ignore[arg-type]


def test_the_same_seed_fits_the_same_policy_and_live_plays_it_as_replay_does(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    once, twice = tmp_path / "a", tmp_path / "b"
    assert train(config(files, once)) == 0 and train(config(files, twice)) == 0
    artefact, other = (read_artefact(run / "policy.zip") for run in (once, twice))
    assert artefact.state == other.state and artefact.state is not None
    assert artefact.state["heads"] != AcceptStop().heads
    policy = load_artefact(once / "policy.zip")
    assert isinstance(policy, AcceptStop) and policy.trained_on is not None and len(policy.trained_on.prompts) == 4
    assert policy.state_dict() == artefact.state
    trace = tiny_trace(n=6)
    live = LiveBackend(tiny_engine(), mode="gumbel", cost_model=COSTS, time_source="modelled")
    copier = AcceptStop()
    copier.heads["lookup"][0] = 3.0  # a policy that copies wherever it can
    counts = set()
    for chosen in (policy, copier):
        for request in trace.requests()[-3:]:
            rounds = []
            for engine in (ReplayBackend(trace, COSTS), live):
                chosen.reset()
                played = run_request(engine, request, chosen).rounds
                rounds.append([(r.action, r.drafted, r.accepted, r.discarded, r.tokens, r.finish) for r in played])
            assert rounds[0] == rounds[1]
            counts |= {r[1] for r in rounds[0]}
    assert len(counts) > 2, "the policies stop at several lengths"


def test_seconds_stay_those_of_the_fit_or_follow_its_own_rounds(files: tuple[Path, Path], tmp_path: Path) -> None:
    """Where every second counts three times as much as in the fit, only `seconds=fitted` notices."""
    slow = replace(COSTS, target_fixed=3 * COSTS.target_fixed, target_per_token=9 * COSTS.target_per_token)
    trace = tiny_trace(n=6)
    for seconds, fixed in (("modelled", True), ("fitted", False)):
        run = tmp_path / seconds
        assert train(config(files, run, algo=f"accept_stop:seconds={seconds}")) == 0
        policy = load_artefact(run / "policy.zip")
        assert isinstance(policy, AcceptStop) and policy.fixed is fixed
        before = policy.state_dict()["sums"]
        backend_ = ReplayBackend(trace, slow)
        backend_.cost_ratio = policy.c
        for request in trace.requests()[-3:]:
            run_request(backend_, request, policy)
        assert (policy.state_dict()["sums"] == before) is fixed
    with pytest.raises(AsscError, match="modelled, fitted"):
        make_policy("accept_stop:seconds=guessed")


def test_what_cannot_be_fitted_is_refused(files: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="fitted to a trace"):
        config((Path(), Path()), tmp_path / "x", backend="live", traces=None).check()
    with pytest.raises(AsscError, match="share from 0 to 1"):
        make_policy("accept_stop:charge=2")
    policy = make_policy("accept_stop")
    state = policy.state_dict()
    with pytest.raises(AsscError, match="heads of these sizes"):
        policy.load_state_dict(state | {"heads": {}})
    with pytest.raises(AsscError, match="nine numbers"):
        policy.load_state_dict(state | {"sums": {"model": [1.0]}})


def test_a_resumed_fit_equals_one_that_never_stopped(
    files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from policies.training import accept_fit

    monkeypatch.setattr(accept_fit, "BATCH", 60)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert train(config(files, whole, total_timesteps=150)) == 0
    assert train(config(files, cut, total_timesteps=70)) == 0
    assert train(config(files, None, total_timesteps=150, resume=cut)) == 0
    assert read_artefact(whole / "policy.zip").state == read_artefact(cut / "policy.zip").state


@pytest.mark.parametrize("setting", ["modelled", "fitted"])
def test_odd_seconds_leave_a_plain_step_that_costs_something(setting: str) -> None:
    """Seconds in proportion to the tokens verified: least squares without negative coefficients drops the intercept."""
    policy = make_policy(f"accept_stop:seconds={setting}")
    policy.begin(ActionTable.build(["model", "ngram"], range(1, 17)))
    seen = Observation(9, 3, 50, 16, 0.0, (), 0.05, ngram_match=0, committed=(1, 2, 3))
    policy.act(seen)
    for i, (k, s) in enumerate([(8, 0.9), (4, 0.4), (2, 0.2)]):
        policy.update(RoundRecord(i, 9 + i, Action("ngram", k), k, 0, 1, (), s, 0.0, s))
    policy.begin(policy.table)
    policy.act(seen)
    assert fitted(policy.sums, TARGET, None)[0] >= 0.04  # type: ignore[attr-defined]
    for seconds in (1e-9, 1e9):
        policy.update(RoundRecord(3, 20, ROLLBACK, 0, 0, 1, (), seconds, 0.0, seconds))
        policy.begin(policy.table)
        policy.act(seen)


@pytest.mark.parametrize(
    "damage",
    [
        {"sums": {"target": [0] * 9}},
        {"sums": {"target": ["x"] * 9}},
        {"heads": {name: ["x"] * size for name, size in SIZES.items()}},
    ],
)
def test_a_damaged_state_is_refused(damage: dict[str, Any]) -> None:
    policy = make_policy("accept_stop")
    with pytest.raises(ArtefactError):
        policy.load_state_dict(policy.state_dict() | damage)
