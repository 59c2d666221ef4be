"""Measures all that a model's start takes: whole layers where they are a decoder's usual ones, other products one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from headway.kernels.compiler_process import CompilerProcess
from headway.kernels.linear_forms.alone import Alone, FoundAlone
from headway.kernels.linear_forms.card import card_of
from headway.kernels.linear_forms.on_card import OnCard
from headway.kernels.linear_forms.search import Search
from headway.kernels.linear_forms.shapes import JUNCTIONS, DecoderShape, Group, decoder_shape
from headway.kernels.linear_forms.table import merge
from headway.kernels.linear_forms.winners import OPS, head_entries, layer_entries


def tune_groups(
    config: Mapping[str, Any], groups: Sequence[Group], all_rows: Sequence[int], device: torch.device,
    compiler: CompilerProcess | None, *, most: int, until: float, say: Callable[[str], object],
) -> FoundAlone:  # fmt: skip
    """What was found for ``groups`` of a config.json's model; arguments as of ``Search`` and ``Alone``."""
    shape = usual(config, groups)
    rest = [group for group in groups if shape is None or not (_is_layer(group, shape) or group[0].junction == "head")]
    found = FoundAlone()
    if rest:
        found = Alone(OnCard(device, compiler), card_of(device), most=most, until=until, say=say).run(rest, all_rows)
    if shape is not None:
        layers = Search(device, compiler, most=most, until=until, say=say).run(shape, list(all_rows))
        found.failed += layers.failed
        if not layers.complete:
            found.left += [product for group in groups if group not in rest for product in group]
            return found
        for entries in (layer_entries(shape, layers.layers), head_entries(shape, layers.heads)):
            found.entries = merge(found.entries, entries)
    return found


def usual(config: Mapping[str, Any], groups: Sequence[Group]) -> DecoderShape | None:
    """The shape of layers that ``Search`` can run whole; None: none of ``groups`` is one."""
    try:
        shape = decoder_shape(config)
    except ValueError:
        return None
    return shape if any(_is_layer(group, shape) for group in groups) else None


def _is_layer(group: Group, shape: DecoderShape) -> bool:
    """Whether these are all products of a layer of ``shape``, with norms before them, sums behind them, and SiLU between."""
    if tuple(each.junction for each in group) != JUNCTIONS:
        return False
    ways = [way for way in OPS if all(dict(each.ops).get(way) == OPS[way][each.junction] for each in group)]
    biases = [each.bias for each in group] == [shape.qkv_bias, False, False, False]
    sizes = all(each.size == shape.weight(each.junction) for each in group)
    return {"few", "meet"} <= set(ways) and biases and sizes and group[2].gate == "silu"
