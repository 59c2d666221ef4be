"""Draws, spectra, linear algebra, selections, what Python sees, quantisation, streams and graphs."""
# ruff: noqa: E501 - tables of calls, as their users write them

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def draws_by_generators(device):
    made = torch.Generator(device=device).manual_seed(3)
    found = [
        torch.rand(3, generator=made, device=device), torch.randn(2, generator=made, device=device),
        torch.randint(0, 9, (4,), generator=made, device=device), torch.randperm(5, generator=made, device=device),
        torch.empty(3, device=device).exponential_(generator=made), torch.bernoulli(torch.full((4,), 0.5, device=device), generator=made),
        torch.multinomial(torch.ones(4, device=device), 2, generator=made), torch.normal(0.0, 1.0, (2,), generator=made, device=device),
        torch.empty(2, device=device).uniform_(0, 2, generator=made), torch.empty(2, device=device).random_(0, 5, generator=made),
    ]  # fmt: skip
    state = made.get_state()
    again = torch.rand(2, generator=made, device=device)
    made.set_state(state)
    return found, again, torch.rand(2, generator=made, device=device), made.initial_seed(), made.device.type


def draws_forked(device):
    cards = [0] if device == "cuda" else []
    with torch.random.fork_rng(devices=cards):
        torch.manual_seed(7)
        inside = torch.rand(2, device=device)
    return inside, torch.rand(2, device=device)


def seeds_of_the_device(device):
    torch.cuda.manual_seed_all(5)
    torch.manual_seed(5)
    state = torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()
    first = torch.rand(3, device=device)
    if device == "cuda":
        torch.cuda.set_rng_state(state)
    else:
        torch.set_rng_state(state)
    return first, torch.rand(3, device=device)


def spectra(device):
    x = torch.randn(4, 8).to(device).requires_grad_()
    y = torch.fft.rfft(x)
    torch.fft.irfft(y * y.abs(), n=8).sum().backward()
    z = torch.fft.fft2(x.detach())
    window = torch.hann_window(4, device=device)
    short = torch.stft(x.detach(), 4, 2, window=window, return_complex=True)
    return (
        y, x.grad, torch.fft.ifft2(z), torch.fft.fftshift(z), torch.fft.fftfreq(8, device=device), torch.fft.hfft(y), torch.fft.fftn(x),
        short, torch.istft(short, 4, 2, window=window, length=8), torch.angle(z), z.conj() @ z.mT, torch.view_as_real(z), z.real, z.imag.abs(),
    )  # fmt: skip


def complex_numbers(device):
    x = torch.randn(3, dtype=torch.complex64).to(device).requires_grad_()
    y = (x.conj() * x).real.sum() + x.imag.square().sum()
    y.backward()
    turned = torch.polar(torch.ones(3, device=device), torch.arange(3.0, device=device))
    pairs = torch.view_as_complex(torch.randn(3, 2).to(device))
    return (
        y,
        x.grad,
        turned * pairs,
        torch.view_as_real(turned * pairs),
        x.detach().numpy(force=True),
        x.detach().tolist(),
    )


def rotary_positions(device):
    q = torch.randn(1, 5, 2, 8).to(device)
    angles = torch.outer(torch.arange(5, device=device), 1.0 / 10000 ** (torch.arange(0, 8, 2, device=device) / 8))
    turn = torch.polar(torch.ones_like(angles), angles)
    out = torch.view_as_real(torch.view_as_complex(q.float().reshape(1, 5, 2, 4, 2)) * turn[:, None]).flatten(3)
    return out.type_as(q)


def linear_algebra(device):
    a = torch.randn(3, 3).to(device)
    s = a @ a.mT + torch.eye(3, device=device)
    b = torch.randn(3, 2).to(device)
    q, r = torch.linalg.qr(a)
    values, _ = torch.linalg.eigh(s)
    return (
        torch.linalg.inv(s), torch.linalg.solve(s, b), torch.linalg.cholesky(s), q @ r, values, torch.linalg.svdvals(a), torch.linalg.det(a),
        torch.linalg.pinv(a), torch.linalg.matrix_rank(a), torch.linalg.lstsq(a, b).solution, torch.linalg.matrix_exp(a), torch.linalg.cond(a),
        torch.linalg.slogdet(s), torch.linalg.norm(a, "nuc"), torch.linalg.eigvals(s).real.sort().values, torch.lu_solve(b, *torch.linalg.lu_factor(s)),
        torch.cholesky_inverse(torch.linalg.cholesky(s)), torch.triangular_solve(b, s.tril())[0], torch.linalg.multi_dot([a, s, b]),
        torch.linalg.householder_product(*torch.geqrf(a)), torch.trapezoid(a), torch.cov(a), torch.corrcoef(a), torch.linalg.cross(a, s),
    )  # fmt: skip


