"""Sound and series. A line that waits by documentation ends in ``# waits``; no other line waits."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


def front_end_of_a_recogniser(device: str) -> Any:
    wave, window = torch.randn(1, 400, device=device), torch.hann_window(64, device=device)
    bands = torch.rand(8, 33, device=device)
    power = torch.stft(wave, 64, 16, window=window, return_complex=True)[..., :-1].abs().square()
    loud = (bands @ power).clamp(min=1e-10).log10()
    loud = torch.maximum(loud, loud.max() - 8.0)
    return (loud + 4.0) / 4.0


def bands_hidden_by_the_host(device: str) -> Any:
    x = torch.randn(2, 8, 20, device=device)
    for row in range(2):
        start, width = random.randrange(6), random.randrange(1, 3)
        x[row, start : start + width] = 0.0
        x[row, :, start : start + 4] = 0.0
    return x


def bands_hidden_by_the_device(device: str) -> Any:
    x = torch.randn(2, 8, 20, device=device)
    start = int(torch.randint(0, 6, (), device=device))  # waits
    x[:, start : start + 2] = 0.0
    return x


def bands_hidden_by_comparison(device: str) -> Any:
    x = torch.randn(2, 8, 20, device=device)
    start = torch.randint(0, 6, (2, 1), device=device)
    band = torch.arange(8, device=device)
    hidden = (band >= start) & (band < start + 2)
    return x.masked_fill(hidden[:, :, None], 0.0)


def greedy_words_by_collapsing(device: str) -> Any:
    chances, words = torch.randn(2, 9, 5, device=device), []
    for row in chances.argmax(-1):
        short = torch.unique_consecutive(row)  # waits
        short = short[short != 0]  # waits
        words.append(short.tolist())  # waits
    return words


def frames_masked_for_self_supervision(device: str) -> Any:
    x, blank = torch.randn(2, 10, 4, device=device), torch.zeros(4, device=device)
    hidden = np.random.rand(2, 10) < 0.3
    mask = torch.from_numpy(hidden).to(device)  # waits
    x[mask] = blank  # waits
    return x


def frames_masked_by_choosing(device: str) -> Any:
    x, blank = torch.randn(2, 10, 4, device=device), torch.zeros(4, device=device)
    return torch.where((torch.rand(2, 10, device=device) < 0.3)[..., None], blank, x)


def phases_found_by_iteration(device: str) -> Any:
    window, size = torch.hann_window(32, device=device), torch.rand(17, 12, device=device)
    wave = torch.randn(176, device=device)
    for _ in range(2):
        spectrum = torch.stft(wave, 32, 16, window=window, return_complex=True)
        angle = spectrum / spectrum.abs().clamp(min=1e-8)
        wave = torch.istft(size * angle, 32, 16, window=window, length=176)  # waits
    return wave


def speech_found_by_energy(device: str) -> Any:
    wave = torch.randn(640, device=device)
    energy = wave.unfold(0, 64, 32).square().mean(-1)
    active = energy > energy.mean()
    places = torch.nonzero(active).flatten()  # waits
    return places * 32


def vocoder_with_matched_features(device: str) -> Any:
    layers = nn.ModuleList(nn.Conv1d(1 if not i else 2, 2, 5, stride=2, device=device) for i in range(2))
    real, made, total = torch.randn(2, 1, 64, device=device), torch.randn(2, 1, 64, device=device), 0.0
    made.requires_grad_()
    x, y = real, made
    for layer in layers:
        x, y = F.leaky_relu(layer(x), 0.1), F.leaky_relu(layer(y), 0.1)
        total = total + F.l1_loss(y, x.detach())
    total.backward()
    return made.grad


def room_added_by_fourier(device: str) -> Any:
    wave, room = torch.randn(2, 100, device=device), torch.randn(30, device=device).abs()
    size = 129
    wet = torch.fft.irfft(torch.fft.rfft(wave, size) * torch.fft.rfft(room, size), size)[:, :100]
    return wet / wet.abs().amax(-1, keepdim=True)


def pitch_by_autocorrelation(device: str) -> Any:
    frames = torch.randn(3, 128, device=device)
    spectrum = torch.fft.rfft(frames, 256)
    likeness = torch.fft.irfft(spectrum * spectrum.conj(), 256)[:, 10:64]
    return 16000.0 / (likeness.argmax(-1) + 10).float()


def beams_over_frames_on_the_host(device: str) -> Any:
    chances = torch.randn(4, 5, device=device).log_softmax(-1)
    beams: dict[tuple[int, ...], float] = {(): 0.0}
    for frame in chances:
        best, ids = frame.topk(2)
        fresh: dict[tuple[int, ...], float] = {}
        for score, letter in zip(best.tolist(), ids.tolist()):  # waits
            for words, before in beams.items():
                fresh[(*words, letter)] = before + score
        beams = dict(sorted(fresh.items(), key=lambda pair: -pair[1])[:3])
    return [list(words) for words in beams]


def streamed_convolution_with_a_cache(device: str) -> Any:
    layer, cache = nn.Conv1d(2, 2, 5, device=device), torch.zeros(1, 2, 4, device=device)
    made = []
    for piece in torch.randn(1, 2, 24, device=device).split(8, -1):
        whole = torch.cat([cache, piece], -1)
        made.append(layer(whole))
        cache = whole[..., -4:]
    return torch.cat(made, -1)


def speakers_by_attentive_statistics(device: str) -> Any:
    frames, gate = torch.randn(3, 7, 4, device=device), nn.Linear(4, 1, device=device)
    weight = gate(frames).softmax(1)
    mean = (weight * frames).sum(1)
    spread = ((weight * frames.square()).sum(1) - mean.square()).clamp(min=1e-6).sqrt()
    voice = F.normalize(torch.cat([mean, spread], -1), dim=-1)
    return voice @ voice.T


def margin_loss_over_speakers(device: str) -> Any:
    voice = F.normalize(torch.randn(4, 6, device=device), dim=-1).requires_grad_()
    centres = F.normalize(torch.randn(3, 6, device=device), dim=-1)
    who = torch.tensor([0, 1, 2, 1], device=device)  # waits
    cosine = voice @ centres.T
    angle = cosine.clamp(-1 + 1e-6, 1 - 1e-6).acos()
    target = torch.zeros_like(cosine).scatter(1, who[:, None], 1.0)
    F.cross_entropy(30 * (angle + 0.2 * target).cos(), who).backward()
    return voice.grad


def forecast_with_its_own_scale(device: str) -> Any:
    series, head = torch.randn(3, 16, device=device) * 5 + 2, nn.Linear(16, 4, device=device)
    mean, spread = series.mean(1, keepdim=True), series.std(1, keepdim=True) + 1e-5
    forecast = head((series - mean) / spread) * spread + mean
    quantiles = torch.tensor([0.1, 0.5, 0.9], device=device)  # waits
    gap = series[:, -4:] - forecast
    loss = torch.maximum(quantiles[:, None, None] * gap, (quantiles[:, None, None] - 1) * gap).mean()
    loss.backward()
    return loss


def state_space_scanned_by_doubling(device: str) -> Any:
    decay, x = torch.rand(2, 8, device=device), torch.randn(2, 8, device=device)
    step = 1
    while step < 8:
        left_decay, left = F.pad(decay, (step, 0), value=1.0)[:, :8], F.pad(x, (step, 0))[:, :8]
        x, decay = x + decay * left, decay * left_decay
        step *= 2
    return x


def best_path_through_states(device: str) -> Any:
    emit, move = torch.randn(6, 4, device=device), torch.randn(4, 4, device=device)
    score, back = emit[0], []
    for frame in emit[1:]:
        score, before = (score[:, None] + move).max(0)
        score = score + frame
        back.append(before)
    here = score.argmax().item()  # waits
    path = [here]
    for before in reversed(back):
        here = before[here].item()  # waits
        path.append(here)
    return path[::-1]
