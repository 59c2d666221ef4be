"""The native CPU kernels against the references: odd sizes, poisoned outputs, padding, bounds; how they are built."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from headway.kernels.cpu import instructions, loader, ops
from headway.kernels.paged_attention import paged_attention
from headway.kernels.registry import OPS
from headway.kernels.rms_norm import add_rms_norm, rms_norm
from headway.kernels.rope_kv_write import rope_kv_write
from headway.kernels.silu_mul import silu_mul
from headway.kernels.testing import PagedInputs, assert_close, make_cos_sin, make_paged_inputs, make_random

BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
needs_native = pytest.mark.skipif(not ops.available(), reason="no C compiler here")


@pytest.fixture(params=[1, 2], ids=["1thread", "2threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def with_threads(count: int, function: object, *args: object) -> torch.Tensor:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        result: torch.Tensor = function(*args)  # type: ignore[operator]
        return result
    finally:
        torch.set_num_threads(before)


@needs_native
@BOTH
@pytest.mark.parametrize(("rows", "size"), [(1, 576), (3, 1), (7, 33), (300, 100), (0, 8)])
def test_norms(rows: int, size: int, dtype: torch.dtype, threads: int) -> None:
    x, weight = make_random(rows, size, dtype=dtype, device="cpu"), make_random(size, dtype=dtype, device="cpu", seed=1)
    assert_close(ops.rms_norm(x, weight, 1e-5), rms_norm.reference(x, weight, 1e-5))
    residual = make_random(rows, size, dtype=dtype, device="cpu", seed=2)
    expected_residual = residual.clone()
    expected = add_rms_norm.reference(x, expected_residual, weight, 1e-5)
    assert_close(ops.add_rms_norm(x, residual, weight, 1e-5), expected)
    assert torch.equal(residual, expected_residual)


@needs_native
@BOTH
@pytest.mark.parametrize(("rows", "size"), [(1, 1536), (5, 3), (200, 100), (0, 4)])
def test_silu_mul(rows: int, size: int, dtype: torch.dtype, threads: int) -> None:
    x = 4 * make_random(rows, 2 * size, dtype=dtype, device="cpu")
    assert_close(ops.silu_mul(x), silu_mul.reference(x))


@needs_native
def test_silu_mul_of_extremes() -> None:
    gate = torch.tensor([[-1e4, -100.0, -88.0, 0.0, 88.0, 1e4, float("nan")]])
    out = ops.silu_mul(torch.cat((gate, torch.ones_like(gate)), dim=1))
    expected = silu_mul.reference(torch.cat((gate, torch.ones_like(gate)), dim=1))
    torch.testing.assert_close(out, expected, atol=1e-30, rtol=1e-6, equal_nan=True)


@needs_native
@BOTH
@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "rot"), [(9, 3, 64, 64), (4, 1, 20, 12), (2, 2, 6, 6), (3, 1, 80, 32)]
)
def test_rope_kv_write(
    heads: int, kv_heads: int, size: int, rot: int, with_norms: bool, dtype: torch.dtype, threads: int
) -> None:
    tokens = 21
    qkv = make_random(tokens, (heads + 2 * kv_heads) * size, dtype=dtype, device="cpu")
    positions = torch.randint(0, 50, (tokens,), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    positions[0], positions[1] = -4, 1000  # clamped to the table
    # The first and the last place stay free: that is where a clamped index would land.
    kv_slots = 1 + torch.randperm(38, generator=torch.Generator().manual_seed(1))[:tokens].to(torch.int32)
    kv_slots[2], kv_slots[3], kv_slots[4] = -1, 40, -(2**31)  # padding and two lies: nothing may be written
    norms = [make_random(size, dtype=dtype, device="cpu", seed=s) if with_norms else None for s in (5, 6)]
    caches = [torch.full((5, 8, kv_heads, size), 7.0, dtype=dtype) for _ in range(4)]
    table = make_cos_sin(50, rot, "cpu")
    q = ops.rope_kv_write(qkv, positions, table, norms[0], norms[1], 1e-6, kv_slots, caches[0], caches[1], heads)
    reference = rope_kv_write.reference
    expected = reference(qkv, positions, table, norms[0], norms[1], 1e-6, kv_slots, caches[2], caches[3], heads)
    assert_close(q, expected)
    assert_close(caches[0], caches[2])
    assert torch.equal(caches[1], caches[3])
    untouched = torch.ones(40, dtype=torch.bool)
    untouched[kv_slots[(kv_slots >= 0) & (kv_slots < 40)].long()] = False
    assert (caches[0].flatten(0, 1)[untouched] == 7).all() and (caches[1].flatten(0, 1)[untouched] == 7).all()


def mixed_inputs(heads: tuple[int, int], size: int, block_size: int, dtype: torch.dtype) -> PagedInputs:
    """Decode rows (one long enough to be cut), a zombie, prefill rows, a zombie prefill row, padding."""
    rows = [(1, 1), (1, 40), (1, 600), (1, 0), (5, 5), (70, 100), (3, 30), (4, 0)]
    return make_paged_inputs(rows, num_decode_rows=4, heads=heads, size=size, block_size=block_size, dtype=dtype,
                             device="cpu", pad_rows=2, pad_tokens=3)  # fmt: skip


KINDS = [(0, 0, True, False), (11, 0, True, False), (0, 16, False, False), (0, 13, True, True), (0, 0, False, True)]
"""Window, chunk, sinks, slopes."""


@needs_native
@BOTH
@pytest.mark.parametrize(("window", "cap"), [(0, 0.0), (5, 0.0), (0, 2.0), (33, 1.0)])
@pytest.mark.parametrize(
    ("heads", "size", "block_size"),
    [((9, 3), 64, 16), ((4, 4), 20, 8), ((6, 1), 80, 32), ((8, 2), 7, 256), ((64, 1), 16, 64)],
)
def test_paged_attention(
    heads: tuple[int, int], size: int, block_size: int, window: int, cap: float, dtype: torch.dtype
) -> None:
    arguments = mixed_inputs(heads, size, block_size, dtype).arguments(size**-0.5, window, cap)
    out = ops.paged_attention(*arguments)  # type: ignore[arg-type]
    assert_close(out, paged_attention.reference(*arguments))
    assert (out[-3:] == 0).all(), "tokens past the last row"


@needs_native
@BOTH
@pytest.mark.parametrize(("window", "chunk", "sinks", "slopes"), KINDS)
def test_paged_attention_of_each_kind(
    window: int, chunk: int, sinks: bool, slopes: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sinks, chunks and slopes run in C, also where rows are cut into partial results."""
    made = (make_random(6, dtype=torch.float32, device="cpu", seed=seed) for seed in (21, 22))
    by_head = [each if wanted else None for each, wanted in zip(made, (sinks, slopes), strict=True)]
    arguments = mixed_inputs((6, 2), 20, 8, dtype).arguments(0.3, window, 0.0, chunk, *by_head)
    expected = paged_attention.reference(*arguments)
    monkeypatch.setattr(ops, "_reference", None)
    assert_close(ops.paged_attention(*arguments), expected)  # type: ignore[arg-type]


