"""The native kernels compiled for each instruction set, run here if this CPU has it, else in an emulator, else only compiled.

`make emulators` installs what this needs on Debian. Emulators know no AVX-512: those sets run where the CPU has them.
"""

from __future__ import annotations

import functools
import platform
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from headway.kernels.cpu import loader
from headway.kernels.cpu.instructions import SETS, runs_here
from headway.kernels.gather_logprobs import gather_logprobs
from headway.kernels.paged_attention import paged_attention
from headway.kernels.rms_norm import add_rms_norm
from headway.kernels.rope_kv_write import rope_kv_write
from headway.kernels.sample import RANDOM, TOP, sample
from headway.kernels.silu_mul import silu_mul
from headway.kernels.testing import assert_close, make_cos_sin, make_paged_inputs, make_random

pytestmark = pytest.mark.slow
BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
COMPILERS = {"x86_64": "x86_64-linux-gnu-gcc", "aarch64": "aarch64-linux-gnu-gcc"}
OPTIMISED = {"avx2": "-O1", "avx512_bf16": "-O1", "neon_bf16": "-O1"}
"""Sets whose compiler follows the flow of values, of which it can warn then, too; the others take two thirds of the time."""
HINT = "(make emulators installs it on Debian)"


class Machine:
    """The driver compiled for one instruction set."""

    def __init__(self, folder: Path, name: str) -> None:
        chosen = SETS[name]
        compiler = "gcc" if platform.machine() == chosen.machine else COMPILERS[chosen.machine]
        if shutil.which(compiler) is None:
            pytest.skip(f"{compiler} is not installed {HINT}")
        sources = [str(path) for path in sorted(loader.source_folder().glob("*.c"))]
        driver = str(Path(__file__).parent / "emulated_driver.c")
        self.program = str(folder / "driver")
        flags = [flag for flag in loader.FLAGS if flag not in ("-shared", "-fPIC")]
        flags += [OPTIMISED.get(name, "-O0"), "-Wall", "-Wextra", "-Wno-unused-parameter", "-Werror", "-static"]
        subprocess.run(
            [compiler, *chosen.flags, *flags, *sources, driver, "-o", self.program, "-lm"],
            check=True, timeout=300,
        )  # fmt: skip
        self.emulator = [] if runs_here(chosen) else [f"qemu-{chosen.machine}", "-cpu", "max"]

    def run(
        self, operation: str, numbers: list[int], reals: list[float], *arrays: torch.Tensor, gives: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """What the operation leaves in the arrays that it gives back, which have the shapes and dtypes of ``gives``."""
        if self.emulator and shutil.which(self.emulator[0]) is None:
            pytest.skip(f"{self.emulator[0]} is not installed {HINT}")
        packed = [struct.pack(f"{len(numbers)}q", *numbers), struct.pack(f"{len(reals)}d", *reals)]
        packed += [array.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for array in arrays]
        data = b"".join(struct.pack("q", len(item)) + item for item in packed)
        done = subprocess.run(
            [*self.emulator, self.program, operation], input=data, capture_output=True, timeout=200, check=False
        )
        assert done.returncode == 0, done.stderr.decode(errors="replace")[-500:]
        results, at = [], 0
        for like in gives:
            part = bytearray(done.stdout[at : at + like.numel() * like.element_size()])
            results.append(torch.frombuffer(part, dtype=like.dtype).view(like.shape))
            at += len(part)
        assert at == len(done.stdout)
        return results


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Machine]:
    """The machine of an instruction set; each is compiled once, which takes ten seconds."""
    return functools.cache(lambda name: Machine(tmp_path_factory.mktemp(name), name))


@pytest.fixture(
    scope="module", params=[name for name in SETS if not name.startswith("avx512") or runs_here(SETS[name])]
)
def machine(request: pytest.FixtureRequest, built: Callable[[str], Machine]) -> Machine:
    return built(request.param)


