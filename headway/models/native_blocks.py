"""Which blocks of a decoder run as one native call on a CPU, and that call.

A block does if it is what ``kernels.cpu.layers.NativeBlock`` says: attention of the plain kind and a gated feed-forward block,
each behind one RMS norm. All others run operation by operation, with the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headway.core.switches import FUSED_LAYERS, is_on
from headway.kernels.cpu.layers import BlockRun, NativeBlock, Product
from headway.models.blocks import Block
from headway.models.interface import Want
from headway.models.layers.activation import Gate
from headway.models.layers.attention import Attention
from headway.models.layers.junction import ProjectOut, Stream
from headway.models.layers.linear import Linear
from headway.models.layers.mlp import MLP
from headway.models.layers.norm import RMSNorm
from headway.state.batch import GroupBatch, StepBatch
from headway.state.cache_pool import CachePool, LayerCache


class NativeBlocks:
    """The first blocks of a decoder, as many as can run natively; none on other devices.

    Args:
        blocks: all of the decoder's, linked.
        first: layer of the first of them.
    """

    def __init__(self, blocks: Sequence[Block], first: int, dtype: torch.dtype) -> None:
        self._blocks, self._first, self._dtype = list(blocks) if is_on(FUSED_LAYERS) else [], first, dtype
        self._pool: CachePool | None = None
        self._run: BlockRun | None = None

    def __call__(self, stream: Stream, batch: StepBatch, caches: CachePool, want: Want, end: int) -> tuple[int, Stream]:
        """Run what can of the layers before ``end``.

        Returns:
            how many ran, and the stream behind them.
        """
        count = self._count(stream, batch, caches, want, end)
        if not count or self._run is None:
            return 0, stream
        assert stream.normed is not None
        groups = [_tables(group) for group in batch.groups]
        given = (stream.normed, stream.residual, batch.positions, batch.row_slots, batch.query_start, groups)
        return count, Stream(stream.residual, self._run(count, *given))

    def _count(self, stream: Stream, batch: StepBatch, caches: CachePool, want: Want, end: int) -> int:
        x, residual = stream.normed, stream.residual
        if not self._blocks or want.auxiliary or want.layers is not None or batch.ends is not None:
            return 0
        if type(x) is not torch.Tensor or not x.is_cpu or not _plain(x, residual, dtype=self._dtype):
            return 0
        of_rows = (batch.positions, batch.row_slots, batch.query_start)
        if batch.cos_sin is not None or not _plain(
            *of_rows, *(each for group in batch.groups for each in _tables(group))
        ):
            return 0
        if self._pool is not caches:
            self._pool, self._run = caches, self._made(caches)
        return 0 if self._run is None else min(self._run.length, end - self._first)

    def _made(self, caches: CachePool) -> BlockRun | None:
        found: list[NativeBlock] = []
        for nth, block in enumerate(self._blocks):
            made = native_block(block, caches.layers[self._first + nth])
            if made is None or not made.serves(self._dtype):
                break
            found.append(made)
        return BlockRun(found) if found else None


def native_block(block: Block, cache: LayerCache) -> NativeBlock | None:
    """The block with its cache as C runs it, None if it is of another kind."""
    mixer, ffn, spec = block.mixer, block.ffn, block.spec
    if type(block) is not Block or type(mixer) is not Attention or type(ffn) is not MLP or spec.parallel or spec.post:
        return None
    norms, attend = [_norm_behind(each) for each in (block.out_of_mixer, block.out_of_ffn)], mixer.attend
    products = [_product(each) for each in (mixer.qkv, mixer.out, ffn.gate_up, ffn.down)]
    head_norms = [norm for norm in (mixer.q_norm, mixer.k_norm) if norm is not None]
    plain = mixer.is_plain and isinstance(ffn.act, Gate) and ffn.act.name == "silu"
    if not plain or None in norms or None in products or not all(isinstance(norm, RMSNorm) for norm in head_norms):
        return None
    qkv, out, gate_up, down = (product for product in products if product is not None)
    before_ffn, following = (norm for norm in norms if norm is not None)
    q_norm, k_norm = (None if norm is None else norm.weight.detach() for norm in (mixer.q_norm, mixer.k_norm))
    chunk, sinks, slopes = attend.extras
    k_cache, v_cache = cache
    return NativeBlock(
        qkv=qkv,
        out=out,
        gate_up=gate_up,
        down=down,
        before_ffn=before_ffn,
        following=following,
        head_norms=(q_norm, k_norm, mixer.eps),
        cos_sin=mixer.cos_sin,
        cache=(k_cache, v_cache),
        group=mixer.group,
        num_heads=attend.num_heads,
        scale=attend.scale,
        window=attend.window,
        soft_cap=attend.soft_cap,
        chunk=chunk,
        sinks=sinks,
        slopes=slopes,
    )


def _norm_behind(project: ProjectOut) -> tuple[torch.Tensor, float] | None:
    """Of a product that is added to the residual as it is: the norm that follows, None if there is more or none."""
    norm = project.next_norm
    if not isinstance(norm, RMSNorm) or project.after is not None or project.multiplier != 1.0 or project.replaces:
        return None
    return norm.weight.detach(), norm.eps


def _product(linear: Linear) -> Product | None:
    return linear.packed if linear.group is None else None


def _tables(group: GroupBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return group.block_tables, group.kv_slots, group.seq_lens


def _plain(*tensors: torch.Tensor, dtype: torch.dtype = torch.int32) -> bool:
    return all(tensor.dtype is dtype and tensor.is_contiguous() for tensor in tensors)
