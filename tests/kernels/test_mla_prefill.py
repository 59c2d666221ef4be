"""``mla_prefill`` and ``mla_gather``: whole prompts and pieces of contexts against attention written out, and the kernels
against the references."""

from __future__ import annotations

import pytest
import torch

from headway.kernels.mla_prefill import mla_gather, mla_prefill
from headway.kernels.mla_prefill.tiles import TILES, choose_tile
from headway.kernels.testing import assert_close, kernel_dtypes, make_random
from tests.kernels.latent_cases import SHORT, SIZES, Scene, Sizes, kernel, on, scene, tokens_of

SCALE = 0.3


def made_of(made: Scene, piece: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [N, H, Dn + Dv] of latents, and what all heads share of the keys."""
    sizes = made.sizes
    kv_b = make_random(
        sizes.heads * (sizes.nope + sizes.value), sizes.rank, dtype=piece.dtype, device=str(piece.device), seed=7
    )
    kv = torch.nn.functional.linear(piece[:, : sizes.rank], kv_b / 4).unflatten(1, (sizes.heads, -1))
    return kv.contiguous(), piece[:, sizes.rank :]


def own_latents(made: Scene) -> torch.Tensor:
    """[T, L + Dr], what the cache has of the step's tokens."""
    found = made.latents.new_zeros(len(made.q), made.latents.shape[2])
    starts, lens = made.query_start.tolist(), made.seq_lens.tolist()
    for row, length in enumerate(lens):
        count = starts[row + 1] - starts[row]
        if length:
            cached = made.latents[made.block_tables[int(made.row_slots[row])].long()].flatten(0, 1)
            found[starts[row] : starts[row + 1]] = cached[length - count : length]
    return found


def attend(made: Scene, implementations: tuple[object, object], size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, sums) of long rows, contexts in pieces of ``size``."""
    gather, prefill = implementations
    out = torch.full((len(made.q), made.sizes.heads, made.sizes.value), 7.0, device=made.q.device)
    sums = torch.full(made.q.shape[:2], 7.0, device=made.q.device)
    bound = made.prefix + 3
    common = (made.query_start, made.seq_lens, SCALE)
    out, sums = on(prefill, made.q, *made_of(made, own_latents(made)), out, sums, *common, -1, SHORT, bound)[3:5]  # type: ignore[arg-type]
    for first in range(0, bound, size):
        piece = on(gather, made.latents, *made.tables, first, size, SHORT, made.q.dtype)  # type: ignore[arg-type]
        out, sums = on(prefill, made.q, *made_of(made, piece), out, sums, *common, first, SHORT, bound)[3:5]  # type: ignore[arg-type]
    return out, sums


REFERENCES = mla_gather.reference, mla_prefill.reference


@pytest.mark.parametrize("size", [1, 16, 200])
def test_reference_equals_attention_written_out(size: int) -> None:
    made, sizes = scene(SIZES[0], "cpu"), SIZES[0]
    out, sums = attend(made, REFERENCES, size)
    starts, lens = made.query_start.tolist(), made.seq_lens.tolist()
    for row, length in enumerate(lens):
        count = starts[row + 1] - starts[row]
        cached = made.latents[made.block_tables[int(made.row_slots[row])].long()].flatten(0, 1)[:length]
        kv, key = made_of(made, cached)
        for token in range(starts[row], starts[row + 1]):
            if count <= SHORT:
                assert (out[token] == 7.0).all()
            elif not length:
                assert not out[token].any()
            else:
                sees = length - (starts[row + 1] - token) + 1
                keys = torch.cat([kv[:sees, :, : sizes.nope], key[:sees, None].expand(-1, sizes.heads, -1)], dim=2)
                scores = torch.einsum("hd,nhd->hn", made.q[token].double(), keys.double()) * SCALE
                values = torch.einsum("hn,nhd->hd", scores.softmax(1), kv[:sees, :, sizes.nope :].double())
                assert_close(out[token], values.float())
                assert_close(sums[token], (scores.logsumexp(1) / torch.tensor(2.0).log()).float())
    assert not out[starts[-1] :].any()


@pytest.mark.parametrize(("sizes", "size"), [(SIZES[0], 200), (SIZES[1], 32)])
def test_kernels_equal_references(sizes: Sizes, size: int, device: str) -> None:
    for dtype in kernel_dtypes():
        made = scene(sizes, device, dtype)
        made.q = made.q / 2
        expected = attend(made, REFERENCES, size)
        found = attend(made, (kernel(mla_gather), kernel(mla_prefill)), size)
        mine = tokens_of(made, lambda count, length: count > SHORT, nobodys=True)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(
                one[mine], other[mine], atol=3e-2 if dtype is not torch.float32 else 2e-5, rtol=1e-3
            )
        others = tokens_of(made, lambda count, length: count <= SHORT)
        assert (found[0][others] == 7.0).all(), "rows that are not long are left alone"


def test_gathering_many_rows(device: str) -> None:
    """More rows than a program looks at together, pieces that begin and end inside of contexts."""
    rows = [(4, 4 + n % 7) for n in range(150)]
    made = scene(SIZES[0], device, rows=rows, pads=(3, 0))
    for first in (0, 33, 400):
        arguments = (made.latents, *made.tables, first, 50, SHORT, torch.float32)
        assert_close(on(kernel(mla_gather), *arguments), on(mla_gather.reference, *arguments))


def test_gathering_eight_bits(device: str) -> None:
    made = scene(SIZES[0], device, cached=torch.float8_e4m3fn)
    arguments = (made.latents, *made.tables, 0, made.prefix + 2, SHORT, torch.float32)
    found = on(kernel(mla_gather), *arguments)
    assert_close(found, on(mla_gather.reference, *arguments))
    assert not found[-2:].any() and found[:-2].any(1).all()


@pytest.mark.parametrize("sizes", [(192, 128), (256, 256), (320, 256), (96, 64)])
def test_tiles_fit_every_card(sizes: tuple[int, int]) -> None:
    kilobytes = (99, 163, 227)
    chosen = [choose_tile(*sizes, 2, 8192, limit << 10) for limit in kilobytes]
    assert [TILES.index(tile) for tile in chosen] == sorted((TILES.index(tile) for tile in chosen), reverse=True)
    assert all(tile.block_q >= 32 for tile in chosen)
    assert choose_tile(*sizes, 2, 20, 227 << 10).block_q == 16
