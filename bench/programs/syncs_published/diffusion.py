"""Diffusion, flows and other generators. A line that waits by documentation ends in ``# waits``; no other line waits."""

from __future__ import annotations

import itertools
import math
from collections import deque
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def noise_predicted(device: str) -> Any:
    network = nn.Conv2d(1, 1, 3, padding=1, device=device)
    products = (1 - torch.linspace(1e-4, 0.02, 10, device=device)).cumprod(0)
    pictures, log = torch.randn(4, 1, 5, 5, device=device), []
    for _ in range(2):
        step = torch.randint(0, 10, (4,), device=device)
        level = products.gather(0, step).view(-1, 1, 1, 1)
        noise = torch.randn_like(pictures)
        loss = F.mse_loss(network(level.sqrt() * pictures + (1 - level).sqrt() * noise), noise)
        loss.backward()
        log.append(loss.item())  # waits
    return log, network.weight.grad


def steps_taken_without_noise(device: str) -> Any:
    products = torch.linspace(0.99, 0.1, 10, device=device)
    x = torch.randn(2, 3, device=device)
    for step in range(9, 0, -3):
        time = torch.full((2,), step, device=device, dtype=torch.long)
        here, there = products[time][:, None], products[(time - 3).clamp(min=0)][:, None]
        noise = x * 0.1
        clean = (x - (1 - here).sqrt() * noise) / here.sqrt()
        x = there.sqrt() * clean.clamp(-1, 1) + (1 - there).sqrt() * noise
    return x


def steps_taken_with_numbers_of_the_host(device: str) -> Any:
    products = torch.linspace(0.99, 0.1, 10, device=device)
    x = torch.randn(2, 3, device=device)
    for step in (9, 6, 3):
        level = float(products[step])  # waits
        x = (x - math.sqrt(1 - level) * 0.1) / math.sqrt(level)
    return x


def heun_sampler_over_device_levels(device: str) -> Any:
    levels = torch.cat([torch.linspace(2.0, 0.1, 4, device=device), torch.zeros(1, device=device)])
    x = levels[0] * torch.randn(2, 3, device=device)
    for here, there in itertools.pairwise(levels):
        slope = x / (1 + here**2)
        ahead = x + (there - here) * slope
        if there > 0:  # waits
            ahead = x + (there - here) * 0.5 * (slope + ahead / (1 + there**2))
        x = ahead
    return x


def velocity_matched(device: str) -> Any:
    network = nn.Sequential(nn.Linear(4, 8, device=device), nn.SiLU(), nn.Linear(8, 3, device=device))
    data, noise = torch.randn(6, 3, device=device), torch.randn(6, 3, device=device)
    time = torch.sigmoid(torch.randn(6, 1, device=device))
    between = (1 - time) * noise + time * data
    loss = (network(torch.cat([between, time], -1)) - (data - noise)).square().mean()
    loss.backward()
    return loss, network[0].weight.grad


def guided_by_a_classifier(device: str) -> Any:
    classifier, x = nn.Linear(3, 4, device=device), torch.randn(2, 3, device=device)
    wanted = torch.ones(2, dtype=torch.long, device=device)
    for _ in range(2):
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            chance = classifier(leaf).log_softmax(-1).gather(-1, wanted[:, None]).sum()
            slope = torch.autograd.grad(chance, leaf)[0]
        x = x + 0.1 * slope
    return x


def holes_filled_with_jumps_back(device: str) -> Any:
    known = torch.rand(1, 1, 4, 4, device=device) > 0.5
    picture, x = torch.rand(1, 1, 4, 4, device=device), torch.randn(1, 1, 4, 4, device=device)
    jumps = int(torch.randint(1, 3, (1,), device=device))  # waits
    for _ in range(jumps):
        x = torch.where(known, picture + 0.1 * torch.randn_like(picture), 0.9 * x)
    return x


def one_step_taught_by_a_slow_copy(device: str) -> Any:
    student, teacher = nn.Linear(3, 3, device=device), nn.Linear(3, 3, device=device)
    teacher.load_state_dict(student.state_dict())
    teacher.requires_grad_(False)
    optimizer = torch.optim.RAdam(student.parameters(), lr=1e-3)
    for _ in range(2):
        x = torch.randn(4, 3, device=device)
        gap = student(x) - teacher(x * 0.9)
        loss = (gap.square() + 0.03**2).sqrt().sub(0.03).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        torch._foreach_lerp_(list(teacher.parameters()), [p.detach() for p in student.parameters()], 0.05)
    return teacher.weight


