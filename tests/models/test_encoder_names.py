"""Every tensor of an encoder is one that transformers' model of the same architecture has, and of its shape: the trunk, what
classifiers put behind it, and the output layer of masked language models."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers

from headway.models.encoder import EncoderConfig, EncoderModel
from headway.models.encoder_config import SUFFIXES
from headway.models.registry import ENCODERS, model_class, read_config
from tests.models.test_defaults import families, spelled_out

APART = ("EuroBert", "Gte", "JinaBert", "JinaEmbeddingsV3", "New", "NomicBert")
"""EuroBERT is a decoder that sees both ways; the others transformers has not, or renames as it reads them."""
CASES = [f"{family}{suffix}" for family in ENCODERS if family not in APART for suffix in SUFFIXES]
LABELS = {"id2label": {str(i): f"l{i}" for i in range(3)}, "label2id": {f"l{i}": i for i in range(3)}}
DEVICE = torch.device("meta")


@pytest.mark.parametrize("architecture", CASES)
def test_names_and_shapes_are_those_of_transformers(architecture: str) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    given = spelled_out(architecture, num_hidden_layers=2, **LABELS)
    config = read_config(given)
    assert isinstance(config, EncoderConfig)
    words = config.outputs.sparse() if architecture.endswith("ForMaskedLM") else None
    if words is not None:  # what it says of a token, as a model that gives sparse vectors has it
        config = replace(config, outputs=words)
    kind = model_class(architecture)
    assert isinstance(kind, type)
    model = kind(config, dtype=torch.float32, device=DEVICE, max_model_len=32)
    assert isinstance(model, EncoderModel)
    with DEVICE:
        theirs = getattr(transformers, architecture)(CONFIG_MAPPING[families()[architecture]](**given))
    weights = model.weights()
    left = {*weights.targets}
    for name, tensor in theirs.state_dict().items():
        found = weights.find(name)
        if found is not None:
            assert tuple(found[1].shape) == tuple(tensor.shape), name
            left.discard(found[0])
    assert not left
