"""Sparse, nested, packed and scattered data; graphs; transforms; moving data. The first word of each docstring is the label."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn


def edges(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(5, (12,), device=device), torch.randint(5, (12,), device=device)


def edges_coalesced(device: str) -> Iterator[None]:
    """Waits: equal places are merged, and how many are left is read."""
    row, col = edges(device)
    matrix = torch.sparse_coo_tensor(torch.stack([row, col]), torch.ones(12, device=device), (5, 5))
    yield
    matrix.coalesce()


def sparse_made_dense(device: str) -> Iterator[None]:
    """Runs on: the number of values is known."""
    places = torch.stack([torch.arange(4, device=device)] * 2)
    matrix = torch.sparse_coo_tensor(places, torch.ones(4, device=device), (4, 4), is_coalesced=True)
    yield
    matrix.to_dense()


def rows_compressed_times_a_vector(device: str) -> Iterator[None]:
    """Runs on: cuSPARSE is given all sizes."""
    start, col = torch.arange(5, device=device), torch.arange(4, device=device)
    matrix = torch.sparse_csr_tensor(start, col, torch.ones(4, device=device), (4, 4))
    x = torch.randn(4, 2, device=device)
    yield
    matrix @ x


def sparse_gradients_of_an_embedding(device: str) -> Iterator[None]:
    """Waits: SparseAdam coalesces the gradient."""
    table = nn.Embedding(9, 4, sparse=True).to(device)
    optimizer = torch.optim.SparseAdam(table.parameters())
    table(torch.randint(9, (6,), device=device)).sum().backward()
    yield
    optimizer.step()


def embedding_with_a_greatest_norm(device: str) -> Iterator[None]:
    """Waits: the rows to scale are made unique first."""
    table = nn.Embedding(9, 4, max_norm=1.0).to(device)
    ids = torch.randint(9, (6,), device=device)
    yield
    table(ids)


def bags_of_words(device: str) -> Iterator[None]:
    """Runs on: offsets stay on the device."""
    bag = nn.EmbeddingBag(9, 4, mode="sum").to(device)
    ids, offsets = torch.randint(9, (6,), device=device), torch.tensor([0, 2, 4]).to(device)
    yield
    bag(ids, offsets)


def convolution_by_fourier(device: str) -> Iterator[None]:
    """Runs on: transforms of sizes the host knows."""
    x, kernel = torch.randn(2, 32, device=device), torch.randn(32, device=device)
    yield
    torch.fft.irfft(torch.fft.rfft(x, n=64) * torch.fft.rfft(kernel, n=64), n=64)[..., :32]


def fourier_shifted_in_two_dimensions(device: str) -> Iterator[None]:
    """Runs on: rolls and complex arithmetic."""
    x = torch.randn(8, 8, device=device)
    yield
    torch.fft.fftshift(torch.fft.fft2(x)).abs().log1p()


def sound_from_a_spectrogram(device: str) -> Iterator[None]:
    """Waits: istft asks whether the windows' sum is anywhere zero."""
    window = torch.hann_window(16, device=device)
    spectrum = torch.stft(torch.randn(64, device=device), 16, window=window, return_complex=True)
    yield
    torch.istft(spectrum, 16, window=window)


def greatest_of_each_segment(device: str) -> Iterator[None]:
    """Runs on: scatter_reduce into a known number of rows."""
    row, _ = edges(device)
    x = torch.randn(12, 3, device=device)
    yield
    zeros = torch.full((5, 3), -float("inf"), device=device)
    zeros.scatter_reduce(0, row.unsqueeze(-1).expand(-1, 3), x, "amax").index_add_(0, row, x)


def segments_by_lengths(device: str) -> Iterator[None]:
    """Waits: the lengths are checked against the rows."""
    x, lengths = torch.randn(6, 2, device=device), torch.tensor([1, 2, 3]).to(device)
    yield
    torch.segment_reduce(x, "sum", lengths=lengths, axis=0)


def values_counted_in_buckets(device: str) -> Iterator[None]:
    """Waits: bincount reads the greatest bucket."""
    x, borders = torch.rand(32, device=device), torch.linspace(0, 1, 5, device=device)
    yield
    torch.bincount(torch.bucketize(x, borders), minlength=6)


def identifiers_made_dense(device: str) -> Iterator[None]:
    """Waits: how many are different is read."""
    ids = torch.randint(100, (12,), device=device)
    yield
    torch.unique(ids, return_inverse=True, return_counts=True)


def rows_found_up_to_a_bound(device: str) -> Iterator[None]:
    """Runs on: nonzero_static is told the size."""
    mask = torch.rand(12, device=device) > 0.5
    yield
    torch.nonzero_static(mask, size=12, fill_value=-1)


