"""Compression of weights. A line that waits by documentation ends in ``# waits``; no other line waits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def rows_scaled_by_their_greatest(device: str) -> Any:
    weight, x = torch.randn(6, 8, device=device), torch.randn(3, 8, device=device)
    scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-8) / 127
    small = (weight / scale).round().clamp(-128, 127).to(torch.int8)
    return x @ (small.to(torch.float32) * scale).T


def columns_corrected_by_second_order(device: str) -> Any:
    weight, x = torch.randn(4, 6, device=device), torch.randn(32, 6, device=device)
    square = x.T @ x / 16
    dead = torch.diag(square) == 0
    square[dead, dead] = 1  # waits
    square.diagonal().add_(0.01 * square.diagonal().mean())
    lower = torch.linalg.cholesky(square)  # waits
    inverse = torch.linalg.inv(lower.T @ lower)  # waits
    scale = weight.abs().amax(1) / 7
    for column in range(6):
        rounded = (weight[:, column] / scale).round().clamp(-8, 7) * scale
        error = (weight[:, column] - rounded) / inverse[column, column]
        weight[:, column] = rounded
        weight[:, column + 1 :] -= error[:, None] * inverse[column, column + 1 :][None]
    return weight


def scales_searched_by_error(device: str) -> Any:
    weight, x = torch.randn(6, 8, device=device), torch.randn(12, 8, device=device)
    size, best, kept = x.abs().mean(0), float("inf"), None
    target = x @ weight.T
    for ratio in range(4):
        scale = size.pow(ratio / 4).clamp(min=1e-4)
        scale = scale / (scale.max() * scale.min()).sqrt()
        wide = weight * scale
        step = wide.abs().amax(1, keepdim=True) / 7
        error = ((x / scale) @ ((wide / step).round() * step).T - target).square().mean().item()  # waits
        if error < best:
            best, kept = error, scale
    return best, kept


def scales_searched_on_the_device(device: str) -> Any:
    weight = torch.randn(6, 8, device=device)
    greatest = weight.abs().amax(1)
    best, kept = torch.full((6,), float("inf"), device=device), greatest.clone()
    for share in (1.0, 0.9, 0.8):
        step = greatest * share / 7
        error = ((weight / step[:, None]).round().clamp(-8, 7) * step[:, None] - weight).square().sum(1)
        better = error < best
        best, kept = torch.where(better, error, best), torch.where(better, step, kept)
    return best, kept


class _LearnedStep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, step: torch.Tensor, most: int) -> torch.Tensor:
        ctx.save_for_backward(x / step)
        ctx.most = most
        return (x / step).round().clamp(-most - 1, most) * step

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (level,) = ctx.saved_tensors
        low, high = level < -ctx.most - 1, level > ctx.most
        inside = ~(low | high)
        slope = torch.where(inside, level.round() - level, level.clamp(-ctx.most - 1, ctx.most))
        return grad * inside, (grad * slope).sum() / (level.numel() * ctx.most) ** 0.5, None


def step_of_the_quantiser_learned(device: str) -> Any:
    x, step = (
        torch.randn(5, 4, device=device, requires_grad=True),
        torch.full((), 0.3, device=device, requires_grad=True),
    )
    _LearnedStep.apply(x, step, 7).square().sum().backward()  # type: ignore[no-untyped-call]
    return x.grad, step.grad


def codebook_of_weights(device: str) -> Any:
    points, revived = torch.randn(40, 2, device=device), 0
    centres = points[:5].clone()
    centres[4] += 100.0  # nobody's, so that the last branch is taken
    for _ in range(3):
        near = torch.cdist(points, centres).argmin(1)
        counts = torch.zeros(5, device=device).index_add_(0, near, torch.ones(40, device=device))
        centres = torch.zeros(5, 2, device=device).index_add_(0, near, points) / counts.clamp(min=1)[:, None]
        empty = counts == 0
        if empty.any():  # waits
            revived += 1
            centres[empty] = points[torch.randint(0, 40, (5,), device=device)][empty]  # waits
    return centres, revived


def weights_of_three_values(device: str) -> Any:
    layer, x = nn.Linear(6, 4, bias=False, device=device), torch.randn(3, 6, device=device)
    scale = layer.weight.abs().mean().clamp(min=1e-5)
    small = (layer.weight / scale).round().clamp(-1, 1) * scale
    weight = layer.weight + (small - layer.weight).detach()
    step = 127 / x.abs().amax(-1, keepdim=True).clamp(min=1e-5)
    F.linear((x * step).round() / step, weight).square().sum().backward()
    return layer.weight.grad


def weights_by_a_table_of_levels(device: str) -> Any:
    levels = torch.tensor([-1.0, -0.6, -0.3, -0.1, 0.0, 0.1, 0.3, 0.6, 1.0], device=device)  # waits
    blocks = torch.randn(4, 16, device=device)
    greatest = blocks.abs().amax(1, keepdim=True)
    codes = (blocks / greatest).unsqueeze(-1).sub(levels).abs().argmin(-1).to(torch.uint8)
    packed = codes[:, ::2] << 4 | codes[:, 1::2]
    opened = torch.stack([packed >> 4, packed & 15], -1).flatten(1)
    return levels[opened.long()] * greatest


def ranges_gathered_by_hooks(device: str) -> Any:
    model = nn.Sequential(nn.Linear(3, 4, device=device), nn.ReLU(), nn.Linear(4, 2, device=device))
    ranges: dict[str, torch.Tensor] = {}

    def note(name: str) -> Any:
        def hook(_module: nn.Module, _given: Any, made: torch.Tensor) -> None:
            most = made.detach().abs().amax(0)
            ranges[name] = torch.maximum(ranges[name], most) if name in ranges else most

        return hook

    handles = [part.register_forward_hook(note(name)) for name, part in model.named_children()]
    for _ in range(2):
        model(torch.randn(5, 3, device=device))
    for handle in handles:
        handle.remove()
    return {name: most.cpu() for name, most in ranges.items()}  # waits


def two_of_four_kept(device: str) -> Any:
    weight = torch.randn(4, 8, device=device)
    groups = weight.view(-1, 4)
    keep = torch.zeros_like(groups).scatter_(1, groups.abs().topk(2, dim=1).indices, 1.0)
    return (groups * keep).view_as(weight)


def weights_cut_at_a_common_threshold(device: str) -> Any:
    model = nn.Sequential(nn.Linear(4, 5, device=device), nn.Linear(5, 3, device=device))
    sizes = torch.cat([part.weight.detach().abs().flatten() for part in model])
    threshold = sizes.kthvalue(sizes.numel() // 2).values
    with torch.no_grad():
        for part in model:
            part.weight.mul_(part.weight.abs() > threshold)
    left = sum(int((part.weight != 0).sum()) for part in model)  # waits
    return left, model[0].weight


def outliers_multiplied_apart(device: str) -> Any:
    x, weight = torch.randn(5, 8, device=device), torch.randn(4, 8, device=device)
    x[:, 2] += 9.0
    large = (x.abs() > 6).any(0).nonzero().view(-1)  # waits
    rest = x.index_fill(1, large, 0.0)
    step = rest.abs().amax(1, keepdim=True).clamp(min=1e-6) / 127
    return (rest / step).round() * step @ weight.T + x[:, large] @ weight[:, large].T


def singular_values_shared_out(device: str) -> Any:
    weight = torch.randn(6, 5, device=device)
    u, s, v = torch.linalg.svd(weight, full_matrices=False)  # waits
    root = s[:2].sqrt()
    left, right = u[:, :2] * root, root[:, None] * v[:2]
    return weight - left @ right


def blocks_of_eight_bit_states(device: str) -> Any:
    state, grad = torch.randn(4, 16, device=device).abs(), torch.randn(4, 16, device=device)
    for _ in range(2):
        greatest = state.amax(1, keepdim=True).clamp(min=1e-12)
        codes = (state / greatest * 255).round().to(torch.uint8)
        state = codes.float() / 255 * greatest
        state = state * 0.9 + 0.1 * grad.square()
    return state


def experts_merged_by_their_signs(device: str) -> Any:
    base, tuned = torch.randn(5, 4, device=device), torch.randn(3, 5, 4, device=device)
    change = tuned - base
    cut = change.flatten(1).abs().kthvalue(10, dim=1).values
    change = change * (change.abs() > cut[:, None, None])
    sign = change.sum(0).sign()
    agree = change.sign() == sign
    return base + (change * agree).sum(0) / agree.sum(0).clamp(min=1)
