"""Corners of torch: transforms of functions, sparse and nested tensors, distributions, Fourier, quantisation, streams, processes."""
# ruff: noqa: ARG001, E501, SLF001 - tables of calls, as their users write them

from __future__ import annotations

import contextlib
import functools
import os
import queue
import socket
import tempfile
import threading

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, linearize, stack_module_state, vjp, vmap


def per_sample_gradients(device):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(device)
    params = {key: value.detach() for key, value in model.named_parameters()}

    def loss(params, x, y):
        return F.cross_entropy(functional_call(model, params, (x[None],)), y[None])

    x, y = torch.randn(5, 3).to(device), torch.randint(0, 2, (5,)).to(device)
    return vmap(grad(loss), in_dims=(None, 0, 0))(params, x, y)


def ensembles(device):
    models = [nn.Linear(3, 2).to(device) for _ in range(3)]
    params, buffers = stack_module_state(models)
    base = nn.Linear(3, 2).to("meta")
    x = torch.randn(4, 3).to(device)
    return vmap(lambda p, b, t: functional_call(base, (p, b), (t,)), in_dims=(0, 0, None))(params, buffers, x)


def derivatives(device):
    x = torch.randn(3).to(device)

    def f(t):
        return torch.sin(t) * t.sum()

    out, back = vjp(f, x)
    _, linear = linearize(f, x)
    return (
        jacrev(f)(x), jacfwd(f)(x), hessian(lambda t: f(t).sum())(x), jvp(f, (x,), (x,)), back(out), linear(x),
        vmap(jacrev(f))(torch.randn(2, 3).to(device)),
    )  # fmt: skip


def old_functional_derivatives(device):
    from torch.autograd import functional

    x = torch.randn(3).to(device)
    f = lambda t: (t**3).sum()  # noqa: E731
    return (
        functional.jacobian(lambda t: t.exp(), x), functional.hessian(f, x), functional.vhp(f, x, x), functional.hvp(f, x, x),
        functional.jvp(f, x, x), functional.jacobian(lambda t: t.exp(), x, vectorize=True),
    )  # fmt: skip


def forward_mode(device):
    import torch.autograd.forward_ad as fwd

    with fwd.dual_level():
        x = fwd.make_dual(torch.randn(3).to(device), torch.ones(3, device=device))
        made = fwd.unpack_dual(torch.nn.Linear(3, 2).to(device)(x.sin()))
        return made.primal, made.tangent


def mapped_randomness(device):
    x = torch.randn(4, 3).to(device)
    same = vmap(lambda t: F.dropout(t, 0.5), randomness="same")(x)
    return vmap(lambda a, b: a @ b, in_dims=(0, None))(x, x[0]), same.shape, vmap(torch.sum, in_dims=1, chunk_size=2)(x)


def mapped_reads_raise(device):
    return vmap(lambda t: t * t.sum().item())(torch.ones(2, 3).to(device))


def functionalised(device):
    def f(x):
        y = x.clone()
        y.add_(1)
        y[0].mul_(3)
        return y

    return torch.func.functionalize(f)(torch.ones(2, 2).to(device))


def traced_operations(device):
    from torch.fx.experimental.proxy_tensor import make_fx

    x = torch.randn(3).to(device)
    graph = make_fx(lambda t: torch.relu(t).sum())(x)
    return graph(x), [str(node.target) for node in graph.graph.nodes]


def counted_operations(device):
    from torch.utils.flop_counter import FlopCounterMode

    model = nn.Linear(8, 4).to(device)
    with FlopCounterMode(display=False) as counter:
        model(torch.randn(2, 8).to(device)).sum().backward()
    return counter.get_total_flops()


