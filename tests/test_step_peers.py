"""Peers' policies that decide per token, against restatements of their rules on random drafts and outcomes."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression, SGDClassifier
from test_policies import backend, observation
from tiny_traces import COSTS, tiny_trace

import train_policy
from assc.core import Action, Observation, RoundRecord
from assc.costs_io import CostFile, write_costs
from assc.errors import ArtefactError, SpecError, TraceError
from assc.registry import make_policy
from assc.replay import ReplayBackend
from assc.rule_tuning import tuned_rule
from assc.run import run_request
from assc.steps import Decision, StepObservation
from assc.trace import Trace
from assc.trace_io import write_trace
from policies.artefact import load_artefact
from policies.heads import fit_head, trace_samples
from policies.specdecpp import SpecDecPP

K_MAX = 16
TOKEN = dict[str, float]


def tokens(rng: random.Random) -> list[TOKEN]:
    """Confidences of a whole draft."""
    made, product = [], 1.0
    for _ in range(K_MAX):
        top1 = rng.random() ** 0.5
        product *= top1
        prob = top1 if rng.random() < 0.7 else rng.uniform(0, top1)
        made.append(
            {"entropy": 4 * rng.random() ** 2, "top1": top1, "margin": top1 / 2, "prob": prob, "product": product}
        )
    return made


class Played:
    """Rounds of random confidences and outcomes: what a policy decided, and what a restatement has to explain."""

    def __init__(self, spec: str, rounds: int = 300, seed: int = 0) -> None:
        rng = random.Random(seed)
        self.policy: Any = make_policy(spec, seed=1)
        self.policy.begin(backend(drafters=("model",)).table)
        self.rounds: list[tuple[list[TOKEN], int, Decision, int, bool, int]] = []
        """confidences, tokens drafted, last decision, accepted, whether the request ended then, tokens allowed"""
        self.memories: list[dict[str, Any]] = []
        for i in range(rounds):
            seen, k_max = observation(rng.choice((K_MAX, K_MAX, 5, 1))), 0
            action = self.policy.act(seen)
            k_max, draft = min(action.k, seen.k_max), tokens(rng)
            made, decision = self.draft(seen, draft, k_max)
            drafted = 0 if decision is Decision.ROLLBACK else made
            accepted = drafted if rng.random() < 0.6 else rng.randint(0, drafted)
            ends = rng.random() < 0.05
            self.policy.update(record(i, made, drafted, accepted, ends))
            self.rounds.append((draft, made, decision, accepted, ends, k_max))
            self.memories.append(
                {name: getattr(self.policy, name) for name in ("th", "lam") if hasattr(self.policy, name)}
            )
            if ends:
                self.policy.begin(self.policy.table)

    def draft(self, seen: Observation, draft: list[TOKEN], k_max: int) -> tuple[int, Decision]:
        decision = Decision.VERIFY
        for made in range(1, k_max + 1):
            decision = self.policy.decide(StepObservation(seen, "model", k_max, made, **draft[made - 1]))
            if decision is not Decision.CONTINUE or made == k_max:
                return made, decision
        return 0, decision


def record(i: int, made: int, drafted: int, accepted: int, ends: bool) -> RoundRecord:
    return RoundRecord(
        i, i, Action("model", made) if made else Action(None, 0), drafted, accepted, accepted + 1, (), 0.02,
        discarded=made - drafted, finish="length" if ends else None,
    )  # fmt: skip


def first(draft: list[TOKEN], k_max: int, doubtful: Any) -> tuple[int, bool]:
    """Tokens drafted when the first doubtful one is the last, and whether there was one."""
    for j, token in enumerate(draft[:k_max], 1):
        if doubtful(token):
            return j, True
    return k_max, False


@pytest.mark.parametrize("p_min", [0.0, 0.3, 0.75, 1.0])
def test_llamacpp_is_its_rule(p_min: float) -> None:
    for draft, made, decision, _, _, k_max in Played(f"llamacpp:p_min={p_min},n_max=9,n_min=3").rounds:
        assert k_max in (0, 5, 9)  # one token alone is less than n_min, so such a round is not begun
        expected, stopped = first(draft, k_max, lambda t: t["prob"] < p_min)
        assert made == expected
        assert (decision is Decision.ROLLBACK) == (stopped and expected < 3)


@pytest.mark.parametrize("h", [0.1, 0.3, 0.6])
def test_svip_is_its_rule(h: float) -> None:
    lengths = set()
    for draft, made, decision, _, _, k_max in Played(f"svip:h={h}").rounds:
        assert made == first(draft, k_max, lambda t: (0.15 * t["entropy"]) ** 0.5 > h)[0]
        assert decision is not Decision.ROLLBACK
        lengths.add(made)
    assert len(lengths) > 1


def test_draft_verify_is_its_rule() -> None:
    """The update as the source's loop writes it down: matched first, then the threshold, each with its smoothing."""
    parameters = (0.6, 0.7, 0.3, 0.2, 0.8)  # kept of the match, goal, step, kept of the threshold, first threshold
    spec = "draft_verify:keep=0.6,goal=0.7,step=0.3,smooth=0.2,th=0.8,cap=6"
    played = Played(spec)
    keep, goal, step, smooth, th = parameters
    matchness, ways = 0.0, set()
    for (draft, made, _, accepted, ends, k_max), memory in zip(played.rounds, played.memories, strict=True):
        assert made == first(draft, min(k_max, 6), lambda t, th=th: t["prob"] < th)[0]
        matchness = keep * matchness + (1 - keep) * accepted / made
        new = th
        if matchness < goal:
            new = th + step
            ways.add("up")
        elif made != 6:
            new = th - step
            ways.add("down")
        else:
            ways.add("kept")
        th = smooth * th + (1 - smooth) * new
        assert math.isclose(memory["th"], th, abs_tol=1e-12)
        matchness = 0.0 if ends else matchness  # the threshold goes on
    assert ways >= {"up", "down"}
    for accepted, drafted, expected in ((6, 6, 0.5), (5, 5, 0.4), (0, 6, 0.6)):  # all three ways, by hand
        policy: Any = make_policy("draft_verify:keep=0,step=0.1,smooth=0,th=0.5,cap=6")
        policy.begin(backend(drafters=("model",)).table)
        policy.update(record(0, drafted, drafted, accepted, False))
        assert math.isclose(policy.th, expected)


