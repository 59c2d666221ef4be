"""Safetensors folders: single file, shards, and everything that can be wrong with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from headway.core.errors import UnsupportedModelError, WeightsError
from headway.weights.safetensors import INDEX_NAME, SafetensorsFiles

PARTS = {
    "model-1.safetensors": {"b": torch.randn(3, 2), "a": torch.randn(4).bfloat16()},
    "model-2.safetensors": {"c": torch.randn(2, 2).half()},
}


def shards(folder: Path, weight_map: dict[str, str] | None = None) -> Path:
    for name, tensors in PARTS.items():
        save_file(tensors, folder / name)
    index = {t: name for name, tensors in PARTS.items() for t in tensors} if weight_map is None else weight_map
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def test_single_file_wins_over_others(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    save_file({"other": torch.ones(2)}, tmp_path / "consolidated.safetensors")
    files = SafetensorsFiles(tmp_path)
    assert files.names() == {"w"}
    assert files.num_bytes == 8


def test_lone_file_of_any_name(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "weights.safetensors")
    assert SafetensorsFiles(tmp_path).names() == {"w"}


def test_shards_in_file_order(tmp_path: Path) -> None:
    files = SafetensorsFiles(shards(tmp_path))
    found = list(files.tensors())
    offsets = {name: tensor.data_ptr() for name, tensor in found}
    assert {name for name, _ in found} == files.names() == {"a", "b", "c"}
    assert list(offsets)[2] == "c"
    assert offsets[found[0][0]] < offsets[found[1][0]]
    for name, tensor in found:
        expected = next(tensors[name] for tensors in PARTS.values() if name in tensors)
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor, expected)
    assert files.num_bytes == 3 * 2 * 4 + 4 * 2 + 2 * 2 * 2


def test_missing_shard_is_named(tmp_path: Path) -> None:
    (shards(tmp_path) / "model-2.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"lacks model-2\.safetensors"):
        SafetensorsFiles(tmp_path)


@pytest.mark.parametrize(
    "weight_map", [{"b": "model-1.safetensors", "nowhere": "model-2.safetensors"}, {"c": "model-1.safetensors"}]
)
def test_index_that_lies(tmp_path: Path, weight_map: dict[str, str]) -> None:
    with pytest.raises(WeightsError, match="does not hold it"):
        SafetensorsFiles(shards(tmp_path, weight_map))


@pytest.mark.parametrize(
    "name",
    [
        "../out.safetensors",
        "a/../../out.safetensors",
        "/etc/out.safetensors",
        "..\\out.safetensors",
        "C:\\out.safetensors",
        "C:out.safetensors",
        "",
    ],
)
def test_index_may_not_leave_the_folder(tmp_path: Path, name: str) -> None:
    inside = tmp_path / "model"
    inside.mkdir()
    save_file({"w": torch.ones(1)}, tmp_path / "out.safetensors")
    with pytest.raises(WeightsError, match="outside"):
        SafetensorsFiles(shards(inside, {"w": name}))


def test_index_names_other_kinds_of_files(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="not a safetensors file"):
        SafetensorsFiles(shards(tmp_path, {"w": "pytorch_model.bin"}))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "[" * 100_000])
def test_broken_index(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX_NAME).write_text(text)
    with pytest.raises(WeightsError, match=INDEX_NAME):
        SafetensorsFiles(tmp_path)


def test_several_files_without_index(tmp_path: Path) -> None:
    (shards(tmp_path) / INDEX_NAME).unlink()
    with pytest.raises(WeightsError, match="no model\\.safetensors\\.index"):
        SafetensorsFiles(tmp_path)


def test_no_file(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(WeightsError, match="no pickled weights"):
        SafetensorsFiles(tmp_path)


def test_tensor_twice(tmp_path: Path) -> None:
    shards(tmp_path)
    save_file({"a": torch.ones(1), "c": torch.ones(1)}, tmp_path / "model-2.safetensors")
    with pytest.raises(WeightsError, match=r"a is both in model-1\.safetensors and in model-2"):
        SafetensorsFiles(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 20, 100, -1])
def test_truncated_file_is_named(tmp_path: Path, keep: int) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"weight.of.some.length": torch.ones(64)}, file)
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(WeightsError, match=r"model\.safetensors is corrupt or truncated"):
        SafetensorsFiles(tmp_path)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float8_e4m3fn])
def test_other_dtypes_name_the_tensor(tmp_path: Path, dtype: torch.dtype) -> None:
    save_file({"odd": torch.zeros(2).to(dtype)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match="tensor odd has dtype"):
        SafetensorsFiles(tmp_path)


def test_tables_of_integers_count_where_they_are_read(tmp_path: Path) -> None:
    tables = {"i": torch.arange(3), "j": torch.arange(5, dtype=torch.int32), "b": torch.ones(7, dtype=torch.bool)}
    save_file({**tables, "w": torch.ones(2).half()}, tmp_path / "model.safetensors")
    files = SafetensorsFiles(tmp_path, integers=True)
    assert files.num_bytes == 3 * 8 + 5 * 4 + 7 + 2 * 2
    assert all(torch.equal(tensor, tables.get(name, torch.ones(2).half())) for name, tensor in files.tensors())
    for name, table in tables.items():
        save_file({name: table}, tmp_path / "model.safetensors")
        with pytest.raises(UnsupportedModelError, match=f"tensor {name} has dtype"):
            SafetensorsFiles(tmp_path)


def test_what_nobody_needs_and_what_is_packed(tmp_path: Path) -> None:
    """Positions are left out; bytes count as such, and are read only under names of packed weights."""
    whole = {
        "embeddings.position_ids": torch.arange(9), "x.token_type_ids": torch.zeros(9, dtype=torch.int32),
        "e_blocks": torch.ones(4, 6, dtype=torch.uint8), "e_scales": torch.ones(5, dtype=torch.uint8), "w": torch.ones(2),
    }  # fmt: skip
    save_file(whole, tmp_path / "model.safetensors")
    files = SafetensorsFiles(tmp_path)
    assert files.names() == {name for name, _ in files.tensors()} == {"e_blocks", "e_scales", "w"}
    assert files.num_bytes == 24 + 5 + 8
    for name, table in (("e_bytes", torch.ones(2, dtype=torch.uint8)), ("my_ids", torch.arange(2))):
        save_file({name: table}, tmp_path / "model.safetensors")
        with pytest.raises(UnsupportedModelError, match=f"tensor {name} has dtype"):
            SafetensorsFiles(tmp_path)
    save_file({"position_ids": torch.ones(2)}, tmp_path / "model.safetensors")
    assert SafetensorsFiles(tmp_path).names() == {"position_ids"}, "these are weights"


def test_heads_beside_a_model_are_no_part_of_it(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "weights.safetensors")
    for name in ("colbert_linear", "sparse_linear"):
        save_file({"weight": torch.ones(3, 3)}, tmp_path / f"{name}.safetensors")
    assert SafetensorsFiles(tmp_path).names() == {"w"}
    only = SafetensorsFiles(tmp_path, only="sparse_linear")
    assert (only.names(), only.num_bytes) == ({"weight"}, 36)
    (tmp_path / "weights.safetensors").unlink()
    with pytest.raises(WeightsError, match="holds no safetensors file"):
        SafetensorsFiles(tmp_path)


def test_pickles_are_told_how_to_become_weights(tmp_path: Path) -> None:
    with pytest.raises(WeightsError) as nothing:
        SafetensorsFiles(tmp_path)
    assert "convert" not in str(nothing.value), "there is nothing to convert"
    (tmp_path / "pytorch_model-00001-of-00002.bin").write_bytes(b"")
    with pytest.raises(WeightsError, match=r"convert them once, in .*save_pretrained"):
        SafetensorsFiles(tmp_path)


def test_shards_below_the_folder(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    save_file({"w": torch.ones(2)}, tmp_path / "parts" / "one.safetensors")
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {"w": "parts/one.safetensors"}}))
    assert SafetensorsFiles(tmp_path).names() == {"w"}
