"""``rope_kv_write``: the reference against complex rotation in f64, the kernel against the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from headway.kernels.rope_kv_write import rope_kv_write
from headway.kernels.testing import (
    assert_close,
    assert_same_cache,
    interpreter_loops,
    kernel_dtypes,
    make_cos_sin,
    make_random,
)

EPS = 1e-6
FP8 = torch.float8_e4m3fn
LENGTH, NUM_BLOCKS = 32, 4


@dataclass(frozen=True)
class Case:
    heads: int
    kv_heads: int
    size: int
    rotary: int
    block_size: int
    norm: bool


CASES = [
    Case(heads=2, kv_heads=2, size=16, rotary=16, block_size=8, norm=False),
    Case(heads=3, kv_heads=1, size=64, rotary=64, block_size=16, norm=True),
    Case(heads=16, kv_heads=2, size=80, rotary=80, block_size=8, norm=True),
    Case(heads=6, kv_heads=3, size=80, rotary=32, block_size=16, norm=True),
    Case(heads=20, kv_heads=20, size=20, rotary=10, block_size=8, norm=False),
    Case(heads=0, kv_heads=2, size=16, rotary=16, block_size=8, norm=False),
]


def make_arguments(
    case: Case, slots: list[int], dtype: torch.dtype, device: str, cached: torch.dtype | None = None
) -> list[Any]:
    tokens = len(slots)
    generator = torch.Generator().manual_seed(5)
    positions = torch.randint(0, LENGTH, (tokens,), generator=generator, dtype=torch.int32).to(device)
    shape = (NUM_BLOCKS, case.block_size, case.kv_heads, case.size)
    cache = torch.full(shape, float("nan"), dtype=cached or dtype, device=device)
    norms = [make_random(case.size, dtype=dtype, device=device, seed=seed) if case.norm else None for seed in (1, 2)]
    return [
        make_random(tokens, (case.heads + 2 * case.kv_heads) * case.size, dtype=dtype, device=device),
        positions,
        make_cos_sin(LENGTH, case.rotary, device),
        *norms,
        EPS,
        torch.tensor(slots, dtype=torch.int32, device=device),
        cache,
        cache.clone(),
        case.heads,
    ]


def run(implementation: Callable[..., Any], arguments: list[Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(q, k_cache, v_cache) without touching the arguments."""
    copies = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
    q = implementation(*copies)
    for index in (0, 1, 2, 6):
        assert torch.equal(copies[index], arguments[index])  # inputs are inputs
    return q, copies[7], copies[8]


@pytest.mark.parametrize("case", CASES)
def test_reference_is_complex_rotation(case: Case) -> None:
    slots = [9, 3, case.block_size * NUM_BLOCKS - 1]
    arguments = make_arguments(case, slots, torch.float32, "cpu")
    q, k_cache, v_cache = run(rope_kv_write.reference, arguments)
    qkv, positions, _, q_norm, k_norm = arguments[:5]
    assert isinstance(qkv, torch.Tensor) and isinstance(positions, torch.Tensor)

    def expected(x: torch.Tensor, norm: object) -> torch.Tensor:
        x = x.double()
        if isinstance(norm, torch.Tensor):
            x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * norm.double()
        half = case.rotary // 2
        angle = positions.double()[:, None] * 10000.0 ** (-torch.arange(half).double() / half)
        turn = torch.polar(torch.ones_like(angle), angle)[:, None]
        turned = torch.complex(x[..., :half], x[..., half : 2 * half]) * turn
        return torch.cat((turned.real, turned.imag, x[..., 2 * half :]), dim=-1).float()

    heads = qkv.view(len(slots), -1, case.size)
    assert_close(q, expected(heads[:, : case.heads], q_norm))
    new_keys = expected(heads[:, case.heads : case.heads + case.kv_heads], k_norm)
    flat_keys, flat_values = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
    for token, slot in enumerate(slots):
        assert_close(flat_keys[slot], new_keys[token])
        assert torch.equal(flat_values[slot], heads[token, case.heads + case.kv_heads :])
    assert int(flat_keys.isnan().all(-1).all(-1).sum()) == NUM_BLOCKS * case.block_size - len(slots)


@pytest.mark.parametrize("dtype", kernel_dtypes())
@pytest.mark.parametrize("case", CASES)
def test_kernel_equals_reference(case: Case, dtype: torch.dtype, device: str) -> None:
    slots = [11, -1, 0, NUM_BLOCKS * case.block_size - 1, NUM_BLOCKS * case.block_size, 2**31 - 1, -7]
    arguments = make_arguments(case, slots, dtype, device)
    expected = run(rope_kv_write.reference, arguments)
    actual = run(rope_kv_write.implementation("cuda"), arguments)
    assert_close(actual[0], expected[0])
    assert_same_cache(actual[1], expected[1])
    assert_same_cache(actual[2], expected[2])


