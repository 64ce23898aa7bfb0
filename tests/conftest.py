"""Shared fixtures: threads, and the real model that some tests need."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from assc.errors import PairError
from assc.hardware import usable_cores
from assc.pairs import LoadedPair, load_pair

THREADS = int(os.environ.get("OMP_NUM_THREADS") or min(2, usable_cores()))
"""two threads at most: spinning threads of parallel test runs slow each other down"""


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(THREADS)
    # a shell lets its background jobs ignore Ctrl-C, and their children inherit that: the tests of it could not pass
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever asks for the real model carries the marker `model`."""
    for item in items:
        if "smollm2" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.model)


@pytest.fixture(scope="session")
def smollm2() -> LoadedPair:
    """SmolLM2-135M-Instruct in bfloat16 on the CPU; skipped without it, except in CI, where it has to be there."""
    try:
        return load_pair("smollm2", device="cpu", dtype="bfloat16", threads=THREADS)
    except PairError as error:
        if os.environ.get("CI", "").lower() in {"1", "true"}:
            pytest.fail(f"CI needs the real model: {error}")
        pytest.skip(str(error))
