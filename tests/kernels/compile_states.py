"""Compiles the kernels of states for GPUs that need not be there; run by ``test_states_compile``.

    python -m tests.kernels.compile_states 80 90 120

Sizes are those of Mamba2-780M, Mamba-1 and Qwen3-Next. Prints a line of JSON each: kernel, capability, shared memory.
A process of its own: the tests' has Triton's interpreter switched on.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from headway.core.chunks import CHUNK, CHUNKS_AT
from headway.kernels.causal_conv.triton import causal_conv_kernel
from headway.kernels.delta_decode.triton import delta_decode_kernel
from headway.kernels.gated_delta.long_rows import (
    BLOCK,
    STAGES,
    VALUES,
    WARPS,
    delta_across_kernel,
    delta_blocks_kernel,
    delta_within_kernel,
)
from headway.kernels.gated_delta.triton import TOKENS, delta_chunks_kernel, delta_walk_kernel
from headway.kernels.gated_rms_norm.triton import gated_rms_norm_kernel
from headway.kernels.replay_rows.triton import replay_rows_kernel
from headway.kernels.selective_scan.triton import selective_scan_kernel
from headway.kernels.ssd_decode.triton import ssd_decode_kernel
from headway.kernels.ssd_scan.triton import ssd_scan_kernel, ssd_update_kernel, ssd_walk_kernel
from tests.kernels.cards import EARLY

INTS = (
    "query_start_ptr",
    "row_slots_ptr",
    "seq_lens_ptr",
    "packed_ptr",
    "stored_at_ptr",
    "store_at_ptr",
    "storage_ptr",
)
WIDE = ("a_log_ptr", "dt_bias_ptr", "d_ptr", "state_ptr")
ALIGNED = ("_ptr", "_stride", "_head", "_group", "channels")
"""Ends of the names of arguments that are multiples of 16 in these models, which launches tell the compiler."""
FLOATS = ("dt_min", "dt_max", "eps", "beta_scale", "scale")

CONV = {
    "LENGTH": 4,
    "TAPS": 4,
    "SILU": True,
    "TABLE_AT": CHUNKS_AT,
    "CHUNK_TOKENS": CHUNK,
    "BLOCK_M": 4,
    "WIDTH": 0,
    "CHUNKED": False,
}
SSD = {"P": 64, "N": 128, "BLOCK_N": 128}
UPDATE = SSD | {"BLOCK_P": 32, "WIDTH": 1}
SSD_TOKEN = SSD | {"BLOCK_P": 32, "SPREAD": 2, "LENGTH": 4, "TAPS": 4, "ONE": True, "WIDTH": 1}
SSD_DRAFTS = SSD_TOKEN | {"BLOCK_P": 64, "LENGTH": 7, "ONE": False, "WIDTH": 4}
SELECTIVE = {"N": 16, "BLOCK_N": 16, "BLOCK_D": 64, "WIDTH": 4}
DELTA = {"K": 128, "V": 128, "SMALL": 1e-6, "BLOCK_K": 128}
WALK = DELTA | {"WIDTH": 0, "BLOCK_V": 64, "L": TOKENS}
CHUNKS = {"BLOCK_V": 64, "L": TOKENS, "LEVELS": 4}
FACTORS = ("blocks_ptr", "factors_ptr")
TABLE = {"L": CHUNK, "B": BLOCK, "TABLE_AT": CHUNKS_AT}
WITHIN = TABLE | {"K": 128, "V": 128, "SMALL": 1e-6, "BLOCK_K": 128, "BLOCK_V": 128, "PRECISION": "tf32"}
ACROSS = {"K": 128, "V": 128, "BLOCK_K": 128, "BLOCK_V": VALUES, "L": CHUNK, "STAGES": STAGES}
NORM = {"SIZE": 128, "PAIRS": 16, "BLOCK": 128, "GATE_FIRST": False, "SIGMOID": False}
TOKEN = DELTA | {"BLOCK_V": 128, "LENGTH": 4, "TAPS": 4, "ONE": True, "WIDTH": 1, "AHEAD": False}
TOKENS_OF_ROW = TOKEN | {"LENGTH": 7, "ONE": False, "WIDTH": 4}
HEAD, CHANNEL = {"BY_CHANNEL": False, "SIGMOID": False}, {"BY_CHANNEL": True, "SIGMOID": True, "share": 1}
RING = ("inputs_ptr",)
NO_RING: dict[str, Any] = {"inputs_ptr": None, "stored_at_ptr": None, "store_at_ptr": None}
KERNELS: list[tuple[str, Any, Mapping[str, Any], tuple[str, ...], int]] = [
    ("conv decode", causal_conv_kernel, CONV | {"BLOCK_T": 1, "BLOCK_C": 256, "WIDTH": 1}, (), 4),
    ("conv mixed", causal_conv_kernel, CONV | {"BLOCK_T": 16, "BLOCK_C": 128, "CHUNKED": True}, (), 4),
    ("conv drafts", causal_conv_kernel, CONV | {"BLOCK_T": 4, "BLOCK_C": 256, "LENGTH": 7, "BLOCK_M": 8, "WIDTH": 4}, (), 4),
    ("selective", selective_scan_kernel, NO_RING | SELECTIVE | {"WIDTH": 1}, ("a_ptr",), 2),
    ("selective ring", selective_scan_kernel, SELECTIVE, ("a_ptr",), 2),
    ("ssd walk", ssd_walk_kernel, SSD | {"BLOCK_P": 64, "WIDTH": 4, "L": 16, "SEVERAL": False}, ("a_ptr",), 4),
    ("ssd walk, long", ssd_walk_kernel, SSD | {"BLOCK_P": 64, "WIDTH": 0, "L": 32, "SEVERAL": True}, ("a_ptr",), 4),
    ("replay rows", replay_rows_kernel, {}, (), 1),
    ("ssd update", ssd_update_kernel, UPDATE, ("a_ptr",), 4),
    ("ssd decode", ssd_decode_kernel, SSD_TOKEN | NO_RING, ("a_ptr",), 2),
    ("ssd decode and ring", ssd_decode_kernel, SSD_TOKEN | {"BLOCK_P": 64}, ("a_ptr",), 4),
    ("ssd drafts", ssd_decode_kernel, SSD_DRAFTS, ("a_ptr",), 4),
    ("ssd drafts of few heads", ssd_decode_kernel, SSD_DRAFTS | {"BLOCK_P": 32, "SPREAD": 4}, ("a_ptr",), 4),
    ("ssd scan", ssd_scan_kernel, SSD | {"BLOCK_P": 64, "TOKENS": 32}, ("a_ptr",), 4),
    ("ssd scan wide", ssd_scan_kernel, SSD | {"N": 256, "BLOCK_N": 256, "BLOCK_P": 32, "TOKENS": 32}, ("a_ptr",), 4),
    ("delta walk", delta_walk_kernel, WALK | NO_RING | {"BY_CHANNEL": False, "WIDTH": 4}, (), 4),
    ("delta walk by channel", delta_walk_kernel, WALK | NO_RING | {"BY_CHANNEL": True}, (), 4),
    ("delta ring", delta_walk_kernel, WALK | {"BY_CHANNEL": False, "WIDTH": 4}, RING, 4),
    ("delta ring by channel", delta_walk_kernel, WALK | {"BY_CHANNEL": True}, RING, 4),
    ("delta token", delta_decode_kernel, TOKEN | NO_RING | HEAD, (), 4),
    ("delta token ahead", delta_decode_kernel, TOKEN | NO_RING | HEAD | {"AHEAD": True}, (), 4),
    ("delta token by channel", delta_decode_kernel, TOKEN | NO_RING | CHANNEL, (), 4),
    ("delta token and ring", delta_decode_kernel, TOKEN | HEAD, RING, 4),
    ("delta drafts", delta_decode_kernel, TOKENS_OF_ROW | HEAD, RING, 4),
    ("delta drafts by channel", delta_decode_kernel, TOKENS_OF_ROW | CHANNEL, RING, 4),
    ("delta chunks", delta_chunks_kernel, DELTA | CHUNKS | {"BY_CHANNEL": False}, (), 4),
    ("delta chunks by channel", delta_chunks_kernel, DELTA | CHUNKS | {"BY_CHANNEL": True}, (), 4),
    ("delta blocks", delta_blocks_kernel, TABLE | {"K": 128, "SMALL": 1e-6, "BLOCK_K": 128, "LEVELS": 4}, FACTORS, 1),
    ("delta within chunks", delta_within_kernel, WITHIN, FACTORS, 4),
    ("delta across chunks", delta_across_kernel, ACROSS, FACTORS, WARPS),
    ("gated norm", gated_rms_norm_kernel, NORM, (), 4),
]  # fmt: skip


def compiled(name: str, kernel: Any, constants: Mapping[str, Any], wide: tuple[str, ...], warps: int, card: int) -> str:
    """A line of JSON; raises what the compiler does."""
    signature: dict[str, str] = {}
    constexprs: dict[tuple[int, ...], Any] = {}
    options: dict[str, Any] = {"num_warps": warps}
    if "EARLY" in kernel.arg_names:
        constants = {**constants, "EARLY": card >= EARLY}
        options["launch_pdl"] = card >= EARLY
    for index, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument], constexprs[(index,)] = "constexpr", constants[argument]
        elif argument in INTS:
            signature[argument] = "*i32"
        elif argument in (*WIDE, *wide):
            signature[argument] = "*fp32"
        elif argument.endswith("_ptr"):
            signature[argument] = "*bf16"
        else:
            signature[argument] = "fp32" if argument in FLOATS else "i32"
    aligned = [
        i for i, name in enumerate(kernel.arg_names) if signature[name] != "constexpr" and name.endswith(ALIGNED)
    ]
    attrs = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attrs)
    built = triton.compile(source, target=GPUTarget("cuda", card, 32), options=options)
    return json.dumps({"name": name, "capability": card, "shared": built.metadata.shared})


def main() -> None:
    for card in map(int, sys.argv[1:]):
        for kernel in KERNELS:
            print(compiled(*kernel, card), flush=True)


if __name__ == "__main__":
    main()
