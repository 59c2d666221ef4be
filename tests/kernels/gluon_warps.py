"""Runs a Gluon kernel of specialised warps on CPU tensors: its partitions in turns that a seed chooses, copies at any time.

No interpreter runs Gluon, so this replaces the language under the kernel's own code. One partition runs until it waits for a
barrier; then another goes on, or a copy lands. Products must find the same bytes when they are started and when they are
waited for. A copy into a buffer, or a product of one, that ordinary reads or writes were not fenced off from is an error, and
so is a state in which all wait. Layouts mean nothing here, but for the order of 64-column panels in shared memory.
"""

from __future__ import annotations

import math
import random
import sys
import threading
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from triton.language.core import constexpr

from tests.kernels.gluon_pointer import Pointer

PANEL = 64


class RaceError(AssertionError):
    """The kernel relies on something that has not happened yet, or never will."""


@dataclass(eq=False)
class Barrier:
    """An mbarrier: ``count`` arrivals and all expected bytes complete a phase."""

    count: int = 0
    pending: int = 0
    bytes: int = 0
    phase: int = 0

    def update(self, arrivals: int, size: int) -> None:
        self.pending -= arrivals
        self.bytes += size
        if self.pending < 0:
            raise RaceError("more arrivals than a phase has")
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase + 1, self.count

    def passed(self, parity: int) -> bool:
        return self.phase % 2 != parity