@needs_native
@BOTH
def test_paged_attention_does_not_depend_on_threads_or_neighbours(dtype: torch.dtype) -> None:
    inputs = mixed_inputs((9, 3), 64, 16, dtype)
    arguments = inputs.arguments(0.125)
    one, two = (with_threads(count, ops.paged_attention, *arguments) for count in (1, 2))
    assert torch.equal(one, two)
    row = 2  # alone in its batch
    alone = ops.paged_attention(
        inputs.q[row : row + 1], inputs.k_cache, inputs.v_cache, inputs.block_tables, inputs.row_slots[row : row + 1],
        torch.tensor([0, 1], dtype=torch.int32), inputs.seq_lens[row : row + 1],
        inputs.arrivals[row : row + 1], 0.125, 0, 0.0, 1, 1, 600,
    )  # fmt: skip
    assert torch.equal(alone[0], one[row])


@needs_native
def test_paged_attention_survives_wild_indices() -> None:
    inputs = make_paged_inputs([(1, 40), (1, 40), (6, 20)], num_decode_rows=2, heads=(4, 2), size=16, block_size=8,
                               dtype=torch.float32, device="cpu")  # fmt: skip
    inputs.k_cache[0], inputs.v_cache[0] = 0.5, 0.25  # block 0 stands in for an invalid one
    inputs.block_tables[inputs.row_slots[0].long(), 1] = 10**6
    inputs.block_tables[inputs.row_slots[2].long(), 0] = -3
    inputs.seq_lens[1] = 10**9  # longer than the table reaches
    inputs.block_tables[inputs.row_slots[1].long()] = torch.tensor([1, 2, 3, 4, 5], dtype=torch.int32)
    for cache in (inputs.k_cache, inputs.v_cache):
        cache.nan_to_num_(1.0)
    arguments = inputs.arguments(0.25)
    assert_close(ops.paged_attention(*arguments), paged_attention.reference(*arguments))  # type: ignore[arg-type]
    inputs.row_slots[:] = torch.tensor([-7, 99, 2**31 - 1])
    assert (ops.paged_attention(*inputs.arguments(0.25)) == 0).all()  # type: ignore[arg-type]


