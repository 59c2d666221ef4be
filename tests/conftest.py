"""For all tests: few threads, no network, GPU tests only where there is a GPU."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Generator, Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

# Before torch, tokenizers or the hub client is imported by any test.
# A process that shares the machine with another (pytest-xdist, which inherits what its parent set) computes with one thread:
# two that spin wait for each other.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "2")
# torch's threads spin between operations, and so hold up other processes.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

from tests.examples import load_profile
from tests.kernels.quick_interpreter import quick_interpreter

# Before anything imports Triton: where there is no GPU, its kernels run in its interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

load_profile()


def modes_of_torch() -> list[Any]:
    """What takes part in every operation of this thread, such as a simulated device."""
    if "torch" not in sys.modules:
        return []
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]


@pytest.fixture(autouse=True)
def no_mode_is_left_on() -> Iterator[None]:
    """A simulated device that a test forgets would serve, and judge, the tests behind it in the same process."""
    before = modes_of_torch()
    yield
    assert modes_of_torch() == before, "the test left a mode of torch on; close its device"
    assert logging.root.manager.disable == logging.NOTSET, (
        "the test left logging off: others that read the log would find none"
    )


@pytest.fixture(scope="module", autouse=True)
def collections_look_at_little() -> None:
    """A million objects of imports and tests stay: a full collection that looks at them takes a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def interpreted_quickly() -> Iterator[None]:
    """For tests of kernels in Triton's interpreter. It is imported when the first of them runs."""
    with quick_interpreter() if not torch.cuda.is_available() and find_spec("triton") else nullcontext():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """What is imported and collected stays: looking for garbage among it is a third of the time that collecting takes."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu`` where torch sees no CUDA device."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
