"""PPO begins as a rule: what is cloned, when it is not, and that a wrong rule is refused."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from tiny_traces import COSTS, tiny_trace

import train_policy
from assc.actions import ActionTable
from assc.core import Request
from assc.costs_io import CostFile, write_costs
from assc.errors import AsscError
from assc.leakage import TrainedOn
from assc.manifest import read_manifest
from assc.markov import MARKOV_COSTS, MarkovSource, markov_requests
from assc.registry import make_policy
from assc.replay import ReplayBackend
from assc.trace import Trace
from assc.trace_io import write_trace
from policies.artefact import load_artefact, save_policy
from policies.learned import LearnedPolicy
from policies.training.config import TrainConfig
from policies.training.imitate import demonstrations
from policies.training.imitated import rule_of
from policies.training.job import train

BOTH = ActionTable.build(["model", "ngram"], (1, 2, 4))


def test_only_ppo_per_round_on_a_trace_with_both_drafters_begins_as_a_rule() -> None:
    assert rule_of(TrainConfig(), BOTH) == "cascade:tuned"
    assert rule_of(TrainConfig(), ActionTable.build(["model"], (1, 2))) is None
    assert rule_of(TrainConfig(imitate="none"), BOTH) is None
    assert rule_of(TrainConfig(imitate="static:2"), BOTH) == "static:2"
    for other in (TrainConfig(algo="a2c"), TrainConfig(backend="live"), TrainConfig(granularity="step")):
        assert rule_of(other, BOTH) is None
    for wrong in (TrainConfig(algo="dqn", imitate="cascade"), TrainConfig(imitate="nonesuch")):
        with pytest.raises(AsscError, match=r"--imitate|unknown policy"):
            wrong.check()


def test_the_network_decides_as_the_rule_did(tmp_path: Path) -> None:
    """After cloning and a few rounds of PPO it decides nearly always as the rule does, without cloning it does not."""
    trace = tiny_trace(n=12)
    write_trace(trace, tmp_path / "trace.npz")
    write_costs(CostFile(COSTS), tmp_path / "costs.json")
    rule, agree = "cascade:k_model=2,k_ngram=8,m=2", {}
    for imitate in (rule, "none"):
        run = tmp_path / imitate.replace(":", "-")
        options = {"traces": str(tmp_path / "trace.npz"), "cost": tmp_path / "costs.json", "run_dir": run}
        config = TrainConfig(
            **options,  # type: ignore[arg-type]
            imitate=imitate,
            total_timesteps=64,
            eval_requests=0,
            curve_every=0,
            progress=False,
        )
        assert train(config) == 0
        policy, backend = load_artefact(run / "policy.zip"), ReplayBackend(trace, COSTS)
        assert isinstance(policy, LearnedPolicy)
        rng = np.random.default_rng(0)
        vectors, chosen = demonstrations(
            backend, trace.requests(), make_policy(rule), policy.featurizer, backend.table, rng
        )
        agree[imitate] = float(np.mean([policy.network(v).argmax() == c for v, c in zip(vectors, chosen, strict=True)]))
    assert agree[rule] > 0.9 > agree["none"]


WAYS = ([], ["--seeds", "0", "1"], *([["--sweep", "1"]] if find_spec("optuna") else []))
"""to start a training: one run, several seeds, a sweep"""


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Words of a small run on a synthetic trace."""
    write_trace(markov_trace(), tmp_path / "trace.npz")
    write_costs(CostFile(MARKOV_COSTS), tmp_path / "costs.json")
    small = ["--total-timesteps", "64", "--live-requests", "0", "--curve-every", "0", "--progress", "False"]
    return ["--traces", str(tmp_path / "trace.npz"), "--cost", str(tmp_path / "costs.json"), *small]


def markov_trace() -> Trace:
    trace = MarkovSource().trace(markov_requests(12, max_new_tokens=16))
    return Trace(trace.header, {**trace.columns, "split": np.array(["held-out", "train", "train"] * 4)}, trace.name)


