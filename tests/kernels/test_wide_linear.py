"""The wide products: the references, the kernels' code on a model of the language, and on Hopper the kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from headway.kernels.hopper import runs_gluon
from headway.kernels.rope_kv_write import rope_kv_write
from headway.kernels.silu_mul import GATES
from headway.kernels.testing import assert_close, assert_same_cache, make_cos_sin, make_random
from headway.kernels.wide_linear import wide_add, wide_gate_up, wide_gelu, wide_qkv
from headway.kernels.wide_linear.tiles import TABLE, gelu_warps, tile_width, wide_tokens

EPS, BLOCK_SIZE, CONTEXT = 1e-6, 16, 40
SHAPES = [(1, 8, 64), (63, 136, 192), (129, 128, 320), (300, 264, 1024)]
"""(T, N / 2, K): tiles that are not full, loops shorter and longer than the buffers."""
PROJECTIONS = [(1, 2, 2, 64, True), (70, 4, 2, 192, False), (260, 6, 2, 576, True)]
"""(T, H, KH, K, whether heads have norms)."""


@pytest.fixture
def hopper() -> str:
    if not torch.cuda.is_available() or not runs_gluon(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip("needs Hopper's warpgroup products")
    return "cuda"


def gate_up_inputs(shape: tuple[int, int, int], device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """x, whose rows lie apart, and weight; products of order one."""
    rows, outputs, size = shape
    x = make_random(rows, size + 64, dtype=dtype, device=device)[:, 32 : 32 + size]
    return [x, make_random(2 * outputs, size, dtype=dtype, device=device, seed=2) * size**-0.5]


def qkv_inputs(
    case: tuple[int, int, int, int, bool], device: str, dtype: torch.dtype, cached: torch.dtype | None = None
) -> list[Any]:
    """Arguments of ``wide_qkv``: slots in random order, some none; positions beyond the table; heads first in memory."""
    rows, heads, kv_heads, size, normed = case
    generator = torch.Generator().manual_seed(rows)
    blocks = rows // BLOCK_SIZE + 3
    slots = torch.randperm(blocks * BLOCK_SIZE, generator=generator)[:rows].int()
    slots[2::7], slots[3::11] = -1, blocks * BLOCK_SIZE
    positions = torch.randint(0, CONTEXT + 5, (rows,), generator=generator, dtype=torch.int32)
    shape = (2, blocks, kv_heads, BLOCK_SIZE, 128)
    caches = torch.full(shape, 7.0, dtype=cached or dtype, device=device).transpose(2, 3)
    norms = [make_random(128, dtype=dtype, device=device, seed=seed) if normed else None for seed in (5, 6)]
    x, weight = gate_up_inputs((rows, (heads // 2 + kv_heads) * 128, size), device, dtype)
    return [x, weight, positions.to(device), make_cos_sin(CONTEXT, 128, device), *norms, EPS, slots.to(device),
            caches[0], caches[1], heads]  # fmt: skip


def run(function: Any, arguments: list[Any]) -> list[torch.Tensor]:
    """q, keys and values; the arguments stay as they are, their layout too."""
    copies = list(arguments)
    for i in (8, 9):
        copies[i] = arguments[i].transpose(1, 2).clone().transpose(1, 2)
    return [function(*copies), copies[8], copies[9]]


def test_references_follow_the_formulas() -> None:
    x, weight = gate_up_inputs((5, 8, 64), "cpu", torch.float32)
    y = F.linear(x, weight)
    assert_close(wide_gate_up.reference(x, weight), F.silu(y[:, :8]) * y[:, 8:])
    arguments = qkv_inputs((20, 4, 2, 64, True), "cpu", torch.float32)
    projected = [F.linear(arguments[0], arguments[1]), *arguments[2:]]
    expected = [rope_kv_write.reference(*projected), arguments[8], arguments[9]]
    for found, wanted in zip(run(wide_qkv.reference, arguments), expected, strict=True):
        assert_close(found, wanted)


@pytest.fixture
def modelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels' code on CPU tensors, see ``wide_model``; three programs share the tiles."""
    pytest.importorskip("triton")
    from headway.kernels.wide_linear.hopper import launch
    from tests.kernels.wide_model import ModelKernel

    for name in ("gate_up_kernel", "gate_up_pairs_kernel", "qkv_kernel", "sums_kernel", "turns_kernel"):
        monkeypatch.setattr(launch, name, ModelKernel(getattr(launch, name), 3))


