"""Optimizers and numerical methods. A line that waits by documentation ends in ``# waits``; no other line waits."""

from __future__ import annotations

import math
import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def _loss(weight: torch.Tensor) -> torch.Tensor:
    return (weight - 0.3).pow(4).sum() + weight.square().sum()


def orthogonal_momentum(device: str) -> Any:
    weight = torch.randn(4, 6, device=device, requires_grad=True)
    moment = torch.zeros_like(weight)
    for _ in range(2):
        weight.grad = None
        _loss(weight).backward()
        moment.lerp_(weight.grad, 0.1)
        x = moment / (moment.norm() + 1e-7)
        for _ in range(4):
            a = x @ x.T
            x = 3.4 * x + (-4.7 * a + 2.0 * a @ a) @ x
        weight.data.add_(x, alpha=-0.02 * max(1, 4 / 6) ** 0.5)
    return weight.detach()


def preconditioned_by_roots(device: str) -> Any:
    weight = torch.randn(4, 3, device=device, requires_grad=True)
    left, right = torch.eye(4, device=device) * 1e-3, torch.eye(3, device=device) * 1e-3
    for _ in range(2):
        (grad,) = torch.autograd.grad(_loss(weight), weight)
        left, right = left + grad @ grad.T, right + grad.T @ grad
        roots = []
        for square in (left, right):
            values, vectors = torch.linalg.eigh(square)  # waits
            roots.append(vectors * values.clamp(min=1e-6).pow(-0.25) @ vectors.T)
        with torch.no_grad():
            weight -= 0.1 * roots[0] @ grad @ roots[1]
    return weight.detach()


def curvature_by_random_signs(device: str) -> Any:
    weight = torch.randn(6, device=device, requires_grad=True)
    (grad,) = torch.autograd.grad(_loss(weight), weight, create_graph=True)
    signs = torch.randint(0, 2, (6,), device=device) * 2.0 - 1
    (product,) = torch.autograd.grad((grad * signs).sum(), weight)
    curvature = (product * signs).clamp(min=1e-2)
    return weight.detach() - 0.1 * (grad.detach() / curvature).clamp(-1, 1)


