"""`python -m assc roofline`: what rounds would cost on machines and pairs that are not at hand.

A forward takes the longer of reading its bytes (weights once, keys and values of every row) and doing its arithmetic
(two operations per parameter and token), both at a stated share of the peak, plus a fixed launch time and, over
several devices, two all-reduces per layer. Everything made here is labelled modelled; nothing of it was measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from assc.cli import parse, run_cli
from assc.costs import CostModel, DrafterCost
from assc.costs_io import CostFile, write_costs
from assc.errors import RequestError
from assc.outputs import COSTS, check_outputs


@dataclass(frozen=True)
class Device:
    """Peak figures of one accelerator, from its vendor's data sheet: bytes/s and dense 16-bit operations/s."""

    name: str
    bandwidth: float
    flops: float


DEVICES: dict[str, Device] = {
    d.name: d
    for d in (
        Device("h800", 3.35e12, 989e12),
        Device("h100", 3.35e12, 989e12),
        Device("h200", 4.8e12, 989e12),
        Device("a100", 2.04e12, 312e12),
        Device("mi300x", 5.3e12, 1307e12),
        Device("l40s", 0.864e12, 362e12),
        Device("l4", 0.30e12, 121e12),
        Device("rtx4090", 1.008e12, 165e12),
    )
}

BYTES: dict[str, float] = {"bfloat16": 2.0, "float16": 2.0, "float32": 4.0, "fp8": 1.0, "int4": 0.5}
"""per parameter; keys and values are kept in 16 bits (float32: 32)"""


LOOKUP_SECONDS = 30e-6
"""one call of an n-gram or suffix lookup on the host"""


@dataclass(frozen=True)
class Shape:
    """What a decoder-only model moves per token: parameters, layers, and key/value numbers per token and layer."""

    parameters: float
    layers: int
    kv_width: int
    """key/value heads · head size"""

    @classmethod
    def guess(cls, parameters: float) -> Shape:
        """Layers and widths as they are usual at this size (grouped-query attention from 3B on)."""
        for limit, layers, width in ((0.3e9, 30, 192), (1e9, 24, 128), (3e9, 28, 256), (10e9, 32, 1024)):
            if parameters <= limit:
                return cls(parameters, layers, width)
        return cls(parameters, 80 if parameters > 30e9 else 48, 1024)


@dataclass(frozen=True)
class Machine:
    """One or several devices that share a model (tensor parallel), and what of their peak is reached."""

    device: Device
    count: int = 1
    efficiency: float = 0.7
    launch: float = 0.4e-3
    """seconds per forward that no device figure explains (kernel launches in a CUDA graph, sampling)"""
    all_reduce: float = 8e-6
    """seconds per all-reduce of a few tokens; two per layer when `count` > 1"""

    def forward(self, shape: Shape, tokens: int, kv: int, batch: int = 1, dtype: str = "bfloat16") -> float:
        """Seconds of one forward of `tokens` per row behind `kv` tokens, for `batch` rows."""
        cache = 2.0 * shape.layers * shape.kv_width * (4.0 if dtype == "float32" else 2.0)
        moved = shape.parameters * BYTES[dtype] + batch * kv * cache
        work = 2.0 * shape.parameters * tokens * batch
        reached = self.count * self.efficiency
        seconds = max(moved / (self.device.bandwidth * reached), work / (self.device.flops * reached)) + self.launch
        return seconds + (2 * shape.layers * self.all_reduce if self.count > 1 else 0.0)


