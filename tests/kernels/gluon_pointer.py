"""Pointers of kernels whose language is replaced by a model on CPU tensors."""

from __future__ import annotations

import types
from dataclasses import dataclass, replace
from typing import Any, Self

import torch


@dataclass
class Pointer:
    """Elements of a flat tensor."""

    flat: torch.Tensor
    at: Any = 0

    @property
    def dtype(self) -> Any:
        return types.SimpleNamespace(element_ty=self.flat.dtype)

    def __add__(self, offset: Any) -> Self:
        return replace(self, at=self.at + offset)
