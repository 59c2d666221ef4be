"""Folders of sentence-transformers: what a file leaves out is what that library takes it for, field by field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headway.core.errors import ModelError, UnsupportedModelError
from headway.weights.sentence import MOST_MODULES, DenseFile, SentenceFiles, module_folders, read_sentence_files

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


POOLED = ("cls", "max", "mean", "mean_sqrt", "weighted_mean", "last")
TODAY = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
FLAGS = ("cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")


def pooled(folder: Path, config: dict[str, Any]) -> SentenceFiles:
    found = read_sentence_files(written(folder, {f"{POOLING}/config.json": config}, ["Pooling"]))
    assert found is not None
    return found


@pytest.mark.parametrize("number", range(6))
def test_each_way_of_pooling_under_its_names(tmp_path: Path, number: int) -> None:
    method, today, flag = POOLED[number], TODAY[number], f"pooling_mode_{FLAGS[number]}"
    for config in (
        {"pooling_mode": today},
        {"pooling_mode": [today]},
        {flag: True},
        {flag: True, "pooling_mode": None},
    ):
        assert pooled(tmp_path, config).methods == (method,)
    other = (number + 1) % 6
    assert pooled(tmp_path, {"pooling_mode": [today, TODAY[other]]}).methods == (method, POOLED[other]), "as listed"
    both = {f"pooling_mode_{FLAGS[other]}": True, flag: True}
    assert pooled(tmp_path, both).methods == tuple(sorted((method, POOLED[other]), key=POOLED.index)), "in their order"


@pytest.mark.parametrize("modes", ["median", [], ["cls", "median"], 3, {"cls": True}, ""])
def test_other_ways_of_pooling_are_refused(tmp_path: Path, modes: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="pooling_mode"):
        pooled(tmp_path, {"pooling_mode": modes})


@pytest.mark.parametrize(("said", "included"), [(True, True), (False, False), (None, True), (0, True)])
def test_prompts_take_part_unless_it_says_false(tmp_path: Path, said: Any, included: bool) -> None:
    assert pooled(tmp_path, {"include_prompt": said}).include_prompt == included


def single(folder: Path, kind: str, config: dict[str, Any]) -> SentenceFiles:
    found = read_sentence_files(written(folder, {f"3_{kind}/config.json": config}, [kind]))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("activation", "name"),
    [("torch.nn.modules.linear.Identity", ""), ("Tanh", "tanh"), ("torch.nn.ReLU", "relu"), ("a.b.SiLU", "silu"),
     ("x.Sigmoid", "sigmoid")],
)  # fmt: skip
def test_layers_behind_the_pooling_follow_each_other(tmp_path: Path, activation: str, name: str) -> None:
    sizes = {"in_features": 8, "out_features": 4, "activation_function": activation}
    files = {f"{DENSE}/config.json": sizes}
    found = read_sentence_files(written(tmp_path, files, ["Dense", "Normalize", "Dense"]))
    assert found is not None and found.dense == (DenseFile(DENSE, 8, 4, True, name),) * 2 and found.normalize


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"in_features": 0}, "in_features and out_features"),
        ({"out_features": "4"}, "in_features and out_features"),
        ({"in_features": None}, "in_features and out_features"),
        ({"use_residual": True}, "use_residual"),
        ({"activation_function": "torch.nn.ELU"}, "the activation 'ELU' is not implemented"),
    ],
)
def test_layers_that_are_not_implemented(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    sizes = {"in_features": 8, "out_features": 4, **change}
    with pytest.raises(UnsupportedModelError, match=says):
        read_sentence_files(written(tmp_path, {f"{DENSE}/config.json": sizes}, ["Dense"]))


def test_sparse_vectors_and_scores_by_a_token(tmp_path: Path) -> None:
    config: dict[str, Any]
    for config in ({}, {"pooling_strategy": "max"}, {"activation_function": "relu"}):
        assert single(tmp_path, "SpladePooling", config) == SentenceFiles(sparse=True)
    for config in ({"pooling_strategy": "sum"}, {"activation_function": "log1p_relu"}):
        with pytest.raises(UnsupportedModelError, match="max of relu is"):
            single(tmp_path, "SpladePooling", config)
    scores: list[tuple[dict[str, Any], tuple[int, int | None]]] = [
        ({"true_token_id": 7, "false_token_id": 3}, (7, 3)),
        ({"true_token_id": 0}, (0, None)),
    ]
    for config, tokens in scores:
        assert single(tmp_path, "LogitScore", config) == SentenceFiles(score_tokens=tokens)
    for config in ({}, {"false_token_id": 3}, {"true_token_id": "yes"}, {"true_token_id": 7, "false_token_id": "no"}):
        with pytest.raises(UnsupportedModelError, match="LogitScore needs token ids"):
            single(tmp_path, "LogitScore", config)
    with pytest.raises(UnsupportedModelError, match="modules of type 'WordWeights'"):
        single(tmp_path, "WordWeights", {})


@pytest.mark.parametrize("kind", ["Transformer", "MLMTransformer"])
@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet"])
def test_the_transformers_own_file_has_had_many_names(tmp_path: Path, name: str, kind: str) -> None:
    folder = TRANSFORMER if kind == "Transformer" else f"3_{kind}"
    longest = {f"{folder}/sentence_{name}_config.json": {"max_seq_length": 77, "do_lower_case": True}}
    found = read_sentence_files(written(tmp_path, longest, [kind]))
    assert found == SentenceFiles(max_length=77, lower_case=True, transformer=folder)


@pytest.mark.parametrize(("said", "taken"), [(0, None), (-1, None), (1, 1), ("512", None), (None, None)])
def test_lengths_that_say_nothing(tmp_path: Path, said: Any, taken: int | None) -> None:
    files = {f"{TRANSFORMER}/sentence_bert_config.json": {"max_seq_length": said, "do_lower_case": "yes"}}
    found = read_sentence_files(written(tmp_path, files, ["Transformer"]))
    assert found is not None and (found.max_length, found.lower_case) == (taken, False)


@pytest.mark.parametrize("prompts", [["query"], {"query": 1}, {"query": None}])
def test_prompts_are_texts_by_name(tmp_path: Path, prompts: Any) -> None:
    folder = written(tmp_path, {"config_sentence_transformers.json": {"prompts": prompts}}, [])
    with pytest.raises(ModelError, match="prompts must map names to texts"):
        read_sentence_files(folder)


def test_names_that_say_nothing(tmp_path: Path) -> None:
    said: dict[str, Any] = {"default_prompt_name": 3, "similarity_fn_name": None, "prompts": None}
    assert read_sentence_files(written(tmp_path, {"config_sentence_transformers.json": said}, [])) == SentenceFiles()
    said = {"similarity_fn_name": "Euclidean"}
    found = read_sentence_files(written(tmp_path, {"config_sentence_transformers.json": said}, []))
    assert found == SentenceFiles(similarity="euclidean")


def test_as_many_modules_as_may_be(tmp_path: Path) -> None:
    assert read_sentence_files(written(tmp_path, {}, ["Normalize"] * MOST_MODULES)) == SentenceFiles(normalize=True)
    with pytest.raises(ModelError, match=f"up to {MOST_MODULES} modules"):
        read_sentence_files(written(tmp_path, {}, ["Normalize"] * (MOST_MODULES + 1)))
    for listed in ('["Normalize"]', '{"idx": 0}', "[1]"):
        (tmp_path / "modules.json").write_text(listed)
        with pytest.raises(ModelError, match="must be a list"):
            read_sentence_files(tmp_path)


def test_a_module_that_says_no_place_has_index_0(tmp_path: Path) -> None:
    """It is the transformer's in old files, whose folder is the model's own."""
    (tmp_path / "modules.json").write_text(
        '[{"idx": 1, "type": "x.Normalize", "path": "1"}, {"idx": "a", "type": "x.Transformer", "path": ""}]'
    )
    assert read_sentence_files(tmp_path) == SentenceFiles(normalize=True)
    for broken in ("{", "[]", None):
        (tmp_path / "modules.json").write_text('[{"type": "x.Pooling", "path": "p"}]')
        (tmp_path / "p").mkdir(exist_ok=True)
        (tmp_path / "p" / "config.json").unlink(missing_ok=True)
        if broken is not None:
            (tmp_path / "p" / "config.json").write_text(broken)
        with pytest.raises(ModelError, match=r"config\.json"):
            read_sentence_files(tmp_path)


@pytest.mark.parametrize(
    ("path", "fine"), [("a/b", True), ("a/b/c", False), ("..", False), ("a\\b", False), ("/a", False)]
)
def test_modules_lie_below_their_folder(tmp_path: Path, path: str, fine: bool) -> None:
    (tmp_path / "modules.json").write_text(json.dumps([{"type": "x.Normalize", "path": path}]))
    if fine:
        assert module_folders(tmp_path) == [path] and read_sentence_files(tmp_path) == SentenceFiles(normalize=True)
    else:
        for read in (module_folders, read_sentence_files):
            with pytest.raises(ModelError, match="outside the model's folder"):
                read(tmp_path)
