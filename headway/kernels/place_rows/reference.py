"""The meaning of ``place_rows``; shapes in the package docstring."""

from __future__ import annotations

import torch


def place_rows(x: torch.Tensor, features: torch.Tensor, rows: torch.Tensor, first: int, add: bool) -> None:
    num_features = features.shape[0]
    known = ((rows >= 0) & (rows < num_features))[:, None]
    found = features[rows.clamp(0, num_features - 1).long(), first : first + x.shape[1]]
    x.copy_(torch.where(known, x + found if add else found, x))