def singular_matrix_raises(device):
    torch.linalg.inv(torch.zeros(2, 2, device=device))


def not_positive_raises(device):
    torch.linalg.cholesky(-torch.eye(2, device=device))


def selections(device):
    x = torch.randn(4, 5).to(device)
    mask = x > 0
    x2 = x.clone()
    x2[mask] = 0.0
    x2[0, [1, 2]] = torch.tensor([1.0, 2.0], device=device)
    x2[..., None, 1:3] += 1
    x2[1] = 7
    x2[torch.tensor([2, 3], device=device), torch.tensor([0, 0], device=device)] -= 1
    return (
        x[mask], torch.nonzero(mask), torch.where(mask), x.masked_select(mask), x[x[:, 0] > 0], x2, x.argsort(1), torch.topk(x, 2), x.unique(),
        torch.unique(mask.int(), return_counts=True, return_inverse=True), x.sum(0)[2], x[[0, 2]], x[:, None, ::2], torch.take_along_dim(x, x.argmax(1, True), 1),
        torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0], device=device)), torch.searchsorted(x.sort().values, x), torch.histc(x, 4, -2, 2), x.kthvalue(2),
        torch.combinations(torch.arange(4, device=device)), torch.cartesian_prod(x[0], x[1]), torch.tril_indices(3, 3, device=device), x.diagonal(), x.msort(),
        torch.isin(torch.arange(4, device=device), torch.tensor([1, 2], device=device)), torch.block_diag(x, x), x.flip(0).roll(1, 1).rot90(), torch.einsum("ij,kj->ik", x, x),
        torch.repeat_interleave(x, torch.tensor([1, 0, 2, 1], device=device), dim=0), x.unfold(1, 2, 1), torch.bincount(torch.tensor([1, 1, 3], device=device)), x.median(), x.mode(),
        torch.histogram(x.cpu(), 3)[0], x.quantile(0.3), x.nanmedian(), x.cummax(1), x.logcumsumexp(1), x.renorm(2, 0, 1.0), x.diff(), torch.vander(x[0]), x.nansum(),
    )  # fmt: skip


def python_sees_tensors(device):
    x = torch.tensor([1.5, 2.5, 0.0], device=device)
    text = f"{x.sum():.2f} {x[0]} {x.max().item():5.1f}"
    return (
        text, float(x[0]), int(x[1]), bool(x[2]), list(map(float, x)), [v.item() for v in x], x.tolist(), x.cpu().numpy().tolist(), len(x), 1.5 in x, repr(x)[:10],
        sum(x), max(x), x.dim(), x.shape, x.numel(), x.element_size(), x.stride(), x.is_contiguous(), str(x.dtype), x.nelement(), x.storage_offset(), round(float(x.std()), 3),
        sorted(x.tolist()), {int(x[1]): 1}, range(int(x[1])), [1, 2, 3][x[0].long()], x.equal(x), torch.allclose(x, x), divmod(7, int(x[1])),
        torch.is_tensor(x), x.is_floating_point(), hash(x) == hash(x), x.T.shape, x.new_zeros(2), x.new_tensor([1]), torch.result_type(x, 1), x.type(torch.int32), x.__len__(),
    )  # fmt: skip


def numpy_and_back(device):
    import numpy as np

    x = torch.from_numpy(np.arange(6, dtype=np.float32).reshape(2, 3)).to(device)
    y = torch.as_tensor(np.ones(3), device=device)
    return (
        np.asarray(x.cpu()) @ y.cpu().numpy().astype(np.float32),
        torch.tensor(np.float64(2.0), device=device),
        x[np.array([1, 0])],
        x * np.float32(2),
    )


def numpy_of_a_device_raises(device):
    x = torch.ones(2).to(device).requires_grad_()
    return x.numpy()