def own_modes(device):
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    class Calls(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    with Names(), Calls():
        y = (torch.ones(3, device=device) * 2).sum()
    return y, "mul" in seen


def own_tensor_class(device):
    class Named(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            made = super().__torch_function__(func, types, args, kwargs or {})
            return made

    x = torch.randn(3).to(device).as_subclass(Named)
    return type(x + 1).__name__, (x + 1).sum(), type(x.cpu()).__name__


def wrapped_tensor_class(device):
    class Scaled(torch.Tensor):
        @staticmethod
        def __new__(cls, values, scale):
            made = torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32, device=values.device)
            made.values_, made.scale_ = values, scale
            return made

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            plain = [a.values_.float() * a.scale_ if isinstance(a, Scaled) else a for a in args]
            return func(*plain, **(kwargs or {}))

    x = Scaled(torch.ones(2, 2, dtype=torch.int8, device=device), torch.tensor(0.5, device=device))
    return x @ torch.ones(2, 2, device=device), x.device.type


def coordinates(device):
    index = torch.tensor([[0, 1, 1], [2, 0, 2]])
    x = torch.sparse_coo_tensor(index, torch.tensor([3.0, 4.0, 5.0]), (2, 3)).to(device)
    dense = torch.randn(3, 2).to(device)
    y = torch.sparse_coo_tensor(index.to(device), torch.ones(3, device=device), (2, 3)).requires_grad_()
    torch.sparse.mm(y, dense).sum().backward()
    return (
        x.to_dense(), torch.sparse.mm(x, dense), x.coalesce().indices(), x.coalesce().values(), (x + x).to_dense(), x.t().to_dense(),
        torch.sparse.sum(x, dim=0).to_dense(), x._nnz(), y.grad.to_dense(), (x * 2).to_dense(), torch.sparse.softmax(x, 1).to_dense(),
        x.is_coalesced(), x.sparse_dim(), x.to_dense().to_sparse().to_dense(), str(x.layout),
    )  # fmt: skip


def compressed_rows(device):
    x = torch.tensor([[0.0, 1.0], [2.0, 0.0]]).to(device)
    found = []
    for layout in (torch.sparse_csr, torch.sparse_csc):
        rows = x.to_sparse(layout=layout)
        found += [rows.to_dense(), rows.values(), rows @ torch.ones(2, 2, device=device), str(rows.layout)]
    blocks = torch.eye(4).to(device).to_sparse_bsr((2, 2))
    made = torch.sparse_csr_tensor([0, 1, 2], [1, 0], [1.0, 2.0], device=device)
    return found, blocks.to_dense(), made.to_dense(), made.crow_indices(), (made @ x)


def semi_structured(device):
    x = torch.tensor([0.0, 0.0, 1.0, 1.0]).tile((16, 4)).to(device)
    return (x != 0).sum(1)


def message_passing(device):
    edges = torch.tensor([[0, 1, 2, 2], [1, 2, 0, 1]]).to(device)
    x = torch.randn(3, 4).to(device).requires_grad_()
    out = torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])
    degree = torch.zeros(3, device=device).scatter_add_(0, edges[1], torch.ones(4, device=device))
    most = torch.full((3, 4), -1e9, device=device).scatter_reduce(
        0, edges[1][:, None].expand(-1, 4), x[edges[0]], "amax", include_self=True
    )
    chance = torch.segment_reduce(x[:, 0].detach(), "mean", lengths=torch.tensor([1, 2], device=device))
    (out / degree.clamp(min=1)[:, None]).sum().backward()
    return out, degree, most, x.grad, chance


def jagged(device):
    parts = [torch.randn(n, 4).to(device) for n in (2, 3)]
    x = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    y = F.relu(x * 2)
    out = y.to_padded_tensor(0.0)
    out.sum().backward()
    return out, [part for part in x.grad.unbind()], x.offsets()


def jagged_from_values(device):
    values = torch.randn(5, 4).to(device)
    x = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 2, 5], device=device))
    q = x.unflatten(-1, (2, 2)).transpose(1, 2)
    return (
        x.values(),
        F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(-2).values(),
        F.layer_norm(x, (4,)).values(),
    )


