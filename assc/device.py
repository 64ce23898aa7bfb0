"""Which device and dtype to use, and what this CPU is good at."""

from __future__ import annotations

import sys

import torch

from assc.errors import PairError
from assc.hardware import cpu_name, usable_cores

DTYPES: dict[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
"""names accepted beside "auto" """


MAX_THREADS = 1024
"""far more than pay; hundreds of thousands end the process without a word"""


def check_threads(threads: int | None) -> None:
    """`PairError` for a number of threads that torch cannot use; None leaves the choice to torch."""
    if threads is not None and not 1 <= threads <= MAX_THREADS:
        raise PairError(f"threads is 1 or more, at most {MAX_THREADS}, got {threads}")


def resolve_device(name: str) -> torch.device:
    """`auto` is the first CUDA device if there is one, else the CPU. Raises `PairError` for a device not present."""
    if name == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):  # torch raises any of these for a missing back end
        count = torch.cuda.device_count()
        present = "cpu" if not count else f"cpu, cuda:0 to cuda:{count - 1}"
        raise PairError(f"the device {name!r} is not available here; choose auto or one of: {present}") from None
    return device


def cpu_features() -> dict[str, bool]:
    """Instruction sets that decide whether bfloat16 is fast on this CPU; False where torch cannot tell."""
    checks = {
        "amx_tile": "_is_amx_tile_supported",
        "avx512_bf16": "_is_avx512_bf16_supported",
        "avx512": "_is_avx512_supported",
        "avx2": "_is_avx2_supported",
    }
    found = {}
    for label, function in checks.items():  # private functions of torch, absent on some platforms and versions
        try:
            found[label] = bool(getattr(torch.cpu, function)())
        except (AttributeError, RuntimeError):
            found[label] = False
    return found


def default_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the hardware multiplies it, else float16 on a GPU and float32 on a CPU."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    if device.type == "cpu":
        features = cpu_features()
        return torch.bfloat16 if features["amx_tile"] or features["avx512_bf16"] else torch.float32
    return torch.float16


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """A dtype by name; `auto` is `default_dtype(device)`. Raises `PairError` for an unknown name."""
    if name == "auto":
        return default_dtype(device)
    if name not in DTYPES:
        raise PairError(f"unknown dtype {name!r}; choose auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def machine(device: torch.device) -> str:
    """The processor that decodes, for result files."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{cpu_name()}, {usable_cores()} usable cores"


def restart_peak(device: torch.device) -> None:
    """Begin anew what `peak_bytes` tells, where that can be done (CUDA)."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int | None:
    """Bytes in use at once: of tensors on a CUDA device since `restart_peak`, of the whole process on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