@pytest.mark.parametrize("name", [name for name in SETS if name.startswith("avx512")])
def test_avx512_compiles_without_a_warning(name: str, built: Callable[[str], Machine]) -> None:
    built(name)


@BOTH
def test_linear(machine: Machine, dtype: torch.dtype) -> None:
    """A row alone, a few, and more than a block of weights is widened for; the same bits in each."""
    outputs, inputs = 70, 330
    weight = (make_random(outputs, inputs, dtype=torch.float32, device="cpu", seed=1) / inputs**0.5).to(dtype)
    bias, x = (
        make_random(outputs, dtype=dtype, device="cpu", seed=2),
        make_random(29, inputs, dtype=dtype, device="cpu"),
    )
    packed = torch.full((3, inputs, 32), float("nan"), dtype=dtype)

    def run(rows: int) -> torch.Tensor:
        y = torch.full((rows, outputs), float("nan"), dtype=dtype)
        numbers = [rows, outputs, inputs, dtype is torch.bfloat16, weight.dtype is torch.bfloat16]
        return machine.run("linear", numbers, [0.0], x[:rows], weight, bias, packed, y, gives=[y])[0]

    whole = run(29)
    assert_close(whole, F.linear(x, weight, bias))
    for rows in (1, 3, 13):
        assert torch.equal(run(rows), whole[:rows])
    if dtype is torch.float32:  # weights that bfloat16 holds give the same bits from panels of either kind
        weight = weight.bfloat16().float()
        whole = run(29)
        weight, packed = weight.bfloat16(), packed.bfloat16()
        for rows in (1, 3, 13, 29):
            assert torch.equal(run(rows), whole[:rows])


@BOTH
def test_norm_and_activation(machine: Machine, dtype: torch.dtype) -> None:
    x, residual = (make_random(5, 83, dtype=dtype, device="cpu", seed=seed) for seed in (0, 1))
    weight, out, is_bf = (
        make_random(83, dtype=dtype, device="cpu", seed=2),
        torch.empty_like(x),
        dtype is torch.bfloat16,
    )
    added, normed = machine.run("rms_norm", [5, 83, is_bf], [1e-5], x, residual, weight, out, gives=[residual, out])
    expected = residual.clone()
    assert_close(normed, add_rms_norm.reference(x, expected, weight, 1e-5))
    assert torch.equal(added, expected)
    gates = 4 * make_random(5, 2 * 37, dtype=dtype, device="cpu")
    out = torch.empty(5, 37, dtype=dtype)
    assert_close(machine.run("silu_mul", [5, 37, is_bf], [0.0], gates, out, gives=[out])[0], silu_mul.reference(gates))


@BOTH
def test_rope(machine: Machine, dtype: torch.dtype) -> None:
    tokens, heads, kv_heads, size = 7, 4, 2, 20
    qkv = make_random(tokens, (heads + 2 * kv_heads) * size, dtype=dtype, device="cpu")
    positions, slots = torch.arange(tokens, dtype=torch.int32), torch.arange(tokens, dtype=torch.int32) + 3
    slots[2] = -1
    norms = [make_random(size, dtype=dtype, device="cpu", seed=seed) for seed in (5, 6)]
    caches = [torch.full((2, 8, kv_heads, size), 7.0, dtype=dtype) for _ in range(2)]
    table, q = make_cos_sin(50, 12, "cpu"), torch.empty(tokens, heads, size, dtype=dtype)
    numbers = [tokens, heads, kv_heads, size, 12, 50, 16, dtype is torch.bfloat16]
    arrays = (qkv, positions, table, *norms, slots, *caches, q)
    keys, values, rotated = machine.run("rope_kv_write", numbers, [1e-6], *arrays, gives=[*caches, q])
    expected = rope_kv_write.reference(qkv, positions, table, *norms, 1e-6, slots, *caches, heads)
    assert_close(rotated, expected)
    assert_close(keys, caches[0])
    assert torch.equal(values, caches[1])


