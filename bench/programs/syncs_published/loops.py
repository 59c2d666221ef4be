"""Training loops as projects write them. A line that waits by documentation ends in ``# waits``; no other line waits."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import json
import math
import random
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, TensorDataset


def accumulation_with_clipping_and_a_scaler(device: str) -> Any:
    model = nn.Sequential(nn.Linear(6, 8, device=device), nn.GELU(), nn.Linear(8, 3, device=device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    scaler = torch.amp.GradScaler(device, init_scale=8.0, growth_interval=2)
    warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
    history = []
    for step in range(6):
        x, y = torch.randn(4, 6, device=device), torch.randint(0, 3, (4,), device=device)
        with torch.autocast(device_type=device, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y, label_smoothing=0.1) / 2
        scaler.scale(loss).backward()
        if (step + 1) % 2:
            continue
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        before = scaler.get_scale()  # waits
        scaler.step(optimizer)  # waits
        scaler.update()
        if scaler.get_scale() >= before:  # waits
            warm.step()
        optimizer.zero_grad(set_to_none=True)
        history.append((step, norm))
    return [step for step, _ in history], torch.stack([norm for _, norm in history]), model[0].weight


@dataclasses.dataclass
class _Settings:
    rate: float = 1e-2
    steps: int = 8
    every: int = 4
    smooth: float = 0.9


class _Trainer:
    """Keeps what it logs on the device until it is wanted."""

    def __init__(self, settings: _Settings, device: str) -> None:
        self.settings, self.device = settings, device
        self.model = nn.Linear(5, 1, device=device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=settings.rate)
        self.running = torch.zeros((), device=device)
        self.rows: list[str] = []

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(16, 5, device=self.device)
        return x, x.sum(1, keepdim=True)

    def step(self, number: int) -> None:
        x, y = self.batch()
        loss = F.huber_loss(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.running.mul_(self.settings.smooth).add_(loss.detach(), alpha=1 - self.settings.smooth)
        if number % self.settings.every == self.settings.every - 1:
            self.log(number)

    def log(self, number: int) -> None:
        rate = self.optimizer.param_groups[0]["lr"]
        self.rows.append(f"{number} {rate:.4f} {self.running.item():.3f}")  # waits

    def fit(self) -> list[str]:
        for number in range(self.settings.steps):
            self.step(number)
        return self.rows


def trainer_that_logs_every_few_steps(device: str) -> Any:
    trainer = _Trainer(_Settings(), device)
    return trainer.fit(), trainer.model.weight


def losses_written_to_a_table(device: str) -> Any:
    layer, sheet = nn.Linear(3, 1, device=device), io.StringIO()
    writer = csv.DictWriter(sheet, fieldnames=["step", "loss", "norm"])
    writer.writeheader()
    for step in range(3):
        layer.zero_grad()
        loss = layer(torch.ones(2, 3, device=device)).square().mean()
        loss.backward()
        norm = layer.weight.grad.norm()
        writer.writerow({"step": step, "loss": round(float(loss), 2), "norm": f"{norm:.2f}"})  # waits
    return sheet.getvalue().splitlines()


def losses_written_as_lines_of_json(device: str) -> Any:
    lines, window = [], deque[torch.Tensor](maxlen=3)
    for step in range(5):
        window.append(torch.full((), float(step), device=device).sqrt())
        mean = sum(window) / len(window)
        if step % 2 == 0:
            lines.append(json.dumps({"step": step, "mean": round(mean.tolist(), 3)}))  # waits
    return lines


def search_for_the_greatest_rate(device: str) -> Any:
    model = nn.Linear(4, 1, device=device)
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    best, average, curve = math.inf, 0.0, []
    for step in range(8):
        rate = 1e-4 * 10 ** (step / 2)
        for group in optimizer.param_groups:
            group["lr"] = rate
        x = torch.randn(16, 4, device=device)
        loss = (model(x) - 3).square().mean()
        average = 0.7 * average + 0.3 * loss.item()  # waits
        smooth = average / (1 - 0.7 ** (step + 1))
        if smooth > 4 * best:
            break
        best = min(best, smooth)
        curve.append((rate, smooth))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.load_state_dict(kept)
    return len(curve) > 2, model.weight


def rates_searched_on_the_device(device: str) -> Any:
    model = nn.Linear(4, 1, device=device)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=1e-4), torch.empty(6, device=device)
    rates = torch.logspace(-4, -1, 6)
    for step in range(6):
        optimizer.param_groups[0]["lr"] = float(rates[step])
        loss = (model(torch.ones(8, 4, device=device)) - 3).square().mean()
        losses[step] = loss.detach()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    slope = (losses[1:] - losses[:-1]).argmin()
    return rates[int(slope)], losses  # waits


class _Patience:
    def __init__(self, patience: int, least: float) -> None:
        self.patience, self.least, self.bad, self.best = patience, least, 0, float("inf")

    def __call__(self, value: float) -> bool:
        better = value < self.best - self.least
        self.best, self.bad = (value, 0) if better else (self.best, self.bad + 1)
        return self.bad >= self.patience


def validation_that_ends_training(device: str) -> Any:
    model, stop, epochs = nn.Linear(3, 2, device=device), _Patience(2, 10.0), 0
    held_x, held_y = torch.randn(3, 8, 3, device=device), torch.randint(0, 2, (3, 8), device=device)
    for _ in range(6):
        epochs += 1
        model.eval()
        total = torch.zeros((), device=device)
        with torch.inference_mode():
            for x, y in zip(held_x, held_y):
                total += F.cross_entropy(model(x), y, reduction="sum")
        model.train()
        if stop((total / held_y.numel()).item()):  # waits
            break
    return epochs, stop.bad


def evaluation_in_half_precision(device: str) -> Any:
    model, right, seen, loss = nn.Linear(6, 4, device=device), 0, 0, 0.0
    model.eval()
    for _ in range(2):
        x, y = torch.randn(8, 6, device=device), torch.randint(0, 4, (8,), device=device)
        with torch.no_grad(), torch.autocast(device, dtype=torch.bfloat16):
            logits = model(x)
        loss += F.cross_entropy(logits.float(), y).item() * y.size(0)  # waits
        right += logits.argmax(-1).eq(y).sum().item()  # waits
        seen += y.size(0)
    return seen, 0 <= right <= seen, loss > 0


def state_saved_and_training_resumed(device: str) -> Any:
    def made() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = nn.Sequential(nn.Linear(4, 6, device=device), nn.Tanh(), nn.Linear(6, 1, device=device))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    def run(model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Any) -> None:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4, device=device)).square().mean().backward()
            optimizer.step()
            schedule.step()

    first, file = made(), io.BytesIO()
    run(*first)
    parts = {name: part.state_dict() for name, part in zip(("model", "optimizer", "schedule"), first)}
    torch.save({**parts, "random": torch.get_rng_state()}, file)  # waits
    file.seek(0)
    found = torch.load(file, map_location="cpu", weights_only=True)
    second = made()
    second[0].load_state_dict(found["model"])  # waits
    second[1].load_state_dict(found["optimizer"])  # waits
    second[2].load_state_dict(found["schedule"])
    torch.set_rng_state(found["random"])
    run(*second)
    return second[0][0].weight, second[1].param_groups[0]["lr"]  # type: ignore[index]


class _ByLength(Sampler[list[int]]):
    """Batches of neighbours in length."""

    def __init__(self, lengths: list[int], size: int) -> None:
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        self.batches = [order[begin : begin + size] for begin in range(0, len(order), size)]

    def __iter__(self) -> Iterator[list[int]]:
        yield from self.batches

    def __len__(self) -> int:
        return len(self.batches)


def batches_padded_to_their_own_longest(device: str) -> Any:
    rows = [torch.arange(1, length + 1) for length in (5, 2, 7, 3, 6, 1)]

    def collate(batch: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        ids = nn.utils.rnn.pad_sequence(batch, batch_first=True)
        return ids, ids.ne(0)

    loader = DataLoader(rows, batch_sampler=_ByLength([len(row) for row in rows], 2), collate_fn=collate)  # type: ignore[arg-type]
    table, made = nn.Embedding(8, 4, padding_idx=0, device=device), []
    for ids, mask in loader:
        ids = ids.to(device)  # waits
        mask = mask.to(device, non_blocking=True)  # waits
        made.append((table(ids) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))
    return torch.cat(made)


def batches_padded_in_pinned_buffers(device: str) -> Any:
    rows = [torch.arange(1, length + 1) for length in (3, 2, 4)]
    buffer = torch.zeros(3, 8, dtype=torch.long, pin_memory=device == "cuda")
    table = nn.Embedding(8, 4, device=device)
    for row, ids in enumerate(rows):
        buffer[row, : len(ids)] = ids
    longest = max(len(row) for row in rows)
    ids = buffer.to(device, non_blocking=True)[:, :longest]
    mask = ids > 0
    return (table(ids) * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)


def workers_that_prepare_batches(device: str) -> Any:
    data = TensorDataset(torch.arange(24.0).view(12, 2), torch.arange(12) % 3)
    draws = RandomSampler(data, replacement=True, num_samples=8, generator=torch.Generator().manual_seed(3))
    loader = DataLoader(data, batch_sampler=BatchSampler(draws, 4, drop_last=True), num_workers=1, prefetch_factor=2)
    centres = torch.zeros(3, 2, device=device)
    for x, y in loader:
        x, y = (part.to(device) for part in (x, y))  # waits
        centres.index_add_(0, y, x)
    return centres


def rows_drawn_with_replacement_on_the_device(device: str) -> Any:
    labels = torch.randint(0, 3, (30,), device=device)
    counts = torch.zeros(3, device=device).scatter_add_(0, labels, torch.ones(30, device=device))
    weights = 1.0 / counts.clamp(min=1)[labels]
    rows = torch.multinomial(weights, 12, replacement=True)
    drawn = labels[rows]
    return (drawn[:, None] == torch.arange(3, device=device)).sum(0).sum()


def mean_teacher(device: str) -> Any:
    made = [nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)) for _ in range(2)]
    student, teacher = (model.to(device) for model in made)  # waits
    teacher.load_state_dict(student.state_dict())
    teacher.requires_grad_(False)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    for step in range(3):
        x, y = torch.randn(8, 4, device=device), torch.randint(0, 3, (8,), device=device)
        labelled = torch.rand(8, device=device) < 0.5
        guess = student(x + 0.1 * torch.randn_like(x))
        with torch.no_grad():
            goal = teacher(x).softmax(-1)
        supervised = (F.cross_entropy(guess, y, reduction="none") * labelled).sum() / labelled.sum().clamp(min=1)
        ramp = math.exp(-5 * (1 - step / 3) ** 2)
        loss = supervised + ramp * F.mse_loss(guess.softmax(-1), goal)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        share = min(0.99, 1 - 1 / (step + 2))
        with torch.no_grad():
            torch._foreach_lerp_(list(teacher.parameters()), list(student.parameters()), 1 - share)
    return teacher[0].weight


def pseudo_labels_above_a_threshold(device: str) -> Any:
    model, x = nn.Linear(4, 3, device=device), torch.randn(12, 4, device=device) * 4
    with torch.no_grad():
        sure, label = model(x).softmax(-1).max(-1)
    keep = sure > 0.5
    if keep.sum() == 0:  # waits
        return None
    loss = F.cross_entropy(model(x[keep]), label[keep])  # waits
    loss.backward()
    return model.weight.grad


def batch_chosen_by_its_loss(device: str) -> Any:
    model, x = nn.Linear(4, 2, device=device), torch.randn(16, 4, device=device)
    y = torch.randint(0, 2, (16,), device=device)
    with torch.no_grad():
        each = F.cross_entropy(model(x), y, reduction="none")
    hard = each.topk(4).indices
    F.cross_entropy(model(x[hard]), y[hard]).backward()
    return model.weight.grad


def replicas_of_one_process(device: str) -> Any:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Sequential(nn.Linear(4, 8, device=device), nn.ReLU(), nn.Linear(8, 2, device=device))
        replica = DistributedDataParallel(model)  # waits
        optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
        for step in range(4):
            context = replica.no_sync() if step % 2 == 0 else contextlib.nullcontext()
            with context:
                out = replica(torch.ones(3, 4, device=device))  # waits
                out.square().mean().backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
        total = torch.ones(2, device=device)
        dist.all_reduce(total, op=dist.ReduceOp.AVG if device == "cuda" else dist.ReduceOp.SUM)
        return model[0].weight, total
    finally:
        dist.destroy_process_group()


def profile_of_some_steps(device: str) -> Any:
    from torch.profiler import ProfilerActivity, profile, record_function, schedule

    layer, kept = nn.Linear(4, 4, device=device), []
    plan = schedule(wait=1, warmup=1, active=1, repeat=1)
    with profile(activities=[ProfilerActivity.CPU], schedule=plan, on_trace_ready=lambda p: kept.append(p)) as watched:
        for _ in range(4):
            with record_function("forward"):
                loss = layer(torch.ones(2, 4, device=device)).sum()
            with record_function("backward"):
                loss.backward()
            watched.step()
    return len(kept), layer.weight.grad


def seconds_measured_around_steps(device: str) -> Any:
    layer, x, passed = nn.Linear(4, 4, device=device), torch.ones(2, 4, device=device), 0
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2)) if device == "cuda" else (None, None)
    for _ in range(3):
        if begin is not None:
            begin.record()
        x = layer(x)
        if end is not None:
            end.record()
            end.synchronize()  # waits
            passed += begin.elapsed_time(end) >= 0  # type: ignore[union-attr]
    return x


def seeds_set_for_everything(device: str) -> Any:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    dice = torch.Generator(device=device)
    dice.manual_seed(1)
    first = torch.randn(3, device=device, generator=dice)
    state = dice.get_state()
    second = torch.randn(3, device=device, generator=dice)
    dice.set_state(state)
    assert torch.equal(second, torch.randn(3, device=device, generator=dice))  # waits
    return first, second
