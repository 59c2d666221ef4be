"""Around a training step: clipping, compilers, scalers, hooks, parametrisations, metrics. The first word is the label."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune


def model_with_gradients(device: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).to(device)
    model(torch.randn(3, 4, device=device)).square().mean().backward()
    return model


def clip_that_refuses_infinities(device: str) -> Iterator[None]:
    """Waits: error_if_nonfinite asks whether the norm is finite."""
    model = model_with_gradients(device)
    yield
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


def clip_by_a_norm_taken_apart(device: str) -> Iterator[None]:
    """Runs on: the norm stays on the device."""
    model = model_with_gradients(device)
    yield
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    norm = nn.utils.get_total_norm(grads)
    nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)


def compiled_step(device: str) -> Iterator[None]:
    """Runs on: kernels and no reads."""
    model = nn.Linear(4, 2).to(device)
    forward = torch.compile(lambda x: F.gelu(model(x)).square().mean())
    x = torch.randn(8, 4, device=device)
    yield
    forward(x).backward()


def compiled_function_that_reads(device: str) -> Iterator[None]:
    """Waits: item() breaks the graph and reads."""

    @torch.compile
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * (2.0 if x.sum().item() > 0 else 3.0)

    x = torch.randn(8, device=device)
    yield
    scaled(x)


def part_kept_from_the_compiler(device: str) -> Iterator[None]:
    """Runs on: disabling the compiler reads nothing."""

    @torch.compiler.disable
    def middle(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    x = torch.randn(8, device=device)
    yield
    torch.compile(lambda value: middle(value).cos())(x)


def ranges_named_for_the_profiler(device: str) -> Iterator[None]:
    """Runs on: record_function marks the host's side alone."""
    x = torch.randn(4, 4, device=device)
    yield
    with torch.profiler.record_function("matmul"), torch.autograd.profiler.record_function("inner"):
        x @ x


def host_profile_of_a_step(device: str) -> Iterator[None]:
    """Runs on: a profile of CPU activities asks nothing of the device."""
    x = torch.randn(4, 4, device=device)
    yield
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        x @ x
        profile.step()


def anomalies_detected(device: str) -> Iterator[None]:
    """Waits: each gradient is asked for nan."""
    x = torch.randn(4, device=device, requires_grad=True)
    yield
    with torch.autograd.detect_anomaly(check_nan=True):
        (x * 2).exp().sum().backward()


def one_cycle_schedule(device: str) -> Iterator[None]:
    """Runs on: rates and momenta are numbers of the host."""
    model = model_with_gradients(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
    yield
    optimizer.step()
    schedule.step()


def averages_by_foreach(device: str) -> Iterator[None]:
    """Runs on: one fused lerp."""
    model = model_with_gradients(device)
    average = copy.deepcopy(model)
    yield
    torch._foreach_lerp_([p.data for p in average.parameters()], [p.data for p in model.parameters()], 0.01)


def decay_that_warms_up_by_a_device_count(device: str) -> Iterator[None]:
    """Waits: min() of Python compares a device number."""
    count, weight, average = torch.ones((), device=device), torch.rand(4, device=device), torch.rand(4, device=device)
    yield
    count += 1
    decay = min(0.999, (1 + count) / (10 + count))
    average.mul_(decay).add_(weight * (1 - decay))


def scaler_over_plain_sgd(device: str) -> Iterator[None]:
    """Waits: the scaler reads whether infinities were found, since this optimizer cannot skip a step by itself."""
    model, x = nn.Linear(4, 2).to(device), torch.randn(8, 4, device=device)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1, fused=False), torch.amp.GradScaler(device)
    yield
    with torch.autocast(device, dtype=torch.float16):
        loss = model(x).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


def scaler_over_fused_adam(device: str) -> Iterator[None]:
    """Runs on: a fused optimizer takes the flag on the device."""
    model, x = nn.Linear(4, 2).to(device), torch.randn(8, 4, device=device)
    optimizer, scaler = torch.optim.AdamW(model.parameters(), 0.1, fused=True), torch.amp.GradScaler(device)
    yield
    with torch.autocast(device, dtype=torch.float16):
        loss = model(x).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


def scale_written_to_a_log(device: str) -> Iterator[None]:
    """Waits: get_scale() is a read."""
    scaler = torch.amp.GradScaler(device)
    scaler.scale(torch.ones((), device=device))
    yield
    scaler.get_scale()


def gradient_hook_that_keeps_norms(device: str) -> Iterator[None]:
    """Runs on: the norms stay where they are."""
    x, norms = torch.randn(4, device=device, requires_grad=True), []
    x.register_hook(lambda gradient: norms.append(gradient.norm()))
    yield
    x.square().sum().backward()


