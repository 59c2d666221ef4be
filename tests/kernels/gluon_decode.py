"""Runs the Gluon kernel of decode attention on CPU tensors, its copies as late as the rules allow, its programs in any order.

No interpreter runs Gluon, so this replaces the language under the kernel's own code. Copies land when they are waited for, and
whoever reads before that reads NaN. So does who reads what earlier kernels of the step write before waiting for them: every
launch is early. What is put into the room for merging is seen after a barrier. Layouts mean nothing here.
"""

from __future__ import annotations

import random
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from triton.language.core import constexpr

from headway.kernels.paged_attention.hopper import triton_copy, triton_decode, triton_factors, triton_merge, triton_take
from tests.kernels import gluon_pointer

BOX = 1 << 20
"""Where the memory for a cluster begins."""
KERNEL = triton_decode.early_decode_kernel
UNWRITTEN = 0x7F7F
"""A word of two NaNs."""


class Value(torch.Tensor):
    """A tensor whose ``type`` has a layout, as Gluon's have."""

    type = types.SimpleNamespace(layout=None)  # type: ignore[assignment]

    def __iadd__(self, other: Any) -> Any:  # type: ignore[misc]  # a new value, of the shape both have together
        return self + other


def value_of(x: Any) -> Any:
    return torch.as_tensor(x).as_subclass(Value)


class Pointer(gluon_pointer.Pointer):
    """As kernels of this kind use it."""

    def to(self, dtype: torch.dtype, bitcast: bool) -> Pointer:
        assert bitcast and self.at * self.flat.itemsize % dtype.itemsize == 0
        return Pointer(self.flat.view(dtype), self.at * self.flat.itemsize // dtype.itemsize)

    def unsqueeze(self, axis: int) -> Pointer:
        return Pointer(self.flat, self.at.unsqueeze(axis))

    def read(self, mask: Any = None, other: float = 0.0) -> torch.Tensor:
        at, keep = torch.broadcast_tensors(torch.as_tensor(self.at), torch.as_tensor(True if mask is None else mask))
        filler = torch.full((), other, dtype=self.flat.dtype)
        return value_of(torch.where(keep, self.flat[torch.where(keep, at, 0).long()], filler))

    def write(self, value: Any, mask: Any = None) -> None:
        value = torch.as_tensor(value).to(self.flat.dtype)
        keep = torch.as_tensor(True if mask is None else mask)
        at, value, keep = torch.broadcast_tensors(torch.as_tensor(self.at), value, keep)
        assert at.shape == value.shape
        self.flat[at[keep].long()] = value[keep]


@dataclass
class Shared:
    """Shared memory, or a view of some."""

    data: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    def index(self, place: Any) -> Shared:
        return Shared(self.data[int(place)])

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.data.narrow(dim, start, length))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.data.permute(order))

    def reshape(self, shape: list[int]) -> Shared:
        return Shared(self.data.view(shape))

    def load(self, layout: object) -> torch.Tensor:
        return value_of(self.data.clone())

    def store(self, value: torch.Tensor) -> None:
        assert value.shape == self.data.shape
        self.data.copy_(value)