@pytest.fixture(params=[256, 192, 128])
def wide(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Weight rows of a tile, whatever would be chosen."""
    if request.param == 192 and "qkv" in request.node.name:
        pytest.skip("heads do not lie in uneven tiles")
    monkeypatch.setattr("headway.kernels.wide_linear.hopper.launch.tile_width", lambda *_: request.param)
    return int(request.param)


@pytest.mark.usefixtures("modelled")
@pytest.mark.parametrize("shape", SHAPES)
def test_modelled_gate_up_equals_reference(shape: tuple[int, int, int], wide: int) -> None:
    arguments = gate_up_inputs(shape, "cpu", torch.float16)
    for act in GATES:
        assert_close(wide_gate_up.implementation("cuda")(*arguments, act), wide_gate_up.reference(*arguments, act))


def added(function: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What ``wide_add`` makes of a residual, with a factor for an odd number of rows."""
    residual = make_random(x.shape[0], weight.shape[0], dtype=x.dtype, device=str(x.device), seed=8)
    factor = 0.22 if x.shape[0] % 2 else 1.0
    function(x, weight, residual, factor)
    return residual


@pytest.mark.usefixtures("modelled")
@pytest.mark.parametrize("shape", SHAPES)
def test_modelled_add_equals_reference(shape: tuple[int, int, int]) -> None:
    arguments = gate_up_inputs(shape, "cpu", torch.float16)
    assert_close(added(wide_add.implementation("cuda"), *arguments), added(wide_add.reference, *arguments))


def activated(shape: tuple[int, int, int], device: str) -> list[torch.Tensor]:
    """Arguments of ``wide_gelu``; sums from -12 to 12."""
    x, weight = gate_up_inputs(shape, device, torch.bfloat16)
    weight = weight[: shape[1]].contiguous()
    return [x, weight, make_random(shape[1], dtype=torch.bfloat16, device=device, seed=9) * 3.0]


def guarded_gelu(arguments: list[torch.Tensor], tanh: bool, warps: int) -> torch.Tensor:
    """What ``launch_gelu`` writes, and nothing behind it."""
    from headway.kernels.wide_linear.hopper.launch import launch_gelu

    x, weight, bias = arguments
    guarded = torch.full((x.shape[0] + 64, weight.shape[0]), torch.nan, dtype=x.dtype, device=x.device)
    out, rest = guarded.split([x.shape[0], 64])
    launch_gelu(x, weight, bias, out, tanh, warps)
    assert bool(rest.isnan().all())
    return out


@pytest.mark.usefixtures("modelled")
@pytest.mark.parametrize("tanh", [False, True])
@pytest.mark.parametrize("warps", [0, 2, 4])
@pytest.mark.parametrize("shape", [*SHAPES, (700, 520, 768)])
def test_modelled_gelu_equals_reference(shape: tuple[int, int, int], warps: int, tanh: bool) -> None:
    arguments = activated(shape, "cpu")
    assert_close(guarded_gelu(arguments, tanh, warps), wide_gelu.reference(*arguments, tanh))


@pytest.mark.usefixtures("modelled")
def test_modelled_forms_of_gelu_have_the_same_bits() -> None:
    """Of sums without rounding errors: each form rounds them once more, to 16 bits, before GELU."""
    x, weight, bias = ((each * 8).round() / 8 for each in activated((129, 264, 64), "cpu"))
    first = guarded_gelu([x, weight, bias], False, 0)
    for warps in (2, 4):
        assert torch.equal(guarded_gelu([x, weight, bias], False, warps), first)


@pytest.mark.usefixtures("modelled")
@pytest.mark.parametrize("tanh", [False, True])
@pytest.mark.parametrize("warps", [0, 4])
def test_modelled_gelu_is_right_in_the_tails(warps: int, tanh: bool) -> None:
    """Every bfloat16 from -9 to 9, and some far out: off by a tenth of a last place more than by rounding, or 3e-10 at zero."""
    x, weight = torch.zeros(8, 64, dtype=torch.bfloat16), torch.zeros(8192, 64, dtype=torch.bfloat16)
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    inside = bits[(bits.abs() <= 9) & (bits.abs() >= 2.0**-20)]
    values = torch.cat([inside, torch.tensor([0.0, 1e4, -1e4, 1e30, -1e30], dtype=torch.bfloat16)])
    values[100], values[-100] = torch.nan, torch.inf
    values = torch.nn.functional.pad(values, (0, 8192 - len(values)))
    found = guarded_gelu([x, weight, values], tanh, warps).double()
    wide = values.double()
    exact = F.gelu(wide, approximate="tanh") if tanh else wide * torch.special.erfc(-wide * 0.5**0.5) / 2
    near = (found - exact).abs() <= exact.abs() * 2.0**-8 * 1.22 + 3e-10
    assert bool((near | (found == exact) | (found.isnan() & exact.isnan())).all())


def test_a_rehearsal_names_the_kernels_of_both_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a step of another size would compile one while it is waited for."""
    pytest.importorskip("triton")
    from headway.kernels.wide_linear.hopper import launch

    asked: list[int] = []
    monkeypatch.setattr(launch, "launch_gelu", lambda *others: asked.append(others[-1]))
    run, arguments = wide_gelu.implementation("cuda"), activated((300, 264, 1024), "cpu")
    run(*arguments, False)
    assert len(asked) == 1
    monkeypatch.setattr(launch, "only_noted", lambda: True)
    run(*arguments, False)
    assert asked[1:] == [0, 2]


def test_gelu_is_for_bfloat16() -> None:
    pytest.importorskip("triton")
    with pytest.raises(AssertionError, match="bfloat16"):
        wide_gelu.implementation("cuda")(*(each.half() for each in activated((1, 8, 64), "cpu")), False)


@pytest.mark.usefixtures("modelled")
@pytest.mark.parametrize("cached", [torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("case", PROJECTIONS)
def test_modelled_qkv_equals_reference(case: tuple[int, int, int, int, bool], cached: torch.dtype, wide: int) -> None:
    arguments = qkv_inputs(case, "cpu", torch.float16, cached)
    arguments[1][-1] *= 1000.0  # beyond 8 bits
    expected = run(wide_qkv.reference, arguments)
    found = run(wide_qkv.implementation("cuda"), arguments)
    assert_close(found[0], expected[0])
    for mine, wanted in zip(found[1:], expected[1:], strict=True):
        assert_same_cache(mine, wanted)


@pytest.mark.usefixtures("modelled")
@pytest.mark.parametrize("group", [1, 2, 5])
def test_groups_of_tiles_cover_all(group: int) -> None:
    from headway.kernels.wide_linear.hopper.launch import launch_gate_up

    x, weight = gate_up_inputs((700, 264, 64), "cpu", torch.float16)
    out = torch.full((701, 264), 7.0, dtype=torch.float16)
    launch_gate_up(x, weight, out[:700], group)
    assert_close(out[:700], wide_gate_up.reference(x, weight))
    assert bool((out[700] == 7.0).all())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [*SHAPES, (1000, 3072, 1024), (700, 1000, 4096)])
def test_gate_up_equals_reference(shape: tuple[int, int, int], dtype: torch.dtype, wide: int, hopper: str) -> None:
    """Within rounding; nothing beside it is written; a token's result is the same whatever the others are."""
    from headway.kernels.wide_linear.hopper.launch import launch_gate_up

    x, weight = gate_up_inputs(shape, hopper, dtype)
    guarded = torch.full((shape[0] + 64, shape[1]), 7.0, dtype=dtype, device=hopper)
    out = guarded[: shape[0]]
    for gate, act in enumerate(GATES, 1):
        launch_gate_up(x, weight, out, gate=gate)
        assert_close(out, wide_gate_up.reference(x, weight, act))
    launch_gate_up(x, weight, out)
    assert bool((guarded[shape[0] :] == 7.0).all())
    first = out.clone()
    for _ in range(20):
        launch_gate_up(x, weight, out)
        assert torch.equal(out, first), "a moving result would be a race"
    assert torch.equal(wide_gate_up(x[-5:], weight), first[-5:])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [*SHAPES, (1000, 512, 3072), (700, 2048, 4096)])
