"""``quant_linear`` and ``quant_rows``: layouts against the gguf package, kernels against the references."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from headway.kernels.cpu import block_ops, ops
from headway.kernels.quant_linear import QuantizedLinear, quant_linear, quant_rows, reference
from headway.kernels.quant_linear.formats import BLOCK_TYPES, DIGIT, packed_bytes
from headway.kernels.testing import TOLERANCE, make_random
from tests.kernels.gguf_blocks import KINDS, NAMES, decoded, encoded
from tests.kernels.native_kernel import poisoned_memory, torch_threads

pytestmark = pytest.mark.skipif(not block_ops.available(), reason="no C compiler here")
EVERY = pytest.mark.parametrize("kind", KINDS, ids=NAMES)
BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
Q4_0, Q5_0, Q8_0, Q4_K, Q6_K = 2, 6, 8, 12, 14


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    with poisoned_memory():
        yield


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Within rounding of sums of the size that ``expected`` has, and a small step of an activation, which is rounded either way
    where it lies between two."""
    assert actual.dtype == expected.dtype
    size = float(expected.float().square().mean().sqrt().clamp(min=1e-6))
    absolute, relative = TOLERANCE[expected.dtype]
    absolute += 1 / (127 * DIGIT)
    torch.testing.assert_close(actual.float() / size, expected.float() / size, atol=absolute, rtol=relative)


@EVERY
@pytest.mark.parametrize("outputs", [1, 16, 37])
def test_panels_hold_the_weights_of_the_file(kind: int, outputs: int) -> None:
    rows = encoded(kind, outputs, 768)
    layer, expected = QuantizedLinear([(kind, rows)], 768), decoded(kind, rows)
    assert expected.std() > 0.1
    torch.testing.assert_close(layer.weight(), expected, rtol=3e-7, atol=1e-6)
    assert layer.packed.numel() <= packed_bytes(kind, outputs, 768) + 63
    ids = torch.tensor([outputs - 1, 0, outputs, -1, -(2**31), 2**31 - 1, outputs // 2], dtype=torch.int32)
    for dtype in (torch.float32, torch.bfloat16):
        found = layer.rows(ids, dtype)
        assert found.dtype is dtype
        torch.testing.assert_close(
            found, quant_rows.reference(ids, layer.packed, kind, outputs, 768, dtype), rtol=8e-3, atol=1e-6
        )
        assert not found[2:6].any()
    torch.testing.assert_close(layer.rows(ids[:2], torch.float32), expected[[outputs - 1, 0]], rtol=3e-7, atol=1e-6)


@EVERY
@BOTH
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 256), (33, 512), (257, 1280)])
def test_kernel_equals_its_reference(kind: int, dtype: torch.dtype, outputs: int, inputs: int) -> None:
    bias = make_random(outputs, dtype=dtype, device="cpu", seed=5)
    x = make_random(130, inputs, dtype=dtype, device="cpu")
    layer = QuantizedLinear([(kind, encoded(kind, outputs, inputs))], inputs, bias)
    expected = quant_linear.reference(x, layer.packed, bias, layer.types, layer.outputs)
    for rows in (0, 1, 3, 17, 64, 65, 130):
        for threads in (1, 2):
            with torch_threads(threads):
                assert_near(layer(x[:rows]), expected[:rows])


@EVERY
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 256), (37, 1280)])
def test_exact_products_have_the_bits_of_dequantised_weights(kind: int, outputs: int, inputs: int) -> None:
    """Those of float32 panels with what the gguf package makes of the file."""
    bias = make_random(outputs, dtype=torch.float32, device="cpu", seed=5)
    x = make_random(130, inputs, dtype=torch.float32, device="cpu")
    x[7, 3], x[8, 4] = float("nan"), float("inf")
    rows = encoded(kind, outputs, inputs)
    layer = QuantizedLinear([(kind, rows)], inputs, bias, exact=True)
    weight = decoded(kind, rows)
    plain = ops.linear_packed(x, ops.pack_weight(weight), bias, outputs)
    for count in (0, *range(1, 15), 17, 64, 65, 130):
        for threads in (1, 2):
            with torch_threads(threads):
                assert torch.equal(layer(x[:count]).nan_to_num(), plain[:count].nan_to_num())
    expected = quant_linear.reference(x, layer.packed, bias, layer.types, layer.outputs, True)
    assert_near(layer(x)[9:], expected[9:])
    ids = torch.arange(outputs, dtype=torch.int32)
    assert torch.equal(layer.rows(ids, torch.float32), weight)