@dataclass
class Program:
    """One program; its methods stand for the language. ``late``: what lands with the kernels before, and what it is."""

    place: tuple[int, int, int]
    warps: int
    late: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    waited: bool = False
    room: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    unseen: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    open: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    groups: list[list[tuple[torch.Tensor, torch.Tensor]]] = field(default_factory=list)
    mail: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)  # to the first of the cluster, from all
    box: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    expected: int = -1
    others_run: bool = False

    def gdc_wait(self) -> None:
        for target, values in self.late:
            target.copy_(values)
        self.waited = True

    def store(self, pointer: Pointer, value: Any, mask: Any = None) -> None:
        assert self.waited, "no store comes before the wait"
        pointer.write(value, mask)

    def copy(self, target: Shared, source: Pointer, mask: Any = None) -> None:
        target.data.fill_(float("nan") if target.dtype.is_floating_point else UNWRITTEN)
        self.open.append((target.data, source.read(mask)))

    def commit(self) -> None:
        self.groups.append(self.open)
        self.open = []

    def wait_copies(self, outstanding: int) -> None:
        while len(self.groups) > outstanding:
            for target, values in self.groups.pop(0):
                target.copy_(values)

    def unpaired(self, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Numbers of words, as their asm gives them."""
        pairs = words.as_subclass(torch.Tensor).contiguous().view(torch.uint8).view(*words.shape, 2)
        first, second = pairs.view(torch.float8_e4m3fn).half().unbind(-1)
        return value_of(first), value_of(second)

    def barrier(self) -> None:
        for at, values in self.unseen:
            self.room[at] = values
        self.unseen.clear()

    def shared_room(self, size: int) -> torch.Tensor:
        self.room = torch.full((size // 4,), float("nan"))
        return value_of(torch.tensor(0))

    def put(self, at: torch.Tensor, values: torch.Tensor) -> None:
        assert at.shape == values.shape and not (at % 4).any()
        self.unseen.append(((at // 4).flatten().long(), values.flatten()))

    def put_pairs(self, at: torch.Tensor, values: torch.Tensor) -> None:
        at, values = torch.broadcast_tensors(at, values)
        assert torch.equal(at[..., 1::2], at[..., ::2] + 4) and not (at[..., ::2] % 8).any(), (
            "pairs lie together, aligned"
        )
        self.put(at, values)

    def pull(self, at: torch.Tensor) -> torch.Tensor:
        assert not (at % 4).any()
        if (at >= BOX).all():
            return value_of(self.box[((at - BOX) // 4).long()])
        return value_of(self.room[(at // 4).long()])

    def pull4(self, at: torch.Tensor) -> torch.Tensor:
        first = at[..., ::4]
        assert not (first % 16).any() and torch.equal(at[..., 3::4], first + 12), "fours are aligned and lie together"
        return self.pull(at)

    def cluster_buffer(self, size: int, cluster: int) -> torch.Tensor:
        self.box = torch.full((size // 4,), float("nan"))
        return value_of(torch.tensor(BOX))

    def open_mailbox(self, box: torch.Tensor, expected: torch.Tensor) -> None:
        self.expected = int(expected)

    def cluster_wait(self) -> None:
        assert self.expected >= 0 and not self.others_run, "a program arrives once, and then waits once"
        self.others_run = True

    def send(self, places: torch.Tensor, boxes: torch.Tensor, values: torch.Tensor, keep: Any = 1) -> None:
        assert self.others_run, "the others may not run"
        places, boxes, values, keep = torch.broadcast_tensors(places, boxes, values, torch.as_tensor(keep) != 0)
        assert (boxes == BOX).all() and (places >= BOX + 16).all(), "to the first of the cluster, behind its mailbox"
        self.mail.append(((places[keep] - BOX).long() // 4, values[keep]))

    def wait_mailbox(self, box: torch.Tensor) -> None:
        assert self.expected % sum(4 * len(at) for at, _ in self.mail) == 0, "all bytes, maybe from several threads"
        for at, values in self.mail:
            self.box[at] = values

    def add(self, pointer: Pointer, number: int, sem: str) -> torch.Tensor:
        before = pointer.read().clone()
        self.store(pointer, before + number)
        return before

    def language(self) -> dict[str, Any]:
        """The names the kernel's modules import or define, for this program."""

        def nothing(*_: Any, **__: Any) -> None:
            return None

        def wide(x: Any) -> Any:
            return value_of(x)

        gl = types.SimpleNamespace(
            program_id=lambda axis: value_of(torch.tensor(self.place[axis], dtype=torch.int32)),
            num_warps=lambda: self.warps, static_range=range, constexpr=None,
            SliceLayout=nothing, NVMMASharedLayout=nothing, NVMMADistributedLayout=nothing, DotOperandLayout=nothing,
            SwizzledSharedLayout=nothing, BlockedLayout=nothing, DistributedLinearLayout=nothing,
            float8e4nv=torch.float8_e4m3fn, float16=torch.float16, int16=torch.int16, pointer_type=lambda dtype: dtype,
            float32=torch.float32, int32=torch.int32, int64=torch.int64,
            arange=lambda start, end, layout: wide(torch.arange(start, end, dtype=torch.int32)),
            expand_dims=lambda x, axis: x.unsqueeze(axis), exp2=torch.exp2, log2=torch.log2, rsqrt=torch.rsqrt,
            minimum=lambda a, b: wide(torch.minimum(wide(a), wide(b))),
            maximum=lambda a, b: wide(torch.maximum(wide(a), wide(b))),
            where=lambda keep, a, b: wide(torch.where(wide(keep), wide(a), wide(b))),
            zeros=lambda shape, dtype, layout=None: wide(torch.zeros(shape, dtype=dtype)),
            full=lambda shape, value, dtype, layout=None: wide(torch.full(shape, value, dtype=dtype)),
            sum=lambda x, axis: x.sum(axis), max=lambda x, axis: x.amax(axis),
            reshape=torch.reshape, permute=torch.permute, broadcast=torch.broadcast_tensors,
            join=lambda a, b: torch.stack((a, b), -1), split=lambda pairs: pairs.unbind(-1),
            convert_layout=lambda x, layout, assert_trivial=False: x,
            load=lambda pointer, mask=None, other=0.0: pointer.read(mask, other),
            store=self.store,
            atomic_add=self.add, thread_barrier=self.barrier,
            allocate_shared_memory=lambda dtype, shape, layout: Shared(
                torch.full(shape, float("nan") if dtype.is_floating_point else UNWRITTEN, dtype=dtype)
            ),
        )  # fmt: skip
        copies = types.SimpleNamespace(
            async_copy_global_to_shared=self.copy, commit_group=self.commit, wait_group=self.wait_copies
        )
        return {
            "gl": gl, "async_copy": copies, "mma_v2": lambda a, b, acc: acc + a.float() @ b.float(),
            "gdc_wait": self.gdc_wait, "gdc_launch_dependents": nothing, "shared_room": self.shared_room, "put": self.put,
            "cluster_buffer": self.cluster_buffer, "open_mailbox": self.open_mailbox, "cluster_wait": self.cluster_wait,
            "place_in": lambda rank, at: at + (rank << 24), "send2": self.send, "send4": self.send,
            "wait_mailbox": self.wait_mailbox, "put_pairs": self.put_pairs, "pull": self.pull, "pull4": self.pull4,
            "unpaired": self.unpaired,
        }  # fmt: skip

    def run(self, arguments: dict[str, Any]) -> None:
        replaced = self.language()
        names: dict[str, Any] = {}
        for module in (triton_copy, triton_factors, triton_merge, triton_take, triton_decode):
            for name, thing in vars(module).items():
                if name.startswith("__") or name in replaced:
                    continue
                names[name] = thing.value if isinstance(thing, constexpr) else thing
        names |= replaced
        for name, thing in list(names.items()):
            function = getattr(thing, "fn", None)
            if name not in replaced and isinstance(function, types.FunctionType):
                names[name] = types.FunctionType(function.__code__, names, name, function.__defaults__)
        kernel = types.FunctionType(KERNEL.fn.__code__, names)
        for target, _ in self.late:
            target.fill_(float("nan"))
        kernel(**arguments)
        assert self.waited, "every program waits"


def landing(passed: dict[str, Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What earlier kernels of the step write: projections, and for layers that share keys those of the tokens."""
    late = [passed["qkv_ptr"]]
    if passed["STORED"]:
        slots = passed["kv_slots_ptr"]
        slots = slots[(slots >= 0) & (slots < passed["num_blocks"] * passed["BS"])]
        for cache in (passed["k_ptr"], passed["v_ptr"]):
            late += [cache[slot // passed["BS"], slot % passed["BS"]] for slot in slots.tolist()]
    return [(target, target.clone()) for target in late]


class Model:
    """Stands for the compiled kernel: ``Model(seed)[grid](...)``."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        def launch(*arguments: Any, num_warps: int, maxnreg: int | None, launch_pdl: bool, **constants: Any) -> None:
            names = KERNEL.arg_names
            passed = dict(zip(names, arguments, strict=False)) | constants
            assert launch_pdl and passed["EARLY"]
            late = landing(passed)
            for name, value in passed.items():
                if isinstance(value, torch.Tensor):
                    flat = torch.as_strided(value, (value.untyped_storage().nbytes() // value.element_size(),), (1,), 0)
                    passed[name] = Pointer(flat, value.storage_offset())
            size = constants["CLUSTER"]
            assert grid[0] % size == 0
            places = [(x, y, z) for x in range(0, grid[0], size) for y in range(grid[1]) for z in range(grid[2])]
            random.Random(self.seed).shuffle(places)
            for x, y, z in places:
                mail: list[tuple[torch.Tensor, torch.Tensor]] = []
                for rank in reversed(range(size)):  # the first, to whom all others send, is the last
                    Program((x + rank, y, z), num_warps, late, mail=mail).run(passed)

        return launch


@contextmanager
def modelled(seed: int = 0, processors: int = 132) -> Iterator[None]:
    """The op's implementation for Hopper on CPU tensors."""
    with (
        patch("headway.kernels.paged_attention.hopper.early_decode.runs_gluon", lambda device: True),
        patch("headway.kernels.paged_attention.hopper.early_decode.num_sms", lambda device: processors),
        patch(
            "headway.kernels.paged_attention.hopper.early_decode.launch_early",
            lambda device: {"EARLY": True, "launch_pdl": True},
        ),
        patch("headway.kernels.paged_attention.hopper.triton_decode.early_decode_kernel", Model(seed)),
    ):
        yield
