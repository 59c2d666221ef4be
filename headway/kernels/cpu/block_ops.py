"""Native implementations of the operations on weights in GGUF blocks; shapes and meaning in ``kernels.quant_linear``."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from headway.kernels.cpu.ops import available, is_native, native
from headway.kernels.quant_linear.formats import aligned, packed_bytes
from headway.kernels.registry import OPS

__all__ = ["available", "pack_rows", "packed_bytes", "quant_linear", "quant_rows"]

SETS = ("portable C", "AVX2", "AVX-VNNI", "AVX-512 VNNI", "NEON dot products")
"""How the library multiplies integers, by the numbers of blocks.c."""


def instruction_set() -> str:
    """What multiplies integers here. Call only when ``available()``."""
    return SETS[native().headway_blocks_set()]


def pack_rows(kind: int, rows: torch.Tensor, inputs: int, packed: torch.Tensor) -> None:
    """Rows of a weight as the file has them, uint8 [N, bytes], into uint8 [packed_bytes(kind, N, inputs)]."""
    rows = rows.contiguous()
    native().headway_blocks_pack(
        rows.data_ptr(), packed.data_ptr(), rows.shape[0], inputs, kind, torch.get_num_threads()
    )


class Plan(NamedTuple):
    """What a call needs to know of a packed weight.

    Attributes:
        parts: (type, outputs) of each of the num_parts parts, as C takes them.
        inputs, outputs: K, N.
        num_bytes: of all panels.
    """

    parts: Any
    num_parts: int
    inputs: int
    outputs: int
    num_bytes: int


@functools.lru_cache(maxsize=4096)
def plan(types: tuple[int, ...], outputs: tuple[int, ...], inputs: int) -> Plan:
    """Raises ValueError for types that are not known or inputs that are no whole blocks."""
    flat = [number for part in zip(types, outputs, strict=True) for number in part]
    sizes = [aligned(packed_bytes(kind, rows, inputs)) for kind, rows in zip(types, outputs, strict=True)]
    return Plan((ctypes.c_int64 * len(flat))(*flat), len(types), inputs, sum(outputs), sum(sizes))


def quant_linear(
    x: torch.Tensor,
    packed: torch.Tensor,
    bias: torch.Tensor | None,
    types: Sequence[int],
    outputs: Sequence[int],
    exact: bool = False,
) -> torch.Tensor:
    planned = plan(tuple(types), tuple(outputs), x.shape[-1])
    if packed.numel() < planned.num_bytes:
        raise ValueError(f"the panels of types {list(types)} take {planned.num_bytes} bytes, not {packed.numel()}")
    x = x.contiguous()
    known = is_native(x) and packed.is_contiguous() and (bias is None or is_native(x, bias))
    if not known or (exact and x.dtype is not torch.float32):
        reference: torch.Tensor = OPS["quant_linear"].reference(x, packed, bias, types, outputs, exact)
        return reference
    return multiply(x, packed, bias, planned, exact)


def multiply(
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, planned: Plan, exact: bool
) -> torch.Tensor:
    """``quant_linear`` of tensors that were checked: x and bias of one dtype, float32 or, unless ``exact``, bfloat16, all
    contiguous."""
    y = x.new_empty((*x.shape[:-1], planned.outputs))
    failed = native().headway_blocks_linear(
        x.data_ptr(), packed.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr(), planned.parts,
        planned.num_parts, x.numel() // planned.inputs, planned.inputs, x.dtype is torch.bfloat16, exact,
        torch.get_num_threads(),
    )  # fmt: skip
    if failed:
        raise MemoryError("quant_linear: no memory for the rounded rows")
    return y


def quant_rows(
    ids: torch.Tensor, packed: torch.Tensor, kind: int, outputs: int, inputs: int, dtype: torch.dtype
) -> torch.Tensor:
    y = torch.empty((ids.numel(), inputs), dtype=dtype)
    if ids.dtype is not torch.int32 or not is_native(y) or not (ids.is_contiguous() and packed.is_contiguous()):
        reference: torch.Tensor = OPS["quant_rows"].reference(ids, packed, kind, outputs, inputs, dtype)
        return reference
    if packed.numel() < packed_bytes(kind, outputs, inputs):
        raise ValueError(f"quant_rows: {packed.numel()} bytes are no table of {outputs} rows")
    native().headway_blocks_rows(
        packed.data_ptr(), ids.data_ptr(), y.data_ptr(), ids.numel(), outputs, inputs, kind,
        dtype is torch.bfloat16, torch.get_num_threads(),
    )  # fmt: skip
    return y