@EVERY
def test_exact_products_of_extreme_blocks(kind: int) -> None:
    """All bits set and none, wherever the scales are numbers."""
    rows = encoded(kind, 4, 512)
    for row, byte in ((0, 255), (1, 0), (2, 0x80), (3, 0x7B)):
        flat = rows.clone()
        flat[row] = byte
        weight = decoded(kind, flat)
        if weight.isfinite().all():
            x = make_random(3, 512, dtype=torch.float32, device="cpu")
            plain = ops.linear_packed(x, ops.pack_weight(weight), None, 4)
            assert torch.equal(QuantizedLinear([(kind, flat)], 512, exact=True)(x), plain)


@pytest.mark.parametrize("inputs", [32, 96, 576])
@pytest.mark.parametrize(
    "kind", [k for k, t in BLOCK_TYPES.items() if not t.in_supers], ids=lambda k: BLOCK_TYPES[k].name
)
def test_inputs_need_only_be_whole_blocks(kind: int, inputs: int) -> None:
    layer = QuantizedLinear([(kind, encoded(kind, 20, inputs))], inputs)
    x = make_random(5, inputs, dtype=torch.float32, device="cpu")
    assert_near(layer(x), quant_linear.reference(x, layer.packed, None, layer.types, layer.outputs))


@EVERY
def test_extreme_values_stay_exact(kind: int) -> None:
    """Every weight and activation at its end: sums of 16 bits must not overflow."""
    rows = encoded(kind, 4, 512)
    flat = rows.clone()
    flat[0], flat[1] = 255, 0  # all bits, none
    scales = encoded(kind, 1, 512, seed=9)[0]
    keep = decoded(kind, flat).isfinite().all(1)  # a scale of all bits is no number: those rows take real scales
    flat[~keep] = scales
    layer = QuantizedLinear([(kind, flat)], 512)
    signs = torch.tensor([1.0, -1.0])
    x = torch.stack(
        [
            torch.ones(512),
            -torch.ones(512),
            signs.repeat(256),
            -signs.repeat(256),
            signs.repeat_interleave(2).repeat(128),
        ]
    )
    assert_near(layer(x), F.linear(reference.rounded(x), layer.weight()))


def test_largest_products_in_16_bits() -> None:
    """Blocks made by hand: the values that come nearest to the bounds in blocks.c."""
    for kind, byte in (
        (Q4_0, 0x00),
        (Q4_0, 0xFF),
        (Q5_0, 0x00),
        (Q5_0, 0xFF),
        (Q8_0, 0x80),
        (Q8_0, 0x7F),
        (7, 0xFF),
        (3, 0xFF),
    ):
        rows = encoded(kind, 16, 64)
        size = rows.shape[1] // 2
        head = 4 if kind in (3, 7) else 2
        rows.view(16, 2, size)[:, :, head:] = byte
        layer = QuantizedLinear([(kind, rows)], 64)
        for x in (torch.ones(1, 64), -torch.ones(1, 64)):
            assert_near(layer(x), F.linear(reference.rounded(x), decoded(kind, rows)))


@BOTH
def test_parts_of_different_types_are_one_layer(dtype: torch.dtype) -> None:
    parts = [(Q5_0, 40), (Q8_0, 24), (Q8_0, 7), (Q4_K, 16), (Q6_K, 33), (Q5_0, 1)]
    rows = [encoded(kind, count, 512, seed=i) for i, (kind, count) in enumerate(parts)]
    bias = make_random(121, dtype=dtype, device="cpu")
    layer = QuantizedLinear([(kind, part) for (kind, _), part in zip(parts, rows, strict=True)], 512, bias)
    assert layer.outputs == (40, 31, 16, 33, 1)
    weight = torch.cat([decoded(kind, part) for (kind, _), part in zip(parts, rows, strict=True)])
    torch.testing.assert_close(layer.weight(), weight, rtol=3e-7, atol=1e-6)
    x = make_random(2, 9, 512, dtype=dtype, device="cpu")
    expected = F.linear(reference.rounded(x), weight, bias.float()).to(dtype)
    assert_near(layer(x), expected)
    assert_near(layer(x.transpose(0, 1)), expected.transpose(0, 1))


