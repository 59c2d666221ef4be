"""Public checkpoints by their own config.json: logits and greedy tokens are those of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.models.public_configs import PUBLIC, SIZES
from tests.models.public_media_configs import POOL, READ
from tests.models.walk import oracle, others, poolers
from tests.models.walk.decoders import LENGTH, compare, config_class_of, save
from tests.models.walk.forms import read_tensors, write
from tests.models.walk.verdict import Outcome


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of the older spelling that public checkpoints have
@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_configuration(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration is read as it was released, not as transformers writes it."""
    import transformers

    architecture, own = PUBLIC[name]
    fields = SIZES | own
    model = oracle.build(getattr(transformers, architecture), config_class_of(architecture), fields, 0)
    tokens = oracle.tokens_of(0, model.config.vocab_size, LENGTH)
    save(model, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], **fields}))
    monkeypatch.setattr("tests.models.walk.decoders.excused", lambda *_: None)
    assert compare(model, str(tmp_path), tokens, oracle.run(model, tokens)) == (Outcome.EQUAL, "")


@pytest.mark.parametrize("name", POOL)
def test_a_public_model_that_pools(name: str, tmp_path: Path) -> None:
    """Vectors of all tokens, or scores."""
    import transformers

    architecture, fields = POOL[name]
    model_class = getattr(transformers, architecture)
    model = oracle.build(model_class, model_class.config_class, fields, 0)
    texts = poolers._texts(0, model.config)
    wanted = [poolers._expected(model, text, 0) for text in texts]
    save(model, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], **fields}))
    assert poolers.compare(model, str(tmp_path), texts, wanted, 0) == (Outcome.EQUAL, "")


@pytest.mark.parametrize("name", READ)
def test_a_public_encoder_decoder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probabilities of what it reads into."""
    architecture, fields = READ[name]

    def saved(model: Any, folder: Path) -> None:
        save(model, folder)
        tensors = read_tensors(folder)
        if fields.get("tie_word_embeddings") is False:  # transformers ties it whatever the field says; releases hold it
            write(folder, {"lm_head.weight": tensors["shared.weight"].clone(), **tensors}, 1)
        (folder / "config.json").write_text(json.dumps({"architectures": [architecture], **fields}))

    monkeypatch.setattr("tests.models.walk.others.save", saved)
    verdict = others.judge_reader(architecture, 1, dict(fields))
    assert verdict.outcome is Outcome.EQUAL, verdict.detail
