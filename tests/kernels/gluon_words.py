"""Runs the Gluon kernels of ``expert_mlp`` on CPU tensors: this replaces the language under the kernels' own code.

No interpreter runs Gluon. Layouts mean nothing here: that a thread's factors meet is for the compiler's check of conversions
and for the card. What is judged is which elements are read, written and multiplied: an access outside its tensor that no mask
covers raises, and so does one before the wait.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from typing import Any
from unittest.mock import patch

import torch

from headway.kernels.expert_mlp import reference
from headway.kernels.expert_mlp.hopper import launch, triton_few, triton_shared, triton_words
from headway.kernels.expert_mlp.packing import codes_of
from tests.kernels import gluon_pointer
from tests.kernels.gluon_model import Buffer, Cluster, Program, RaceError

SHIFTED = 2.0**-126
"""What a factor is as it comes out of a word, before its scale: a subnormal number's worth."""


class Pointer(gluon_pointer.Pointer):
    """As kernels of this kind use it."""

    def to(self, kind: torch.dtype, bitcast: bool = False) -> Pointer:
        assert bitcast and isinstance(self.at, int) and self.at == 0
        return Pointer(self.flat.view(kind))


class Value(torch.Tensor):
    """A tensor with the conversions of the language."""

    def to(self, dtype: Any, bitcast: bool = False) -> Any:  # type: ignore[override]
        return self.view(dtype) if bitcast else super().to(dtype)

    @property
    def type(self) -> Any:
        return types.SimpleNamespace(layout=None)


def value(x: Any) -> Value:
    return torch.as_tensor(x).as_subclass(Value)


class Room:
    """Buffers in shared memory, by number."""

    def __init__(self, buffers: list[Words]) -> None:
        self.buffers = buffers

    def index(self, number: Any) -> Words:
        return self.buffers[int(number)]


class Words(Buffer):
    """A buffer that is read by loads, too: what one warp has read others may not have, until all have met."""

    def load(self, layout: Any) -> Value:
        if self.state not in ("visible", "fenced"):
            raise RaceError(f"a load of a buffer that is {self.state}")
        self.state = "read"
        return value(self.data.clone())


class Copies(Program):
    """The asynchronous part of a program, see ``gluon_model``; first factors are in registers."""

    def __init__(self, language: Language) -> None:
        super().__init__((), Cluster(1), 0)
        self.speaks = language

    def read(self, pointer: Any, mask: Any) -> torch.Tensor:
        return self.speaks.load(pointer, mask).as_subclass(torch.Tensor)

    def allocate_all(self, dtype: torch.dtype, shape: list[int], layout: object) -> Room:
        made = [Words(torch.full(shape[1:], -1, dtype=dtype)) for _ in range(shape[0])]
        self.buffers += made
        return Room(made)

    def copy(self, target: Buffer, source: Any, mask: Any = None) -> None:
        if target.state != "free":
            raise RaceError(f"a copy into a buffer that is {target.state}")
        target.state = "copying"
        target.data.fill_(-1 if target.data.dtype == torch.int16 else float("nan"))
        self.open.append((target, self.read(source, mask)))

    def multiply(self, a: Any, b: Buffer, acc: Any, is_async: bool) -> Any:
        own = Buffer(a, "fenced")
        return super().multiply(own, b, acc, is_async)

    def names(self) -> dict[str, Any]:
        """What the kernels import of it."""
        copies = types.SimpleNamespace(
            async_copy_global_to_shared=self.copy, commit_group=self.commit, wait_group=self.wait_copies
        )
        return {
            "async_copy": copies, "fence_async_shared": self.fence, "warpgroup_mma": self.multiply,
            "warpgroup_mma_wait": self.wait_products, "product_layout": Language.layout, "copy_layout": Language.layout,
            "words_layout": Language.layout, "STEP": 128,
        }  # fmt: skip