@EVERY
def test_a_row_has_the_same_bits_in_any_batch_and_with_any_threads(kind: int) -> None:
    layer = QuantizedLinear([(kind, encoded(kind, 200, 512))], 512)
    x = make_random(150, 512, dtype=torch.float32, device="cpu")
    with torch_threads(1):
        whole = layer(x)
    with torch_threads(2):
        for low, high in ((0, 150), (0, 1), (3, 8), (60, 70), (17, 149)):
            assert torch.equal(layer(x[low:high]), whole[low:high])


@EVERY
def test_what_is_not_finite_stays_so_in_its_row(kind: int) -> None:
    layer = QuantizedLinear([(kind, encoded(kind, 20, 512))], 512)
    x = make_random(4, 512, dtype=torch.float32, device="cpu")
    x[1, 300], x[2, 5] = float("nan"), float("inf")
    y = layer(x)
    assert y[1:3].isnan().all() and y[[0, 3]].isfinite().all()
    for tiny in (0.0, 1e-45, 1e-38, 1e-31):
        assert layer(torch.full((1, 512), tiny)).abs().max() < 1e-25


def test_activations_lose_half_a_step() -> None:
    """Of 8 bits where blocks are as large as the row's mean, of 16 bits in those with outliers."""
    x = make_random(40, 4096, dtype=torch.float32, device="cpu")
    x[::2, 100::512] = 50
    error = (reference.rounded(x) - x).unflatten(-1, (-1, 32)).abs().amax(-1)
    largest = x.unflatten(-1, (-1, 32)).abs().amax(-1)  # [rows, blocks]
    fine = largest.square() > largest.square().mean(-1, keepdim=True)
    assert bool((error <= torch.where(fine, largest / (127 * DIGIT), largest / 127) * 0.52).all())
    assert bool((fine[::2].sum(-1) == 8).all()), "an outlier's block, and none else"


@pytest.mark.parametrize("kind", [Q4_0, Q5_0, Q8_0, Q6_K])
def test_outliers_cost_their_neighbours_nothing(kind: int) -> None:
    """One large input takes the precision of 31 others with 8 bits alone: 16 bits keep what the output is without it."""
    layer = QuantizedLinear([(kind, encoded(kind, 64, 2048))], 2048)
    x = make_random(3, 2048, dtype=torch.float32, device="cpu")
    x[:, 777] = 100.0
    exact = F.linear(x.double(), layer.weight().double())
    error = (layer(x) - exact).norm() / F.linear(
        x.double().index_fill(1, torch.tensor([777]), 0), layer.weight().double()
    ).norm()
    assert error < 0.01


def test_the_operation_and_meta_agree() -> None:
    layer = QuantizedLinear([(Q4_0, encoded(Q4_0, 50, 64)), (Q8_0, encoded(Q8_0, 20, 64))], 64)
    x = make_random(3, 64, dtype=torch.float32, device="cpu")
    arguments = (x, layer.packed, None, list(layer.types), list(layer.outputs))
    assert torch.equal(quant_linear(*arguments), layer(x))
    exact = quant_linear(*arguments, True)
    assert_near(exact, F.linear(x, layer.weight()))
    assert not torch.equal(exact, layer(x))
    assert quant_linear(x.bfloat16(), *arguments[1:], True).dtype is torch.bfloat16, "by the reference"
    on_meta = quant_linear(*(a.to("meta") if isinstance(a, torch.Tensor) else a for a in arguments))
    assert on_meta.shape == (3, 70) and on_meta.is_meta
    ids = torch.zeros(5, dtype=torch.int32, device="meta")
    rows = quant_rows(ids, layer.packed.to("meta"), Q4_0, 50, 64, torch.bfloat16)
    assert rows.shape == (5, 64) and rows.dtype is torch.bfloat16


