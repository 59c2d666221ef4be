"""Runs the Gluon kernel of ``mid_linear`` on CPU tensors, asynchronous parts as late as the rules allow.

No interpreter runs Gluon, so this replaces the language under the kernel's own code. Copies land when they are waited for,
are seen by other warps after a barrier and by products after a fence; products read their buffers when they are waited for.
Whoever reads too early or overwrites what is still read gets a ``RaceError``. Layouts mean nothing here.
"""

from __future__ import annotations

import types
from dataclasses import dataclass, field
from typing import Any

import torch

from headway.kernels.mid_linear import triton as module


class RaceError(AssertionError):
    """The kernel relies on something that has not happened yet."""


@dataclass
class Pointer:
    """Elements of a flat tensor."""

    flat: torch.Tensor
    at: Any = 0
    is_input: bool = False

    @property
    def dtype(self) -> Any:
        return types.SimpleNamespace(element_ty=self.flat.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.flat, self.at + offset, self.is_input)


@dataclass(eq=False)
class Buffer:
    """Shared memory; what may be done with it next."""

    data: torch.Tensor
    state: str = "free"  # copying -> landed -> visible -> fenced -> reading -> read -> free

    def permute(self, order: tuple[int, int]) -> Buffer:
        """Second factors are kept as [columns, inputs], which is what the product below expects."""
        return self

    def move(self, before: str, after: str) -> None:
        if self.state == before:
            self.state = after


@dataclass
class Later:
    """A product that nobody has waited for."""

    a: Buffer
    b: Buffer
    acc: Any


@dataclass
class Program:
    """One program's asynchronous state; its methods stand for the language."""

    place: tuple[int, int]
    buffers: list[Buffer] = field(default_factory=list)
    open: list[Any] = field(default_factory=list)
    groups: list[list[Any]] = field(default_factory=list)
    inputs_ready: bool = False

    def gdc_wait(self) -> None:
        self.inputs_ready = True

    def read(self, pointer: Pointer, mask: Any) -> torch.Tensor:
        if pointer.is_input and not self.inputs_ready:
            raise RaceError("activations are read before the kernel before has ended")
        at, keep = torch.broadcast_tensors(torch.as_tensor(pointer.at), torch.as_tensor(True if mask is None else mask))
        return torch.where(keep, pointer.flat[torch.where(keep, at, 0)], torch.zeros((), dtype=pointer.flat.dtype))

    def allocate(self, dtype: torch.dtype, shape: list[int], layout: object) -> Buffer:
        self.buffers.append(Buffer(torch.full(shape, float("nan"), dtype=dtype)))
        return self.buffers[-1]

    def copy(self, target: Buffer, source: Pointer, mask: Any = None) -> None:
        if target.state != "free":
            raise RaceError(f"a copy into a buffer that is {target.state}")
        target.state = "copying"
        target.data.fill_(float("nan"))
        self.open.append((target, self.read(source, mask)))

    def commit(self) -> None:
        self.groups.append(self.open)
        self.open = []

    def wait_copies(self, outstanding: int) -> None:
        while len(self.groups) > outstanding:
            for target, values in self.groups.pop(0):
                target.data.copy_(values)
                target.state = "landed"

    def barrier(self) -> None:
        for buffer in self.buffers:
            buffer.move("landed", "visible")
            buffer.move("read", "free")

    def fence(self) -> None:
        for buffer in self.buffers:
            buffer.move("visible", "fenced")

    def multiply(self, a: Buffer, b: Buffer, acc: Any, is_async: bool) -> Later:
        assert is_async
        for buffer in (a, b):
            if buffer.state != "fenced":
                raise RaceError(f"a product of a buffer that is {buffer.state}")
            buffer.state = "reading"
        return Later(a, b, acc)

    def wait_products(self, outstanding: int, deps: list[Any]) -> Any:
        assert outstanding == 0
        (later,) = deps
        if not isinstance(later, Later):
            return later
        acc = self.wait_products(0, [later.acc])
        later.a.state = later.b.state = "read"
        return acc + later.a.data.float() @ later.b.data.float().T

    def store(self, pointer: Pointer, value: torch.Tensor, mask: torch.Tensor) -> None:
        if not self.inputs_ready:
            raise RaceError("a store before the kernel before has ended")
        at, value, mask = torch.broadcast_tensors(torch.as_tensor(pointer.at), value, mask)
        pointer.flat[at[mask]] = value[mask]

    def language(self) -> dict[str, Any]:
        """The names the kernel's module imports or defines, for this program."""
        gl = types.SimpleNamespace(
            program_id=lambda axis: self.place[axis], num_warps=lambda: 4, static_range=range,
            SliceLayout=lambda *_: None, NVMMASharedLayout=lambda *_: None, float32=torch.float32, int64=torch.int64,
            arange=lambda start, end, layout: torch.arange(start, end), expand_dims=torch.unsqueeze,
            minimum=lambda a, b: torch.minimum(a, torch.as_tensor(b)),
            where=lambda keep, a, b: torch.where(torch.as_tensor(keep), a, b),
            zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype), exp2=torch.exp2, reshape=torch.reshape,
            split=lambda pairs: pairs.unbind(-1), convert_layout=lambda value, layout: value,
            load=lambda pointer: self.read(pointer, None), store=self.store, allocate_shared_memory=self.allocate,
            thread_barrier=self.barrier, constexpr=None,
        )  # fmt: skip
        copies = types.SimpleNamespace(
            async_copy_global_to_shared=self.copy, commit_group=self.commit, wait_group=self.wait_copies
        )
        return {
            "gl": gl, "async_copy": copies, "fence_async_shared": self.fence, "warpgroup_mma": self.multiply,
            "warpgroup_mma_wait": self.wait_products, "gdc_wait": self.gdc_wait, "gdc_launch_dependents": lambda: None,
            "copy_layout": lambda *_: None, "store_layout": lambda *_: None, "product_layout": lambda *_: None,
            "least": min, "chunk_start": module.chunk_start.fn, "LOG2E": module.LOG2E.value,
        }  # fmt: skip


class ModelKernel:
    """Stands for ``mid_linear_kernel``: [grid](arguments), every program in turn."""

    def __getitem__(self, grid: tuple[int, int]) -> Any:
        def run(
            x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, out: torch.Tensor, *numbers: int, **names: Any
        ) -> None:
            del names["num_warps"]
            names["EARLY"] = True
            flat = x.as_strided((x.storage_offset() + (x.shape[0] - 1) * x.stride(0) + x.shape[1],), (1,), 0)
            for place in ((i, j) for i in range(grid[0]) for j in range(grid[1])):
                code = module.mid_linear_kernel.fn.__code__
                kernel = types.FunctionType(code, {**vars(module), **Program(place).language()})
                pointers = (Pointer(flat, x.storage_offset(), True), Pointer(weight.view(-1)), Pointer(bias.view(-1)))
                kernel(*pointers, Pointer(out.view(-1)), *numbers, **names)

        return run
