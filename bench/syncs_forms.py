"""Lines of user code that torch's operator database does not have: indexing, copies, creation, and calls of torch.cuda.

Each form is one call over the tensors of ``Things``; ``bench.syncs_ops`` records what it does on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import torch


class Things:
    """Fresh tensors for a form: ``x`` and friends on the device, ``h`` and friends on the host."""

    def __init__(self) -> None:
        cuda = torch.device("cuda")
        self.x = torch.rand(8, 6, device=cuda)
        self.y = torch.rand(8, 6, device=cuda)
        self.v = torch.rand(8, device=cuda)
        self.scalar = torch.tensor(2.0, device=cuda)
        self.host_scalar = torch.tensor(2.0)
        self.mask = torch.arange(48, device=cuda).view(8, 6) % 2 == 0
        self.rows_mask = torch.arange(8, device=cuda) % 2 == 0
        self.bytes_mask = self.rows_mask.to(torch.uint8)
        self.host_mask = torch.arange(8) % 2 == 0
        self.i = torch.tensor([1, 3, 5], device=cuda)
        self.i_host = torch.tensor([1, 3, 5])
        self.i_pinned = torch.tensor([1, 3, 5]).pin_memory()
        self.i_scalar = torch.tensor(3, device=cuda)
        self.counts = torch.tensor([1, 2, 3], device=cuda)
        self.h = torch.rand(8, 6)
        self.h64 = torch.rand(8, 6, dtype=torch.float64)
        self.p = torch.rand(8, 6).pin_memory()
        self.p64 = torch.rand(8, 6, dtype=torch.float64).pin_memory()
        self.wide_p = torch.rand(8, 12).pin_memory()
        self.array = np.arange(6, dtype=np.float32)
        self.layer = torch.nn.Linear(6, 4, device=cuda)
        self.target = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3], device=cuda)


Form = Callable[[Things], Any]


def _set(name: str, index: Callable[[Things], Any], value: Callable[[Things], Any]) -> Form:
    def form(t: Things) -> None:
        getattr(t, name)[index(t)] = value(t)

    return form


INDEXES: dict[str, Callable[[Things], Any]] = {
    "int": lambda t: 3,
    "slice": lambda t: slice(1, 5),
    "strided slice": lambda t: slice(None, None, 2),
    "tuple": lambda t: (2, 3),
    "ellipsis": lambda t: (..., 1),
    "none": lambda t: None,
    "list": lambda t: [1, 3],
    "list and slice": lambda t: ([1, 3], slice(0, 2)),
    "numpy index": lambda t: np.array([1, 3]),
    "bool": lambda t: True,
    "list of bools": lambda t: [True, False] * 4,
    "device index": lambda t: t.i,
    "host index": lambda t: t.i_host,
    "pinned index": lambda t: t.i_pinned,
    "device scalar index": lambda t: t.i_scalar,
    "mask": lambda t: t.mask,
    "mask of rows": lambda t: t.rows_mask,
    "mask of bytes": lambda t: t.bytes_mask,
    "mask on the host": lambda t: t.host_mask,
    "two device indexes": lambda t: (t.i, t.i),
    "device and host index": lambda t: (t.i, t.i_host),
    "device index and list": lambda t: (t.i, [0, 1, 2]),
    "mask and slice": lambda t: (t.rows_mask, slice(0, 2)),
    "range": lambda t: range(1, 3),
    "empty list": lambda t: [],
}
VALUES: dict[str, Callable[[Things], Any]] = {
    "float": lambda t: 1.0,
    "int": lambda t: 1,
    "device scalar": lambda t: t.scalar,
    "host scalar": lambda t: t.host_scalar,
}


def _indexing() -> dict[str, Form]:
    found: dict[str, Form] = {}
    for name, index in INDEXES.items():
        found[f"x[{name}]"] = lambda t, index=index: t.x[index(t)]
        for kind, value in VALUES.items():
            found[f"x[{name}] = {kind}"] = _set("x", index, value)
        found[f"x[{name}] = tensor"] = lambda t, index=index: t.x.__setitem__(index(t), t.x[index(t)].clone())
    return found


def _copies() -> dict[str, Form]:
    found: dict[str, Form] = {}
    for host, non_blocking in product(("h", "p", "h64", "p64"), (False, True)):
        flags = f"{host}, non_blocking={non_blocking}"
        get: Callable[[Things], Any] = lambda t, host=host: getattr(t, host)  # noqa: E731
        put = {"non_blocking": non_blocking}
        found |= {
            f"to cuda ({flags})": lambda t, get=get, put=put: get(t).to("cuda", **put),
            f"to cuda and cast ({flags})": lambda t, get=get, put=put: get(t).to("cuda", torch.float16, **put),
            f"transposed to cuda ({flags})": lambda t, get=get, put=put: get(t).t().to("cuda", **put),
            f"window to cuda ({flags})": lambda t, get=get, put=put: get(t)[2:5].to("cuda", **put),
            f"columns to cuda ({flags})": lambda t, get=get, put=put: get(t)[:, 1:4].to("cuda", **put),
            f"copy up ({flags})": lambda t, get=get, put=put: t.x.copy_(get(t), **put),
            f"copy up broadcast ({flags})": lambda t, get=get, put=put: t.x.copy_(get(t)[0], **put),
            f"copy up transposed ({flags})": lambda t, get=get, put=put: t.x.t().copy_(get(t).t(), **put),
            f"copy up into columns ({flags})": lambda t, get=get, put=put: t.x[:, 1:4].copy_(get(t)[:, 1:4], **put),
            f"copy up window ({flags})": lambda t, get=get, put=put: t.x[1:4].copy_(get(t)[2:5], **put),
            f"copy down ({flags})": lambda t, get=get, put=put: get(t).copy_(t.x, **put),
            f"copy down transposed ({flags})": lambda t, get=get, put=put: get(t).copy_(
                t.x.t().contiguous().t(), **put
            ),
            f"copy down into window ({flags})": lambda t, get=get, put=put: get(t)[2:5].copy_(t.x[2:5], **put),
            f"copy down into columns ({flags})": lambda t, get=get, put=put: get(t)[:, 1:4].copy_(t.x[:, 1:4], **put),
        }
    return found


def _scaled(t: Things) -> None:
    scaler, optimizer = torch.amp.GradScaler("cuda"), torch.optim.SGD(t.layer.parameters(), 0.1)
    scaler.scale(t.layer(t.x).sum()).backward()
    scaler.step(optimizer)
    scaler.update()


CALLS: dict[str, Form] = {
    "to cpu": lambda t: t.x.to("cpu"),
    "to cpu non_blocking": lambda t: t.x.to("cpu", non_blocking=True),
    "to cpu strided non_blocking": lambda t: t.x[:, ::2].to("cpu", non_blocking=True),
    "to cpu and cast non_blocking": lambda t: t.x.to("cpu", torch.float64, non_blocking=True),
    "cpu": lambda t: t.x.cpu(),
    "tolist": lambda t: t.x.tolist(),
    "item": lambda t: t.scalar.item(),
    "bool": lambda t: bool(t.scalar),
    "int": lambda t: int(t.i_scalar),
    "range of a scalar": lambda t: range(t.i_scalar),
    "repr": lambda t: repr(t.x),
    "format": lambda t: f"{t.scalar:.2f}",
    "len": lambda t: len(t.x),
    "iterate": lambda t: list(t.x),
    "contains": lambda t: 2.0 in t.x,
    "numpy of cpu": lambda t: t.x.cpu().numpy(),
    "tensor of a list": lambda t: torch.tensor([1.0, 2.0], device="cuda"),
    "tensor of a number": lambda t: torch.tensor(1.0, device="cuda"),
    "tensor of nothing": lambda t: torch.tensor([], device="cuda"),
    "as_tensor of numpy": lambda t: torch.as_tensor(t.array, device="cuda"),
    "as_tensor of a device tensor": lambda t: torch.as_tensor(t.x, device="cuda"),
    "new_tensor": lambda t: t.x.new_tensor([1.0, 2.0]),
    "new_full": lambda t: t.x.new_full((3,), 2.0),
    "full with a device scalar": lambda t: torch.full((3,), t.scalar, device="cuda"),
    "zeros": lambda t: torch.zeros(3, device="cuda"),
    "arange": lambda t: torch.arange(5, device="cuda"),
    "linspace": lambda t: torch.linspace(0, 1, 5, device="cuda"),
    "arange of a device scalar": lambda t: torch.arange(t.i_scalar, device="cuda"),
    "eye": lambda t: torch.eye(3, device="cuda"),
    "randperm": lambda t: torch.randperm(9, device="cuda"),
    "randperm large": lambda t: torch.randperm(40000, device="cuda"),
    "randint": lambda t: torch.randint(0, 9, (4,), device="cuda"),
    "multinomial": lambda t: torch.multinomial(t.v, 3),
    "multinomial with replacement": lambda t: torch.multinomial(t.v, 3, replacement=True),
    "bernoulli": lambda t: torch.bernoulli(t.v),
    "normal of tensors": lambda t: torch.normal(t.x, t.y),
    "normal of a mean and std": lambda t: torch.normal(0.0, t.y),
    "masked_fill number": lambda t: t.x.masked_fill(t.mask, 0.0),
    "masked_fill device scalar": lambda t: t.x.masked_fill(t.mask, t.scalar),
    "masked_fill host scalar": lambda t: t.x.masked_fill(t.mask, t.host_scalar),
    "masked_fill_ number": lambda t: t.x.masked_fill_(t.mask, 0.0),
    "masked_select": lambda t: t.x.masked_select(t.mask),
    "masked_scatter": lambda t: t.x.masked_scatter(t.mask, t.y),
    "where three": lambda t: torch.where(t.mask, t.x, t.y),
    "where number": lambda t: torch.where(t.mask, t.x, 0.0),
    "where one": lambda t: torch.where(t.mask),
    "nonzero": lambda t: t.x.nonzero(),
    "nonzero_static": lambda t: torch.nonzero_static(t.mask, size=48),
    "argwhere": lambda t: torch.argwhere(t.x),
    "unique": lambda t: t.i.unique(),
    "bincount": lambda t: torch.bincount(t.i),
    "bincount minlength": lambda t: torch.bincount(t.i, minlength=8),
    "histc": lambda t: torch.histc(t.x, 4),
    "histc with range": lambda t: torch.histc(t.x, 4, 0.0, 1.0),
    "one_hot": lambda t: torch.nn.functional.one_hot(t.target),
    "one_hot with classes": lambda t: torch.nn.functional.one_hot(t.target, 4),
    "repeat_interleave": lambda t: torch.repeat_interleave(t.counts),
    "repeat_interleave sized": lambda t: torch.repeat_interleave(t.i, t.counts, output_size=6),
    "repeat_interleave tensor": lambda t: torch.repeat_interleave(t.i, t.counts),
    "repeat_interleave number": lambda t: torch.repeat_interleave(t.i, 2),
    "split by host list": lambda t: t.x.split([3, 5]),
    "tensor_split by host tensor": lambda t: torch.tensor_split(t.x, t.i_host),
    "equal": lambda t: torch.equal(t.x, t.y),
    "allclose": lambda t: torch.allclose(t.x, t.y),
    "isclose": lambda t: torch.isclose(t.x, t.y),
    "any": lambda t: t.mask.any(),
    "if any": lambda t: bool(t.mask.any()),
    "max": lambda t: max(t.v),
    "sum": lambda t: sum(t.v),
    "add number": lambda t: t.x + 1.0,
    "add device scalar": lambda t: t.x + t.scalar,
    "add host scalar": lambda t: t.x + t.host_scalar,
    "pow device scalar": lambda t: t.x**t.scalar,
    "clamp by tensors": lambda t: t.x.clamp(t.scalar, t.scalar + 1),
    "fill_ number": lambda t: t.x.fill_(1.0),
    "fill_ device scalar": lambda t: t.x.fill_(t.scalar),
    "fill_ host scalar": lambda t: t.x.fill_(t.host_scalar),
    "index_fill_ number": lambda t: t.x.index_fill_(0, t.i, 1.0),
    "index_fill_ device scalar": lambda t: t.x.index_fill_(0, t.i, t.scalar),
    "index_select": lambda t: t.x.index_select(0, t.i),
    "take": lambda t: t.x.take(t.i),
    "gather": lambda t: t.x.gather(0, t.i.view(-1, 1)),
    "scatter number": lambda t: t.x.scatter(0, t.i.view(-1, 1), 1.0),
    "index_put_ accumulate": lambda t: t.x.index_put_((t.i,), t.y[:3], accumulate=True),
    "embedding": lambda t: torch.nn.functional.embedding(t.i, t.x),
    "cross_entropy": lambda t: torch.nn.functional.cross_entropy(t.x, t.target),
    "nll with weights": lambda t: torch.nn.functional.nll_loss(t.x, t.target, t.v[:6]),
    "sort": lambda t: t.x.sort(),
    "topk": lambda t: t.x.topk(2),
    "linalg.inv": lambda t: torch.linalg.inv(t.x[:6]),
    "linalg.inv_ex": lambda t: torch.linalg.inv_ex(t.x[:6]),
    "linalg.cholesky": lambda t: torch.linalg.cholesky(t.x.T @ t.x + torch.eye(6, device="cuda")),
    "linalg.svd": lambda t: torch.linalg.svd(t.x),
    "linalg.solve": lambda t: torch.linalg.solve(t.x[:6], t.y[:6]),
    "to_sparse": lambda t: t.x.to_sparse(),
    "is_nonzero": lambda t: torch.is_nonzero(t.scalar),
    "assert_async": lambda t: torch._assert_async(t.mask.any()),  # noqa: SLF001 - a cure that users are told
    "pin a tensor": lambda t: t.h.pin_memory(),
    "empty_cache": lambda t: torch.cuda.empty_cache(),
    "synchronize": lambda t: torch.cuda.synchronize(),
    "mem_get_info": lambda t: torch.cuda.mem_get_info(),
    "memory_stats": lambda t: torch.cuda.memory_stats(),
    "manual_seed": lambda t: torch.manual_seed(1),
    "get_rng_state": lambda t: torch.cuda.get_rng_state(),
    "set_rng_state": lambda t: torch.cuda.set_rng_state(torch.cuda.get_rng_state()),
    "event": lambda t: torch.cuda.Event().record(),
    "stream": lambda t: torch.cuda.Stream(),
    "event synchronize": lambda t: (e := torch.cuda.Event(), e.record(), e.synchronize()),
    "accelerator synchronize": lambda t: torch.accelerator.synchronize(),
    "layer": lambda t: t.layer(t.x),
    "layer backward": lambda t: t.layer(t.x).sum().backward(),
    "clip_grad_norm_": lambda t: (
        t.layer(t.x).sum().backward(),
        torch.nn.utils.clip_grad_norm_(t.layer.parameters(), 1.0),
    ),
    "clip_grad_norm_ finite": lambda t: (
        t.layer(t.x).sum().backward(),
        torch.nn.utils.clip_grad_norm_(t.layer.parameters(), 1.0, error_if_nonfinite=True),
    ),
    "sgd step": lambda t: (t.layer(t.x).sum().backward(), torch.optim.SGD(t.layer.parameters(), 0.1).step()),
    "adam step": lambda t: (t.layer(t.x).sum().backward(), torch.optim.Adam(t.layer.parameters()).step()),
    "adam foreach off": lambda t: (
        t.layer(t.x).sum().backward(),
        torch.optim.Adam(t.layer.parameters(), foreach=False).step(),
    ),
    "adam capturable": lambda t: (
        t.layer(t.x).sum().backward(),
        torch.optim.Adam(t.layer.parameters(), capturable=True).step(),
    ),
    "adamw fused": lambda t: (
        t.layer(t.x).sum().backward(),
        torch.optim.AdamW(t.layer.parameters(), fused=True).step(),
    ),
    "grad scaler": lambda t: torch.amp.GradScaler("cuda").scale(t.layer(t.x).sum()).backward(),
    "grad scaler step": _scaled,
    "state_dict": lambda t: t.layer.state_dict(),
    "state_dict to cpu": lambda t: {k: v.cpu() for k, v in t.layer.state_dict().items()},
    "module to cuda": lambda t: torch.nn.Linear(6, 4).to("cuda"),
    "Categorical": lambda t: torch.distributions.Categorical(t.x),
    "Categorical unchecked": lambda t: torch.distributions.Categorical(t.x, validate_args=False),
    "Categorical sample": lambda t: torch.distributions.Categorical(t.x, validate_args=False).sample(),
    "Normal": lambda t: torch.distributions.Normal(t.x, t.y + 1),
    "pack_padded_sequence": lambda t: torch.nn.utils.rnn.pack_padded_sequence(t.x.view(4, 2, 6), torch.tensor([4, 3])),
    "pack_padded_sequence device lengths": lambda t: torch.nn.utils.rnn.pack_padded_sequence(
        t.x.view(4, 2, 6), torch.tensor([4, 3], device="cuda")
    ),
    "sdpa": lambda t: torch.nn.functional.scaled_dot_product_attention(*[t.x.view(1, 1, 8, 6)] * 3),
    "sdpa with a mask": lambda t: torch.nn.functional.scaled_dot_product_attention(
        *[t.x.view(1, 1, 8, 6)] * 3, attn_mask=t.mask.new_ones(8, 8)
    ),
    "stft": lambda t: torch.stft(torch.rand(800, device="cuda"), 64, return_complex=True),
    "istft": lambda t: torch.istft(torch.stft(torch.rand(800, device="cuda"), 64, return_complex=True), 64),
    "deepcopy": lambda t: __import__("copy").deepcopy(t.x),
    "clone": lambda t: t.x.clone(),
    "data_ptr": lambda t: t.x.data_ptr(),
    "x.to(0)": lambda t: t.h.to(0),
    "cuda()": lambda t: t.h.cuda(),
    "cuda(non_blocking) pinned": lambda t: t.p.cuda(non_blocking=True),
}

FORMS = {**_indexing(), **_copies(), **CALLS}
