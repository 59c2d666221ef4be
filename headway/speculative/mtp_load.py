"""From the checkpoint of a model to its layer for multi-token prediction, on the device."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from headway.core.errors import ConfigError
from headway.core.log import logger
from headway.models.decoder import DecoderModel
from headway.models.interface import Model
from headway.models.load import fill, fill_randomly
from headway.models.mtp import MTPSpec
from headway.speculative.mtp_model import MTPModel
from headway.weights import Checkpoint


def load_mtp(checkpoint: Checkpoint, *, target: Model, dtype: torch.dtype, max_len: int, seed: int) -> MTPModel:
    """The layer of ``checkpoint``, the target's own; of its tensors only the layer's are read.

    Args:
        max_len: positions it must be able to run.
        seed: of the random weights when the checkpoint is a dummy.

    Raises:
        ConfigError: the model has no such layer, or its file leaves it out.
        WeightsError: tensors of the layer are missing, unexpected or of the wrong shape.
    """
    if not isinstance(target, DecoderModel) or target.config.mtp is None:
        raise ConfigError(
            f'speculative_config: {target.spec.architecture} has no layer for multi-token prediction, so method="mtp" has '
            'nothing to draft with; use "ngram", or a head of its own ("eagle3", "dflash")'
        )
    if checkpoint.path.suffix == ".gguf":
        raise ConfigError(
            'speculative_config: layers for multi-token prediction are not read from GGUF files; use method="ngram", or the '
            "model's safetensors"
        )
    spec = target.config.mtp
    if spec.layers > 1:
        logger.info("of %d layers for multi-token prediction the first drafts all tokens", spec.layers)
    model = MTPModel(target, spec, target.config, dtype=dtype, max_len=max_len)
    if checkpoint.is_dummy:
        fill_randomly(model, seed)
    else:
        fill(model, _own(checkpoint, spec))
    model.finalize()
    return model


def _own(checkpoint: Checkpoint, spec: MTPSpec) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of the layer alone."""
    modules = (spec.block, spec.token_norm, spec.hidden_norm, spec.projection, spec.norm)
    own = tuple(f"{module.removeprefix('model.')}." for module in modules)
    for name, tensor in checkpoint.tensors():
        if name.removeprefix("model.").startswith(own):
            yield name, tensor
