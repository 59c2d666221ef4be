"""Parts that are trained in place of the whole: adapters, experts, masks, bits. A line that waits ends in ``# waits``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize


class _LowRank(nn.Module):
    """A frozen layer and a trained update of low rank."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float = 2.0, dropout: float = 0.0) -> None:
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), alpha / rank
        device = base.weight.device
        self.down = nn.Parameter(torch.empty(rank, base.in_features, device=device))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank, device=device))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.dropout(x) @ self.down.T @ self.up.T * self.scale


def _adapted(model: nn.Module, rank: int) -> nn.Module:
    for name, child in list(model.named_children()):
        if isinstance(child, nn.Linear):
            setattr(model, name, _LowRank(child, rank, dropout=0.1))
        else:
            _adapted(child, rank)
    return model


def low_rank_updates_of_a_whole_model(device: str) -> Any:
    model = nn.Sequential(nn.Linear(6, 8, device=device), nn.Sequential(nn.SiLU(), nn.Linear(8, 4, device=device)))
    _adapted(model, 2)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.05, fused=device == "cuda")
    for _ in range(3):
        loss = model(torch.randn(5, 6, device=device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    share = sum(p.numel() for p in trained) / sum(p.numel() for p in model.parameters())
    merged = model[0].base.weight + model[0].up @ model[0].down * model[0].scale  # type: ignore[index, union-attr, operator]
    return share, merged.shape, [p.shape for p in trained]


def adapters_chosen_row_by_row(device: str) -> Any:
    downs, ups = torch.randn(3, 2, 6, device=device), torch.randn(3, 6, 2, device=device)
    x, which = torch.randn(5, 6, device=device), torch.randint(0, 3, (5,), device=device)
    hidden = torch.bmm(downs[which], x[:, :, None])
    return x + torch.bmm(ups[which], hidden)[..., 0]


def adapters_chosen_group_by_group(device: str) -> Any:
    downs, ups = torch.randn(3, 2, 6, device=device), torch.randn(3, 6, 2, device=device)
    x, which = torch.randn(5, 6, device=device), torch.randint(0, 3, (5,), device=device)
    made = x.clone()
    for number in which.unique().tolist():  # waits
        rows = (which == number).nonzero(as_tuple=True)[0]  # waits
        made[rows] += x[rows] @ downs[number].T @ ups[number].T
    return made


def rank_chosen_by_its_energy(device: str) -> Any:
    weight = torch.randn(6, 3, device=device) @ torch.randn(3, 5, device=device)
    u, s, v = torch.linalg.svd(weight, full_matrices=False)  # waits
    energy = s.square().cumsum(0) / s.square().sum()
    rank = int((energy < 0.99).sum()) + 1  # waits
    return rank <= 3, u[:, :rank] * s[:rank] @ v[:rank]


def soft_prompt_in_front_of_frozen_words(device: str) -> Any:
    table, head = nn.Embedding(10, 4, device=device).requires_grad_(False), nn.Linear(4, 10, device=device)
    prompt = nn.Parameter(torch.randn(3, 4, device=device) * 0.1)
    ids = torch.randint(0, 10, (2, 5), device=device)
    x = torch.cat([prompt.expand(2, -1, -1), table(ids)], 1)
    mask = torch.ones(8, 8, dtype=torch.bool, device=device).tril()
    seen = F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
    labels = torch.full((2, 8), -100, device=device)
    labels[:, 3:-1] = ids[:, 1:].clone()[:, :4]
    F.cross_entropy(head(seen).flatten(0, 1), labels.flatten(), ignore_index=-100).backward()
    return prompt.grad


def experts_that_choose_their_tokens(device: str) -> Any:
    x, router = torch.randn(2, 8, 4, device=device), nn.Linear(4, 3, bias=False, device=device)
    up, down = torch.randn(3, 4, 6, device=device), torch.randn(3, 6, 4, device=device)
    flat = x.flatten(0, 1)
    share, token = router(flat).softmax(-1).T.topk(5, dim=1)
    hidden = torch.einsum("ecd,edf->ecf", flat[token], up).relu()
    made = torch.einsum("ecf,efd,ec->ecd", hidden, down, share)
    return torch.zeros_like(flat).index_add(0, token.flatten(), made.flatten(0, 1)).view_as(x)


def experts_asked_only_if_somebody_comes(device: str) -> Any:
    x, router = torch.randn(10, 4, device=device, requires_grad=True), nn.Linear(4, 3, device=device)
    experts, made = nn.ModuleList(nn.Linear(4, 4, device=device) for _ in range(3)), torch.zeros(10, 4, device=device)
    gate, chosen = router(x).softmax(-1).max(-1)
    for number, expert in enumerate(experts):
        mine = chosen == number
        if not mine.any():  # waits
            continue
        made[mine] = expert(x[mine]) * gate[mine, None]  # waits
    made.square().sum().backward()  # waits
    return x.grad


def load_of_experts_balanced_without_a_loss(device: str) -> Any:
    router, bias = nn.Linear(4, 5, bias=False, device=device), torch.zeros(5, device=device)
    for _ in range(3):
        scores = router(torch.randn(20, 4, device=device)).sigmoid()
        chosen = (scores + bias).topk(2, dim=-1).indices
        weights = scores.gather(1, chosen)
        weights = weights / weights.sum(-1, keepdim=True)
        load = torch.zeros(5, device=device).scatter_add_(0, chosen.flatten(), torch.ones(40, device=device))
        bias += 0.01 * (load.mean() - load).sign()
    return bias, weights


def supervised_contrast_with_masks(device: str) -> Any:
    views = F.normalize(torch.randn(6, 2, 4, device=device), dim=-1).requires_grad_()
    labels = torch.tensor([0, 1, 0, 2, 1, 0]).to(device)  # waits
    flat, double = views.transpose(0, 1).flatten(0, 1), labels.repeat(2)
    logits = flat @ flat.T / 0.1
    logits = logits - logits.detach().amax(1, keepdim=True)
    same = double[:, None].eq(double).float()
    others = torch.ones_like(same).scatter(1, torch.arange(12, device=device)[:, None], 0.0)
    same = same * others
    chance = logits - (logits.exp() * others).sum(1, keepdim=True).log()
    loss = -((same * chance).sum(1) / same.sum(1)).mean()
    loss.backward()
    return loss, views.grad


def pairs_mined_by_difficulty(device: str) -> Any:
    points = F.normalize(torch.randn(8, 4, device=device), dim=-1).requires_grad_()
    labels = torch.arange(8, device=device) // 2
    near, same = points @ points.T, labels[:, None] == labels
    losses = []
    for row in range(8):
        friends = near[row][same[row]]  # waits
        strangers = near[row][~same[row]]  # waits
        hard = strangers[strangers + 0.1 > friends.min()]  # waits
        if len(hard) > 0:
            losses.append(F.softplus(hard * 4).mean())
    torch.stack(losses).mean().backward()  # waits
    return points.grad


def sigmoid_loss_of_pictures_and_texts(device: str) -> Any:
    left, right = (F.normalize(torch.randn(5, 4, device=device), dim=-1) for _ in range(2))
    scale, bias = (torch.full((), value, device=device, requires_grad=True) for value in (2.3, -10.0))
    logits = left @ right.T * scale.exp() + bias
    signs = 2 * torch.eye(5, device=device) - 1
    (-F.logsigmoid(signs * logits).sum() / 5).backward()
    with torch.no_grad():
        scale.clamp_(0, math.log(100))
    return scale.grad, bias.grad


class _Sparse(nn.Module):
    """A mask over a weight, changed while training."""

    def __init__(self, shape: tuple[int, int], kept: float, device: str) -> None:
        super().__init__()
        self.kept = int(kept * shape[0] * shape[1])
        places = torch.rand(shape, device=device).flatten().topk(self.kept).indices
        self.register_buffer("mask", torch.zeros(shape, device=device).flatten().index_fill(0, places, 1.0).view(shape))
        self.mask: torch.Tensor

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * self.mask

    @torch.no_grad()
    def regrow(self, weight: torch.Tensor, gradient: torch.Tensor, share: float) -> None:
        moved = int(share * self.kept)
        lost = torch.where(self.mask > 0, -weight.abs(), -float("inf")).flatten().topk(moved).indices
        won = torch.where(self.mask > 0, -float("inf"), gradient.abs()).flatten().topk(moved).indices
        self.mask.view(-1).index_fill_(0, lost, 0.0).index_fill_(0, won, 1.0)


def connections_dropped_and_regrown(device: str) -> Any:
    layer, sparse = nn.Linear(6, 5, device=device), _Sparse((5, 6), 0.4, device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for step in range(4):
        weight = sparse(layer.weight)
        weight.retain_grad()
        loss = F.linear(torch.randn(8, 6, device=device), weight, layer.bias).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 2:
            sparse.regrow(layer.weight, weight.grad, 0.3)
    return sparse.mask.sum(), layer.weight.shape


def magnitudes_cut_with_numbers_written_in(device: str) -> Any:
    weight = torch.randn(4, 6, device=device)
    mask, order = torch.ones_like(weight), weight.abs().flatten().argsort()
    mask.view(-1)[order[:8]] = 0  # waits
    mask[0, 0] = 1  # waits
    mask[:, -1] = 1
    mask[weight.abs() > 2] = 1
    kept = 1 - mask.mean().item()  # waits
    return mask, kept


class _Rounded(torch.autograd.Function):
    """Values of a grid; gradients pass inside of it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor, bits: int) -> torch.Tensor:
        most = 2 ** (bits - 1) - 1
        level = x / scale
        ctx.save_for_backward(level.abs() <= most)
        return level.round().clamp(-most - 1, most) * scale

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        (inside,) = ctx.saved_tensors
        return grad * inside, None, None


class _QuantisedLinear(nn.Linear):
    def __init__(self, *sizes: int, device: str) -> None:
        super().__init__(*sizes, device=device)
        self.register_buffer("greatest", torch.zeros((), device=device))
        self.greatest: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.greatest.lerp_(x.abs().max(), 0.1)
        x = _Rounded.apply(x, self.greatest.clamp(min=1e-5) / 127, 8)  # type: ignore[no-untyped-call]
        scale = self.weight.detach().abs().amax(1, keepdim=True) / 7
        return F.linear(x, _Rounded.apply(self.weight, scale, 4), self.bias)  # type: ignore[no-untyped-call]


def quantised_while_it_trains(device: str) -> Any:
    model = nn.Sequential(_QuantisedLinear(6, 8, device=device), nn.ReLU(), _QuantisedLinear(8, 2, device=device))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
    for _ in range(3):
        F.cross_entropy(model(torch.randn(5, 6, device=device)), torch.randint(0, 2, (5,), device=device)).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    scales = [round(part.greatest.item() / 127, 5) for part in model if hasattr(part, "greatest")]  # waits
    return len(scales), model(torch.ones(2, 6, device=device)).shape


def grid_of_torch_with_its_own_numbers(device: str) -> Any:
    x = torch.randn(4, 6, device=device, requires_grad=True)
    scale, zero = torch.full((1,), 0.1, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    by_tensors = torch.fake_quantize_per_tensor_affine(x, scale, zero, -128, 127)
    by_numbers = torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127)
    (by_tensors + by_numbers).sum().backward()
    return by_tensors, by_numbers, x.grad


class _Orthogonal(nn.Module):
    """Cayley's map: a skew matrix becomes a rotation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skew = x.triu(1) - x.triu(1).T
        one = torch.eye(len(x), device=x.device)
        return torch.linalg.solve(one + skew, one - skew)  # waits


def rotation_learned_through_a_solver(device: str) -> Any:
    layer = nn.Linear(3, 3, bias=False, device=device)
    parametrize.register_parametrization(layer, "weight", _Orthogonal(), unsafe=True)
    with parametrize.cached():
        out = layer(torch.randn(4, 3, device=device))
        out.square().sum().backward()
        return layer.weight @ layer.weight.T


def gradients_row_by_row_clipped(device: str) -> Any:
    model = nn.Sequential(nn.Linear(4, 3, device=device), nn.Tanh(), nn.Linear(3, 2, device=device))
    weights, x = dict(model.named_parameters()), torch.randn(6, 4, device=device)
    y = torch.randint(0, 2, (6,), device=device)

    def loss(given: dict[str, torch.Tensor], row: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        out = torch.func.functional_call(model, given, (row[None],))
        return F.cross_entropy(out, label[None])

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0), randomness="different")
    grads = each({name: value.detach() for name, value in weights.items()}, x, y)
    norms = torch.linalg.vector_norm(torch.cat([g.flatten(1) for g in grads.values()], 1), dim=1)
    factor = (1.0 / norms.clamp(min=1.0))[:, None]
    clipped = {name: (g.flatten(1) * factor).mean(0).view_as(weights[name]) for name, g in grads.items()}
    cut = (norms > 1.0).float().mean()
    return clipped, f"{cut:.1f}"  # waits


def hooks_that_steer_a_layer(device: str) -> Any:
    model, seen = nn.Sequential(nn.Linear(4, 4, device=device), nn.GELU(), nn.Linear(4, 2, device=device)), []
    direction = F.normalize(torch.randn(4, device=device), dim=0)

    def steer(strength: float) -> Callable[..., torch.Tensor]:
        def hook(_module: nn.Module, _given: Any, made: torch.Tensor) -> torch.Tensor:
            along = made @ direction
            seen.append(along.mean())
            return made - strength * along[:, None] * direction

        return hook

    handles = [part.register_forward_hook(steer(0.5)) for part in model if isinstance(part, nn.GELU)]
    made = model(torch.randn(3, 4, device=device))
    for handle in handles:
        handle.remove()
    return made, torch.stack(seen).numpy(force=True)  # waits
