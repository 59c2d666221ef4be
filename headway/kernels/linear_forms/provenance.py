"""Says where the tiles of a model's linear layers come from. Imports no Triton."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from headway.kernels.hopper import runs_gluon
from headway.kernels.linear_forms.card import Card, card_of
from headway.kernels.linear_forms.shapes import JUNCTIONS, DecoderShape, decoder_shape
from headway.kernels.linear_forms.table import measured
from headway.kernels.linear_forms.winners import OPS

NAMES: Mapping[str, str] = {
    "tuned": "tuned on this machine",
    "shipped": "measured on an H200",
    "rule": "chosen by the rule",
}


def sources(shape: DecoderShape, card: Card) -> dict[str, str]:
    """Junction, or "head" -> "tuned", "shipped" or "rule"."""
    found: dict[str, str] = {}
    for junction in (*JUNCTIONS, "head"):
        op = "mid_linear" if junction == "head" else OPS["meet"][junction]
        known = measured(op, *shape.weight(junction), card)
        found[junction] = known.source if known is not None else "rule"
    return found


def describe(config: Mapping[str, Any], device: torch.device) -> str:
    """A line for the log of a start; empty where there is nothing to choose among, or no decoder's sizes are given.

    ``config``: a config.json.
    """
    if not runs_gluon(device):
        return ""
    try:
        found = sources(decoder_shape(config), card_of(device))
    except ValueError:
        return ""
    parts = [
        f"{name}: {', '.join(junction for junction, source in found.items() if source == kind)}"
        for kind, name in NAMES.items()
        if kind in found.values()
    ]
    advice = "; headway tune MODEL measures these" if "rule" in found.values() else ""
    return f"tiles of linear layers {'; '.join(parts)}{advice}"
