"""Runs the Gluon kernels of ``mid_linear`` on CPU tensors, asynchronous parts as late as the rules allow.

No interpreter runs Gluon, so this replaces the language under the kernel's own code. Copies land when they are waited for,
are seen by other warps after a barrier and by products after a fence; products read their buffers when they are waited for.
Whoever reads too early or overwrites what is still read gets a ``RaceError``. Programs of a cluster are threads: what is
sent must come after they have met, and counts as read too early until the mailbox was waited for. Layouts mean nothing here.
"""

from __future__ import annotations

import threading
import types
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch

from headway.kernels.mid_linear.hopper import triton as module
from headway.kernels.wide_linear.hopper.triton import LOG2E

HELPERS = (
    "buffers", "weight_rows", "copy_weights", "multiply", "multiply_run", "meet", "meet_all", "load_squares", "store_columns",
    "store_sum", "gate_mul",
)  # fmt: skip
WRITTEN_BEFORE = ("x_ptr", "residual_ptr", "squares_ptr")
"""By kernels that may still run."""


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
    readers: int = 0

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

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


class Cluster:
    """What its programs have in common: a room of floats in each one's shared memory, and a barrier.

    Attributes:
        sent: (rank, floats from the room's beginning, values).
    """

    REACH = 1 << 24  # bytes from one program's shared memory to the next one's

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60)
        self.sent: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []


