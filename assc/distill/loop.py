"""Stage 3: the training loop, the same for every design of a draft.

A run that was interrupted goes on from its last checkpoint and ends with the same weights as one that was not.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from assc.distill.config import CHECKPOINT_FILE
from assc.distill.data import Report
from assc.distill.examples import Block, Example, collate
from assc.distill.muon import Muon
from assc.distill.train import shift_back
from assc.errors import AsscError

Log = Callable[[dict[str, float], int], None]


class Student(Protocol):
    """A draft in training."""

    @property
    def net(self) -> nn.Module:
        """Its parameters are trained, its state is what checkpoints hold."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters."""

    def loss(self, block: Block) -> Tensor:
        """What a step descends."""

    def hits(self, block: Block, steps: int) -> Iterator[Tensor]:
        """Per draft step 0.. `steps` - 1 a mask [B, T]: the token drafted there is the target's argmax.

        Step s at position t belongs to a draft that started at t - s. Only positions of weight 1 count.
        """

    def save(self, folder: Path, notes: dict[str, Any]) -> None:
        """Write the artefact."""


@dataclass(frozen=True)
class TrainPlan:
    """Optimiser and schedule."""

    steps: int = 2000
    batch_rows: int = 8
    learning_rate: float = 1e-3
    warmup: int = 60
    self_fed: int = 1
    decay: float = 0.8
    prompts: bool = True
    """the positions of prompts count too"""
    seed: int = 0
    every: int = 100
    """steps between checkpoints and dev measurements"""


def rate_at(plan: TrainPlan, step: int) -> float:
    """Linear warm-up, then a cosine down to 2 % of the peak."""
    if step < plan.warmup:
        return plan.learning_rate * (step + 1) / plan.warmup
    done = (step - plan.warmup) / max(1, plan.steps - plan.warmup)
    return plan.learning_rate * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


def batches(lengths: Sequence[int], rows: int, seed: int) -> Iterator[list[int]]:
    """Indices of each batch, epoch after epoch without end; texts of similar length go together."""
    epoch = 0
    while True:
        order = list(range(len(lengths)))
        shuffle = random.Random(f"{seed}-{epoch}")
        shuffle.shuffle(order)
        window = rows * 16
        groups: list[list[int]] = []
        for first in range(0, len(order), window):
            near = sorted(order[first : first + window], key=lambda i: lengths[i])
            groups += [near[i : i + rows] for i in range(0, len(near), rows)]
        shuffle.shuffle(groups)
        yield from groups
        epoch += 1


@torch.no_grad()
def measure(student: Student, examples: Sequence[Example], steps: int = 6, rows: int = 8) -> dict[str, float]:
    """Agreement with the target's argmax per step, and the mean accepted length of greedy drafts of `steps` tokens.

    Texts at temperature 0 alone tell the accepted length: there the text is the target's argmax all along.
    """
    agree = torch.zeros(steps, dtype=torch.float64)
    counted = torch.zeros(steps, dtype=torch.float64)
    warm = torch.zeros(2, dtype=torch.float64)
    for first in range(0, len(examples), rows):
        part = examples[first : first + rows]
        block = collate(part, student.dtype)
        cold = torch.tensor([e.text.temperature == 0 for e in part])
        on = block.weight > 0
        run = torch.ones_like(on)
        for s, hit in enumerate(student.hits(block, steps)):
            if s == 0:
                warm += torch.stack([hit[on].sum(), on.sum()]).double()
            run = run & shift_back(hit, s)  # brought back to its start
            starts = on & shift_back(on, s) & cold[:, None]
            agree[s] += (run & starts).sum()
            counted[s] += starts.sum()
    rate = agree / counted.clamp(min=1)
    result = {f"agree_{s + 1}": float(r) for s, r in enumerate(rate)}
    return {"agreement": float(warm[0] / warm[1].clamp(min=1)), "accepted_length": float(rate.sum()), **result}


def train(
    student: Student,
    examples: Sequence[Example],
    dev: Sequence[Example],
    plan: TrainPlan,
    folder: Path,
    report: Report,
    log: Log | None = None,
) -> dict[str, float]:
    """Train to `plan.steps` from the checkpoint in `folder`, if there is one; returns the last dev measurement."""
    net = student.net
    optimizers: list[torch.optim.Optimizer] = [
        Muon([p for p in net.parameters() if p.dim() > 1], lr=plan.learning_rate),
        torch.optim.AdamW(
            [p for p in net.parameters() if p.dim() == 1], plan.learning_rate, (0.9, 0.95), weight_decay=0
        ),
    ]
    path = folder / CHECKPOINT_FILE
    start, seen = 0, 0
    if path.is_file():
        state = torch.load(path, weights_only=True)
        net.load_state_dict(state["net"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        start, seen = int(state["step"]), int(state["seen"])
        if start > plan.steps:
            raise AsscError(
                f"{str(folder)!r} has done {start} steps, --steps {plan.steps} cannot take any back; give more"
            )
        report(f"train: from step {start}")
    order = batches([len(e.text.ids) for e in examples], plan.batch_rows, plan.seed)
    for _ in range(start):
        next(order)
    smooth = 0.0
    found: dict[str, float] = {}
    for step in range(start, plan.steps):
        block = collate([examples[i] for i in next(order)], student.dtype, prompts=plan.prompts)
        for group in (g for o in optimizers for g in o.param_groups):
            group["lr"] = rate_at(plan, step)
        net.zero_grad(set_to_none=True)
        loss = student.loss(block)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        seen += int(block.weight.sum())
        smooth = float(loss.detach()) if step == start else 0.98 * smooth + 0.02 * float(loss.detach())
        if (step + 1) % plan.every == 0 or step + 1 == plan.steps:
            found = {"loss": smooth, **measure(student, dev)}
            report(
                f"train: step {step + 1} of {plan.steps}, {seen:,} tokens, loss {smooth:.4f}, "
                f"first token {found['agreement']:.3f}, greedy accepted length {found['accepted_length']:.3f} of 6"
            )
            if log is not None:
                log(found, step + 1)
            part = path.with_suffix(".part")
            states = [optimizer.state_dict() for optimizer in optimizers]
            torch.save({"net": net.state_dict(), "optimizers": states, "step": step + 1, "seen": seen}, part)
            part.replace(path)
    return {**(found or {"loss": smooth, **measure(student, dev)}), "tokens_seen": float(seen)}
