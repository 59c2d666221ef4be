"""Runs the Gluon kernels of ``expert_mlp.hopper.triton_many`` on CPU tensors, by the model of ``wide_model``.

Beside that model's copies there are those by row, which several threads start: they land when their barrier is waited for, and
who multiplies what they brought must have fenced them off.
"""

from __future__ import annotations

import threading
import types
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from headway.kernels.expert_mlp import reference
from headway.kernels.expert_mlp.hopper import launch, triton_many
from tests.kernels import wide_model
from tests.kernels.gluon_pointer import Pointer
from tests.kernels.wide_model import Barrier, Later, Shared

THREADS = 32 * triton_many.COPIERS.value
"""Of the warps that copy rows: each arrives for itself."""


class UnfencedError(AssertionError):
    """A product reads what ordinary writes brought, and nothing came between."""


class Program(wide_model.Program):
    """One program, with copies by row."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.started: dict[int, list[tuple[Shared, torch.Tensor]]] = defaultdict(list)
        self.unfenced: dict[int, set[int]] = defaultdict(set)  # thread -> barriers whose rows it has waited for
        self.brought: dict[int, int] = {}  # address of a buffer -> barrier that its rows came by

    def copy_rows(self, target: Shared, source: Pointer) -> None:
        values = self.load(source)
        assert values.shape == target.shape
        target.data.fill_(float("nan"))
        self.started[threading.get_ident()].append((target, values))

    def arrive_copied(self, barrier: Barrier, increment_count: bool) -> None:
        assert not increment_count
        with self.changed:
            for target, values in self.started.pop(threading.get_ident(), []):
                barrier.copies.append((target, values))
                self.brought[target.data.data_ptr()] = id(barrier)
            for _ in range(THREADS):
                barrier._arrive()

    def wait(self, barrier: Barrier, parity: Any) -> None:
        barrier.wait(int(parity))
        self.unfenced[threading.get_ident()].add(id(barrier))

    def fence(self) -> None:
        self.unfenced[threading.get_ident()].clear()

    def multiply(self, a: Shared, b: Shared, acc: Any, use_acc: bool, is_async: bool) -> Later:
        for first, barrier in self.brought.items():
            inside = first <= a.data.data_ptr() < first + a.data.element_size() * 128 * 64
            if inside and barrier in self.unfenced[threading.get_ident()]:
                raise UnfencedError("rows are multiplied that no fence came after")
        return super().multiply(a, b, acc, use_acc, is_async)

    def language(self) -> dict[str, Any]:
        names = super().language()
        names["async_copy"] = types.SimpleNamespace(
            async_copy_global_to_shared=self.copy_rows, mbarrier_arrive=self.arrive_copied
        )
        names["mbarrier"].wait = self.wait
        names |= {"fence_async_shared": self.fence, "activated": activated, "COPIERS": triton_many.COPIERS.value}
        for name, each in vars(triton_many).items():
            if getattr(each, "__module__", "") == triton_many.__name__ and hasattr(each, "fn"):
                names[name] = types.FunctionType(each.fn.__code__, names)
        return names


def activated(gate: Any, up: Any, limit: float, alpha: float, act: str, gated: bool) -> torch.Tensor:
    both = torch.cat((gate, up), dim=1) if gated else gate
    return reference.activate(both, act, gated, limit, alpha)


class Kernel(wide_model.ModelKernel):
    """Stands for one of the kernels."""

    program = Program

    def __getitem__(self, grid: tuple[int]) -> Any:
        run = super().__getitem__(grid)
        return lambda *arguments, **names: run(*arguments, **{**names, "EARLY": False})


@contextmanager
def on_the_cpu(programs: int = 3) -> Iterator[None]:
    """The kernels run here, in at most so many programs, and for any number of pairs."""
    with (
        patch.object(launch, "many_in_kernel", Kernel(triton_many.many_in_kernel, programs)),
        patch.object(launch, "many_out_kernel", Kernel(triton_many.many_out_kernel, programs)),
        patch.object(launch, "num_sms", lambda device: programs),
        patch("headway.kernels.expert_mlp.triton.runs_gluon", lambda device: True),
        patch("headway.kernels.expert_mlp.tiles.MANY_PAIRS", 0),
    ):
        yield
