"""Defines Headway's operations: one schema, a torch reference, and faster implementations per device.

An operation is registered with ``torch.library`` define + impl (about 1 us a call, where ``custom_op`` costs 7-11 us).
The reference runs wherever no faster implementation does, states what the operation means, and is what tests compare with.
Fast implementations are named "module:function" and imported on the first call, so that a machine without Triton or a C
compiler never loads them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Protocol

import torch

_LIBRARY = torch.library.Library("headway", "DEF")
OPS: dict[str, Op] = {}
"""Every operation by name; filled at import, read by tests, benchmarks and the simulated device."""


class Transport(Protocol):
    """What carries the collective operations of one group of ranks (``headway.kernels.collectives``, ``headway.parallel``)."""

    def all_reduce(self, x: torch.Tensor) -> None:
        """Sum over all ranks, in place."""

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """``out``, [size, *x.shape]: x of every rank."""

    def all_to_all(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """``out``, [size, ...] as x: what each rank has in x at the place of this one."""

    def send(self, x: torch.Tensor, peer: int) -> None:
        """To one rank."""

    def receive(self, x: torch.Tensor, peer: int) -> None:
        """From one rank, into x."""

    def post(self, x: torch.Tensor, peer: int) -> None:
        """The same, but x is there when ``finish`` was called for it."""

    def finish(self) -> None:
        """Wait for what was posted first."""


TRANSPORTS: dict[int, Transport] = {}
"""Of the groups that ranks of this process are in. An operation's arguments are numbers and tensors, so it names a group by its
number here; ``headway.parallel.group`` adds and removes them."""


def nothing(*_: object) -> None:
    """The meta of an operation that writes its arguments and returns nothing."""


def like_first(x: torch.Tensor, *_: object) -> torch.Tensor:
    """The meta of an operation whose one output has the shape and dtype of its first argument."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


class Op:
    """One operation. Calling it goes through torch's dispatcher.

    Args:
        schema: torch schema without namespace, e.g. "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor".
        reference: the meaning, in torch; also the CPU implementation unless ``cpu`` is available.
        meta: output shapes and dtypes for Meta tensors; by default the operation returns nothing.
        triton: "module:function" of the CUDA implementation.
        cpu: "module:function" of a native CPU implementation. Its module has ``available() -> bool``; when that is False
            (no compiler), the reference runs.
    """

    def __init__(
        self,
        schema: str,
        *,
        reference: Callable[..., Any],
        meta: Callable[..., Any] = nothing,
        triton: str | None = None,
        cpu: str | None = None,
    ) -> None:
        self.name = schema.split("(", 1)[0]
        self.schema, self.reference, self.meta = schema, reference, meta
        self.triton, self.cpu = triton, cpu
        self._cpu_impl: Callable[..., Any] | None = None
        self._cuda_impl: Callable[..., Any] | None = None
        _LIBRARY.define(schema)
        _LIBRARY.impl(self.name, self._run_cpu, "CPU")
        _LIBRARY.impl(self.name, self._run_cuda, "CUDA")
        _LIBRARY.impl(self.name, meta, "Meta")
        self._overload = getattr(torch.ops.headway, self.name).default
        OPS[self.name] = self

    def __call__(self, *args: Any) -> Any:
        return self._overload(*args)

    def implementation(self, device: str) -> Callable[..., Any]:
        """The function that runs on ``device`` ("cpu" or "cuda"), imported if need be."""
        if device == "cuda":
            return _load(self.triton) if self.triton else self.reference
        if self.cpu and importlib.import_module(self.cpu.split(":")[0]).available():
            return _load(self.cpu)
        return self.reference

    def _run_cpu(self, *args: Any) -> Any:
        if self._cpu_impl is None:
            self._cpu_impl = self.implementation("cpu")
        return self._cpu_impl(*args)

    def _run_cuda(self, *args: Any) -> Any:
        if self._cuda_impl is None:
            self._cuda_impl = self.implementation("cuda")
        return self._cuda_impl(*args)


def _load(path: str) -> Callable[..., Any]:
    module, _, function = path.partition(":")
    loaded: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return loaded
