"""When and how ``mla_decode`` is launched on Hopper by programs that share latents out evenly."""

from __future__ import annotations

import torch
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from headway.core.ints import cdiv, next_power_of_2
from headway.kernels.capability import num_sms
from headway.kernels.mla_decode.hopper.triton import MEMBERS, shared_latents_kernel
from headway.kernels.mla_decode.hopper.triton_merge import merge_shares_kernel
from headway.kernels.triton_early import launch_early

PANEL = 64
"""Elements of a rotated key: one row of swizzled shared memory."""
RANKS = (256, 512)
"""Elements of a latent whose sums fill two warpgroups' registers well."""
KEYS, STAGES = 64, 2
"""Latents of a tile, and tiles that there is memory for."""
REGISTERS = 168
"""A thread of three warpgroups; the kernel shares them out anew."""


def serves(q_latent: torch.Tensor, q: torch.Tensor, latents: torch.Tensor) -> bool:
    """Whether tensors are as these kernels read them: 16 bits, places that copies can begin at, pages one after the other."""
    rank, width, block_size = q_latent.shape[2], latents.shape[2], latents.shape[1]
    if q.dtype not in (torch.bfloat16, torch.float16) or latents.dtype != q.dtype or q_latent.dtype != q.dtype:
        return False
    if rank not in RANKS or width - rank != PANEL or block_size < 8:
        return False
    strides = (*q_latent.stride()[:2], *q.stride()[:2])
    flat = latents.stride(1) == width and latents.stride(0) % width == 0
    return flat and all(stride % 8 == 0 for stride in strides) and q.shape[2] % 8 == 0


def attend_shared(
    q_latent: torch.Tensor,
    q: torch.Tensor,
    latents: torch.Tensor,
    block_tables: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    scale: float,
    most_queries: int,
    longest: int,
) -> None:
    """``mla_decode`` into out [H, T, L] without selected positions.

    Args:
        tables: (row_slots, query_start, seq_lens).
        longest: >= tokens of the rows it is for.
    """
    num_tokens, heads, rank = q_latent.shape
    num_blocks, block_size, width = latents.shape
    block_h = min(next_power_of_2(heads), MEMBERS.value)
    block_q = max(1, min(next_power_of_2(longest), MEMBERS.value // block_h))
    parts, blocks, num_rows = cdiv(longest, block_q), cdiv(heads, block_h), tables[0].shape[0]
    programs = max(1, num_sms(q.device) // blocks)
    kept = (blocks * programs, 2, block_q * block_h)
    partial = torch.empty((*kept, rank), dtype=torch.float32, device=q.device)
    top = torch.empty(kept, dtype=torch.float32, device=q.device)
    queries, page = [block_q, block_h, PANEL], [min(block_size, KEYS), PANEL]
    of_queries, of_pages = NVMMASharedLayout(128, 16, 3), NVMMASharedLayout(128, 16, 2)
    turned, rows = q[..., q.shape[2] - PANEL :], latents.stride(0) // width
    descriptors = (
        TensorDescriptor(q_latent, list(q_latent.shape), list(q_latent.stride()), queries, of_queries),
        TensorDescriptor(turned, list(turned.shape), list(turned.stride()), queries, of_queries),
        TensorDescriptor(latents, [(num_blocks - 1) * rows + block_size, width], [width, 1], page, of_pages),
    )
    sizes = {"RANK": rank, "BS": block_size, "PARTS": parts, "BLOCK_Q": block_q, "BLOCK_H": block_h, "KEYS": KEYS}
    slots, table_width = block_tables.shape
    shared_latents_kernel[(blocks, programs)](
        *descriptors, out, partial, top, block_tables, *tables, num_rows, num_tokens, slots, num_blocks, table_width,
        most_queries, scale, rows, H=heads, STAGES=STAGES, num_warps=8, maxnreg=REGISTERS, **sizes, **launch_early(q.device),
    )  # fmt: skip
    merge_shares_kernel[(heads, num_rows * parts * block_q)](
        out, partial, top, *tables, num_rows, num_tokens, slots, table_width, programs, most_queries, num_warps=4,
        **sizes, **launch_early(q.device),
    )  # fmt: skip