def test_adaedl_is_its_rule() -> None:
    """Algorithm 1, with n the tokens whose bound held; the doubtful one that ends a draft is verified, not counted."""
    played = Played("adaedl:keep=0.6,goal=0.7,step=0.03,smooth=0.2,lam=0.4,cap=7")
    rate, lam, ways = 0.0, 0.4, set()
    for (draft, made, _, accepted, ends, k_max), memory in zip(played.rounds, played.memories, strict=True):
        length, stopped = first(draft, min(k_max, 7), lambda t, lam=lam: 1 - math.sqrt(0.2 * t["entropy"]) < lam)
        assert made == length
        n = length - stopped
        if n:
            kept = min(accepted, n)
            rate = 0.6 * rate + 0.4 * kept / n
            new = lam + 0.03 if rate < 0.7 else lam - 0.03 if kept != 7 else lam
            ways.add(round(new - lam, 6))
            lam = 0.2 * lam + 0.8 * new
        assert math.isclose(memory["lam"], lam, abs_tol=1e-12)
        rate = 0.0 if ends else rate
    assert ways >= {0.03, -0.03}


def vector(token: TOKEN, place: int) -> list[float]:
    named = [token[n] for n in ("top1", "margin", "prob", "product")]
    return [1.0, token["entropy"] / 3, *named, math.log2(place) / 4]


def test_specdecpp_is_its_rule_and_learns_as_scikit_learn_does() -> None:
    """The whole run again with an `SGDClassifier` that keeps its own state, and the chance as a plain product."""
    played = Played("specdecpp:every=3,rate=0.1,reject=2,tau=0.6,least=2,cap=9")
    model = SGDClassifier(
        loss="log_loss", alpha=1e-4, learning_rate="constant", eta0=0.1, fit_intercept=False, shuffle=False
    )
    w, waiting, batches = np.array([-2.0, 0, 0, 0, 4, 0, 0]), [], 0
    rows: list[tuple[list[float], int]] = []
    for draft, made, decision, accepted, ends, k_max in played.rounds:
        vectors = [vector(t, j) for j, t in enumerate(draft, 1)]
        chances = 1 / (1 + np.exp(-np.array(vectors) @ w))
        refusal = 1 - np.cumprod(chances)
        expected = next((j for j in range(2, k_max + 1) if refusal[j - 1] > 0.6), k_max)
        assert made == expected and decision is not Decision.ROLLBACK
        judged = accepted + (accepted < made and not ends)
        if judged:
            rows += [(vectors[j], int(j < accepted)) for j in range(judged)]
            waiting.append(judged)
        if len(waiting) == 3:
            x, y = np.array([r[0] for r in rows]), np.array([r[1] for r in rows])
            if not batches:
                model.coef_, model.intercept_ = w[None].copy(), np.zeros(1)
            model.partial_fit(x, y, classes=[0, 1], sample_weight=np.where(y == 1, 1.0, 2.0))
            w, rows, waiting, batches = model.coef_[0].copy(), [], [], batches + 1
    assert batches > 50
    np.testing.assert_allclose(played.policy.heads["model"], w, rtol=1e-9, atol=1e-12)


