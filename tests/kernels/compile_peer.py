"""Compiles ``peer_reduce_`` for GPUs that need not be there; run by ``test_peer_reduce``. A line of JSON for each card."""

from __future__ import annotations

import json
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from headway.kernels.peer_reduce.triton import peer_reduce_kernel

TYPES = {
    "x_ptr": "*bf16", "epochs_ptr": "*i32", "buffers_ptr": "*i64", "pads_ptr": "*i64", "numel": "i32", "room": "i32",
    "num_pads": "i32",
}  # fmt: skip
CONSTANTS = {"RANK": 1, "SIZE": 4, "BLOCK": 1024}

if __name__ == "__main__":
    for card in sys.argv[1:]:
        names = peer_reduce_kernel.arg_names
        signature = {name: "constexpr" if name in CONSTANTS else TYPES[name] for name in names}
        constexprs = {(names.index(name),): value for name, value in CONSTANTS.items()}
        source = ASTSource(peer_reduce_kernel, signature, constexprs)
        built = triton.compile(source, target=GPUTarget("cuda", int(card), 32), options={"num_warps": 4})
        print(json.dumps({"kernel": "peer_reduce", "capability": card, "shared": built.metadata.shared}))
