"""The device's half of encoder work: inputs are copied once, and the model encodes them ahead of the step's rows."""

from __future__ import annotations

from typing import cast

import torch

from headway.core.encode import Encoding, most_words
from headway.device.base import Device
from headway.device.staging import StagingRing
from headway.models.interface import EncoderInput, EncodingModel, Model
from headway.runner.config import RunnerConfig
from headway.runner.encoder_passes import PassRunner
from headway.runner.launch import Launch
from headway.state.cache_pool import CachePool


class EncoderRunner:
    """Runs the encodings of launches, in order, on the stream of the steps. Nobody waits for them.

    Args:
        model: one with an encoder.
        caches: what it writes to.

    Attributes:
        buffer: int32 [n] on the device, the inputs of one step.
        staging: the ring that fills it.
        passes: runs encoders block by block; None: this one runs at once.
    """

    def __init__(self, device: Device, model: Model, caches: CachePool, config: RunnerConfig) -> None:
        spec = model.spec.encoder
        assert spec is not None
        self._model, self._caches = cast(EncodingModel, model), caches
        longest = max(each.longest for each in spec.both)
        rows = max(config.max_encoder_rows, longest)
        jobs = max(config.max_num_seqs, rows if spec.width else 0)  # a prompt may have many pictures
        # One more item may end, whose input came with an earlier step.
        words_per_row = max(each.words_per_row for each in spec.both)
        words = most_words(rows, words_per_row, jobs) + (longest + 4 if spec.blocks else 0)
        self.buffer = torch.zeros(words, dtype=torch.int32, device=device.torch_device)
        self.staging = StagingRing(device, self.buffer)
        self.passes = PassRunner(device, model, caches) if spec.blocks else None

    def run(self, launch: Launch) -> None:
        """Queue the launch's encodings; returns at once."""
        staging, ints = self.staging.acquire(), launch.encoder_ints
        staging.ints[: len(ints)] = ints
        self.staging.send(staging, len(ints))
        inputs = [self._input(each) for each in launch.encodings]
        if self.passes is None:
            self._model.encode(inputs, self.buffer[: len(inputs) + 1], self._caches)
            return
        for encoding, one in zip(launch.encodings, inputs, strict=True):
            self.passes.run(encoding, one)

    def _input(self, encoding: Encoding) -> EncoderInput:
        data = self.buffer[encoding.data_at : encoding.data_at + encoding.num_words]
        num_places = encoding.rows if encoding.is_last else 0
        places = self.buffer[encoding.places_at : encoding.places_at + num_places]
        return EncoderInput(encoding.rows, encoding.sizes, data, places)


def rehearse_encoder(device: Device, model: Model, caches: CachePool, rows: int) -> None:
    """Encode as many of the largest items as a step can have, of zeros, into nowhere. Start-up only."""
    spec = model.spec.encoder
    if spec is None or spec.blocks:
        return
    number = max(rows // spec.longest, 1)
    data = torch.zeros(spec.longest * spec.words_per_row, dtype=torch.int32, device=device.torch_device)
    places = torch.full((spec.longest,), -1, dtype=torch.int32, device=device.torch_device)
    starts = torch.arange(number + 1, dtype=torch.int32, device=device.torch_device) * spec.longest
    inputs = [EncoderInput(spec.longest, spec.sizes, data[: spec.words], places)] * number
    cast(EncodingModel, model).encode(inputs, starts, caches)
