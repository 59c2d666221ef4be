"""Blocks of a decoder one after the other in one call (csrc/layers.c), so that a step costs Python the same with any number.

Shapes: T tokens of the step, R rows, C hidden size, I inner width, H and KH query and key/value heads of D, S slots.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headway.kernels.cpu.ops import MAX_HEAD_SIZE, is_native, native
from headway.kernels.linear import PackedLinear
from headway.kernels.quant_linear import QuantizedLinear

Product = PackedLinear | QuantizedLinear
_P, _I, _INT, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


class _Product(ctypes.Structure):
    _fields_ = [("packed", _P), ("bias", _P), ("parts", _P), ("num_parts", _I), ("outputs", _I), ("inputs", _I),
                ("narrow", _INT), ("exact", _INT)]  # fmt: skip


class _Block(ctypes.Structure):
    _fields_ = [
        *((name, _Product) for name in ("qkv", "out", "gate_up", "down")),
        *((name, _P) for name in ("before_ffn", "following", "q_norm", "k_norm", "cos_sin", "sinks", "slopes")),
        *((name, _P) for name in ("k_cache", "v_cache")),
        *(
            (name, _I)
            for name in ("group", "heads", "kv_heads", "size", "rot", "positions", "num_blocks", "block_size")
        ),
        *((name, _I) for name in ("window", "chunk")),
        *((name, _F) for name in ("eps_ffn", "eps_following", "eps_heads", "scale", "soft_cap")),
        ("unused", _INT),
    ]


class _Group(ctypes.Structure):
    _fields_ = [*((name, _P) for name in ("tables", "kv_slots", "seq_lens")), ("slots", _I), ("table_size", _I)]


class _Step(ctypes.Structure):
    _fields_ = [
        *((name, _P) for name in ("groups", "positions", "row_slots", "query_start", "residual", "normed")),
        *((name, _P) for name in ("wide", "inner", "attended")),
        *((name, _I) for name in ("tokens", "rows", "hidden")),
        *((name, _INT) for name in ("bf", "threads")),
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeBlock:
    """A block x += out(attention(qkv(norm(x)))), x += down(silu(gate) * up) behind a norm; it ends with the next block's norm.

    Attributes:
        qkv, out, gate_up, down: its products, packed.
        before_ffn, following: weight [C] and eps of the norms behind the two sums.
        head_norms: weights [D] of the norms of queries and keys, or None, and their eps.
        cos_sin: float32 [L, Drot].
        cache: keys and values [NB, bs, KH, D].
        group: of the cache.
        num_heads, scale, window, soft_cap, chunk, sinks, slopes: see ``paged_attention``.
    """

    qkv: Product
    out: Product
    gate_up: Product
    down: Product
    before_ffn: tuple[torch.Tensor, float]
    following: tuple[torch.Tensor, float]
    head_norms: tuple[torch.Tensor | None, torch.Tensor | None, float]
    cos_sin: torch.Tensor
    cache: tuple[torch.Tensor, torch.Tensor]
    group: int
    num_heads: int
    scale: float
    window: int
    soft_cap: float
    chunk: int
    sinks: torch.Tensor | None
    slopes: torch.Tensor | None

    def serves(self, dtype: torch.dtype) -> bool:
        """Whether the kernels can run it for hidden states of ``dtype``; else its operations' references may be needed."""
        products = (self.qkv, self.out, self.gate_up, self.down)
        norms = [norm for norm in (self.before_ffn[0], self.following[0], *self.head_norms[:2]) if norm is not None]
        by_head = [each for each in (self.cos_sin, self.sinks, self.slopes) if each is not None]
        return (
            all(_multiplies(product, dtype) for product in products)
            and is_native(*self.cache, *norms)
            and self.cache[0].dtype is dtype
            and all(each.dtype is torch.float32 and each.is_contiguous() for each in by_head)
            and self.cache[0].shape[3] <= MAX_HEAD_SIZE
        )

    @property
    def widths(self) -> tuple[int, int, int]:
        """Numbers of a token that lie in the three scratch areas: products', what is between them, heads'."""
        attended = self.num_heads * self.cache[0].shape[3]
        wide = max(product.out_features for product in (self.qkv, self.out, self.gate_up, self.down))
        return wide, max(attended, self.down.in_features), attended


