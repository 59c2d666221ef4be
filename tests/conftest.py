"""For all tests: few threads, no network, GPU tests only where there is a GPU."""

from __future__ import annotations

import os

# Before torch, tokenizers or the hub client is imported by any test.
# A process that shares the machine with another (pytest-xdist, which inherits what its parent set) computes with one thread:
# two that spin wait for each other.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "2")
# torch's threads spin between operations: beside other processes, tests that compare with transformers took five times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
from hypothesis import HealthCheck, settings

# No deadline: machines differ. In CI the same examples every time, so that a red run can be repeated.
settings.register_profile(
    "headway",
    deadline=None,
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("headway")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu`` where torch sees no CUDA device."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
