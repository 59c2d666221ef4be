"""From the checkpoint of a drafter of blocks to the drafter on the device."""

from __future__ import annotations

import torch

from headway.core.errors import ConfigError
from headway.models.decoder import DecoderModel
from headway.models.interface import Model
from headway.speculative.agreed import whole_logits
from headway.speculative.dflash_config import read_dflash
from headway.speculative.dflash_model import DFlashModel
from headway.speculative.eagle_load import fill_head, fill_randomly, plain_name
from headway.weights import Checkpoint

UNUSED = ("confidence_head.", "verifier_", "mask_embedding")
"""DSpark's guess of how likely drafts are, which nothing asks for, copies of the target's parts, and a remnant of training."""


@torch.no_grad()
def load_dflash(
    checkpoint: Checkpoint, *, spark: bool, target: Model, dtype: torch.dtype, max_len: int, seed: int
) -> DFlashModel:
    """The drafter of ``checkpoint``, its weights beside the target's.

    Args:
        spark: DSpark.
        max_len: positions it must be able to run.
        seed: of the random weights when the checkpoint is a dummy.

    Raises:
        UnsupportedModelError: see ``read_dflash``.
        WeightsError: tensors are missing, unexpected or of the wrong shape.
        ConfigError: the target is no decoder.
    """
    if not isinstance(target, DecoderModel):
        raise ConfigError('speculative_config: DFlash reads the embedding of a decoder; use method="ngram"')
    config = read_dflash(checkpoint.config, spark=spark, target=target.spec)
    names = frozenset() if checkpoint.is_dummy else frozenset(map(plain_name, checkpoint.tensor_names()))
    embed, logits = target.embedding.forward, whole_logits(target)
    model = DFlashModel(config, names, embed, logits, dtype=dtype, device=target.device, max_len=max_len)
    if checkpoint.is_dummy:
        fill_randomly(model, seed)
    else:
        fill_head(model, checkpoint, UNUSED)
    model.finalize()
    return model