def test_wrong_sizes_are_refused() -> None:
    layer = QuantizedLinear([(Q4_K, encoded(Q4_K, 16, 512))], 512)
    with pytest.raises(ValueError, match="take"):
        quant_linear(torch.zeros(1, 1024), layer.packed, None, [Q4_K], [16])
    with pytest.raises(ValueError, match=r"no whole blocks of Q4_K"):
        quant_linear(torch.zeros(1, 96), layer.packed, None, [Q4_K], [16])
    with pytest.raises(ValueError, match="ggml type 99"):
        quant_linear(torch.zeros(1, 512), layer.packed, None, [99], [16])
    with pytest.raises(ValueError, match="no table of 17 rows"):
        quant_rows(torch.zeros(1, dtype=torch.int32), layer.packed, Q4_K, 17, 512, torch.float32)


SOURCES = Path(block_ops.__file__).parent / "csrc"
MACHINE = Path(__file__).parent / "blocks_main.c"
ARCHITECTURES = [
    ("gcc", ["-march=x86-64"], [], "portable"),
    ("gcc", ["-march=haswell"], [], "AVX2"),
    ("gcc", ["-march=haswell", "-DHEADWAY_TEST_SET=2"], [], "AVX-VNNI with its one instruction in C"),
    ("aarch64-linux-gnu-gcc", ["-march=armv8-a"], ["qemu-aarch64"], "NEON without dot products"),
    ("aarch64-linux-gnu-gcc", ["-march=armv8.2-a+dotprod+fp16"], ["qemu-aarch64"], "NEON dot products"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("compiler", "flags", "runner", "name"), ARCHITECTURES, ids=[a[3] for a in ARCHITECTURES])
def test_every_instruction_set(compiler: str, flags: list[str], runner: list[str], name: str, tmp_path: Path) -> None:
    """The same sources compiled for it, run here or in an emulator, against the reference."""
    if not runner and platform.machine() != "x86_64":
        pytest.skip("for x86-64")
    for tool in (compiler, *runner):
        if shutil.which(tool) is None:
            pytest.skip(f"no {tool} here")
    program = tmp_path / "blocks"
    files = [str(SOURCES / file) for file in ("blocks.c", "blocks_pack.c", "linear.c", "parallel.c")]
    command = [
        compiler,
        "-O1",  # two thirds of the time of -O2
        "-std=gnu11",
        "-static",
        *flags,
        "-I",
        str(SOURCES),
        *files,
        str(MACHINE),
        "-o",
        str(program),
        "-lm",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    inputs = 512
    for i, kind in enumerate(KINDS):
        rows = encoded(kind, 37, inputs, seed=i)
        x = make_random(5, inputs, dtype=torch.float32, device="cpu", seed=i)
        (tmp_path / "in").write_bytes(rows.numpy().tobytes() + x.numpy().tobytes())
        for exact in (0, 1):
            arguments = [str(kind), "37", str(inputs), "5", str(rows.numel()), str(exact)]
            arguments += [str(tmp_path / "in"), str(tmp_path / "out")]
            ran = subprocess.run([*runner, str(program), *arguments], capture_output=True, text=True, timeout=120)
            assert ran.returncode == 0, ran.stderr
            y = torch.frombuffer(bytearray((tmp_path / "out").read_bytes()), dtype=torch.float32).view(5, 37)
            assert_near(y, F.linear(x if exact else reference.rounded(x), decoded(kind, rows)))


@pytest.mark.slow
@pytest.mark.parametrize("machine", ["alderlake", "icelake-server", "sapphirerapids"])
def test_sets_without_an_emulator_compile(machine: str, tmp_path: Path) -> None:
    command = [
        "gcc",
        "-O0",  # a quarter of the time of -O2
        "-std=gnu11",
        f"-march={machine}",
        "-S",
        str(SOURCES / "blocks.c"),
        "-o",
        str(tmp_path / "out.s"),
    ]
    if shutil.which("gcc") is None or platform.machine() != "x86_64":
        pytest.skip("no gcc for x86-64 here")
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "vpdpbusd" in (tmp_path / "out.s").read_text()
