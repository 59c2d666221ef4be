"""Puts the native CPU implementations in the kernels' place, so that an operation's own tests exercise them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from headway.kernels.registry import Op
from tests.kernels import guarded


def native_function(op: Op) -> Callable[..., Any]:
    """The function that the operation names for the CPU."""
    assert op.cpu is not None
    module, name = op.cpu.split(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


@contextmanager
def native_as_kernel() -> Iterator[None]:
    """``run_both`` and ``expect`` compare the reference with the native implementation on the CPU."""
    with (
        patch.object(Op, "implementation", lambda op, device: native_function(op)),
        patch.object(guarded, "DEVICE", "cpu"),
    ):
        yield


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Native kernels take as many threads as torch has."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """New tensors hold NaN or the largest integer instead of what lay there."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
