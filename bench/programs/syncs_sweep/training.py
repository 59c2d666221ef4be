"""Training as people write it: optimizers, schedules, averages, mixed precision, clipping."""

from __future__ import annotations

import copy
import functools
import inspect

import torch
import torch.nn.functional as F
from torch import nn


def _net(width=6):
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Dropout(0.2), nn.LayerNorm(width), nn.Linear(width, 3))


def _batch(device, rows=8):
    return torch.randn(rows, 4).to(device), torch.randint(0, 3, (rows,)).to(device)


def _steps(device, model, optimizer, steps=3, after=lambda: None):
    losses = []
    for _ in range(steps):
        x, y = _batch(device)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        after()
        losses.append(loss.item())
    return losses, [p.detach() for p in model.parameters()]


_FLAGS = {
    "plain": {},
    "foreach": {"foreach": True},
    "single": {"foreach": False},
    "fused": {"fused": True},
    "capturable": {"capturable": True},
    "maximize": {"maximize": True},
    "decay": {"weight_decay": 0.01},
    "differentiable": {"differentiable": True},
    "amsgrad": {"amsgrad": True},
    "momentum": {"momentum": 0.9},
    "centered": {"centered": True},
    "tensor_lr": {"lr": "tensor"},
}


def each_optimizer():
    for name, kind in vars(torch.optim).items():
        if not inspect.isclass(kind) or kind is torch.optim.Optimizer or not issubclass(kind, torch.optim.Optimizer):
            continue
        if name in ("SparseAdam", "LBFGS"):
            continue
        taken = inspect.signature(kind).parameters
        for label, options in _FLAGS.items():
            if set(options) <= set(taken):
                yield f"{name}-{label}", functools.partial(_optimized, kind, options)


def _optimized(kind, options, device):
    options = dict(options)
    if device == "cpu":  # what only a card takes
        options.pop("capturable", None)
    if options.get("lr") == "tensor":
        options["lr"] = torch.tensor(0.01)
        options["foreach"] = False
    model = _net().to(device)
    weights = [p for p in model.parameters() if p.ndim == 2] if kind.__name__ == "Muon" else model.parameters()
    optimizer = kind(weights, **options)
    if options.get("differentiable"):
        for p in model.parameters():
            p.requires_grad_(True)
        x, y = _batch(device)
        F.cross_entropy(model(x), y).backward()
        for p in model.parameters():
            p.requires_grad_(False)
        optimizer.step()
        return [p.detach() for p in model.parameters()]
    found = _steps(device, model, optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(state)
    return found, _steps(device, model, optimizer, 1)


def lbfgs(device):
    model = _net().to(device)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=5, line_search_fn="strong_wolfe")
    x, y = _batch(device)

    def closure():
        optimizer.zero_grad()
        torch.manual_seed(1)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return [optimizer.step(closure) for _ in range(2)]


def sparse_adam(device):
    table = nn.Embedding(10, 4, sparse=True).to(device)
    optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        table(torch.tensor([1, 3, 3], device=device)).square().sum().backward()
        optimizer.step()
    return table.weight


_SCHEDULES = {
    "StepLR": {"step_size": 1},
    "MultiStepLR": {"milestones": [1, 2]},
    "LambdaLR": {"lr_lambda": lambda step: 0.9**step},
    "MultiplicativeLR": {"lr_lambda": lambda step: 0.9},
    "ConstantLR": {},
    "LinearLR": {},
    "ExponentialLR": {"gamma": 0.9},
    "PolynomialLR": {"total_iters": 3},
    "CosineAnnealingLR": {"T_max": 3},
    "CosineAnnealingWarmRestarts": {"T_0": 2},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.1},
    "OneCycleLR": {"max_lr": 0.1, "total_steps": 6},
    "ReduceLROnPlateau": {},
}


def each_schedule():
    for name, options in _SCHEDULES.items():
        for tensor in (False, True):
            yield f"{name}{'-tensor' if tensor else ''}", functools.partial(_scheduled, name, options, tensor)


def _scheduled(name, options, tensor, device):
    model = _net().to(device)
    lr = torch.tensor(0.05, device=device) if tensor else 0.05
    kind = torch.optim.AdamW if tensor else torch.optim.SGD
    more = {"fused": True} if tensor else {"momentum": 0.9}
    optimizer = kind(model.parameters(), lr=lr, **more)
    schedule = getattr(torch.optim.lr_scheduler, name)(optimizer, **options)
    rates = []
    for _ in range(4):
        x, y = _batch(device)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step(loss) if name == "ReduceLROnPlateau" else schedule.step()
        rates.append(float(optimizer.param_groups[0]["lr"]))
    state = schedule.state_dict()
    schedule.load_state_dict(state)
    return rates


