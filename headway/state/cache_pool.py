"""Storage of what models cache: per layer the tensors it declared, keys and values by block ids, states by slots."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from headway.core.cache import CONV, SSM, CacheLayout, Part
from headway.core.ints import cdiv, round_up

LayerCache = tuple[torch.Tensor, ...]
"""A layer's parts, each [num_blocks, block_size, *part.shape]; behind them its state's, each [num_slots, *part.shape], and the
ring of its recurrent state's inputs, where there are rings."""
ALIGNED = 16
"""int32 values. Triton tells compilers which addresses and strides are multiples of 16, and only that: where slots lay 4 values
further apart, a kernel kept nothing in registers, and took 246 us instead of 17."""


@dataclass(frozen=True, slots=True)
class StateStorage:
    """How states are stored.

    Attributes:
        num_slots: requests and checkpoints that have one.
        dtype: of parts that name none: the model's.
        recurrent: in place of the dtype that a part names (``EngineArgs.mamba_ssm_cache_dtype``); None: as named.
        checkpoints: of the slots the last ones: they have no rings.
        drafts: windows have so many places more: what rejected drafts leave in them is overwritten before it is read.
        replays: places of the rings of inputs that recurrent states have; 0: they have none.
    """

    num_slots: int
    dtype: torch.dtype
    recurrent: torch.dtype | None = None
    checkpoints: int = 0
    drafts: int = 0
    replays: int = 0

    def part_dtype(self, part: Part) -> torch.dtype:
        if part.name == SSM and self.recurrent is not None:
            return self.recurrent
        return part_dtype(part, self.dtype)

    def words(self, layout: CacheLayout) -> int:
        """int32 values that a slot's states take; each part, and each slot, begins at a multiple of ``ALIGNED`` of them. With
        rings the first says how many tokens the recurrent states have seen."""
        parts = sum(self._part_words(part) for spec in layout.states if spec is not None for part in spec.parts)
        return parts + self._first

    @property
    def _first(self) -> int:
        return ALIGNED if self.replays else 0

    def _shape(self, part: Part) -> tuple[int, ...]:
        return (part.shape[0] + self.drafts, *part.shape[1:]) if part.name == CONV else part.shape

    def _part_words(self, part: Part) -> int:
        return round_up(cdiv(prod(self._shape(part)) * self.part_dtype(part).itemsize, 4), ALIGNED)

    def bytes(self, layout: CacheLayout) -> int:
        """What all states take, their rings included."""
        return 4 * self.num_slots * self.words(layout) + (self.num_slots - self.checkpoints) * self.ring_bytes(layout)

    def ring_bytes(self, layout: CacheLayout) -> int:
        """What the rings of a request take."""
        return self.replays * sum(part.inputs * self._inputs_dtype(part).itemsize for part in layout.recurrent)

    def _inputs_dtype(self, part: Part) -> torch.dtype:
        return getattr(torch, part.inputs_dtype) if part.inputs_dtype else self.dtype

    def rings(self, layout: CacheLayout, device: torch.device) -> list[LayerCache]:
        """Per layer the ring of inputs [requests, replays, inputs] of its recurrent state; () for layers without one."""
        shape = self.num_slots - self.checkpoints, self.replays
        return [
            tuple(
                torch.zeros(*shape, part.inputs, dtype=self._inputs_dtype(part), device=device)
                for part in (spec.parts if spec is not None and self.replays else ())
                if part.inputs
            )
            for spec in layout.states
        ]

    def views(self, layout: CacheLayout, storage: torch.Tensor) -> list[LayerCache]:
        """Per layer its parts, [num_slots, *part.shape] each, within ``storage``, int32 [num_slots, ``words``]."""
        first, found = self._first, []
        for spec in layout.states:
            parts = []
            for part in spec.parts if spec is not None else ():
                end = first + self._part_words(part)
                typed = storage[:, first:end].view(self.part_dtype(part))
                shape = self._shape(part)
                parts.append(typed[:, : prod(shape)].unflatten(1, shape))
                first = end
            found.append(tuple(parts))
        return found


