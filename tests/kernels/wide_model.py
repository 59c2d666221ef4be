"""Runs the Gluon kernels of ``wide_linear``, and those of ``mid_linear`` that copy likewise, on CPU tensors.

Asynchronous parts happen as late as the rules allow.

No interpreter runs Gluon, so this replaces the language under the kernels' own code. Warps of different kinds are threads.
Copies land when their barrier is waited for, products read their buffers when they are waited for, and copies out of shared
memory read it when they are waited for; what a copy is going to overwrite is poison from its start. So whoever reads too early
gets poison, and whoever lets go too early leaves it; a barrier that never completes is an error. Layouts mean nothing here.
Programs of a cluster are threads, too; nobody may send to one that has not started or has ended.
"""

from __future__ import annotations

import threading
import types
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from headway.kernels.mid_linear.hopper import triton as mid
from headway.kernels.mid_linear.hopper import triton_thin as thin
from headway.kernels.wide_linear.hopper import triton, triton_gate_up, triton_qkv, triton_turns
from tests.kernels.gluon_pointer import Pointer

PATIENCE = 20.0
"""Seconds until a barrier counts as stuck."""
REACH = 1 << 24
"""Bytes from one program's shared memory to the next one's in its cluster."""
NAMES = (
    "tile_place", "copy_tiles", "multiply_tiles", "finish_tiles", "make_buffers", "run_tiles", "gate_mul",
    "finish_gates", "out_part", "finish_sums", "leave", "halves", "angles_place", "scale_head", "scale_heads",
    "turn_head", "store_head", "finish_heads", "copy_weights", "copy_pairs", "store_part", "pair_tiles",
    "as_cached", "row_scale", "product", "copy_thin", "thin_tiles", "thin_buffers", "thin_sum", "meet", "meet_all", "store_sum",
    "load_squares", "gelu", "column", "column_bias", "prepare_sums", "turn_tiles",
)  # fmt: skip


class StuckError(AssertionError):
    """A barrier is waited for that nobody completes."""


class Shared:
    """A view of shared memory."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data, self.dtype, self.shape = data, data.dtype, data.shape

    def index(self, i: int) -> Shared:
        return Shared(self.data[i])

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.data.narrow(dim, start, length))

    def reshape(self, shape: list[int]) -> Shared:
        return Shared(self.data.view(shape))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.data.permute(order))

    def store(self, value: torch.Tensor) -> None:
        self.data.copy_(value)

    def load(self, layout: object) -> torch.Tensor:
        return self.data.clone()


class Panels:
    """Sums [2, ROWS, WIDE] the way the kernels take them: [half x panel x pass, tokens, PANEL]."""

    def __init__(self, sums: Shared, tokens: int) -> None:
        parts = sums.data.unflatten(2, (-1, triton.PANEL.value)).unflatten(1, (-1, tokens))
        self.data = parts.permute(0, 3, 1, 2, 4)

    def index(self, i: int) -> Shared:
        half, rest = divmod(i, self.data.shape[1] * self.data.shape[2])
        return Shared(self.data[(half, *divmod(rest, self.data.shape[2]))])


@dataclass
class Later:
    """A product that nobody has waited for."""

    a: Shared
    b: Shared
    acc: Any


class Barriers:
    """A row of barriers, or one of them."""

    def __init__(self, program: Program, count: int) -> None:
        self.items = [Barrier(program) for _ in range(count)]

    def index(self, i: int) -> Barrier:
        return self.items[i]


class Barrier:
    """Completed phases, arrivals and bytes that the current one still needs, copies that belong to it."""

    def __init__(self, program: Program) -> None:
        self.changed = program.changed
        self.count = self.missing = self.bytes = self.phases = 0
        self.copies: list[tuple[Shared, torch.Tensor]] = []

    def init(self, count: int) -> None:
        self.count = self.missing = count

    def expect(self, size: int) -> None:
        with self.changed:
            self.bytes += size
            self._arrive()

    def arrive(self, pred: bool = True) -> None:
        with self.changed:
            if pred:
                self._arrive()

    def _arrive(self) -> None:
        assert self.missing > 0, "more arrivals than the barrier counts"
        self.missing -= 1
        self._complete()

    def copied(self, target: Shared, values: torch.Tensor) -> None:
        with self.changed:
            target.data.fill_(float("nan"))
            self.copies.append((target, values))
            self.bytes -= values.numel() * values.element_size()
            self._complete()

    def _complete(self) -> None:
        if self.missing == 0 and self.bytes == 0:
            self.phases, self.missing = self.phases + 1, self.count
            self.changed.notify_all()

    def wait(self, parity: int) -> None:
        """Until the phase of this parity has completed: the one before the barrier's first counts as odd."""
        with self.changed:
            if not self.changed.wait_for(lambda: (self.phases - 1) % 2 == parity, PATIENCE):
                raise StuckError("a barrier does not complete")
            for target, values in self.copies:
                target.data.copy_(values)
            self.copies.clear()


