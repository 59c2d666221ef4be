"""Compiles the forward kernels for sm_90 without a GPU and prints one JSON line each; run by ``test_forward_compiles``.

A process of its own: the tests' process has Triton's interpreter switched on, which replaces the compiler.
"""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout

from headway.core.ints import next_power_of_2
from headway.kernels.cap_logits.triton import BLOCK as CAP_BLOCK
from headway.kernels.cap_logits.triton import cap_logits_kernel
from headway.kernels.dense_attention.hopper.launch import REGISTERS
from headway.kernels.dense_attention.hopper.triton import overlapped_dense_kernel
from headway.kernels.mid_linear.hopper.triton import mid_add_kernel, mid_linear_kernel
from headway.kernels.mid_linear.hopper.triton_thin import thin_add_kernel, thin_linear_kernel
from headway.kernels.mid_linear.tiles import Kind as MidKind
from headway.kernels.mid_linear.tiles import MidTile
from headway.kernels.mid_linear.tiles import tile_for as mid_tile_for
from headway.kernels.mla_decode.hopper.launch import KEYS as LATENT_KEYS
from headway.kernels.mla_decode.hopper.launch import REGISTERS as LATENT_REGISTERS
from headway.kernels.mla_decode.hopper.launch import STAGES as LATENT_STAGES
from headway.kernels.mla_decode.hopper.triton import shared_latents_kernel
from headway.kernels.paged_attention.hopper.decode_tiles import WARP_KEYS, Heads, early_tile
from headway.kernels.paged_attention.hopper.early_decode import shares_of
from headway.kernels.paged_attention.hopper.overlap import (
    MAX_REGISTERS,
    NARROW_STAGES,
    PAIRED_STAGES,
    SHORT_KEYS,
    SHORT_REGISTERS,
    overlap_tile,
)
from headway.kernels.paged_attention.hopper.triton_decode import early_decode_kernel
from headway.kernels.paged_attention.hopper.triton_prefill import overlapped_prefill_kernel
from headway.kernels.paged_attention.hopper.triton_prefill8 import narrow_prefill_kernel
from headway.kernels.paged_attention.hopper.triton_short import short_prefill_kernel
from headway.kernels.paged_attention.hopper.triton_short8 import narrow_short_kernel
from headway.kernels.paged_attention.launch import MOST_QUERIES
from headway.kernels.paged_attention.tiles import decode_tile, prefill_tile
from headway.kernels.paged_attention.triton import decode_kernel, prefill_kernel
from headway.kernels.rms_norm.triton import rms_norm_kernel
from headway.kernels.rope_kv_write.triton import rope_kv_write_kernel
from headway.kernels.silu_mul.triton import gate_mul_kernel, gelu_kernel, sigmoid_mul_kernel
from headway.kernels.skinny_linear.tiles import Kind, row_bucket, tile_for
from headway.kernels.skinny_linear.triton import ADD, SILU, STORE, skinny_linear_kernel
from headway.kernels.wide_linear.hopper.triton import gate_up_kernel, sums_kernel
from headway.kernels.wide_linear.hopper.triton_gate_up import gate_up_pairs_kernel
from headway.kernels.wide_linear.hopper.triton_qkv import qkv_kernel
from headway.kernels.wide_linear.hopper.triton_turns import turns_kernel
from headway.kernels.wide_linear.tiles import BLOCK_K, BLOCK_M, GROUP, NARROW, STAGES, TURN_STAGES, UNEVEN, WIDE

TYPES = {
    "partial_ptr": "*fp32",
    "top_ptr": "*fp32",
    "stats_ptr": "*fp32",
    "cos_sin_ptr": "*fp32",
    "scale": "fp32",
    "soft_cap": "fp32",
    "sinks_ptr": "*fp32",
    "slopes_ptr": "*fp32",
    "eps": "fp32",
}
FP8 = {"k_ptr": "*fp8e4nv", "v_ptr": "*fp8e4nv"}
INT_POINTERS = (
    "tables_ptr", "row_slots_ptr", "query_start_ptr", "seq_lens_ptr", "positions_ptr", "kv_slots_ptr", "arrivals_ptr",
    "counter_ptr", "decode_rows_ptr",
)  # fmt: skip
SMS = 132
ALL: dict[str, Any] = {"reach": 1, "capped": True, "sinks": True, "biased": True}


