"""Distillation of design `layers` on the tiny pair: training, resumption, reused data, artefact and card."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_distill import Killed, broken
from test_distill import pair as pair
from test_distill import workload as workload

from assc import SpeculativeDecoder
from assc.distill.command import DistillConfig, distill
from assc.distill.data import ShardStore
from assc.distill.examples import collate, labels_of, load_examples
from assc.distill.layers import LayersStudent, first_gap
from assc.distill.loop import measure
from assc.drafters.artefact import CONFIG, read_config
from assc.drafters.layers import WEIGHTS, few_layers, load_layers, save_layers, trunk
from assc.drafters.net import load_net
from assc.errors import ArtefactError, AsscError
from assc.loading import build_engine, learned_drafter
from assc.pairs import LoadedPair, load_pair
from assc.tiny import tiny_target


@pytest.fixture(scope="module")
def base(pair: LoadedPair, workload: str, tmp_path_factory: pytest.TempPathFactory) -> DistillConfig:
    """A finished run of design hidden, whose data the others use."""
    config = DistillConfig(
        pair="tiny", out=tmp_path_factory.mktemp("run") / "hidden", workload=workload, tokens=900, max_new_tokens=24,
        rows=12, head=80, steps=1, batch_rows=4, every=1, self_fed=0,
    )  # fmt: skip
    distill(pair, config)
    return config


@pytest.fixture(scope="module")
def finished(pair: LoadedPair, base: DistillConfig) -> DistillConfig:
    config = DistillConfig(
        pair="tiny", out=base.out.parent / "layers", design="layers", layers=1, data=base.out, steps=12, batch_rows=4,
        every=4,
    )  # fmt: skip
    distill(pair, config)
    return config


def weights(config: DistillConfig) -> bytes:
    return (config.out / "draft" / WEIGHTS).read_bytes()


def test_the_layers_behind_the_gap_start_silent() -> None:
    """They add nothing at first, so the draft starts as the target's first layers with its norm and head."""
    assert [first_gap(layers) for layers in ([0, 1, 28, 29], [0, 3], [0, 1, 2], [5])] == [2, 1, 3, 1]
    target = tiny_target(layers=3)
    tokens, token_ids = torch.tensor([[5, 6, 7, 8]]), torch.arange(80)
    whole, first = (LayersStudent(target, layers, token_ids) for layers in ([0, 2], [0]))
    assert torch.equal(whole._features(tokens), first._features(tokens))


def test_a_finished_draft_of_layers_can_be_trained_on(
    pair: LoadedPair, base: DistillConfig, finished: DistillConfig, tmp_path: Path
) -> None:
    more = replace(finished, out=tmp_path / "more", start=finished.out / "draft", steps=2, learning_rate=0.0)
    distill(pair, more)
    assert weights(more) == weights(finished)
    with pytest.raises(AsscError, match="layers, not 2"):
        distill(pair, replace(more, out=tmp_path / "other", layers=2))
    with pytest.raises(ArtefactError, match="has the design 'layers', not 'hidden'"):
        distill(pair, replace(more, out=tmp_path / "third", design="hidden"))


def test_the_artefact_holds_layers_and_norm_only(pair: LoadedPair, finished: DistillConfig) -> None:
    folder = finished.out / "draft"
    model = load_layers(folder, pair.target)
    names = {f"layers.0.{n}" for n, _ in pair.target.model.layers[0].named_parameters()} | {"norm.weight"}
    assert {n for n, _ in trunk(model).named_parameters()} == names
    from safetensors import safe_open

    with safe_open(folder / WEIGHTS, framework="pt") as file:
        assert set(file.keys()) == names | {"token_ids"}
    config = read_config(folder)
    assert (config["design"], config["layers"], config["head_tokens"]) == ("layers", [0], 80)
    assert config["parameters"] == sum(p.numel() for p in trunk(model).parameters())
    assert model.model.embed_tokens.weight.data_ptr() == pair.target.model.embed_tokens.weight.data_ptr()


def test_a_saved_draft_is_loaded_unchanged(pair: LoadedPair, finished: DistillConfig, tmp_path: Path) -> None:
    model = load_layers(finished.out / "draft", pair.target)
    save_layers(tmp_path / "again", model, [0], {})
    assert (tmp_path / "again" / WEIGHTS).read_bytes() == weights(finished)
    ids = torch.arange(2, 30)[None]
    assert torch.equal(load_layers(tmp_path / "again", pair.target)(ids).logits, model(ids).logits)


