"""What kernel tests and benchmarks share: one tolerance table and makers of inputs. Not imported by the engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import torch

from headway.core.ints import cdiv

TOLERANCE: Mapping[torch.dtype, tuple[float, float]] = MappingProxyType(
    {torch.float32: (1e-5, 1e-5), torch.float16: (2e-3, 2e-3), torch.bfloat16: (1.6e-2, 1.6e-2)}
)
"""dtype -> (absolute, relative) error allowed at values of order one: two units in the last place, reordered sums."""


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal shape and dtype, values within the table's tolerance; NaN equals nothing."""
    absolute, relative = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, atol=absolute, rtol=relative)


def assert_same_cache(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """NaN in the same places, values close: of 8-bit floats a step apart at most, since what is rounded to them may differ in
    its last bit."""
    assert torch.equal(actual.float().isnan(), expected.float().isnan()), "other places are written"
    if actual.dtype != torch.float8_e4m3fn:
        assert_close(actual.nan_to_num(), expected.nan_to_num())
        return
    assert expected.dtype == actual.dtype
    steps = [x.view(torch.int8).int() for x in (actual, expected)]  # magnitudes in order, sign apart
    steps = [torch.where(x < 0, -(x & 127), x) for x in steps]
    apart = (steps[0] - steps[1]).abs()
    assert int(apart.max()) <= 1, f"{int((apart > 1).sum())} of {apart.numel()} places are more than a step apart"


def kernel_dtypes() -> list[torch.dtype]:
    """What kernels are tested with: Triton's interpreter cuts bf16 off where hardware rounds, so only CUDA tests it."""
    return [torch.float32, torch.float16, *([torch.bfloat16] if torch.cuda.is_available() else [])]


@contextmanager
def interpreter_loops() -> Iterator[None]:
    """Let Triton's interpreter run ``range`` over device numbers, and convert 8-bit floats.

    Triton 3.6 turns its one-element arrays into loop bounds with ``int(array)``, which numpy refuses from 2.4 on. Its 8-bit
    floats lose carries from the fraction into an odd exponent when they are rounded, and their NaN reads 480.
    """
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patch_tensor(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    convert = interpreter._convert_float

    def convert_float(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if target.name == "fp8e4nv":
            return torch.from_numpy(data).float().to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        if source.name == "fp8e4nv":
            wide = torch.from_numpy(data).view(torch.float8_e4m3fn).float()
            return (wide.half() if target.name == "fp16" else wide).numpy()
        return convert(data, source, target, mode)

    with (
        patch.object(interpreter, "_patch_lang_tensor", patch_tensor),
        patch.object(interpreter, "_convert_float", convert_float),
    ):
        yield


def make_random(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> torch.Tensor:
    """Standard normal values, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(device)


def make_cos_sin(length: int, size: int, device: str, base: float = 10000.0) -> torch.Tensor:
    """Rotary table f32 [length, size] = (cos [size / 2], sin [size / 2])."""
    frequency = base ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    return torch.cat((angle.cos(), angle.sin()), dim=1).float().to(device)


@dataclass(frozen=True, slots=True)
class PagedInputs:
    """Tensor arguments of ``paged_attention`` for some rows, and the numbers that describe them.

    Attributes:
        q: [T, H, D]; k_cache, v_cache: [NB, bs, KH, D]; block_tables: [S, MB]; row_slots: [R];
        query_start: [R + 1]; seq_lens: [R]; arrivals: [R, KH].
        num_decode_rows, max_query_len, max_seq_len_bound, decode_rows: as the op takes them.
    """

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_tables: torch.Tensor
    row_slots: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    arrivals: torch.Tensor
    num_decode_rows: int
    max_query_len: int
    max_seq_len_bound: int
    decode_rows: torch.Tensor | None = None

    def arguments(
        self,
        scale: float,
        window: int = 0,
        soft_cap: float = 0.0,
        chunk: int = 0,
        sinks: torch.Tensor | None = None,
        slopes: torch.Tensor | None = None,
    ) -> tuple[object, ...]:
        """The op's arguments, in order."""
        return (
            self.q, self.k_cache, self.v_cache, self.block_tables, self.row_slots, self.query_start, self.seq_lens,
            self.arrivals, scale, window, soft_cap, self.num_decode_rows, self.max_query_len, self.max_seq_len_bound,
            self.decode_rows, chunk, sinks, slopes,
        )  # fmt: skip


def make_paged_inputs(
    rows: Sequence[tuple[int, int]],
    *,
    num_decode_rows: int,
    heads: tuple[int, int],
    size: int,
    block_size: int,
    dtype: torch.dtype,
    device: str,
    pad_rows: int = 0,
    pad_tokens: int = 0,
    bound: int | None = None,
    on_device: bool = False,
    heads_first: bool = False,
    cached: torch.dtype | None = None,
) -> PagedInputs:
    """Random inputs whose blocks are scattered over the cache; cache places that no row owns hold NaN.

    Args:
        rows: (query length, context length including it) per row; context 0 makes a zombie.
        heads: (query heads, KV heads).
        pad_rows, pad_tokens: padding behind the rows.
        bound: max_seq_len_bound and width of the block tables in tokens; default: the longest context.
        on_device: draw the large tensors on the device and fill unowned places too (benchmarks).
        cached: dtype of the caches, by default the queries'.
    """
    longest = max((context for _, context in rows), default=1)
    bound = max(longest, 1) if bound is None else bound
    blocks = [cdiv(context, block_size) for _, context in rows]
    num_slots, num_blocks = len(rows) + 2, sum(blocks) + 2
    generator = torch.Generator().manual_seed(1)
    order = (torch.randperm(num_blocks - 1, generator=generator) + 1).to(torch.int32)
    slots = torch.randperm(num_slots, generator=generator)[: len(rows)].to(torch.int32)
    tables = torch.zeros(num_slots, cdiv(bound, block_size), dtype=torch.int32)
    cache_shape = (num_blocks, block_size, heads[1], size)
    owned = torch.zeros(num_blocks, block_size, dtype=torch.bool)
    used = 0
    for slot, count, (_, context) in zip(slots.tolist(), blocks, rows, strict=True):
        mine = order[used : used + count]
        tables[slot, :count] = mine
        owned[mine.long()] = (torch.arange(count * block_size) < context).view(count, block_size)
        used += count
    lens = torch.tensor([0, *(query for query, _ in rows)], dtype=torch.int32)
    starts = torch.cat((lens.cumsum(0), lens.sum().expand(pad_rows))).to(torch.int32)
    num_tokens = int(lens.sum()) + pad_tokens
    pads = torch.full((pad_rows,), -1, dtype=torch.int32)
    contexts = torch.tensor([context for _, context in rows], dtype=torch.int32)
    caches = []
    for seed in (2, 3):
        if on_device:
            caches.append(torch.randn(cache_shape, dtype=dtype, device=device))
        else:
            cache = make_random(*cache_shape, dtype=dtype, device="cpu", seed=seed)
            caches.append(cache.masked_fill(~owned[..., None, None], float("nan")).to(device))
    caches = [cache.to(cached or dtype) for cache in caches]
    if heads_first:  # in memory [NB, KH, bs, D], as ``CachePool`` keeps it on CUDA
        caches = [cache.transpose(1, 2).contiguous().transpose(1, 2) for cache in caches]
    return PagedInputs(
        q=make_random(num_tokens, heads[0], size, dtype=dtype, device=device, seed=4),
        k_cache=caches[0],
        v_cache=caches[1],
        block_tables=tables.to(device),
        row_slots=torch.cat((slots, pads)).to(device),
        query_start=starts.to(device),
        seq_lens=torch.cat((contexts, torch.zeros_like(pads))).to(device),
        arrivals=torch.zeros(len(rows) + pad_rows, heads[1], dtype=torch.int32, device=device),
        num_decode_rows=num_decode_rows,
        max_query_len=max((query for query, _ in rows), default=1),
        max_seq_len_bound=bound,
    )