def pairs_of_all(device: str) -> Iterator[None]:
    """Waits: combinations selects by a mask."""
    x = torch.arange(5, device=device)
    yield
    torch.combinations(x, r=2)


def grid_of_places(device: str) -> Iterator[None]:
    """Runs on: meshgrid and a stack."""
    yield
    torch.stack(torch.meshgrid(torch.arange(3, device=device), torch.arange(4, device=device), indexing="ij"), -1)


def rows_packed_in_any_order(device: str) -> Iterator[None]:
    """Waits: the order is made on the host and goes up."""
    net, x = nn.GRU(3, 4, batch_first=True).to(device), torch.randn(3, 5, 3, device=device)
    lengths = torch.tensor([2, 5, 3])
    yield
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    nn.utils.rnn.pad_packed_sequence(net(packed)[0], batch_first=True)


def rows_padded_on_the_device(device: str) -> Iterator[None]:
    """Runs on: shapes are the host's."""
    rows = [torch.randn(n, 3, device=device) for n in (2, 4, 1)]
    yield
    nn.utils.rnn.pad_sequence(rows, batch_first=True)


def rows_nested(device: str) -> Iterator[None]:
    """Waits: the offsets are made of Python numbers."""
    rows = [torch.randn(n, 3, device=device) for n in (2, 4, 1)]
    yield
    torch.nested.as_nested_tensor(rows, layout=torch.jagged) * 2


def encoder_with_padding(device: str) -> Iterator[None]:
    """Runs on: in training the mask is added to the scores."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).to(device)
    x, padding = torch.randn(2, 4, 8, device=device), torch.arange(4, device=device).expand(2, 4) > 2
    yield
    model(x, src_key_padding_mask=padding)


def encoder_whose_padding_is_taken_out(device: str) -> Iterator[None]:
    """Waits: for inference the rows are nested, by lengths that the host reads."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).to(device).eval()
    x, padding = torch.randn(2, 4, 8, device=device), torch.arange(4, device=device).expand(2, 4) > 2
    yield
    with torch.inference_mode():
        model(x, src_key_padding_mask=padding)


def attention_with_a_boolean_mask(device: str) -> Iterator[None]:
    """Runs on: masks are data."""
    q, mask = torch.randn(1, 2, 4, 8, device=device), torch.ones(4, 4, dtype=torch.bool, device=device).tril()
    yield
    F.scaled_dot_product_attention(q, q, q, attn_mask=mask)


def borders_of_packed_rows(device: str) -> Iterator[None]:
    """Runs on: cumulative lengths stay on the device."""
    lengths = torch.randint(1, 5, (4,), device=device)
    yield
    F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def parts_of_lengths_on_the_device(device: str) -> Iterator[None]:
    """Waits: split wants numbers of the host."""
    x, lengths = torch.randn(6, 2, device=device), torch.tensor([1, 2, 3]).to(device)
    yield
    torch.split(x, lengths.tolist())


def classes_by_frequency(device: str) -> Iterator[None]:
    """Waits: the head's rows are found by nonzero."""
    head = nn.AdaptiveLogSoftmaxWithLoss(4, 12, cutoffs=[3, 6]).to(device)
    x, target = torch.randn(6, 4, device=device), torch.randint(12, (6,), device=device)
    yield
    head(x, target)


def pooled_and_unpooled(device: str) -> Iterator[None]:
    """Runs on: indices are data."""
    x = torch.randn(1, 2, 4, 4, device=device)
    yield
    F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2)


def picture_warped(device: str) -> Iterator[None]:
    """Runs on: a grid and an interpolation."""
    x, turn = torch.randn(1, 2, 4, 4, device=device), torch.eye(2, 3, device=device).unsqueeze(0)
    yield
    F.grid_sample(x, F.affine_grid(turn, [1, 2, 4, 4], align_corners=False), align_corners=False)


def main_directions(device: str) -> Iterator[None]:
    """Waits: the singular values are checked for convergence."""
    x = torch.randn(8, 5, device=device)
    yield
    torch.pca_lowrank(x, q=3)


def spectral_norm_of_a_matrix(device: str) -> Iterator[None]:
    """Waits: it is the greatest singular value."""
    x = torch.randn(4, 4, device=device)
    yield
    torch.linalg.matrix_norm(x, ord=2)


def norms_of_matrices(device: str) -> Iterator[None]:
    """Runs on: sums of squares."""
    x = torch.randn(3, 4, 4, device=device)
    yield
    torch.linalg.matrix_norm(x) + torch.linalg.vector_norm(x, dim=(1, 2))


def middle_values(device: str) -> Iterator[None]:
    """Runs on: median and kthvalue sort on the device."""
    x = torch.randn(3, 9, device=device)
    yield
    x.median(dim=1)
    x.kthvalue(2, dim=1)


