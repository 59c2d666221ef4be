"""Measuring: sound, graphs, pictures, streams of numbers. A line that waits ends in ``# waits``; no other line waits."""

from __future__ import annotations

import contextlib
import random
import statistics
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


class _Schedule(nn.Module):
    """A diffusion's tables, as buffers."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        kept = torch.cos(torch.linspace(0, 1, steps + 1) * 1.5) ** 2
        betas = (1 - kept[1:] / kept[:-1]).clamp(max=0.99)
        for name, value in {"betas": betas, "products": (1 - betas).cumprod(0), "roots": betas.sqrt()}.items():
            self.register_buffer(name, value)
        self.betas: torch.Tensor
        self.products: torch.Tensor
        self.roots: torch.Tensor

    def at(self, table: torch.Tensor, step: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return table.gather(0, step).reshape(-1, *[1] * (like.dim() - 1))


def pictures_sampled_step_by_step(device: str) -> Any:
    schedule, network = _Schedule(6).to(device), nn.Conv2d(2, 1, 3, padding=1, device=device)  # waits
    x = torch.randn(2, 1, 6, 6, device=device)
    with torch.inference_mode():
        for number in reversed(range(6)):
            step = torch.full((2,), number, dtype=torch.long, device=device)
            level = schedule.at(schedule.products, step, x)
            noise = network(torch.cat([x, level.expand(-1, 1, 6, 6)], 1))
            beta = schedule.at(schedule.betas, step, x)
            x = (x - beta / (1 - level).sqrt() * noise) / (1 - beta).sqrt()
            if number > 0:
                x = x + schedule.at(schedule.roots, step, x) * torch.randn_like(x)
    pixels = ((x.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    return pixels.cpu().numpy().shape  # waits


def pictures_sampled_with_guidance_and_a_callback(device: str) -> Any:
    x, seen = torch.randn(1, 3, 4, 4, device=device), []

    def note(number: int, x: torch.Tensor) -> None:
        if number % 2 == 0:
            seen.append(x.abs().mean().item())  # waits

    for number, level in enumerate(np.linspace(1.0, 0.1, 5)):
        free, led = (x * 0.1 * float(level)).repeat(2, 1, 1, 1).chunk(2)
        noise = free + 3.0 * (led * 1.1 - free)
        rescaled = noise * (led.std(dim=(1, 2, 3), keepdim=True) / noise.std(dim=(1, 2, 3), keepdim=True))
        x = x - 0.7 * rescaled - 0.3 * noise
        note(number, x)
    return len(seen), x


def words_aligned_with_frames(device: str) -> Any:
    network = nn.Sequential(nn.Conv1d(4, 8, 3, padding=1, device=device), nn.ReLU(), nn.Conv1d(8, 6, 1, device=device))
    frames, words = torch.randn(2, 4, 12, device=device), torch.randint(1, 6, (2, 3), device=device)
    lengths, sizes = torch.full((2,), 12, dtype=torch.long), torch.tensor([3, 2])
    chances = network(frames).permute(2, 0, 1).log_softmax(-1)
    loss = F.ctc_loss(chances, words, lengths, sizes, zero_infinity=True)  # waits
    loss.backward()  # waits
    return loss, network[0].weight.grad


def sound_stretched_and_mixed(device: str) -> Any:
    wave, noise = torch.randn(2, 320, device=device), torch.randn(2, 320, device=device)
    ratio = torch.empty(2, 1, device=device).uniform_(0, 20)
    loud = wave.square().mean(-1, keepdim=True) / noise.square().mean(-1, keepdim=True)
    mixed = wave + noise * (loud / 10 ** (ratio / 10)).sqrt()
    shift = random.randrange(1, 20)
    mixed = torch.roll(mixed, shift, -1)
    longer = F.interpolate(mixed[:, None], scale_factor=1.25, mode="linear")[:, 0]
    window = torch.hann_window(32, device=device)
    spectrum = torch.stft(longer, 32, 8, window=window, return_complex=True, center=False)
    return torch.view_as_real(spectrum).square().sum(-1).clamp(min=1e-6).log()


def tempo_by_peaks(device: str) -> Any:
    strength = torch.rand(64, device=device)
    around = F.max_pool1d(strength[None, None], 5, 1, 2)[0, 0]
    peaks = ((strength == around) & (strength > strength.mean())).nonzero().squeeze(-1)  # waits
    gaps = peaks.diff().float()
    middle = gaps.median()
    return peaks, 60 / max(middle.item(), 1.0)  # waits


def messages_with_means_and_spreads(device: str) -> Any:
    source, target = torch.randint(0, 7, (2, 20), device=device)
    x, mix = torch.randn(7, 4, device=device), nn.Linear(12, 4, device=device)
    message, at = x[source], target[:, None].expand(-1, 4)
    kinds = ("mean", "amax", "amin")
    parts = [
        torch.zeros(7, 4, device=device).scatter_reduce(0, at, message, kind, include_self=False) for kind in kinds
    ]
    degree = torch.zeros(7, device=device).scatter_add_(0, target, torch.ones(20, device=device))
    out = mix(torch.cat(parts, 1)) * (degree + 1).log()[:, None]
    out.square().mean().backward()
    return out, mix.weight.grad


def nodes_kept_by_their_score(device: str) -> Any:
    edges, x = torch.randint(0, 9, (2, 24), device=device), torch.randn(9, 3, device=device)
    kept = x.norm(dim=1).topk(4).indices
    rename = torch.full((9,), -1, dtype=torch.long, device=device)
    rename[kept] = torch.arange(4, device=device)
    renamed = rename[edges]
    edges = renamed[:, (renamed >= 0).all(0)]  # waits
    return x[kept].tanh(), edges


def neighbours_found_in_padded_rows(device: str) -> Any:
    points, counts = torch.rand(2, 8, 3, device=device), torch.randint(4, 9, (2,), device=device)
    valid = torch.arange(8, device=device) < counts[:, None]
    apart = torch.cdist(points, points)
    apart = apart.masked_fill(~(valid[:, :, None] & valid[:, None]), float("inf"))
    apart.diagonal(dim1=1, dim2=2).fill_(float("inf"))
    near = apart.topk(3, largest=False)
    weight = (1 / near.values.clamp(min=1e-3)) * valid[..., None]
    return weight / weight.sum(-1, keepdim=True).clamp(min=1e-9), near.indices.shape


def sequences_packed_in_any_order(device: str) -> Any:
    x, cell = torch.randn(3, 5, 4, device=device), nn.GRU(4, 6, batch_first=True, device=device)
    lengths = torch.tensor([3, 5, 2])
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)  # waits
    made, last = cell(packed)
    padded, sizes = nn.utils.rnn.pad_packed_sequence(made, batch_first=True)  # waits
    return padded, sizes, last


def sequences_packed_by_falling_length(device: str) -> Any:
    x, cell = torch.randn(3, 5, 4, device=device), nn.LSTM(4, 6, batch_first=True, device=device)
    packed = nn.utils.rnn.pack_padded_sequence(x, [5, 3, 2], batch_first=True)
    made, (last, _) = cell(packed)
    padded, _ = nn.utils.rnn.pad_packed_sequence(made, batch_first=True, total_length=5)
    (padded.mean() + last.sum()).backward()
    return cell.weight_ih_l0.grad


def decoder_under_a_mask_it_looks_at(device: str) -> Any:
    layer = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True, device=device)
    decoder = nn.TransformerDecoder(layer, 2)
    mask = nn.Transformer.generate_square_subsequent_mask(5, device=device)
    made = decoder(torch.randn(2, 5, 8, device=device), torch.randn(2, 3, 8, device=device), tgt_mask=mask)  # waits
    return made.mean(1)


class _Meter:
    """Counts on the device; asks once."""

    def __init__(self, kinds: int, device: str) -> None:
        self.table = torch.zeros(kinds, kinds, device=device)

    def update(self, guess: torch.Tensor, truth: torch.Tensor) -> None:
        kinds = len(self.table)
        pairs = F.one_hot(truth, kinds).float().T @ F.one_hot(guess, kinds).float()
        self.table += pairs

    def compute(self) -> dict[str, float]:
        right = self.table.diagonal()
        recall = right / self.table.sum(1).clamp(min=1)
        precision = right / self.table.sum(0).clamp(min=1)
        score = 2 * recall * precision / (recall + precision).clamp(min=1e-9)
        return {"accuracy": float(right.sum() / self.table.sum()), "score": float(score.mean())}  # waits

    def reset(self) -> None:
        self.table.zero_()


def meter_read_once_an_epoch(device: str) -> Any:
    meter, read = _Meter(3, device), []
    for _ in range(2):
        for _ in range(3):
            meter.update(torch.randint(0, 3, (10,), device=device), torch.randint(0, 3, (10,), device=device))
        read.append(sorted(meter.compute()))
        meter.reset()
    return read


@contextlib.contextmanager
def _timed(sums: dict[str, torch.Tensor], name: str, x: torch.Tensor) -> Iterator[None]:
    before = x.sum()
    yield
    sums[name] = sums.get(name, torch.zeros_like(before)) + (x.sum() - before)


def changes_summed_by_name(device: str) -> Any:
    x, sums = torch.zeros(4, device=device), dict[str, torch.Tensor]()
    for number in range(3):
        with _timed(sums, "all", x):
            x += number
        with _timed(sums, "one", x):
            x[number] = x[number] + 1
    return {name: value.item() for name, value in sums.items()}  # waits


def reservoir_of_a_stream(device: str) -> Any:
    kept, seen = torch.zeros(4, 2, device=device), 0
    for _ in range(5):
        rows = torch.randn(3, 2, device=device)
        for row in rows:
            place = seen if seen < 4 else random.randrange(seen + 1)
            seen += 1
            if place < 4:
                kept[place] = row
    return kept


def quantile_followed_along_a_stream(device: str) -> Any:
    mark, spread, rate = torch.zeros(3, device=device), torch.ones(3, device=device), 0.1
    levels = torch.linspace(0.25, 0.75, 3, device=device)
    for _ in range(6):
        x = torch.randn(32, 1, device=device)
        below = (x < mark).float().mean(0)
        mark = mark + rate * spread * (levels - below)
        spread = spread.lerp((x - mark).abs().mean(0), rate)
    return mark, torch.quantile(torch.randn(50, device=device), 0.5).isfinite()


def medians_of_the_host(device: str) -> Any:
    seconds = [torch.rand(3, device=device).sum() for _ in range(5)]
    middle = statistics.median(seconds)  # waits
    best = min(seconds)  # waits
    worst = torch.stack(seconds).amax()
    return middle >= best, worst >= middle


def drift_between_two_samples(device: str) -> Any:
    left, right = torch.randn(40, device=device), torch.randn(40, device=device) + 0.3
    both = torch.cat([left, right]).sort().values
    rise = torch.searchsorted(left.sort().values, both, right=True) / 40
    fall = torch.searchsorted(right.sort().values, both, right=True) / 40
    distance = (rise - fall).abs().max()
    if distance > 2.0:  # waits
        raise ValueError("that cannot be")
    edges = torch.linspace(-3, 3, 7, device=device)
    shares = [torch.bucketize(part, edges).float().mean() for part in (left, right)]
    return distance, shares


def points_joined_into_groups(device: str) -> Any:
    points = torch.cat([torch.randn(5, 2, device=device), torch.randn(5, 2, device=device) + 9])
    near = torch.cdist(points, points) < 4
    label = torch.arange(10, device=device)
    for _ in range(10):
        joined = torch.where(near, label[None], 10).amin(1)
        if torch.equal(joined, label):  # waits
            break
        label = joined
    names, members = torch.unique(label, return_inverse=True)  # waits
    return len(names), members


def pictures_cut_into_tiles_and_joined(device: str) -> Any:
    picture = torch.rand(1, 3, 12, 12, device=device)
    tiles = F.unfold(picture, 6, stride=3)
    weight = F.fold(torch.ones_like(tiles), (12, 12), 6, stride=3)
    seen = (tiles.view(3, 36, -1) * 0.5).flatten(0, 1)[None]
    joined = F.fold(seen, (12, 12), 6, stride=3) / weight
    error = F.mse_loss(joined, picture * 0.5)
    return joined, -10 * torch.log10(error.clamp(min=1e-10))
