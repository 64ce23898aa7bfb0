"""`python -m assc distill`: make a draft for a target, in stages that can be interrupted.

1. data: the target answers the train prompts of a workload and prompts that it writes itself, or plain text is read;
2. teacher: the target's final hidden states over all texts, once;
3. training; 4. the artefact in `OUT/draft`.

Everything lies in the folder OUT. A rerun with `--resume` goes on where the last one stopped.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from assc.cli import on_ctrl_c, parse
from assc.distill.config import HEAD_FILE, DistillConfig, check
from assc.distill.data import (
    DataPlan,
    Report,
    ShardStore,
    load_tensors,
    read_texts,
    save_tensors,
    text_shards,
    write_data,
    write_hidden,
    write_texts,
)
from assc.distill.examples import Example, load_examples
from assc.distill.folder import claim, with_data
from assc.distill.layers import LayersStudent
from assc.distill.loop import Student, TrainPlan, train
from assc.distill.train import HiddenStudent, fit_mixing, initialise
from assc.drafters.artefact import check_target, read_config, read_draft
from assc.drafters.layers import layer_stack, outer_layers
from assc.drafters.net import HiddenNet, NetShape, shared_weights
from assc.errors import AsscError
from assc.files import only_run, versions
from assc.kv import ModelRunner
from assc.leakage import TrainedOn
from assc.manifest import finish_run, packaged_workload, start_run
from assc.pairs import LoadedPair, load_pair
from assc.workloads import content_hash, draft_prompts, load_workload, make_requests

DEV_EVERY = 24
"""one text of this many is kept for the dev measurements"""


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    config = parse(DistillConfig, argv, prog="python -m assc distill", description=DistillConfig.__doc__ or "")
    check(config)
    pair = load_pair(config.pair, threads=config.threads, dtype=config.dtype)
    with only_run(config.out), on_ctrl_c(f"stopped; what is finished is kept in {config.out}: add --resume to go on"):
        found = distill(pair, config, report=lambda line: print(line, flush=True))
    print(f"draft: {config.out / 'draft'}  " + json.dumps({k: round(v, 4) for k, v in found.items()}))
    return 0


def distill(pair: LoadedPair, config: DistillConfig, *, report: Report = lambda line: None) -> dict[str, float]:
    """Run all stages that are not finished; returns the last dev measurement."""
    config = with_data(config)
    chosen = outer_layers(len(layer_stack(pair.target)), config.layers) if config.design == "layers" else []
    claim(config)
    data: dict[str, str | Path | None] = {"workload": packaged_workload(config.workload), "data": config.data}
    data |= {f"text {i + 1}": path for i, path in enumerate(config.text)}
    start_run(config.out, "distill", config, seeds={"seed": config.seed}, data=data)
    runner = ModelRunner(pair.target)
    store = ShardStore((config.data or config.out) / "data")
    shards, source = _texts(pair, runner, config, store, report)
    before = None if config.start is None else _start(pair, config, config.start)
    token_ids = _head_tokens(config, pair, store, shards, before)
    write_hidden(runner, store, shards, report)
    target: Any = pair.target
    head = target.get_output_embeddings().weight.detach()
    examples = load_examples(store, shards, head, token_ids, report)
    dev, rest = split_dev(examples)
    plan = TrainPlan(
        steps=config.steps,
        batch_rows=config.batch_rows,
        learning_rate=config.learning_rate,
        self_fed=config.self_fed if config.design == "hidden" else 0,
        prompts=config.learn_prompts,
        seed=config.seed,
        every=config.every,
        warmup=min(60, config.steps // 10 + 1),
    )
    if chosen:
        student: Student = LayersStudent(pair.target, chosen, token_ids, before)
    else:
        student = _hidden(pair, token_ids, rest, plan, before)
    found = train(student, rest, dev, plan, config.out, report, _curve(config.out))
    texts = [e.text for e in examples]
    notes = {
        "pair": pair.name,
        "target": {"source": pair.source, "type": type(target).__name__, "dtype": str(pair.dtype)},
        "licence": pair.licence,
        "data": {
            "source": source,
            "started_from": None if config.start is None else read_config(config.start).get("data"),
            "texts": len(texts),
            "tokens": sum(len(t.ids) for t in texts),
            "answer_tokens": sum(len(t.ids) - t.prompt_length for t in texts),
            "tokens_by_temperature": _by_temperature(texts),
            "head_coverage": float(torch.cat([e.mass[e.text.prompt_length - 1 :] for e in examples]).mean()),
        },
        "training": {**asdict(plan), "dev": found},
        "trained_on": _trained_on(pair, config).to_json(),
        "versions": versions(),
    }
    student.save(config.out / "draft", notes)
    finish_run(config.out, complete=True)
    return found


def _start(pair: LoadedPair, config: DistillConfig, folder: Path) -> dict[str, torch.Tensor]:
    """Weights (and the ids of the head) of the draft to start from. Raises `ArtefactError`."""
    found, tensors = read_draft(folder, config.design)
    embed, _ = shared_weights(pair.target)
    check_target(folder, found, embed)
    if config.design == "layers" and len(found.get("layers", ())) != config.layers:
        raise AsscError(f"the draft in {str(folder)!r} has {len(found.get('layers', ()))} layers, not {config.layers}")
    return tensors


def _hidden(
    pair: LoadedPair,
    token_ids: torch.Tensor,
    examples: Sequence[Example],
    plan: TrainPlan,
    before: dict[str, torch.Tensor] | None,
) -> HiddenStudent:
    """The layer of design hidden at its start."""
    net = HiddenNet(NetShape.of(pair.target), token_ids)
    net = net.to(torch.float64 if pair.dtype == torch.float64 else torch.float32).attach(pair.target)
    if before is None:
        initialise(net, pair.target, plan.seed)
        fit_mixing(net, examples)
    else:
        net.load_state_dict({name: t for name, t in before.items() if name != "token_ids"})
    return HiddenStudent(net, plan.self_fed, plan.decay)


def _texts(
    pair: LoadedPair, runner: ModelRunner, config: DistillConfig, store: ShardStore, report: Report
) -> tuple[int, str]:
    """Stage 1; the number of shards and where the texts come from."""
    if config.data is not None:
        return store.count(), _source(config)
    if config.text:
        parts = text_shards(pair, config.text, rows=config.rows, width=384)
        for number, part in enumerate(parts):
            if not store.texts_path(number).is_file():
                write_texts(store.texts_path(number), part)
        return len(parts), _source(config)
    prompts = draft_prompts(config.workload)
    plan = DataPlan(prompts, rows=config.rows, max_new_tokens=config.max_new_tokens, seed=config.seed)
    return write_data(pair, runner, plan, store, config.tokens, report), _source(config)


def _trained_on(pair: LoadedPair, config: DistillConfig) -> TrainedOn:
    """The prompts of the workload that the texts answer; none for plain text."""
    if config.text:
        return TrainedOn()
    prompts = draft_prompts(config.workload)
    requests = make_requests(prompts, pair.encode, max_new_tokens=1, seed=0)
    return TrainedOn.of(requests, content_hash(load_workload(config.workload)))


def _source(config: DistillConfig) -> str:
    """Where the texts come from, for the artefact."""
    if config.text:
        return f"plain text files: {', '.join(p.name for p in config.text)}"
    prompts = draft_prompts(config.workload)
    return (
        f"the target's own answers, half to {len(prompts)} prompts of the workload {config.workload} "
        f"({content_hash(prompts)}), half to prompts that it wrote itself"
    )


def _head_tokens(
    config: DistillConfig,
    pair: LoadedPair,
    store: ShardStore,
    shards: int,
    before: dict[str, torch.Tensor] | None,
) -> torch.Tensor:
    """Those of the draft to start from, or the most frequent of the data (ties: lower id first); kept, sorted."""
    path = (config.data or config.out) / HEAD_FILE
    if before is not None:
        token_ids = before["token_ids"].long()
        if not path.is_file():
            save_tensors(path, {"token_ids": token_ids.int()})
        elif not torch.equal(load_tensors(path)["token_ids"].long(), token_ids):
            raise AsscError(
                f"the data has labels for other tokens than the draft in {str(config.start)!r} proposes; "
                "give a folder of its own as --out and no --data"
            )
    if not path.is_file():
        counts = Counter(dict.fromkeys(pair.eos_token_ids, 1 << 40))
        for number in range(shards):
            for text in read_texts(store.texts_path(number)):
                counts.update(text.ids[text.prompt_length :])
                counts.update(set(text.ids[: text.prompt_length]))
        order = sorted(range(pair.vocab_size), key=lambda t: (-counts[t], t))
        chosen = sorted(order[: min(config.head, pair.vocab_size)])
        save_tensors(path, {"token_ids": torch.tensor(chosen, dtype=torch.int32)})
    return load_tensors(path)["token_ids"].long()


def split_dev(examples: Sequence[Example]) -> tuple[list[Example], list[Example]]:
    """(dev, the rest): texts are kept apart by their prompt, so no dev prompt is trained on at another temperature."""
    dev: list[Example] = []
    rest: list[Example] = []
    for e in examples:
        key = sum((i + 1) * t for i, t in enumerate(e.text.ids[: max(8, e.text.prompt_length)]))
        (dev if key % DEV_EVERY == 0 else rest).append(e)
    if not dev or not rest:
        return list(examples), list(examples)
    return dev[:48], rest


def _by_temperature(texts: Sequence[Any]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for t in texts:
        counts[f"{t.temperature:.1f}"] += len(t.ids) - t.prompt_length
    return dict(sorted(counts.items()))


def _curve(folder: Path) -> Any:
    from assc.tb import Curve

    curve = Curve(folder / "tensorboard")
    return curve.log