def neighbours_sampled_with_a_fixed_fan_out(device: str) -> Iterator[None]:
    """Runs on: random offsets into each node's part."""
    start, col = torch.arange(0, 13, 2, device=device), torch.randint(6, (12,), device=device)
    seeds = torch.randint(6, (4,), device=device)
    yield
    degree = start[seeds + 1] - start[seeds]
    pick = (torch.rand(4, 3, device=device) * degree.unsqueeze(1)).long()
    col[start[seeds].unsqueeze(1) + pick]


def neighbours_relabelled(device: str) -> Iterator[None]:
    """Waits: the nodes of the sample are made unique."""
    seeds, found = torch.randint(6, (4,), device=device), torch.randint(6, (4, 3), device=device)
    yield
    nodes, place = torch.cat([seeds, found.flatten()]).unique(return_inverse=True)
    torch.randn(6, 2, device=device)[nodes], place[4:].view(4, 3)


def attention_over_edges(device: str) -> Iterator[None]:
    """Runs on: a softmax by segments of a known number of nodes."""
    row, col = edges(device)
    x = torch.randn(5, 3, device=device)
    yield
    score = (x[row] * x[col]).sum(-1)
    top = torch.full((5,), -float("inf"), device=device).scatter_reduce(0, row, score, "amax")
    weight = (score - top[row]).exp()
    weight = weight / torch.zeros(5, device=device).index_add(0, row, weight)[row]
    torch.zeros(5, 3, device=device).index_add(0, row, weight.unsqueeze(-1) * x[col])


def tensor_handed_on_without_a_copy(device: str) -> Iterator[None]:
    """Runs on: DLPack orders streams, not the host."""
    x = torch.randn(4, device=device)
    yield
    torch.from_dlpack(x) + 1


def array_of_the_host(device: str) -> Iterator[None]:
    """Waits: the values go down."""
    import numpy as np

    x = torch.randn(4, device=device)
    yield
    np.asarray(x.cpu()).mean()


def numbers_gathered_into_a_tensor(device: str) -> Iterator[None]:
    """Waits: each number is read, and the list goes up."""
    parts = [torch.rand((), device=device) for _ in range(3)]
    yield
    torch.tensor(parts, device=device)


def numbers_stacked(device: str) -> Iterator[None]:
    """Runs on: stack and Python's sum launch kernels."""
    parts = [torch.rand((), device=device) for _ in range(3)]
    yield
    torch.stack(parts).mean() + sum(parts) / len(parts)


def greatest_by_python(device: str) -> Iterator[None]:
    """Waits: max() compares, and bool() reads."""
    parts = [torch.rand((), device=device) for _ in range(3)]
    yield
    max(parts)


def batch_collated(device: str) -> Iterator[None]:
    """Runs on: rows of the device are stacked."""
    rows = [{"x": torch.rand(3, device=device), "y": torch.rand((), device=device)} for _ in range(4)]
    yield
    torch.utils.data.default_collate(rows)


def model_cast_down(device: str) -> Iterator[None]:
    """Runs on: casts on the device."""
    model = nn.Linear(4, 4).to(device)
    yield
    model.to(torch.bfloat16).to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def model_brought_home(device: str) -> Iterator[None]:
    """Waits: the weights go down."""
    model = nn.Linear(4, 4).to(device)
    yield
    model.cpu()


def batches_fetched_ahead(device: str) -> Iterator[None]:
    """Runs on: pinned memory, a stream of its own, and record_stream."""
    batches = [torch.randn(8, 4).pin_memory() for _ in range(3)]
    ahead = torch.cuda.Stream()
    yield
    for batch in batches:
        with torch.cuda.stream(ahead):
            fresh = batch.to(device, non_blocking=True)
        torch.cuda.current_stream().wait_stream(ahead)
        fresh.record_stream(torch.cuda.current_stream())
        fresh.sum()


def graph_replayed(device: str) -> Iterator[None]:
    """Runs on: one launch."""
    x, graph = torch.randn(4, 4, device=device), torch.cuda.CUDAGraph()
    x @ x
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        y = (x @ x).relu()
    yield
    x.fill_(0.5)
    graph.replay()
    y + 1


def floats_of_eight_bits(device: str) -> Iterator[None]:
    """Runs on: casts and a scale that stays on the device."""
    x = torch.randn(4, 8, device=device)
    yield
    scale = x.abs().amax() / 448
    (x / scale).to(torch.float8_e4m3fn).to(torch.float32) * scale


def rows_of_one_step_with_a_shared_state(device: str) -> Iterator[None]:
    """Runs on: a scan written as a loop over a known length."""
    a, x, h = torch.rand(2, 5, 3, device=device), torch.randn(2, 5, 3, device=device), torch.zeros(2, 3, device=device)
    yield
    out = []
    for t in range(x.shape[1]):
        h = a[:, t] * h + x[:, t]
        out.append(h)
    torch.stack(out, 1)
