"""Probes of drafters that a learner has stopped using, and the learner `survival`."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from typing import Any

import pytest
from fakes import FakeBackend

from assc.actions import ActionTable
from assc.core import ROLLBACK, Action, Observation, Request, RoundRecord
from assc.errors import ArtefactError
from assc.registry import make_policy
from assc.run import run_request
from policies.probing import SAVED, Probe, can_show, choose, count, due, fresh_probes, know
from policies.survival import PRIOR, TRUST, Survival

LEARNERS = ["linucb", "lints", "accept_model", "survival", "mdp"]
TABLE = ActionTable.build(["ngram", "model"], [1, 2, 4, 8])


def record(action: Action, accepted: int = 0, drafted: int | None = None, **fields: Any) -> RoundRecord:
    drafted = action.k if drafted is None else drafted
    return RoundRecord(0, 0, action, drafted, accepted, accepted + 1, (), 1.0, **fields)


def seen(match: int = 0, **fields: Any) -> Observation:
    return Observation(0, 3, 99, 8, 0.0, (), **{"cost_ratio": 0.05, "ngram_match": match, **fields})


def rounds_of(policy: Any, rounds: int, seed: int, **costs: Any) -> list[RoundRecord]:
    backend = FakeBackend(drafters=("model",), **costs)
    found: list[RoundRecord] = []
    while len(found) < rounds:
        found += run_request(backend, Request((1,), 96, seed=seed + len(found)), policy).rounds
    return found[:rounds]


def test_a_probe_waits_until_its_loss_is_earned() -> None:
    state, asked = fresh_probes(), []
    know(state, ["model"])
    for i in range(200):
        probe = choose(state, [Probe("model", 0.05, 0.0)] if due(state, 2) else [])
        action = Action("model", 1) if probe else ROLLBACK
        asked += [i] if probe else []
        assert count(state, record(action), 0.01, probe) == 0.0
    assert 200 * 0.01 / 0.05 * 0.8 < len(asked) <= 200 * 0.01 / 0.05
    assert min(b - a for a, b in pairwise(asked)) >= 2


def test_the_cheapest_probe_comes_first_and_earnings_are_limited() -> None:
    state = fresh_probes() | {"credit": 5.0}
    assert choose(state, []) is None and state["credit"] == 5.0
    assert choose(state, [Probe("a", 0.3, 0.1), Probe("b", 0.1, 0.1)]) == Probe("b", 0.1, 0.1)
    assert state["credit"] == pytest.approx(SAVED * 0.1, abs=0.011)
    assert choose(fresh_probes(), [Probe("a", 0.0, 0.5)]) is None, "nothing was earned"


def test_an_accepted_probe_is_repeated_where_it_can_be_worth_it() -> None:
    state = fresh_probes() | {"credit": 0.1}
    know(state, ["model"])
    probe = Probe("model", 0.05, 0.1)
    count(state, record(Action("model", 1), 1), 0.0, probe)
    assert state["credit"] == 0.1 and due(state, 99) == ["model"]
    assert choose(state, [Probe("model", 3.0, 0.1)]) is None, "another drafter is worth three tokens more in this round"
    assert choose(state, [probe]) == probe
    count(state, record(Action("model", 1), 0), 0.0, probe)
    assert state["credit"] == pytest.approx(0.1 - 0.05 - 0.1) and due(state, 99) == []


def test_cusum_by_hand() -> None:
    """Believed 0.1, so the other hypothesis is 0.55; the alarm comes at a log-likelihood ratio of 4."""
    hit, miss = math.log(0.55 / 0.1), math.log(0.45 / 0.9)
    state, total, probe = fresh_probes(), 0.0, Probe("model", 0.05, 0.1)
    for accepted in (0, 1, 0, 1, 1):
        total = max(0.0, total + (hit if accepted else miss))
        shift = count(state, record(Action("model", 1), accepted), 0.0, probe)
        if accepted and total >= 4.0:
            assert shift == pytest.approx(math.log(0.55 / 0.45) - math.log(0.1 / 0.9)) and not state["better"]
        else:
            assert shift == 0.0 and state["better"]["model"] == pytest.approx(total)
    assert total >= 4.0
    ended = record(Action("model", 1), 0, finish="eos")
    assert count(state, ended, 0.0, probe) == 0.0 and not state["better"], "the end of a request proves nothing"


def test_a_lookup_is_probed_only_where_the_text_recurs() -> None:
    assert not can_show("ngram", seen(0)) and can_show("ngram", seen(2)) and can_show("model", seen(0))
    assert can_show("ngram", seen(ngram_match=None)), "where nobody reads the match"


def probes_in(spec: str, rounds: int, **costs: Any) -> int:
    policy = make_policy(spec, seed=1)
    rounds_of(policy, 400, 5, alpha=0.0, **costs)
    return sum(not r.rollback for r in rounds_of(policy, rounds, 9, alpha=0.0, **costs))


@pytest.mark.parametrize("spec", LEARNERS)
def test_probes_of_a_useless_draft_stay_within_their_share(spec: str) -> None:
    """A draft that is never right: what is drafted after 400 rounds costs 2 % of the time at most, and happens."""
    cheap, dear = probes_in(spec, 600, c=0.05), probes_in(spec, 600, c=0.4)
    assert 0 < dear < cheap <= 0.02 / 0.05 * 600 and 0.4 * dear <= 0.02 * 600


@pytest.mark.parametrize("spec", LEARNERS)
def test_without_a_share_nothing_is_probed(spec: str) -> None:
    policy = make_policy(f"{spec}:share=0", seed=1)
    rounds_of(policy, 300, 5, alpha=0.0, c=0.2)
    assert not any(policy.probes["better"].values())  # type: ignore[attr-defined]


@pytest.mark.parametrize("spec", LEARNERS)
def test_a_mended_draft_is_used_within_150_rounds(spec: str) -> None:
    policy = make_policy(spec, seed=1)
    rounds_of(policy, 150, 1, alpha=0.7, c=0.05)
    rounds_of(policy, 600, 3, alpha=0.0, c=0.05)
    after = rounds_of(policy, 250, 9, alpha=0.7, c=0.05)[150:]
    assert sum(not r.rollback for r in after) > 0.5 * len(after)


# -- survival --------------------------------------------------------------------------------------------------------


def test_survival_counts_as_kaplan_and_meier_do() -> None:
    policy = Survival(discount=0.5, explore=0, share=0)
    policy.begin(TABLE)
    policy.act(seen())
    for accepted, finish in ((2, None), (0, None), (1, "eos")):
        policy.update(record(Action("model", 4), accepted, finish=finish))
    # weights of the rounds: 1/4, 1/2, 1; judged: positions 1 to 3, position 1, position 1
    reached, passed = policy.counts["model/0"]
    assert reached[:4] == [1.75, 0.25, 0.25, 0.0] and passed[:4] == [1.25, 0.25, 0.0, 0.0]
    later = (PRIOR + 0.25) / (1.0 + 0.5)
    expected = [(1.25 + PRIOR) / 2.75, (0.25 + TRUST * later) / (0.25 + TRUST), TRUST * later / (0.25 + TRUST), later]
    assert policy.acceptance("model")[:4] == pytest.approx(expected)
    policy.act(seen())
    assert policy.accept_chances(Action("model", 2)) == pytest.approx(expected[:2])
    policy.act(seen(4))
    policy.update(record(Action("ngram", 8), 3))
    assert policy.counts["ngram/2"][0][:5] == [1.0, 1.0, 1.0, 1.0, 0.0] and "ngram/1" not in policy.counts


def test_survival_plays_the_best_action_under_its_curves() -> None:
    """Against all actions worked out one by one."""
    policy = Survival(explore=0, share=0)
    policy.begin(TABLE)
    for i in range(400):
        observation = seen(match=4 if i % 3 else 0)
        action = policy.act(observation)
        level, c = policy.level, 0.05
        tokens, seconds = policy.pace.get(level, (1.0, 1.0))
        worth = {ROLLBACK: 1.0 - tokens / seconds * prices_of(policy, None, c)[0]}
        for a in TABLE:
            if a.drafter is not None and (i % 3 or a.drafter == "model"):
                base, call, token = prices_of(policy, a.drafter, c)
                run, gained = 1.0, 1.0
                for p in policy.acceptance(a.drafter, 2 if a.drafter == "ngram" else 0)[: a.k]:
                    run *= p
                    gained += run
                worth[a] = gained - tokens / seconds * (base + call + a.k * token)
        if policy.pace:
            assert worth[action] == pytest.approx(max(worth.values()))
        accepted = min(action.k, (0, 1, 3, 8)[i % 4] if action.drafter == "ngram" else i % 2)
        spent = 0.05 * action.k if action.drafter == "model" else 0.0
        timed: dict[str, Any] = {"draft_seconds": spent, "draft_steps": action.k}
        policy.update(RoundRecord(i, 0, action, action.k, accepted, accepted + 1, (), 1.0 + spent, **timed))


def prices_of(policy: Survival, drafter: str | None, c: float) -> tuple[float, float, float]:
    from policies.round_costs import prices

    return prices(policy.costs, policy.level, drafter, c)


def test_survival_asks_no_lookup_without_a_match_but_a_context_free_one_may() -> None:
    with_strata, without = Survival(explore=0), Survival(explore=0, strata=1)
    assert with_strata.needs == {"ngram_match"} and without.needs == frozenset()
    for policy, expected in ((with_strata, "model"), (without, "ngram")):
        policy.begin(TABLE)
        assert policy.act(seen(0)).drafter == expected
        assert policy.act(seen(9)).drafter == "ngram"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("counts", {"model/0": [[1.0, 2.0]]}),
        ("counts", {"model/0": [[1.0], [2.0]]}),
        ("counts", {"model/0": [[], []]}),
        ("counts", {"model/0": [[1.0, 1.0], [0.5]]}),
        ("counts", {"model/0": [[math.nan], [math.nan]]}),
        ("probes", {"credit": 0.0}),
        ("probes", {"credit": math.inf, "again": "", "idle": {}, "better": {}}),
        ("probes", {"credit": 0.0, "again": 3, "idle": {}, "better": {}}),
        ("pace", [1.0]),
        ("rng", "x"),
    ],
)
def test_survival_refuses_damaged_states(key: str, value: Any) -> None:
    policy = make_policy("survival")
    rounds_of(policy, 50, 1, alpha=0.5, c=0.1)
    state = json.loads(json.dumps(policy.state_dict()))
    make_policy("survival").load_state_dict(state)
    with pytest.raises(ArtefactError):
        make_policy("survival").load_state_dict({**state, key: value})


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("survival:strata=9", "strata is 1 to 4"),
        ("survival:discount=0", "discount and memory are in"),
        ("survival:share=2", "share within 0..1"),
        ("linucb:probe=0", "probe is 1 or more rounds"),
    ],
)
def test_bad_settings_are_one_sentence(spec: str, said: str) -> None:
    with pytest.raises(Exception, match=said):
        make_policy(spec)
