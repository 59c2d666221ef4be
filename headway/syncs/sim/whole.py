"""Tensors that torch has no wrappers for: rows that are compressed, and nested tensors of the strided layout.

To torch's C++ side such a tensor of the device is a dense one of no meaning, so the whole of each call runs on the values. The
gradient is that of the call on the values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from headway.syncs.findings import Kind
from headway.syncs.sim.flags import flag
from headway.syncs.sim.tensor import SimTensor, is_there

_HOST: Final = torch.device("cpu")
BUILDERS: Final = (
    "sparse_csr_tensor",
    "sparse_csc_tensor",
    "sparse_bsr_tensor",
    "sparse_bsc_tensor",
    "sparse_compressed_tensor",
)
"""Functions of torch that make tensors of compressed rows, of lists or of tensors."""

OWN: Final = frozenset(
    ["requires_grad_", "retain_grad", "register_hook", "register_post_accumulate_grad_hook", "backward", "grad"]
)
"""What is asked of the tensor itself, and not of its values."""


def call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``func`` on the values; what it gives belongs to the device again, unless the call took it to the host."""
    leaves, spec = tree_flatten((args, kwargs))
    places = [number for number, leaf in enumerate(leaves) if isinstance(leaf, SimTensor)]
    devices = {number: _HOST for number, leaf in enumerate(leaves) if isinstance(leaf, torch.device) and is_there(leaf)}
    if func.__name__ == "cpu" or (func.__name__ == "to" and any(map(_is_host, leaves))):
        flag(Kind.READ, func.__name__)
        there = False
    else:
        there = True

    def run(values: Sequence[torch.Tensor]) -> Any:
        put = dict(zip(places, values, strict=True)) | devices
        given, named = tree_unflatten([put.get(number, leaf) for number, leaf in enumerate(leaves)], spec)
        return func(*given, **named)

    tensors = [leaves[number] for number in places]
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
        result = run([tensor.held for tensor in tensors])
        return tree_map_only(torch.Tensor, SimTensor, result) if there else result
    return _Whole.apply(run, there, *tensors)  # type: ignore[no-untyped-call]


def _is_host(value: Any) -> bool:
    return value == "cpu" or (isinstance(value, torch.device) and value.type == "cpu")


class _Whole(torch.autograd.Function):
    """A call on the values, with its gradient."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], there: bool, *tensors: SimTensor) -> Any:
        with torch.enable_grad():
            ctx.values = [tensor.held.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
            result = run(ctx.values)
        ctx.made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        give = SimTensor if there else torch.Tensor.detach
        return tree_map_only(torch.Tensor, give, result)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        pairs = [
            (made, grad.held if isinstance(grad, SimTensor) else grad)
            for made, grad in zip(ctx.made, grads, strict=True)
            if made.requires_grad and grad is not None
        ]
        wanted = [value for value in ctx.values if value.requires_grad]
        found = iter(
            torch.autograd.grad([made for made, _ in pairs], wanted, [grad for _, grad in pairs], allow_unused=True)
        )
        each = [next(found) if value.requires_grad else None for value in ctx.values]
        return None, None, *(None if grad is None else SimTensor(grad) for grad in each)


def built(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``torch.sparse_csr_tensor`` and its kin: parts from the host go up."""
    device = kwargs.get("device")
    parts = [part for part in tree_leaves((args, kwargs)) if isinstance(part, torch.Tensor)]
    if not (is_there(device) if device is not None else any(isinstance(part, SimTensor) for part in parts)):
        return func(*args, **kwargs)
    if len([part for part in parts if isinstance(part, SimTensor)]) < 3:  # two indices and the values
        flag(Kind.UPLOAD, func.__name__)
    return call(func, args, kwargs | {"device": None})


def nested(real: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.nested.nested_tensor``, whose strided layout is made below everything that can be watched."""

    @functools.wraps(real)
    def nested_tensor(tensor_list: Any, *, layout: Any = None, device: Any = None, **options: Any) -> Any:
        parts = tree_leaves(tensor_list)
        there = any(isinstance(part, SimTensor) for part in parts) if device is None else is_there(device)
        if not there or layout is torch.jagged:
            return real(tensor_list, layout=layout, device=device, **options)
        if not all(isinstance(part, SimTensor) for part in parts):
            flag(Kind.UPLOAD, "nested_tensor")
        gradient = options.pop("requires_grad", False)
        options.pop("pin_memory", None)
        values = tree_map_only(SimTensor, lambda part: part.held, tensor_list)
        return SimTensor(real(values, device=_HOST, **options)).requires_grad_(gradient)

    return nested_tensor
