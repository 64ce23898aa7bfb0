"""Shared by all tests: cores and threads, and the real model that some of them need."""

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
MOST_WORKERS = 8
"""each holds torch and the real model: 1.5 GB"""
SLOW = (
    "test_rejection",
    "test_faults_models",
    "test_docs",
    "test_exactness",
    "test_training",
    "test_planted_faults",
    "test_faults_rounds",
    "test_faults_sampling",
)
"""files of half a minute and more on one core: begun first, they leave no worker alone at the end"""


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """The whole suite runs on all cores, file by file, where pytest-xdist is installed; `-n 0` says otherwise.

    What is chosen by name runs in this process, which starts sooner than workers do.
    """
    option = config.option
    chosen = config.args_source is not pytest.Config.ArgsSource.TESTPATHS or option.keyword or option.markexpr
    watched = option.collectonly or option.usepdb or option.capture == "no"
    alone = chosen or watched or hasattr(config, "workerinput")
    if alone or getattr(option, "numprocesses", 0) is not None:
        return
    workers = min(usable_cores(), MOST_WORKERS)
    if workers > 1:
        option.numprocesses, option.dist, option.loadscopereorder = workers, "loadfile", False
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the workers and of what they start


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(THREADS)
    # a shell lets its background jobs ignore Ctrl-C, and their children inherit that: the tests of it could not pass
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever asks for the real model carries the marker `model`; slow files come first."""
    for item in items:
        if "smollm2" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.model)
    rank = {name: i for i, name in enumerate(SLOW)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(SLOW)))


@pytest.fixture(scope="session")
def smollm2() -> LoadedPair:
    """SmolLM2-135M-Instruct in bfloat16 on the CPU; skipped without it, except in CI, where it has to be there."""
    try:
        return load_pair("smollm2", device="cpu", dtype="bfloat16", threads=THREADS)
    except PairError as error:
        if os.environ.get("CI", "").lower() in {"1", "true"}:
            pytest.fail(f"CI needs the real model: {error}")
        pytest.skip(str(error))
