"""Training as people write it: schedules, mixed precision, clipping, averages, checkpoints, loaders, compilers, hooks."""
# ruff: noqa: ARG001, E501, SLF001 - tables of calls, as their users write them

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import io
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler, random_split


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


def checkpointed_blocks(device):
    blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3), nn.Tanh()) for _ in range(3)]).to(device)
    x = torch.randn(5, 4).to(device).requires_grad_()
    out = x
    for number, block in enumerate(blocks):
        out = checkpoint(block, out, use_reentrant=number == 1)
    out.sum().backward()
    return out, x.grad, [p.grad for p in blocks.parameters()]


def checkpoint_in_a_row(device):
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]).to(device)
    x = torch.randn(2, 4).to(device).requires_grad_()
    checkpoint_sequential(model, 2, x, use_reentrant=False).sum().backward()
    return x.grad


def checkpoint_chosen_operations(device):
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def policy(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

    weight = torch.randn(4, 4).to(device).requires_grad_()
    x = torch.randn(3, 4).to(device)
    context = functools.partial(create_selective_checkpoint_contexts, policy)
    out = checkpoint(lambda t: torch.sin(t @ weight) @ weight, x, use_reentrant=False, context_fn=context)
    out.sum().backward()
    return weight.grad


def saved_tensors_elsewhere(device):
    x = torch.randn(4, 4).to(device).requires_grad_()
    with torch.autograd.graph.save_on_cpu():
        y = (x @ x).sin().sum()
    y.backward()
    first = x.grad.clone()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().cpu(), lambda t: t.to(device)):
        z = (x * x).exp().sum()
    z.backward()
    return first, x.grad


def save_and_resume(device):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "last.pt"
        model = _net().to(device)
        optimizer = torch.optim.AdamW(model.parameters())
        _steps(device, model, optimizer, 2)
        torch.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}, path
        )
        expected = _steps(device, model, optimizer, 2)
        fresh = _net().to(device)
        again = torch.optim.AdamW(fresh.parameters())
        state = torch.load(path, map_location=device, weights_only=True)
        fresh.load_state_dict(state["model"])
        again.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"].cpu())
        return expected, _steps(device, fresh, again, 2)


def save_by_safetensors(device):
    from safetensors.torch import load_file, save_file, save_model

    model = _net().to(device)
    with tempfile.TemporaryDirectory() as folder:
        save_file(model.state_dict(), f"{folder}/a.safetensors")
        save_model(model, f"{folder}/b.safetensors")
        loaded = load_file(f"{folder}/a.safetensors", device=device)
        return loaded, load_file(f"{folder}/b.safetensors")


def distributed_checkpoint(device):
    import torch.distributed.checkpoint as dcp

    model = _net().to(device)
    with tempfile.TemporaryDirectory() as folder:
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
        state = {"model": {key: torch.zeros_like(value) for key, value in model.state_dict().items()}}
        dcp.load(state, checkpoint_id=folder)
        return state


def save_whole_module(device):
    model = _net().to(device)
    with tempfile.TemporaryDirectory() as folder:
        torch.save(model, f"{folder}/m.pt")
        return torch.load(f"{folder}/m.pt", weights_only=False)(_batch(device)[0]).shape


def deep_copies(device):
    model = _net().to(device)
    twin = copy.deepcopy(model)
    x, y = _batch(device)
    F.cross_entropy(model(x), y).backward()
    with_grads = copy.deepcopy(model)
    return list(twin.parameters()), [p.grad for p in with_grads.parameters()], copy.copy(x)


def load_with_assign(device):
    with torch.device("meta"):
        model = _net()
    state = {key: value.to(device) for key, value in _net().state_dict().items()}
    model.load_state_dict(state, assign=True)
    return model(_batch(device)[0])


def made_on_the_device(device):
    with torch.device(device):
        model = _net()
        x = torch.rand(3, 4)
    torch.set_default_device(device)
    y = torch.ones(3)
    torch.set_default_device(None)
    return model(x), y, str(y.device.type), next(model.parameters()).device.type


class _Squares(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return {"x": torch.full((4,), float(index)), "y": index % 3, "name": f"row{index}"}


class _Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(10.0).split(3))