class CachePool:
    """The caches of a model.

    Args:
        layout: what its layers declared.
        num_blocks, block_size: blocks of each group, and tokens of a block.
        dtype: of parts that name none; the model's or float8_e4m3fn.
        device: where it lies.
        states: how states are stored; needed where the layout has any.
        features: rows, width and dtype of the encoder cache; None: there is none.

    Attributes:
        features: [rows, width], the encoder cache: outputs of encoders that stand in for tokens; None without.
        layers: per layer its parts; () for layers that cache nothing. Block 0 is never written. On CUDA the heads of a block
            lie one after the other in memory (the views are strided): the tokens that a program of decode attention reads
            are then contiguous. States begin as zeros; they mean nothing until their row has started at position 0.
        states: per layer its state alone, and its ring; empty without any.
        replays: places of these rings; 0: there are none.
        state_storage: int32 [num_slots, E], which all of ``states`` are views of: a slot's states lie side by side, so that
            one operation copies them all. None without any.
    """

    def __init__(
        self,
        layout: CacheLayout,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        states: StateStorage | None = None,
        features: tuple[int, int, torch.dtype] | None = None,
    ) -> None:
        self.layout, self.num_blocks, self.block_size = layout, num_blocks, block_size
        self.layers: list[LayerCache] = []
        stored = [self._storage(parts, dtype, device) for parts in layers_of_a_block(layout)]
        place = {layer: nth for group in layout.groups for nth, layer in enumerate(group.layers)}
        for i, spec in enumerate(layout.layers):
            if spec is None:
                self.layers.append(())
            elif spec.shared_with is not None:
                self.layers.append(self.layers[spec.shared_with])
            else:
                self.layers.append(stored[place[i]])
        self.features: torch.Tensor | None = None
        if features is not None:
            self.features = torch.zeros(features[0], features[1], dtype=features[2], device=device)
        self.states: list[LayerCache] = []
        self.state_storage: torch.Tensor | None = None
        self.replays = 0
        if layout.has_states:
            assert states is not None, "a model with states needs to know how they are stored"
            self.replays = states.replays
            storage = torch.zeros((states.num_slots, states.words(layout)), dtype=torch.int32, device=device)
            self.state_storage = storage if storage.shape[1] else None  # all states may be those of other stages
            own = zip(states.views(layout, storage), states.rings(layout, device), strict=True)
            self.states = [state + ring for state, ring in own]
            self.layers = [paged + state for paged, state in zip(self.layers, self.states, strict=True)]

    def _storage(self, parts: tuple[Part, ...], dtype: torch.dtype, device: torch.device) -> LayerCache:
        return tuple(self._part(part, dtype, device) for part in parts)

    def _part(self, part: Part, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        typed = part_dtype(part, dtype)
        shape = (self.num_blocks, self.block_size, *part.shape)
        heads_first = device.type == "cuda" and len(part.shape) == 2
        if heads_first:
            shape = (self.num_blocks, part.shape[0], self.block_size, part.shape[1])
        # Zeros, not empty: masked-out cache entries are multiplied by zero, and 0 * NaN is NaN.
        storage = torch.zeros(shape, dtype=typed, device=device)
        return storage.transpose(1, 2) if heads_first else storage


def part_dtype(part: Part, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a part in an engine whose cache is in ``dtype``."""
    if not part.dtype:
        return dtype
    found = getattr(torch, part.dtype)
    assert isinstance(found, torch.dtype), part.dtype
    return found


def bytes_per_block(layout: CacheLayout, block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block takes, in all layers of a group."""
    return sum(
        block_size * part.elements * part_dtype(part, dtype).itemsize
        for parts in layers_of_a_block(layout)
        for part in parts
    )


def layers_of_a_block(layout: CacheLayout) -> list[tuple[Part, ...]]:
    """The parts of each layer that a block has room for: the n-th layers of all groups share one."""
    shared: list[tuple[Part, ...]] = []
    for group in layout.groups:
        for nth, layer in enumerate(group.layers):
            spec = layout.layers[layer]
            assert spec is not None
            if nth == len(shared):
                shared.append(spec.parts)
            assert shared[nth] == spec.parts, "layers that share storage cache the same"
    return shared
