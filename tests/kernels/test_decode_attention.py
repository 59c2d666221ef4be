"""``decode_attention``: the single launch against its two halves, caches included."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch

from headway.kernels.decode_attention import decode_attention
from headway.kernels.paged_attention import paged_attention
from headway.kernels.paged_attention.hopper.decode_tiles import (
    RESERVED,
    SHARED,
    THREAD_REGISTERS,
    Heads,
    early_tile,
    program_bytes,
)
from headway.kernels.paged_attention.hopper.early_decode import SIZES, serves, turned_tile
from headway.kernels.paged_attention.tiles import choose_splits
from headway.kernels.rope_kv_write import rope_kv_write
from headway.kernels.testing import (
    assert_close,
    assert_same_cache,
    interpreter_loops,
    kernel_dtypes,
    make_cos_sin,
    make_paged_inputs,
    make_random,
)
from tests.kernels.pairs import pairs

ROWS = [1, 37, 0, 130, 64, 65]  # context lengths; 64 ends with a tile, 65 begins one with its newest token
CACHES = (7, 8)
SHAPES: list[dict[str, Any]] = [
    {},
    {"heads": (6, 2), "size": 128, "dtype": torch.float16},
    {"size": 64, "dtype": torch.float16},
    {"heads": (4, 1), "size": 256, "dtype": torch.float16},
    {"cached": torch.float8_e4m3fn},
    {"heads": (6, 2), "size": 128, "dtype": torch.float16, "cached": torch.float8_e4m3fn},
]
"""Of the kernel for all devices and, those of 16 bits, of the one for Hopper."""
shapes = pytest.mark.parametrize(
    "shape", SHAPES, ids=["any", "hopper128", "hopper64", "hopper256", "any_fp8", "hopper_fp8"]
)


@pytest.fixture(autouse=True)
def loops() -> Iterator[None]:
    with interpreter_loops():
        yield


def make(
    contexts: list[int],
    device: str,
    *,
    heads: tuple[int, int] = (6, 2),
    size: int = 16,
    rotary: int | None = None,
    norms: bool = True,
    dtype: torch.dtype = torch.float32,
    window: int = 0,
    soft_cap: float = 0.0,
    pad_rows: int = 0,
    chunk: int = 0,
    sinks: bool = False,
    slopes: bool = False,
    shares: bool = False,
    **changes: Any,
) -> list[Any]:
    """Arguments whose caches hold NaN at the newest token of each row, which the op is to write; not if it ``shares``."""
    inputs = make_paged_inputs(
        [(1, context) for context in contexts], num_decode_rows=len(contexts), heads=heads, size=size,
        **{"block_size": 8, "pad_rows": pad_rows, "pad_tokens": pad_rows, "heads_first": True, "bound": 200, **changes},
        dtype=dtype, device=device,
    )  # fmt: skip
    block_size, kv_slots, positions = inputs.k_cache.shape[1], [], []
    for context, slot in zip(contexts, inputs.row_slots.tolist(), strict=False):
        newest = context - 1
        block = int(inputs.block_tables[slot, newest // block_size]) if context else 0
        kv_slots.append(block * block_size + newest % block_size if context else -1)
        positions.append(max(newest, 0))
        if context and not shares:
            inputs.k_cache[block, newest % block_size] = inputs.v_cache[block, newest % block_size] = float("nan")
    ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
    projected = (heads[0] + (0 if shares else 2 * heads[1])) * size
    qkv = make_random(len(contexts) + pad_rows, projected, dtype=dtype, device=device, seed=7)
    q_norm, k_norm = (make_random(size, dtype=dtype, device=device, seed=seed) if norms else None for seed in (8, 9))
    return [
        qkv, torch.tensor([*positions, *[0] * pad_rows], **ints), make_cos_sin(256, rotary or size, device),
        q_norm, k_norm, 1e-6, torch.tensor([*kv_slots, *[-1] * pad_rows], **ints), inputs.k_cache, inputs.v_cache, heads[0],
        inputs.block_tables, inputs.row_slots, inputs.query_start, inputs.seq_lens, inputs.arrivals,
        size**-0.5, window, soft_cap, inputs.max_seq_len_bound, chunk,
        make_random(heads[0], dtype=torch.float32, device=device, seed=11) if sinks else None,
        make_random(heads[0], dtype=torch.float32, device=device, seed=12).abs() / 4 if slopes else None, 1, shares,
    ]  # fmt: skip


def check(arguments: list[Any]) -> torch.Tensor:
    """The kernel gives what the reference gives, writes the caches alike and leaves everything else as it was."""
    cpu = [a.cpu().clone() if isinstance(a, torch.Tensor) else a for a in arguments]
    before = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
    expected = decode_attention.reference(*cpu)
    actual = decode_attention.implementation("cuda")(*arguments)
    rounded = arguments[7].dtype is torch.float8_e4m3fn and not arguments[23]
    if rounded:  # the newest key may be rounded the other way, and is used as it is stored
        q = rope_kv_write.reference(*(a.clone() if isinstance(a, torch.Tensor) else a for a in cpu[:10]))
        stored = [cache.cpu() for cache in arguments[7:9]]
        expected = paged_attention.reference(q, *stored, *cpu[10:18], len(q), 1, cpu[18], None, *cpu[19:22])
    assert_close(actual, expected.to(actual.device))
    for index, (old, new) in enumerate(zip(before, arguments, strict=True)):
        if index in CACHES:
            assert_same_cache(new, cpu[index].to(new.device))
        elif isinstance(old, torch.Tensor):
            assert torch.equal(old, new)
    return actual


def test_reference_is_its_two_halves(device: str) -> None:
    arguments = [a.cpu().clone() if isinstance(a, torch.Tensor) else a for a in make(ROWS, device, window=30)]
    again = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
    q = rope_kv_write.reference(*again[:10])
    halves = paged_attention.reference(q, *again[7:9], *again[10:18], len(q), 1, again[18])
    assert torch.equal(decode_attention.reference(*arguments), halves)
    assert torch.equal(arguments[7].nan_to_num(), again[7].nan_to_num())


@pytest.mark.parametrize("dtype", kernel_dtypes())
@pytest.mark.parametrize("norms", [True, False])
@pytest.mark.parametrize("size", [16, 128])
def test_kernel_equals_reference(size: int, norms: bool, dtype: torch.dtype, device: str) -> None:
    check(make(ROWS, device, norms=norms, dtype=dtype, size=size))


@pytest.mark.parametrize("dtype", kernel_dtypes())
@pytest.mark.parametrize(("heads", "size"), [((2, 2), 32), ((6, 2), 64), ((8, 1), 128), ((20, 1), 16)])
def test_heads_and_sizes(heads: tuple[int, int], size: int, dtype: torch.dtype, device: str) -> None:
    check(make([70, 5], device, heads=heads, size=size, dtype=dtype))


@pytest.mark.parametrize(("size", "rotary"), [(20, 20), (32, 16), (8, 8)])
def test_heads_that_are_not_rotated_whole_take_two_launches(size: int, rotary: int, device: str) -> None:
    check(make([70, 5], device, size=size, rotary=rotary))


@pytest.mark.parametrize(("shape", "sizes"), pairs(SHAPES, [(1, 8), (7, 16), (64, 8), (65, 64), (1000, 16)], 2))
def test_windows_and_block_sizes(shape: dict[str, Any], sizes: tuple[int, int], device: str) -> None:
    window, block_size = sizes
    check(make([150, 64, 0, 65, 1], device, window=window, block_size=block_size, **shape))


@shapes
@pytest.mark.parametrize("window", [0, 30])
def test_soft_cap(window: int, shape: dict[str, Any], device: str) -> None:
    check(make(ROWS, device, window=window, soft_cap=0.7, **shape))


@shapes
def test_many_splits(shape: dict[str, Any], device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A split each tile: one has the newest token only, and it writes it once."""
    for module in ("launch", "hopper.early_decode"):
        monkeypatch.setattr(f"headway.kernels.paged_attention.{module}.num_sms", lambda device: 132)
    check(make([1025, 40, 1], device, **{**shape, "heads": (2, 1)}, bound=1100))


