"""From an EAGLE checkpoint to a head on the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from headway.core.errors import ConfigError, WeightsError
from headway.models.decoder import DecoderModel
from headway.models.interface import Model, Target
from headway.speculative.agreed import whole_logits
from headway.speculative.draft_vocabulary import DraftVocabulary
from headway.speculative.eagle_config import read_eagle
from headway.speculative.eagle_model import EagleModel
from headway.weights import Checkpoint

DUMMY_STD = 0.02
"""Standard deviation of dummy weights."""
_IGNORED = ("t2d", "rotary_emb.inv_freq")
"""Computed, or the inverse of what is read."""


def plain_name(name: str) -> str:
    """The name under which a tensor is known here: EAGLE-3 calls its only layer midlayer, some exporters add model."""
    name = name.removeprefix("model.")
    return f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name


@torch.no_grad()
def load_eagle(
    checkpoint: Checkpoint,
    config: Mapping[str, Any],
    *,
    third: bool,
    target: Model,
    dtype: torch.dtype,
    max_len: int,
    seed: int,
) -> EagleModel:
    """The head of ``checkpoint``, its weights beside the target's.

    Args:
        config: its config.json.
        third: EAGLE-3.
        max_len: positions it must be able to run.
        seed: of the random weights when the checkpoint is a dummy.

    Raises:
        UnsupportedModelError: see ``read_eagle``.
        WeightsError: tensors are missing, unexpected or of the wrong shape.
        ConfigError: the target is no decoder.
    """
    if not isinstance(target, DecoderModel):
        raise ConfigError('speculative_config: EAGLE reads the embedding of a decoder; use method="ngram"')
    read = read_eagle(config, third=third, target=target.spec)
    names = frozenset() if checkpoint.is_dummy else frozenset(map(plain_name, checkpoint.tensor_names()))
    model = EagleModel(
        read,
        names,
        target.embedding.forward,
        whole_logits(target),
        dtype=dtype,
        device=target.device,
        max_len=max_len,
    )
    if checkpoint.is_dummy:
        fill_randomly(model, seed)
    else:
        fill_head(model, checkpoint)
    model.finalize()
    return model


class Head(Protocol):
    """A head with uninitialised weights."""

    vocabulary: DraftVocabulary
    device: torch.device

    def destinations(self) -> dict[str, Target]:
        """Where each tensor of a checkpoint goes, under the names of ``plain_name``."""


def fill_randomly(model: Head, seed: int) -> None:
    """Weights for a dummy checkpoint."""
    generator = torch.Generator(model.device).manual_seed(seed)
    for name, (tensor, *_) in model.destinations().items():
        tensor.fill_(1.0) if "norm" in name else tensor.normal_(0.0, DUMMY_STD, generator=generator)


def fill_head(model: Head, checkpoint: Checkpoint, unused: tuple[str, ...] = ()) -> None:
    """Copy every tensor of ``checkpoint`` to where it goes.

    Args:
        unused: beginnings of names, see ``plain_name``, that are not needed.

    Raises:
        WeightsError: tensors are missing, unexpected or of the wrong shape.
    """
    targets = model.destinations()
    waiting, unexpected = set(targets), []
    for stored, tensor in checkpoint.tensors():
        name = plain_name(stored)
        if name == "d2t" and model.vocabulary.target_ids is not None:
            model.vocabulary.map(tensor)
        elif name in targets:
            if tensor.shape != targets[name].tensor.shape or not tensor.is_floating_point():
                raise WeightsError(
                    f"tensor {stored} is {tensor.dtype} {list(tensor.shape)}; config.json implies floating point "
                    f"{list(targets[name].tensor.shape)}"
                )
            targets[name].fill(tensor)
            waiting.discard(name)
        elif name != "d2t" and not name.endswith(_IGNORED) and not name.startswith(unused):
            unexpected.append(stored)
    if waiting or unexpected:
        raise WeightsError(
            f"the head's checkpoint does not fit: {sorted(waiting)[:8]} missing, {sorted(unexpected)[:8]} not expected"
        )