def loader_with_workers(device):
    loader = DataLoader(_Squares(), batch_size=4, num_workers=2, pin_memory=device != "cpu", persistent_workers=True)
    found = []
    for _ in range(2):
        for batch in loader:
            found.append((batch["x"].to(device, non_blocking=True).sum(), batch["y"].to(device), batch["name"]))
    return found


def loader_that_collates_itself(device):
    def collate(rows):
        return nn.utils.rnn.pad_sequence([torch.arange(int(row["x"][0]) % 4 + 1) for row in rows], batch_first=True)

    loader = DataLoader(_Squares(), batch_size=3, collate_fn=collate, num_workers=1, prefetch_factor=2)
    return [batch.to(device) for batch in loader]


def loader_of_a_stream(device):
    return [batch.to(device) for batch in DataLoader(_Stream(), batch_size=None, pin_memory=device != "cpu")]


def loader_with_samplers(device):
    data = TensorDataset(torch.randn(10, 4), torch.arange(10))
    train, rest = random_split(data, [7, 3])
    sampler = WeightedRandomSampler([0.1] * 7, 6)
    return [[part.to(device) for part in batch] for batch in DataLoader(train, 2, sampler=sampler)], len(rest)


def loader_prefetched_on_a_stream(device):
    loader = DataLoader(TensorDataset(torch.randn(8, 4)), 2, pin_memory=device != "cpu")
    side = torch.cuda.Stream() if device == "cuda" else None
    total = torch.zeros(4, device=device)
    for (x,) in loader:
        with torch.cuda.stream(side) if side is not None else contextlib.nullcontext():
            there = x.to(device, non_blocking=True)
        if side is not None:
            torch.cuda.current_stream().wait_stream(side)
            there.record_stream(torch.cuda.current_stream())
        total += there.sum(0)
    return total


def dataset_on_the_device(device):
    data = TensorDataset(torch.randn(8, 4).to(device), torch.arange(8, device=device))
    return list(DataLoader(data, batch_size=3, shuffle=True))


def compiled_model(device):
    model = torch.compile(_net().to(device), backend="eager")
    return _steps(device, model, torch.optim.SGD(model.parameters(), lr=0.1), 2)


def compiled_by_aot(device):
    model = torch.compile(_net().eval().to(device), backend="aot_eager")
    x, y = _batch(device)
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss


def compiled_function_fullgraph(device):
    @torch.compile(backend="eager", fullgraph=True, dynamic=True)
    def gelu(x, y):
        return F.gelu(x) * y.sum(-1, keepdim=True)

    return [gelu(torch.randn(n, 3).to(device), torch.randn(n, 3).to(device)) for n in (2, 3)]


def compiled_module_in_place(device):
    model = _net().to(device)
    model.compile(backend="eager")
    return model.eval()(_batch(device)[0])


def compiled_optimizer(device):
    model = _net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = torch.compile(optimizer.step, backend="eager")
    x, y = _batch(device)
    F.cross_entropy(model(x), y).backward()
    step()
    return list(model.parameters())


def compiler_controls(device):
    @torch.compiler.disable
    def outside(x):
        return x + x.sum().item()

    @torch.compile(backend="eager")
    def f(x):
        return outside(x.sin()) if not torch.compiler.is_compiling() else x

    torch._dynamo.reset()
    return f(torch.ones(3).to(device)).shape


def scripted(device):
    @torch.jit.script
    def scaled(x: torch.Tensor, times: int) -> torch.Tensor:
        for _ in range(times):
            x = x * 2
        return x

    traced = torch.jit.trace(_net().eval().to(device), _batch(device)[0])
    return scaled(torch.ones(3).to(device), 2), traced(_batch(device)[0])


def exported(device):
    model = _net().eval().to(device)
    x, _ = _batch(device)
    program = torch.export.export(model, (x,))
    return program.module()(x)


def traced_by_fx(device):
    import torch.fx

    model = torch.fx.symbolic_trace(_net().eval()).to(device)
    for node in model.graph.nodes:
        if node.op == "call_module" and node.target == "1":
            node.target = "1"
    model.recompile()
    fused = torch.fx.experimental.optimization.fuse if hasattr(torch.fx.experimental, "optimization") else None
    return model(_batch(device)[0]), fused is None