def nested_strided(device):
    x = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], device=device)
    return x.to_padded_tensor(0.0), [part.shape[0] for part in x.unbind()]


def _parameters_of(kind, device):
    t = functools.partial(torch.tensor, device=device)
    return {
        "Bernoulli": (t([0.2, 0.7]),), "Beta": (t([1.0, 2.0]), t([2.0, 1.0])), "Binomial": (5, t([0.2, 0.7])),
        "Categorical": (t([[0.2, 0.8], [0.5, 0.5]]),), "Cauchy": (t([0.0]), t([1.0])), "Chi2": (t([2.0]),),
        "ContinuousBernoulli": (t([0.3]),), "Dirichlet": (t([1.0, 2.0, 3.0]),), "Exponential": (t([1.0]),),
        "FisherSnedecor": (t([3.0]), t([4.0])), "Gamma": (t([1.0, 2.0]), t([1.0, 1.0])), "Geometric": (t([0.4]),),
        "GeneralizedPareto": (t([0.0]), t([1.0]), t([0.1])), "Gumbel": (t([0.0]), t([1.0])), "HalfCauchy": (t([1.0]),),
        "HalfNormal": (t([1.0]),), "InverseGamma": (t([2.0]), t([1.0])), "Kumaraswamy": (t([1.0]), t([2.0])),
        "LKJCholesky": (3, t(1.0)), "Laplace": (t([0.0]), t([1.0])), "LogNormal": (t([0.0]), t([1.0])),
        "LogisticNormal": (t([0.0, 1.0]), t([1.0, 1.0])), "Multinomial": (4, t([0.3, 0.7])),
        "MultivariateNormal": (t([0.0, 1.0]), torch.eye(2, device=device)), "NegativeBinomial": (t(3.0), t([0.4])),
        "Normal": (t([0.0, 1.0]), t([1.0, 2.0])), "OneHotCategorical": (t([0.2, 0.8]),), "Pareto": (t([1.0]), t([2.0])),
        "OneHotCategoricalStraightThrough": (t([0.2, 0.8]),), "Poisson": (t([3.0]),), "RelaxedBernoulli": (t([0.5]), t([0.4])),
        "LowRankMultivariateNormal": (t([0.0, 1.0]), torch.ones(2, 1, device=device), torch.ones(2, device=device)),
        "RelaxedOneHotCategorical": (t([0.5]), t([0.2, 0.8])), "StudentT": (t([3.0]),), "Uniform": (t([0.0]), t([1.0])),
        "VonMises": (t([0.0]), t([1.0])), "Weibull": (t([1.0]), t([2.0])), "Wishart": (t([3.0]), torch.eye(2, device=device)),
    }.get(kind)  # fmt: skip


def each_distribution():
    for name in torch.distributions.__all__:
        if _parameters_of(name, "cpu") is not None:
            yield name, functools.partial(_drawn, name)


def _drawn(name, device):
    made = getattr(torch.distributions, name)(*_parameters_of(name, device))
    sample = made.sample((3,))
    found = [sample, made.log_prob(sample)]
    for part in ("mean", "variance", "mode"):
        with contextlib.suppress(NotImplementedError):
            found.append(getattr(made, part))
    with contextlib.suppress(NotImplementedError):
        found.append(made.entropy())
    if made.has_rsample:
        found.append(made.rsample())
    return (
        found,
        made.batch_shape,
        torch.distributions.kl_divergence(made, made) if name in ("Normal", "Gamma", "Beta") else 0,
    )


