"""Folders of sentence-transformers: what a file leaves out is what that library takes it for, field by field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headway.core.errors import ModelError
from headway.weights.sentence import DenseFile, SentenceFiles, read_sentence_files

TRANSFORMER, POOLING, DENSE = "0_Transformer", "1_Pooling", "2_Dense"
WHOLE: dict[str, dict[str, Any]] = {
    f"{TRANSFORMER}/sentence_bert_config.json": {"max_seq_length": 128, "do_lower_case": True},
    f"{POOLING}/config.json": {
        "pooling_mode_cls_token": True,
        "pooling_mode_max_tokens": True,
        "include_prompt": False,
    },
    f"{DENSE}/config.json": {
        "in_features": 8,
        "out_features": 4,
        "bias": False,
        "activation_function": "torch.nn.modules.activation.GELU",
    },
    "config_sentence_transformers.json": {
        "prompts": {"query": "find: "},
        "default_prompt_name": "query",
        "similarity_fn_name": "dot",
    },
}
KINDS = ["Transformer", "Pooling", "Dense", "Normalize"]
READ = SentenceFiles(
    methods=("cls", "max"),
    include_prompt=False,
    dense=(DenseFile(DENSE, 8, 4, False, "gelu"),),
    normalize=True,
    max_length=128,
    lower_case=True,
    prompts={"query": "find: "},
    default_prompt_name="query",
    similarity="dot",
    transformer=TRANSFORMER,
)
LEFT_OUT: list[tuple[str, tuple[str, ...], str, Any]] = [
    # file, fields that it leaves out, what that concerns, and what sentence-transformers (5.1) makes of it
    (TRANSFORMER, ("max_seq_length",), "max_length", None),
    (TRANSFORMER, ("do_lower_case",), "lower_case", False),
    (POOLING, ("pooling_mode_cls_token", "pooling_mode_max_tokens"), "methods", ("mean",)),
    (POOLING, ("pooling_mode_cls_token",), "methods", ("max",)),
    (POOLING, ("include_prompt",), "include_prompt", True),
    (DENSE, ("bias",), "dense", (DenseFile(DENSE, 8, 4, True, "gelu"),)),
    (DENSE, ("activation_function",), "dense", (DenseFile(DENSE, 8, 4, False, "tanh"),)),
    ("config_sentence", ("prompts",), "prompts", {}),
    ("config_sentence", ("default_prompt_name",), "default_prompt_name", None),
    ("config_sentence", ("similarity_fn_name",), "similarity", "cosine"),
]


def written(folder: Path, files: dict[str, dict[str, Any]], kinds: list[str], idx: list[int] | None = None) -> Path:
    places = {"Transformer": TRANSFORMER, "Pooling": POOLING, "Dense": DENSE}
    modules = [
        {
            "idx": i,
            "name": str(i),
            "path": places.get(kind, f"3_{kind}"),
            "type": f"sentence_transformers.models.{kind}",
        }
        for i, kind in zip(idx or range(len(kinds)), kinds, strict=True)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    for name, values in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(values))
    return folder


def test_all_fields_are_read(tmp_path: Path) -> None:
    assert read_sentence_files(written(tmp_path, WHOLE, KINDS)) == READ


@pytest.mark.parametrize("case", LEFT_OUT, ids=lambda case: "-".join(case[1]))
def test_a_field_that_is_left_out(tmp_path: Path, case: tuple[str, tuple[str, ...], str, Any]) -> None:
    """It changes what it concerns, to the library's own default, and nothing else."""
    file, left_out, name, expected = case
    files = {
        path: {key: value for key, value in values.items() if not (path.startswith(file) and key in left_out)}
        for path, values in WHOLE.items()
    }
    assert files != WHOLE
    found = read_sentence_files(written(tmp_path, files, KINDS))
    assert found is not None
    for field in SentenceFiles.__dataclass_fields__:
        assert getattr(found, field) == (expected if field == name else getattr(READ, field)), field


def test_modules_count_by_their_index_and_not_all_need_be_there(tmp_path: Path) -> None:
    found = read_sentence_files(written(tmp_path, WHOLE, ["Dense", "Pooling", "Transformer"], [2, 1, 0]))
    assert found is not None and found.dense == READ.dense and not found.normalize
    assert read_sentence_files(tmp_path / POOLING) is None, "no modules.json"
    (tmp_path / "modules.json").write_text("{}")
    with pytest.raises(ModelError, match="must be a list"):
        read_sentence_files(tmp_path)