def hooks_of_modules(device):
    model, seen = _net().to(device), []
    handles = [
        model[0].register_forward_hook(lambda m, i, o: seen.append(o.detach().mean())),
        model[0].register_forward_pre_hook(lambda m, i: (i[0] * 2,)),
        model[1].register_full_backward_hook(lambda m, gi, go: seen.append(go[0].norm())),
        model[4].register_full_backward_pre_hook(lambda m, go: (go[0] * 0.5,)),
        model[4].register_state_dict_post_hook(lambda *a: None),
    ]
    x, y = _batch(device)
    F.cross_entropy(model(x), y).backward()
    for handle in handles:
        handle.remove()
    return seen, [p.grad for p in model.parameters()]


def hooks_of_tensors(device):
    x = torch.randn(3).to(device).requires_grad_()
    seen = []
    y = x * 2
    y.retain_grad()
    y.register_hook(lambda g: g * 3)
    x.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    (y * y).sum().backward()
    return x.grad, y.grad, seen


def optimizer_in_the_backward_pass(device):
    model = _net().to(device)
    own = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(p):
        own[p].step()
        own[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    x, y = _batch(device)
    F.cross_entropy(model(x), y).backward()
    return list(model.parameters())


def hooks_of_optimizers(device):
    model, seen = _net().to(device), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda o, a, k: seen.append(1))
    optimizer.register_step_post_hook(lambda o, a, k: seen.append(2))
    return _steps(device, model, optimizer, 2), seen


def graph_of_gradients(device):
    x = torch.randn(3).to(device).requires_grad_()
    y = (x**3).sum()
    (first,) = torch.autograd.grad(y, x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    second.square().sum().backward()
    return first, second, x.grad


def gradient_penalty(device):
    critic = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1)).to(device)
    real, fake = torch.randn(5, 4).to(device), torch.randn(5, 4).to(device)
    mix = torch.rand(5, 1).to(device)
    between = (mix * real + (1 - mix) * fake).requires_grad_()
    (grads,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    penalty = ((grads.norm(2, dim=1) - 1) ** 2).mean()
    penalty.backward()
    return penalty, [p.grad for p in critic.parameters()]


def checked_gradients(device):
    x = torch.randn(2, 3, dtype=torch.float64).to(device).requires_grad_()
    with torch.autograd.detect_anomaly():
        return torch.autograd.gradcheck(lambda t: torch.tanh(t).sum(1), (x,))


def anomaly_that_raises(device):
    x = torch.zeros(2).to(device).requires_grad_()
    with torch.autograd.detect_anomaly():
        (x.sqrt() * 0).sum().backward()


def custom_function(device):
    class Clamped(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, low):
            ctx.save_for_backward(x)
            ctx.low = low
            ctx.mark_non_differentiable(x > 0)
            return x.clamp(min=low)

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad * (x > ctx.low), None

    x = torch.randn(6).to(device).requires_grad_()
    Clamped.apply(x, 0.1).sum().backward()
    return x.grad


def custom_function_with_setup(device):
    class Cube(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            return x**3

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)
            ctx.save_for_forward(*inputs)

        @staticmethod
        def backward(ctx, grad):
            return 3 * ctx.saved_tensors[0] ** 2 * grad

        @staticmethod
        def jvp(ctx, tangent):
            return 3 * ctx.saved_tensors[0] ** 2 * tangent

    x = torch.randn(4).to(device)
    grad = torch.func.grad(lambda t: Cube.apply(t).sum())(x)
    return grad, torch.func.vmap(Cube.apply)(x), torch.func.jvp(Cube.apply, (x,), (torch.ones_like(x),))


def in_place_function(device):
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.mark_dirty(x)
            return x.mul_(2)

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    x = torch.ones(3).to(device).requires_grad_()
    Doubled.apply(x * 1).sum().backward()
    return x.grad


def straight_through(device):
    x = torch.randn(5).to(device).requires_grad_()
    hard = (x > 0).float() + x - x.detach()
    (hard * torch.arange(5.0, device=device)).sum().backward()
    return x.grad


def backward_twice_raises(device):
    x = torch.ones(2).to(device).requires_grad_()
    y = (x * x).sum()
    y.backward()
    y.backward()


def in_place_on_a_leaf_raises(device):
    x = torch.ones(2).to(device).requires_grad_()
    x += 1


def version_counter_raises(device):
    x = torch.ones(2).to(device).requires_grad_()
    y = x.exp()
    y.mul_(2)
    y.sum().backward()


def shapes_that_do_not_fit_raise(device):
    return torch.ones(2, 3).to(device) @ torch.ones(2, 3).to(device)


def index_out_of_range_raises(device):
    return torch.ones(3).to(device)[5]


def dtype_that_does_not_fit_raises(device):
    return torch.ones(2, 2).to(device) @ torch.ones(2, 2, dtype=torch.float64).to(device)


def missing_keys_raise(device):
    _net().to(device).load_state_dict({"0.weight": torch.ones(6, 4)})


def gradients_with_respect_to_inputs(device):
    model = _net().eval().to(device)
    x = torch.randn(2, 4).to(device).requires_grad_()
    model(x).logsumexp(1).sum().backward(inputs=[x])
    return x.grad, [p.grad is None for p in model.parameters()]


def adversarial_steps(device):
    model = _net().eval().to(device)
    x, y = _batch(device)
    delta = torch.zeros_like(x).uniform_(-0.1, 0.1).requires_grad_()
    for _ in range(3):
        F.cross_entropy(model(x + delta), y).backward()
        with torch.no_grad():
            delta.add_(0.02 * delta.grad.sign()).clamp_(-0.1, 0.1)
        delta.grad.zero_()
    return delta


def parts_frozen_and_groups(device):
    model = _net().to(device)
    for p in model[0].parameters():
        p.requires_grad = False
    decayed = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    rest = [p for p in model.parameters() if p.requires_grad and p.ndim <= 1]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}])
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, device=device))], "lr": 0.1})
    return _steps(device, model, optimizer)