def steps_by_hand(trace: Trace, drafter: str) -> list[tuple[int, int, bool]]:
    """(position, draft step from 1, accepted) of all that is judged, one at a time."""
    found = []
    for row in range(len(trace)):
        start, end = trace.columns["offsets"][row : row + 2].tolist()
        for n in range(start, end):
            accepted = int(trace.columns[f"acc/{drafter}"][n])
            for j in range(1, int(trace.columns[f"avail/{drafter}"][n]) + 1):
                if j <= accepted + 1 and n + j <= end:
                    found.append((n, j, j <= accepted))
    return found


def test_an_acceptance_head_learns_from_every_judged_step_of_a_trace() -> None:
    trace = tiny_trace()
    (name, (x, y)), *others = trace_samples(trace).items()
    assert name == "model" and not others
    by_hand = steps_by_hand(trace, "model")
    assert [a for _, _, a in by_hand] == y.tolist() and 0 < y.mean() < 1
    assert [j for _, j, _ in by_hand] == np.round(2.0 ** (4 * x[:, -1])).astype(int).tolist()
    policy = SpecDecPP(reject=3.0)
    assert policy.fit(trace) == len(y)
    model = LogisticRegression(max_iter=1000)
    model.fit(x[:, 1:], y, sample_weight=np.where(y, 1.0, 3.0))
    mine = 1 / (1 + np.exp(-x @ np.array(policy.heads["model"])))
    np.testing.assert_allclose(mine, model.predict_proba(x[:, 1:])[:, 1], atol=1e-3)
    assert fit_head(x, np.ones(len(x), dtype=bool))[1:] == [0.0] * 6
    lookup = [d for d in trace.header.drafters if d.name == "ngram"]
    without = {k: v for k, v in trace.columns.items() if not k.endswith("/model")}
    with pytest.raises(TraceError, match="has no confidences per draft step"):
        trace_samples(Trace(replace(trace.header, drafters=tuple(lookup)), without))


def test_specdecpp_is_trained_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tiny_trace()
    write_trace(trace, tmp_path / "trace.npz")
    write_costs(CostFile(COSTS), tmp_path / "costs.json")
    words = ["--traces", str(tmp_path / "trace.npz"), "--cost", str(tmp_path / "costs.json"), "--progress", "False"]
    words += ["--algo", "specdecpp:frozen=true", "--total-timesteps", "20", "--run-dir", str(tmp_path / "run")]
    assert train_policy.main([*words, "--eval-requests", "0"]) == 0
    assert "Learned from" in capsys.readouterr().out
    loaded: Any = load_artefact(tmp_path / "run" / "policy.zip")
    policy = SpecDecPP()
    policy.fit(trace.select(trace.where(split="train")))
    assert loaded.heads == policy.heads
    requests = trace.requests(trace.where(split="held-out"))[:2]
    for request in requests:
        run_request(ReplayBackend(trace, COSTS), request, loaded)
    assert loaded.heads == policy.heads, "frozen"


def test_a_saved_head_of_another_shape_is_refused() -> None:
    policy = make_policy("specdecpp")
    state = json.loads(json.dumps(policy.state_dict())) | {"heads": {"model": [1.0, 2.0]}}
    with pytest.raises(ArtefactError, match="expects 7 coefficients per drafter"):
        policy.load_state_dict(state)


@pytest.mark.parametrize("name", ["hf_confidence", "llamacpp", "svip", "adaedl", "draft_verify", "specdecpp"])
def test_thresholds_can_be_tuned(name: str) -> None:
    """The best of the grid on two requests is a spec that can be made, and not slower than the default there."""
    trace = tiny_trace()
    engine, requests = ReplayBackend(trace, COSTS), trace.requests()[:2]
    spec = tuned_rule(f"{name}:tuned", engine, requests)

    def seconds(one: str) -> float:
        policy = make_policy(one)
        return sum(r.seconds for request in requests for r in run_request(engine, request, policy).rounds)

    assert seconds(spec) <= seconds(name)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("llamacpp:p_min=1.5", "p_min is a probability"),
        ("llamacpp:n_min=9,n_max=4", "n_min 0 to n_max"),
        ("svip:h=-1", "h is 0 or more"),
        ("svip:scale=nan", "scale above 0"),
        ("adaedl:lam=2", "lam, goal, keep and smooth are 0 to 1"),
        ("adaedl:gamma=0", "gamma is above 0"),
        ("draft_verify:th=nan", "are 0 to 1 and step 0 or more"),
        ("specdecpp:tau=-0.1", "tau is a chance"),
        ("specdecpp:least=5,cap=3", "least is 1 to cap"),
        ("specdecpp:rate=0", "rate in"),
    ],
)
def test_bad_values_are_one_sentence(spec: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        make_policy(spec)
