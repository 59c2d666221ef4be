"""What of a call's arguments may decide whether it waits, as text: the keys of the record made on a card (bench/syncs_ops.py).

Never the numbers, so that the simulation can ask the same question of its own tensors.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from headway.syncs.copies import dense

SHORTEST_LIST: Final = 6
"""Longer lists of arguments are told by the kinds of their members alone."""


def kind_of(value: Any) -> str:
    """One argument: "cuda:float32:2d", "pinned:int64:1d:empty", "int", "True", "[int,int]"."""
    if isinstance(value, torch.Tensor):
        place = "cuda" if value.is_cuda else value.device.type
        if place == "cpu" and value.is_pinned():
            place = "pinned"
        dtype = str(value.dtype).removeprefix("torch.")
        strided = value.layout is torch.strided and not dense(value)
        marks = [mark for mark, holds in (("empty", value.numel() == 0), ("strided", strided)) if holds]
        return ":".join([place, dtype, f"{value.dim()}d", *marks])
    if isinstance(value, (list, tuple)):
        kinds = [kind_of(each) for each in value]
        return "[" + ",".join(sorted(set(kinds)) if len(kinds) > SHORTEST_LIST else kinds) + "]"
    if value is None or isinstance(value, (bool, str, torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return str(value)
    return type(value).__name__


def kinds_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Of a whole call: "cuda:float32:2d; int; dim=int"."""
    return "; ".join([*map(kind_of, args), *(f"{name}={kind_of(value)}" for name, value in sorted(kwargs.items()))])