def roofline_costs(
    target: Shape,
    draft: Shape | None,
    machine: Machine,
    *,
    batch: int = 1,
    kv: int = 1024,
    k_max: int = 16,
    dtype: str = "bfloat16",
    draft_devices: int = 1,
    drafters: Mapping[str, Shape | None] | None = None,
) -> CostModel:
    """A `CostModel` per row of a batch that moves in step: the line through K = 0 and K = `k_max` at `kv` tokens.

    `drafters` names what is priced, None being a lookup; without it the draft is `model`, and a lookup `ngram` is
    added. Drafts run on `draft_devices` of the devices. Raises `RequestError` for a dtype that is not known.
    """
    if dtype not in BYTES:
        raise RequestError(f"unknown dtype {dtype!r} for a roofline; known: {', '.join(BYTES)}")
    one = machine.forward(target, 1, kv, batch, dtype)
    most = machine.forward(target, k_max + 1, kv, batch, dtype)
    empty = machine.forward(target, 1, 0, batch, dtype)
    per_token, per_kv = (most - one) / k_max, (one - empty) / kv
    if drafters is None:
        drafters = {"model": draft, "ngram": None} if draft is not None else {"ngram": None}
    small = Machine(machine.device, draft_devices, machine.efficiency, machine.launch, machine.all_reduce)

    def cost(shape: Shape | None) -> DrafterCost:
        if shape is None:
            return DrafterCost(0.0, per_call=LOOKUP_SECONDS)
        step = small.forward(shape, 1, kv, batch, dtype)
        caught = (small.forward(shape, 65, kv, batch, dtype) - step) / 64
        return DrafterCost(step, per_catch_up=min(caught, step))

    return CostModel(
        target_fixed=one - per_token - per_kv * kv,
        target_per_token=per_token,
        target_per_kv=per_kv,
        drafters={name: cost(shape) for name, shape in drafters.items()},
        overhead=0.3e-3,
        label=f"modelled (roofline): {machine.count}x{machine.device.name}, batch {batch}, {dtype}",
        kv_reference=kv,
    )


PROFILES: dict[str, tuple[Shape, Shape, Machine]] = {
    "67b-1.5b-8xh800": (Shape(67e9, 95, 1024), Shape(1.5e9, 28, 256), Machine(DEVICES["h800"], 8)),
    "llama-8b-1b-h100": (Shape(8.0e9, 32, 1024), Shape(1.2e9, 16, 512), Machine(DEVICES["h100"])),
    "qwen-72b-3b-4xa100": (Shape(72e9, 80, 1024), Shape(3e9, 36, 256), Machine(DEVICES["a100"], 4)),
    "smollm2-1.7b-135m-rtx4090": (Shape(1.7e9, 24, 2048), Shape(0.135e9, 30, 192), Machine(DEVICES["rtx4090"])),
}
"""pair and machine by name"""


def profile_costs(
    name: str, *, batch: int = 1, kv: int = 1024, drafters: Mapping[str, Shape | None] | None = None
) -> CostModel:
    """The cost model of a named profile, for its own draft or for `drafters`. `RequestError` for an unknown name."""
    if name not in PROFILES:
        raise RequestError(f"unknown profile {name!r}; known profiles: {', '.join(PROFILES)}")
    target, draft, machine = PROFILES[name]
    return roofline_costs(target, draft, machine, batch=batch, kv=kv, drafters=drafters)


@dataclass(frozen=True)
class Config:
    """Options of `python -m assc roofline`."""

    profile: str | None = None
    """a named pair and machine; without it the numbers below count"""
    target: float = 67e9
    """parameters of the target"""
    draft: float = 1.5e9
    """parameters of the draft; 0 for none"""
    drafters: tuple[str, ...] = ()
    """instead of the draft: NAME=PARAMETERS or NAME=lookup for each drafter of a trace, as eagle=0.25e9
    suffix=lookup"""
    device: str = "h800"
    """h800, h100, h200, a100, mi300x, l40s, l4 or rtx4090"""
    count: int = 8
    """devices that share the target"""
    batch: int = 1
    """rows decoded in step"""
    kv: int = 1024
    """committed tokens per row"""
    dtype: str = "bfloat16"
    """bfloat16, float16, float32, fp8 or int4"""
    out: Path | None = None
    """cost model file to write (labelled modelled)"""


