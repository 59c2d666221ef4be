"""The random numbers of ``sample``: the kernel's bits are the reference's, and they look random."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl

from headway.kernels.sample.rng import log_exponential, token_bits
from headway.kernels.sample.triton_race import log2_exponential
from headway.kernels.sample.triton_race import token_bits as kernel_token_bits


@triton.jit
def _bits_kernel(seeds, positions, out, log_out, vocab, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    token = tl.arange(0, BLOCK)
    bits = kernel_token_bits(tl.load(seeds + 2 * row), tl.load(seeds + 2 * row + 1), tl.load(positions + row), token)
    tl.store(out + row * vocab + token, bits.to(tl.int32, bitcast=True), mask=token < vocab)
    tl.store(log_out + row * vocab + token, log2_exponential(bits), mask=token < vocab)


def _seeds(count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(-(2**31), 2**31, (count, 2), generator=generator).to(torch.int32)


def test_kernel_bits_equal_the_reference(device: str) -> None:
    seeds, vocab = _seeds(20), 4097
    seeds[0], seeds[1], seeds[2] = 0, -1, torch.tensor([-(2**31), 2**31 - 1])
    positions = torch.arange(20, dtype=torch.int32) * 7919
    positions[3] = 2**31 - 1
    out = torch.empty(20, vocab, dtype=torch.int32, device=device)
    logs = torch.empty(20, vocab, device=device)
    _bits_kernel[(20,)](seeds.to(device), positions.to(device), out, logs, vocab, BLOCK=8192)
    bits = token_bits(seeds, positions, vocab)
    assert torch.equal(out.cpu(), bits)
    natural = (logs.cpu().double() + math.log2(math.log(2))) * math.log(2)
    torch.testing.assert_close(natural, log_exponential(bits).double(), rtol=2e-6, atol=4e-6)


def test_exponential_is_accurate_at_both_ends() -> None:
    bits = torch.tensor([0, 1, 1000, 2**20, 2**26, 2**28, 2**31 - 1, -(2**31), -2, -1], dtype=torch.int32)
    logs = log_exponential(bits).tolist()
    for bit, log in zip(bits.tolist(), logs, strict=True):
        u = min((bit % 2**32 + 0.5) / 2**32, 1 - 2.0**-24)
        assert log == pytest.approx(math.log(-math.log1p(-u)), rel=2e-6, abs=2e-6)


def _chi_square(observed: torch.Tensor, expected: float) -> float:
    """Standardised: about normal with variance 1 for many cells."""
    cells = observed.numel()
    return float((((observed.double() - expected) ** 2 / expected).sum() - (cells - 1)) / math.sqrt(2 * (cells - 1)))


def _byte(bits: torch.Tensor, index: int) -> torch.Tensor:
    return (bits >> (8 * index)) & 255


@pytest.mark.parametrize("byte", range(4))
def test_bits_are_uniform(byte: int) -> None:
    """Over neighbouring tokens, positions and seeds, all at once and for each alone."""
    small = torch.stack((torch.arange(64), torch.zeros(64)), 1).to(torch.int32)  # seeds 0, 1, 2, ...
    over_seeds = token_bits(small, torch.full((64,), 5, dtype=torch.int32), 4096)
    over_positions = token_bits(small[:1].expand(64, 2), torch.arange(64, dtype=torch.int32), 4096)
    for bits in (over_seeds, over_positions):
        counts = torch.bincount(_byte(bits, byte).flatten(), minlength=256)
        assert abs(_chi_square(counts, bits.numel() / 256)) < 5


@pytest.mark.parametrize("byte", range(4))
@pytest.mark.parametrize("axis", ["token", "position", "seed", "high word"])
def test_neighbours_are_independent(axis: str, byte: int) -> None:
    """Chi-square of the pair (4 bits here, 4 bits at the neighbour), and the correlation of single bits."""
    rows, vocab = 65, 4096
    seeds, positions = torch.full((rows, 2), 11, dtype=torch.int32), torch.full((rows,), 40, dtype=torch.int32)
    step = torch.arange(rows, dtype=torch.int32)
    if axis == "seed":
        seeds[:, 0] += step
    elif axis == "high word":
        seeds[:, 1] += step
    else:
        positions += step
    bits = token_bits(seeds, positions, vocab)
    one, two = (bits[:, :-1], bits[:, 1:]) if axis == "token" else (bits[:-1], bits[1:])
    pair = (_byte(one, byte) >> 4) * 16 + (_byte(two, byte) >> 4)
    assert abs(_chi_square(torch.bincount(pair.flatten(), minlength=256), pair.numel() / 256)) < 5
    for bit in range(0, 32, 5):
        agree = float(((one ^ two) >> bit & 1).double().mean())
        assert abs(agree - 0.5) < 5 * 0.5 / math.sqrt(one.numel())


def test_rows_do_not_repeat_each_other() -> None:
    """No two of many (seed, position) rows share or shift their noise."""
    seeds = torch.stack((torch.arange(40), torch.arange(40) % 3), 1).to(torch.int32).repeat_interleave(40, 0)
    bits = token_bits(seeds, torch.arange(40, dtype=torch.int32).repeat(40), 64)
    values = bits.flatten()
    # 102,400 draws of 32 bits: 1.2 equal pairs expected; shared or shifted rows would give at least 63.
    assert values.numel() - values.unique().numel() < 12


def test_flipping_one_input_bit_flips_half_of_the_output() -> None:
    base = _seeds(32)
    positions = torch.arange(32, dtype=torch.int32) + 100
    reference = token_bits(base, positions, 256)
    for bit in range(31):
        for changed, moved in (
            (base ^ torch.tensor([1 << bit, 0], dtype=torch.int32), positions),
            (base ^ torch.tensor([0, 1 << bit], dtype=torch.int32), positions),
            (base, positions ^ (1 << bit)),
        ):
            flipped = reference ^ token_bits(changed, moved, 256)
            share = sum(float(((flipped >> i) & 1).double().mean()) for i in range(32)) / 32
            assert abs(share - 0.5) < 0.01
