"""Public checkpoints by their own config.json: logits and greedy tokens are those of transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.models.public_configs import PUBLIC, SIZES
from tests.models.walk import oracle
from tests.models.walk.decoders import LENGTH, compare, config_class_of, save
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