@needs_native
def test_nan_is_not_hidden() -> None:
    inputs = make_paged_inputs([(1, 9)], num_decode_rows=1, heads=(2, 2), size=16, block_size=8, dtype=torch.float32,
                               device="cpu")  # fmt: skip
    inputs.q[0, 0, 3] = float("nan")
    out = ops.paged_attention(*inputs.arguments(0.25))  # type: ignore[arg-type]
    assert out[0, 0].isnan().all() and not out[0, 1].isnan().any()


@needs_native
def test_other_layouts_and_dtypes_take_the_reference() -> None:
    x, weight = make_random(4, 32, dtype=torch.float16, device="cpu"), torch.ones(32, dtype=torch.float16)
    assert torch.equal(ops.rms_norm(x, weight, 1e-5), rms_norm.reference(x, weight, 1e-5))
    wide = make_random(4, 64, dtype=torch.float32, device="cpu")[:, ::2]
    assert torch.equal(ops.rms_norm(wide, torch.ones(32), 1e-5), rms_norm.reference(wide, torch.ones(32), 1e-5))
    assert torch.equal(ops.silu_mul(wide), silu_mul.reference(wide))


def test_every_native_operation_has_the_reference_signature() -> None:
    for name in ("rms_norm", "add_rms_norm", "silu_mul", "rope_kv_write", "paged_attention"):
        arguments = [argument.name for argument in torch._C.parse_schema("headway::" + OPS[name].schema).arguments]
        function = getattr(ops, name)
        assert list(function.__code__.co_varnames[: function.__code__.co_argcount]) == arguments


SCRIPT = """
import logging, torch
logging.basicConfig(level=logging.INFO)
from headway.kernels.cpu import ops
print(ops.available(), ops.available())
"""


def run_with(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), **environment}
    return subprocess.run([sys.executable, "-c", SCRIPT], env=variables, capture_output=True, text=True, check=True)


def test_bogus_compiler_and_switch_fall_back_and_say_so_once(tmp_path: Path) -> None:
    bogus = tmp_path / "cc-that-fails"
    bogus.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho it is broken >&2\nexit 1\n')
    bogus.chmod(0o755)
    for environment, words in (
        ({"CC": str(bogus)}, "it is broken"),
        ({"CC": "no-such-compiler"}, "no C compiler"),
        ({"HEADWAY_NATIVE": "0"}, "HEADWAY_NATIVE=0"),
    ):
        done = run_with(tmp_path, **environment)
        assert done.stdout.split() == ["False", "False"]
        assert done.stderr.count(words) == 1, done.stderr
    assert not list(tmp_path.glob("cache/headway/*")), "a failed build leaves nothing behind"


@pytest.fixture
def quick_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of what becomes of the file do not wait for its code to be optimised."""
    monkeypatch.setattr(loader, "FLAGS", (*loader.FLAGS, "-O0"))


@needs_native
@pytest.mark.usefixtures("quick_compiler")
def test_cache_folder_is_honoured_private_and_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = loader.cache_folder()
    assert folder == tmp_path / "headway" and stat.S_IMODE(folder.stat().st_mode) == 0o700
    built = loader.build(folder)
    assert built.parent == folder and list(folder.iterdir()) == [built]
    monkeypatch.setattr(subprocess, "run", _only_version(subprocess.run))
    assert loader.build(folder) == built
    loader.load(built)


def _only_version(run: object) -> object:
    def checked(command: list[str], **options: object) -> object:
        assert command[-1] == "--version", "the second build must not compile"
        return run(command, **options)  # type: ignore[operator]

    return checked


@needs_native
def test_a_cache_others_can_write_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    loader.cache_folder().chmod(0o777)
    with pytest.raises(RuntimeError, match="chmod go-w"):
        loader.cache_folder()


def test_preferred_dtype_follows_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our kernels gain from bfloat16 everywhere, torch's only where the CPU multiplies it."""
    for native, flags, expected in (
        (True, {"avx2"}, torch.bfloat16),
        (False, {"avx2"}, torch.float32),
        (False, {"avx512f", "avx512_bf16"}, torch.bfloat16),
    ):
        monkeypatch.setattr(ops, "available", lambda native=native: native)
        monkeypatch.setattr(instructions, "cpu_flags", lambda flags=flags: frozenset(flags))
        assert ops.preferred_dtype() is expected


@needs_native
@pytest.mark.usefixtures("quick_compiler")
def test_what_somebody_else_owns_or_can_write_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder, and the library in it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = loader.cache_folder()
    built = loader.build(folder)
    for mode in (0o620, 0o602):
        built.chmod(mode)
        with pytest.raises(RuntimeError, match=f"{built.name} can be written by others"):
            loader.build(folder)
    built.chmod(0o600)
    assert loader.build(folder) == built
    monkeypatch.setattr("os.getuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(RuntimeError, match="set XDG_CACHE_HOME"):
        loader.cache_folder()