def test_the_loss_is_the_restricted_cross_entropy_of_the_answers(pair: LoadedPair, base: DistillConfig) -> None:
    """Against the plain formula, text by text, on the model's own logits; the gradient by autograd through them."""
    ids = torch.arange(0, 98, 3)
    head = pair.target.get_output_embeddings().weight.detach()
    examples = load_examples(ShardStore(base.out / "data"), 1, head, ids, lambda line: None)[:3]
    # the stored labels are those of the run's own head: make them for this one
    examples = [replace(e, **{k: v for k, v in labels_of(e.hidden, head, ids).items() if k != "top"}) for e in examples]
    student = LayersStudent(pair.target, [0], ids)
    loss = student.loss(collate(examples, torch.float64))
    parts = []
    for e in examples:
        answer = slice(e.text.prompt_length - 1, len(e.text.ids) - 1)
        log_q = student.model(torch.tensor([e.text.ids])).logits[0, answer].log_softmax(-1)[:, ids]
        p = (e.hidden[answer] @ head.T).softmax(-1)[:, ids]
        parts.append(-(p * log_q).sum(-1))
    plain = torch.cat(parts).mean()
    assert torch.allclose(loss, plain, rtol=1e-5)
    of = list(student.net.parameters())
    for got, wanted in zip(torch.autograd.grad(loss, of), torch.autograd.grad(plain, of), strict=True):
        assert torch.allclose(got, wanted, rtol=1e-3, atol=1e-7)
    assert all(p.grad is None and not p.requires_grad for p in pair.target.parameters())


def test_the_dev_measurement_is_what_live_greedy_drafts_do(pair: LoadedPair, base: DistillConfig) -> None:
    """`measure` against the drafter itself, asked at every start of the temperature-0 texts."""
    from assc.core import Request
    from assc.drafters.model import ModelDrafter
    from assc.engine import Engine
    from assc.kv import ModelRunner

    head = pair.target.get_output_embeddings().weight.detach()
    ids = torch.arange(0, 98, 2)
    store = ShardStore(base.out / "data")
    examples = [e for e in load_examples(store, 1, head, ids, lambda line: None) if e.text.temperature == 0]
    found = measure(LayersStudent(pair.target, [0], ids), examples, steps=3)
    drafter = ModelDrafter(ModelRunner(few_layers(pair.target, [0], ids)))
    engine = Engine(ModelRunner(pair.target), [drafter])
    hits, starts = [0, 0, 0], [0, 0, 0]
    for e in examples:
        for start in range(e.text.prompt_length, len(e.text.ids)):
            batch = engine.start([Request(e.text.ids[:start], 8)])
            drafted = drafter.propose(batch, [3]).tokens[0].tolist()
            for s in range(min(3, len(e.text.ids) - start)):
                starts[s] += 1
                hits[s] += drafted[: s + 1] == list(e.text.ids[start : start + s + 1])
    for s in range(3):
        assert found[f"agree_{s + 1}"] == pytest.approx(hits[s] / starts[s], abs=1e-12)
    assert found["accepted_length"] == pytest.approx(sum(h / n for h, n in zip(hits, starts, strict=True)))


def test_training_lowers_the_loss_and_raises_dev_agreement(
    pair: LoadedPair, finished: DistillConfig, tmp_path: Path
) -> None:
    few, many = (
        distill(pair, replace(finished, out=tmp_path / str(n), steps=n, every=n, learning_rate=3e-3)) for n in (1, 150)
    )
    assert many["loss"] < few["loss"] - 0.1
    assert many["agreement"] > few["agreement"] and many["accepted_length"] > few["accepted_length"]


@pytest.mark.parametrize("after", ["train: step 4", "train: step 8"])
def test_a_killed_run_ends_with_the_same_weights(
    pair: LoadedPair, finished: DistillConfig, tmp_path: Path, after: str
) -> None:
    config = replace(finished, out=tmp_path / "out")

    def kill(line: str) -> None:
        if line.startswith(after):
            raise Killed

    with pytest.raises(Killed):
        distill(pair, config, report=kill)
    for changed, said in (({"layers": 2}, "layers 1, not 2"), ({"data": None}, "workload|tokens|data")):
        with pytest.raises(AsscError, match=said):
            distill(pair, replace(config, resume=True, **changed))
    distill(pair, replace(config, resume=True))
    assert weights(config) == weights(finished)


def test_data_of_its_own_gives_the_same_draft(pair: LoadedPair, base: DistillConfig, finished: DistillConfig) -> None:
    own = replace(base, out=base.out.parent / "own", design="layers", layers=1, steps=12, every=4, self_fed=1)
    distill(pair, own)
    assert weights(own) == weights(finished)
    settings = json.loads((finished.out / "run.json").read_text())
    assert settings == {**json.loads((own.out / "run.json").read_text()), "data": str(base.out)}
    assert "layers" not in json.loads((base.out / "run.json").read_text())
    assert not (finished.out / "data").exists()


