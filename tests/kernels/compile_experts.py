"""Compiles the experts' products, grouped ones and those of few tokens in 4 bits, for sm_90 without a GPU; a JSON line each.

Run by ``test_experts_compile``.

A process of its own: the tests' process has Triton's interpreter switched on, which replaces the compiler.
"""

from __future__ import annotations

from typing import Any

from headway.core.ints import next_power_of_2
from headway.kernels.expert_mlp.hopper.triton_few import few_in_words_kernel, few_out_words_kernel
from headway.kernels.expert_mlp.hopper.triton_many import many_out_kernel
from headway.kernels.expert_mlp.hopper.triton_shared import grouped_shared_kernel
from headway.kernels.expert_mlp.tiles import (
    MANY_GROUP,
    MANY_STAGES,
    MANY_WIDE,
    few_word_tile,
    group_tile,
    group_word_tile,
)
from headway.kernels.expert_mlp.triton_grouped import grouped_kernel
from tests.kernels.compile_forward import compile_typed, described

TYPES = {
    "order_ptr": "*i32",
    "counts_ptr": "*i32",
    "plan_ptr": "*i32",
    "ids_ptr": "*i32",
    "weights_ptr": "*fp32",
    "scales_ptr": "*u8",
    "limit": "fp32",
    "alpha": "fp32",
}
EXPERTS, TOP_K, HIDDEN, INNER = 32, 4, 2880, 2880


def constants(first: bool, rows: int, act: str) -> dict[str, Any]:
    """Of either product."""
    return {
        "E": EXPERTS, "LANES": 32, "OUT": INNER if first else HIDDEN, "K": HIDDEN if first else INNER, "TOP_K": TOP_K,
        "ROWS": rows, "ACT": act, "GATED": True, "FIRST": first,
    }  # fmt: skip


def main() -> None:
    for biased in (True, False):
        types = TYPES | {"x_desc": described(128, 64), "weight_desc": described(MANY_WIDE, 64)}
        fixed: dict[str, Any] = {"OUT": 2048, "K": 768, "BIASED": biased, "STAGES": MANY_STAGES, "GROUP": MANY_GROUP}
        compile_typed(f"many out {biased}", many_out_kernel, fixed, types, {"num_warps": 4})
    for tokens in (8, 64, 256, 4096):
        tile = group_word_tile(tokens * TOP_K, EXPERTS)
        for first in (True, False):
            fixed = constants(first, tile.rows, "clamped_swiglu") | {"M": tile.height, "STAGES": tile.stages}
            types = TYPES | {"weight_ptr": "*u8"}
            options = {"num_warps": tile.num_warps}
            compile_typed(f"words {tile.rows} {first}", grouped_shared_kernel, fixed, types, options)
    for tokens in (1, 4):
        into, out = (
            few_word_tile(tokens * TOP_K * INNER // 16, HIDDEN, 1),
            few_word_tile(tokens * HIDDEN // 16, INNER, TOP_K),
        )
        fixed = {"E": EXPERTS, "INNER": INNER, "K": HIDDEN, "TOP_K": TOP_K, "PARTS": into.parts, "UNROLL": into.unroll}
        fixed |= {"ACT": "clamped_swiglu", "GATED": True}
        types = TYPES | {"weight_ptr": "*u8"}
        compile_typed(f"few in {tokens}", few_in_words_kernel, fixed, types, {"num_warps": into.parts})
        fixed = {"E": EXPERTS, "N": HIDDEN, "K": INNER, "TOP_K": TOP_K, "PARTS": out.parts, "UNROLL": out.unroll}
        fixed |= {"COLS": max(8, next_power_of_2(TOP_K)), "ADD": True}
        compile_typed(f"few out {tokens}", few_out_words_kernel, fixed, types, {"num_warps": out.parts})
    for first in (True, False):
        plain = group_tile(4096 * TOP_K, EXPERTS, INNER, HIDDEN, item=2, paired=first, fp4=False, room=227 << 10)
        fixed = constants(first, plain.rows, "silu") | {"BLOCK_N": plain.block_n, "BLOCK_K": plain.block_k}
        fixed |= {"WEIGH": False, "FP4": False, "TOGETHER": plain.together, "scales_ptr": None, "bias_ptr": None}
        fixed |= {} if first else {"plan_ptr": None}
        options = {"num_warps": plain.num_warps, "num_stages": plain.num_stages}
        compile_typed(f"wide {plain.rows} {first}", grouped_kernel, fixed, TYPES, options)


if __name__ == "__main__":
    main()
