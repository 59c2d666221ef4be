"""Compiles ``peer_reduce_``, or with the word "exchange" ``peer_gather_`` and ``peer_scatter_sum_``, for GPUs that need not be
there; run by ``test_peer_reduce`` and ``test_peer_exchange``. Prints JSON for each kind and card.

A process of its own: the tests' has Triton's interpreter switched on.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping

import triton
from triton import JITFunction
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from headway.core.ints import next_power_of_2
from headway.kernels.peer_exchange.triton import peer_exchange_kernel
from headway.kernels.peer_reduce.reference import CHUNK, part, stride
from headway.kernels.peer_reduce.triton import peer_reduce_kernel

TYPES = {
    "parity_ptr": "*i32", "buffers_ptr": "*i64",
    "start": "i32", "units": "i32", "numel": "i32", "num_units": "i32", "eps": "fp32",
}  # fmt: skip
KINDS = {
    "sum": ("*bf16", CHUNK, 2, False, False),
    "sum-wide": ("*fp32", CHUNK, 2, False, False),
    "sum-two": ("*bf16", CHUNK, 4, True, False),
    "norm": ("*bf16", 4096, 2, False, True),
    "norm-odd": ("*bf16", 2880, 2, False, True),
    "norm-two": ("*bf16", 4096, 8, True, True),
}
"""Name -> dtype, elements of a unit, ranks, whether two_shot, whether with the norm."""


EXCHANGES = {
    "gather": ("*bf16", 2, False),
    "gather-whole": ("*i32", 2, False),
    "scatter": ("*bf16", 2, True),
    "scatter-wide": ("*fp32", 4, True),
}
"""Name -> dtype, ranks, whether it is scattered."""


def compile_exchange(name: str, card: int) -> None:
    """As ``compile_kind``."""
    dtype, size, scatter = EXCHANGES[name]
    constants = {
        "RANK": 1, "SIZE": size, "BLOCK": CHUNK, "STRIDE": stride(CHUNK), "SCATTER": scatter, "EARLY": card >= 90
    }  # fmt: skip
    build(peer_exchange_kernel, name, dtype, constants, card, 8)


def compile_kind(name: str, card: int) -> None:
    """Compile with the types that the launcher passes; pointers, ``start`` and ``units`` are multiples of 16."""
    dtype, elements, size, two, norm = KINDS[name]
    own, block = part(elements, size), next_power_of_2(elements)
    constants = {
        "RANK": 1, "SIZE": size, "COLS": elements, "STRIDE": stride(elements), "PART": own, "BLOCK": block,
        "PART_BLOCK": next_power_of_2(own), "TWO": two, "NORM": norm, "FACTOR": 1.0, "EARLY": card >= 90,
    }  # fmt: skip
    build(peer_reduce_kernel, name, dtype, constants, card, min(16, max(4, block // 256)))


def build(
    kernel: JITFunction, name: str, dtype: str, constants: Mapping[str, object], card: int, num_warps: int
) -> None:
    """Compile it and say how it moves its bytes."""
    names = kernel.arg_names
    signature = {each: "constexpr" if each in constants else TYPES.get(each, dtype) for each in names}
    constexprs = {(names.index(each),): value for each, value in constants.items()}
    even = [each for each in names if each.endswith("_ptr") or each in ("start", "units", "numel")]
    attributes = {(names.index(each),): [["tt.divisibility", 16]] for each in even}
    source = ASTSource(kernel, signature, constexprs, attributes)
    options = {"num_warps": num_warps, "launch_pdl": card >= 90}
    ptx = triton.compile(source, target=GPUTarget("cuda", card, 32), options=options).asm["ptx"]
    loads = re.findall(r"ld\.volatile\.global\.([\w.]+)", ptx)
    stores = re.findall(r"st\.global\.([\w.]+)", ptx)
    print(json.dumps({"kernel": name, "capability": card, "volatile": loads, "stores": stores}))
    if sys.argv[-1] == "-v":
        print(ptx)


if __name__ == "__main__":
    exchanges = "exchange" in sys.argv
    for each in sys.argv[1:]:
        if each.isdigit():
            for kind in EXCHANGES if exchanges else KINDS:
                (compile_exchange if exchanges else compile_kind)(kind, int(each))