@shapes
def test_many_rows_fill_the_device(shape: dict[str, Any], device: str) -> None:
    """No row is split then but the long one."""
    others = 250 if device == "cuda" else 6
    check(make([2100, *[37] * others], device, **shape, bound=2200))


@shapes
def test_padding_and_zombies_give_zeros_and_write_nothing(shape: dict[str, Any], device: str) -> None:
    arguments = make([0, 33], device, pad_rows=3, **shape)
    before = arguments[7].clone()
    out = check(arguments)
    assert not out[0].any() and not out[2:].any() and bool(out[1].any())
    changed = (arguments[7].float().nan_to_num(3.0) != before.float().nan_to_num(3.0)).flatten(2).any(2)
    assert int(changed.sum()) == 1


@shapes
def test_a_kv_slot_outside_the_cache_writes_nothing(shape: dict[str, Any], device: str) -> None:
    arguments = make([33, 12], device, **shape)
    arguments[6][0] = arguments[7].shape[0] * arguments[7].shape[1]
    arguments[6][1] = -1
    before = arguments[7].clone()
    decode_attention.implementation("cuda")(*arguments)
    assert torch.equal(before.float().nan_to_num(), arguments[7].float().nan_to_num())


def check_saturation(shape: dict[str, Any], device: str) -> None:
    """What is beyond 8-bit floats is stored as their largest."""
    arguments = make([9, 1], device, norms=False, **{**shape, "cached": torch.float8_e4m3fn})
    heads, (kv_heads, size) = arguments[9], arguments[7].shape[2:]
    new = arguments[0].view(2, heads + 2 * kv_heads, size)[:, heads:]
    new[0], new[1] = 1000.0, -1000.0
    check(arguments)
    written = [cache.float().flatten(0, 1)[arguments[6].long()] for cache in arguments[7:9]]
    assert torch.equal(written[1][0].abs(), torch.full_like(written[1][0], 448.0))
    assert all(not each.isnan().any() and each.abs().max() == 448.0 for each in written)


