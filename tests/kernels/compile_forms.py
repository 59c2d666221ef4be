"""Compiles what benchmarks compare for sm_90, as ``compile_forward`` does what serves; run by ``test_forward_compiles``."""

from __future__ import annotations

from headway.kernels.dense_attention.hopper.triton import dense_alone_kernel, dense_tiles_kernel
from headway.kernels.wide_linear.hopper.forms import ERF, TURN_STAGES
from headway.kernels.wide_linear.hopper.triton import sums_kernel
from headway.kernels.wide_linear.hopper.triton_forms import early_kernel, turns_kernel
from headway.kernels.wide_linear.tiles import BLOCK_K, BLOCK_M, GROUP, NARROW, STAGES, WIDE
from tests.kernels.compile_forward import TYPES, compile_typed, described


def compile_wide_forms(wide: int) -> None:
    types = {**TYPES, "x_desc": described(BLOCK_M, BLOCK_K), "weight_desc": described(1, wide, BLOCK_K)}
    types["out_desc"] = described(BLOCK_M, wide)
    fixed = {"K": 768, "N": 3072, "GROUP": GROUP}
    options = {"num_warps": 4}
    late = {**fixed, "STAGES": STAGES[wide], "GELU": ERF, "WARPS": 4}
    compile_typed(f"wide {wide} gelu by four warps", sums_kernel, late, types, dict(options))
    early = {**fixed, "STAGES": STAGES[wide], "OLD": False}
    compile_typed(f"wide {wide} early gelu", early_kernel, early, types, dict(options))
    if wide == NARROW:
        compile_typed("wide turns", turns_kernel, {**fixed, "STAGES": TURN_STAGES}, types, dict(options))


def compile_dense(groups: int, keys: int, stages: int, registers: int) -> None:
    types = {"q_desc": described(64, 64), "kv_desc": described(keys, 64), "start_ptr": "*i32", "scale": "fp32"}
    options = {"num_warps": 4, "maxnreg": registers}
    fixed = {"H": 12, "KH": 12, "STAGES": stages}
    if groups:
        more = {**fixed, "GROUPS": groups, "REGISTERS": registers}
        compile_typed(f"prefill like dense {groups} {keys}", dense_tiles_kernel, more, types, options)
    else:
        compile_typed(f"prefill like dense alone {keys}", dense_alone_kernel, fixed, types, options)


def main() -> None:
    for wide in (WIDE, NARROW):
        compile_wide_forms(wide)
    compile_dense(0, 64, 2, 128)
    compile_dense(0, 128, 2, 168)
    compile_dense(1, 64, 3, 80)
    compile_dense(1, 128, 3, 128)
    compile_dense(2, 128, 2, 168)


if __name__ == "__main__":
    main()
