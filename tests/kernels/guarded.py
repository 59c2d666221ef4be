"""Runs an operation on copies of its arguments that lie between guard elements, as reference (CPU) and as kernel.

A write outside an argument, or to an argument that the schema does not mark as written, fails here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from headway.kernels.registry import Op
from headway.kernels.testing import interpreter_loops

GUARD = 64
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _guarded_copy(tensor: torch.Tensor, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(buffer, copy of ``tensor`` in its middle)."""
    buffer = torch.full((tensor.numel() + 2 * GUARD,), 77, dtype=tensor.dtype, device=device)
    middle = buffer[GUARD : GUARD + tensor.numel()].view(tensor.shape)
    middle.copy_(tensor)
    return buffer, middle


def run(op: Op, function: Callable[..., Any], args: Sequence[Any], device: str) -> tuple[list[Any], Any]:
    """Call ``function`` on guarded copies; returns (the arguments afterwards, the result), tensors on the CPU."""
    buffers, given = {}, list(args)
    for i, arg in enumerate(args):
        if isinstance(arg, torch.Tensor):
            buffers[i], given[i] = _guarded_copy(arg, device)
    with interpreter_loops():
        result = function(*given)
    schema = getattr(torch.ops.headway, op.name).default._schema
    for i, buffer in buffers.items():
        assert (buffer[:GUARD] == 77).all() and (buffer[-GUARD:] == 77).all(), f"{op.name} wrote outside argument {i}"
        alias = schema.arguments[i].alias_info
        if alias is None or not alias.is_write:
            assert same(given[i].cpu(), args[i].cpu()), f"{op.name} changed argument {schema.arguments[i].name}"
    after = [value.cpu() if isinstance(value, torch.Tensor) else value for value in given]
    if isinstance(result, torch.Tensor):
        return after, result.cpu()
    return after, result if result is None else tuple(part.cpu() for part in result)


def run_both(op: Op, args: Sequence[Any]) -> list[tuple[list[Any], Any]]:
    """[reference on the CPU, kernel on the GPU or in the interpreter]."""
    return [run(op, op.reference, args, "cpu"), run(op, op.implementation("cuda"), args, DEVICE)]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal element for element, NaN equal to NaN."""
    return torch.equal(torch.nan_to_num(a, nan=12345.0), torch.nan_to_num(b, nan=12345.0)) and torch.equal(
        a != a, b != b
    )


def expect(op: Op, args: Sequence[Any], expected: dict[int, torch.Tensor]) -> None:
    """Both implementations leave ``expected`` (argument index -> value), exactly."""
    for name, (after, _) in zip(("reference", "kernel"), run_both(op, args), strict=True):
        for i, value in expected.items():
            assert same(after[i], value), _difference(f"{op.name} {name} argument {i}", after[i], value)


def _difference(what: str, actual: torch.Tensor, expected: torch.Tensor) -> str:
    places = (actual != expected).nonzero()[:5]
    return f"{what}: " + "; ".join(f"{p.tolist()} is {actual[tuple(p)]}, not {expected[tuple(p)]}" for p in places)


def ints(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def floats(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)
