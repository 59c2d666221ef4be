"""The device's half of encoder work: inputs are copied once, and the model encodes them ahead of the step's rows."""

from __future__ import annotations

from typing import cast

import torch

from headway.core.encode import most_words
from headway.device.base import Device
from headway.device.staging import StagingRing
from headway.models.interface import EncoderInput, EncodingModel, Model
from headway.runner.config import RunnerConfig
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
    """

    def __init__(self, device: Device, model: Model, caches: CachePool, config: RunnerConfig) -> None:
        spec = model.spec.encoder
        assert spec is not None
        self._model, self._caches = cast(EncodingModel, model), caches
        rows = max(config.max_encoder_rows, spec.longest)
        jobs = max(config.max_num_seqs, rows if spec.width else 0)  # a prompt may have many pictures
        words = most_words(rows, spec.words_per_row, jobs)
        self.buffer = torch.zeros(words, dtype=torch.int32, device=device.torch_device)
        self.staging = StagingRing(device, self.buffer)

    def run(self, launch: Launch) -> None:
        """Queue the launch's encodings; returns at once."""
        staging, ints = self.staging.acquire(), launch.encoder_ints
        staging.ints[: len(ints)] = ints
        self.staging.send(staging, len(ints))
        buffer = self.buffer
        inputs = [
            EncoderInput(
                each.rows,
                each.sizes,
                buffer[each.data_at : each.data_at + each.num_words],
                buffer[each.places_at : each.places_at + each.rows],
            )
            for each in launch.encodings
        ]
        self._model.encode(inputs, buffer[: len(inputs) + 1], self._caches)


def rehearse_encoder(device: Device, model: Model, caches: CachePool, rows: int) -> None:
    """Encode as many of the largest items as a step can have, of zeros, into nowhere. Start-up only."""
    spec = model.spec.encoder
    if spec is None or (
        spec.width and not device.asynchronous
    ):  # pictures take a CPU long, and it has no kernels to compile
        return
    number = max(rows // spec.longest, 1)
    data = torch.zeros(spec.longest * spec.words_per_row, dtype=torch.int32, device=device.torch_device)
    places = torch.full((spec.longest,), -1, dtype=torch.int32, device=device.torch_device)
    starts = torch.arange(number + 1, dtype=torch.int32, device=device.torch_device) * spec.longest
    inputs = [EncoderInput(spec.longest, spec.sizes, data[: spec.words], places)] * number
    cast(EncodingModel, model).encode(inputs, starts, caches)
