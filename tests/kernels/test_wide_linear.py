"""The wide products: the references, the kernels' code on a model of the language, and on Hopper the kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from headway.kernels.hopper import runs_gluon
from headway.kernels.rms_norm import rms_norm
from headway.kernels.rope_kv_write import rope_kv_write
from headway.kernels.testing import assert_close, make_cos_sin, make_random
from headway.kernels.wide_linear import wide_add, wide_gate_up, wide_qkv
from headway.kernels.wide_linear.tiles import TABLE, tile_width, wide_tokens

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


def qkv_inputs(case: tuple[int, int, int, int, bool], device: str, dtype: torch.dtype) -> list[Any]:
    """Arguments of ``wide_qkv`` without squares: slots in random order, some none; positions beyond the table; heads first in
    memory."""
    rows, heads, kv_heads, size, normed = case
    generator = torch.Generator().manual_seed(rows)
    blocks = rows // BLOCK_SIZE + 3
    slots = torch.randperm(blocks * BLOCK_SIZE, generator=generator)[:rows].int()
    slots[2::7], slots[3::11] = -1, blocks * BLOCK_SIZE
    positions = torch.randint(0, CONTEXT + 5, (rows,), generator=generator, dtype=torch.int32)
    caches = torch.full((2, blocks, kv_heads, BLOCK_SIZE, 128), 7.0, dtype=dtype, device=device).transpose(2, 3)
    norms = [make_random(128, dtype=dtype, device=device, seed=seed) if normed else None for seed in (5, 6)]
    x, weight = gate_up_inputs((rows, (heads // 2 + kv_heads) * 128, size), device, dtype)
    return [x, weight, None, positions.to(device), make_cos_sin(CONTEXT, 128, device), *norms, EPS, slots.to(device),
            caches[0], caches[1], heads]  # fmt: skip


def squares_of(parts: int, rows: int, inputs: int, device: str) -> torch.Tensor:
    """Sums of squares whose mean is about one."""
    return (torch.rand(rows, parts, generator=torch.Generator().manual_seed(rows)) + 0.5).to(device) * (inputs / parts)


def run(function: Any, arguments: list[Any]) -> list[torch.Tensor]:
    """q, keys and values; the arguments stay as they are, their layout too."""
    copies = list(arguments)
    for i in (9, 10):
        copies[i] = arguments[i].transpose(1, 2).clone().transpose(1, 2)
    return [function(*copies), copies[9], copies[10]]


def test_references_follow_the_formulas() -> None:
    x, weight = gate_up_inputs((5, 8, 64), "cpu", torch.float32)
    y = F.linear(x, weight)
    assert_close(wide_gate_up.reference(x, weight, None, EPS), F.silu(y[:, :8]) * y[:, 8:])
    arguments = qkv_inputs((20, 4, 2, 64, True), "cpu", torch.float32)
    projected = [F.linear(arguments[0], arguments[1]), *arguments[3:]]
    expected = [rope_kv_write.reference(*projected), arguments[9], arguments[10]]
    for found, wanted in zip(run(wide_qkv.reference, arguments), expected, strict=True):
        assert_close(found, wanted)


def test_no_norm_is_left_between_two_products() -> None:
    """The residual times the norm's weight, divided by the root of the mean square behind the next product, is the norm."""
    x, weight = gate_up_inputs((7, 256, 64), "cpu", torch.float32)
    residual, norm = (
        make_random(7, 512, dtype=torch.float32, device="cpu"),
        make_random(512, dtype=torch.float32, device="cpu"),
    )
    after = residual + F.linear(x, weight)
    y, squares = wide_add.reference(x, weight, residual, norm)
    assert squares.shape == (7, 2)
    assert_close(residual, after)
    behind = make_random(16, 512, dtype=torch.float32, device="cpu", seed=3)
    expected = wide_gate_up.reference(rms_norm.reference(after, norm, EPS), behind, None, EPS)
    assert_close(wide_gate_up.reference(y, behind, squares, EPS), expected)


@pytest.fixture
def modelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels' code on CPU tensors, see ``wide_model``; three programs share the tiles."""
    pytest.importorskip("triton")
    from headway.kernels.wide_linear import launch
    from tests.kernels.wide_model import ModelKernel

    for name in ("gate_up_kernel", "gate_up_pairs_kernel", "qkv_kernel", "add_kernel"):
        monkeypatch.setattr(launch, name, ModelKernel(getattr(launch, name), 3))


