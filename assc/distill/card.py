"""`python -m assc draft-card`: measure a draft on held-out prompts and write its model card.

Greedy and gumbel text does not depend on the draft, and a draft's proposals depend on the position alone, so one
plain decoding that asks for a proposal at every position tells the accepted length of every static K exactly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from assc.cli import parse, run_cli
from assc.core import ROLLBACK, Request
from assc.distill.data import Report
from assc.drafters.artefact import design_of, read_config
from assc.engine import Engine
from assc.errors import RequestError
from assc.files import check_writable, write_text
from assc.groups import check_k_max
from assc.kv import ModelRunner
from assc.loading import learned_drafter
from assc.pairs import LoadedPair, load_pair
from assc.timing import PhaseTimer
from assc.workloads import load_workload, make_requests, select


@dataclass(frozen=True)
class CardConfig:
    """Measure a draft on held-out prompts and write README.md beside it."""

    draft: Path
    """folder of the draft"""
    pair: str = "smollm2"
    """the pair whose target it was made for"""
    workload: str = "mixed"
    """held-out prompts are taken from it"""
    requests: int = 48
    """how many, balanced over the categories"""
    max_new_tokens: int = 64
    """tokens per request"""
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    """0 is greedy, others are sampled in mode gumbel"""
    k: int = 6
    """largest static K"""
    rows: int = 16
    """requests decoded together"""
    threads: int | None = None
    """torch threads"""


@dataclass
class Accepted:
    """Accepted lengths of one category: from every start, and the static rounds that they make."""

    starts: int = 0
    first: int = 0
    """starts whose first draft token is accepted"""
    length: int = 0
    """sum of accepted lengths over all starts"""
    tokens: int = 0
    rounds: dict[int, int] | None = None
    """rounds that each static K takes for the same text"""

    def __add__(self, other: Accepted) -> Accepted:
        rounds = {k: n + (other.rounds or {}).get(k, 0) for k, n in (self.rounds or other.rounds or {}).items()}
        if self.rounds is None:
            rounds = dict(other.rounds or {})
        return Accepted(
            self.starts + other.starts,
            self.first + other.first,
            self.length + other.length,
            self.tokens + other.tokens,
            rounds,
        )


def static_rounds(accepted: Sequence[int], k: int) -> int:
    """Rounds that static K takes over a text whose drafts are accepted for `accepted[i]` tokens from start i.

    >>> static_rounds([0, 2, 1, 0, 0], 2)
    3
    """
    position = rounds = 0
    while position < len(accepted):
        room = max(0, len(accepted) - position - 1)
        position += min(accepted[position], k, room) + 1
        rounds += 1
    return rounds


@torch.inference_mode()
def measure_draft(engine: Engine, requests: Sequence[Request], k: int) -> dict[str, Accepted]:
    """Acceptance per category of the engine's one drafter."""
    (drafter,) = engine.drafters.values()
    batch, timer = engine.start(requests), PhaseTimer(engine.device)
    proposed: list[dict[int, list[int]]] = [{} for _ in requests]
    while any(row.finish is None for row in batch.rows):
        ks = [k if row.finish is None else 0 for row in batch.rows]
        proposal = drafter.propose(batch, ks)
        for b, row in enumerate(batch.rows):
            if row.finish is None:
                proposed[b][row.length] = proposal.tokens[b, : proposal.lengths[b]].tolist()
        engine.round(batch, [ROLLBACK] * batch.size, timer)
    found: dict[str, Accepted] = {}
    for row, drafts in zip(batch.rows, proposed, strict=True):
        lengths = []
        for start in range(row.prompt_length, row.length):
            n = 0
            while n < min(len(drafts[start]), row.length - start) and drafts[start][n] == row.tokens[start + n]:
                n += 1
            lengths.append(n)
        one = Accepted(
            len(lengths),
            sum(n > 0 for n in lengths),
            sum(lengths),
            len(lengths),
            {i: static_rounds(lengths, i) for i in range(1, k + 1)},
        )
        category = row.request.category or "all"
        found[category] = found.get(category, Accepted()) + one
    return found


def measure_all(pair: LoadedPair, folder: Path, config: CardConfig, report: Report) -> dict[float, dict[str, Accepted]]:
    """Acceptance per temperature and category on held-out prompts; the key `all` pools them."""
    drafter = learned_drafter(folder, pair.target)
    engine = Engine(ModelRunner(pair.target), [drafter], k_max=config.k, eos_ids=pair.eos_token_ids)
    prompts = load_workload(config.workload, "held-out")
    chosen = select(prompts, min(config.requests, len(prompts)), 0)
    result: dict[float, dict[str, Accepted]] = {}
    for heat in config.temperatures:
        sampling: dict[str, Any] = {"mode": "gumbel", "temperature": heat} if heat else {"mode": "greedy"}
        requests = make_requests(chosen, pair.encode, max_new_tokens=config.max_new_tokens, seed=0, sampling=sampling)
        requests.sort(key=lambda r: len(r.prompt_ids))
        table: dict[str, Accepted] = {}
        for first in range(0, len(requests), config.rows):
            for name, value in measure_draft(engine, requests[first : first + config.rows], config.k).items():
                table[name] = table.get(name, Accepted()) + value
            report(f"temperature {heat}: {min(first + config.rows, len(requests))} of {len(requests)} requests")
        whole = Accepted()
        for value in table.values():
            whole = whole + value
        result[heat] = dict(sorted(table.items())) | {"all": whole}
    return result