def compile_kernel(name: str, kernel: Any, constants: Mapping[str, object], **options: int) -> None:
    """Compile with the types the launchers pass; activations are bf16."""
    compile_typed(name, kernel, constants, TYPES, options)


def compile_typed(
    name: str, kernel: Any, constants: Mapping[str, object], types: Mapping[str, str], options: dict[str, int]
) -> None:
    """Compile with arguments of these types, bf16 pointers and integers else; pointers and strides are 16-aligned."""
    signature, constexprs, attributes = {}, {}, {}
    constants = {each.name: each.default for each in kernel.params if each.has_default} | dict(constants)
    if "EARLY" in kernel.arg_names:
        constants = {**constants, "EARLY": True}
        options["launch_pdl"] = True
    for index, argument in enumerate(kernel.arg_names):
        pointer = argument.endswith("_ptr")
        if argument in constants:
            signature[argument], constexprs[(index,)] = "constexpr", constants[argument]
        elif argument in INT_POINTERS:
            signature[argument] = "*i32"
        else:
            signature[argument] = types.get(argument, "*bf16" if pointer else "i32")
            if pointer or argument.endswith("_stride"):
                attributes[(index,)] = [["tt.divisibility", 16]]
    kind = GluonASTSource if kernel.is_gluon() else ASTSource
    source = kind(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    built, report = build(source, options)
    ptx = built.asm["ptx"]
    code = machine_code(built.asm["cubin"]) if name.startswith("prefill overlapped") else ""
    print(
        json.dumps(
            {
                "name": name,
                "shared": built.metadata.shared + sum(int(n) for n in re.findall(r"(\d+) bytes smem", report)),
                "registers": int(re.findall(r"Used (\d+) registers", report)[0]),
                "copies_before_wait": ptx.partition("griddepcontrol.wait")[0].count("cp.async.cg"),
                "spilled": sum(int(n) for n in re.findall(r"(\d+) bytes spill", report)),
                "serialized": "(C75" in report,  # products that ptxas makes wait for each other
                "async_copies": ptx.count("cp.async.cg") + ptx.count("cp.async.bulk.tensor"),
                "warpgroup_products": ptx.count("wgmma.mma_async"),
                "warp_products": ptx.count("mma.sync"),
                "beside_products": exponentials_beside_products(code),
            }
        ),
        flush=True,
    )


def build(source: Any, options: Mapping[str, int]) -> tuple[Any, str]:
    """What Triton makes of it for sm_90, and what ptxas said of registers and spills while it did."""
    said = io.StringIO()
    with knobs.nvidia.scope(), knobs.compilation.scope(), redirect_stdout(said):
        knobs.nvidia.dump_ptxas_log = True
        knobs.compilation.always_compile = True  # of what lies in the cache already ptxas says nothing
        built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return built, said.getvalue()


def machine_code(cubin: bytes) -> str:
    """Disassembled, which takes longer than to assemble it."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([str(tool), "-sass", file.name], capture_output=True, text=True, check=True).stdout


def exponentials_beside_products(code: str) -> int | None:
    """Least exponentials from a wait that leaves one product running to the wait for that one; None without such waits."""
    counts, running = [], None
    for one, none, _ in re.findall(r"(DEPBAR\.LE gsb0, 0x1)|(DEPBAR\.LE gsb0, 0x0)|(MUFU\.EX2)", code):
        if one:
            running = 0
        elif none:
            counts += [running] if running is not None else []
            running = None
        elif running is not None:
            running += 1
    return min(counts, default=None)


def compile_attention(
    size: int, heads: int, kv_heads: int, *, reach: int = 0, capped: bool = False, fp8: bool = False, sinks: bool = False,
    biased: bool = False, held: Sequence[tuple[bool, bool]] = ((False, False), (False, True), (True, False)),
    widest: int = 4, prompts: Sequence[int] = (512, 65536),
) -> None:  # fmt: skip
    """Decoding rows that are held or counted or neither, rows of drafts, and prompts of so many tokens."""
    name = f"D={size} H={heads} KH={kv_heads} reach={reach} capped={capped} fp8={fp8} sinks={sinks} biased={biased}"
    types = {**TYPES, **(FP8 if fp8 else {})}
    kind = {"H": heads, "D": size, "BS": 16, "REACH": reach, "CAPPED": capped}
    kind |= {"SINKS": sinks, "BIASED": biased}
    tile = decode_tile(size, heads // kv_heads, torch.bfloat16)
    blocks = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_D": tile.block_d, "PRECISION": tile.precision}
    blocks["MEMBERS"] = next_power_of_2(heads // kv_heads)
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    for hold, counted in held:
        more = {"GROUP": heads // kv_heads, "HOLD": hold, "COUNTED": counted, "WIDTH": 1}
        names = f"decode {name} hold={hold} counted={counted}"
        compile_typed(names, decode_kernel, {**kind, **blocks, **more}, types, options)
    wide = decode_tile(size, widest * heads // kv_heads, torch.bfloat16)
    more = {"BLOCK_M": wide.block_m, "MEMBERS": next_power_of_2(widest * heads // kv_heads), "WIDTH": widest}
    if widest > 1 and wide.block_m <= MOST_QUERIES:
        more |= {"GROUP": heads // kv_heads, "HOLD": False, "COUNTED": False}
        compile_typed(f"decode {name} width={widest}", decode_kernel, {**kind, **blocks, **more}, types, options)
    for tokens in prompts:
        big = prefill_tile(size, heads, kv_heads, torch.bfloat16, tokens, SMS, 1 if fp8 else 2)
        blocks = {"BLOCK_M": big.block_m, "BLOCK_N": big.block_n, "BLOCK_D": big.block_d, "PRECISION": big.precision}
        options = {"num_warps": big.num_warps, "num_stages": big.num_stages}
        more = {"KH": kv_heads, "COUNTED": True}
        compile_typed(f"prefill {tokens} {name}", prefill_kernel, {**kind, **blocks, **more}, types, options)


def compile_overlapped(size: int, heads: int, kv_heads: int, block_size: int, rows: int, *, fp8: bool = False) -> None:
    """The kernel of programs that stay, or for no rows that of short tiles."""
    group = heads // kv_heads
    constants: dict[str, object] = {"KH": kv_heads, "D": size, "BS": block_size, "COUNTED": True}
    name, block_n = f"D={size} H={heads} KH={kv_heads} BS={block_size}", SHORT_KEYS
    if rows:
        tile = overlap_tile((heads, kv_heads), 8192, rows, 8192 // rows, SMS, 1 if fp8 else 2)
        assert tile is not None
        block_n = tile.block_n
        constants |= {"STAGES": tile.stages, "KEPT": tile.kept}
    else:
        constants |= {"STAGES": NARROW_STAGES if fp8 else PAIRED_STAGES}
    queries = f"tensordesc<bf16[{64 // group}, {group}, 64],{NVMMASharedLayout(128, 16, 3)!r}>"
    keys = f"tensordesc<bf16[{min(block_size, block_n)}, 64],{NVMMASharedLayout(128, 16, 2)!r}>"
    if fp8:
        keys = f"tensordesc<fp8e4nv[{min(block_size, block_n)}, 64],{NVMMASharedLayout(64, 8, 2)!r}>"
    types = {**TYPES, "q_desc": queries, "k_desc": keys, "v_desc": keys}
    staying = narrow_prefill_kernel if fp8 else overlapped_prefill_kernel
    short = narrow_short_kernel if fp8 else short_prefill_kernel
    kernel, registers = (staying, MAX_REGISTERS) if rows else (short, SHORT_REGISTERS)
    options = {"num_warps": 4, "maxnreg": registers}
    compile_typed(
        f"prefill overlapped rows={rows} {name} fp8={fp8}", kernel, {**constants, "BLOCK_N": block_n}, types, options
    )


def compile_early_decode(
    size: int, heads: int, kv_heads: int, rows: int, *, reach: int = 0, capped: bool = False, fp8: bool = False,
    turned: bool = False, stored: bool = False, sinks: bool = False, width: int = 1,
) -> None:  # fmt: skip
    programs = rows * kv_heads * shares_of(width, heads // kv_heads)
    tile = early_tile(programs, Heads(size, heads // kv_heads, 1 if fp8 else 2, width), SMS)
    constants = {
        "H": heads,
        "GROUP": heads // kv_heads,
        "D": size,
        "BS": 16,
        "OFFSET_STRIDE": size,
        "STAGES": tile.stages,
    }
    constants |= {"KEYS": WARP_KEYS, "CLUSTER": tile.cluster, "WIDTH": width, "TURNED": turned, "STORED": stored}
    constants |= {"REACH": reach, "CAPPED": capped, "SINKS": sinks, "Q_NORM": not capped}
    constants |= {"K_NORM": not (capped or stored)}
    copies = (
        0 if turned else 2 * tile.stages * WARP_KEYS * size // ((16 if fp8 else 8) * 32)
    )  # of 16 bytes, by each thread
    name = f"early decode D={size} H={heads} KH={kv_heads} rows={rows} width={width} fp8={fp8} stored={stored} copies {copies}"
    types = {**TYPES, **(FP8 if fp8 else {})}
    compile_typed(name, early_decode_kernel, constants, types, {"num_warps": tile.num_warps})


def compile_linear(kind: Kind, rows: int, outputs: int, inputs: int, factor: float = 1.0) -> None:
    tile = tile_for(kind, rows, outputs, inputs)
    mode = {"linear_add": ADD, "norm_gate_up": SILU}.get(kind, STORE)
    constants: dict[str, Any] = {"N": outputs // 2 if mode == SILU else outputs, "K": inputs, "ROWS": row_bucket(rows)}
    constants |= {"SPLITS": tile.splits, "FACTOR": factor}
    constants |= {"BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k, "STAGES": tile.num_stages, "MODE": mode}
    constants |= {"NORM": kind.startswith("norm"), "BIAS": False, "HELD": min(tile.held, -(-inputs // tile.step))}
    way = "add" if tile.splits == 0 else "dot"
    compile_kernel(f"linear {way} {kind} {rows}", skinny_linear_kernel, constants, num_warps=tile.num_warps)


def compile_mid_linear(
    kind: MidKind, rows: int, outputs: int, inputs: int, tile: MidTile | None = None, factor: float = 1.0
) -> None:
    tile = tile or mid_tile_for(kind, rows, outputs, inputs)
    silu = kind == "mid_gate_up"
    constants: dict[str, Any] = {"N": outputs // 2 if silu else outputs, "K": inputs, "ROWS": tile.rows}
    constants |= {"WIDE": tile.widths()[0]}
    constants |= {"BLOCK_K": tile.block_k, "CHUNKS": tile.chunks(inputs), "W_AHEAD": tile.w_ahead}
    constants |= {"X_AHEAD": tile.x_ahead, "TRAILING": tile.trailing, "RING": tile.ring(inputs), "BIAS": False}
    ours = {"PARTS": 32 if kind == "mid_gate_up" else 0, "GATE": int(silu), "MORE": tile.widths()[1]}
    constants |= {"CLUSTER": tile.cluster, "FACTOR": factor} if kind == "mid_add" else ours
    types = {"squares_ptr": "*fp32", "eps": "fp32"} | ({"out_ptr": "*fp32"} if kind == "linear_parts" else {})
    kernel = mid_add_kernel if kind == "mid_add" else mid_linear_kernel
    copies = tile.w_ahead * tile.wide * tile.block_k // 8 // (32 * tile.num_warps)  # of 16 bytes, by each thread
    compile_typed(f"mid {kind} {rows} copies {copies}", kernel, constants, types, {"num_warps": tile.num_warps})


def described(*block: int) -> str:
    """A tensor descriptor's type."""
    return f"tensordesc<bf16{list(block)},{NVMMASharedLayout(128, 16, len(block))!r}>"


def compile_wide_sums(gelu: int, warps: int, factor: float = 1.0) -> None:
    wide = WIDE if warps else NARROW
    types = {**TYPES, "x_desc": described(BLOCK_M, BLOCK_K), "weight_desc": described(1, wide, BLOCK_K)}
    types |= {"out_desc": described(BLOCK_M, wide)}
    constants: dict[str, Any] = {"K": 1024, "N": 1024, "GROUP": GROUP, "GELU": gelu}
    constants |= {"STAGES": STAGES[WIDE] if warps else TURN_STAGES}
    constants |= {"FACTOR": factor, "WARPS": warps} if warps else {}
    kernel = sums_kernel if warps else turns_kernel
    compile_typed(f"wide sums gelu={gelu} factor={factor} warps={warps}", kernel, constants, types, {"num_warps": 4})


def compile_dense() -> None:
    types, fixed = {**TYPES, "qkv_desc": described(64, 64), "start_ptr": "*i32"}, {"H": 12, "KH": 12}
    compile_typed(
        "prefill overlapped dense", overlapped_dense_kernel, fixed, types, {"num_warps": 4, "maxnreg": REGISTERS}
    )


def compile_latents(heads: int, queries: int, rank: int = 512, block_size: int = 16) -> None:
    """Decode attention over latents."""
    block = [queries, min(heads, 64), 64]
    types = {**TYPES, "latent_desc": described(min(block_size, LATENT_KEYS), 64)}
    types |= {name: described(*block) for name in ("q_desc", "turned_desc")}
    constants = {"H": heads, "RANK": rank, "BS": block_size, "PARTS": 1, "BLOCK_Q": block[0], "BLOCK_H": block[1]}
    constants |= {"KEYS": LATENT_KEYS, "STAGES": LATENT_STAGES}
    options = {"num_warps": 8, "maxnreg": LATENT_REGISTERS}
    compile_typed(f"latents H={heads} Q={queries} L={rank}", shared_latents_kernel, constants, types, options)


def compile_wide(wide: int, fp8: bool = False) -> None:
    types = {**TYPES, "x_desc": described(BLOCK_M, BLOCK_K), "weight_desc": described(1, wide, BLOCK_K)}
    types |= FP8 if fp8 else {}
    fixed = {"K": 1024, "STAGES": STAGES[wide], "GROUP": GROUP}
    for norm in (False, True):
        heads = {"H": 16, "KH": 8, "BS": 16, "NORM": norm}
        compile_typed(f"wide {wide} qkv norm={norm} fp8={fp8}", qkv_kernel, {**fixed, **heads}, types, {"num_warps": 4})
    if fp8:
        return
    types["weight_desc"] = described(2, wide // 2, BLOCK_K)
    compile_typed(f"wide {wide} gate_up", gate_up_kernel, {**fixed, "N": 3072, "GATE": 1}, types, {"num_warps": 4})


def compile_thin(wide: int, stages: int, cluster: int = 0, silu: bool = False, factor: float = 1.0) -> None:
    """Decode products with a copying warp; ``cluster``: programs that sum parts of K, 0 for products that are stored."""
    tile = MidTile(wide, 64, 1, stages, stages, 4, cluster=max(cluster, 1), producer=True)
    options, parts = {"num_warps": 4, "maxnreg": 128 if wide <= 128 else 255}, 2 if silu else 1
    assert tile.fits(4096)
    types = {**TYPES, "x_desc": described(64, 64), "weight_desc": described(parts, wide // parts, 64)}
    types |= {"out_desc": described(64, wide // parts), "squares_ptr": "*fp32"}
    fixed = {"N": 4096, "K": 4096, "STAGES": stages, "BIAS": False}
    if cluster:
        constants = {**fixed, "CLUSTER": cluster, "FACTOR": factor}
        compile_typed(f"thin add {wide}", thin_add_kernel, constants, types, options)
    else:
        constants = {**fixed, "PARTS": 64, "GATE": 2 * silu}
        compile_typed(f"thin {wide}", thin_linear_kernel, constants, types, options)


def compile_uneven() -> None:
    types = {**TYPES, "x_desc": described(BLOCK_M, BLOCK_K), "left_desc": described(2, 64, BLOCK_K)}
    types |= {"right_desc": described(2, 32, BLOCK_K), "out_left": described(BLOCK_M // 2, 64)}
    types["out_right"] = f"tensordesc<bf16{[BLOCK_M // 2, 32]},{NVMMASharedLayout(64, 16, 2)!r}>"
    fixed = {"K": 1024, "STAGES": STAGES[UNEVEN], "GROUP": GROUP}
    compile_typed("wide uneven gate_up", gate_up_pairs_kernel, {**fixed, "GATE": 2}, types, {"num_warps": 4})


def main() -> None:
    compile_linear("norm_linear", 2, 4096, 1024)
    compile_linear("norm_gate_up", 2, 6144, 1024)
    compile_linear("linear_add", 1, 1024, 2048, factor=0.22)
    compile_linear("linear_add", 16, 4096, 14336)
    compile_linear("skinny_linear", 16, 151936, 1024)
    compile_mid_linear("mid_gate_up", 256, 6144, 1024)
    compile_mid_linear("mid_linear", 256, 4096, 1024, MidTile(64, 64, 1, 9, 4, 8, 128, 1))
    compile_mid_linear("mid_add", 64, 1024, 3072, MidTile(64, 64, 1, 12, 8, 4, cluster=4), factor=0.22)
    compile_mid_linear("linear_parts", 64, 4096, 14336, MidTile(64, 64, 4, 7, 3, 4))
    for gelu, warps, factor in ((0, 2, 1.0), (0, 2, 0.22), (2, 2, 1.0), (3, 4, 1.0), (3, 0, 1.0)):
        compile_wide_sums(gelu, warps, factor)
    compile_dense()
    compile_latents(16, 1)
    compile_latents(128, 1)
    compile_wide(WIDE)
    compile_wide(WIDE, fp8=True)
    compile_uneven()
    compile_thin(128, 4, silu=True)
    compile_thin(32, 16, cluster=1, factor=0.22)
    compile_attention(128, 16, 8)
    compile_attention(128, 16, 8, fp8=True, held=[(False, True)], widest=1, prompts=[65536])
    compile_attention(64, 64, 8, **ALL, held=[(True, False)], prompts=[512])
    for rows in (1, 256):
        compile_early_decode(128, 16, 8, rows)
    compile_early_decode(128, 16, 8, 16, fp8=True)
    compile_early_decode(64, 64, 8, 8, reach=1, capped=True, sinks=True)
    compile_early_decode(128, 40, 8, 8, reach=2)
    compile_early_decode(256, 4, 1, 8, reach=1)
    compile_early_decode(128, 16, 8, 256, fp8=True, turned=True)
    for rows in (1, 256):
        compile_early_decode(128, 16, 8, rows, width=4)
    compile_early_decode(256, 8, 4, 8, width=4)
    compile_early_decode(128, 32, 8, 8, width=4, fp8=True)
    compile_early_decode(64, 64, 8, 8, width=2, reach=1, capped=True, sinks=True)
    compile_early_decode(128, 16, 8, 256, width=4, turned=True)
    compile_early_decode(256, 8, 1, 64, reach=1, stored=True)
    compile_early_decode(128, 16, 8, 16, fp8=True, stored=True)
    compile_early_decode(256, 8, 2, 8, width=4, stored=True)
    compile_overlapped(128, 16, 8, 16, 8)
    compile_overlapped(128, 16, 8, 16, 8, fp8=True)
    compile_overlapped(64, 32, 4, 256, 8, fp8=True)
    compile_overlapped(128, 16, 8, 16, 0, fp8=True)
    for parts, add, after in ((0, False, False), (0, True, False), (4, True, False), (0, True, True), (6, True, True)):
        constants: dict[str, Any] = {"SIZE": 1024, "BLOCK_R": 4, "BLOCK_C": 1024, "ADD": add, "PARTS": parts}
        constants |= {"AFTER": after, "NORM": True, "SCALED": parts == 6, "FACTOR": 0.22 if parts else 1.0}
        types = {**TYPES, "x_ptr": "*fp32"} if parts else TYPES
        compile_typed("rms_norm", rms_norm_kernel, constants, types, {"num_warps": 8})
    for act in (1, 2, 3):
        compile_kernel("silu_mul", gate_mul_kernel, {"SIZE": 3072, "BLOCK": 1024, "ACT": act}, num_warps=4)
    capped = {"SIZE": 262144, "BLOCK": CAP_BLOCK, "CAPPED": True}
    compile_typed("cap_logits", cap_logits_kernel, capped, {"factor": "fp32", "cap": "fp32"}, {"num_warps": 8})
    compile_kernel("gelu", gelu_kernel, {"SIZE": 3072, "BLOCK": 1024}, num_warps=4)
    compile_kernel("sigmoid_mul", sigmoid_mul_kernel, {"SIZE": 2048, "BLOCK": 1024}, num_warps=4)
    rope = {"H": 16, "KH": 8, "D": 128, "BS": 16, "HALF": 64, "BLOCK_H": 8, "BLOCK_D": 128, "BLOCK_HALF": 64}
    rope |= {"BLOCK_REST": 1, "Q_NORM": True, "K_NORM": True}
    for types in (TYPES, TYPES | FP8):
        compile_typed("rope_kv_write", rope_kv_write_kernel, rope, types, {"num_warps": 2})


def others() -> None:
    """More shapes of the same kernels."""
    compile_mid_linear("mid_linear", 128, 4096, 1024)
    compile_mid_linear("mid_gate_up", 64, 6144, 1024)
    compile_mid_linear("linear_parts", 32, 1024, 2048)
    compile_mid_linear("mid_add", 8, 4096, 14336, MidTile(64, 64, 1, 13, 6, 4, cluster=2))
    for gelu, warps in ((3, 2), (2, 4), (2, 0)):
        compile_wide_sums(gelu, warps)
    compile_wide(NARROW)
    compile_thin(64, 12)
    compile_thin(64, 12, cluster=2)
    compile_overlapped(128, 32, 8, 16, 1)
    compile_overlapped(64, 32, 4, 256, 8)
    compile_overlapped(128, 16, 8, 16, 0)
    compile_overlapped(64, 32, 4, 256, 0, fp8=True)
    compile_overlapped(64, 32, 4, 256, 0)
    compile_attention(128, 16, 8, fp8=True)
    compile_attention(64, 64, 8, **ALL)
    compile_early_decode(64, 32, 4, 8, fp8=True)
    for rows in (8, 64):
        compile_early_decode(128, 16, 8, rows, width=4)
    for rows in (8, 16, 64):
        compile_early_decode(128, 16, 8, rows)
    for rows in (1, 8, 64, 256):
        compile_early_decode(128, 16, 8, rows, fp8=True)
    for rows in (1, 16, 256):
        compile_early_decode(256, 8, 1, rows, stored=True)
    compile_early_decode(256, 8, 1, 8, fp8=True, stored=True)
    compile_early_decode(64, 8, 2, 64, width=4, fp8=True, stored=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["others"]:
        others()
    else:
        main()