@pytest.fixture(params=[256, 192, 128])
def wide(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Weight rows of a tile, whatever would be chosen."""
    if request.param == 192 and "qkv" in request.node.name:
        pytest.skip("heads do not lie in uneven tiles")
    monkeypatch.setattr("headway.kernels.wide_linear.launch.tile_width", lambda *_: request.param)
    return int(request.param)


@pytest.mark.usefixtures("modelled")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("parts", [0, 1, 3])
def test_modelled_gate_up_equals_reference(shape: tuple[int, int, int], parts: int, wide: int) -> None:
    if parts and wide == 192:
        pytest.skip("uneven tiles take activations as they are")
    squares = squares_of(parts, shape[0], shape[2], "cpu") if parts else None
    arguments = [*gate_up_inputs(shape, "cpu", torch.float16), squares, EPS]
    assert_close(wide_gate_up.implementation("cuda")(*arguments), wide_gate_up.reference(*arguments))


def added(function: Any, x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    """What ``wide_add`` makes of a residual, the residual times the norm and the sums of squares."""
    residual = make_random(x.shape[0], weight.shape[0], dtype=x.dtype, device=str(x.device), seed=8)
    norm = make_random(weight.shape[0], dtype=x.dtype, device=str(x.device), seed=9)
    y, squares = function(x, weight, residual, norm)
    assert squares.dtype == torch.float32
    return [residual, y, squares.to(x.dtype)]  # of what was rounded to x's dtype


def assert_all_close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for mine, wanted in zip(found, expected, strict=True):
        assert_close(mine, wanted)


@pytest.mark.usefixtures("modelled")
@pytest.mark.parametrize("shape", SHAPES)
def test_modelled_add_equals_reference(shape: tuple[int, int, int]) -> None:
    arguments = gate_up_inputs(shape, "cpu", torch.float16)
    assert_all_close(added(wide_add.implementation("cuda"), *arguments), added(wide_add.reference, *arguments))


@pytest.mark.usefixtures("modelled")
@pytest.mark.parametrize("case", PROJECTIONS)
@pytest.mark.parametrize("parts", [0, 4])
def test_modelled_qkv_equals_reference(case: tuple[int, int, int, int, bool], parts: int, wide: int) -> None:
    arguments = qkv_inputs(case, "cpu", torch.float16)
    arguments[2] = squares_of(parts, case[0], case[3], "cpu") if parts else None
    assert_all_close(run(wide_qkv.implementation("cuda"), arguments), run(wide_qkv.reference, arguments))


@pytest.mark.usefixtures("modelled")
@pytest.mark.parametrize("group", [1, 2, 5])
def test_groups_of_tiles_cover_all(group: int) -> None:
    from headway.kernels.wide_linear.launch import launch_gate_up

    x, weight = gate_up_inputs((700, 264, 64), "cpu", torch.float16)
    out = torch.full((701, 264), 7.0, dtype=torch.float16)
    launch_gate_up(x, weight, out[:700], group)
    assert_close(out[:700], wide_gate_up.reference(x, weight, None, EPS))
    assert bool((out[700] == 7.0).all())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [*SHAPES, (1000, 3072, 1024), (700, 1000, 4096)])
def test_gate_up_equals_reference(shape: tuple[int, int, int], dtype: torch.dtype, wide: int, hopper: str) -> None:
    """Within rounding; nothing beside it is written; a token's result is the same whatever the others are."""
    from headway.kernels.wide_linear.launch import launch_gate_up

    x, weight = gate_up_inputs(shape, hopper, dtype)
    guarded = torch.full((shape[0] + 64, shape[1]), 7.0, dtype=dtype, device=hopper)
    out = guarded[: shape[0]]
    launch_gate_up(x, weight, out)
    assert_close(out, wide_gate_up.reference(x, weight, None, EPS))
    assert bool((guarded[shape[0] :] == 7.0).all())
    first = out.clone()
    for _ in range(20):
        launch_gate_up(x, weight, out)
        assert torch.equal(out, first), "a moving result would be a race"
    assert torch.equal(wide_gate_up(x[-5:], weight, None, EPS), first[-5:])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [*SHAPES, (1000, 512, 3072), (700, 2048, 4096)])
def test_add_equals_reference(shape: tuple[int, int, int], dtype: torch.dtype, hopper: str) -> None:
    arguments = gate_up_inputs(shape, hopper, dtype)
    found = added(wide_add, *arguments)
    assert_all_close(found, added(wide_add.reference, *arguments))
    for _ in range(20):
        again = added(wide_add, *arguments)
        assert all(map(torch.equal, again, found)), "a moving result would be a race"


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


@pytest.mark.gpu
def test_full_steps_are_the_same_every_time(hopper: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers without a norm between two products, in one graph, each started while the one before it still runs."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # no fills between them
    tokens, hidden, inner = 4096, 1024, 3072
    start, norm = (make_random(*shape, dtype=torch.bfloat16, device=hopper) for shape in ((tokens, hidden), (hidden,)))
    first, down = gate_up_inputs((tokens, hidden // 2, inner), hopper, torch.bfloat16)
    up = gate_up_inputs((1, inner, hidden), hopper, torch.bfloat16)[1]
    residual = start.clone()

    def step() -> torch.Tensor:
        residual.copy_(start)
        x = first
        for _ in range(12):
            y, squares = wide_add(x, down, residual, norm)
            x = wide_gate_up(y, up, squares, EPS)
        return x

    expected, x = start.clone(), first
    for _ in range(12):
        y, squares = wide_add.reference(x, down, expected, norm)
        x = wide_gate_up.reference(y, up, squares, EPS)
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    same = None
    for _ in range(100):
        graph.replay()
        same = (found.clone(), residual.clone()) if same is None else same
        assert torch.equal(found, same[0]) and torch.equal(residual, same[1]), "a moving result would be a race"
    torch.testing.assert_close(residual, expected, atol=0.1, rtol=0.1)  # roundings in a row


def test_only_measured_shapes_are_wide() -> None:
    for (kind, outputs, inputs), counts in TABLE.items():
        assert wide_tokens(kind, outputs, inputs) == counts and all(counts)
    assert wide_tokens("wide_gate_up", 6144, 1056) == ()


def test_tiles_leave_few_processors_idle() -> None:
    assert tile_width(512, 4096, 132) == 128 and tile_width(768, 4096, 132) == tile_width(8192, 4096, 132) == 256
    widths = (256, 192, 128)
    assert [tile_width(tokens, 6144, 132, widths) for tokens in (256, 512, 1024, 8192)] == [128, 192, 192, 256]
    assert tile_width(8192, 28672, 132, widths) == 256  # 192 would be ahead by half a percent, were it as good
