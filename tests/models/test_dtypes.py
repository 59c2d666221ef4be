"""A model is wholly on its device and in its dtype: every architecture of its makers' size, without memory, and tiny ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from headway.models.decoder import DecoderConfig, DecoderModel
from headway.models.layers.moe import Mixture
from headway.models.load import load_model
from headway.models.registry import model_class, read_config
from headway.weights import open_checkpoint
from tests.latent import tiny_latents
from tests.latent.tiny_latents import LATENTS
from tests.models import tiny
from tests.models.harness import DEVICE as HERE
from tests.models.harness import Machine
from tests.models.test_defaults import KNOWN, spelled_out
from tests.models.tiny import TINY
from tests.recurrent import tiny_hybrids
from tests.recurrent.tiny_hybrids import HYBRIDS

DEVICE = torch.device("meta")
FLOAT32 = {
    "a", "a_log", "correction", "d", "dt_bias", "factors", "learned", "logit_bias", "rates", "sinks",
}  # fmt: skip
"""What is kept in float32 whatever the model's dtype is: rates of states, corrections of routers, sinks, distances, factors."""
NORMS = {"after_ffn", "after_mixer", "before_ffn", "before_mixer", "k_norm", "norm", "q_norm"}
"""Norms, where 1 is added to their weights: 1 + weight has no place in 16 bits."""


@pytest.mark.parametrize("architecture", KNOWN)
def test_parameters_have_the_models_dtype_and_device(architecture: str) -> None:
    config = read_config(spelled_out(architecture))
    model = model_class(architecture)(config, dtype=torch.bfloat16, device=DEVICE, max_model_len=32)
    assert isinstance(model, nn.Module)
    adds_one = isinstance(config, DecoderConfig) and config.norm.plus_one
    wide = set()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        module, own = ("", *name.split("."))[-2:]
        assert tensor.is_meta, name
        if tensor.dtype is not torch.bfloat16 and own not in FLOAT32 and not (adds_one and module in NORMS):
            wide.add(name)
    assert not wide


FAR = ("glm-dsa", "glm-dsa-shared", "v3.2", "zamba2", "zamba2-one-block")
"""Where rounding leads far in transformers, too: indexers choose tokens, and Zamba's blocks read embeddings of one size with
hidden states of another (transformers: .23 and .34)."""


def check_rounded(model: DecoderModel, case: Any, *, chooses: bool) -> None:
    """That it is wholly in bfloat16 and near ``case``; routers may send tokens elsewhere when their scores nearly tie."""
    assert model.dtype is torch.bfloat16
    logits = Machine(model).in_chunks(case.tokens, [7, 1, len(case.tokens) - 8])
    error = float((logits - case.logits).norm() / case.logits.norm())
    assert 1e-4 < error < (0.5 if chooses else 0.12), error


def has_mixtures(model: DecoderModel) -> bool:
    return any(isinstance(module, Mixture) for module in model.modules())


@pytest.mark.parametrize("name", TINY)
def test_in_16_bits(name: str) -> None:
    case = tiny.pair(name)
    model = tiny.ours(tiny.hf_model(TINY[name]), dtype=torch.bfloat16)
    check_rounded(model, case, chooses=has_mixtures(model))


@pytest.mark.parametrize("name", [*HYBRIDS, *LATENTS])
def test_states_and_latents_in_16_bits(name: str) -> None:
    own = tiny_hybrids if name in HYBRIDS else tiny_latents
    case = own.pair(name)
    checkpoint = open_checkpoint(str(own.folder_of(name)))
    model = load_model(checkpoint, dtype=torch.bfloat16, device=HERE, max_model_len=own.MAX_LEN, progress=False, seed=0)
    assert isinstance(model, DecoderModel)
    check_rounded(model, case, chooses=has_mixtures(model) or name in FAR)


SCALED = [name for name, case in TINY.items() if case.family.startswith(("Gemma", "Granite", "MiniCPM3"))]
"""Models that may multiply their embeddings."""


@pytest.mark.parametrize("name", SCALED)
def test_embeddings_in_16_bits_have_transformers_bits(name: str) -> None:
    """Some round their factor to the model's dtype first, others do not: which shows in 16 bits alone."""
    oracle = tiny.hf_model(TINY[name])
    model = tiny.ours(oracle, dtype=torch.bfloat16)
    ids = torch.arange(3, 60)
    with torch.no_grad():
        embedded = oracle.bfloat16().get_input_embeddings()(ids)  # Gemma's multiplies by itself
        factor = getattr(oracle.config, "embedding_multiplier", None)
    found = model.embedding.forward(ids.to(torch.int32), model._multiplier)
    assert torch.equal(found, embedded if factor is None else embedded * factor)
    assert factor is not None or model._multiplier != 1.0
