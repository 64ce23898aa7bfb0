"""Recording: any drafter, resumable to the byte, refused where it could not be exact."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny_traces import COSTS, prompts, tiny_engine, tiny_requests, tiny_trace

from assc import record as recording
from assc.__main__ import main
from assc.batch import Batch
from assc.core import Action
from assc.drafters.base import Proposal
from assc.drafters.model import ModelDrafter
from assc.engine import Engine
from assc.errors import RequestError
from assc.kv import ModelRunner
from assc.live import LiveBackend
from assc.recorder import record_request
from assc.replay import ReplayBackend
from assc.tiny import tiny_pair
from assc.trace_build import build_trace
from assc.trace_io import read_trace

Capture = pytest.CaptureFixture[str]


class Walked:
    """A drafter of an unknown kind: the same proposals as `ModelDrafter`, but no teacher-forced shortcut for it."""

    kind = "walked"
    keeps = "drafts"
    has_confidence = True
    gives_q = True

    def __init__(self, inner: ModelDrafter) -> None:
        self.inner, self.name = inner, inner.name

    def propose(self, batch: Batch, ks: list[int]) -> Proposal:
        return self.inner.propose(batch, ks)

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)


@pytest.mark.parametrize("perfect", [False, True])
def test_the_walk_and_the_teacher_forced_pass_agree(perfect: bool) -> None:
    """Also for a draft that always agrees, up to the last slot of the buffers (prompt and budget fill them)."""
    pair = tiny_pair()
    model = pair.target if perfect else pair.drafts["model"]
    walked, drafter = Walked(ModelDrafter(ModelRunner(model))), ModelDrafter(ModelRunner(model))
    engine, other = (
        Engine(ModelRunner(pair.target), [d, *_ngram()], k_max=16, eos_ids=tiny_engine().eos_ids)  # type: ignore[list-item]
        for d in (walked, drafter)
    )
    requests = tiny_requests(2, "gumbel", tokens=20, temperatures=(0.0, 1.0))
    requests += [replace(r, max_new_tokens=127 - len(r.prompt_ids)) for r in requests[:1] if perfect]
    for request in requests:
        slow, _ = record_request(engine, request)
        fast, mismatches = record_request(other, request)
        assert mismatches == 0 and slow.keys() == fast.keys()
        for name, column in fast.items():
            assert np.array_equal(np.float32(slow[name]), np.float32(column)), name


def _ngram() -> list[object]:
    from assc.drafters.ngram import NgramDrafter

    return [NgramDrafter()]


def test_a_walked_drafter_replays_as_it_plays() -> None:
    pair = tiny_pair()
    walked = Walked(ModelDrafter(ModelRunner(pair.drafts["model"])))
    engine = Engine(ModelRunner(pair.target), [walked], k_max=8, eos_ids=tiny_engine().eos_ids)  # type: ignore[list-item]
    request = tiny_requests(1, "gumbel", tokens=20, temperatures=(0.5,))[0]
    header = recording.header_of(engine, mode="gumbel", max_new_tokens=20)
    trace = build_trace(header, [(request, "train", *record_request(engine, request))])
    costs = COSTS
    backends = LiveBackend(engine, mode="gumbel", cost_model=costs, time_source="modelled"), ReplayBackend(trace, costs)
    for backend in backends:
        backend.reset(request)
    rng = np.random.default_rng(0)
    while not backends[0].done:
        action = Action("model", int(rng.integers(1, 9)))
        one, two = (b.step(action) for b in backends)
        assert one == two
    assert backends[1].done


def test_rejection_is_refused() -> None:
    request = tiny_requests(1, "rejection", temperatures=(1.0,))[0]
    with pytest.raises(RequestError, match="record in mode gumbel"):
        record_request(tiny_engine(), request)


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    path = tmp_path / "w.jsonl"
    texts = ["".join(chr(32 + t % 90) for t in p) for p in prompts(5)]
    lines = [json.dumps({"id": f"p{i}", "category": "c", "prompt": t}) for i, t in enumerate(texts)]
    path.write_text("\n".join(lines))
    return path


def words(workload: Path, out: Path, *more: str) -> list[str]:
    return [
        *("record", "--pair", "tiny", "--workload", str(workload), "--out", str(out), "--device", "cpu"),
        *("--max-new-tokens", "16", "--temperatures", "0", "1", "--shard", "3", *more),
    ]


def test_a_resumed_recording_equals_an_uninterrupted_one(workload: Path, tmp_path: Path, capsys: Capture) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert main(words(workload, whole)) == 0
    assert len(list(whole.glob("shard-*.npz"))) == 4
    assert main(words(workload, cut)) == 0
    for lost in ("shard-00002.npz", "shard-00003.npz", "trace.npz"):
        (cut / lost).unlink()
    (cut / "shard-00009.npz.part").write_text("half a shard")
    assert main(words(workload, cut)) == 2 and "--resume" in capsys.readouterr().err
    assert main(words(workload, cut, "--resume")) == 0
    a, b = read_trace(whole / "trace.npz"), read_trace(cut / "trace.npz")
    assert all((a.columns[n] == b.columns[n]).all() for n in a.columns)
    assert a.header.settings() == b.header.settings() and a.header.temperatures == (0.0, 1.0)
    assert len(a) == 10 and a.header.recheck_mismatches == 0
    assert main(words(workload, cut, "--resume", "--seed", "1")) == 2
    assert "other settings" in capsys.readouterr().err
    (cut / "shard-00001.npz").write_bytes(b"PK")
    assert main(words(workload, cut, "--resume")) == 2
    assert "shard-00001.npz is damaged" in capsys.readouterr().err


def test_known_texts_are_read_again(
    workload: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same columns without decoding; texts of another recording are refused."""
    first, again = tmp_path / "first", tmp_path / "again"
    assert main(words(workload, first)) == 0
    texts = ("--texts", str(first / "trace.npz"))
    for mistake, said in (
        (("--max-new-tokens", "8"), "with --max-new-tokens 16, not 8"),
        (("--seed", "1"), "lacks the text of request"),
        (("--dtype", "float32"), "are of dtype float64, this recording is of float32"),
        (("--target", "HuggingFaceTB/none", "--texts", str(tmp_path / "none.npz")), "none"),
    ):
        assert main(words(workload, tmp_path / said[:4], *texts, *mistake)) == 2
        message = capsys.readouterr().err.strip()
        assert said in message and len(message.splitlines()) == 1
    monkeypatch.setattr("assc.recorder._decode", None)
    assert main(words(workload, again, *texts)) == 0
    a, b = read_trace(first / "trace.npz"), read_trace(again / "trace.npz")
    assert a.columns.keys() == b.columns.keys()
    assert all((a.columns[n] == b.columns[n]).all() for n in a.columns)