def warm_up_then_cosine(device):
    model = _net().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    parts = [
        torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2),
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3),
    ]
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])
    return _steps(device, model, optimizer, 5, schedule.step), schedule.get_last_lr()


def chained_schedules(device):
    model = _net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ChainedScheduler(
        [torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, 2), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]
    )
    return _steps(device, model, optimizer, 4, schedule.step)


def swa(device):
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    schedule = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    data = [_batch(device)[0] for _ in range(3)]

    def after():
        average.update_parameters(model)
        schedule.step()

    found = _steps(device, model, optimizer, 3, after)
    torch.optim.swa_utils.update_bn(data, average, device=torch.device(device))
    return found, average.state_dict()


def ema_by_hand(device):
    model = _net().to(device)
    shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.Adam(model.parameters())

    def after():
        with torch.no_grad():
            for name, p in model.named_parameters():
                shadow[name].lerp_(p, 0.1)

    _steps(device, model, optimizer, 3, after)
    backup = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        p.data.copy_(shadow[name])
    score = model.eval()(_batch(device)[0])
    for name, p in model.named_parameters():
        p.data = backup[name]
    return score, model(_batch(device)[0])


def ema_foreach(device):
    model = _net().to(device)
    shadow = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    return (
        _steps(
            device, model, optimizer, 3,
            lambda: torch._foreach_lerp_(list(shadow.parameters()), [p.detach() for p in model.parameters()], 0.05),
        ),
        list(shadow.parameters()),
    )  # fmt: skip


def mixed_precision_with_a_scaler(device):
    model = _net().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**8, growth_interval=2)
    losses = []
    for _ in range(4):
        x, y = _batch(device)
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        losses.append(round(float(loss), 1))
    return losses, scaler.get_scale(), bool(torch.isfinite(norm)), scaler.state_dict()["growth_interval"]


def scaler_that_meets_infinities(device):
    model = nn.Linear(2, 2).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device, init_scale=64.0)
    before = model.weight.detach().clone()
    scaler.scale((model(torch.ones(1, 2, device=device)) * float("inf")).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return torch.equal(before, model.weight), scaler.get_scale()


def old_names_of_autocast(device):
    model = _net().to(device)
    if device == "cpu":
        with torch.amp.autocast("cpu", dtype=torch.bfloat16):
            out = model(_batch(device)[0])
        return str(out.dtype)
    with torch.cuda.amp.autocast(dtype=torch.bfloat16):
        out = model(_batch(device)[0])
    scaler = torch.cuda.amp.GradScaler()
    scaler.scale(out.sum()).backward()
    return str(out.dtype)


def autocast_as_a_decorator(device):
    model = _net().to(device)

    @torch.autocast(device, dtype=torch.bfloat16)
    def forward(x):
        with torch.autocast(device, enabled=False):
            exact = x.float().square().mean()
        return model(x), exact

    out, exact = forward(_batch(device)[0])
    return str(out.dtype), exact


def custom_function_under_autocast(device):
    class Squared(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type=device, cast_inputs=torch.float32)
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        @torch.amp.custom_bwd(device_type=device)
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return 2 * x * grad

    layer = nn.Linear(4, 4).to(device)
    x = torch.ones(2, 4, device=device, requires_grad=True)
    with torch.autocast(device, dtype=torch.bfloat16):
        out = Squared.apply(layer(x))
    out.sum().backward()
    return str(out.dtype), x.grad.shape


def clip_norms(device):
    model = _net().to(device)
    x, y = _batch(device)
    F.cross_entropy(model(x), y).backward()
    norms = [nn.utils.clip_grad_norm_(model.parameters(), 0.1, kind) for kind in (1.0, 2.0, float("inf"))]
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    flat = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(flat * 2, model.parameters())
    return norms, [p.grad for p in model.parameters()], list(model.parameters())


def clip_by_hand(device):
    model = _net().to(device)
    x, y = _batch(device)
    F.cross_entropy(model(x), y).backward()
    norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in model.parameters()]))
    scale = torch.clamp(0.1 / (norm + 1e-6), max=1.0)
    torch._foreach_mul_([p.grad for p in model.parameters()], scale)
    return norm, [p.grad for p in model.parameters()]


def accumulate_and_log(device):
    model = _net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    total, logged = torch.zeros((), device=device), []
    for step in range(6):
        x, y = _batch(device)
        loss = F.cross_entropy(model(x), y) / 2
        loss.backward()
        total += loss.detach()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
        if step % 3 == 2:
            logged.append(f"{total.item() / 3:.2f}")
            total.zero_()
    return logged
