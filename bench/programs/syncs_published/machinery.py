"""Operators, tensor classes, tracers, parallel helpers. A line that waits by documentation ends in ``# waits``."""

from __future__ import annotations

import collections
import contextlib
import copy
import itertools
import threading
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

_LIBRARY = torch.library.Library("published", "FRAGMENT")
_LIBRARY.define("clipped(Tensor x, float most) -> Tensor")


def _clipped(x: torch.Tensor, most: float) -> torch.Tensor:
    norm = x.norm()
    return x * (most / norm.clamp(min=most))


def _clipped_by_asking(x: torch.Tensor, most: float) -> torch.Tensor:
    norm = x.norm().item()  # waits
    return x * (most / max(norm, most))


_LIBRARY.impl("clipped", _clipped_by_asking, "CUDA")
_LIBRARY.impl("clipped", _clipped, "CPU")


def operation_with_another_way_for_the_card(device: str) -> Any:
    return torch.ops.published.clipped(torch.randn(6, device=device), 1.0)


@torch.library.custom_op("published::rows_above", mutates_args=())
def _rows_above(x: torch.Tensor, least: float) -> torch.Tensor:
    kept = (x.amax(1) > least).nonzero()  # waits
    return x[kept.squeeze(1)].clone()


@_rows_above.register_fake
def _(x: torch.Tensor, least: float) -> torch.Tensor:  # noqa: ARG001
    return x.new_empty(torch.library.get_ctx().new_dynamic_size(), x.shape[1])


def operation_of_a_data_dependent_size(device: str) -> Any:
    return torch.ops.published.rows_above(torch.randn(6, 3, device=device), 0.5)


@torch.library.custom_op("published::cubed", mutates_args=())
def _cubed(x: torch.Tensor) -> torch.Tensor:
    return x**3


_cubed.register_autograd(
    lambda ctx, grad: 3 * ctx.saved_tensors[0] ** 2 * grad,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)
_cubed.register_vmap(lambda info, dims, x: (_cubed(x), dims[0]))


def operation_with_a_gradient_and_a_batch(device: str) -> Any:
    x = torch.randn(4, 3, device=device, requires_grad=True)
    torch.ops.published.cubed(x).sum().backward()
    return x.grad, torch.func.vmap(torch.ops.published.cubed)(x.detach())