GroupTables = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Of a cache group: block tables [S, MB], slots of the tokens' KV [T], lengths [R]; int32."""


class BlockRun:
    """Blocks as C has them; call only when ``available()``, with blocks that all ``serve``.

    Attributes:
        length: how many there are.
    """

    def __init__(self, blocks: Sequence[NativeBlock]) -> None:
        self.length = len(blocks)
        self._kept = list(blocks)  # what C has addresses of
        self._blocks = (_Block * len(blocks))(*map(_block, blocks))
        self._widths = tuple(max(sizes) for sizes in zip(*(block.widths for block in blocks), strict=True))

    def __call__(
        self,
        count: int,
        normed: torch.Tensor,
        residual: torch.Tensor,
        positions: torch.Tensor,
        row_slots: torch.Tensor,
        query_start: torch.Tensor,
        groups: Sequence[GroupTables],
    ) -> torch.Tensor:
        """Run the first ``count`` blocks.

        Args:
            normed, residual: [T, C], contiguous and of the blocks' dtype; the residual is written in place.
            positions: int32 [T], row_slots: int32 [R], query_start: int32 [R + 1].

        Returns:
            [T, C], the residual behind the last of the norms.

        Raises:
            MemoryError: there is none for what the kernels need besides.
        """
        (tokens, hidden), item = normed.shape, normed.element_size()
        places = [0]
        for width in self._widths:
            places.append(places[-1] + (tokens * width * item + 63) // 64 * 64)
        scratch = torch.empty(places[-1] + 64, dtype=torch.uint8)
        first, out = (scratch.data_ptr() + 63) // 64 * 64, torch.empty_like(normed)
        found = [_Group(*(each.data_ptr() for each in group), *group[0].shape) for group in groups]
        tables = (_Group * len(found))(*found)
        step = _Step(
            ctypes.addressof(tables), positions.data_ptr(), row_slots.data_ptr(), query_start.data_ptr(),
            residual.data_ptr(), out.data_ptr(), *(first + place for place in places[:3]), tokens, row_slots.shape[0],
            hidden, normed.dtype is torch.bfloat16, torch.get_num_threads(),
        )  # fmt: skip
        if native().headway_decoder_blocks(self._blocks, count, ctypes.addressof(step), normed.data_ptr()):
            raise MemoryError("decoder blocks: no memory for what their kernels need")
        return out


def _multiplies(product: Product, dtype: torch.dtype) -> bool:
    if isinstance(product, QuantizedLinear):
        return product.takes(dtype)
    packed, bias = product.packed, product.bias
    if packed is None or product.dtype is not dtype or product.gelu:
        return False
    return is_native(packed) and (bias is None or (bias.dtype is dtype and bias.is_contiguous()))


def _product(product: Product) -> _Product:
    bias = None if product.bias is None else product.bias.data_ptr()
    size = product.out_features, product.in_features
    if isinstance(product, QuantizedLinear):
        plan = product.plan
        return _Product(
            product.packed.data_ptr(), bias, ctypes.addressof(plan.parts), plan.num_parts, *size, 0, product.exact
        )
    assert product.packed is not None
    return _Product(product.packed.data_ptr(), bias, None, 0, *size, product.packed.dtype is torch.bfloat16, 0)


def _block(block: NativeBlock) -> Any:
    (num_blocks, block_size, kv_heads, size), tensors = block.cache[0].shape, block.head_norms[:2]
    given = (block.before_ffn[0], block.following[0], *tensors, block.cos_sin, block.sinks, block.slopes, *block.cache)
    return _Block(
        *map(_product, (block.qkv, block.out, block.gate_up, block.down)),
        *(None if each is None else each.data_ptr() for each in given),
        block.group, block.num_heads, kv_heads, size, block.cos_sin.shape[1], block.cos_sin.shape[0], num_blocks, block_size,
        block.window, block.chunk, block.before_ffn[1], block.following[1], block.head_norms[2], block.scale, block.soft_cap, 0,
    )  # fmt: skip