@dataclass
class Program:
    """One program's asynchronous state; its methods stand for the language."""

    place: tuple[int, ...]
    cluster: Cluster
    rank: int
    room: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    opened: bool = False
    others_run: bool = False
    expected: int = 0
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
            if buffer.state not in ("fenced", "reading"):
                raise RaceError(f"a product of a buffer that is {buffer.state}")
            buffer.state = "reading"
            buffer.readers += 1
        return Later(a, b, acc)

    def wait_products(self, outstanding: int, deps: list[Any]) -> Any:
        """Chains of products that take turns: the newest ``outstanding`` keep running, as many of each chain."""
        each, rest = divmod(outstanding, len(deps))
        assert each in (0, 1) and rest == 0
        done = tuple(self.finish(each, later) for later in deps)
        return done if len(done) > 1 else done[0]

    def finish(self, outstanding: int, later: Any) -> Any:
        if not isinstance(later, Later):
            return later
        if outstanding:
            return Later(later.a, later.b, self.finish(0, later.acc))
        acc = self.finish(0, later.acc)
        for buffer in (later.a, later.b):
            buffer.readers -= 1
            if not buffer.readers:
                buffer.state = "read"
        return acc + later.a.data.float() @ later.b.data.float().T

    def store(self, pointer: Pointer, value: torch.Tensor, mask: torch.Tensor) -> None:
        if not self.inputs_ready:
            raise RaceError("a store before the kernel before has ended")
        if any(buffer.state == "copying" for buffer in self.buffers):
            raise RaceError("results pass through shared memory that is still copied to")
        at, value, mask = torch.broadcast_tensors(torch.as_tensor(pointer.at), value, mask)
        pointer.flat[at[mask]] = value[mask]

    def make_room(self, size: int, cluster: int) -> int:
        assert cluster == self.cluster.barrier.parties
        self.room = torch.full((size // 4,), float("nan"))
        return 0

    def open_mailbox(self, box: int, expected: torch.Tensor) -> None:
        assert box == 0 and not self.opened
        self.opened, self.expected = True, int(expected)

    def meet_others(self) -> None:
        if not self.opened:
            raise RaceError("a wait for the cluster without having arrived")
        self.cluster.barrier.wait()
        self.others_run = True

    def send(self, places: torch.Tensor, boxes: torch.Tensor, values: torch.Tensor, keep: torch.Tensor) -> None:
        if not self.others_run:
            raise RaceError("something is sent to programs that may not run")
        some = keep.bool()
        rank, at = places[some] // Cluster.REACH, places[some] % Cluster.REACH
        assert bool((boxes[some] == rank * Cluster.REACH).all()), "another program's mailbox counts"
        assert bool((at % 4 == 0).all()) and bool((at >= 16).all()) and bool((at < 4 * len(self.room)).all())
        self.cluster.sent.append((rank, at // 4, values[some]))
        self.cluster.barrier.wait()  # all that anybody sends has arrived, which is what the next one waits for

    def wait_mailbox(self, box: int) -> None:
        for rank, at, values in self.cluster.sent:
            mine = rank == self.rank
            self.room[at[mine]] = values[mine]
            self.expected -= 4 * int(mine.sum())
        if self.expected:
            raise RaceError(f"{self.expected} bytes more were expected than came")

    def language(self) -> dict[str, Any]:
        """The names the kernel's module imports or defines, for this program."""
        gl = types.SimpleNamespace(
            program_id=lambda axis: self.place[axis], num_warps=lambda: 4, static_range=range,
            SliceLayout=lambda *_: None, NVMMASharedLayout=lambda *_: None, float32=torch.float32, int64=torch.int64,
            arange=lambda start, end, layout: torch.arange(start, end), expand_dims=torch.unsqueeze,
            minimum=lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b)),
            where=lambda keep, a, b: torch.where(torch.as_tensor(keep), a, b),
            zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype), exp2=torch.exp2, reshape=torch.reshape,
            erf=torch.erf, split=lambda pairs: pairs.unbind(-1), convert_layout=lambda value, layout: value,
            load=lambda pointer, mask=None, other=0.0: self.read(pointer, mask), store=self.store, int32=torch.int32,
            rsqrt=torch.rsqrt, sum=lambda value, axis: value.sum(axis), allocate_shared_memory=self.allocate,
            thread_barrier=self.barrier, constexpr=None,
        )  # fmt: skip
        copies = types.SimpleNamespace(
            async_copy_global_to_shared=self.copy, commit_group=self.commit, wait_group=self.wait_copies
        )
        return {
            "gl": gl, "async_copy": copies, "fence_async_shared": self.fence, "warpgroup_mma": self.multiply,
            "warpgroup_mma_wait": self.wait_products, "gdc_wait": self.gdc_wait, "gdc_launch_dependents": lambda: None,
            "copy_layout": lambda *_: None, "store_layout": lambda *_: None, "product_layout": lambda *_: None,
            "squares_layout": lambda *_: None, "least": min,
            "chunk_start": module.chunk_start.fn, "LOG2E": LOG2E.value, "ROOM_PAD": module.ROOM_PAD.value,
            "cluster_buffer": self.make_room, "cluster_wait": self.meet_others, "open_mailbox": self.open_mailbox,
            "place_in": lambda rank, at: rank * Cluster.REACH + at, "send2": self.send, "wait_mailbox": self.wait_mailbox,
            "pull4": lambda at: self.room[at // 4],
        }  # fmt: skip

    def function(self, name: str) -> Any:
        """A function of the kernels' module, in this program's language."""
        names = {**vars(module), **self.language()}
        for other in HELPERS:
            names[other] = types.FunctionType(getattr(module, other).fn.__code__, names)
        return types.FunctionType(getattr(module, name).fn.__code__, names)


class ModelKernel:
    """Stands for the kernel ``name``: [grid](arguments), every program or cluster of them in turn."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._arguments = getattr(module, name).arg_names

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def run(*values: Any, **names: Any) -> None:
            del names["num_warps"]
            names["EARLY"] = True
            for name, value in zip(self._arguments, values, strict=False):
                names[name] = _pointer(value, name in WRITTEN_BEFORE) if isinstance(value, torch.Tensor) else value
            size = names.get("CLUSTER", 1)
            for first, *others in product(range(0, grid[0], size), *(range(size) for size in grid[1:])):
                cluster = Cluster(size)
                with ThreadPoolExecutor(size) as pool:
                    running = [
                        pool.submit(self._run, Program((first + rank, *others), cluster, rank), names)
                        for rank in range(size)
                    ]
                errors = [error for error in (each.exception() for each in running) if error is not None]
                for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
                    raise error

        return run

    def _run(self, program: Program, names: dict[str, Any]) -> None:
        try:
            program.function(self._name)(**names)
        except BaseException:
            program.cluster.barrier.abort()
            raise


def _pointer(tensor: torch.Tensor, is_input: bool) -> Pointer:
    """To the tensor's first element; its rows may be strided."""
    if tensor.is_contiguous():
        return Pointer(tensor.view(-1), 0, is_input)
    size = tensor.storage_offset() + (tensor.shape[0] - 1) * tensor.stride(0) + tensor.shape[1]
    return Pointer(tensor.as_strided((size,), (1,), 0), tensor.storage_offset(), is_input)