def mixtures_and_flows(device):
    d = torch.distributions
    weights = d.Categorical(torch.tensor([0.3, 0.7], device=device))
    parts = d.Independent(d.Normal(torch.randn(2, 3).to(device), torch.ones(2, 3, device=device)), 1)
    mixture = d.MixtureSameFamily(weights, parts)
    flow = d.TransformedDistribution(
        d.Normal(torch.zeros(3, device=device), 1.0), [d.AffineTransform(1.0, 2.0), d.TanhTransform(cache_size=1)]
    )
    x, y = mixture.sample((4,)), flow.rsample((2,))
    return x, mixture.log_prob(x), y, flow.log_prob(y), d.kl_divergence(parts, parts)


def distribution_that_refuses_raises(device):
    torch.distributions.Normal(torch.zeros(2, device=device), torch.tensor([1.0, -1.0], device=device))


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


def what_the_device_says(device):
    if device == "cuda":
        assert torch.cuda.is_available() and torch.cuda.device_count() >= 1
        torch.cuda.set_device(0)
        properties = torch.cuda.get_device_properties(0)
        assert properties.total_memory > 0 and torch.cuda.get_device_capability() >= (7, 0)
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.empty_cache()
        assert torch.cuda.max_memory_allocated() >= 0 and torch.cuda.memory_allocated("cuda:0") >= 0
        free, total = torch.cuda.mem_get_info()
        assert free <= total and isinstance(torch.cuda.memory_summary(), str)
        assert isinstance(torch.cuda.get_device_name(), str) and torch.cuda.is_bf16_supported()
        torch.backends.cudnn.benchmark = True
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.set_float32_matmul_precision("high")
        torch.cuda.synchronize()
    with torch.device(device):
        return torch.zeros(2), torch.backends.cuda.is_built() or True


def accelerators(device):
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    assert accelerator.type == device
    if device == "cuda":
        torch.accelerator.synchronize()
        torch.accelerator.set_device_index(0)
    return torch.ones(2, device=accelerator)


def attention_kernels(device):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (torch.randn(1, 2, 4, 8).to(device).requires_grad_() for _ in range(3))
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    mask = torch.ones(4, 4, dtype=torch.bool, device=device).tril()
    other = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    grouped = F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], enable_gqa=True)
    (out.sum() + grouped.sum()).backward()
    return out, other, grouped, q.grad


def flex_attention(device):
    from torch.nn.attention.flex_attention import create_block_mask
    from torch.nn.attention.flex_attention import flex_attention as flex

    q, k, v = (torch.randn(1, 2, 16, 8).to(device) for _ in range(3))
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 16, 16, device=device)
    return flex(q, k, v, score_mod=lambda s, b, h, i, j: s + (j - i) * 0.1), flex(q, k, v, block_mask=mask)


def profiled(device):
    from torch.profiler import ProfilerActivity, profile, record_function, schedule

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    model = nn.Linear(4, 2).to(device)
    seen = []
    with profile(
        activities=activities, schedule=schedule(wait=0, warmup=1, active=1), record_shapes=True, profile_memory=True,
        on_trace_ready=lambda p: seen.append(len(p.key_averages())),
    ) as found:  # fmt: skip
        for _ in range(2):
            with record_function("step"):
                out = model(torch.ones(1, 4, device=device))
            found.step()
    return out.shape, len(seen)


def ranges_for_a_profiler(device):
    if device == "cuda":
        torch.cuda.nvtx.range_push("step")
        torch.cuda.nvtx.mark("here")
        with torch.cuda.nvtx.range("inner"):
            x = torch.ones(2, device=device)
        torch.cuda.nvtx.range_pop()
        torch.cuda.profiler.start()
        torch.cuda.profiler.stop()
        torch.cuda.cudart().cudaProfilerStart()
        torch.cuda.memory._record_memory_history()
        torch.cuda.memory._snapshot()
        return x
    return torch.ones(2)


def benchmarked(device):
    from torch.utils import benchmark

    x = torch.ones(2, device=device)
    return benchmark.Timer("x + x", globals={"x": x}).timeit(3).median > 0


