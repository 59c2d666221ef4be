"""torch.load under the simulation: tensors land where the file or map_location says, and going up is a wait."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.utils._pytree import tree_map_only

from headway.syncs.sim import backend
from headway.syncs.sim.tensor import SimTensor, is_there

_REAL: Final = torch.load


def load(file: Any, map_location: Any = None, *args: Any, **options: Any) -> Any:
    """``torch.load``. Tensors saved from cuda come back there unless ``map_location`` says otherwise."""
    if isinstance(map_location, dict):
        map_location = next((where for source, where in map_location.items() if str(source).startswith("cuda")), None)
    if callable(map_location):
        map_location = "cpu"  # such functions keep storages where they were read, on the host
    if map_location is None:
        return _REAL(file, None, *args, **options)
    if not is_there(map_location):
        found = _REAL(file, map_location, *args, **options)
        return tree_map_only(SimTensor, lambda value: _kept(value, value.held), found)
    found = _REAL(file, "cpu", *args, **options)
    return tree_map_only(torch.Tensor, _up, found)


def _kept(value: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    return torch.nn.Parameter(held, value.requires_grad) if isinstance(value, torch.nn.Parameter) else held


def _up(value: torch.Tensor) -> torch.Tensor:
    return value if isinstance(value, SimTensor) else _kept(value, value.detach().to(backend.device()))
