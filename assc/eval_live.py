"""`eval.py --backend live`: the pair and the prompts of a workload."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assc.cli import say
from assc.core import Action, Policy, Request, default_temperature
from assc.costs import CostModel
from assc.costs_io import read_costs
from assc.errors import AsscError, TraceError
from assc.eval_config import TUNED, Config
from assc.eval_job import ORACLE, Job, complete, guarded, listed_policies, remarks, saved_files
from assc.evaluate import check_requests
from assc.leakage import Leak, TrainedOn, draft_leaks
from assc.manifest import packaged_workload
from assc.pair_options import load_chosen
from assc.registry import make_policy
from assc.rule_tuning import is_tuned_rule
from assc.tuning import TUNE_REQUESTS, static_spec, tune_static
from assc.workloads import Prompt, content_hash, load_workload, make_requests, only_categories, select

if TYPE_CHECKING:
    from assc.live import LiveBackend


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
    if TUNED in config.bare:
        train = [p for p in fit if p.split == "train"]
        if config.split != "held-out" or not train:
            why = f"--split {config.split} evaluates them" if train else f"{options.workload!r} has none that fit"
            raise AsscError(f"{TUNED} is tuned on requests of the split 'train', but {why}")
        tune = select(train, min(TUNE_REQUESTS, len(train)), config.seed)
    return select(kept, options.requests, config.seed), tune, content_hash(everything)


def live_job(config: Config) -> Job:
    """Load the models, and tune the static action if it is asked for."""
    if ORACLE in config.bare:
        raise AsscError("the oracle needs a recorded trace: --backend replay")
    if rules := [spec for spec in config.bare if is_tuned_rule(spec)]:
        raise AsscError(f"{rules[0]} is tuned on a recorded trace: --backend replay; live give its parameters")
    listed, options = listed_policies(config), config.live
    costs = None if options.cost is None else read_costs(options.cost).model
    prompts, tune, digest = _prompts(config)
    # torch and transformers take seconds to import: a typing mistake should be told before
    from assc.device import machine
    from assc.live import LiveBackend
    from assc.pairs import draft_data, named_drafts

    calibrating = " and calibrating its costs" if costs is None else ""
    say(f"loading the pair {options.target or options.pair}{calibrating} ...")
    pair = load_chosen(options)
    temperature = default_temperature(options.mode) if options.temperature is None else options.temperature
    backend = LiveBackend.from_pair(
        pair,
        mode=options.mode,
        k_max=options.k_max,
        time_source=options.time_source,
        cost_model=costs,
        temperature=temperature,
        chunks=options.chunks,
        unload_after=options.unload_after,
    )
    _check_costs(costs, tuple(backend.engine.drafters))
    sampling = {"temperature": temperature}

    def requests(chosen: tuple[Prompt, ...]) -> list[Request]:
        return make_requests(
            chosen, pair.encode, max_new_tokens=options.max_new_tokens, seed=config.seed, sampling=sampling
        )

    meta: dict[str, Any] = {"workload": options.workload, "workload_hash": digest, "split": config.split}
    meta["machine"] = machine(pair.device)
    evaluated = requests(prompts)
    drafts = _draft_leaks(evaluated, prompts, backend, named_drafts(options.draft).values(), digest)
    tuned_on = TrainedOn.of(requests(tune), digest) if tune else None
    leaked, meta["leakage"] = guarded(config, listed, evaluated, digest, tuned_on, drafts)
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
        meta["static_tuned"] |= {} if tuned_on is None else {"tuned_on": tuned_on.to_json()}
    listed_now = complete(listed, makers)
    meta["notes"] = remarks(config, listed_now, backend)
    data: dict[str, str | Path | None] = {
        "workload": packaged_workload(options.workload),
        "target": options.target,
        **draft_data(options.draft),
        "cost model": options.cost,
        **saved_files(config),
    }
    return Job(
        backend,
        evaluated,
        listed_now,
        options.warmup,
        meta,
        actions,
        token_text=lambda token: pair.decode([token], skip_special_tokens=False),
        leaked=leaked,
        data=data,
    )


def _check_costs(costs: CostModel | None, drafters: Sequence[str]) -> None:
    """`TraceError` where a given cost model does not know a drafter of the pair."""
    missing = [] if costs is None else [d for d in drafters if d not in costs.drafters]
    if costs is not None and missing:
        raise TraceError(f"the cost model has no drafter {missing[0]!r} of the pair, only {sorted(costs.drafters)}")


def _draft_leaks(
    requests: Sequence[Request], prompts: Sequence[Prompt], backend: LiveBackend, drafts: Iterable[str], digest: str
) -> list[Leak]:
    """Requests from which a learned drafter has learned: of the split `draft`, or those that its files name."""
    from assc.drafters.artefact import is_net, read_config

    kinds = {name: drafter.kind for name, drafter in backend.engine.drafters.items()}
    leaks = draft_leaks(requests, [p.split == "draft" for p in prompts], kinds)
    for draft in drafts:
        known = read_config(Path(draft)).get("trained_on") if is_net(Path(draft)) else None
        mine = [] if known is None else TrainedOn.from_json(known).among(requests, digest)
        if mine:
            leaks.append(Leak(None, f"the draft {draft!r} was trained", tuple(mine), len(requests)))
    return leaks
