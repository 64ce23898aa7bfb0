"""`eval.py --backend live`: the pair and the prompts of a workload."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from assc.cli import say
from assc.core import Action, Policy, Request, default_temperature
from assc.errors import AsscError
from assc.eval_config import Config
from assc.eval_job import ORACLE, TUNED, Job, complete, listed_policies
from assc.evaluate import check_requests
from assc.registry import make_policy
from assc.tuning import TUNE_REQUESTS, static_spec, tune_static
from assc.workloads import Prompt, content_hash, load_workload, make_requests, only_categories, select


def _prompts(config: Config) -> tuple[tuple[Prompt, ...], tuple[Prompt, ...], str]:
    """The prompts to decode, those to tune on, and the content hash of the whole workload."""
    options = config.live
    everything = load_workload(options.workload)
    fit = only_categories(everything, config.categories)
    kept = [p for p in fit if config.split in ("all", p.split)]
    if not kept:
        raise AsscError(
            f"no prompt of {options.workload!r} is in the split {config.split!r}; --split all takes every one"
        )
    tune: tuple[Prompt, ...] = ()
    if TUNED in config.specs:
        train = [p for p in fit if p.split == "train"]
        if config.split != "held-out" or not train:
            why = f"--split {config.split} evaluates them" if train else f"{options.workload!r} has none that fit"
            raise AsscError(f"{TUNED} is tuned on requests of the split 'train', but {why}")
        tune = select(train, min(TUNE_REQUESTS, len(train)), config.seed)
    return select(kept, options.requests, config.seed), tune, content_hash(everything)


def live_job(config: Config) -> Job:
    """Load the models, and tune the static action if it is asked for."""
    if ORACLE in config.specs:
        raise AsscError("the oracle needs a recorded trace: --backend replay")
    listed, options = listed_policies(config), config.live
    prompts, tune, digest = _prompts(config)
    # torch and transformers take seconds to import: a typing mistake should be told before
    from assc.device import machine
    from assc.live import LiveBackend
    from assc.pairs import load_pair

    say(f"loading the pair {options.target or options.pair} and calibrating its costs ...")
    pair = load_pair(
        options.pair,
        target=options.target,
        draft=options.draft,
        device=options.device,
        dtype=options.dtype,
        threads=options.threads,
    )
    temperature = default_temperature(options.mode) if options.temperature is None else options.temperature
    backend = LiveBackend.from_pair(
        pair,
        mode=options.mode,
        k_max=options.k_max,
        time_source=options.time_source,
        temperature=temperature,
        chunks=options.chunks,
        unload_after=options.unload_after,
    )
    sampling = {"temperature": temperature}

    def requests(chosen: tuple[Prompt, ...]) -> list[Request]:
        return make_requests(
            chosen, pair.encode, max_new_tokens=options.max_new_tokens, seed=config.seed, sampling=sampling
        )

    meta: dict[str, Any] = {"workload": options.workload, "workload_hash": digest, "split": config.split}
    meta["machine"] = machine(pair.device)
    actions: dict[str, str] = {}
    makers: dict[str, Callable[[], Policy]] = {}
    if tune:
        say(f"tuning a static action on {len(tune)} train requests ...")
        trial = requests(tune)
        check_requests(backend, trial)
        best: Action = tune_static(backend, trial)
        actions[TUNED] = str(best)
        makers[TUNED] = lambda: make_policy(static_spec(best, backend.table))
        meta["static_tuned"] = {"action": str(best), "split": "train", "requests": len(tune)}
    return Job(
        backend,
        requests(prompts),
        complete(listed, makers),
        options.warmup,
        meta,
        actions,
        token_text=lambda token: pair.decode([token], skip_special_tokens=False),
    )