@BOTH
@pytest.mark.parametrize(("window", "cap", "chunk"), [(0, 0.0, 0), (33, 1.0, 0), (0, 0.0, 13)])
def test_paged_attention(machine: Machine, window: int, cap: float, chunk: int, dtype: torch.dtype) -> None:
    rows = [(1, 1), (1, 40), (1, 300), (1, 0), (5, 5), (21, 40)]
    inputs = make_paged_inputs(rows, num_decode_rows=4, heads=(6, 2), size=36, block_size=8, dtype=dtype, device="cpu",
                               pad_rows=1, pad_tokens=3)  # fmt: skip
    out = torch.empty_like(inputs.q)
    numbers = [inputs.q.shape[0], inputs.row_slots.shape[0], *inputs.block_tables.shape, inputs.k_cache.shape[0], 8, 6, 2, 36,
               window, dtype is torch.bfloat16, chunk]  # fmt: skip
    sinks, slopes = (make_random(6 if chunk else 0, dtype=torch.float32, device="cpu", seed=seed) for seed in (1, 2))
    arrays = (inputs.q, inputs.k_cache, inputs.v_cache, inputs.block_tables, inputs.row_slots, inputs.query_start,
              inputs.seq_lens, out, sinks, slopes)  # fmt: skip
    got = machine.run("paged_attention", numbers, [1 / 6, cap], *arrays, gives=[out])[0]
    more = (chunk, sinks, slopes) if chunk else ()
    assert_close(got, paged_attention.reference(*inputs.arguments(1 / 6, window, cap, *more)))


@BOTH
def test_sampling_and_logprobs(machine: Machine, dtype: torch.dtype) -> None:
    rows, vocab = 6, 1031
    logits = (3 * make_random(rows, vocab, dtype=torch.float32, device="cpu")).to(dtype)
    slots = torch.tensor([0, 1, 2, 3, 4, -1], dtype=torch.int32)
    temperature = torch.tensor([0.0, 1.0, 0.7, 1.5, 1.0])
    top_k, top_p = torch.tensor([0, 0, 40, 0, 7], dtype=torch.int32), torch.tensor([1.0, 1.0, 0.9, 0.5, 1.0])
    min_p, seeds = torch.zeros(5), torch.arange(10, dtype=torch.int32).view(5, 2) * 7919
    num_tokens, out = torch.arange(5, dtype=torch.int32), torch.full((rows,), -9, dtype=torch.int32)
    is_bf, stride = dtype is torch.bfloat16, vocab * dtype.itemsize
    numbers = [rows, vocab, stride, 5, RANDOM | TOP, is_bf]
    arrays = (logits, slots, temperature, top_k, top_p, min_p, seeds, num_tokens, out)
    tokens = machine.run("sample", numbers, [1e-5], *arrays, gives=[out])[0]
    zeros, ones = torch.zeros(5), torch.ones(5)
    penalties = (torch.zeros(5, vocab, dtype=torch.int16), torch.zeros(5, dtype=torch.int32), ones, zeros, zeros)
    tables = (slots, temperature, top_k, top_p, min_p, seeds, num_tokens)
    assert tokens.tolist() == sample.reference(logits, *tables, *penalties, RANDOM | TOP).tolist()

    wanted = torch.tensor([3, 0, 5, -1, 2], dtype=torch.int32)
    table = torch.zeros(5, 1, dtype=torch.int32)
    ints = (tokens, slots, wanted, torch.zeros(5, dtype=torch.int32), table)
    expected = gather_logprobs.reference(logits, *ints, 5)
    gives = [torch.empty_like(tensor) for tensor in expected]
    numbers = [rows, vocab, stride, 5, 1, 5, is_bf]
    ids, logprobs, ranks, counts = machine.run("gather_logprobs", numbers, [0.0], logits, *ints, *gives, gives=gives)
    assert ids.tolist() == expected[0].tolist() and counts.tolist() == expected[3].tolist()
    assert ranks.tolist() == expected[2].tolist()
    assert_close(logprobs, expected[1])