def gradient_hook_that_looks_for_nan(device: str) -> Iterator[None]:
    """Waits: the hook asks the device, on autograd's thread."""
    x = torch.randn(4, device=device, requires_grad=True)

    def look(gradient: torch.Tensor) -> None:
        if gradient.isnan().any():
            raise ValueError

    x.register_hook(look)
    yield
    x.square().sum().backward()


def optimizer_in_the_backward_pass(device: str) -> Iterator[None]:
    """Runs on: each parameter is stepped by a hook after its gradient."""
    model, x = nn.Linear(4, 2).to(device), torch.randn(8, 4, device=device)
    each = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}

    def stepped(parameter: torch.Tensor) -> None:
        each[parameter].step()
        each[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(stepped)
    yield
    model(x).sum().backward()


def activations_collected_on_the_host(device: str) -> Iterator[None]:
    """Waits: the hook copies to ordinary memory."""
    model, seen = nn.Linear(4, 2).to(device), []
    model.register_forward_hook(lambda module, args, out: seen.append(out.detach().cpu()))
    x = torch.randn(3, 4, device=device)
    yield
    model(x)


def activations_offloaded(device: str) -> Iterator[None]:
    """Waits: save_on_cpu copies down without non_blocking."""
    x, w = torch.randn(4, 4, device=device), torch.randn(4, 4, device=device, requires_grad=True)
    yield
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        loss = (x @ w).tanh().sum()
    loss.backward()


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < 2)


def straight_through_rounding(device: str) -> Iterator[None]:
    """Runs on: a Function of one's own, with no reads."""
    x = torch.randn(4, device=device, requires_grad=True)
    yield
    _Rounded.apply(x).sum().backward()


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient / float(x.abs().max())


def gradient_scaled_by_a_number(device: str) -> Iterator[None]:
    """Waits: backward reads the greatest value."""
    x = torch.randn(4, device=device, requires_grad=True)
    yield
    _Scaled.apply(x).sum().backward()


def gradients_of_each_sample(device: str) -> Iterator[None]:
    """Runs on: vmap over grad."""
    w, x, y = torch.randn(4, device=device), torch.randn(8, 4, device=device), torch.randn(8, device=device)
    yield
    torch.func.vmap(torch.func.grad(lambda w, x, y: ((x * w).sum() - y) ** 2), (None, 0, 0))(w, x, y)


def ensemble_of_stacked_modules(device: str) -> Iterator[None]:
    """Runs on: functional_call under vmap."""
    models = [nn.Linear(3, 2).to(device) for _ in range(3)]
    parameters, buffers = torch.func.stack_module_state(models)
    base = copy.deepcopy(models[0]).to("meta")
    x = torch.randn(5, 3, device=device)
    yield
    torch.func.vmap(lambda p, b: torch.func.functional_call(base, (p, b), (x,)))(parameters, buffers)


def curvature_by_forward_over_reverse(device: str) -> Iterator[None]:
    """Runs on: jvp of grad."""
    x, v = torch.randn(4, device=device), torch.randn(4, device=device)
    yield
    torch.func.jvp(torch.func.grad(lambda value: value.sin().sum()), (x,), (v,))


def jacobian_of_a_function(device: str) -> Iterator[None]:
    """Runs on: jacrev and jacfwd."""
    x = torch.randn(4, device=device)
    yield
    torch.func.jacfwd(torch.func.jacrev(lambda value: (value**3).sum()))(x)


class _Image(torch.Tensor):
    """A subclass as datasets and augmentation libraries have them."""


def subclass_that_goes_through_operations(device: str) -> Iterator[None]:
    """Runs on: a tensor with another name."""
    x = torch.rand(3, 4, 4, device=device).as_subclass(_Image)  # type: ignore[arg-type]
    yield
    assert isinstance((x * 2).flip(-1), _Image)


def subclass_that_is_read(device: str) -> Iterator[None]:
    """Waits: a read, whatever the tensor is called."""
    x = torch.rand(3, 4, 4, device=device).as_subclass(_Image)  # type: ignore[arg-type]
    yield
    (x * 2).mean().item()


def lazily_made_layers(device: str) -> Iterator[None]:
    """Runs on: shapes come from the host."""
    model = nn.Sequential(nn.LazyConv2d(4, 3), nn.Flatten(), nn.LazyLinear(2)).to(device)
    x = torch.randn(2, 3, 6, 6, device=device)
    model(x)
    yield
    model(x)


