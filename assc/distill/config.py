"""The options of `python -m assc distill`, and what can be seen to be wrong with them before a model is loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from assc.errors import AsscError
from assc.files import check_writable

RUN_FILE, HEAD_FILE, CHECKPOINT_FILE = "run.json", "head.safetensors", "checkpoint.pt"


@dataclass(frozen=True)
class DistillConfig:
    """Make a draft for a target out of what the target writes."""

    pair: str = "smollm2"
    """name of the pair whose target is learned from"""
    out: Path = Path("runs/distill")
    """folder for data, checkpoints, curves and the finished draft"""
    workload: str = "mixed"
    """workload whose prompts of the split `draft` (without one: `train`) the target answers"""
    text: tuple[Path, ...] = ()
    """plain text files to train on instead of the target's own answers"""
    tokens: int = 300_000
    """training text, in tokens (prompts included)"""
    max_new_tokens: int = 224
    """length of the target's answers"""
    rows: int = 64
    """texts per shard, generated together"""
    head: int = 8192
    """tokens that the draft can propose: the most frequent ones of the data"""
    steps: int = 2000
    """optimiser steps"""
    batch_rows: int = 8
    """texts per step"""
    learning_rate: float = 1e-3
    """peak of the schedule"""
    self_fed: int = 1
    """design hidden: extra passes over each batch on the layer's own features"""
    every: int = 100
    """steps between checkpoints and dev measurements"""
    seed: int = 0
    """of data, initial weights and order"""
    design: Literal["hidden", "layers"] = "hidden"
    """hidden: one layer on the target's last hidden state; layers: an independent model of a few of its layers"""
    layers: int = 4
    """design layers: how many, half of them the target's first, half its last"""
    data: Path | None = None
    """folder of an earlier run of the pair whose data to use; its workload, text, tokens, max-new-tokens, rows and
    head then hold instead of those given here, and labels that it lacks are added to it"""
    start: Path | None = None
    """a finished draft of the same design and pair to train on; its head is kept"""
    learn_prompts: bool = True
    """learn what the target expects in the prompts too, not in its answers alone"""
    resume: bool = False
    """go on in a folder that holds an interrupted run"""
    threads: int | None = None
    """torch threads"""
    dtype: str = "auto"
    """of the target"""


def check(config: DistillConfig) -> None:
    """Refuse what can be seen to be wrong before any model is loaded. Makes the output folder."""
    least = {"tokens": 1, "max_new_tokens": 1, "rows": 2, "head": 1, "steps": 1, "batch_rows": 1, "self_fed": 0}
    for name, value in (least | {"every": 1, "seed": 0, "layers": 1}).items():
        if getattr(config, name) < value:
            flag = name.replace("_", "-")
            raise AsscError(f"--{flag} is {getattr(config, name)}, allowed is {value} or more")
    if not 0 < config.learning_rate < math.inf:
        raise AsscError(f"--learning-rate is {config.learning_rate}, it must be above 0")
    for path in config.text:
        if not path.is_file():
            raise AsscError(f"there is no text file {str(path)!r}")
    check_writable(config.out / RUN_FILE)