def test_data_that_cannot_be_used(
    pair: LoadedPair, base: DistillConfig, finished: DistillConfig, tmp_path: Path
) -> None:
    wanted = replace(finished, out=tmp_path / "out")
    empty = tmp_path / "empty"
    empty.mkdir()

    def refused(match: str, data: Path = empty, **changes: object) -> None:
        with pytest.raises(AsscError, match=match):
            distill(pair, replace(wanted, data=data, **changes))  # type: ignore[arg-type]
        assert not wanted.out.exists()

    refused("no run.json", tmp_path / "nowhere")
    refused("no run.json")
    refused("the pair 'tiny', not 'other'", base.out, pair="other")
    refused("1 to 2 of them, not 3", base.out, layers=3)
    (empty / "run.json").write_text("{")
    refused("is damaged")
    (empty / "run.json").write_text((base.out / "run.json").read_text())
    refused("no shards")
    refused("no shards", finished.out)
    (empty / "data").mkdir()
    (empty / "data" / "texts-00000.safetensors").touch()
    refused("has not finished its data")
    with pytest.raises(AsscError, match="of this run itself"):
        distill(pair, replace(wanted, out=base.out, data=base.out / "data", resume=True))


def test_damaged_and_mismatching_artefacts_are_clear_errors(
    pair: LoadedPair, base: DistillConfig, finished: DistillConfig, tmp_path: Path
) -> None:
    source = finished.out / "draft"

    def changed(**fields: object) -> Path:
        folder = tmp_path / f"changed-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        (folder / WEIGHTS).write_bytes(weights(finished))
        (folder / CONFIG).write_text(json.dumps({**read_config(source), **fields}))
        return folder

    def refused(folder: Path, match: str, target: object = pair.target) -> None:
        with pytest.raises(ArtefactError, match=match):
            learned_drafter(folder, target)  # type: ignore[arg-type]

    refused(changed(design="other"), "has the design 'other', this package knows hidden and layers")
    with pytest.raises(ArtefactError, match="design 'other'"):
        load_pair("tiny", draft=str(changed(design="other")))
    refused(changed(layers=[0, 1]), "does not fit")
    refused(changed(layers=[7]), "does not fit")
    refused(changed(layers=None), "does not fit")
    refused(changed(design="hidden"), "cannot be read")
    cut = changed()
    (cut / WEIGHTS).write_bytes(weights(finished)[:-100])
    refused(cut, "truncated or damaged")
    (cut / WEIGHTS).unlink()
    refused(cut, "cannot be read")
    with pytest.raises(ArtefactError, match="has the design 'layers', not 'hidden'"):
        load_net(source, pair.target)
    with pytest.raises(ArtefactError, match="has the design 'hidden', not 'layers'"):
        load_layers(base.out / "draft", pair.target)
    refused(source, "made for a target of 98 tokens", tiny_target(vocab_size=120))
    refused(source, "another target with the same shape", tiny_target(seed=6))
    assert load_layers(source, tiny_target(dtype=torch.float32)).dtype == torch.float32


def test_a_draft_from_before_there_were_designs_is_hidden(
    pair: LoadedPair, base: DistillConfig, tmp_path: Path
) -> None:
    old = broken(base.out / "draft", tmp_path / "old")
    config = json.loads((old / CONFIG).read_text())
    del config["design"]
    (old / CONFIG).write_text(json.dumps(config))
    assert learned_drafter(old, pair.target).kind == "hidden"
    assert list(load_pair("tiny", draft=str(old)).learned) == ["hidden"]


def test_a_draft_is_added_to_its_pair_by_its_folder(finished: DistillConfig) -> None:
    pair = load_pair("tiny", draft=str(finished.out / "draft"))
    assert pair.name == "tiny+draft" and list(build_engine(pair).drafters) == ["model", "layers", "ngram"]
    decoder = SpeculativeDecoder.from_pair(pair, policy="static:3,drafter=layers")
    fast, plain = (decoder.generate("abcabc", max_new_tokens=24, **o) for o in ({}, {"policy": "ar"}))
    assert fast.tokens == plain.tokens and fast.totals.drafted > 0


def test_the_card_tells_this_design(finished: DistillConfig, workload: str) -> None:
    from assc.distill.card import main

    folder = finished.out / "draft"
    assert main(["--draft", str(folder), "--pair", "tiny", "--workload", workload, "--requests", "2", "--k", "3",
                 "--max-new-tokens", "8", "--temperatures", "0", "0.7"]) == 0  # fmt: skip
    text = (folder / "README.md").read_text()
    own = read_config(folder)["parameters"]
    said = (
        "# Draft `layers` for tiny", "An independent draft of 1 layer for", "target's layer 0 (", f"{own:,} parameters",
        "12 steps", "one pass over every position", "head cut to 80", "tokens/round K=3", "| 0.7 | all |",
    )  # fmt: skip
    for part in said:
        assert part in text
    assert "own features" not in text