def test_add_equals_reference(shape: tuple[int, int, int], dtype: torch.dtype, hopper: str) -> None:
    arguments = gate_up_inputs(shape, hopper, dtype)
    found = added(wide_add, *arguments)
    assert_close(found, added(wide_add.reference, *arguments))
    assert all(torch.equal(added(wide_add, *arguments), found) for _ in range(20)), "a moving result would be a race"


@pytest.mark.gpu
@pytest.mark.parametrize("tanh", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES, (2048, 1536, 384), (8191, 3072, 768), (4100, 4096, 1024)])
def test_gelu_equals_reference(shape: tuple[int, int, int], tanh: bool, hopper: str) -> None:
    """All forms, with the same bits: which one runs depends on how many other tokens there are."""
    arguments = activated(shape, hopper)
    found = guarded_gelu(arguments, tanh, 0)
    assert_close(found, wide_gelu.reference(*arguments, tanh))
    for warps in (0, 2, 4):
        for _ in range(10):
            assert torch.equal(guarded_gelu(arguments, tanh, warps), found), f"{warps}: a moving result would be a race"
    assert torch.equal(wide_gelu(*arguments, tanh), found)
    assert torch.equal(wide_gelu(arguments[0][-5:], *arguments[1:], tanh), found[-5:])


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*PROJECTIONS, (1000, 16, 8, 1024, True)])
def test_qkv_writes_8_bits(case: tuple[int, int, int, int, bool], wide: int, hopper: str) -> None:
    arguments = qkv_inputs(case, hopper, torch.bfloat16, torch.float8_e4m3fn)
    arguments[1][-1] *= 1000.0  # beyond 8 bits
    found, expected = run(wide_qkv, arguments), run(wide_qkv.reference, arguments)
    assert_close(found[0], expected[0])
    for mine, wanted in zip(found[1:], expected[1:], strict=True):
        assert_same_cache(mine, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", [*PROJECTIONS, (1000, 16, 8, 1024, True), (500, 32, 8, 4096, False)])
def test_qkv_equals_reference(
    case: tuple[int, int, int, int, bool], dtype: torch.dtype, wide: int, hopper: str
) -> None:
    arguments = qkv_inputs(case, hopper, dtype)
    found = run(wide_qkv, arguments)
    for mine, wanted in zip(found, run(wide_qkv.reference, arguments), strict=True):
        assert_close(mine, wanted)
    for _ in range(20):
        for mine, again in zip(found, run(wide_qkv, arguments), strict=True):
            assert torch.equal(mine, again), "a moving result would be a race"


def test_what_was_measured_decides_and_a_rule_for_the_rest() -> None:
    for (kind, outputs, inputs), counts in TABLE.items():
        assert wide_tokens(kind, outputs, inputs) == counts
    assert wide_tokens("wide_add", 4096, 14336) == (), "it lost"
    assert wide_tokens("wide_gate_up", 6144, 1056) == (), "K is no multiple of a chunk"
    assert wide_tokens("wide_gate_up", 2 * 4, 1024) == (), "rows of results do not begin at 16 bytes"
    assert wide_tokens("wide_add", 5120, 25600) == ()
    starts = [wide_tokens("wide_gate_up", 2 * 8960, inputs)[0].start for inputs in (896, 1536, 5120)]
    assert starts == sorted(starts) and starts[0] < starts[-1]
    used = {tokens: any(tokens in each for each in wide_tokens("wide_add", 2560, 4096)) for tokens in (500, 2048, 8192)}
    assert used == {500: False, 2048: False, 8192: True}, "160 tiles of 132 SMs leave a third idle, 640 few"
    assert any(2048 in each for each in wide_tokens("wide_add", 2048, 8192)), "128 tiles"
    assert not any(8192 in each for each in wide_tokens("wide_add", 1152, 6912)), "a tenth of the columns is padding"
    for inputs in (384, 1024):
        (used_gelu,) = wide_tokens("wide_gelu", 4 * inputs, inputs)
        assert 2047 not in used_gelu and 2048 in used_gelu and 8192 in used_gelu
    assert wide_tokens("wide_gelu", 4 * 16384, 16384) == ()


@pytest.mark.parametrize(
    ("inputs", "full", "short"), [(384, 4, 0), (768, 4, 0), (1024, 2, 2), (1280, 2, 0)]
)  # what was measured on an H100
def test_the_form_of_gelu_follows_from_tiles(inputs: int, full: int, short: int) -> None:
    found = [gelu_warps(tokens, 4 * inputs, inputs, 132) for tokens in (8192, 2048)]
    assert found == [full, short]


def test_one_wide_tile_an_sm_is_finished_in_turns() -> None:
    assert gelu_warps(1024, 4096, 768, 128) == 0, "nothing is multiplied beside its GELU"
    assert gelu_warps(1025, 4096, 768, 144) == 0 and gelu_warps(2048, 4096, 768, 128) == 4


def test_tiles_leave_few_processors_idle() -> None:
    assert tile_width(512, 4096, 132) == 128 and tile_width(768, 4096, 132) == tile_width(8192, 4096, 132) == 256
    widths = (256, 192, 128)
    assert [tile_width(tokens, 6144, 132, widths) for tokens in (256, 512, 1024, 8192)] == [128, 192, 192, 256]
    assert tile_width(8192, 28672, 132, widths) == 256  # 192 would be ahead by half a percent, were it as good
