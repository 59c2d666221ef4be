"""Loaders, hooks, metrics, schedules, transforms of functions. A line that waits by documentation ends in ``# waits``."""

from __future__ import annotations

import copy
import io
import itertools
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler


class _Prefetched:
    """Moves the next batch while the present one is used."""

    def __init__(self, loader: Any, device: str) -> None:
        self.batches, self.device = iter(loader), device
        self.stream = torch.cuda.Stream() if device == "cuda" else None
        self.ahead = self._next()

    def _next(self) -> Any:
        batch = next(self.batches, None)
        if batch is None or self.stream is None:
            return batch
        with torch.cuda.stream(self.stream):
            return [part.to(self.device, non_blocking=True) for part in batch]

    def __iter__(self) -> Iterator[Any]:
        while self.ahead is not None:
            if self.stream is not None:
                torch.cuda.current_stream().wait_stream(self.stream)
                for part in self.ahead:
                    part.record_stream(torch.cuda.current_stream())
            batch, self.ahead = self.ahead, self._next()
            yield batch


def batches_fetched_ahead_from_pinned_memory(device: str) -> Any:
    data = TensorDataset(torch.randn(8, 3), torch.arange(8))
    loader, total = DataLoader(data, 4, pin_memory=device == "cuda"), torch.zeros((), device=device)
    for x, y in _Prefetched(loader, device):
        total += x.mean() + y.sum()
    return total


class _PrefetchedFromPageable(_Prefetched):
    def _next(self) -> Any:
        batch = next(self.batches, None)
        if batch is None:
            return None
        return [part.to(self.device, non_blocking=True) for part in batch]  # waits


def batches_fetched_ahead_from_pageable_memory(device: str) -> Any:
    loader, total = DataLoader(TensorDataset(torch.randn(8, 3)), 4), torch.zeros((), device=device)
    for (x,) in _PrefetchedFromPageable(loader, device):
        total += x.mean()
    return total


class _Words(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from ({"ids": list(range(n)), "label": n % 2} for n in (2, 4, 3, 1))


def words_padded_by_a_collator(device: str) -> Any:
    def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
        longest = max(len(row["ids"]) for row in rows)
        ids = [row["ids"] + [0] * (longest - len(row["ids"])) for row in rows]
        return {"ids": torch.tensor(ids), "label": torch.tensor([row["label"] for row in rows])}

    table, losses = nn.Embedding(5, 2, device=device), []
    for batch in DataLoader(_Words(), 2, collate_fn=collate):
        batch = {key: value.to(device) for key, value in batch.items()}  # waits
        losses.append(F.cross_entropy(table(batch["ids"]).mean(1), batch["label"]))
    return torch.stack(losses)


class _OnTheDevice(Dataset[Any]):
    def __init__(self, device: str) -> None:
        self.x = torch.randn(8, 3, device=device)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, row: int) -> torch.Tensor:
        return self.x[row]


def data_that_live_on_the_device(device: str) -> Any:
    data = _OnTheDevice(device)
    sampler = WeightedRandomSampler([1.0] * 8, 8)
    return [batch.sum() for batch in DataLoader(data, 4, sampler=sampler)]


def ranking_metric_of_a_whole_epoch(device: str) -> Any:
    scores, labels = [], []
    for _ in range(3):
        scores.append(torch.rand(6, device=device))
        labels.append(torch.randint(0, 2, (6,), device=device))
    order = torch.cat(scores).argsort(descending=True)
    hits = torch.cat(labels)[order].float()
    right, wrong = hits.cumsum(0), (1 - hits).cumsum(0)
    area = torch.trapezoid(right / right[-1].clamp(min=1), wrong / wrong[-1].clamp(min=1))
    return area.item()  # waits


def meters_read_once_an_epoch(device: str) -> Any:
    sums, report = defaultdict[str, Any](lambda: torch.zeros((), device=device)), []
    for _ in range(2):
        for _ in range(3):
            x = torch.randn(4, device=device)
            sums["mean"] += x.mean()
            sums["most"] = torch.maximum(sums["most"], x.max())
        report.append({name: round(float(value), 3) for name, value in sums.items()})  # waits
    return report


def table_of_confusions(device: str) -> Any:
    answers, labels = torch.randint(0, 3, (2, 20), device=device)
    table = torch.bincount(labels * 3 + answers, minlength=9).view(3, 3)  # waits
    right = table.diagonal()
    return (2 * right / (table.sum(0) + table.sum(1)).clamp(min=1)).mean()


def statistics_merged_as_they_come(device: str) -> Any:
    count, mean, squares = 0, torch.zeros(3, device=device), torch.zeros(3, device=device)
    for size in (4, 6):
        x = torch.randn(size, 3, device=device)
        gap, total = x.mean(0) - mean, count + size
        squares = squares + (x - x.mean(0)).square().sum(0) + gap.square() * count * size / total
        mean, count = mean + gap * size / total, total
    return mean, (squares / count).sqrt()


