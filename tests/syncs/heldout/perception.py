"""Vision, detection, segmentation, speech, graphs, point clouds, diffusion."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn


def boxes_overlap(device: str) -> Iterator[None]:
    a, b = torch.rand(6, 4, device=device), torch.rand(5, 4, device=device)
    yield
    low, high = torch.max(a[:, None, :2], b[None, :, :2]), torch.min(a[:, None, 2:], b[None, :, 2:])
    (high - low).clamp(min=0).prod(-1)


def boxes_kept_above_a_score(device: str) -> Iterator[None]:
    boxes, scores = torch.rand(30, 4, device=device), torch.rand(30, device=device)
    yield
    boxes[scores > 0.5]


def boxes_kept_by_count(device: str) -> Iterator[None]:
    boxes, scores = torch.rand(30, 4, device=device), torch.rand(30, device=device)
    yield
    boxes[scores.topk(10).indices]


def suppression_loop(device: str) -> Iterator[None]:
    overlap, order = torch.rand(6, 6, device=device), torch.rand(6, device=device).argsort()
    yield
    while order.numel() > 0:
        first = order[0]
        order = order[1:][overlap[first][order[1:]] < 0.3]


def anchors_matched(device: str) -> Iterator[None]:
    overlap = torch.rand(9, 4, device=device)
    yield
    best, match = overlap.max(1)
    torch.where(best < 0.4, -1, match)


def anchors_matched_with_assignments(device: str) -> Iterator[None]:
    overlap = torch.rand(9, 4, device=device)
    yield
    best, match = overlap.max(1)
    match[best < 0.4] = -1
    match[(best >= 0.4) & (best < 0.6)] = -2


def positives_of_the_match(device: str) -> Iterator[None]:
    match = torch.randint(-1, 4, (9,), device=device)
    yield
    torch.where(match >= 0)[0]


def hungarian_on_the_host(device: str) -> Iterator[None]:
    cost = torch.rand(5, 5, device=device)
    yield
    cost.cpu().numpy().argmin(1)


def focal_loss(device: str) -> Iterator[None]:
    x, y = torch.randn(8, 4, device=device, requires_grad=True), torch.rand(8, 4, device=device).round()
    yield
    p, ce = x.sigmoid(), F.binary_cross_entropy_with_logits(x, y, reduction="none")
    (ce * (1 - (p * y + (1 - p) * (1 - y))) ** 2).sum().backward()


def loss_divided_by_positives(device: str) -> Iterator[None]:
    loss, match = torch.rand(9, device=device), torch.randint(-1, 4, (9,), device=device)
    yield
    loss.sum() / (match >= 0).sum().clamp(min=1)


def loss_divided_by_positives_in_python(device: str) -> Iterator[None]:
    loss, match = torch.rand(9, device=device), torch.randint(-1, 4, (9,), device=device)
    yield
    loss.sum() / max(1, int((match >= 0).sum()))


def loss_divided_by_max_of_python(device: str) -> Iterator[None]:
    loss, match = torch.rand(9, device=device), torch.randint(-1, 4, (9,), device=device)
    yield
    loss.sum() / max((match >= 0).sum(), 1)


def dice_loss(device: str) -> Iterator[None]:
    x, y = torch.rand(2, 1, 8, 8, device=device), torch.rand(2, 1, 8, 8, device=device).round()
    yield
    1 - (2 * (x * y).sum((1, 2, 3)) + 1) / (x.sum((1, 2, 3)) + y.sum((1, 2, 3)) + 1)


def segmentation_with_void_pixels(device: str) -> Iterator[None]:
    x, y = torch.randn(2, 5, 6, 6, device=device), torch.randint(0, 5, (2, 6, 6), device=device)
    yield
    F.cross_entropy(x, y.masked_fill(y == 4, 255), ignore_index=255)


def hard_pixels_by_fixed_share(device: str) -> Iterator[None]:
    loss = torch.rand(2, 36, device=device)
    yield
    loss.topk(9, dim=1).values.mean()


def hard_pixels_by_threshold(device: str) -> Iterator[None]:
    loss = torch.rand(2, 36, device=device)
    yield
    loss[loss > 0.7].mean()


def hard_pixels_by_weights(device: str) -> Iterator[None]:
    loss = torch.rand(2, 36, device=device)
    yield
    hard = (loss > 0.7).float()
    (loss * hard).sum() / hard.sum().clamp(min=1)


def union_by_classes_present(device: str) -> Iterator[None]:
    y = torch.randint(0, 5, (36,), device=device)
    yield
    [(y == c).sum() for c in torch.unique(y)]


def union_by_all_classes(device: str) -> Iterator[None]:
    x, y = torch.randint(0, 5, (36,), device=device), torch.randint(0, 5, (36,), device=device)
    yield
    [((x == c) & (y == c)).sum() / ((x == c) | (y == c)).sum() for c in range(5)]


def upsampled_features(device: str) -> Iterator[None]:
    x = torch.rand(1, 3, 4, 4, device=device, requires_grad=True)
    yield
    F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False).sum().backward()


def patches_embedded(device: str) -> Iterator[None]:
    x, conv = torch.rand(2, 3, 8, 8, device=device), nn.Conv2d(3, 6, 4, 4).to(device)
    yield
    conv(x).flatten(2).transpose(1, 2)


def patches_masked_at_random(device: str) -> Iterator[None]:
    x = torch.rand(2, 16, 6, device=device)
    yield
    keep = torch.rand(2, 16, device=device).argsort(1)[:, :4]
    x.gather(1, keep[..., None].expand(-1, -1, 6))


def contrastive_loss(device: str) -> Iterator[None]:
    a, b = torch.randn(6, 4, device=device), torch.randn(6, 4, device=device)
    scale = torch.tensor(2.6, device=device)
    yield
    logits = scale.exp() * F.normalize(a, dim=1) @ F.normalize(b, dim=1).T
    F.cross_entropy(logits, torch.arange(6, device=device))


def triplets_mined(device: str) -> Iterator[None]:
    x, y = torch.randn(8, 4, device=device), torch.randint(0, 3, (8,), device=device)
    yield
    distance = torch.cdist(x, x)
    same = y[:, None] == y[None]
    hardest = (distance * same).max(1).values
    F.relu(hardest - distance.masked_fill(same, 1e9).min(1).values + 0.2).mean()


def triplets_listed(device: str) -> Iterator[None]:
    y = torch.randint(0, 3, (8,), device=device)
    yield
    torch.nonzero(y[:, None] == y[None], as_tuple=True)


def diffusion_noise(device: str) -> Iterator[None]:
    x, bars = torch.rand(4, 3, 8, 8, device=device), torch.linspace(0.99, 0.01, 50, device=device)
    yield
    t = torch.randint(0, 50, (4,), device=device)
    a = bars[t].view(-1, 1, 1, 1)
    a.sqrt() * x + (1 - a).sqrt() * torch.randn_like(x)


def diffusion_noise_with_a_table_on_the_host(device: str) -> Iterator[None]:
    x, bars = torch.rand(4, 3, 8, 8, device=device), torch.linspace(0.99, 0.01, 50)
    t = torch.randint(0, 50, (4,))
    yield
    bars[t].to(device).view(-1, 1, 1, 1) * x


def diffusion_sampling_over_host_steps(device: str) -> Iterator[None]:
    x, bars = torch.rand(1, 3, 8, 8, device=device), torch.linspace(0.99, 0.01, 5, device=device)
    yield
    for t in range(4, 0, -1):
        x = (x - (1 - bars[t]).sqrt() * x.tanh()) / bars[t].sqrt()


def diffusion_sampling_over_device_steps(device: str) -> Iterator[None]:
    x, steps = torch.rand(1, 3, 8, 8, device=device), torch.linspace(9, 0, 4, device=device).long()
    yield
    for t in steps:
        x = x * 0.9 if t > 0 else x


def time_embedding(device: str) -> Iterator[None]:
    t = torch.rand(4, device=device)
    yield
    frequency = torch.exp(-9.2 * torch.arange(0, 8, dtype=torch.float32, device=device) / 8)
    torch.cat([(t[:, None] * frequency).sin(), (t[:, None] * frequency).cos()], 1)


def image_to_bytes(device: str) -> Iterator[None]:
    image = torch.rand(3, 8, 8, device=device)
    yield
    image.mul(255).clamp(0, 255).byte().permute(1, 2, 0).cpu().numpy()


def spectrogram(device: str) -> Iterator[None]:
    wave, window = torch.randn(800, device=device), torch.hann_window(64, device=device)
    yield
    torch.stft(wave, 64, 16, window=window, return_complex=True).abs().clamp(min=1e-5).log()


def spectrogram_with_a_fresh_window(device: str) -> Iterator[None]:
    wave = torch.randn(800, device=device)
    yield
    torch.stft(wave, 64, 16, window=torch.hann_window(64).to(device), return_complex=True)


def connectionist_loss(device: str) -> Iterator[None]:
    x = torch.randn(9, 2, 5, device=device).log_softmax(-1)
    y, long, short = torch.ones(2, 3, dtype=torch.long), torch.tensor([9, 9]), torch.tensor([3, 2])
    yield
    F.ctc_loss(x, y.to(device), long, short)


def greedy_transcript(device: str) -> Iterator[None]:
    x = torch.randn(9, 5, device=device)
    yield
    torch.unique_consecutive(x.argmax(-1)).tolist()


def recurrent_over_packed_rows(device: str) -> Iterator[None]:
    net, x = nn.GRU(4, 6, batch_first=True).to(device), torch.randn(3, 5, 4, device=device)
    lengths = torch.tensor([5, 4, 2])
    yield
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
    nn.utils.rnn.pad_packed_sequence(net(packed)[0], batch_first=True)


def messages_added_up(device: str) -> Iterator[None]:
    x, edges = torch.randn(6, 4, device=device), torch.randint(0, 6, (2, 12), device=device)
    yield
    torch.zeros_like(x).index_add_(0, edges[1], x[edges[0]])


def nodes_counted_from_edges(device: str) -> Iterator[None]:
    edges = torch.randint(0, 6, (2, 12), device=device)
    yield
    torch.zeros(int(edges.max()) + 1, device=device)


def degrees_of_nodes(device: str) -> Iterator[None]:
    edges = torch.randint(0, 6, (2, 12), device=device)
    yield
    torch.zeros(6, device=device).scatter_add_(0, edges[0], torch.ones(12, device=device)).clamp(min=1).rsqrt()


def loops_removed_from_edges(device: str) -> Iterator[None]:
    edges = torch.randint(0, 6, (2, 12), device=device)
    yield
    edges[:, edges[0] != edges[1]]


def adjacency_made_sparse(device: str) -> Iterator[None]:
    dense = torch.rand(6, 6, device=device).round()
    yield
    dense.to_sparse()


def graphs_pooled(device: str) -> Iterator[None]:
    x, batch = torch.randn(9, 4, device=device), torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2], device=device)
    yield
    torch.zeros(3, 4, device=device).scatter_reduce(0, batch[:, None].expand(-1, 4), x, "amax", include_self=False)


def nearest_neighbours(device: str) -> Iterator[None]:
    points = torch.rand(20, 3, device=device)
    yield
    torch.topk(torch.cdist(points, points), 4, largest=False)


def farthest_points(device: str) -> Iterator[None]:
    points = torch.rand(20, 3, device=device)
    yield
    distance, last, chosen = torch.full((20,), 1e9, device=device), torch.zeros((), dtype=torch.long, device=device), []
    for _ in range(4):
        chosen.append(last)
        distance = torch.minimum(distance, (points - points.index_select(0, last.view(1))).square().sum(1))
        last = distance.argmax()
    torch.stack(chosen)


def farthest_points_by_plain_index(device: str) -> Iterator[None]:
    points = torch.rand(20, 3, device=device)
    yield
    distance, last = torch.full((20,), 1e9, device=device), torch.zeros((), dtype=torch.long, device=device)
    for _ in range(4):
        distance = torch.minimum(distance, (points - points[last]).square().sum(1))
        last = distance.argmax()


def voxels_in_use(device: str) -> Iterator[None]:
    points = torch.rand(50, 3, device=device)
    yield
    torch.unique((points * 4).long(), dim=0, return_inverse=True)


def rays_marched(device: str) -> Iterator[None]:
    density = torch.rand(4, 16, device=device)
    yield
    alpha = 1 - torch.exp(-density * 0.1)
    passed = torch.cumprod(torch.cat([torch.ones(4, 1, device=device), 1 - alpha + 1e-10], 1), 1)[:, :-1]
    (alpha * passed).sum(1)