@pytest.mark.parametrize("dtype", kernel_dtypes())
@pytest.mark.parametrize("case", CASES)
def test_cache_of_8_bit_floats(case: Case, dtype: torch.dtype, device: str) -> None:
    slots = [11, -1, 0, NUM_BLOCKS * case.block_size - 1, NUM_BLOCKS * case.block_size, -7]
    arguments = make_arguments(case, slots, dtype, device, FP8)
    arguments[0][0, -1], arguments[0][2, -1] = 1000.0, -1000.0
    expected = run(rope_kv_write.reference, arguments)
    with interpreter_loops():
        actual = run(rope_kv_write.implementation("cuda"), arguments)
    assert_close(actual[0], expected[0])
    assert_same_cache(actual[1], expected[1])
    assert_same_cache(actual[2], expected[2])
    values = actual[2].flatten(0, 1).float()
    assert values[11, -1, -1] == 448.0 and values[0, -1, -1] == -448.0, "what is larger ends at the largest"


def test_reference_rounds_to_8_bits_what_the_wide_cache_holds() -> None:
    arguments = make_arguments(CASES[1], [4, 9], torch.bfloat16, "cpu")
    eight = make_arguments(CASES[1], [4, 9], torch.bfloat16, "cpu", FP8)
    (_, *wide), (_, *narrow) = (run(rope_kv_write.reference, each) for each in (arguments, eight))
    for left, right in zip(wide, narrow, strict=True):
        assert torch.equal(left.to(FP8).float().nan_to_num(9.0), right.float().nan_to_num(9.0))


@pytest.mark.parametrize("case", CASES[:2])
def test_cache_with_heads_first_in_memory(case: Case, device: str) -> None:
    arguments = list(make_arguments(case, [11, -1, 0, 3], torch.float32, device))
    expected = run(rope_kv_write.reference, arguments)
    for at in (7, 8):
        cache = arguments[at]
        assert isinstance(cache, torch.Tensor)
        arguments[at] = cache.transpose(1, 2).contiguous().transpose(1, 2)
    actual = run(rope_kv_write.implementation("cuda"), arguments)
    assert actual[1].stride() == arguments[7].stride()
    assert_close(actual[0], expected[0])
    assert_same_cache(actual[1], expected[1])
    assert_same_cache(actual[2], expected[2])


@pytest.mark.parametrize("which", ["reference", "kernel"])
@pytest.mark.parametrize("slots", [[-1, -1], [-1, 5]])
def test_tokens_without_slot_write_nothing(which: str, slots: list[int], device: str) -> None:
    """Place 0 is the one a careless clamp would hit; it holds data here."""
    arguments = make_arguments(CASES[0], slots, torch.float32, device)
    for cache in arguments[7:9]:
        assert isinstance(cache, torch.Tensor)
        cache.fill_(7.0)
    implementation = rope_kv_write.reference if which == "reference" else rope_kv_write.implementation("cuda")
    _, k_cache, v_cache = run(implementation, arguments)
    for cache in (k_cache, v_cache):
        changed = (cache.flatten(0, 1) != 7.0).any(-1).any(-1).nonzero().flatten().tolist()
        assert changed == [slot for slot in slots if slot >= 0]


def test_positions_are_clamped_to_the_table(device: str) -> None:
    arguments = make_arguments(CASES[1], [1, 2], torch.float32, device)
    arguments[1] = torch.tensor([-3, LENGTH + 5], dtype=torch.int32, device=device)
    inside = list(arguments)
    inside[1] = torch.tensor([0, LENGTH - 1], dtype=torch.int32, device=device)
    kernel = rope_kv_write.implementation("cuda")
    assert torch.equal(run(kernel, arguments)[0], run(kernel, inside)[0])
    assert torch.equal(run(rope_kv_write.reference, arguments)[0], run(rope_kv_write.reference, inside)[0])


def test_no_tokens(device: str) -> None:
    for implementation in (rope_kv_write.reference, rope_kv_write.implementation("cuda")):
        q, k_cache, _ = run(implementation, make_arguments(CASES[0], [], torch.float32, device))
        assert q.shape == (0, 2, 16) and bool(k_cache.isnan().all())
