"""Compiles ``peer_reduce_`` for GPUs that need not be there; run by ``test_peer_reduce``. Prints JSON for each kind and card.

A process of its own: the tests' has Triton's interpreter switched on.
"""

from __future__ import annotations

import json
import re
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from headway.core.ints import next_power_of_2
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


def compile_kind(name: str, card: int) -> None:
    """Compile with the types that the launcher passes; pointers, ``start`` and ``units`` are multiples of 16."""
    dtype, elements, size, two, norm = KINDS[name]
    own, block = part(elements, size), next_power_of_2(elements)
    constants = {
        "RANK": 1, "SIZE": size, "COLS": elements, "STRIDE": stride(elements), "PART": own, "BLOCK": block,
        "PART_BLOCK": next_power_of_2(own), "TWO": two, "NORM": norm, "FACTOR": 1.0, "EARLY": card >= 90,
    }  # fmt: skip
    names = peer_reduce_kernel.arg_names
    signature = {each: "constexpr" if each in constants else TYPES.get(each, dtype) for each in names}
    constexprs = {(names.index(each),): value for each, value in constants.items()}
    even = [each for each in names if each.endswith("_ptr") or each in ("start", "units", "numel")]
    attributes = {(names.index(each),): [["tt.divisibility", 16]] for each in even}
    source = ASTSource(peer_reduce_kernel, signature, constexprs, attributes)
    options = {"num_warps": min(16, max(4, block // 256)), "launch_pdl": card >= 90}
    ptx = triton.compile(source, target=GPUTarget("cuda", card, 32), options=options).asm["ptx"]
    loads = re.findall(r"ld\.volatile\.global\.([\w.]+)", ptx)
    stores = re.findall(r"st\.global\.([\w.]+)", ptx)
    print(json.dumps({"kernel": name, "capability": card, "volatile": loads, "stores": stores}))
    if len(sys.argv) > 1 and sys.argv[-1] == "-v":
        print(ptx)


if __name__ == "__main__":
    for each in sys.argv[1:]:
        if each.isdigit():
            for kind in KINDS:
                compile_kind(kind, int(each))