@shapes
def test_what_is_beyond_8_bits_ends_at_their_largest(shape: dict[str, Any], device: str) -> None:
    check_saturation(shape, device)


def test_no_rows(device: str) -> None:
    assert decode_attention.implementation("cuda")(*make([], device)).shape == (0, 6, 16)


def test_meta_gives_shapes(device: str) -> None:
    meta = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in make([4, 9], device)]
    assert decode_attention(*meta).shape == (2, 6, 16)


def test_tiles_of_the_kernel_for_hopper() -> None:
    """Every number of programs has a tile that fits a processor; up to four a processor run at once, whole or in halves."""
    gluon = pytest.importorskip("triton.experimental.gluon", reason="Gluon came with Triton 3.4")
    assert gluon and tuple(THREAD_REGISTERS) == SIZES
    for size, group, itemsize, width in product(SIZES, range(1, 9), (1, 2), (1, 4)):
        heads = Heads(size, group, itemsize, width)
        assert program_bytes(turned_tile(heads), heads) <= SHARED - RESERVED
        for programs in (*range(1, 1200), 1500, 2048, 4096):
            tile = early_tile(programs, heads, 132)
            assert program_bytes(tile, heads) <= SHARED - RESERVED, (heads, programs)
            pieces = programs * (2 if tile.residents * 132 > programs else 1)
            if 132 < programs <= 4 * 132 and size < 256 and width == 1:
                resident = min(
                    SHARED // (program_bytes(tile, heads) + RESERVED), 65536 // (64 * THREAD_REGISTERS[size])
                )
                assert pieces <= resident * 132, (heads, programs)


def test_halves_of_rows_fill_a_wave() -> None:
    """Numbers of programs between those that were measured, and shapes that were not."""
    for programs, heads in ((200, Heads(128, 5, 2)), (390, Heads(64, 3, 2)), (300, Heads(128, 1, 1))):
        tile = early_tile(programs, heads, 132)
        splits, _ = choose_splits(programs, 8192, tile.block_n, 132, tile.residents)
        assert (splits, tile.cluster, tile.num_warps) == (2, 2, 2)
    assert early_tile(2000, Heads(128, 5, 2), 132).num_warps == 1
    assert early_tile(64, Heads(128, 2, 2), 132).cluster == 2 and early_tile(8, Heads(128, 2, 2), 132).cluster == 8


def test_where_the_kernel_for_hopper_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "headway.kernels.paged_attention.hopper.early_decode.runs_gluon", lambda device: device.type == "cuda"
    )
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert serves(128, 8, torch.bfloat16, torch.bfloat16, cuda) and serves(64, 1, torch.float16, torch.float16, cuda)
    assert not serves(128, 9, torch.bfloat16, torch.bfloat16, cuda), "a product has eight columns"
    assert not serves(80, 2, torch.bfloat16, torch.bfloat16, cuda)
    assert not serves(128, 2, torch.float32, torch.float32, cuda)
    assert serves(128, 2, torch.bfloat16, torch.float8_e4m3fn, cuda)
    assert not serves(128, 2, torch.float32, torch.float8_e4m3fn, cuda)
    assert not serves(128, 2, torch.bfloat16, torch.float16, cuda)
    assert not serves(128, 2, torch.bfloat16, torch.bfloat16, cpu)