class Language:
    """``gl``, of one program."""

    int16, int32, int64, uint16, float32, bfloat16 = (
        torch.int16, torch.int32, torch.int64, torch.uint16, torch.float32, torch.bfloat16,
    )  # fmt: skip
    static_range = staticmethod(range)
    where = staticmethod(torch.where)
    exp2 = staticmethod(torch.exp2)

    def __init__(self, program: tuple[int, ...]) -> None:
        self.program = program
        self.waited = False
        self.copies = Copies(self)
        self.allocate_shared_memory = self.copies.allocate_all
        self.thread_barrier = self.copies.barrier

    def wait(self) -> None:
        self.waited = True

    def program_id(self, axis: int) -> Value:
        return value(self.program[axis])

    @staticmethod
    def pointer_type(kind: torch.dtype) -> torch.dtype:
        return kind

    @staticmethod
    def layout(*sizes: Any, **others: Any) -> None:
        return None

    SliceLayout = DotOperandLayout = BlockedLayout = NVMMASharedLayout = layout

    @staticmethod
    def num_warps() -> int:
        return 4

    @staticmethod
    def minimum(x: Any, y: int) -> Any:
        return x.clamp(max=y)

    @staticmethod
    def join(x: Any, y: Any) -> Any:
        return torch.stack((x, y), dim=-1)

    @staticmethod
    def split(x: Any) -> Any:
        return x.unbind(-1)

    @staticmethod
    def permute(x: Any, order: list[int]) -> Any:
        return x.permute(order)

    @staticmethod
    def arange(first: int, end: int, layout: Any) -> Value:
        return value(torch.arange(first, end, dtype=torch.int32))

    @staticmethod
    def expand_dims(x: Any, axis: int) -> Any:
        return x.unsqueeze(axis)

    @staticmethod
    def zeros(shape: list[int], dtype: torch.dtype, layout: Any) -> Value:
        return value(torch.zeros(shape, dtype=dtype))

    @staticmethod
    def broadcast(x: Any, y: Any) -> Any:
        return torch.broadcast_tensors(x, y)

    @staticmethod
    def reshape(x: Any, shape: Any) -> Any:
        return x.reshape(tuple(shape))

    @staticmethod
    def convert_layout(x: Any, layout: Any, assert_trivial: bool = False) -> Any:
        return x

    @staticmethod
    def sum(x: Any, axis: int) -> Any:
        return x.sum(axis, dtype=x.dtype)

    @staticmethod
    def associative_scan(x: Any, axis: int, add: Any) -> Any:
        return x.cumsum(axis, dtype=x.dtype)

    def load(self, pointer: Pointer, mask: Any = None, other: float = 0) -> Value:
        assert self.waited, "read before the wait"
        at = torch.as_tensor(pointer.at)
        keep = torch.ones((), dtype=torch.bool) if mask is None else torch.as_tensor(mask)
        at, keep = torch.broadcast_tensors(at.long(), keep)
        outside = keep & ((at < 0) | (at >= len(pointer.flat)))
        assert not outside.any(), "read outside"
        found = pointer.flat[torch.where(keep, at, 0)]
        return value(torch.where(keep, found, torch.full((), other, dtype=found.dtype)))

    def store(self, pointer: Pointer, x: Any, mask: Any = True) -> None:
        assert self.waited, "written before the wait"
        at, x, keep = torch.broadcast_tensors(torch.as_tensor(pointer.at).long(), x, torch.as_tensor(mask))
        assert not (keep & ((at < 0) | (at >= len(pointer.flat)))).any(), "written outside"
        pointer.flat[at[keep]] = x[keep].as_subclass(torch.Tensor)


def four(words: Any, low: Any, high: Any) -> tuple[Any, ...]:
    """What the assembly does: factors by the definition of words, times the scales, each rounded to 16 bits."""
    whole = words.as_subclass(torch.Tensor).contiguous()
    halves = whole.unsqueeze(-1).view(torch.uint8).unflatten(-2, (-1, 16)).flatten(-2)  # [..., groups, 32]
    table = torch.tensor([*reference.E2M1, *(-each for each in reference.E2M1)], dtype=torch.float64)
    values = table[codes_of(halves).long()].unflatten(-1, (4, 16)) * SHIFTED  # [..., groups, 4, 16]
    found = []
    for nth in range(4):
        scale = (low if nth < 2 else high).as_subclass(torch.Tensor).contiguous().view(torch.bfloat16).double()
        found.append(value((values[..., nth, :].flatten(-2) * scale).to(torch.bfloat16)))
    return tuple(found)


def mma(a: Any, b: Any, acc: Any) -> Any:
    return acc + (a.double() @ b.double()).float()


def activated(gate: Any, up: Any, limit: float, alpha: float, act: str, gated: bool) -> Any:
    joined = torch.stack((gate, up), dim=0).flatten(1).T if gated else gate.flatten()[:, None]
    shape = gate.shape
    return value(reference.activate(joined.as_subclass(torch.Tensor), act, gated, limit, alpha)[:, 0].reshape(shape))


class Kernel:
    """Stands for a kernel: runs its programs one after the other."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*arguments: Any, num_warps: int, **constants: Any) -> None:
            flat = [Pointer(each.flatten()) if isinstance(each, torch.Tensor) else each for each in arguments]
            for given, pointer in zip(arguments, flat, strict=True):
                assert not isinstance(given, torch.Tensor) or pointer.flat.data_ptr() == given.data_ptr()
            for program in product(*map(range, grid)):
                with modelled(Language(program)):
                    self.kernel.fn(*flat, **{**constants, "EARLY": True})

        return run


@contextmanager
def modelled(language: Language) -> Iterator[None]:
    """The kernels' modules speak ``language``."""
    common = {
        "gl": language, "mma_v2": mma, "four": four, "activated": activated, "gdc_wait": language.wait,
        "gdc_launch_dependents": lambda: None, "sums_layout": language.layout, "split_layout": language.layout,
        "WORDS": 32, "SHIFT": 94, "REST": 2.0**32, **language.copies.names(),
    }  # fmt: skip
    with ExitStack() as stack:
        for module in (triton_words, triton_few, triton_shared):
            names = vars(module)
            plain = {
                name: each.fn for name, each in names.items() if hasattr(each, "fn") and not name.endswith("kernel")
            }
            given = {name: each for name, each in (plain | common).items() if name in names}
            stack.enter_context(patch.dict(names, given))
        yield


@contextmanager
def on_the_cpu() -> Iterator[None]:
    """``expert_mlp``'s launches in Gluon run here."""
    kernels = "few_in_words_kernel", "few_out_words_kernel", "grouped_shared_kernel"
    with ExitStack() as stack:
        for name in kernels:
            stack.enter_context(patch.object(launch, name, Kernel(vars(launch)[name])))
        stack.enter_context(patch("headway.kernels.expert_mlp.triton.runs_gluon", lambda device: True))
        yield
