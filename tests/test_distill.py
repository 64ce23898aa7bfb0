"""Distillation end to end on the tiny pair: stages, resumption, and artefacts that cannot be read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_hidden_drafter import play, request

from assc import SpeculativeDecoder
from assc.distill import train as training
from assc.distill.command import DistillConfig, distill
from assc.distill.data import ShardStore, Text, read_texts
from assc.distill.examples import Example, collate, labels_of, load_examples
from assc.distill.generate import generate
from assc.drafters.hidden import HiddenDrafter
from assc.drafters.net import CONFIG, VERSION, WEIGHTS, HiddenNet, load_net
from assc.engine import Engine
from assc.errors import ArtefactError, AsscError
from assc.kv import ModelRunner
from assc.loading import build_engine
from assc.pairs import LoadedPair, load_pair, packaged_draft
from assc.tiny import tiny_pair


@pytest.fixture(scope="module")
def pair() -> LoadedPair:
    return tiny_pair()


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("workload") / "w.jsonl"
    lines = [{"id": f"p{i}", "prompt": f"question {i}", "split": "train" if i < 6 else "held-out"} for i in range(8)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


def config_for(out: Path, workload: str) -> DistillConfig:
    return DistillConfig(
        pair="tiny", out=out, workload=workload, tokens=900, max_new_tokens=24, rows=12, head=80, steps=12,
        batch_rows=4, every=4, self_fed=2,
    )  # fmt: skip


@pytest.fixture(scope="module")
def finished(pair: LoadedPair, workload: str, tmp_path_factory: pytest.TempPathFactory) -> DistillConfig:
    config = config_for(tmp_path_factory.mktemp("run") / "out", workload)
    distill(pair, config)
    return config


def weights(config: DistillConfig) -> bytes:
    return (config.out / "draft" / WEIGHTS).read_bytes()


def test_batched_greedy_generation_equals_the_models_own(pair: LoadedPair) -> None:
    prompts = [[5, 6, 7], [9] * 11, [20, 30]]
    rows = generate(
        ModelRunner(pair.target), prompts, [0.0] * 3, max_new_tokens=40, stop_ids=(0, 9, 50),
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    for prompt, row in zip(prompts, rows, strict=True):
        whole = pair.target.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=40, do_sample=False,
            eos_token_id=[0, 9, 50], pad_token_id=0,
        )  # fmt: skip
        assert row == whole[0, len(prompt) :].tolist()
    assert len({len(r) for r in rows}) > 1 or len(rows[0]) == 40


def test_the_training_loss_is_the_restricted_cross_entropy(pair: LoadedPair, finished: DistillConfig) -> None:
    """Loss and gradient against the plain formula on the whole distribution, by autograd."""
    net = load_net(finished.out / "draft", pair.target)
    hidden = torch.randn(7, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    features = torch.randn(7, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_(True)
    head = pair.target.get_output_embeddings().weight.detach()
    labels = labels_of(hidden, head, net.token_ids)
    p = (hidden @ head.T).softmax(-1)[:, net.token_ids]
    plain = -(p * (features @ net.head.T).log_softmax(-1)).sum(-1).mean()
    fast = training.head_loss(features, net.head, labels["label"], labels["mass"].double())
    assert torch.allclose(plain, fast, atol=1e-6)
    (wanted,) = torch.autograd.grad(plain, features)
    (got,) = torch.autograd.grad(fast, features)
    assert torch.allclose(wanted, got, atol=1e-6)


def test_leaving_out_what_no_loss_reads_changes_no_loss(pair: LoadedPair, finished: DistillConfig) -> None:
    net = load_net(finished.out / "draft", pair.target)
    store = ShardStore(finished.out / "data")
    head = pair.target.get_output_embeddings().weight.detach()
    examples = load_examples(store, 1, head, net.token_ids, lambda line: None)[:3]
    block = collate(examples, torch.float64)
    thin = training.loss_of(net, block, 2, 0.8, autocast=False)
    total = torch.zeros((), dtype=torch.float64)
    for s, feature in enumerate(training.unroll(net, block.tokens, block.hidden, 3)):
        on = (block.weight > 0) & (torch.arange(block.tokens.shape[1]) >= s)
        total += 0.8**s * training.head_loss(feature[on], net.head, block.label[on], block.mass[on].double())
    assert torch.allclose(thin, total / (1 + 0.8 + 0.64), rtol=1e-6)


def test_training_brings_the_draft_closer_to_the_target(
    pair: LoadedPair, finished: DistillConfig, tmp_path: Path
) -> None:
    config = replace(finished, out=tmp_path / "longer", steps=150, every=150, learning_rate=3e-3)
    before = json.loads((finished.out / "draft" / CONFIG).read_text())["training"]["dev"]["loss"]
    assert distill(pair, config)["loss"] < before


def test_only_train_prompts_are_used(pair: LoadedPair, finished: DistillConfig) -> None:
    held_out = {tuple(pair.encode(f"question {i}")) for i in (6, 7)}
    train = {tuple(pair.encode(f"question {i}")) for i in range(6)}
    store = ShardStore(finished.out / "data")
    texts = [t for n in range(store.count()) for t in read_texts(store.texts_path(n))]
    prompts = {t.ids[: t.prompt_length] for t in texts}
    assert prompts & train and not prompts & held_out
    assert {t.temperature for t in texts} >= {0.0, 1.0}


def test_the_artefact_drafts_without_changing_the_output(pair: LoadedPair, finished: DistillConfig) -> None:
    drafter = HiddenDrafter(load_net(finished.out / "draft", pair.target))
    engine = Engine(ModelRunner(pair.target), [drafter])
    for sampling in ({}, {"mode": "gumbel", "temperature": 0.9}):
        asked = request(1, **sampling)
        assert play(engine, [asked], 1) == play(engine, [asked], 0, ks=(0,))


class Killed(Exception):
    pass


@pytest.mark.parametrize(
    "after", ["data: shard 1", "data: shard 2", "labels: shard 1", "train: step 4", "train: step 8"]
)
def test_a_run_killed_anywhere_ends_with_the_same_weights(
    pair: LoadedPair, workload: str, finished: DistillConfig, tmp_path: Path, after: str
) -> None:
    config = config_for(tmp_path / "out", workload)

    def kill(line: str) -> None:
        if line.startswith(after):
            raise Killed

    with pytest.raises(Killed):
        distill(pair, config, report=kill)
    with pytest.raises(AsscError, match="--resume"):
        distill(pair, config)
    distill(pair, replace(config, resume=True))
    assert weights(config) == weights(finished)


def test_resuming_with_other_settings_is_refused(pair: LoadedPair, finished: DistillConfig) -> None:
    with pytest.raises(AsscError, match=r"head 80, not 60"):
        distill(pair, replace(finished, resume=True, head=60))


def test_training_settings_are_kept_from_the_first_checkpoint_on(
    pair: LoadedPair, workload: str, finished: DistillConfig, tmp_path: Path
) -> None:
    for changed, told in (
        ({"learn_prompts": False}, "started with learn_prompts True, not False"),
        ({"batch_rows": 3}, "started with batch_rows"),
        ({"learning_rate": 0.5}, "started with learning_rate"),
        ({"steps": 1}, f"has done {finished.steps} steps, --steps 1 cannot take any back"),
    ):
        with pytest.raises(AsscError, match=told):
            distill(pair, replace(finished, resume=True, **changed))
    config = config_for(tmp_path / "out", workload)

    def kill(line: str) -> None:
        if line.startswith("data"):
            raise Killed

    with pytest.raises(Killed):
        distill(pair, config, report=kill)
    other = replace(config, resume=True, learn_prompts=False, steps=1, every=1)
    distill(pair, other)  # nothing was trained before
    with pytest.raises(AsscError, match="learn_prompts False, not True"):
        distill(pair, replace(other, learn_prompts=True))


def test_plain_text_files(pair: LoadedPair, finished: DistillConfig, tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 60)
    config = replace(finished, out=tmp_path / "out", text=(text,), steps=4)
    distill(pair, config)
    assert isinstance(load_net(config.out / "draft", pair.target), HiddenNet)
    with pytest.raises(AsscError, match="cannot be read"):
        distill(pair, replace(config, out=tmp_path / "other", text=(tmp_path / "none.txt",)))


@pytest.mark.parametrize("rate", [0.0, 1e-3])
def test_a_finished_draft_can_be_trained_on(
    pair: LoadedPair, finished: DistillConfig, workload: str, tmp_path: Path, rate: float
) -> None:
    """With a rate of 0 the draft stays as it was; otherwise it changes, and its head is kept."""
    start = finished.out / "draft"
    more = replace(finished, out=tmp_path / "more", start=start, head=60, seed=1, steps=4, learning_rate=rate)
    distill(pair, more)
    assert (weights(more) == weights(finished)) is (rate == 0)
    before, after = (load_net(folder, pair.target) for folder in (start, more.out / "draft"))
    assert torch.equal(before.token_ids, after.token_ids)
    notes = json.loads((more.out / "draft" / CONFIG).read_text())
    assert notes["data"]["started_from"]["tokens"] > 0
    with pytest.raises(AsscError, match="started with start"):
        distill(pair, replace(more, start=None, resume=True))


def test_data_labelled_for_another_head_is_refused(
    pair: LoadedPair, finished: DistillConfig, workload: str, tmp_path: Path
) -> None:
    small = replace(finished, out=tmp_path / "small", head=60, steps=2, tokens=300)
    distill(pair, small)
    with pytest.raises(AsscError, match="labels for other tokens"):
        distill(pair, replace(finished, out=tmp_path / "out", data=small.out, start=finished.out / "draft"))


def test_prompts_count_in_training_alone(pair: LoadedPair) -> None:
    text = Text((1, 2, 3, 4, 5, 6), prompt_length=4, temperature=0.0)
    hidden = torch.zeros(6, 8)
    example = Example(text, hidden, hidden, torch.ones(6), torch.zeros(6, dtype=torch.int32))
    assert collate([example], torch.float64).weight.tolist() == [[0, 0, 0, 1, 1, 0]]
    assert collate([example], torch.float64, prompts=True).weight.tolist() == [[1, 1, 1, 1, 1, 0]]


def broken(source: Path, target: Path) -> Path:
    target.mkdir()
    for name in (CONFIG, WEIGHTS):
        (target / name).write_bytes((source / name).read_bytes())
    return target


def test_damaged_artefacts_are_clear_errors(pair: LoadedPair, finished: DistillConfig, tmp_path: Path) -> None:
    source = finished.out / "draft"
    cut = broken(source, tmp_path / "cut")
    (cut / WEIGHTS).write_bytes(weights(finished)[:-100])
    with pytest.raises(ArtefactError, match="truncated or damaged"):
        load_net(cut, pair.target)
    (cut / WEIGHTS).unlink()
    with pytest.raises(ArtefactError, match="cannot be read"):
        load_net(cut, pair.target)
    future = broken(source, tmp_path / "future")
    config = json.loads((future / CONFIG).read_text())
    (future / CONFIG).write_text(json.dumps({**config, "version": VERSION + 1}))
    with pytest.raises(ArtefactError, match=f"version {VERSION + 1}"):
        load_net(future, pair.target)
    (future / CONFIG).write_text(json.dumps({**config, "shape": {**config["shape"], "heads": 2}}))
    with pytest.raises(ArtefactError, match="does not fit"):
        load_net(future, pair.target)
    (future / CONFIG).write_text("{")
    with pytest.raises(ArtefactError, match="is damaged"):
        load_net(future, pair.target)
    (future / CONFIG).write_text('{"format": "other"}')
    with pytest.raises(ArtefactError, match="does not describe"):
        load_net(future, pair.target)
    with pytest.raises(ArtefactError, match="missing"):
        load_net(tmp_path / "nowhere", pair.target)


def test_a_draft_of_another_target_is_refused(finished: DistillConfig) -> None:
    from assc.tiny import tiny_target

    with pytest.raises(ArtefactError, match="made for a target of 98 tokens"):
        load_net(finished.out / "draft", tiny_target(vocab_size=120))
    with pytest.raises(ArtefactError, match="another target with the same shape"):
        load_net(finished.out / "draft", tiny_target(seed=6))
    assert load_net(finished.out / "draft", tiny_target(dtype=torch.float32)).fc.dtype == torch.float32


def test_the_card_counts_what_static_rounds_really_take(pair: LoadedPair, finished: DistillConfig) -> None:
    """The accepted lengths of every start give the number of rounds of a live static K exactly."""
    from assc.core import Action
    from assc.distill.card import measure_draft
    from assc.timing import PhaseTimer

    drafter = HiddenDrafter(load_net(finished.out / "draft", pair.target))
    engine = Engine(ModelRunner(pair.target), [drafter], k_max=4)
    for sampling in ({}, {"mode": "gumbel", "temperature": 0.6}):
        asked = [request(s, n=30, **sampling) for s in range(3)]
        (found,) = measure_draft(engine, asked, 4).values()
        assert found.tokens == 90 and found.rounds is not None
        for k in (1, 2, 4):
            batch, timer = engine.start(asked), PhaseTimer(engine.device)
            rounds = 0
            while any(alive := [row.finish is None for row in batch.rows]):
                rounds += sum(alive)
                engine.round(batch, [Action("hidden", k)] * 3, timer)
            assert rounds == found.rounds[k]


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (["--requests", "0"], "--requests, --max-new-tokens and --rows are 1 or more"),
        (["--k", "0"], "K_max is 0"),
        (["--temperatures", "-1"], "--temperatures needs"),
        (["--pair", "nope"], "unknown pair"),
        (["--what"], "unrecognized"),
    ],
)
def test_the_card_refuses_what_cannot_be(
    words: list[str], wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from assc.distill.card import main

    (tmp_path / "config.json").write_text((packaged_draft("smollm2-135m") / "config.json").read_text())
    assert main(["--draft", str(tmp_path), "--pair", "tiny", *words]) == 2
    assert wrong in capsys.readouterr().err
    assert main(["--draft", str(tmp_path / "none")]) == 2 and not (tmp_path / "none").exists()
    assert "there is no draft" in capsys.readouterr().err


def test_the_card_names_data_training_and_acceptance(pair: LoadedPair, finished: DistillConfig, workload: str) -> None:
    from assc.distill.card import main

    folder = finished.out / "draft"
    assert main(["--draft", str(folder), "--pair", "tiny", "--workload", workload, "--requests", "2", "--k", "3",
                 "--max-new-tokens", "8"]) == 0  # fmt: skip
    text = (folder / "README.md").read_text()
    for part in ("Apache-2.0", "one-layer draft", "12 steps", "held-out prompts", "tokens/round K=3", "| 0.7 | all |"):
        assert part in text


def test_a_learned_draft_is_added_to_its_pair_by_its_folder(finished: DistillConfig) -> None:
    pair = load_pair("tiny", draft=str(finished.out / "draft"))
    assert pair.name == "tiny+draft" and list(build_engine(pair).drafters) == ["model", "hidden", "ngram"]
    decoder = SpeculativeDecoder.from_pair(pair, policy="static:3,drafter=hidden")
    fast, plain = (decoder.generate("abcabc", max_new_tokens=24, **o) for o in ({}, {"policy": "ar"}))
    assert fast.tokens == plain.tokens and fast.totals.drafted > 0