def threads(device):
    jobs, found = queue.Queue(), {}
    model = nn.Linear(3, 1).to(device)

    def work():
        while (item := jobs.get()) is not None:
            with torch.no_grad():
                found[item] = model(torch.full((3,), float(item), device=device)).item()

    workers = [threading.Thread(target=work) for _ in range(2)]
    for worker in workers:
        worker.start()
    for item in [*range(6), None, None]:
        jobs.put(item)
    for worker in workers:
        worker.join()
    return dict(sorted(found.items()))


def training_on_a_thread(device):
    from concurrent.futures import ThreadPoolExecutor

    def work():
        model = nn.Linear(3, 1).to(device)
        model(torch.ones(2, 3, device=device)).sum().backward()
        return model.weight.grad

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def modules_replicated(device):
    model = nn.DataParallel(nn.Linear(3, 2).to(device))
    return model(torch.ones(2, 3).to(device)), sorted(model.state_dict())


@contextlib.contextmanager
def _group(device):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
    }
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def data_parallel(device):
    from torch.nn.parallel import DistributedDataParallel

    with _group(device):
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)).to(device)
        model = DistributedDataParallel(
            model, device_ids=[0] if device == "cuda" else None, find_unused_parameters=True
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            with model.no_sync() if step == 0 else contextlib.nullcontext():
                model(torch.randn(4, 3).to(device)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()


def data_parallel_with_hooks(device):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.nn.parallel import DistributedDataParallel

    with _group(device):
        model = DistributedDataParallel(nn.Linear(3, 2).to(device), static_graph=True, gradient_as_bucket_view=True)
        model.register_comm_hook(None, default_hooks.bf16_compress_hook)
        model(torch.ones(4, 3, device=device)).sum().backward()
        return [p.grad for p in model.parameters()]


def synchronised_norms(device):
    with _group(device):
        model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2)))
        if device == "cpu":
            model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2))
            torch.manual_seed(0)
            nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2)))
        model = model.to(device)
        torch.manual_seed(2)
        for p in model.parameters():
            nn.init.constant_(p, 0.5)
        out = model(torch.randn(3, 1, 2, 2).to(device))
        out.square().sum().backward()
        return out


def fully_sharded(device):
    from torch.distributed.fsdp import FullyShardedDataParallel

    with _group(device):
        model = FullyShardedDataParallel(nn.Linear(4, 2).to(device), device_id=0 if device == "cuda" else None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = model(torch.ones(3, 4, device=device)).square().sum()
        loss.backward()
        norm = model.clip_grad_norm_(1.0)
        optimizer.step()
        return loss, norm


def fully_sharded_second(device):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with _group(device):
        mesh = init_device_mesh(device, (1,))
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).to(device)
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        loss = model(torch.ones(3, 4, device=device)).square().sum()
        loss.backward()
        optimizer.step()
        return loss, [p.full_tensor() for p in model.parameters()]


def sharded_tensors(device):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    with _group(device):
        mesh = init_device_mesh(device, (1,))
        x = distribute_tensor(torch.randn(4, 4).to(device), mesh, [Shard(0)])
        y = (x @ x.t()).redistribute(mesh, [Replicate()])
        return y.to_local(), y.full_tensor(), x.sum().full_tensor()


def collectives(device):
    with _group(device):
        x = torch.arange(4.0, device=device)
        dist.all_reduce(x)
        dist.broadcast(x, 0)
        parts = [torch.empty_like(x)]
        dist.all_gather(parts, x)
        whole = torch.empty(4, device=device)
        dist.all_gather_into_tensor(whole, x)
        work = dist.all_reduce(x, op=dist.ReduceOp.MAX, async_op=True)
        work.wait()
        dist.barrier()
        objects = [None]
        dist.all_gather_object(objects, {"a": 1})
        dist.reduce(x, 0)
        return x, parts, whole, objects, dist.get_world_size(), dist.get_rank()


