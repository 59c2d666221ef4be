"""Every module and loss of torch.nn, on the inputs of torch's own tests: forward, backward, training and not."""

from __future__ import annotations

import functools
import inspect

import torch


def each_module():
    from torch.testing._internal.common_modules import module_db

    for info in module_db:
        for training in (True, False):
            yield f"{info.formatted_name}-{'train' if training else 'eval'}", functools.partial(_module, info, training)


def _module(info, training, device):
    from torch.utils._pytree import tree_leaves, tree_map_only

    found = []
    samples = info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=True, training=training)
    move = lambda t: t.detach().to(device).requires_grad_(t.requires_grad)  # noqa: E731
    for sample in list(samples)[:4]:
        args, kwargs = sample.constructor_input.args, sample.constructor_input.kwargs
        args, kwargs = tree_map_only(torch.Tensor, move, (args, kwargs))
        takes_device = "device" in inspect.signature(info.module_cls.__init__).parameters
        module = info.module_cls(
            *args, **kwargs, **({"device": device} if takes_device and "device" not in kwargs else {})
        )
        module = module.to(device).train(training)
        args, kwargs = tree_map_only(torch.Tensor, move, (sample.forward_input.args, sample.forward_input.kwargs))
        out = [each for each in tree_leaves(module(*args, **kwargs)) if isinstance(each, torch.Tensor)]
        total = sum(each.float().square().mean() for each in out if each.requires_grad)
        if isinstance(total, torch.Tensor):
            total.backward()
        found += [out, [p.grad for p in module.parameters() if p.grad is not None]]
        found += [
            each.grad
            for each in tree_leaves((args, kwargs))
            if isinstance(each, torch.Tensor) and each.is_leaf and each.grad is not None
        ]
    return found