def tied_weights(device):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
            self.head.weight = self.table.weight

        def forward(self, ids):
            return self.head(self.table(ids))

    model = Tied().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.tensor([1, 2, 3], device=device)
    F.cross_entropy(model(ids), ids).backward()
    optimizer.step()
    return model.head.weight is model.table.weight, model.table.weight, sorted(model.state_dict())


def half_precision_model(device):
    model = _net().to(device).bfloat16()
    x = torch.randn(3, 4).to(device, torch.bfloat16)
    model(x).float().sum().backward()
    return [p.grad.dtype for p in model.parameters()], model.eval()(x).shape


def to_and_fro(device):
    model = _net()
    x = torch.randn(2, 4)
    out = [model.eval()(x)]
    for where in (device, "cpu", device):
        model.to(where)
        out.append(model(x.to(where)))
    model.double().to(device=device, dtype=torch.float32, non_blocking=True)
    return out, model.to(torch.device(device))(x.to(device))


def parametrised(device):
    from torch.nn.utils import parametrizations, parametrize

    layers = [
        parametrizations.weight_norm(nn.Linear(4, 4)),
        parametrizations.spectral_norm(nn.Linear(4, 4)),
        parametrizations.orthogonal(nn.Linear(4, 4)),
        nn.utils.weight_norm(nn.Linear(4, 4)),
        nn.utils.spectral_norm(nn.Linear(4, 4)),
    ]
    model = nn.Sequential(*layers).to(device)
    found = _steps(
        device, nn.Sequential(model, nn.Linear(4, 3).to(device)), torch.optim.SGD(model.parameters(), lr=0.1), 2
    )
    parametrize.remove_parametrizations(layers[0], "weight")
    return found, layers[0].weight


def pruned(device):
    from torch.nn.utils import prune

    model = _net().to(device)
    prune.random_unstructured(model[0], "weight", 0.3)
    prune.ln_structured(model[4], "weight", 0.3, n=2, dim=0)
    prune.global_unstructured([(model[0], "weight"), (model[4], "weight")], prune.L1Unstructured, amount=2)
    out = _steps(device, model, torch.optim.SGD(model.parameters(), lr=0.1), 1)
    prune.remove(model[0], "weight")
    return out, model.state_dict()


