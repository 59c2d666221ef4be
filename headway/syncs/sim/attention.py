"""Attention in the layout in which a kernel leaves it: random numbers that are drawn later follow the order of memory.

torch takes the plain formula for a backend that it does not know, whose results lie as its last product leaves them.
Kernels, the CPU's and CUDA's, lay results out as the query lies. The values are the formula's.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch._C import DispatchKey
from torch.nn.attention import SDPBackend

OPERATION: Final = "scaled_dot_product_attention"
_ATTENTION: Final = torch.ops.aten.scaled_dot_product_attention.default


def attended(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """torch.nn.functional.scaled_dot_product_attention: [batch, heads, rows, width], or whatever else that takes."""
    made: torch.Tensor = _ATTENTION._op_dk(DispatchKey.CompositeImplicitAutograd, query, key, value, *args, **kwargs)
    if query.dim() == 4 and _by_a_kernel((query, key, value, *args), kwargs):
        steps = query.stride()
        order = sorted(range(4), key=lambda axis: -steps[axis])
        return made.permute(order).contiguous().permute([order.index(axis) for axis in range(4)])
    return made


def _by_a_kernel(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the CPU would not take the plain formula."""
    mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
    if mask is not None and mask.requires_grad:
        return False
    held = [getattr(value, "held", value) for value in args]
    named = {name: getattr(value, "held", value) for name, value in kwargs.items()}
    if any(isinstance(value, torch.Tensor) and value.device.type != "cpu" for value in (*held, *named.values())):
        return False
    return bool(torch._fused_sdp_choice(*held, **named) != SDPBackend.MATH.value)
