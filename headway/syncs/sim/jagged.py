"""Attention over jagged tensors. A card runs it by kernels that the CPU does not have; here one block-diagonal mask serves.

The way is chosen as torch.nested._internal.sdpa chooses it on CUDA, whose own checks read the lengths, and those reads are the
waits: the longest and the shortest row, once a batch, and every length where no kernel of a card will do. The mask has the
size of all rows together, squared.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F
from torch.backends.cuda import SDPAParams
from torch.nested._internal import sdpa
from torch.nested._internal.nested_tensor import nested_view_from_values_offsets_lengths

from headway.syncs.findings import Kind
from headway.syncs.sim import backend
from headway.syncs.sim.flags import flag

_REAL: Final = sdpa.jagged_scaled_dot_product_attention
_ALIGNED: Final = {torch.float32: 4, torch.float16: 8, torch.bfloat16: 8}
"""Numbers in 16 bytes, by which kernels of a card want heads to be divisible."""


def attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """``torch.nested._internal.sdpa.jagged_scaled_dot_product_attention``: jagged [B, heads, rows, D] tensors.

    Raises:
        RuntimeError: no kernel of a card would do; torch's text.
    """
    given = (attn_mask, dropout_p, is_causal, scale, enable_gqa)
    ragged_heads = query.dim() > 3 and key.dim() > 3 and value.dim() > 3 and query._ragged_idx == 1
    if query.device.type != "cuda" or ragged_heads:  # the latter is plain attention over the values
        return _REAL(query, key, value, *given)
    query, key, value, attn_mask = sdpa._autocast(query, key, value, attn_mask)
    sdpa._validate_sdpa_input(query, key, value, attn_mask, dropout_p, is_causal, scale)
    holes = any(part.lengths() is not None for part in (query, key, value))
    if attn_mask is not None or enable_gqa or holes:
        raise backend.refuse(
            "the simulation does not serve attention over jagged tensors with a mask, grouped heads, or lengths beside "
            "offsets: run on a GPU, without --simulate"
        )
    params = SDPAParams(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    if not _has_kernel(query, value, params):
        if not torch.backends.cuda.math_sdp_enabled() or not sdpa._can_use_math_sdpa_jagged(params):
            raise RuntimeError("No viable backend for scaled_dot_product_attention was found.")
        flag(Kind.READ, "scaled_dot_product_attention")  # it splits the values by every length
    q, k, v, borders, other_borders, _, _, info = sdpa._sdpa_nested_preprocessing(query, key, value)
    mask = _own_row(q, borders)[:, None] == _own_row(k, other_borders)
    if is_causal:
        mask = mask & (_place(q, borders)[:, None] >= _place(k, other_borders))
    q, k, v = (part.transpose(0, 1) for part in (q, k, v))
    made = F.scaled_dot_product_attention(q, k, v, mask, dropout_p, scale=scale)
    return nested_view_from_values_offsets_lengths(made.transpose(0, 1), **info).transpose(1, 2)


def _has_kernel(query: Any, value: Any, params: Any) -> bool:
    """Whether the fused kernels of a card serve: flash's for half precision, the memory-efficient for float32 too."""
    aligned = _ALIGNED.get(query.dtype)
    if aligned is None or query.size(-1) % aligned or value.size(-1) % aligned:
        return False
    cuda = torch.backends.cuda
    flash = query.dtype is not torch.float32 and cuda.flash_sdp_enabled() and sdpa._can_use_flash_sdpa_jagged(params)
    return bool(flash or (cuda.mem_efficient_sdp_enabled() and sdpa._can_use_efficient_sdpa_jagged(params)))


def _own_row(values: torch.Tensor, borders: torch.Tensor) -> torch.Tensor:
    """Of each of the values [N, ...], the row that it belongs to [N]; borders [B + 1]."""
    return torch.searchsorted(borders[1:], torch.arange(len(values), device=values.device), right=True)


def _place(values: torch.Tensor, borders: torch.Tensor) -> torch.Tensor:
    """Where each value stands in its row [N]."""
    return torch.arange(len(values), device=values.device) - borders[_own_row(values, borders)]