def initialised(device):
    made = []
    for name in (
        "uniform_", "normal_", "trunc_normal_", "xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "kaiming_normal_",
        "orthogonal_", "zeros_", "ones_", "eye_",
    ):  # fmt: skip
        made.append(getattr(nn.init, name)(torch.empty(4, 4, device=device)))
    made.append(nn.init.sparse_(torch.empty(4, 4, device=device), 0.3))
    made.append(nn.init.dirac_(torch.empty(3, 3, 3, device=device)))
    model = _net().to(device)
    model.apply(lambda m: nn.init.xavier_uniform_(m.weight) if isinstance(m, nn.Linear) else None)
    return made, list(model.parameters())


def early_stopping(device):
    model = _net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    best, patience, kept = float("inf"), 0, None
    for _ in range(6):
        (loss, *_), _ = _steps(device, model, optimizer, 1)
        if loss < best - 1e-3:
            best, patience, kept = loss, 0, copy.deepcopy(model.state_dict())
        else:
            patience += 1
        if patience > 1:
            break
    return best, kept


def distillation(device):
    teacher, student = _net(8).to(device).eval(), _net(3).to(device)
    optimizer = torch.optim.Adam(student.parameters())
    for _ in range(2):
        x, y = _batch(device)
        with torch.no_grad():
            soft = teacher(x)
        out = student(x)
        loss = F.kl_div(F.log_softmax(out / 2, 1), F.softmax(soft / 2, 1), reduction="batchmean") * 4
        loss = 0.5 * loss + 0.5 * F.cross_entropy(out, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss


def contrastive(device):
    encoder = nn.Linear(4, 3).to(device)
    a, b = (F.normalize(encoder(torch.randn(5, 4).to(device)), dim=-1) for _ in range(2))
    scale = nn.Parameter(torch.tensor(2.6, device=device))
    logits = scale.exp().clamp(max=100) * a @ b.t()
    labels = torch.arange(5, device=device)
    loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2
    loss.backward()
    return loss, scale.grad


def gan_steps(device):
    make, judge = nn.Linear(2, 4).to(device), nn.Linear(4, 1).to(device)
    first, second = (torch.optim.Adam(m.parameters(), betas=(0.5, 0.999)) for m in (make, judge))
    for _ in range(2):
        fake, real = make(torch.randn(3, 2, device=device)), torch.randn(3, 4, device=device)
        one, zero = torch.ones(3, 1, device=device), torch.zeros(3, 1, device=device)
        loss = F.binary_cross_entropy_with_logits(judge(real), one)
        loss = loss + F.binary_cross_entropy_with_logits(judge(fake.detach()), zero)
        second.zero_grad()
        loss.backward()
        second.step()
        first.zero_grad()
        F.binary_cross_entropy_with_logits(judge(fake), one).backward()
        first.step()
    return loss, list(make.parameters())


def vae_step(device):
    down, up = nn.Linear(6, 4).to(device), nn.Linear(2, 6).to(device)
    x = torch.rand(5, 6).to(device)
    mean, log = down(x).chunk(2, -1)
    z = mean + torch.randn_like(mean) * (0.5 * log).exp()
    loss = F.binary_cross_entropy(up(z).sigmoid(), x, reduction="sum")
    loss = loss - 0.5 * (1 + log - mean**2 - log.exp()).sum()
    loss.backward()
    return loss, down.weight.grad


def vector_quantised(device):
    codes = nn.Embedding(5, 3).to(device)
    z = torch.randn(4, 3).to(device).requires_grad_()
    index = torch.cdist(z, codes.weight).argmin(1)
    q = codes(index)
    loss = F.mse_loss(q.detach(), z) + F.mse_loss(q, z.detach())
    (z + (q - z).detach()).sum().backward(retain_graph=True)
    loss.backward()
    used = torch.unique(index).numel()
    counts = torch.bincount(index, minlength=5)
    return loss, used, counts, z.grad


def diffusion_steps(device):
    net = nn.Linear(5, 4).to(device)
    betas = torch.linspace(1e-4, 0.02, 20, device=device)
    kept = (1 - betas).cumprod(0)
    x = torch.randn(6, 4, device=device)
    t = torch.randint(0, 20, (6,), device=device)
    noise = torch.randn_like(x)
    noisy = kept[t].sqrt()[:, None] * x + (1 - kept[t]).sqrt()[:, None] * noise
    loss = F.mse_loss(net(torch.cat([noisy, t[:, None] / 20], 1)), noise)
    loss.backward()
    with torch.no_grad():
        x = torch.randn(2, 4, device=device)
        for i in reversed(range(20)):
            e = net(torch.cat([x, torch.full((2, 1), i / 20, device=device)], 1))
            x = (x - betas[i] / (1 - kept[i]).sqrt() * e) / (1 - betas[i]).sqrt()
            if i > 0:
                x = x + betas[i].sqrt() * torch.randn_like(x)
    return loss, x


def policy_gradient(device):
    policy = nn.Linear(4, 2).to(device)
    optimizer = torch.optim.Adam(policy.parameters())
    kept, rewards = [], []
    state = torch.randn(4)
    for step in range(5):
        chances = torch.distributions.Categorical(logits=policy(state.to(device)))
        action = chances.sample()
        kept.append(chances.log_prob(action))
        rewards.append(float(action.item() == step % 2))
        state = torch.randn(4)
    returns = torch.tensor(rewards).flip(0).cumsum(0).flip(0).to(device)
    returns = (returns - returns.mean()) / (returns.std() + 1e-6)
    loss = -(torch.stack(kept) * returns).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss, rewards


def q_learning(device):
    online, target = nn.Linear(4, 3).to(device), nn.Linear(4, 3).to(device)
    target.load_state_dict(online.state_dict())
    state, then = torch.randn(6, 4, device=device), torch.randn(6, 4, device=device)
    action, done = torch.randint(0, 3, (6, 1), device=device), torch.tensor([0, 1, 0, 0, 1, 0], device=device)
    values = online(state).gather(1, action).squeeze(1)
    with torch.no_grad():
        best = torch.zeros(6, device=device)
        alive = done == 0
        best[alive] = target(then[alive]).max(1).values
    F.smooth_l1_loss(values, 0.9 * best + 1).backward()
    for p, q in zip(target.parameters(), online.parameters()):
        p.data.mul_(0.99).add_(q.data, alpha=0.01)
    return online.weight.grad, list(target.parameters())


def preferences(device):
    policy, frozen = nn.Embedding(8, 8).to(device), nn.Embedding(8, 8).to(device).requires_grad_(False)

    def chance(model, ids):
        logits = model(ids[:, :-1]).log_softmax(-1)
        kept = logits.gather(-1, ids[:, 1:, None]).squeeze(-1)
        mask = ids[:, 1:] != 0
        return (kept * mask).sum(-1)

    good, bad = torch.randint(0, 8, (3, 5)).to(device), torch.randint(0, 8, (3, 5)).to(device)
    ratio = (chance(policy, good) - chance(frozen, good)) - (chance(policy, bad) - chance(frozen, bad))
    loss = -F.logsigmoid(0.1 * ratio).mean()
    loss.backward()
    return loss, (ratio > 0).float().mean().item(), policy.weight.grad


def group_relative_policy(device):
    policy = nn.Linear(4, 6).to(device)
    x = torch.randn(8, 4).to(device)
    rewards = torch.rand(8).to(device).view(2, 4)
    advantage = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).view(-1)
    taken = torch.randint(0, 6, (8, 1)).to(device)
    old = policy(x).log_softmax(-1).gather(1, taken).squeeze(1).detach() + 0.01
    new = policy(x).log_softmax(-1).gather(1, taken).squeeze(1)
    ratio = torch.exp(new - old)
    loss = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    loss.backward()
    clipped = ((ratio < 0.8) | (ratio > 1.2)).float().mean()
    return {"loss": loss.item(), "clipped": clipped.item(), "kl": (new - old).mean().item()}, policy.weight.grad


def checkpoint_bytes(device):
    buffer = io.BytesIO()
    torch.save(_net().to(device).state_dict(), buffer)
    buffer.seek(0)
    return torch.load(buffer, map_location=torch.device("cpu"), weights_only=True)