def latents_shown_as_pictures(device: str) -> Any:
    encoder, decoder = nn.Conv2d(3, 4, 1, device=device), nn.Conv2d(2, 3, 1, device=device)
    with torch.no_grad():
        mean, spread = encoder(torch.rand(1, 3, 4, 4, device=device)).chunk(2, 1)
        latent = (mean + (0.5 * spread.clamp(-30, 20)).exp() * torch.randn_like(mean)) * 0.18
        made = decoder(latent / 0.18).div(2).add(0.5).clamp(0, 1)
    return made.mul(255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()  # waits


def solver_of_several_steps_over_host_tables(device: str) -> Any:
    levels = torch.linspace(0.99, 0.1, 8).log().tolist()
    x, before = torch.randn(2, 3, device=device), deque[torch.Tensor](maxlen=2)
    for here, there in zip(levels[::-1], levels[-2::-1]):
        before.append(x * here)
        width = there - here
        slope = before[-1] if len(before) == 1 else 1.5 * before[-1] - 0.5 * before[0]
        x = x + width * 0.1 * slope
    return x


def losses_weighted_by_signal_to_noise(device: str) -> Any:
    products = torch.linspace(0.99, 0.1, 10, device=device)
    ratio = products / (1 - products)
    step = torch.randint(0, 10, (5,), device=device)
    weight = torch.stack([ratio[step], 5.0 * torch.ones_like(ratio[step])], 1).min(1).values / ratio[step]
    errors = torch.randn(5, 3, device=device).square().mean(1)
    return (errors * weight).mean()


def masked_tokens_filled_by_confidence(device: str) -> Any:
    table, ids = torch.randn(9, 8, device=device), torch.full((1, 6), 8, device=device)
    left = 6
    for step in range(3):
        logits = table[ids]
        chances, guesses = logits.softmax(-1).max(-1)
        open_places = ids == 8
        chances = chances.masked_fill(~open_places, -1.0)
        take = left - int(6 * math.cos(math.pi / 2 * (step + 1) / 3))
        places = chances.topk(max(take, 1), dim=-1).indices
        ids = ids.scatter(1, places, guesses.gather(1, places))
        left = int((ids == 8).sum())  # waits
    return ids


def critic_with_a_gradient_penalty(device: str) -> Any:
    critic, maker = nn.Linear(3, 1, device=device), nn.Linear(2, 3, device=device)
    real, made = torch.randn(4, 3, device=device), maker(torch.randn(4, 2, device=device)).detach()
    mix = torch.rand(4, 1, device=device)
    between = (mix * real + (1 - mix) * made).requires_grad_()
    slopes = torch.autograd.grad(critic(between).sum(), between, create_graph=True)[0]
    penalty = (slopes.norm(2, dim=1) - 1).square().mean()
    loss = critic(made).mean() - critic(real).mean() + 10 * penalty
    loss.backward()
    return loss, critic.weight.grad


def discriminator_strengthened_by_its_signs(device: str) -> Any:
    critic, chance = nn.Linear(3, 1, device=device), 0.5
    signs = torch.zeros(2, device=device)
    for step in range(4):
        real = torch.randn(4, 3, device=device)
        flipped = torch.where(torch.rand(4, 1, device=device) < chance, -real, real)
        answer = critic(flipped)
        signs += torch.stack([answer.sign().sum(), torch.full((), 4.0, device=device)])
        if step % 2 == 1:
            share = (signs[0] / signs[1]).item()  # waits
            chance = min(max(chance + 0.01 * (1 if share > 0.6 else -1), 0.0), 1.0)
            signs.zero_()
    return chance


def coupled_layers_of_a_flow(device: str) -> Any:
    scale, shift = nn.Linear(2, 2, device=device), nn.Linear(2, 2, device=device)
    x, total = torch.randn(5, 4, device=device), torch.zeros(5, device=device)
    for _ in range(2):
        left, right = x.chunk(2, 1)
        log_scale = scale(left).tanh()
        right = right * log_scale.exp() + shift(left)
        total = total + log_scale.sum(1)
        x = torch.cat([right, left], 1)
    loss = -(-0.5 * x.square().sum(1) + total).mean()
    loss.backward()
    return loss, scale.weight.grad


def autoencoder_with_a_free_bit(device: str) -> Any:
    encoder, decoder = nn.Linear(6, 4, device=device), nn.Linear(2, 6, device=device)
    x = torch.rand(3, 6, device=device)
    mean, spread = encoder(x).chunk(2, -1)
    code = mean + torch.randn_like(mean) * (0.5 * spread).exp()
    gap = (-0.5 * (1 + spread - mean.square() - spread.exp())).mean(0).clamp(min=0.1).sum()
    loss = F.binary_cross_entropy_with_logits(decoder(code), x) + gap
    loss.backward()
    return f"{loss.detach():.4f}", encoder.weight.grad  # waits