def block(desc: Any, place: list[int]) -> tuple[torch.Tensor, list[slice], list[slice]]:
    """The whole tensor of a descriptor, where the block lies in it, and which part of the block that is."""
    whole = desc.base.as_strided(desc.shape, desc.strides)
    spans = [(at, min(at + size, limit)) for at, size, limit in zip(place, desc.block_shape, desc.shape, strict=True)]
    inside = [slice(a, max(a, b)) for a, b in spans]
    return whole, inside, [slice(0, max(b - a, 0)) for a, b in spans]


def run_together(works: list[Callable[[], None]]) -> None:
    """Each in a thread; raises the first error."""
    errors: list[BaseException] = []

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


class Program:
    """One program's state; its methods stand for the language."""

    def __init__(self, place: int, programs: int, changed: threading.Condition) -> None:
        self.place, self.programs, self.changed = place, programs, changed
        self.stores: dict[int, list[tuple[Any, list[int], Shared]]] = defaultdict(list)
        self.cluster: list[Program] = [self]
        self.mail: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.room = torch.empty(0)
        self.expected = -1
        self.running = self.ended = False

    def allocate(self, dtype: Any, shape: list[int], layout: object) -> Any:
        if dtype is torch.int64:
            return Barriers(self, shape[0])
        return Shared(torch.full([int(size) for size in shape], float("nan"), dtype=dtype))

    def copy_in(self, desc: Any, place: list[int], barrier: Barrier, target: Shared) -> None:
        whole, inside, part = block(desc, place)
        values = torch.zeros(desc.block_shape, dtype=target.dtype)
        values[tuple(part)] = whole[tuple(inside)]
        barrier.copied(target, values)

    def make_room(self, size: int, cluster: int) -> int:
        assert cluster == len(self.cluster)
        self.room = torch.full((size // 4,), float("nan"))
        return 0

    def init_mailbox(self, box: int, expected: Any) -> None:
        assert box == 0 and not self.running
        self.expected = int(expected)

    def send(self, places: torch.Tensor, boxes: torch.Tensor, values: torch.Tensor, keep: torch.Tensor) -> None:
        some = keep.bool()
        rank, at = places[some] // REACH, places[some] % REACH
        assert bool((boxes[some] == rank * REACH).all()), "another program's mailbox counts"
        assert bool((at % 4 == 0).all()) and bool((at >= 16).all())
        for number, other in enumerate(self.cluster):
            theirs = rank == number
            assert other.running and not (other.ended and bool(theirs.any())), "sent to a program that does not run"
            with self.changed:
                other.mail.append((at[theirs] // 4, values[some][theirs]))
                other.expected -= 4 * int(theirs.sum())
                self.changed.notify_all()

    def wait_mailbox(self, box: int) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: self.expected == 0, PATIENCE):
                raise StuckError(f"{self.expected} bytes more were expected than came")
        for at, values in self.mail:
            self.room[at] = values

    def arrive_alone(self, others: int) -> None:
        with self.changed:
            self.running = True
            self.changed.notify_all()

    def wait_cluster(self) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: all(other.running for other in self.cluster), PATIENCE):
                raise StuckError("a program of the cluster does not start")

    def copy_out(self, desc: Any, place: list[int], source: Shared) -> None:
        self.stores[threading.get_ident()].append((desc, place, source))

    def wait_stores(self, outstanding: int) -> None:
        assert outstanding == 0
        for desc, place, source in self.stores.pop(threading.get_ident(), []):
            whole, inside, part = block(desc, place)
            whole[tuple(inside)] = source.data[tuple(part)]

    def wait_products(self, outstanding: int, deps: list[Any]) -> Any:
        """``outstanding``: of each of ``deps``, the newest keep running."""
        each, rest = divmod(outstanding, len(deps))
        assert rest == 0, "chunks have as many products as there are sums"
        done = tuple([self._wait_product(each, later) for later in deps])
        return done if len(done) > 1 else done[0]

    def _wait_product(self, outstanding: int, later: Any) -> Any:
        if not isinstance(later, Later):
            return later
        if outstanding:
            return Later(later.a, later.b, self._wait_product(outstanding - 1, later.acc))
        return self._wait_product(0, later.acc) + later.a.data.float() @ later.b.data.float()

    def multiply(self, a: Shared, b: Shared, acc: Any, use_acc: bool, is_async: bool) -> Later:
        assert is_async
        return Later(a, b, acc if use_acc else torch.zeros(a.shape[0], b.shape[1]))

    def specialize(self, works: list[tuple[Any, tuple[Any, ...]]], warps: list[int], registers: list[int]) -> None:
        assert len(warps) == len(registers) == len(works) - 1
        run_together([partial(function, *arguments) for function, arguments in works])

    def load(self, pointer: Pointer, mask: Any = None, other: Any = 0) -> torch.Tensor:
        at, keep = torch.broadcast_tensors(torch.as_tensor(pointer.at), torch.as_tensor(True if mask is None else mask))
        return torch.where(keep, pointer.flat[torch.where(keep, at, 0)], torch.tensor(other, dtype=pointer.flat.dtype))

    def store(self, pointer: Pointer, value: torch.Tensor, mask: torch.Tensor) -> None:
        at, value, mask = torch.broadcast_tensors(torch.as_tensor(pointer.at), value, mask)
        pointer.flat[at[mask]] = value[mask]

    def language(self) -> dict[str, Any]:
        """The names the kernels' module imports or defines, for this program."""

        def least(a: Any, b: Any) -> Any:
            return min(a, b) if isinstance(a, int) else torch.where(a.isnan(), b, torch.clamp(a, max=b))

        def most(a: Any, b: Any, propagate_nan: Any = None) -> Any:
            return torch.clamp(a, min=b) if propagate_nan else torch.where(a.isnan(), b, torch.clamp(a, min=b))

        gl = types.SimpleNamespace(
            program_id=lambda axis: self.place, num_programs=lambda axis: self.programs, static_range=range,
            SliceLayout=lambda *_: None, BlockedLayout=lambda *_: None, NVMMADistributedLayout=lambda *_: None,
            NVMMASharedLayout=lambda *_: None, int64=torch.int64, int32=torch.int32,
            float8e4nv=torch.float8_e4m3fn, float32=torch.float32, arange=lambda start, end, layout: torch.arange(start, end),
            expand_dims=torch.unsqueeze, minimum=least, maximum=most, where=_where, abs=torch.abs,
            zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype), exp2=torch.exp2, rsqrt=torch.rsqrt,
            erf=torch.erf, broadcast=torch.broadcast_tensors, join=lambda a, b: torch.stack((a, b), -1),
            sum=lambda x, axis: x.sum(axis), reshape=torch.reshape, permute=torch.permute,
            split=lambda pairs: pairs.unbind(-1), load=self.load, store=self.store,
            allocate_shared_memory=self.allocate, thread_barrier=lambda: None, warp_specialize=self.specialize,
            constexpr=None, convert_layout=lambda x, layout: x,
        )  # fmt: skip
        tma = types.SimpleNamespace(
            async_copy_global_to_shared=self.copy_in, async_copy_shared_to_global=self.copy_out,
            store_wait=self.wait_stores,
        )  # fmt: skip
        barrier = types.SimpleNamespace(
            MBarrierLayout=lambda: None, init=lambda bar, count: bar.init(count), expect=lambda bar, size: bar.expect(size),
            arrive=lambda bar, pred=True: bar.arrive(pred), wait=lambda bar, parity: bar.wait(parity),
        )  # fmt: skip
        names: dict[str, Any] = {
            "gl": gl, "tma": tma, "mbarrier": barrier, "fence_async_shared": lambda: None,
            "cluster_buffer": self.make_room, "arrive_alone": self.arrive_alone, "cluster_wait": self.wait_cluster,
            "init_mailbox": self.init_mailbox,
            "place_in": lambda rank, at: rank * REACH + at, "send2": self.send, "wait_mailbox": self.wait_mailbox,
            "pull4": lambda at: self.room[at // 4], "store_layout": lambda *_: None,
            "squares_layout": lambda parts: None, "sum_layout": lambda wide: None,
            "warpgroup_mma": self.multiply, "warpgroup_mma_wait": self.wait_products, "panels": Panels, "times": torch.mul,
            "widen": torch.Tensor.float, "power": torch.exp2,
        }  # fmt: skip
        known = {**vars(mid), **vars(thin), **vars(triton), **vars(triton_qkv), **vars(triton_gate_up)}
        known |= vars(triton_turns)
        names |= {key: each.value for key, each in known.items() if type(each).__name__ == "constexpr"}
        for name in NAMES:
            names[name] = types.FunctionType(known[name].fn.__code__, names)
        return names


def _where(keep: Any, a: Any, b: Any) -> Any:
    """Of pointers too."""
    if isinstance(a, Pointer):
        return a if keep else b
    return torch.where(torch.as_tensor(keep), a, b)


class ModelKernel:
    """Stands for one of the module's kernels: [grid](arguments), every program in turn.

    Args:
        programs: as many take part at most, whatever the grid says.
    """

    program: type[Program] = Program

    def __init__(self, kernel: Any, programs: int) -> None:
        self._code, self._programs = kernel.fn.__code__, programs

    def __getitem__(self, grid: tuple[int]) -> Any:
        def run(*arguments: Any, **names: Any) -> None:
            del names["num_warps"]
            names.pop("maxnreg", None)
            given = [_described(each) for each in arguments]
            cluster = names.get("CLUSTER", 1)
            programs = min(grid[0], self._programs * cluster)
            for first in range(0, programs, cluster):
                changed = threading.Condition()
                together = [self.program(first + rank, programs, changed) for rank in range(cluster)]
                for program in together:
                    program.cluster = together
                run_together([partial(self._run_one, program, given, names) for program in together])

        return run

    def _run_one(self, program: Program, given: list[Any], names: dict[str, Any]) -> None:
        types.FunctionType(self._code, program.language())(*given, **names)
        program.ended = True


def _described(argument: Any) -> Any:
    """Tensors as pointers, descriptors with what kernels ask of them."""
    if isinstance(argument, torch.Tensor):
        size = 1 + sum((n - 1) * stride for n, stride in zip(argument.shape, argument.stride(), strict=True))
        return Pointer(argument.as_strided((size,), (1,)))
    if hasattr(argument, "block_shape"):
        argument.dtype = argument.base.dtype
    return argument