def own_operation(device):
    @torch.library.custom_op("sweep::doubled", mutates_args=())
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    doubled.register_fake(torch.empty_like)
    doubled.register_autograd(lambda ctx, grad: grad * 2)
    x = torch.ones(3, device=device, requires_grad=True)
    doubled(x).sum().backward()
    return x.grad


def own_library(device):
    library = torch.library.Library("sweep_own", "FRAGMENT")
    library.define("tripled(Tensor x) -> Tensor")
    library.impl("tripled", lambda x: x * 3, "CompositeExplicitAutograd")
    return torch.ops.sweep_own.tripled(torch.ones(2, device=device))


def capsules(device):
    x = torch.arange(3.0, device=device)
    y = torch.from_dlpack(x)
    z = torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(x))
    return y, z, y.device.type


def storages(device):
    x = torch.arange(6.0, device=device)
    y = torch.empty(0, device=device)
    y.set_(x.untyped_storage() if device == "cpu" else x)
    z = torch.zeros(2, device=device).resize_(4).fill_(1)
    same = x.untyped_storage().data_ptr() == x[1:].untyped_storage().data_ptr()
    return y, z, same, x.as_strided((2, 2), (1, 2)), x.untyped_storage().nbytes(), x.view(torch.int32), x.data_ptr() % 4


def memory_formats(device):
    x = torch.randn(1, 2, 3, 3).to(device, memory_format=torch.channels_last)
    return (
        x.is_contiguous(memory_format=torch.channels_last),
        x.contiguous().stride(),
        nn.Conv2d(2, 2, 1).to(device, memory_format=torch.channels_last)(x),
    )


def inference(device):
    model = nn.Sequential(nn.Conv1d(2, 3, 1), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2)).to(device).eval()
    with torch.inference_mode():
        x = torch.randn(2, 2, 4).to(device)
        y = model(x)
        y[0] = 0
        return y, y.argmax(1).tolist(), y.is_inference(), y.softmax(-1).cpu()


def asserted(device):
    x = torch.ones(3, device=device)
    torch._assert_async(x.sum() > 0)
    torch.testing.assert_close(x, torch.ones(3, device=device))
    return torch._assert(x.shape[0] == 3, "three")


def assert_close_raises(device):
    torch.testing.assert_close(torch.ones(2, device=device), torch.zeros(2, device=device))


def control_flow(device):
    from torch._higher_order_ops import associative_scan, scan

    x = torch.arange(4.0, device=device)
    first = torch.cond(x.sum() > 3, lambda t: t * 2, lambda t: t - 1, (x,))
    _, ys = scan(lambda carry, v: (carry + v, carry * v), torch.zeros((), device=device), x)
    return first, ys, associative_scan(torch.add, x, 0, combine_mode="generic")


def fibonacci_until(device):
    x, steps = torch.tensor([0, 1], device=device), 0
    while x[1] < 50:
        x = torch.stack([x[1], x.sum()])
        steps += 1
    return x, steps