def sharpness_aware_step(device: str) -> Any:
    layer = nn.Linear(3, 2, device=device)
    x, y = torch.randn(5, 3, device=device), torch.randint(0, 2, (5,), device=device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        F.cross_entropy(layer(x), y).backward()
        norm = torch.stack([p.grad.norm() for p in layer.parameters() if p.grad is not None]).norm()
        scale, climbed = 0.05 / (norm + 1e-12), []
        with torch.no_grad():
            for p in layer.parameters():
                climbed.append(p.grad * scale)
                p.add_(climbed[-1])
        optimizer.zero_grad()
        F.cross_entropy(layer(x), y).backward()
        with torch.no_grad():
            torch._foreach_sub_(list(layer.parameters()), climbed)
        optimizer.step()
        optimizer.zero_grad()
    return layer.weight


def factored_second_moments(device: str) -> Any:
    weight = torch.randn(4, 6, device=device, requires_grad=True)
    row, column = torch.zeros(4, device=device), torch.zeros(6, device=device)
    for step in range(1, 3):
        (grad,) = torch.autograd.grad(_loss(weight), weight)
        keep, square = 1 - step**-0.8, grad.square() + 1e-30
        row.mul_(keep).add_(square.mean(1), alpha=1 - keep)
        column.mul_(keep).add_(square.mean(0), alpha=1 - keep)
        change = grad * (row / row.mean()).rsqrt()[:, None] * column.rsqrt()
        change = change / (change.square().mean().sqrt() / 1.0).clamp(min=1.0)
        with torch.no_grad():
            weight -= change * weight.square().mean().sqrt().clamp(min=1e-3) * 0.01
    return weight.detach()


def trust_by_norms(device: str) -> Any:
    weight = torch.randn(4, 3, device=device, requires_grad=True)
    (grad,) = torch.autograd.grad(_loss(weight), weight)
    own, change = weight.detach().norm(), grad.norm()
    trust = torch.where((own > 0) & (change > 0), own / (change + 1e-6), torch.ones_like(own))
    return weight.detach() - 0.01 * trust * grad


def trust_by_norms_on_the_host(device: str) -> Any:
    weight = torch.randn(4, 3, device=device, requires_grad=True)
    (grad,) = torch.autograd.grad(_loss(weight), weight)
    own, change = weight.detach().norm(), grad.norm()
    trust = 1.0
    if own > 0 and change > 0:  # waits
        trust = (own / change).item()  # waits
    return weight.detach().add(grad, alpha=-0.01 * trust)


def gradients_of_tasks_reconciled(device: str) -> Any:
    weight = torch.randn(6, device=device, requires_grad=True)
    tasks = [torch.autograd.grad((weight * sign).exp().sum(), weight)[0] for sign in (1.0, -1.0, 0.5)]
    mended, conflicts = [task.clone() for task in tasks], 0
    for mine in mended:
        for other in tasks:
            product = mine @ other
            if product < 0:  # waits
                conflicts += 1
                mine -= product / other.square().sum() * other
    return torch.stack(mended).mean(0), conflicts


def gradients_of_tasks_reconciled_by_clamping(device: str) -> Any:
    weight = torch.randn(6, device=device, requires_grad=True)
    left = torch.autograd.grad(weight.exp().sum(), weight)[0]
    right = torch.autograd.grad((-weight).exp().sum(), weight)[0]
    overlap = (left @ right).clamp(max=0)
    return left - overlap / right.square().sum() * right, right - overlap / left.square().sum() * left


def rates_tried_one_by_one(device: str) -> Any:
    layer, rate, curve, least = nn.Linear(3, 1, device=device), 1e-4, [], float("inf")
    for _ in range(5):
        loss = (layer(torch.randn(8, 3, device=device)) - 1).square().mean()
        loss.backward()
        value = loss.item()  # waits
        least = min(least, value)
        curve.append((math.log10(rate), value))
        if value > 4 * least:
            break
        with torch.no_grad():
            for p in layer.parameters():
                p.sub_(p.grad, alpha=rate)
                p.grad = None
        rate *= 3
    return curve


def gradient_from_two_losses(device: str) -> Any:
    weight, scale = torch.zeros(8, device=device), 1e-2
    for step in range(2):
        losses = []
        for sign in (1, -1):
            torch.manual_seed(step)
            losses.append(_loss(weight + sign * scale * torch.randn(8, device=device)))
        slope = ((losses[0] - losses[1]) / (2 * scale)).item()  # waits
        torch.manual_seed(step)
        weight = weight - 0.01 * slope * torch.randn(8, device=device)
    return weight


def clipped_row_by_row(device: str) -> Any:
    layer = nn.Linear(4, 3, device=device)
    layer(torch.randn(6, 4, device=device) * 9).square().mean().backward()
    for p in layer.parameters():
        axis = tuple(range(1, p.dim())) or (0,)
        most = p.detach().norm(dim=axis, keepdim=True).clamp(min=1e-3) * 0.1
        size = p.grad.norm(dim=axis, keepdim=True)
        p.grad.copy_(torch.where(size > most, p.grad * (most / size.clamp(min=1e-6)), p.grad))
    return layer.weight.grad


def loss_scale_kept_by_hand(device: str) -> Any:
    layer, scale, good = nn.Linear(3, 2, device=device), 1024.0, 0
    for step in range(3):
        layer.zero_grad()
        x = torch.randn(4, 3, device=device) * (1e38 if step == 1 else 1.0)
        (layer(x).square().mean() * scale).backward()
        finite = torch.stack([p.grad.isfinite().all() for p in layer.parameters()]).all()
        if not finite:  # waits
            scale, good = scale / 2, 0
            continue
        good += 1
    return scale, good


def quasi_newton_by_two_loops(device: str) -> Any:
    weight, pairs = torch.randn(5, device=device), []
    grad, kept = 4 * (weight - 0.3).pow(3), 0
    for _ in range(3):
        q, shares = grad.clone(), []
        for s, y in reversed(pairs):
            share = (s @ q) / (y @ s)
            q, shares = q - share * y, [share, *shares]
        for (s, y), share in zip(pairs, shares):
            q = q + s * (share - (y @ q) / (y @ s))
        fresh = weight - 0.1 * q
        slope = 4 * (fresh - 0.3).pow(3)
        s, y = fresh - weight, slope - grad
        if y @ s > 1e-10:  # waits
            pairs, kept = [*pairs, (s, y)][-4:], kept + 1
        weight, grad = fresh, slope
    return weight, kept


def natural_gradient_of_a_layer(device: str) -> Any:
    layer, x = nn.Linear(3, 2, bias=False, device=device), torch.randn(16, 3, device=device)
    seen: dict[str, torch.Tensor] = {}
    layer.register_forward_pre_hook(lambda module, given: seen.update(a=given[0].detach()))
    layer.register_full_backward_hook(lambda module, into, out: seen.update(g=out[0]))
    layer(x).logsumexp(-1).mean().backward()
    inside = seen["a"].T @ seen["a"] / 16 + 0.1 * torch.eye(3, device=device)
    outside = seen["g"].T @ seen["g"] * 16 + 0.1 * torch.eye(2, device=device)
    return torch.linalg.inv(outside) @ layer.weight.grad @ torch.linalg.inv(inside)  # waits


def chains_that_jump_together(device: str) -> Any:
    place = torch.randn(6, 2, device=device)
    for _ in range(2):
        speed = torch.randn_like(place)
        moved, push = place, speed
        for _ in range(3):
            push = push - 0.05 * moved
            moved = moved + 0.1 * push
            push = push - 0.05 * moved
        gain = 0.5 * (place.square().sum(1) + speed.square().sum(1) - moved.square().sum(1) - push.square().sum(1))
        accept = torch.rand(6, device=device).log() < gain
        place = torch.where(accept[:, None], moved, place)
    return place


def chain_that_asks_before_it_jumps(device: str) -> Any:
    place, taken = torch.randn(2, device=device), 0
    for _ in range(4):
        moved = place + 0.5 * torch.randn_like(place)
        if torch.rand((), device=device).log() < 0.5 * (place.square().sum() - moved.square().sum()):  # waits
            place, taken = moved, taken + 1
    return place, taken


def solver_whose_step_adapts(device: str) -> Any:
    state, time, width, calls = torch.ones(3, device=device), 0.0, 0.5, 0
    while time < 1.0:
        width = min(width, 1.0 - time)
        first = -state
        second = -(state + width * first)
        error = (0.5 * width * (second - first)).abs().max().item()  # waits
        calls += 1
        if error < 0.05:
            state, time = state + 0.5 * width * (first + second), time + width
        width *= min(2.0, max(0.3, 0.9 * (0.05 / (error + 1e-12)) ** 0.5))
    return state, calls


def solver_of_fixed_steps_with_an_adjoint(device: str) -> Any:
    field = nn.Sequential(nn.Linear(2, 4, device=device), nn.Tanh(), nn.Linear(4, 2, device=device))
    state = torch.randn(3, 2, device=device)
    for _ in range(4):
        a = field(state)
        b = field(state + 0.125 * a)
        c = field(state + 0.125 * b)
        d = field(state + 0.25 * c)
        state = state + 0.25 / 6 * (a + 2 * b + 2 * c + d)
    state.square().mean().backward()
    return state, field[0].weight.grad


def equation_learned_from_its_residual(device: str) -> Any:
    network = nn.Sequential(nn.Linear(2, 6, device=device), nn.Tanh(), nn.Linear(6, 1, device=device))
    points = torch.rand(8, 2, device=device, requires_grad=True)
    u = network(points)
    slope = torch.autograd.grad(u.sum(), points, create_graph=True)[0]
    bend = torch.autograd.grad(slope[:, 0].sum(), points, create_graph=True)[0][:, :1]
    loss = (slope[:, 1:] - 0.1 * bend).square().mean()
    loss.backward()
    return loss, network[0].weight.grad


def masses_carried_by_fixed_iterations(device: str) -> Any:
    cost = torch.rand(4, 5, device=device)
    log_kernel, a, b = -cost / 0.1, torch.zeros(4, device=device), torch.zeros(5, device=device)
    for _ in range(6):
        a = -math.log(4) - torch.logsumexp(log_kernel + b, 1)
        b = -math.log(5) - torch.logsumexp(log_kernel + a[:, None], 0)
    return ((log_kernel + a[:, None] + b).exp() * cost).sum()


def masses_carried_until_they_balance(device: str) -> Any:
    kernel = (-torch.rand(4, 5, device=device) / 0.1).exp()
    left, rounds = torch.ones(4, device=device), 0
    for _ in range(30):
        right = 0.2 / (kernel.T @ left)
        fresh = 0.25 / (kernel @ right)
        rounds += 1
        if torch.allclose(fresh, left, rtol=1e-2):  # waits
            break
        left = fresh
    return left, rounds


def process_of_gaussians(device: str) -> Any:
    x, y = torch.linspace(0, 1, 6, device=device)[:, None], torch.randn(6, 1, device=device)
    length = torch.full((), 0.3, device=device, requires_grad=True)
    square = (-(x - x.T).square() / (2 * length**2)).exp() + 0.1 * torch.eye(6, device=device)
    lower = torch.linalg.cholesky(square)  # waits
    half = torch.linalg.solve_triangular(lower, y, upper=False)
    loss = 0.5 * half.square().sum() + lower.diagonal().log().sum()
    loss.backward()
    return loss, length.grad


def swarm_with_a_best_of_all(device: str) -> Any:
    place = torch.rand(8, 3, device=device)
    speed, own, least = torch.zeros_like(place), place.clone(), torch.full((8,), 1e9, device=device)
    for _ in range(3):
        cost = (place - 0.3).square().sum(1)
        better = cost < least
        own, least = torch.where(better[:, None], place, own), torch.minimum(cost, least)
        leader = own[least.argmin()]  # waits
        speed = 0.7 * speed + torch.rand_like(place) * (own - place) + torch.rand_like(place) * (leader - place)
        place = place + speed
    return place, random.random()
