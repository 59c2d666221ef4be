"""Transforms of functions, modes, classes of tensors, sparse and nested tensors, distributions."""
# ruff: noqa: E501, SLF001 - tables of calls, as their users write them

from __future__ import annotations

import contextlib
import functools

import torch
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
            return super().__torch_function__(func, types, args, kwargs or {})

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
    return out, list(x.grad.unbind()), x.offsets()


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