def weights_kept_normal(device: str) -> Iterator[None]:
    """Runs on: weight norm and one power iteration."""
    wn, sn = nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm
    model = nn.Sequential(wn(nn.Linear(4, 4)), sn(nn.Linear(4, 4))).to(device)
    x = torch.randn(2, 4, device=device)
    yield
    model(x).sum().backward()


def weights_pruned(device: str) -> Iterator[None]:
    """Waits: the mask is set by a list of indices and a number of Python, which goes up."""
    layer = nn.Linear(4, 4).to(device)
    yield
    prune.l1_unstructured(layer, "weight", amount=0.5)


def statistics_of_norms_made_anew(device: str) -> Iterator[None]:
    """Waits: update_bn moves each batch up."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(device)
    batches = [torch.randn(8, 4), torch.randn(8, 4)]
    yield
    torch.optim.swa_utils.update_bn(batches, model, device=torch.device(device))


def optimizer_state_taken_over(device: str) -> Iterator[None]:
    """Runs on: moments stay on the device, step counts on the host."""
    model = model_with_gradients(device)
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.step()
    state, other = optimizer.state_dict(), torch.optim.Adam(model.parameters())
    yield
    other.load_state_dict(state)


def parameters_as_one_vector(device: str) -> Iterator[None]:
    """Runs on: cat and views."""
    model = model_with_gradients(device)
    yield
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 0.5, model.parameters())


def model_pickled(device: str) -> Iterator[None]:
    """Waits: the values go to the host."""
    model = nn.Linear(4, 2).to(device)
    yield
    pickle.dump(model.state_dict(), io.BytesIO())


class _Loop:
    """A trainer with callbacks, as frameworks have them."""

    def __init__(self, model: nn.Module, every: int) -> None:
        self.model, self.every, self.logged = model, every, dict[str, float]()
        self.optimizer = torch.optim.AdamW(model.parameters())

    def log(self, name: str, value: torch.Tensor, step: int) -> None:
        if step % self.every == self.every - 1:
            self.logged[name] = value.detach().float().mean().item()

    def fit(self, batches: list[torch.Tensor]) -> None:
        for step, batch in enumerate(batches):
            self.optimizer.zero_grad(set_to_none=True)
            loss = self.model(batch).square().mean()
            loss.backward()
            self.optimizer.step()
            self.log("loss", loss, step)


def trainer_that_logs(device: str) -> Iterator[None]:
    """Waits: every second loss is read."""
    loop, batches = _Loop(nn.Linear(4, 2).to(device), 2), [torch.randn(3, 4, device=device) for _ in range(4)]
    yield
    loop.fit(batches)


def trainer_that_logs_later(device: str) -> Iterator[None]:
    """Runs on: no loss is due yet."""
    loop, batches = _Loop(nn.Linear(4, 2).to(device), 9), [torch.randn(3, 4, device=device) for _ in range(4)]
    yield
    loop.fit(batches)


class _Accuracy(nn.Module):
    """A metric with a state, and with the checks that metric libraries make."""

    def __init__(self, checked: bool) -> None:
        super().__init__()
        self.checked = checked
        self.register_buffer("right", torch.zeros(()))
        self.register_buffer("total", torch.zeros(()))

    def forward(self, scores: torch.Tensor, target: torch.Tensor) -> None:
        if self.checked and (target.min() < 0 or target.max() >= scores.shape[1]):
            raise ValueError("a class that does not exist")
        self.right += (scores.argmax(1) == target).sum()
        self.total += target.numel()


def metric_that_checks_its_input(device: str) -> Iterator[None]:
    """Waits: the least and the greatest class are compared."""
    metric, scores = _Accuracy(True).to(device), torch.rand(6, 3, device=device)
    target = torch.randint(3, (6,), device=device)
    yield
    metric(scores, target)


def metric_that_trusts_its_input(device: str) -> Iterator[None]:
    """Runs on: counts on the device."""
    metric, scores = _Accuracy(False).to(device), torch.rand(6, 3, device=device)
    target = torch.randint(3, (6,), device=device)
    yield
    metric(scores, target)


def area_under_the_curve(device: str) -> Iterator[None]:
    """Waits: the curve asks whether there were positives at all."""
    scores, target = torch.rand(16, device=device), torch.randint(2, (16,), device=device)
    yield
    order = scores.argsort(descending=True)
    hits, misses = target[order].cumsum(0), (1 - target[order]).cumsum(0)
    if hits[-1] <= 0 or misses[-1] <= 0:
        return
    torch.trapz(hits / hits[-1], misses / misses[-1])


def values_held_against_a_reference(device: str) -> Iterator[None]:
    """Waits: assert_close compares on the host's behalf."""
    x = torch.rand(4, device=device)
    yield
    torch.testing.assert_close(x, x.clone())