def beams(device):
    table = torch.randn(7, 7).to(device).log_softmax(-1)
    ids, scores = torch.zeros(3, 1, dtype=torch.long, device=device), torch.tensor([0.0, -1e9, -1e9], device=device)
    for _ in range(4):
        total = scores[:, None] + table[ids[:, -1]]
        scores, flat = total.view(-1).topk(3)
        ids = torch.cat([ids[flat // 7], (flat % 7)[:, None]], 1)
        if (ids[:, -1] == 6).all():
            break
    return ids, scores


def nucleus(device):
    logits = torch.randn(2, 9).to(device)
    order = logits.sort(descending=True)
    cut = order.values.softmax(-1).cumsum(-1) > 0.8
    cut[:, 1:] = cut[:, :-1].clone()
    cut[:, 0] = False
    logits[cut.scatter(1, order.indices, cut)] = -float("inf")
    return torch.multinomial(logits.softmax(-1), 1), logits


def boxes(device):
    a = torch.rand(6, 4).to(device)
    b = torch.cat([a[:, :2], a[:, :2] + a[:, 2:]], 1)
    area = (b[:, 2] - b[:, 0]) * (b[:, 3] - b[:, 1])
    low, high = torch.max(b[:, None, :2], b[:, :2]), torch.min(b[:, None, 2:], b[:, 2:])
    inter = (high - low).clamp(min=0).prod(2)
    overlap = inter / (area[:, None] + area - inter)
    scores, keep = torch.rand(6).to(device), []
    order = scores.argsort(descending=True)
    while order.numel():
        i = order[0]
        keep.append(i.item())
        order = order[1:][overlap[i, order[1:]] < 0.3]
    return keep, overlap


def clusters(device):
    x = torch.randn(20, 2).to(device)
    centres = x[:3].clone()
    for _ in range(10):
        label = torch.cdist(x, centres).argmin(1)
        fresh = torch.stack([x[label == k].mean(0) if (label == k).any() else centres[k] for k in range(3)])
        if torch.allclose(fresh, centres):
            break
        centres = fresh
    return centres, label


def conjugate_gradients(device):
    a = torch.randn(5, 5).to(device)
    a, b = a @ a.T + torch.eye(5, device=device), torch.randn(5).to(device)
    x = torch.zeros_like(b)
    r = b - a @ x
    p, old = r.clone(), r @ r
    for step in range(10):
        ap = a @ p
        alpha = old / (p @ ap)
        x, r = x + alpha * p, r - alpha * ap
        new = r @ r
        if new.sqrt() < 1e-5:
            break
        p, old = r + new / old * p, new
    return x, step


def warped_pictures(device):
    x = torch.rand(1, 1, 5, 5).to(device)
    theta = torch.tensor([[[0.8, 0.1, 0.0], [0.0, 0.9, 0.1]]], device=device)
    grid = F.affine_grid(theta, (1, 1, 4, 4), align_corners=False)
    return (
        F.grid_sample(x, grid, align_corners=False), F.interpolate(x, scale_factor=2, mode="bilinear"), F.interpolate(x, (3, 3), mode="area"),
        F.interpolate(x, size=7, mode="bicubic", antialias=True), F.pad(x, (1, 1, 2, 2), mode="reflect"), F.unfold(x, 2), F.fold(F.unfold(x, 2), (5, 5), 2),
        F.pixel_shuffle(x.repeat(1, 4, 1, 1), 2), F.max_pool2d(x, 2, return_indices=True), F.max_unpool2d(*F.max_pool2d(x[..., :4, :4], 2, return_indices=True), 2),
        F.adaptive_max_pool2d(x, 2), F.lp_pool2d(x, 2, 2), F.local_response_norm(x, 2), F.gumbel_softmax(x[0, 0], hard=True).sum(1), F.one_hot(torch.tensor([0, 2], device=device)),
        F.ctc_loss(torch.randn(6, 2, 4).to(device).log_softmax(2), torch.tensor([[1, 2], [2, 3]], device=device), torch.tensor([6, 6]), torch.tensor([2, 2])),
        F.embedding_bag(torch.tensor([0, 1, 1], device=device), torch.randn(3, 2).to(device), torch.tensor([0, 2], device=device)), F.cosine_similarity(x[0, 0], x[0, 0].flip(0)),
    )  # fmt: skip


def packed_sequences(device):
    from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence, unpad_sequence

    x, lengths = torch.randn(3, 5, 4).to(device), torch.tensor([5, 2, 3])
    found = []
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        cell = kind(4, 3, num_layers=2, bidirectional=True, batch_first=True, dropout=0.1).to(device)
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, _ = cell(packed)
        padded, sizes = pad_packed_sequence(out, batch_first=True)
        padded.sum().backward()
        found += [padded, sizes, cell.weight_ih_l0.grad]
    return found, pack_sequence([x[0], x[1, :2]]).data, unpad_sequence(x, lengths, True)


def decoder_with_attention(device):
    cell, attention, out = (
        nn.LSTMCell(4, 4).to(device),
        nn.MultiheadAttention(4, 2, batch_first=True).to(device),
        nn.Linear(4, 7).to(device),
    )
    table, memory = nn.Embedding(7, 4).to(device), torch.randn(2, 3, 4).to(device)
    state = (torch.zeros(2, 4, device=device), torch.zeros(2, 4, device=device))
    ids, found = torch.zeros(2, dtype=torch.long, device=device), []
    for _ in range(4):
        state = cell(table(ids), state)
        mixed, _ = attention(state[0][:, None], memory, memory)
        ids = out(mixed[:, 0]).argmax(-1)
        found.append(ids)
        if torch.all(ids == 1):
            break
    return torch.stack(found, 1)


def transformer_with_masks(device):
    model = nn.Transformer(8, 2, 1, 1, 16, batch_first=True).to(device)
    src, tgt = torch.randn(2, 4, 8).to(device), torch.randn(2, 3, 8).to(device)
    mask = nn.Transformer.generate_square_subsequent_mask(3, device=device)
    pad = torch.tensor([[False, False, False, True], [False] * 4], device=device)
    out = model(src, tgt, tgt_mask=mask, src_key_padding_mask=pad, memory_key_padding_mask=pad, tgt_is_causal=True)
    out.sum().backward()
    with torch.no_grad():
        return out, model.eval()(src, tgt, tgt_mask=mask), model.encoder(src, src_key_padding_mask=pad)


def encoder_fast_path(device):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True).to(device).eval()
    pad = torch.tensor([[False, False, True], [False, False, False]], device=device)
    with torch.inference_mode():
        return model(torch.randn(2, 3, 8).to(device), src_key_padding_mask=pad)[1]


def adaptive_softmax(device):
    model = nn.AdaptiveLogSoftmaxWithLoss(6, 10, [3, 6]).to(device)
    x, y = torch.randn(5, 6).to(device), torch.tensor([0, 4, 9, 2, 7]).to(device)
    out, loss = model(x, y)
    loss.backward()
    return out, loss, model.log_prob(x), model.predict(x)


def written_to_files(device):
    from torch.utils.tensorboard import SummaryWriter

    with tempfile.TemporaryDirectory() as folder, SummaryWriter(folder) as writer:
        x = torch.rand(3, device=device)
        writer.add_scalar("loss", x.mean(), 0)
        writer.add_histogram("x", x, 0)
        return len(os.listdir(folder))


def meta_and_lazy(device):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    model = model.to_empty(device=device)
    for p in model.parameters():
        nn.init.ones_(p)
    for b in model.buffers():
        nn.init.zeros_(b)
    lazy = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d()).to(
        device
    )
    return model(torch.ones(4, 3, device=device)), lazy(torch.randn(4, 5).to(device))


def fake_tensors(device):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(3, 4, device=device)
        y = nn.Linear(4, 2, device=device)(x)
        return tuple(y.shape), y.device.type


def each_activation():
    for name in (
        "relu", "relu6", "elu", "selu", "celu", "leaky_relu", "rrelu", "gelu", "silu", "mish", "hardswish", "hardtanh", "hardsigmoid", "softplus", "softsign",
        "tanhshrink", "softshrink", "hardshrink", "logsigmoid", "threshold", "prelu", "glu", "softmin", "normalize", "dropout", "alpha_dropout", "feature_alpha_dropout",
    ):  # fmt: skip
        yield name, functools.partial(_activated, name)


def _activated(name, device):
    x = torch.randn(4, 6).to(device).requires_grad_()
    more = {"threshold": (0.1, 0.0), "prelu": (torch.tensor([0.2], device=device),), "softmin": (1,)}.get(name, ())
    out = getattr(F, name)(x, *more)
    out.square().sum().backward()
    return out, x.grad
