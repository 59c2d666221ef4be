"""Reinforcement learning, experts, numerics, and the care of the device."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn


def action_sampled(device: str) -> Iterator[None]:
    logits = torch.randn(1, 4, device=device)
    yield
    torch.distributions.Categorical(logits=logits).sample().item()


def action_sampled_without_validation(device: str) -> Iterator[None]:
    logits = torch.randn(8, 4, device=device)
    yield
    policy = torch.distributions.Categorical(logits=logits, validate_args=False)
    action = policy.sample()
    policy.log_prob(action), policy.entropy()


def action_by_gumbel(device: str) -> Iterator[None]:
    logits = torch.randn(8, 4, device=device)
    yield
    (logits - torch.empty_like(logits).exponential_().log()).argmax(-1)


def gaussian_policy(device: str) -> Iterator[None]:
    mean, deviation = torch.randn(8, 2, device=device), torch.ones(8, 2, device=device)
    yield
    torch.distributions.Normal(mean, deviation).rsample()


def policy_ratio_clipped(device: str) -> Iterator[None]:
    new, old, gain = (torch.randn(16, device=device) for _ in range(3))
    yield
    ratio = (new - old).exp()
    -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()


def early_stop_by_divergence(device: str) -> Iterator[None]:
    new, old = torch.randn(16, device=device), torch.randn(16, device=device)
    yield
    if (old - new).mean() > 0.02:
        return


def advantages_backwards(device: str) -> Iterator[None]:
    reward, value, done = (
        torch.rand(6, 3, device=device),
        torch.rand(7, 3, device=device),
        torch.zeros(6, 3, device=device),
    )
    yield
    last, found = torch.zeros(3, device=device), []
    for t in reversed(range(6)):
        last = reward[t] + 0.99 * value[t + 1] * (1 - done[t]) - value[t] + 0.95 * last * (1 - done[t])
        found.append(last)
    torch.stack(found[::-1])


def replay_sampled_from_host_memory(device: str) -> Iterator[None]:
    memory = torch.randn(50, 4)
    yield
    memory[torch.randint(0, 50, (8,))].to(device)


def replay_sampled_on_the_device(device: str) -> Iterator[None]:
    memory = torch.randn(50, 4, device=device)
    yield
    memory[torch.randint(0, 50, (8,), device=device)]


def replay_sampled_by_a_numpy_choice(device: str) -> Iterator[None]:
    import numpy as np

    memory = torch.randn(50, 4, device=device)
    yield
    memory[np.random.default_rng(0).integers(0, 50, 8)]


def observation_to_a_tensor(device: str) -> Iterator[None]:
    yield
    torch.as_tensor([0.1, 0.2, 0.3], dtype=torch.float32, device=device)


def target_network_copied(device: str) -> Iterator[None]:
    model, target = nn.Linear(4, 2).to(device), nn.Linear(4, 2).to(device)
    yield
    target.load_state_dict(model.state_dict())


def values_of_chosen_actions(device: str) -> Iterator[None]:
    q, action, after = (
        torch.randn(8, 4, device=device),
        torch.randint(0, 4, (8,), device=device),
        torch.rand(8, 4, device=device),
    )
    yield
    F.smooth_l1_loss(q.gather(1, action[:, None]).squeeze(1), 0.99 * after.max(1).values)


def experts_by_a_loop_over_masks(device: str) -> Iterator[None]:
    x, route = torch.randn(8, 4, device=device), torch.randint(0, 3, (8,), device=device)
    experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)).to(device)
    yield
    out = torch.zeros_like(x)
    for number, expert in enumerate(experts):
        rows = (route == number).nonzero(as_tuple=True)[0]
        out.index_add_(0, rows, expert(x[rows]))


def experts_all_computed(device: str) -> Iterator[None]:
    x, gate = torch.randn(8, 4, device=device), torch.randn(8, 3, device=device).softmax(-1)
    weights = torch.randn(3, 4, 4, device=device)
    yield
    torch.einsum("be,bd,edf->bf", gate, x, weights)


def experts_with_capacity(device: str) -> Iterator[None]:
    route = torch.randint(0, 3, (8,), device=device)
    yield
    place = F.one_hot(route, 3).cumsum(0).gather(1, route[:, None]).squeeze(1) - 1
    torch.where(place < 4, route * 4 + place, 12)


def experts_with_counts_on_the_host(device: str) -> Iterator[None]:
    route = torch.randint(0, 3, (8,), device=device)
    yield
    F.one_hot(route, 3).sum(0).cpu().tolist()


def classes_found_by_one_hot(device: str) -> Iterator[None]:
    y = torch.randint(0, 3, (8,), device=device)
    yield
    F.one_hot(y)


def system_solved(device: str) -> Iterator[None]:
    a, b = torch.rand(4, 4, device=device) + 4 * torch.eye(4, device=device), torch.rand(4, 2, device=device)
    yield
    torch.linalg.solve(a, b)


def system_solved_without_checks(device: str) -> Iterator[None]:
    a, b = torch.rand(4, 4, device=device) + 4 * torch.eye(4, device=device), torch.rand(4, 2, device=device)
    yield
    torch.linalg.solve_ex(a, b)[0]


def covariance_factorised(device: str) -> Iterator[None]:
    x = torch.randn(20, 4, device=device)
    yield
    torch.linalg.cholesky(torch.cov(x.T) + 1e-3 * torch.eye(4, device=device))


def gaussian_of_many_variables(device: str) -> Iterator[None]:
    mean, matrix = torch.zeros(3, device=device), torch.eye(3, device=device)
    yield
    torch.distributions.MultivariateNormal(mean, matrix).log_prob(torch.zeros(3, device=device))


def spectrum_of_a_matrix(device: str) -> Iterator[None]:
    x = torch.randn(6, 4, device=device)
    yield
    torch.linalg.svdvals(x)


def determinant_for_a_flow(device: str) -> Iterator[None]:
    weight = torch.eye(4, device=device).requires_grad_()
    yield
    torch.slogdet(weight)[1].backward()


def orthogonalised_by_iteration(device: str) -> Iterator[None]:
    g = torch.randn(6, 4, device=device)
    yield
    x = g / (g.norm() + 1e-7)
    for _ in range(3):
        a = x @ x.T
        x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x


def power_iteration(device: str) -> Iterator[None]:
    layer, x = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4).to(device)), torch.randn(2, 4, device=device)
    yield
    layer(x).sum().backward()


def converged_or_not(device: str) -> Iterator[None]:
    x, y = torch.rand(6, device=device), torch.rand(6, device=device)
    yield
    torch.allclose(x, y, atol=1e-3)


def clusters_refined(device: str) -> Iterator[None]:
    x, centres = torch.randn(30, 2, device=device), torch.randn(4, 2, device=device)
    yield
    nearest = torch.cdist(x, centres).argmin(1)
    weight = F.one_hot(nearest, 4).float()
    weight.T @ x / weight.sum(0).clamp(min=1)[:, None]


def clusters_refined_by_masks(device: str) -> Iterator[None]:
    x, centres = torch.randn(30, 2, device=device), torch.randn(4, 2, device=device)
    yield
    nearest = torch.cdist(x, centres).argmin(1)
    torch.stack([x[nearest == k].mean(0) for k in range(4)])


def histogram_of_activations(device: str) -> Iterator[None]:
    x = torch.randn(100, device=device)
    yield
    torch.histc(x, bins=10)


def histogram_between_bounds(device: str) -> Iterator[None]:
    x = torch.randn(100, device=device)
    yield
    torch.histc(x, bins=10, min=-3, max=3)


def quantile_for_clipping(device: str) -> Iterator[None]:
    x = torch.randn(100, device=device)
    yield
    x.clamp(max=torch.quantile(x, 0.9))


def weights_quantised(device: str) -> Iterator[None]:
    w = torch.randn(8, 8, device=device)
    yield
    scale = w.abs().amax(1, keepdim=True) / 127
    (w / scale).round().clamp(-128, 127).to(torch.int8)


def weights_quantised_by_a_python_scale(device: str) -> Iterator[None]:
    w = torch.randn(8, 8, device=device)
    yield
    torch.quantize_per_tensor(w.cpu(), float(w.abs().max()) / 127, 0, torch.qint8)


def adapter_merged(device: str) -> Iterator[None]:
    w, a, b = torch.randn(8, 8, device=device), torch.randn(2, 8, device=device), torch.randn(8, 2, device=device)
    yield
    w.addmm_(b, a, alpha=0.5)


def output_read_through_a_pinned_ring(device: str) -> Iterator[None]:
    x, slot, event = torch.rand(8, device=device), torch.zeros(8).pin_memory(), torch.cuda.Event()
    yield
    slot.copy_(x, non_blocking=True)
    event.record()


def output_read_through_a_pinned_buffer_at_once(device: str) -> Iterator[None]:
    x, slot, event = torch.rand(8, device=device), torch.zeros(8).pin_memory(), torch.cuda.Event()
    yield
    slot.copy_(x, non_blocking=True)
    event.record()
    event.synchronize()
    slot.tolist()


def work_timed_by_events(device: str) -> Iterator[None]:
    x = torch.rand(64, 64, device=device)
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    yield
    first.record()
    x @ x
    last.record()
    torch.cuda.synchronize()
    first.elapsed_time(last)


def work_on_a_side_stream(device: str) -> Iterator[None]:
    x, side = torch.rand(64, 64, device=device), torch.cuda.Stream()
    yield
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x @ x
    torch.cuda.current_stream().wait_stream(side)
    y.record_stream(torch.cuda.current_stream())


def work_awaited_on_its_stream(device: str) -> Iterator[None]:
    x, side = torch.rand(64, 64, device=device), torch.cuda.Stream()
    yield
    with torch.cuda.stream(side):
        x @ x
    side.synchronize()


def memory_looked_at(device: str) -> Iterator[None]:
    x = torch.rand(8, device=device)
    yield
    torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), x.numel()


def upload_from_a_pinned_window(device: str) -> Iterator[None]:
    host = torch.zeros(64, 8).pin_memory()
    yield
    host[:5].to(device, non_blocking=True)


def upload_from_pinned_columns(device: str) -> Iterator[None]:
    host = torch.zeros(64, 8).pin_memory()
    yield
    host[:, :5].to(device, non_blocking=True)


def upload_of_a_python_number(device: str) -> Iterator[None]:
    x = torch.rand(8, device=device)
    yield
    x * 2.5 + torch.tensor(0.5, device=device)


def filled_from_a_python_number(device: str) -> Iterator[None]:
    x = torch.rand(8, device=device)
    yield
    x.fill_(2.5).add_(torch.full((), 0.5, device=device))


def element_set_from_python(device: str) -> Iterator[None]:
    x = torch.rand(8, device=device)
    yield
    x[3] = 0.5


def row_set_from_python(device: str) -> Iterator[None]:
    x = torch.rand(8, 2, device=device)
    yield
    x[3] = 0.5


def rows_swapped(device: str) -> Iterator[None]:
    x = torch.rand(8, 2, device=device)
    yield
    x[0], x[1] = x[1].clone(), x[0].clone()


def rows_set_by_a_device_index(device: str) -> Iterator[None]:
    x, rows = torch.rand(8, 2, device=device), torch.tensor([1, 4], device=device)
    yield
    x[rows] = 0.0


def rows_filled_by_a_device_index(device: str) -> Iterator[None]:
    x, rows = torch.rand(8, 2, device=device), torch.tensor([1, 4], device=device)
    yield
    x.index_fill_(0, rows, 0.0)


def mask_filled_with_the_maximum(device: str) -> Iterator[None]:
    x = torch.rand(8, 2, device=device)
    yield
    x.masked_fill_(x < 0.1, x.max())


def product_of_factors_with_gradient(device: str) -> Iterator[None]:
    x = (torch.rand(5, device=device) + 0.5).requires_grad_()
    yield
    x.prod().backward()


def tensors_compared(device: str) -> Iterator[None]:
    x, y = torch.rand(8, device=device), torch.rand(8, device=device)
    yield
    assert not torch.equal(x, y)


def membership_asked(device: str) -> Iterator[None]:
    ids, special = torch.randint(0, 99, (50,), device=device), torch.tensor([1, 2, 3], device=device)
    yield
    torch.isin(ids, special)


def buckets_of_values(device: str) -> Iterator[None]:
    x, edges = torch.rand(20, device=device), torch.linspace(0, 1, 5, device=device)
    yield
    torch.bucketize(x, edges), torch.searchsorted(edges, x)


def shape_looked_at(device: str) -> Iterator[None]:
    x = torch.rand(8, 2, device=device)
    yield
    len(x), x.size(0), x.numel(), x.is_contiguous()