def acceptance_table(measured: dict[float, dict[str, Accepted]], k: int) -> str:
    """Markdown: first-token acceptance, mean accepted length, tokens per round at each static K."""
    head = ["temperature", "category", "tokens", "first token accepted", f"accepted of {k}"]
    head += [f"tokens/round K={i}" for i in range(1, k + 1)]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for heat, table in measured.items():
        for name, a in table.items():
            cells = [f"{heat:g}", name, str(a.tokens), f"{a.first / a.starts:.3f}", f"{a.length / a.starts:.2f}"]
            cells += [f"{a.tokens / (a.rounds or {})[i]:.2f}" for i in range(1, k + 1)]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def card(config: dict[str, Any], table: str, measured_on: str) -> str:
    """The text of the model card."""
    data, training, target = config["data"], config["training"], config["target"]
    heats = ", ".join(f"{n:,} at {t}" for t, n in data["tokens_by_temperature"].items())
    seen = int(training["dev"].get("tokens_seen", 0))
    revision = f", {target['revision']}" if target.get("revision") else ""
    note = f"\n{config['remark']}\n" if config.get("remark") else ""
    return f"""---
license: {str(config.get("licence") or "unknown").lower()}
---

# Draft `{design_of(config)}` for {config["pair"]}

{_what(config)} It holds {parameters(config):,} parameters; embeddings and head are the target's own, taken over
when it is loaded, the head cut to {config["head_tokens"]:,} frequent tokens. It is of no use without its target.

- Target: {target["type"]}, {target["source"]}{revision}
- Licence: {config.get("licence") or "that of the target"}
- Data: {data["source"]}: {data["texts"]:,} texts, {data["tokens"]:,} tokens, of which
  {data["answer_tokens"]:,} are answers (by temperature: {heats}); held-out prompts were not used. The head covers
  {data["head_coverage"]:.1%} of the target's probability there.{_before(data)}
- Training: {training["steps"]:,} steps, {seen:,} {_counted(training)} tokens seen, {_passes(config)},
  Muon and AdamW at {training["learning_rate"]:g}.
{note}
## Acceptance on held-out prompts

{measured_on} "Tokens/round" is what a static K commits per verification, the bonus token included; temperature 0 is
greedy, others are sampled in mode gumbel.

{table}
"""


def _what(config: dict[str, Any]) -> str:
    """One sentence about the design."""
    if design_of(config) == "layers":
        layers = config["layers"]
        noun = "layer" if len(layers) == 1 else "layers"
        return (
            f"An independent draft of {len(layers)} {noun} for speculative decoding, a model of the target's own class "
            f"that\nstarted as the target's {noun} {', '.join(map(str, layers))} (counted from 0) and its final norm."
        )
    return (
        "A one-layer draft for speculative decoding, conditioned on the target's last hidden state (in the manner of "
        "EAGLE,\narXiv 2401.15077)."
    )


def _before(data: Mapping[str, Any]) -> str:
    """What the draft that this one was trained on from had learned, if it did not start from the target."""
    earlier = data.get("started_from")
    if not earlier:
        return ""
    return (
        f"\n- Started from a draft trained on {earlier['texts']:,} texts, {earlier['tokens']:,} tokens, of which "
        f"{earlier['answer_tokens']:,} are answers:\n  {earlier['source']}."
    )


def _counted(training: Mapping[str, Any]) -> str:
    return "prompt and answer" if training.get("prompts") else "answer"


def _passes(config: dict[str, Any]) -> str:
    """How each batch was used."""
    training = config["training"]
    if design_of(config) == "layers":
        return "one pass over every position of the answers"
    every = f" for one batch in {training['self_fed_every']}" if training.get("self_fed_every") else ""
    return f"{training['self_fed']} extra passes on the layer's own features{every}"


def parameters(config: dict[str, Any]) -> int:
    """Parameters of the draft's own: embeddings and head left out."""
    if design_of(config) == "layers":
        return int(config["parameters"])
    s = config["shape"]
    h, d = s["hidden_size"], s["head_dim"]
    return int(
        2 * h * h + (s["heads"] + 2 * s["kv_heads"]) * d * h + h * s["heads"] * d + 3 * h * s["intermediate"] + 5 * h
    )


def _check(config: CardConfig) -> None:
    """Refuse what can be seen to be wrong before any model is loaded."""
    if min(config.requests, config.max_new_tokens, config.rows) < 1:
        raise RequestError("--requests, --max-new-tokens and --rows are 1 or more")
    check_k_max(config.k)
    heats = config.temperatures
    if not heats or len(set(heats)) < len(heats) or not all(math.isfinite(t) and t >= 0 for t in heats):
        raise RequestError("--temperatures needs at least one number, each 0 or more and listed once")
    check_writable(config.draft / "README.md")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 2 and one sentence for a mistake of the user, 130 after Ctrl-C."""
    description = CardConfig.__doc__ or ""
    return run_cli(lambda: run(parse(CardConfig, argv, prog="python -m assc draft-card", description=description)))


def run(config: CardConfig) -> int:
    """Measure, write the card, print the table."""
    notes = read_config(config.draft)
    _check(config)
    pair = load_pair(config.pair, threads=config.threads)
    measured = measure_all(pair, config.draft, config, lambda line: print(line, flush=True))
    table = acceptance_table(measured, config.k)
    dtype = str(pair.dtype).removeprefix("torch.")
    where = (
        f"{config.requests} held-out prompts of the workload `{Path(config.workload).stem}`, {config.max_new_tokens} "
        f"new tokens each, {dtype} on {pair.device.type}."
    )
    write_text(config.draft / "README.md", card(notes, table, where))
    print(table)
    return 0