def read_drafters(words: Sequence[str]) -> dict[str, Shape | None] | None:
    """Drafters by name out of NAME=PARAMETERS and NAME=lookup; None when no word is given. Raises `RequestError`.

    >>> read_drafters(["suffix=lookup"])
    {'suffix': None}
    """
    found: dict[str, Shape | None] = {}
    for word in words:
        name, _, value = word.partition("=")
        try:
            size = None if value == "lookup" else float(value)
        except ValueError:
            size = math.nan
        if not name or name in found or (size is not None and not 1 <= size < math.inf):
            raise RequestError(
                f"--drafters {word!r} is not NAME=PARAMETERS or NAME=lookup with a new name, as eagle=0.25e9 or "
                "suffix=lookup"
            )
        found[name] = None if size is None else Shape.guess(size)
    return found or None


def expected_speedup(costs: CostModel, drafter: str, k: int, alpha: float) -> float:
    """Σtokens/Σseconds against plain decoding if every draft token is accepted with probability `alpha`."""
    kv = costs.kv_reference
    tokens = k + 1.0 if alpha >= 1 else (1 - alpha ** (k + 1)) / (1 - alpha)
    seconds = costs.verify(k, kv) + costs.draft(drafter, k) + costs.overhead
    return tokens / seconds * costs.plain_step(kv)


def describe(costs: CostModel) -> str:
    """Step times, c, and the expected speed-up per K and acceptance."""
    kv = costs.kv_reference
    lines = [
        costs.label,
        f"target step {1e3 * costs.verify(0, kv):.2f} ms at {kv} tokens, +{1e3 * costs.target_per_token:.3f} ms per "
        f"verified token, +{1e6 * costs.target_per_kv:.2f} us per committed token",
    ]
    for name, cost in costs.drafters.items():
        step = 1e3 * (cost.per_step + cost.per_call)
        lines.append(f"{name}: {step:.3f} ms per step, c = {costs.cost_ratio(name):.3f}")
    first = next(iter(costs.drafters))
    values = (1, 2, 3, 4, 5, 6, 8, 12, 16)
    lines.append(f"speed-up modelled for {first}, rows: acceptance, columns: K")
    lines.append("      " + "".join(f"{k:>7}" for k in values))
    for alpha in (0.5, 0.6, 0.7, 0.8, 0.9):
        lines.append(f"{alpha:>5.2f} " + "".join(f"{expected_speedup(costs, first, k, alpha):>6.2f}x" for k in values))
    return "\n".join(lines)


def run(config: Config) -> int:
    """Print and save the modelled costs."""
    if config.device not in DEVICES:
        raise RequestError(f"unknown device {config.device!r}; known devices: {', '.join(DEVICES)}")
    drafters = read_drafters(config.drafters)
    sizes = (config.target, config.draft)
    if (
        not all(map(math.isfinite, sizes))
        or min(config.target, config.count, config.batch, config.kv) < 1
        or sizes[1] < 0
    ):
        raise RequestError("--target, --count, --batch and --kv are 1 or more, --draft is 0 or more")
    if config.profile is not None:
        plain = Config()
        for name in ("target", "draft", "device", "count", "dtype"):
            if getattr(config, name) != getattr(plain, name):
                raise RequestError(f"--profile {config.profile} decides --{name}; leave one of the two out")
    check_outputs({"out": config.out}, COSTS)
    if config.profile is not None:
        costs = profile_costs(config.profile, batch=config.batch, kv=config.kv, drafters=drafters)
    else:
        draft = Shape.guess(config.draft) if config.draft else None
        machine = Machine(DEVICES[config.device], config.count)
        options = {"batch": config.batch, "kv": config.kv}
        costs = roofline_costs(
            Shape.guess(config.target), draft, machine, **options, dtype=config.dtype, drafters=drafters
        )
    if config.out is not None:  # before the printing, which a closed pipe stops
        device = PROFILES[config.profile][2].device.name if config.profile is not None else config.device
        dtype = "bfloat16" if config.profile is not None else config.dtype
        write_costs(CostFile(costs, device=device, dtype=dtype, time_source="modelled"), config.out)
    print(describe(costs))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 2 and one sentence for a mistake of the user."""
    description = "Modelled costs of a pair on a machine that is not at hand."
    return run_cli(lambda: run(parse(Config, argv, prog="python -m assc roofline", description=description)))
