"""Training loops: logging, clipping, averaging, schedules, data."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn


def running_loss_as_a_number(device: str) -> Iterator[None]:
    model, x = nn.Linear(4, 1).to(device), torch.randn(8, 4, device=device)
    total = 0.0
    yield
    loss = model(x).square().mean()
    loss.backward()
    total += loss.item()


def running_loss_on_the_device(device: str) -> Iterator[None]:
    model, x, total = nn.Linear(4, 1).to(device), torch.randn(8, 4, device=device), torch.zeros((), device=device)
    yield
    loss = model(x).square().mean()
    loss.backward()
    total += loss.detach()


def loss_is_checked_for_nan(device: str) -> Iterator[None]:
    loss = torch.rand((), device=device)
    yield
    if torch.isnan(loss):
        raise ValueError


def loss_is_checked_by_an_asynchronous_assert(device: str) -> Iterator[None]:
    loss = torch.rand((), device=device)
    yield
    torch._assert_async(torch.isfinite(loss))


def gradients_scaled_where_finite(device: str) -> Iterator[None]:
    grads = [torch.randn(4, device=device), torch.randn(2, 2, device=device)]
    yield
    finite = torch.stack([torch.isfinite(g).all() for g in grads]).all()
    [torch.where(finite, g, 0) for g in grads]


def step_skipped_if_not_finite(device: str) -> Iterator[None]:
    model = nn.Linear(4, 1).to(device)
    model(torch.randn(2, 4, device=device)).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    yield
    if all(torch.isfinite(p.grad).all() for p in model.parameters()):
        optimizer.step()


def norm_clipped(device: str) -> Iterator[None]:
    model = nn.Linear(4, 3).to(device)
    model(torch.randn(2, 4, device=device)).sum().backward()
    yield
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def norm_clipped_and_logged(device: str) -> Iterator[None]:
    model = nn.Linear(4, 3).to(device)
    model(torch.randn(2, 4, device=device)).sum().backward()
    yield
    print_later = f"{nn.utils.clip_grad_norm_(model.parameters(), 1.0):.2f}"
    del print_later


def norm_clipped_by_hand_in_python(device: str) -> Iterator[None]:
    model = nn.Linear(4, 3).to(device)
    model(torch.randn(2, 4, device=device)).sum().backward()
    yield
    total = sum(p.grad.norm().item() ** 2 for p in model.parameters()) ** 0.5
    for p in model.parameters():
        p.grad.mul_(min(1.0, 1.0 / (total + 1e-6)))


def values_clipped(device: str) -> Iterator[None]:
    model = nn.Linear(4, 3).to(device)
    model(torch.randn(2, 4, device=device)).sum().backward()
    yield
    nn.utils.clip_grad_value_(model.parameters(), 0.5)


def average_of_weights(device: str) -> Iterator[None]:
    model = nn.Linear(4, 3).to(device)
    shadow = copy.deepcopy(model)
    yield
    with torch.no_grad():
        for a, b in zip(shadow.parameters(), model.parameters(), strict=True):
            a.lerp_(b, 0.01)


def average_of_weights_on_the_host(device: str) -> Iterator[None]:
    model = nn.Linear(4, 3).to(device)
    shadow = {name: value.cpu().clone() for name, value in model.state_dict().items()}
    yield
    for name, value in model.state_dict().items():
        shadow[name].lerp_(value.cpu(), 0.01)


def best_model_is_copied(device: str) -> Iterator[None]:
    model = nn.Linear(4, 3).to(device)
    yield
    copy.deepcopy(model.state_dict())


def lion_step(device: str) -> Iterator[None]:
    p, g, m = (torch.randn(6, device=device) for _ in range(3))
    yield
    p.mul_(1 - 0.01).add_(m.mul(0.9).add(g, alpha=0.1).sign_(), alpha=-0.01)
    m.lerp_(g, 0.01)


def adam_with_bias_correction_on_the_host(device: str) -> Iterator[None]:
    p, g, m, v = (torch.rand(6, device=device) for _ in range(4))
    step = 3
    yield
    m.lerp_(g, 0.1)
    v.mul_(0.99).addcmul_(g, g, value=0.01)
    p.addcdiv_(m, (v / (1 - 0.99**step)).sqrt().add_(1e-8), value=-0.01 / (1 - 0.9**step))


def adam_with_its_step_on_the_device(device: str) -> Iterator[None]:
    p, g, m, v = (torch.rand(6, device=device) for _ in range(4))
    step = torch.ones((), device=device)
    yield
    step += 1
    p.addcdiv_(m, (v / (1 - 0.99**step)).sqrt().add_(1e-8), value=-0.01 / (1 - 0.9 ** step.item()))
    del g


def limited_memory_optimizer(device: str) -> Iterator[None]:
    model, x = nn.Linear(3, 1).to(device), torch.randn(5, 3, device=device)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    yield
    optimizer.step(closure)


def rmsprop_step(device: str) -> Iterator[None]:
    model = nn.Linear(3, 1).to(device)
    optimizer = torch.optim.RMSprop(model.parameters())
    model(torch.randn(5, 3, device=device)).sum().backward()
    yield
    optimizer.step()
    optimizer.zero_grad()


def adagrad_step(device: str) -> Iterator[None]:
    model = nn.Linear(3, 1).to(device)
    optimizer = torch.optim.Adagrad(model.parameters())
    model(torch.randn(5, 3, device=device)).sum().backward()
    yield
    optimizer.step()


def plateau_schedule(device: str) -> Iterator[None]:
    model = nn.Linear(3, 1).to(device)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD(model.parameters(), 0.1))
    loss = torch.rand((), device=device)
    yield
    schedule.step(loss)


def cosine_schedule(device: str) -> Iterator[None]:
    optimizer = torch.optim.SGD(nn.Linear(3, 1).to(device).parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)
    optimizer.step()
    yield
    schedule.step()


def batch_moved_in_the_loop(device: str) -> Iterator[None]:
    batches = [torch.randn(4, 3) for _ in range(2)]
    yield
    for batch in batches:
        batch.to(device).sum()


def batch_moved_with_non_blocking_alone(device: str) -> Iterator[None]:
    batch = torch.randn(4000, 300)
    yield
    batch.to(device, non_blocking=True).sum()


def batch_moved_from_a_pinning_loader(device: str) -> Iterator[None]:
    data = torch.utils.data.TensorDataset(torch.randn(8, 3), torch.arange(8))
    batches = list(torch.utils.data.DataLoader(data, 4, pin_memory=True))
    yield
    for x, y in batches:
        x.to(device, non_blocking=True).sum() + y.to(device, non_blocking=True).sum()


def batch_of_numpy(device: str) -> Iterator[None]:
    import numpy as np

    array = np.zeros((4, 3), dtype=np.float32)
    yield
    torch.from_numpy(array).to(device)


def augmentation_by_a_host_coin(device: str) -> Iterator[None]:
    images = torch.rand(4, 3, 8, 8, device=device)
    yield
    if torch.rand(()) < 0.5:
        images.flip(-1)


def augmentation_by_a_device_coin(device: str) -> Iterator[None]:
    images = torch.rand(4, 3, 8, 8, device=device)
    yield
    if torch.rand((), device=device) < 0.5:
        images.flip(-1)


def augmentation_row_by_row_on_the_device(device: str) -> Iterator[None]:
    images = torch.rand(4, 3, 8, 8, device=device)
    yield
    torch.where(torch.rand(4, 1, 1, 1, device=device) < 0.5, images.flip(-1), images)


def mixup(device: str) -> Iterator[None]:
    x, y = torch.rand(4, 3, device=device), torch.rand(4, 2, device=device)
    yield
    share, order = 0.3, torch.randperm(4, device=device)
    share * x + (1 - share) * x[order], share * y + (1 - share) * y[order]


def mixup_with_an_order_of_the_host(device: str) -> Iterator[None]:
    x = torch.rand(4, 3, device=device)
    yield
    0.3 * x + 0.7 * x[torch.randperm(4)]


def mixup_with_a_beta_of_the_device(device: str) -> Iterator[None]:
    x = torch.rand(4, 3, device=device)
    one = torch.ones((), device=device)
    yield
    share = torch.distributions.Beta(one, one, validate_args=False).sample()
    share * x + (1 - share) * x.flip(0)


def erased_square(device: str) -> Iterator[None]:
    images = torch.rand(4, 3, 8, 8, device=device)
    yield
    top, left = torch.randint(0, 4, (2,)).tolist()
    images[:, :, top : top + 4, left : left + 4] = 0


def erased_square_by_device_corner(device: str) -> Iterator[None]:
    images = torch.rand(4, 3, 8, 8, device=device)
    yield
    top = torch.randint(0, 4, (1,), device=device)
    images[:, :, top : top + 4] = 0


def normalised_by_channel_lists(device: str) -> Iterator[None]:
    images = torch.rand(4, 3, 8, 8, device=device)
    yield
    mean = torch.tensor([0.485, 0.456, 0.406], device=device).view(3, 1, 1)
    (images - mean) / 0.225


def normalised_by_buffers(device: str) -> Iterator[None]:
    images, mean = torch.rand(4, 3, 8, 8, device=device), torch.rand(3, 1, 1, device=device)
    yield
    images.sub_(mean).div_(0.225)


def accuracy_at_five(device: str) -> Iterator[None]:
    logits, target = torch.randn(8, 10, device=device), torch.randint(0, 10, (8,), device=device)
    yield
    (logits.topk(5).indices == target[:, None]).any(1).float().sum().mul_(100 / 8)


def accuracy_as_a_number(device: str) -> Iterator[None]:
    logits, target = torch.randn(8, 10, device=device), torch.randint(0, 10, (8,), device=device)
    yield
    (logits.argmax(1) == target).sum().item() / 8


def confusion_matrix(device: str) -> Iterator[None]:
    guess, target = torch.randint(0, 4, (50,), device=device), torch.randint(0, 4, (50,), device=device)
    yield
    torch.bincount(target * 4 + guess, minlength=16).view(4, 4)


def confusion_matrix_by_scatter(device: str) -> Iterator[None]:
    guess, target = torch.randint(0, 4, (50,), device=device), torch.randint(0, 4, (50,), device=device)
    yield
    torch.zeros(16, device=device).scatter_add_(0, target * 4 + guess, torch.ones(50, device=device)).view(4, 4)


def gradient_checkpointing(device: str) -> Iterator[None]:
    from torch.utils.checkpoint import checkpoint

    model, x = nn.Linear(4, 4).to(device), torch.randn(2, 4, device=device)
    yield
    checkpoint(model, x, use_reentrant=False).sum().backward()


def gradient_penalty(device: str) -> Iterator[None]:
    model, x = nn.Linear(4, 1).to(device), torch.randn(5, 4, device=device, requires_grad=True)
    yield
    (grad,) = torch.autograd.grad(model(x).tanh().sum(), x, create_graph=True)
    ((grad.norm(dim=1) - 1) ** 2).mean().backward()


def dropout_and_norms(device: str) -> Iterator[None]:
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Dropout(), nn.BatchNorm1d(8), nn.GroupNorm(2, 8)).to(
        device
    )
    x = torch.randn(5, 4, device=device)
    yield
    model(x).sum().backward()


def scaled_loss(device: str) -> Iterator[None]:
    model, x = nn.Linear(4, 1).to(device), torch.randn(5, 4, device=device)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler(device)
    yield
    with torch.autocast(device, dtype=torch.float16):
        loss = model(x).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


def autocast_alone(device: str) -> Iterator[None]:
    model, x = nn.Linear(4, 1).to(device), torch.randn(5, 4, device=device)
    yield
    with torch.autocast(device, dtype=torch.bfloat16):
        F.mse_loss(model(x), torch.zeros(5, 1, device=device)).backward()


def checkpoint_written(device: str) -> Iterator[None]:
    import io

    model = nn.Linear(4, 1).to(device)
    yield
    torch.save(model.state_dict(), io.BytesIO())


def seed_set(device: str) -> Iterator[None]:
    yield
    torch.manual_seed(3)
    torch.randn(3, device=device)


def progress_bar_text(device: str) -> Iterator[None]:
    loss = torch.rand((), device=device)
    yield
    f"loss {loss:.3f}"


def logged_every_hundredth_step(device: str) -> Iterator[None]:
    loss, step = torch.rand((), device=device), 7
    yield
    if step % 100 == 0:
        loss.item()


def parameters_counted(device: str) -> Iterator[None]:
    model = nn.Linear(4, 3).to(device)
    yield
    sum(p.numel() for p in model.parameters() if p.requires_grad)


def weights_initialised(device: str) -> Iterator[None]:
    layer = nn.Linear(8, 8).to(device)
    yield
    nn.init.kaiming_normal_(layer.weight)
    nn.init.trunc_normal_(layer.weight, std=0.02)
    nn.init.zeros_(layer.bias)


def weights_initialised_orthogonally(device: str) -> Iterator[None]:
    layer = nn.Linear(8, 8).to(device)
    yield
    nn.init.orthogonal_(layer.weight)
