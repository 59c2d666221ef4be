"""Training as people write it: checkpoints, loaders, compilers, hooks."""
# ruff: noqa: ARG001, SLF001 - tables of calls, as their users write them

from __future__ import annotations

import contextlib
import copy
import functools
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler, random_split

from bench.programs.syncs_sweep.training import _batch, _net, _steps


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
