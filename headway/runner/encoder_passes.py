"""Encoders that run block by block: one item's pass at a time, cut over steps, its blocks replayed as graphs.

A block is a graph for each of some sizes, so a step replays as many of them as the plan says. What opens a pass and what closes
it are launched kernel by kernel: they depend on the item.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch

from headway.core.encode import ALL_BLOCKS, Encoding
from headway.device.base import Device, DeviceError, Graph
from headway.models.interface import EncoderInput, Model, PartedModel, PassShape
from headway.state.cache_pool import CachePool


class PassRunner:
    """Queues passes in the order of the launches. Steps run in order on one stream, so the buffers need no fence of their own:
    a pass that opens comes behind the last block of the one before.

    Attributes:
        num_replays: blocks that ran as graphs.
    """

    def __init__(self, device: Device, model: Model, caches: CachePool) -> None:
        spec = model.spec.encoder
        assert spec is not None and spec.blocks
        self._device, self._caches, self._spec = device, caches, spec
        self._model = cast(PartedModel[Any, Any], model)
        self._buffers = self._model.pass_buffers()
        self._graphs: dict[PassShape, list[Graph]] = {}
        self._shape: PassShape | None = None  # of the pass that is under way
        self._next = 0  # its next block
        self.num_replays = 0

    def run(self, encoding: Encoding, item: EncoderInput) -> None:
        """Queue some blocks of a pass, from where it stands.

        Raises:
            DeviceError: it does not stand there: the buffers hold another one's.
        """
        if not encoding.first:
            self._shape = self._shape_for(item.sizes)
            self._model.open_pass(item, self._buffers, self._shape)
        elif self._shape is None or self._next != encoding.first:
            raise DeviceError(
                f"an encoder was to go on at block {encoding.first}, and its buffers are at block {self._next}"
            )
        shape = self._shape
        end = min(encoding.end, len(self._model.blocks_of(shape)))
        self._next, self._shape = end, None if encoding.is_last else shape
        graphs = self._graphs.get(shape)
        for number in range(encoding.first, end):
            if graphs is None:
                self._model.run_block(number, self._buffers, shape)
            else:
                graphs[number].replay()
                self.num_replays += 1
        if encoding.is_last:
            self._model.close_pass(item, self._buffers, self._caches)

    def rehearse(self) -> None:
        """The longest item of each kind, of zeros, into nowhere; then a block of each kind in all sizes: nothing compiles or
        loads inside a capture. Needs inference mode and the main stream. Start-up only."""
        if not self._device.asynchronous:  # a CPU has no kernels to compile, and would take long
            return
        device = self._device.torch_device
        for spec in self._spec.both:
            data = torch.zeros(spec.words, dtype=torch.int32, device=device)
            places = torch.full((spec.longest,), -1, dtype=torch.int32, device=device)
            item = EncoderInput(spec.longest, spec.sizes, data, places)
            self.run(Encoding(spec.longest, spec.sizes, 0, 0, 0, 0, ALL_BLOCKS, True), item)
        for shape in self._model.pass_shapes():
            kinds = {cost: number for number, cost in reversed(list(enumerate(self._model.blocks_of(shape))))}
            for number in kinds.values():
                self._model.run_block(number, self._buffers, shape)

    @property
    def num_graphs(self) -> int:
        """Blocks that ``capture`` captures."""
        return sum(len(self._model.blocks_of(shape)) for shape in self._model.pass_shapes())

    def capture(self, on_graph: Callable[[], object]) -> None:
        """Capture the blocks of all sizes, largest first. Needs a rehearsal, inference mode and an idle device."""
        for shape in reversed(self._model.pass_shapes()):
            self._graphs[shape] = graphs = []
            for number in range(len(self._model.blocks_of(shape))):
                graphs.append(self._device.capture(partial(self._model.run_block, number, self._buffers, shape)))
                on_graph()

    def release(self) -> None:
        """Drop the graphs."""
        self._graphs = {}

    def _shape_for(self, sizes: tuple[int, ...]) -> PassShape:
        """The smallest captured shape that holds the item, or its own."""
        exact = self._model.exact_shape(sizes)
        return next((each for each in reversed(self._graphs) if each.holds(exact)), exact)
