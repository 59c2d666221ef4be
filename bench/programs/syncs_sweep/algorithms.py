"""What is trained, and by which rule: gradients of gradients, own functions, weights, agents, preferences."""

from __future__ import annotations

import copy
import io

import torch
import torch.nn.functional as F
from torch import nn

from bench.programs.syncs_sweep.training import _batch, _net, _steps


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