def training_ended_early(device: str) -> Any:
    layer, best, patience, kept = nn.Linear(3, 1, device=device), torch.full((), 1e9, device=device), 0, None
    for _ in range(4):
        with torch.no_grad():
            loss = layer(torch.randn(8, 3, device=device)).square().mean()
        if loss < best:  # waits
            best, patience, kept = loss, 0, copy.deepcopy(layer.state_dict())
        else:
            patience += 1
        if patience > 1:
            break
    return best, kept


def rate_lowered_on_a_plateau(device: str) -> Any:
    layer = nn.Linear(3, 1, device=device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for _ in range(3):
        loss = layer(torch.ones(2, 3, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        schedule.step(loss.detach())  # waits
    return optimizer.param_groups[0]["lr"]


def rate_warmed_and_cooled(device: str) -> Any:
    layer = nn.Linear(3, 1, device=device)
    optimizer = torch.optim.NAdam(layer.parameters(), lr=0.1)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    cool = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cool], milestones=[2])
    for _ in range(4):
        layer(torch.ones(2, 3, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return optimizer.param_groups[0]["lr"], layer.weight


def private_gradients(device: str) -> Any:
    layer, x, y = (
        nn.Linear(3, 2, device=device),
        torch.randn(5, 3, device=device),
        torch.randint(0, 2, (5,), device=device),
    )
    weights = {name: value.detach() for name, value in layer.named_parameters()}

    def loss(given: Any, row: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(torch.func.functional_call(layer, given, (row[None],)), label[None])

    grads = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(weights, x, y)
    norms = torch.stack([grad.flatten(1).norm(dim=1) for grad in grads.values()], 1).norm(dim=1)
    share = (1.0 / (norms + 1e-6)).clamp(max=1.0)
    return {name: torch.einsum("n,n...->...", share, grad) + torch.randn_like(grad[0]) for name, grad in grads.items()}


def learned_to_learn(device: str) -> Any:
    model = nn.Sequential(nn.Linear(1, 4, device=device), nn.Tanh(), nn.Linear(4, 1, device=device))
    weights = dict(model.named_parameters())

    def loss(given: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (torch.func.functional_call(model, given, (x,)) - y).square().mean()

    def after_one_step(given: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        grads = torch.func.grad(loss)(given, x[:2], y[:2])
        return loss({name: given[name] - 0.1 * grads[name] for name in given}, x[2:], y[2:])

    x = torch.randn(3, 4, 1, device=device)
    outer = torch.func.vmap(after_one_step, in_dims=(None, 0, 0))(weights, x, x.sin()).mean()
    outer.backward()
    return outer, model[0].weight.grad


def curvature_as_uncertainty(device: str) -> Any:
    x, y = torch.randn(12, 3, device=device), torch.randint(0, 2, (12,), device=device).float()

    def loss(weight: torch.Tensor) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(x @ weight, y, reduction="sum") + 0.5 * weight.square().sum()

    weight = torch.zeros(3, device=device)
    bend = torch.func.hessian(loss)(weight)
    spread, info = torch.linalg.inv_ex(bend)
    product = torch.func.jvp(torch.func.grad(loss), (weight,), (torch.ones_like(weight),))[1]
    return spread.diagonal(), info, product


class _Reversed(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, share: float) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.share = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return -ctx.share * grad, None


def domains_told_apart_by_an_adversary(device: str) -> Any:
    body, label, domain = (nn.Linear(a, b, device=device) for a, b in ((3, 4), (4, 2), (4, 2)))
    x, y = torch.randn(6, 3, device=device), torch.randint(0, 2, (6,), device=device)
    seen = body(x).relu()
    foreign = domain(_Reversed.apply(seen, 0.3))  # type: ignore[no-untyped-call]
    (F.cross_entropy(label(seen), y) + F.cross_entropy(foreign, 1 - y)).backward()
    return body.weight.grad, torch.func.vmap(lambda row: _Reversed.apply(row, 0.5))(x)  # type: ignore[no-untyped-call]


class _Frugal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        gate = x.sigmoid()
        if not torch.isfinite(grad).all():  # waits
            raise ValueError("a gradient is not finite")
        return grad * gate * (1 + x * (1 - gate))


def gradient_looked_at_in_a_function(device: str) -> Any:
    x = torch.randn(5, device=device, requires_grad=True)
    _Frugal.apply(x).sum().backward()  # type: ignore[no-untyped-call]
    return x.grad


def norms_of_gradients_by_layer(device: str) -> Any:
    model, norms = nn.Sequential(nn.Linear(3, 4, device=device), nn.GELU(), nn.Linear(4, 1, device=device)), []
    for part in model:
        part.register_full_backward_hook(lambda module, into, out: norms.append(out[0].norm()))
    model(torch.randn(4, 3, device=device)).sum().backward()
    return torch.stack(norms).tolist()  # waits


def activations_watched_for_nan(device: str) -> Any:
    model = nn.Sequential(nn.Linear(3, 4, device=device), nn.ReLU())

    def check(_module: nn.Module, _given: Any, made: torch.Tensor) -> None:
        if torch.isnan(made).any():  # waits
            raise ValueError("not a number")

    for part in model:
        part.register_forward_hook(check)
    return model(torch.randn(4, 3, device=device))


def weights_written_out_and_read_again(device: str) -> Any:
    layer, file = nn.Linear(3, 2, device=device), io.BytesIO()
    torch.save({"model": layer.state_dict(), "step": 3}, file)  # waits
    file.seek(0)
    found = torch.load(file, map_location=device, weights_only=True)  # waits
    layer.load_state_dict(found["model"])
    return layer.weight, found["step"]


def buckets_of_gradients(device: str) -> Any:
    model = nn.Sequential(nn.Linear(3, 4, device=device), nn.Linear(4, 2, device=device))
    model(torch.randn(5, 3, device=device)).sum().backward()
    grads = [p.grad for p in model.parameters()]
    flat = torch.cat([grad.flatten() for grad in grads])
    flat.div_(2)
    for grad, part in zip(grads, flat.split([grad.numel() for grad in grads])):
        grad.copy_(part.view_as(grad))
    return [grad.sum() for grad in grads]


def gradients_added_up_over_small_batches(device: str) -> Any:
    layer, log = nn.Linear(3, 2, device=device), []
    optimizer, running = torch.optim.AdamW(layer.parameters()), torch.zeros((), device=device)
    for step in range(4):
        loss = layer(torch.randn(2, 3, device=device)).square().mean() / 2
        loss.backward()
        running += loss.detach()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
            log.append(f"{step}: {running:.4f}")  # waits
            running.zero_()
    return log, layer.weight


def half_precision_with_a_plain_optimizer(device: str) -> Any:
    layer, scaler = nn.Linear(4, 2, device=device), torch.amp.GradScaler(device, init_scale=16.0)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(2):
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = layer(torch.ones(3, 4, device=device)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        scaler.step(optimizer)  # waits
        scaler.update()
        optimizer.zero_grad()
    return layer.weight


def hard_examples_learned_later(device: str) -> Any:
    losses, easy = torch.rand(10, device=device), torch.full((), 0.5, device=device)
    for _ in range(2):
        weight = torch.sigmoid((easy - losses) * 20)
        losses = losses * 0.9
        easy.lerp_(losses.median(), 0.1)
    return (losses * weight).sum() / weight.sum(), easy


def processes_that_agree(device: str) -> Any:
    import torch.distributed as dist

    store = dist.HashStore()
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=store, rank=0, world_size=1)
    try:
        x = torch.randn(3, 2, device=device)
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        sizes = [torch.zeros(1, dtype=torch.long, device=device)]
        dist.all_gather(sizes, torch.full((1,), 3, device=device))
        longest = int(torch.stack(sizes).max())  # waits
        parts = [torch.empty(longest, 2, device=device)]
        dist.all_gather(parts, x)
        model = nn.Linear(2, 1, device=device)
        for p in model.parameters():
            dist.broadcast(p.data, 0)
        model(parts[0]).sum().backward()
        dist.barrier()  # waits
        return parts[0], model.weight.grad
    finally:
        dist.destroy_process_group()


def moments_of_a_stream_in_a_window(device: str) -> Any:
    ring, place, made = torch.zeros(4, 3, device=device), itertools.cycle(range(4)), []
    for _ in range(6):
        ring[next(place)] = torch.randn(3, device=device)
        made.append(ring.mean(0))
    return torch.stack(made)


def work_timed_and_written_down(device: str) -> Any:
    x, spent = torch.randn(8, 8, device=device), []
    for _ in range(2):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device == "cuda" else []
        for mark in marks[:1]:
            mark.record()
        x = x @ x / 8
        for mark in marks[1:]:
            mark.record()
            mark.synchronize()  # waits
            spent.append(marks[0].elapsed_time(mark) >= 0)
    return x


def answers_read_one_step_late(device: str) -> Any:
    host = torch.zeros(2, 3, pin_memory=device == "cuda")
    marks, read = [torch.cuda.Event() if device == "cuda" else None for _ in range(2)], []
    for step in range(4):
        slot, mark = step % 2, marks[(step + 1) % 2]
        host[slot].copy_(torch.full((3,), float(step), device=device), non_blocking=True)
        if device == "cuda":
            marks[slot].record()
        if step:
            if mark is not None:
                mark.synchronize()  # waits
            read.append(host[1 - slot].tolist())
    return read


def model_of_several_places(device: str) -> Any:
    with torch.device(device):
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))  # waits
        x = torch.randn(5, 3)
    model(x).sum().backward()
    copied = copy.deepcopy(model).to("cpu")  # waits
    sizes = {name: tuple(value.shape) for name, value in copied.state_dict().items()}
    return sizes, [p.grad.sum() for p in model.parameters()]


def predictions_kept_for_later(device: str) -> Any:
    model, kept = nn.Linear(3, 2, device=device).eval(), []
    with torch.inference_mode():
        for _ in range(3):
            kept.append(model(torch.randn(4, 3, device=device)).softmax(-1))
        whole = torch.cat(kept)
    best = whole.argmax(1).cpu().numpy().tolist()  # waits
    return best, whole.std(0)
