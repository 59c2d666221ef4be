"""Graphs, geometry and recommendations. A line that waits by documentation ends in ``# waits``; no other line waits."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def _ring(device: str, nodes: int = 6) -> torch.Tensor:
    here = torch.arange(nodes, device=device)
    return torch.stack([torch.cat([here, here]), torch.cat([(here + 1) % nodes, (here + 2) % nodes])])


def convolution_with_normalised_degrees(device: str) -> Any:
    edges, x = _ring(device), torch.randn(6, 3, device=device)
    layer = nn.Linear(3, 4, bias=False, device=device)
    source, target = edges
    degree = torch.zeros(6, device=device).index_add_(0, target, torch.ones(12, device=device))
    scale = degree.pow(-0.5)
    scale.masked_fill_(scale == float("inf"), 0.0)
    messages = layer(x)[source] * (scale[source] * scale[target])[:, None]
    made = torch.zeros(6, 4, device=device).index_add(0, target, messages)
    made.relu().sum().backward()
    return layer.weight.grad


def attention_whose_softmax_runs_over_edges(device: str) -> Any:
    (source, target), x = _ring(device), torch.randn(6, 4, device=device)
    left, right = torch.randn(4, device=device), torch.randn(4, device=device)
    logits = F.leaky_relu((x @ left)[source] + (x @ right)[target], 0.2)
    greatest = torch.full((6,), -1e9, device=device).scatter_reduce(0, target, logits, "amax")
    weights = (logits - greatest[target]).exp()
    sums = torch.zeros(6, device=device).scatter_add(0, target, weights)
    weights = weights / (sums[target] + 1e-16)
    return torch.zeros(6, 4, device=device).index_add(0, target, x[source] * weights[:, None])


def neighbours_drawn_by_the_host(device: str) -> Any:
    around = {node: [(node + 1) % 6, (node + 2) % 6, (node + 3) % 6] for node in range(6)}
    x, layer = torch.randn(6, 3, device=device), nn.Linear(6, 2, device=device)
    for batch in ([0, 1], [2, 3]):
        drawn = [random.sample(around[node], 2) for node in batch]
        seeds = torch.tensor(batch).to(device)  # waits
        near = torch.tensor(drawn, device=device)  # waits
        hidden = torch.cat([x[seeds], x[near].mean(1)], -1)
        layer(hidden).sum().backward()
    return layer.weight.grad


def graphs_batched_by_their_largest_node(device: str) -> Any:
    parts, offset, borders = [], 0, []
    for size in (4, 5):
        edges = _ring(device, size)
        parts.append(edges + offset)
        offset += int(edges.max()) + 1  # waits
        borders.append(offset)
    return torch.cat(parts, 1), borders


def graphs_pooled_by_their_number(device: str) -> Any:
    batch, x = torch.arange(6, device=device) // 2, torch.randn(6, 3, device=device)
    graphs = batch[-1].item() + 1  # waits
    gate = x[:, 0].sigmoid()
    return torch.zeros(int(graphs), 3, device=device).index_add(0, batch, x * gate[:, None])


def graphs_pooled_by_a_known_number(device: str) -> Any:
    batch, x = torch.arange(6, device=device) // 2, torch.randn(6, 3, device=device)
    sums = torch.zeros(3, 3, device=device).index_add(0, batch, x)
    counts = torch.zeros(3, device=device).scatter_add(0, batch, torch.ones_like(x[:, 0]))
    most = torch.full((3, 3), -1e9, device=device).index_reduce(0, batch, x, "amax")
    return sums / counts.clamp(min=1)[:, None], most


def links_told_from_chance(device: str) -> Any:
    edges, table = _ring(device), nn.Embedding(6, 4, device=device)
    wrong = torch.stack([edges[0], torch.randint(0, 6, (12,), device=device)])
    right = (table(edges[0]) * table(edges[1])).sum(-1)
    left = (table(wrong[0]) * table(wrong[1])).sum(-1)
    loss = F.binary_cross_entropy_with_logits(
        torch.cat([right, left]), torch.cat([torch.ones_like(right), torch.zeros_like(left)])
    )
    loss.backward()
    return table.weight.grad


def edges_kept_once(device: str) -> Any:
    edges = torch.cat([_ring(device), _ring(device)], 1)
    keys = edges[0] * 6 + edges[1]
    kept = torch.unique(keys)  # waits
    return torch.stack([kept // 6, kept % 6])


def walks_over_rows_of_equal_degree(device: str) -> Any:
    rows = torch.arange(0, 13, 2, device=device)
    column = torch.stack([(torch.arange(6, device=device) + 1) % 6, (torch.arange(6, device=device) + 2) % 6], 1).view(
        -1
    )
    here, path = torch.arange(6, device=device), []
    for _ in range(3):
        degree = rows[here + 1] - rows[here]
        here = column[rows[here] + (torch.rand(6, device=device) * degree).long()]
        path.append(here)
    return torch.stack(path, 1)


def labels_spread_until_they_rest(device: str) -> Any:
    source, target = _ring(device)
    labels, rounds = torch.eye(6, device=device)[:, :2].contiguous(), 0
    for _ in range(20):
        rounds += 1
        fresh = torch.zeros_like(labels).index_add(0, target, labels[source]) / 2
        if (fresh - labels).abs().max() < 0.05:  # waits
            break
        labels = fresh
    return labels, rounds


def places_from_the_spectrum(device: str) -> Any:
    source, target = _ring(device)
    near = torch.zeros(6, 6, device=device).index_put((source, target), torch.ones(12, device=device))
    near = torch.maximum(near, near.T)
    laplacian = torch.diag(near.sum(1)) - near
    values, _ = torch.linalg.eigh(laplacian)  # waits
    return values[1:4]


def edges_dropped(device: str) -> Any:
    edges = _ring(device)
    keep = torch.rand(12, device=device) > 0.3
    return edges[:, keep]  # waits


def edges_dropped_by_weight(device: str) -> Any:
    (source, target), x = _ring(device), torch.randn(6, 3, device=device)
    keep = (torch.rand(12, device=device) > 0.3).float() / 0.7
    return torch.zeros(6, 3, device=device).index_add(0, target, x[source] * keep[:, None])


def isolated_nodes_removed(device: str) -> Any:
    source, target = _ring(device)
    degree = torch.bincount(target, minlength=8)  # waits
    alive = degree > 0
    rename = alive.cumsum(0) - 1
    return rename[source], rename[target], alive


def coarse_graph_by_matching_on_the_host(device: str) -> Any:
    edges, weights = _ring(device), torch.rand(12, device=device)
    order = weights.argsort(descending=True)
    pairs, used = [], set()
    for a, b in edges[:, order].t().tolist():  # waits
        if a != b and a not in used and b not in used:
            pairs.append((a, b))
            used |= {a, b}
    clusters = torch.zeros(6, dtype=torch.long)
    for number, (a, b) in enumerate(pairs):
        clusters[a] = clusters[b] = number
    return torch.zeros(6, device=device).index_add(0, clusters.to(device), torch.ones(6, device=device))  # waits


def equivariant_layer(device: str) -> Any:
    (source, target), place = _ring(device), torch.randn(6, 3, device=device)
    h, edge, weigh = torch.randn(6, 4, device=device), nn.Linear(9, 5, device=device), nn.Linear(5, 1, device=device)
    apart = place[source] - place[target]
    square = apart.square().sum(-1, keepdim=True)
    message = F.silu(edge(torch.cat([h[source], h[target], square], -1)))
    moved = place.index_add(0, target, apart / (square.sqrt() + 1) * weigh(message))
    moved.square().sum().backward()
    return moved, edge.weight.grad


def shapes_compared_by_nearest_points(device: str) -> Any:
    left, right = torch.randn(2, 7, 3, device=device), torch.randn(2, 5, 3, device=device)
    apart = torch.cdist(left, right)
    return apart.min(2).values.mean(1) + apart.min(1).values.mean(1)


def rigid_alignment(device: str) -> Any:
    left = torch.randn(7, 3, device=device)
    right = left.roll(1, 1) + 0.01 * torch.randn(7, 3, device=device)
    a, b = left - left.mean(0), right - right.mean(0)
    u, _, v = torch.linalg.svd(a.T @ b)  # waits
    turn = (u @ v).T
    return (a @ turn.T - b).square().mean()


def taste_by_pairs(device: str) -> Any:
    users, things = nn.Embedding(5, 4, device=device), nn.Embedding(9, 4, device=device)
    optimizer = torch.optim.Adagrad([*users.parameters(), *things.parameters()], lr=0.1)
    for _ in range(2):
        who = torch.randint(0, 5, (8,), device=device)
        liked, other = torch.randint(0, 9, (2, 8), device=device)
        gap = (users(who) * (things(liked) - things(other))).sum(-1)
        loss = -F.logsigmoid(gap).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return users.weight


def best_things_without_those_seen(device: str) -> Any:
    scores = torch.randn(3, 9, device=device)
    seen = {0: [1, 2], 1: [4], 2: []}
    rows = [user for user, things in seen.items() for _ in things]
    columns = [thing for things in seen.values() for thing in things]
    scores[rows, columns] = -float("inf")  # waits
    best = scores.topk(3).indices
    hits = (best == torch.arange(3, device=device)[:, None]).any(1).float().mean()
    return best.cpu(), float(hits)  # waits