@dataclass(eq=False)
class Shared:
    """Shared memory: ``data`` in the order of its bytes, of which each 64 columns of a matrix are a panel."""

    data: torch.Tensor
    shape: tuple[int, ...]
    touched: dict[int, set[int]]  # first byte of a buffer -> partitions that used it and have not fenced

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    def index(self, place: Any) -> Shared:
        return Shared(self.data.view(self.shape[0], -1)[int(place)], self.shape[1:], self.touched)

    def _reinterpret(self, dtype: torch.dtype, shape: Sequence[int], layout: object) -> Shared:
        return Shared(self.data, tuple(shape), self.touched)

    def permute(self, order: tuple[int, int]) -> Transposed:
        return Transposed(self)

    def read(self) -> torch.Tensor:
        if self.shape[-1] % PANEL:
            return self.data.clone().view(self.shape)
        *rows, columns = self.shape
        return self.data.view(columns // PANEL, -1, PANEL).transpose(0, 1).reshape(*rows, columns).clone()

    def write(self, value: torch.Tensor) -> None:
        if self.shape[-1] % PANEL:
            self.data.copy_(value.view(-1))
            return
        panels = value.reshape(-1, self.shape[-1] // PANEL, PANEL).transpose(0, 1)
        self.data.copy_(panels.reshape(self.data.shape))

    def overlaps(self) -> bool:
        begin = self.data.data_ptr()
        end = begin + self.data.numel() * self.data.element_size()
        return any(begin <= place < end and who for place, who in self.touched.items())


@dataclass
class Transposed:
    source: Shared


@dataclass
class Descriptor:
    """A tensor in global memory that is copied in blocks; places outside it are zeros."""

    tensor: torch.Tensor
    block: tuple[int, ...]
    layout: object = None

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def block_shape(self) -> tuple[int, ...]:
        return self.block

    @property
    def block_type(self) -> Any:
        return types.SimpleNamespace(shape=self.block, nbytes=math.prod(self.block) * self.tensor.element_size())

    def read(self, place: Sequence[int]) -> torch.Tensor:
        out = torch.zeros(self.block, dtype=self.tensor.dtype)
        sizes = [max(0, min(b, n - p)) for b, n, p in zip(self.block, self.tensor.shape, place, strict=True)]
        if all(sizes):
            source = tuple(slice(p, p + n) for p, n in zip(place, sizes, strict=True))
            out[tuple(slice(n) for n in sizes)] = self.tensor[source]
        return out


@dataclass(eq=False)
class Product:
    """A product that nobody has waited for, or its sum."""

    a: Any
    b: Any
    acc: Any
    seen: tuple[torch.Tensor, torch.Tensor]
    value: torch.Tensor | None = None


def factor_of(operand: Any) -> torch.Tensor:
    if isinstance(operand, Transposed):
        return operand.source.read().T.clone()
    return (operand.read() if isinstance(operand, Shared) else operand).clone()


@dataclass
class Partition:
    """Warps with a thread of their own; ``ready`` says whether they can go on."""

    number: int
    ready: Callable[[], bool] = lambda: True
    turn: threading.Event = field(default_factory=threading.Event)
    done: bool = False
    open: list[Product] = field(default_factory=list)


class Machine:
    """One program: its partitions, copies under way and the language."""

    def __init__(self, module: Any, place: int | tuple[int, ...], width: int, seed: int) -> None:
        self.place, self.width, self.random = place, width, random.Random(seed)
        self.copies: list[Callable[[], None]] = []
        self.partitions: list[Partition] = []
        self.touched: dict[int, set[int]] = {}
        self.error: BaseException | None = None
        self.here = threading.local()
        self.main = threading.Event()
        known = dict(vars(module))
        for function in [
            value for value in known.values() if hasattr(value, "fn")
        ]:  # of other modules, with their names
            known = {**vars(sys.modules[function.fn.__module__]), **known}
        names = {**known, **self.language()}
        for name, value in known.items():
            if hasattr(value, "fn") and name not in self.language():
                names[name] = types.FunctionType(value.fn.__code__, names)
        names |= {name: value.value for name, value in known.items() if isinstance(value, constexpr)}
        self.names = names

    def program_id(self, axis: int) -> int:
        return self.place[axis] if isinstance(self.place, tuple) else self.place

    def specialize(self, work: Sequence[tuple[Any, tuple[Any, ...]]], warps: object, registers: object) -> None:
        self.partitions = [Partition(number) for number in range(len(work))]
        threads = []
        for partition, (function, arguments) in zip(self.partitions, work, strict=True):
            threads.append(threading.Thread(target=self.run, args=(partition, function, arguments), daemon=True))
            threads[-1].start()
        while self.error is None and not all(partition.done for partition in self.partitions):
            choices: list[Any] = [p for p in self.partitions if not p.done and p.ready()]
            choices += self.copies
            if not choices:
                self.error = RaceError("all partitions wait")
                break
            choice = self.random.choice(choices)
            if isinstance(choice, Partition):
                self.main.clear()
                choice.turn.set()
                self.main.wait()
            else:
                self.copies.remove(choice)
                choice()
        if self.error is not None:
            for partition in self.partitions:
                partition.turn.set()
            raise self.error

    def run(self, partition: Partition, function: Any, arguments: tuple[Any, ...]) -> None:
        self.here.partition = partition
        partition.turn.wait()
        try:
            function(*arguments)
        except BaseException as error:
            self.error = self.error or error
        partition.done = True
        self.main.set()

    def wait(self, barrier: Barrier, phase: Any) -> None:
        parity = int(phase)
        self.pause(lambda: barrier.passed(parity))

    def arrive(self, barrier: Barrier, count: int) -> None:
        barrier.update(count, 0)
        self.pause(lambda: True)  # others may go on before this partition does

    def pause(self, ready: Callable[[], bool]) -> None:
        partition = self.here.partition
        partition.ready = ready
        partition.turn.clear()
        self.main.set()
        partition.turn.wait()
        if self.error is not None:
            raise RaceError("another partition failed")
        partition.ready = lambda: True

    def copy(self, descriptor: Descriptor, place: Sequence[Any], barrier: Barrier, target: Shared) -> None:
        assert tuple(target.shape) == tuple(descriptor.block)
        if target.overlaps():
            raise RaceError("a copy into a buffer whose reads or writes are not fenced")
        where = [int(p) for p in place]
        target.data.fill_(float("nan"))

        def land() -> None:
            target.write(descriptor.read(where))
            barrier.update(0, -descriptor.block_type.nbytes)

        self.copies.append(land)

    def touch(self, buffer: Shared) -> None:
        self.touched.setdefault(buffer.data.data_ptr(), set()).add(self.here.partition.number)

    def fence(self) -> None:
        for who in self.touched.values():
            who.discard(getattr(self.here, "partition", Partition(-1)).number)

    def multiply(self, a: Any, b: Any, acc: Any, use_acc: bool = True, is_async: bool = False) -> Product:
        assert is_async
        for operand in (a, b.source if isinstance(b, Transposed) else b):
            if isinstance(operand, Shared) and self.here.partition.number in self.touched.get(
                operand.data.data_ptr(), ()
            ):
                raise RaceError("a product of a buffer whose writes are not fenced")
        product = Product(a, b, acc, (factor_of(a), factor_of(b)))
        self.here.partition.open.append(product)
        return product

    def finish(self, product: Any) -> torch.Tensor:
        if not isinstance(product, Product):
            return product
        if product.value is None:
            now = (factor_of(product.a), factor_of(product.b))
            if not all(
                torch.equal(x.view(torch.int16), y.view(torch.int16)) for x, y in zip(now, product.seen, strict=True)
            ):
                raise RaceError("a product's factors changed while it ran")
            product.value = self.finish(product.acc) + now[0].float() @ now[1].float()
        return product.value

    def wait_products(self, outstanding: int, deps: Sequence[Any]) -> Any:
        queue = self.here.partition.open
        while len(queue) > outstanding:
            self.finish(queue.pop(0))
        (later,) = deps
        if isinstance(later, Product) and later.value is None:
            raise RaceError("a product is used that may still run")
        return later.value if isinstance(later, Product) else later

    def load(self, pointer: Pointer, mask: Any = True, other: Any = 0) -> torch.Tensor:
        at, keep = torch.broadcast_tensors(torch.as_tensor(pointer.at), torch.as_tensor(mask))
        return torch.where(keep, pointer.flat[torch.where(keep, at, 0)], torch.as_tensor(other))

    def add(self, pointer: Pointer, value: int) -> torch.Tensor:
        before = pointer.flat[pointer.at].clone()
        pointer.flat[pointer.at] += value
        return before

    def store(self, pointer: Pointer, value: Any, mask: Any = True) -> None:
        at, value, mask = torch.broadcast_tensors(*map(torch.as_tensor, (pointer.at, value, mask)))
        pointer.flat[at[mask]] = value[mask].to(pointer.flat.dtype)

    def allocate(self, dtype: Any, shape: Sequence[int], layout: object) -> Any:
        if dtype is torch.int64:
            return Barriers(shape[0]) if len(shape) > 1 else Barrier()
        content = float("nan") if dtype.is_floating_point else -(2**31)
        return SharedHere(torch.full((math.prod(shape),), content, dtype=dtype), tuple(shape), self)

    def language(self) -> dict[str, Any]:
        """The names the kernel's module imports or defines."""
        gl = types.SimpleNamespace(
            program_id=self.program_id, num_programs=lambda axis: self.width, static_range=range,
            float32=torch.float32, int64=torch.int64, load=self.load, store=self.store, exp2=torch.exp2,
            arange=lambda start, end, layout: torch.arange(start, end), expand_dims=torch.unsqueeze,
            minimum=lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b)),
            maximum=lambda a, b: torch.maximum(torch.as_tensor(a), torch.as_tensor(b)),
            where=lambda keep, a, b: torch.where(torch.as_tensor(keep), torch.as_tensor(a), torch.as_tensor(b)),
            zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
            full=lambda shape, value, dtype, layout: torch.full(shape, torch.as_tensor(value).item(), dtype=dtype),
            max=lambda x, axis: x.amax(axis), sum=lambda x, axis: x.sum(axis), log2=torch.log2,
            associative_scan=lambda x, axis, combine: x.cumsum(axis),  # sums alone are asked for
            convert_layout=lambda value, layout: value, allocate_shared_memory=self.allocate, thread_barrier=lambda: None,
            atomic_add=self.add, int32=torch.int32, SwizzledSharedLayout=lambda *_: None,
            float16=torch.float16, num_warps=lambda: 4,
            warp_specialize=self.specialize, constexpr=None, SliceLayout=lambda *_: None, BlockedLayout=lambda *_: None,
            NVMMASharedLayout=lambda *_: None, NVMMADistributedLayout=lambda *_: None, DotOperandLayout=lambda *_: None,
        )  # fmt: skip
        bars = types.SimpleNamespace(
            MBarrierLayout=lambda: None, init=init_barrier, wait=self.wait,
            expect=lambda bar, size: bar.update(0, size) or bar.update(1, 0),
            arrive=self.arrive,
        )  # fmt: skip
        return {
            "gl": gl, "mbarrier": bars, "tma": types.SimpleNamespace(async_copy_global_to_shared=self.copy),
            "fence_async_shared": self.fence, "warpgroup_mma": self.multiply, "warpgroup_mma_wait": self.wait_products,
            "power": torch.exp2, "hold": lambda total: total,
        }  # fmt: skip


class Barriers:
    """A row of them."""

    def __init__(self, number: int) -> None:
        self.all = [Barrier() for _ in range(number)]

    def index(self, place: Any) -> Barrier:
        return self.all[int(place)]


def init_barrier(barrier: Barrier, count: int) -> None:
    barrier.count = barrier.pending = count


class SharedHere(Shared):
    """Shared memory with ordinary reads and writes."""

    def __init__(self, data: torch.Tensor, shape: tuple[int, ...], machine: Machine) -> None:
        super().__init__(data, shape, machine.touched)
        self.machine = machine

    def index(self, place: Any) -> SharedHere:
        return SharedHere(self.data.view(self.shape[0], -1)[int(place)], self.shape[1:], self.machine)

    def _reinterpret(self, dtype: torch.dtype, shape: Sequence[int], layout: object) -> SharedHere:
        return SharedHere(self.data, tuple(shape), self.machine)

    def load(self, layout: object) -> torch.Tensor:
        self.machine.touch(self)
        return self.read()

    def store(self, value: torch.Tensor) -> None:
        self.machine.touch(self)
        self.write(value)