class _Scaled(torch.Tensor):
    """A tensor kept as bytes and a scale."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype, device=codes.device)  # noqa: SLF001

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    def opened(self) -> torch.Tensor:
        return self.codes.to(self.scale.dtype) * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        opened = tree_map(lambda value: value.opened() if isinstance(value, cls) else value, (args, kwargs or {}))
        return func(*opened[0], **opened[1])


def weights_in_a_class_of_their_own(device: str) -> Any:
    weight = torch.randn(4, 6, device=device)
    scale = weight.abs().amax() / 127
    layer = nn.Linear(6, 4, device=device)
    layer.weight = nn.Parameter(_Scaled((weight / scale).round().to(torch.int8), scale), requires_grad=False)
    return layer(torch.randn(3, 6, device=device))


class _Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def calls_counted_by_a_mode(device: str) -> Any:
    layer, counted = nn.Linear(3, 2, device=device), _Counted()
    with counted:
        layer(torch.ones(2, 3, device=device)).relu().sum().backward()
    return counted.calls["relu"], counted.calls["addmm"], layer.weight.grad


def work_counted_by_its_products(device: str) -> Any:
    from torch.utils.flop_counter import FlopCounterMode

    layer, counter = nn.Linear(8, 4, device=device), FlopCounterMode(display=False)
    with counter:
        layer(torch.ones(2, 8, device=device)).sum().backward()
    return counter.get_total_flops()


def saved_tensors_packed_smaller(device: str) -> Any:
    x = torch.randn(4, 3, device=device, requires_grad=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t.to(torch.bfloat16), lambda t: t.float())
    with hooks:
        (x.sin() * x.exp()).sum().backward()
    return x.grad


def saved_tensors_waiting_on_the_host(device: str) -> Any:
    x = torch.randn(4, 3, device=device, requires_grad=True)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cpu()  # waits

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device)  # waits

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        y = x.sin() * x.exp()
    y.sum().backward()
    return x.grad


def checkpoints_that_keep_some_results(device: str) -> Any:
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    layer, x = nn.Linear(3, 3, device=device), torch.randn(4, 3, device=device, requires_grad=True)

    def policy(_ctx: Any, op: Any, *_: Any, **__: Any) -> Any:
        return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE

    made = checkpoint(
        lambda t: layer(t).tanh().exp(),
        x,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=lambda: create_selective_checkpoint_contexts(policy),
    )
    made.sum().backward()
    return x.grad, layer.weight.grad


def program_rewritten_as_a_graph(device: str) -> Any:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 4, device=device)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.layer(x)) + 1

    graph = torch.fx.symbolic_trace(Model())
    for node in graph.graph.nodes:
        if node.target is torch.relu:
            node.target = torch.tanh
    graph.recompile()
    return graph(torch.ones(2, 3, device=device))


def weights_kept_on_a_surface(device: str) -> Any:
    class Symmetric(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.triu() + x.triu(1).T

    layer = nn.Linear(3, 3, device=device)
    nn.utils.parametrize.register_parametrization(layer, "weight", Symmetric())
    with nn.utils.parametrize.cached():
        layer(torch.ones(2, 3, device=device)).sum().backward()
    nn.utils.parametrize.remove_parametrizations(layer, "weight")
    return layer.weight


def derivative_along_a_direction(device: str) -> Any:
    import torch.autograd.forward_ad as forward

    layer, x = nn.Linear(3, 2, device=device), torch.randn(4, 3, device=device)
    with forward.dual_level():
        made = layer(forward.make_dual(x, torch.ones_like(x))).softmax(-1)
        return forward.unpack_dual(made)


def sketch_of_many_directions(device: str) -> Any:
    layer, x = nn.Linear(3, 2, device=device), torch.randn(4, 3, device=device)

    def f(given: torch.Tensor) -> torch.Tensor:
        return layer(given).tanh()

    output, along = torch.func.linearize(f, x)
    return output, along(torch.ones_like(x)), torch.func.vmap(along)(torch.randn(5, 4, 3, device=device))


def ensemble_trained_at_once(device: str) -> Any:
    models = [nn.Linear(3, 1, device=device) for _ in range(4)]
    weights, buffers = torch.func.stack_module_state(models)
    base = copy.deepcopy(models[0]).to("meta")

    def loss(given: Any, held: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(base, (given, held), (x,)).square().mean()

    x = torch.randn(4, 8, 3, device=device)
    grads, losses = torch.func.vmap(torch.func.grad_and_value(loss))(weights, buffers, x)
    with torch.no_grad():
        for name, value in weights.items():
            value -= 0.1 * grads[name]
    return losses, weights["weight"]


def graphs_of_callables(device: str) -> Any:
    layer, x = nn.Linear(3, 3, device=device), torch.randn(4, 3, device=device)
    if device == "cuda":
        graph, still = torch.cuda.CUDAGraph(), x.clone()
        with torch.cuda.graph(graph), torch.no_grad():  # waits
            made = layer(still).relu()
        still.copy_(x * 2)
        graph.replay()
        return made
    with torch.no_grad():
        return layer(x * 2).relu()


def two_streams_that_meet(device: str) -> Any:
    x = torch.randn(4, 4, device=device)
    if device != "cuda":
        return x @ x + x.T @ x
    side, done = torch.cuda.Stream(priority=-1), torch.cuda.Event()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x @ x
        done.record(side)
    z = x.T @ x
    torch.cuda.current_stream().wait_event(done)
    y.record_stream(torch.cuda.current_stream())
    return y + z


def worker_threads_with_a_queue(device: str) -> Any:
    results: dict[int, Any] = {}

    def work(number: int) -> None:
        x = torch.full((3,), float(number), device=device)
        results[number] = x.sum().item()  # waits

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[number] for number in range(3)]


def optimizer_rebuilt_from_its_state(device: str) -> Any:
    layer = nn.Linear(3, 2, device=device)
    first = torch.optim.AdamW(layer.parameters(), lr=0.1)
    layer(torch.ones(2, 3, device=device)).sum().backward()
    first.step()
    second = torch.optim.AdamW(layer.parameters(), lr=0.1)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    second.step()
    return layer.weight, second.state[layer.weight]["exp_avg"]


def gradients_scaled_as_they_arrive(device: str) -> Any:
    model = nn.Sequential(nn.Linear(3, 4, device=device), nn.Linear(4, 1, device=device))

    def halve(parameter: torch.Tensor) -> None:
        parameter.grad.mul_(0.5)

    handles = [p.register_post_accumulate_grad_hook(halve) for p in model.parameters()]
    model(torch.ones(2, 3, device=device)).sum().backward()
    for handle in handles:
        handle.remove()
    return [p.grad for p in model.parameters()]


def step_compiled_with_a_backend(device: str) -> Any:
    seen: list[int] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        seen.append(len(graph.graph.nodes))
        return graph.forward

    layer = nn.Linear(3, 2, device=device)
    step = torch.compile(lambda x: layer(x).relu().sum(), backend="eager")
    step(torch.ones(2, 3, device=device)).backward()
    return layer.weight.grad, len(seen)


def attention_by_a_score_function(device: str) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = torch.randn(3, 1, 2, 16, 8, device=device)
    mask = create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 16, 16, device=device, BLOCK_SIZE=16)
    return flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: score - 0.1 * (i - j), block_mask=mask)  # waits


def attention_over_rows_of_many_lengths(device: str) -> Any:
    lengths = [3, 1, 4]
    rows = [torch.randn(length, 8, device=device) for length in lengths]
    packed = torch.nested.nested_tensor(rows, layout=torch.jagged)  # waits
    heads = packed.unflatten(-1, (2, 4)).transpose(1, 2)
    made = F.scaled_dot_product_attention(heads, heads, heads)
    return made.transpose(1, 2).flatten(-2).values()


def random_numbers_kept_apart(device: str) -> Any:
    before = torch.randn(2, device=device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        inside = torch.randn(2, device=device)
    dice = torch.Generator(device).manual_seed(7)
    return before, inside, torch.randn(2, generator=dice, device=device)


def complex_weights(device: str) -> Any:
    weight = torch.randn(3, 3, dtype=torch.complex64, device=device, requires_grad=True)
    x = torch.fft.fft2(torch.randn(2, 3, 3, device=device))
    torch.fft.ifft2(x * weight).abs().square().mean().backward()
    return torch.view_as_real(weight.grad)


def masked_numbers(device: str) -> Any:
    x, mask = torch.randn(4, 5, device=device), torch.rand(4, 5, device=device) > 0.3
    softened = torch.masked.softmax(x, 1, mask=mask)  # waits
    return softened, torch.masked.mean(x, 1, mask=mask), torch.masked.amax(x, 1, mask=mask)  # waits


def batch_norm_folded(device: str) -> Any:
    conv, norm = nn.Conv2d(1, 2, 3, device=device), nn.BatchNorm2d(2, device=device)  # waits
    conv.eval(), norm.eval()
    folded = nn.utils.fusion.fuse_conv_bn_eval(conv, norm)
    return folded(torch.ones(1, 1, 4, 4, device=device))


def averages_with_buffers(device: str) -> Any:
    model = nn.Sequential(nn.Linear(3, 3, device=device), nn.LayerNorm(3, device=device))
    averaged = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    for _ in range(3):
        with torch.no_grad():
            model[0].weight += 0.1
        averaged.update_parameters(model)  # waits
    return averaged.module[0].weight


def values_of_numpy_and_back(device: str) -> Any:
    x = torch.from_numpy(np.arange(6, dtype=np.float64).reshape(2, 3)).to(device)  # waits
    whole = np.asarray(x.float().cpu())  # waits
    scale = np.float32(0.5)
    return whole.sum(), x * float(scale), x * scale


def state_copied_in_place(device: str) -> Any:
    model, shadow = nn.Linear(3, 2, device=device), nn.Linear(3, 2, device=device)
    with torch.no_grad():
        for mine, theirs in zip(shadow.parameters(), model.parameters(), strict=True):
            mine.copy_(theirs)
    spare = {name: value.clone() for name, value in shadow.state_dict().items()}
    shadow.load_state_dict(spare, assign=True)
    return shadow.weight


def weights_loaded_without_being_made(device: str) -> Any:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model.to_empty(device=device)
    for p in model.parameters():
        nn.init.constant_(p, 0.5)
    return model(torch.ones(2, 3, device=device))


def product_of_parallel_columns(device: str) -> Any:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh(device, (1,))
        weight = distribute_tensor(torch.randn(4, 6, device=device), mesh, [Shard(1)])
        x = DTensor.from_local(torch.randn(2, 4, device=device), mesh, [Replicate()])
        return (x @ weight).redistribute(placements=[Replicate()]).to_local()
    finally:
        dist.destroy_process_group()


def values_that_must_not_be_read(device: str) -> Any:
    found = []
    x = torch.randn(3, device=device)
    with contextlib.suppress(RuntimeError):
        torch.func.vmap(lambda row: row * float(row.sum()))(x[None])
    for part in itertools.chain(x.split(1), x.unbind()):
        found.append(part * 2)
    return torch.cat([part.view(-1) for part in found])