def test_confidences_per_draft_step_are_an_option(workload: Path, tmp_path: Path, capsys: Capture) -> None:
    """By default all K_max steps, with `--steps` fewer or none; nothing else in the trace depends on it."""
    outs = [tmp_path / "all", tmp_path / "few", tmp_path / "none"]
    for out, more in zip(outs, ((), ("--steps", "5", "--starts", "3"), ("--steps", "0")), strict=True):
        assert main(words(workload, out, "--k-max", "8", "--requests", "2", *more)) == 0
    whole, few, none = (read_trace(out / "trace.npz") for out in outs)
    assert [t.header.drafters[0].steps for t in (whole, few, none)] == [8, 5, 0]
    assert [d.steps for d in whole.header.drafters if d.kind == "ngram"] == [0]
    for name, column in whole.columns.items():
        if name.startswith("step_"):
            assert column.shape == (whole.positions, 8) and column.dtype == np.uint8
            assert (few.columns[name] == column[:, :5]).all() and name not in none.columns
        else:
            assert (few.columns[name] == column).all() and (none.columns[name] == column).all()
    capsys.readouterr()
    assert main(["trace", "info", str(outs[0] / "trace.npz")]) == 0
    assert "confidences of draft steps: model 8" in capsys.readouterr().out
    assert main(["trace", "info", str(outs[2] / "trace.npz")]) == 0
    assert "confidences of draft steps: none" in capsys.readouterr().out


def test_texts_decoded_together_are_those_decoded_alone(workload: Path, tmp_path: Path) -> None:
    one, many = tmp_path / "one", tmp_path / "many"
    assert main(words(workload, one)) == 0
    assert main(words(workload, many, "--together", "4", "--shard", "10")) == 0
    a, b = read_trace(one / "trace.npz"), read_trace(many / "trace.npz")
    assert len(a) == 10 and b.header.recheck_mismatches == 0
    for name, column in a.columns.items():
        exact = column.dtype.kind != "f"
        assert (column == b.columns[name]).all() if exact else np.allclose(column, b.columns[name], atol=1e-6), name


def test_killed_at_any_time_it_goes_on(workload: Path, tmp_path: Path) -> None:
    out = tmp_path / "killed"
    command = [sys.executable, "-m", "assc", *words(workload, out, "--shard", "1")]
    environment = {**os.environ, "PYTHONPATH": str(Path(recording.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    until = time.monotonic() + 240
    while len(list(out.glob("shard-*.npz"))) < 2 and process.poll() is None and time.monotonic() < until:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert 2 <= len(list(out.glob("shard-*.npz"))) <= 10
    assert main(words(workload, out, "--shard", "1", "--resume")) == 0
    assert len(read_trace(out / "trace.npz")) == 10


@pytest.mark.parametrize(
    "more",
    [
        ("--mode", "rejection"),
        ("--mode", "greedy"),
        ("--temperatures", "-1"),
        ("--temperatures", "1", "1"),
        ("--k-max", "0"),
        ("--together", "0"),
        ("--steps", "17"),
        ("--steps", "-1"),
        ("--starts", "0"),
        ("--k-max", "200"),
        ("--max-new-tokens", "5000"),
        ("--workload", "nowhere.jsonl"),
    ],
)
def test_mistakes_are_one_sentence(workload: Path, tmp_path: Path, capsys: Capture, more: tuple[str, ...]) -> None:
    assert main([*words(workload, tmp_path / "o"), *more]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_drafter_columns_are_what_the_ngram_index_proposes() -> None:
    """Independent of the recorder: look the suffix up by brute force."""
    trace = tiny_trace()
    request = trace.request(0)
    end = int(trace.columns["offsets"][1])
    text = trace.columns["tokens"][:end].tolist()
    for n in range(end):
        known = [*request.prompt_ids, *text[:n]]
        found = 0
        for size in (4, 3, 2):
            ends = [e for e in range(size, len(known)) if known[e - size : e] == known[-size:]]
            if len(known) > size and ends:
                found = ends[-1]
                break
        assert bool(found) == (trace.columns["avail/ngram"][n] > 0) == (trace.columns["match"][n] >= 2)
        if found:
            period = len(known) - found
            proposal = [known[found + i % period] for i in range(16)]
            run = 0
            while run < min(16, end - n) and proposal[run] == text[n + run]:
                run += 1
            assert trace.columns["acc/ngram"][n] == run