def fake_quantised(device):
    from torch.ao.quantization import (
        FakeQuantize,
        MinMaxObserver,
        MovingAverageMinMaxObserver,
        PerChannelMinMaxObserver,
    )

    x = torch.randn(3, 4).to(device).requires_grad_()
    found = []
    for observer, options in (
        (MinMaxObserver, {}), (MovingAverageMinMaxObserver, {}),
        (PerChannelMinMaxObserver, {"ch_axis": 0, "dtype": torch.qint8, "quant_min": -128, "quant_max": 127, "qscheme": torch.per_channel_symmetric}),
    ):  # fmt: skip
        fake = FakeQuantize(observer=observer, **options).to(device)
        out = fake(x)
        out.sum().backward()
        found += [out, fake.scale]
    return found, x.grad


def quantisation_aware_training(device):
    from torch.ao.quantization import get_default_qat_qconfig, prepare_qat

    model = (
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2))
        .to(device)
        .train()
    )
    model.qconfig = get_default_qat_qconfig("fbgemm")
    ready = prepare_qat(model)
    optimizer = torch.optim.SGD(ready.parameters(), lr=0.1)
    for _ in range(2):
        ready(torch.randn(2, 1, 4, 4).to(device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(ready.parameters())


def quantised_tensors(device):
    x = torch.quantize_per_tensor(torch.randn(4).to(device), 0.1, 0, torch.qint8)
    return x.dequantize(), x.int_repr(), x.q_scale()


def quantised_by_hand(device):
    w = torch.randn(4, 8).to(device)
    scale = w.abs().amax(1, keepdim=True) / 127
    q = (w / scale).round().clamp(-128, 127).to(torch.int8)
    packed = (q[:, ::2].to(torch.uint8) & 15) | ((q[:, 1::2].to(torch.uint8) & 15) << 4)
    f8 = w.to(torch.float8_e4m3fn)
    x = torch.randn(2, 8).to(device)
    return x @ (q.float() * scale).t(), packed.int(), f8.float()


def dynamic_quantisation(device):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).to(device)
    made = torch.ao.quantization.quantize_dynamic(model.cpu(), {nn.Linear}, dtype=torch.qint8)
    return made(torch.ones(1, 4)).shape


def streams_and_events(device):
    if device == "cpu":
        a = torch.ones(4) * 2
        return a, a + 1, True, True
    side = torch.cuda.Stream(priority=-1)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True, blocking=True)
    start.record()
    a = torch.ones(4, device=device) * 2
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        b = a + 1
        b.record_stream(side)
        end.record(side)
    torch.cuda.current_stream().wait_event(end)
    end.synchronize()
    took = start.elapsed_time(end)
    torch.cuda.current_stream().synchronize()
    return a, b, took >= 0, end.query()


def graphs(device):
    static = torch.zeros(3, device=device)
    model = nn.Linear(3, 2).to(device)
    if device == "cpu":
        return [model(torch.full((3,), float(i))) for i in range(3)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        for _ in range(3):
            model(static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        out = model(static)
    found = []
    for i in range(3):
        static.copy_(torch.full((3,), float(i), device=device))
        graph.replay()
        found.append(out.clone())
    return found


def graph_of_a_training_step(device):
    model = nn.Linear(4, 2).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.zeros(3, 4, device=device), torch.zeros(3, 2, device=device)
    data = [(torch.randn(3, 4).to(device), torch.randn(3, 2).to(device)) for _ in range(3)]

    def step():
        optimizer.zero_grad(set_to_none=False)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        kept = [p.detach().clone() for p in model.parameters()]
        with torch.cuda.graph(graph):
            loss = step()
        with torch.no_grad():
            for p, k in zip(model.parameters(), kept):
                p.copy_(k)
    losses = []
    for a, b in data:
        x.copy_(a)
        y.copy_(b)
        if device == "cuda":
            graph.replay()
        else:
            loss = step()
        losses.append(loss.item())
    return losses, list(model.parameters())


def graphed_callables(device):
    model = nn.Linear(4, 2).to(device)
    if device == "cuda":
        model = torch.cuda.make_graphed_callables(model, (torch.randn(3, 4, device=device),))
    torch.manual_seed(1)
    x = torch.randn(3, 4, device=device)
    model(x).sum().backward()
    return [p.grad for p in model.parameters()]


def pinned_rings(device):
    ring = [torch.zeros(4, pin_memory=device == "cuda") for _ in range(2)]
    events = [torch.cuda.Event() if device == "cuda" else None for _ in range(2)]
    found = []
    for step in range(4):
        slot, event = ring[step % 2], events[step % 2]
        if event is not None and step > 1:
            event.synchronize()
        slot.fill_(step)
        found.append(slot.to(device, non_blocking=True) * 2)
        if event is not None:
            event.record()
    return found, ring[0].is_pinned() == (device == "cuda")
