"""Pictures and scenes. A line that waits by documentation ends in ``# waits``; no other line waits."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


def _overlap(one: torch.Tensor, many: torch.Tensor) -> torch.Tensor:
    low, high = torch.maximum(one[:2], many[:, :2]), torch.minimum(one[2:], many[:, 2:])
    shared = (high - low).clamp(min=0).prod(1)
    return shared / ((one[2:] - one[:2]).prod() + (many[:, 2:] - many[:, :2]).prod(1) - shared)


def boxes_suppressed_class_by_class(device: str) -> Any:
    corner = torch.rand(8, 2, device=device)
    boxes, scores = torch.cat([corner, corner + 0.5], 1), torch.rand(8, device=device)
    classes = torch.randint(0, 2, (8,), device=device)
    shifted = boxes + classes[:, None].float() * 4.0
    order, kept = scores.argsort(descending=True), []
    while order.numel():
        kept.append(order[0])
        near = _overlap(shifted[order[0]], shifted[order[1:]])  # waits
        order = order[1:][near <= 0.5]  # waits
    return torch.stack(kept)


def queries_matched_with_targets(device: str) -> Any:
    chances, boxes = torch.randn(5, 3, device=device).softmax(-1), torch.rand(5, 4, device=device, requires_grad=True)
    labels, targets = torch.arange(2, device=device), torch.rand(2, 4, device=device)
    cost = (torch.cdist(boxes.detach(), targets, p=1) - chances[:, labels]).cpu()  # waits
    rows, columns, free = [], [], set(range(5))
    for column in range(2):
        row = min(free, key=lambda number: float(cost[number, column]))
        free.remove(row)
        rows.append(row)
        columns.append(column)
    source, target = torch.as_tensor(rows), torch.as_tensor(columns)
    loss = F.l1_loss(boxes[source], targets[target])  # waits
    loss.backward()  # waits
    return boxes.grad


def teacher_centred(device: str) -> Any:
    student, teacher = nn.Linear(4, 6, device=device), nn.Linear(4, 6, device=device)
    centre = torch.zeros(1, 6, device=device)
    for _ in range(2):
        views = torch.randn(2, 3, 4, device=device)
        with torch.no_grad():
            goal = ((teacher(views) - centre) / 0.04).softmax(-1)
            centre = centre * 0.9 + teacher(views).flatten(0, 1).mean(0, keepdim=True) * 0.1
        guess = (student(views) / 0.1).log_softmax(-1)
        loss = -(goal[0] * guess[1] + goal[1] * guess[0]).sum(-1).mean()
        loss.backward()
    return centre, student.weight.grad


def queue_of_negatives_with_a_pointer_on_the_device(device: str) -> Any:
    queue = F.normalize(torch.randn(4, 12, device=device), dim=0)
    pointer = torch.zeros(1, dtype=torch.long, device=device)
    for _ in range(2):
        q, k = (F.normalize(torch.randn(3, 4, device=device), dim=1) for _ in range(2))
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ queue], 1) / 0.07
        loss = F.cross_entropy(logits, torch.zeros(3, dtype=torch.long, device=device))
        at = int(pointer)  # waits
        queue[:, at : at + 3] = k.T
        pointer[0] = (at + 3) % 12  # waits
    return loss, queue


def queue_of_negatives_with_a_pointer_on_the_host(device: str) -> Any:
    queue, at = F.normalize(torch.randn(4, 12, device=device), dim=0), 0
    for _ in range(2):
        k = F.normalize(torch.randn(3, 4, device=device), dim=1)
        queue[:, at : at + 3] = k.T
        at = (at + 3) % 12
    return queue


def patches_hidden_and_restored(device: str) -> Any:
    patches, token = torch.randn(2, 9, 4, device=device), torch.zeros(1, 1, 4, device=device)
    order = torch.rand(2, 9, device=device).argsort(1)
    back = order.argsort(1)
    shown = patches.gather(1, order[:, :3, None].expand(-1, -1, 4))
    full = torch.cat([shown, token.expand(2, 6, 4)], 1).gather(1, back[..., None].expand(-1, -1, 4))
    hidden = torch.ones(2, 9, device=device)
    hidden[:, :3] = 0
    hidden = hidden.gather(1, back)
    return ((full - patches).square().mean(-1) * hidden).sum() / hidden.sum()


def rectangles_pasted(device: str) -> Any:
    pictures, labels = torch.rand(4, 3, 8, 8, device=device), torch.randint(0, 3, (4,), device=device)
    share, order = np.random.beta(1.0, 1.0), torch.randperm(4, device=device)
    side = int(8 * np.sqrt(1 - share))
    top, left = random.randrange(9 - side), random.randrange(9 - side)
    pictures[:, :, top : top + side, left : left + side] = pictures[order, :, top : top + side, left : left + side]
    weight = 1 - side * side / 64
    logits = pictures.mean((2, 3))
    return weight * F.cross_entropy(logits, labels) + (1 - weight) * F.cross_entropy(logits, labels[order])


def codebook_with_moving_averages(device: str) -> Any:
    codes, counts, sums = (
        torch.randn(6, 4, device=device),
        torch.ones(6, device=device),
        torch.randn(6, 4, device=device),
    )
    usage = []
    for _ in range(2):
        x = torch.randn(10, 4, device=device, requires_grad=True)
        near = torch.cdist(x.detach(), codes).argmin(1)
        chosen = F.one_hot(near, num_classes=6).float()
        counts = counts * 0.9 + chosen.sum(0) * 0.1
        sums = sums * 0.9 + chosen.T @ x.detach() * 0.1
        codes = sums / counts.clamp(min=1e-2)[:, None]
        dead = counts < 0.8
        codes = torch.where(dead[:, None], x.detach()[torch.randint(0, 10, (6,), device=device)], codes)
        (x - codes[near]).square().mean().backward()
        spread = chosen.mean(0)
        usage.append((-(spread * (spread + 1e-10).log()).sum()).exp().item())  # waits
    return usage, codes


def regions_that_decide(device: str) -> Any:
    body, head = nn.Conv2d(1, 3, 3, padding=1, device=device), nn.Linear(3, 4, device=device)
    maps: list[torch.Tensor] = []
    slopes: list[torch.Tensor] = []

    def keep(_module: nn.Module, _given: Any, made: torch.Tensor) -> None:
        maps.append(made)
        made.register_hook(slopes.append)

    body.register_forward_hook(keep)
    logits = head(body(torch.rand(2, 1, 6, 6, device=device)).mean((2, 3)))
    best = logits.argmax(1)
    logits[range(2), best].sum().backward()  # waits
    shown = (slopes[0].mean((2, 3), keepdim=True) * maps[0]).sum(1, keepdim=True).relu()
    shown = F.interpolate(shown, size=(12, 12), mode="bilinear", align_corners=False)
    return shown / shown.amax((2, 3), keepdim=True).clamp(min=1e-8)


def segments_merged(device: str) -> Any:
    kinds = torch.randint(0, 4, (6, 6), device=device)
    pieces, areas = torch.zeros(6, 6, dtype=torch.long, device=device), {}
    for kind in torch.unique(kinds).tolist():  # waits
        here = kinds == kind
        area = here.sum().item()  # waits
        if area > 4:
            pieces[here] = len(areas) + 1
            areas[kind] = area
    return pieces, areas


def rays_composited_in_training(device: str) -> Any:
    density = torch.rand(4, 8, device=device, requires_grad=True)
    opaque = 1 - (-density * 0.2).exp()
    through = torch.cumprod(torch.cat([torch.ones(4, 1, device=device), 1 - opaque + 1e-10], 1), 1)[:, :-1]
    depth = (opaque * through * torch.linspace(1, 2, 8, device=device)).sum(1)
    depth.sum().backward()  # waits
    return density.grad


def rays_composited_by_sums_of_logarithms(device: str) -> Any:
    density = torch.rand(4, 8, device=device, requires_grad=True)
    amount = density * 0.2
    through = (-(amount.cumsum(1) - amount)).exp()
    depth = ((1 - (-amount).exp()) * through * torch.linspace(1, 2, 8, device=device)).sum(1)
    depth.sum().backward()
    return density.grad


def samples_drawn_where_light_is(device: str) -> Any:
    weights = torch.rand(4, 7, device=device) + 1e-3
    sums = F.pad((weights / weights.sum(1, keepdim=True)).cumsum(1), (1, 0))
    bins, points = torch.linspace(0, 1, 8, device=device).expand(4, 8), torch.rand(4, 5, device=device)
    above = torch.searchsorted(sums, points, right=True).clamp(1, 7)
    low, high = sums.gather(1, above - 1), sums.gather(1, above)
    share = (points - low) / (high - low).clamp(min=1e-5)
    return bins.gather(1, above - 1) + share * (bins.gather(1, above) - bins.gather(1, above - 1))


def style_and_smoothness(device: str) -> Any:
    picture = torch.rand(1, 3, 6, 6, device=device, requires_grad=True)
    goal, optimizer = torch.randn(3, 3, device=device), torch.optim.Adam([picture], lr=0.05)
    for _ in range(2):
        flat = picture.flatten(2)[0]
        rough = (picture[..., 1:] - picture[..., :-1]).abs().mean() + (
            picture[:, :, 1:] - picture[:, :, :-1]
        ).abs().mean()
        loss = (flat @ flat.T / 36 - goal).square().sum() + rough
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        picture.data.clamp_(0, 1)
    return picture.detach()


def pictures_warped_by_a_flow(device: str) -> Any:
    picture, flow = torch.rand(1, 2, 5, 5, device=device), torch.randn(1, 5, 5, 2, device=device) * 0.1
    rows, columns = torch.meshgrid(
        torch.linspace(-1, 1, 5, device=device), torch.linspace(-1, 1, 5, device=device), indexing="ij"
    )
    grid = torch.stack([columns, rows], -1)[None] + flow
    warped = F.grid_sample(picture, grid, align_corners=True)
    seen = (grid.abs() <= 1).all(-1, keepdim=True).permute(0, 3, 1, 2)
    return ((warped - picture).abs() * seen).sum() / seen.sum().clamp(min=1)


def joints_from_heat(device: str) -> Any:
    heat = torch.randn(2, 3, 4, 5, device=device)
    chances = heat.flatten(2).softmax(-1).view_as(heat)
    x = (chances.sum(2) * torch.arange(5, device=device)).sum(-1)
    y = (chances.sum(3) * torch.arange(4, device=device)).sum(-1)
    peak = heat.flatten(2).argmax(-1)
    return torch.stack([x, y], -1), torch.stack([peak % 5, peak // 5], -1).cpu()  # waits


def scenes_with_rare_classes(device: str) -> Any:
    weights = torch.tensor([0.5, 2.0, 1.0]).to(device)  # waits
    logits, labels = (
        torch.randn(2, 3, 4, 4, device=device, requires_grad=True),
        torch.randint(0, 3, (2, 4, 4), device=device),
    )
    labels[:, 0] = 255
    F.cross_entropy(logits, labels, weight=weights, ignore_index=255).backward()
    return logits.grad


def pictures_stretched_in_the_middle_of_training(device: str) -> Any:
    pictures = torch.rand(2, 3, 6, 6, device=device)
    mean, spread = (torch.as_tensor(each, device=device).view(3, 1, 1) for each in ([0.4] * 3, [0.2] * 3))  # waits
    turned = pictures.flip(-1) if random.random() < 0.5 else pictures
    size = random.choice((4, 8))
    return F.interpolate((turned - mean) / spread, size=size, mode="bicubic", antialias=True, align_corners=False)


def windows_that_shift(device: str) -> Any:
    x = torch.randn(1, 4, 4, 6, device=device)
    turned = x.roll((-1, -1), (1, 2)).view(1, 2, 2, 2, 2, 6).transpose(2, 3).reshape(-1, 4, 6)
    number = torch.zeros(1, 4, 4, 1, device=device)
    for count, (rows, columns) in enumerate(
        (a, b) for a in (slice(0, 3), slice(3, 4)) for b in (slice(0, 3), slice(3, 4))
    ):
        number[:, rows, columns] = count
    parts = number.view(1, 2, 2, 2, 2, 1).transpose(2, 3).reshape(-1, 4)
    mask = torch.zeros(4, 4, 4, device=device).masked_fill(parts[:, None] != parts[:, :, None], -100.0)
    return F.scaled_dot_product_attention(turned[:, None], turned[:, None], turned[:, None], mask[:, None])