def saved(path: Path, known: TrainedOn | None) -> Path:
    """A saved policy that says (or not) what it learned from."""
    table = ReplayBackend(markov_trace(), MARKOV_COSTS).table
    meta = {} if known is None else {"trained_on": known.to_json()}
    return save_policy(path, make_policy("static:2"), table=table, meta=meta)


def split(name: str) -> list[Request]:
    trace = markov_trace()
    return trace.requests(trace.where(split=name))


def test_a_clone_has_learned_from_what_the_imitated_policy_learned_from(files: list[str], tmp_path: Path) -> None:
    """Also inside a guard, also after a resume in which the imitated file is another one; silence is passed on."""
    foreign = TrainedOn.of([Request((1, 2, 3), id="elsewhere")], "another workload")
    imitated, run = saved(tmp_path / "imitated.zip", foreign), tmp_path / "run"
    spec = f"guard({imitated})"
    assert train_policy.main([*files, "--imitate", spec, "--run-dir", str(run), "--eval-requests", "0"]) == 0
    both = TrainedOn.of(split("train"), markov_trace().header.workload_hash) | foreign
    assert load_artefact(run / "policy.zip").trained_on == both and both.count == 9
    assert read_manifest(run)["data"][f"imitated {imitated}"]["path"] == str(imitated)

    saved(imitated, None)
    more = ["--total-timesteps", "128", "--eval-requests", "2"]
    assert train_policy.main(["--resume", str(run), *more]) == 0
    assert load_artefact(run / "policy.zip").trained_on == both
    silent = ["--imitate", str(imitated), "--run-dir", str(tmp_path / "silent"), "--eval-requests", "0"]
    assert train_policy.main([*files, *silent]) == 0
    assert load_artefact(tmp_path / "silent" / "policy.zip").trained_on is None


@pytest.mark.parametrize("named", ["{folder}/policy.zip", "guard({folder}/policy.zip)", "{folder}", "guard({folder})"])
def test_a_policy_that_learned_from_held_out_requests_is_not_imitated(
    named: str, files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Named by its file or by its run directory, alone or inside another one."""
    held = split("held-out")
    folder, run = tmp_path / "earlier", tmp_path / "run"
    folder.mkdir()
    imitated = saved(folder / "policy.zip", TrainedOn.of(held[:1]))
    words = [*files, "--imitate", named.format(folder=folder), "--run-dir", str(run)]
    for more in WAYS if named.startswith("guard") else WAYS[:1]:
        assert train_policy.main([*words, *more]) == 2
        said = capsys.readouterr().err
        assert f"was trained on 1 of the 4 evaluated requests, for example {held[0].id!r}" in said
        assert "skip the comparison with --eval-requests 0" in said and not run.exists()
    assert train_policy.main([*words, "--eval-requests", "0"]) == 0
    assert len(load_artefact(run / "policy.zip").trained_on.among(held)) == 1  # type: ignore[union-attr]
    assert read_manifest(run)["data"][f"imitated {imitated}"]["path"] == str(imitated)
    capsys.readouterr()
    assert train_policy.main(["--resume", str(run), "--eval-requests", "2"]) == 2
    assert "was trained on 1 of the 4 evaluated requests" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("random:tuned", "has nothing to tune"),
        ("static:tuned", "not a valid int"),
        ("static:99", "--imitate static:99 cannot be played here: "),
        ("static:drafter=nobody,k=2", "names the drafter 'nobody'"),
        ("hf_confidence", "--imitate takes policies that decide per round, 'hf_confidence' decides after each drafted"),
        ("svip:tuned", "--imitate takes policies that decide per round"),
        ("guard(hf_confidence)", "--imitate takes policies that decide per round"),
        ("nowhere.zip", "nowhere.zip"),
        ("", "has no name"),
    ],
)
def test_what_cannot_be_imitated_is_one_sentence_and_leaves_nothing(
    spec: str, message: str, files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, before = tmp_path / "run", sorted(tmp_path.iterdir())
    for more in WAYS:
        assert train_policy.main([*files, "--imitate", spec, "--run-dir", str(run), *more]) == 2
        errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1 and message in errors[0]
    assert sorted(tmp_path.iterdir()) == before
