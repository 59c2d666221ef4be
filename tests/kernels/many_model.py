"""Runs the Gluon kernel of ``expert_mlp.hopper.triton_many`` on CPU tensors, by the model of ``wide_model``."""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from headway.kernels.expert_mlp.hopper import launch, triton_many
from tests.kernels import wide_model


class Program(wide_model.Program):
    """One program, whose functions are those of this module."""

    def language(self) -> dict[str, Any]:
        names = super().language()
        for name, each in vars(triton_many).items():
            if getattr(each, "__module__", "") == triton_many.__name__ and hasattr(each, "fn"):
                names[name] = types.FunctionType(each.fn.__code__, names)
        return names


class Kernel(wide_model.ModelKernel):
    """Stands for the kernel."""

    program = Program

    def __getitem__(self, grid: tuple[int]) -> Any:
        run = super().__getitem__(grid)
        return lambda *arguments, **names: run(*arguments, **{**names, "EARLY": False})


@contextmanager
def on_the_cpu(programs: int = 3) -> Iterator[None]:
    """The kernel runs here, in at most so many programs."""
    with (
        patch.object(launch, "many_out_kernel", Kernel(triton_many.many_out_kernel, programs)),
        patch.object(launch, "num_sms", lambda device: programs),
        patch("headway.kernels.expert_mlp.triton.runs_gluon", lambda device: True),
    ):
        yield
