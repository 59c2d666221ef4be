"""Tensors of a folder of safetensors files: one file, or shards listed by an index."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open

from headway.core.errors import UnsupportedModelError, WeightsError

INDEX_NAME: Final = "model.safetensors.index.json"
SINGLE_NAME: Final = "model.safetensors"
DTYPE_BYTES: Final = {"F32": 4, "F16": 2, "BF16": 2}
TOKEN_HEADS: Final = ("colbert_linear", "sparse_linear")
"""Files of heads beside a model, see ``weights.token_heads``: no part of it."""
CONVERSION: Final = (
    'python -c "from transformers import AutoConfig as c; import transformers as t; '
    "getattr(t, c.from_pretrained('.').architectures[0]).from_pretrained('.').save_pretrained('.')\""
)
"""What a user may run where there are pickles alone."""
INDICES: Final = ("position_ids", "token_type_ids")
"""Endings of integer tensors that older exporters wrote: 0, 1, 2, ..., or all zeros. Nobody needs them."""
PACKED: Final = ("_blocks", "_scales")
"""Endings of tensors of bytes: 4-bit floats and their scales."""
INTEGER_BYTES: Final = {"I64": 8, "I32": 4, "BOOL": 1}
"""Types of tables that some checkpoints have beside their weights."""


def weight_files(folder: Path) -> tuple[list[Path], dict[str, str] | None]:
    """The files to read and, for shards, the index's map from tensor to file name.

    Raises:
        WeightsError: none is there, several without an index, or the index is unreadable or lists a missing file.
    """
    single, index = folder / SINGLE_NAME, folder / INDEX_NAME
    if single.is_file():
        return [single], None
    if index.is_file():
        weight_map = _read_index(index)
        files = [_inside(folder, index, name) for name in sorted(set(weight_map.values()))]
        missing = [f.name for f in files if not f.is_file()]
        if missing:
            raise WeightsError(f"{folder} lacks {', '.join(missing)}, listed in {INDEX_NAME}; download it again")
        return files, weight_map
    found = sorted(file for file in folder.glob("*.safetensors") if file.stem not in TOKEN_HEADS)
    if len(found) == 1:
        return found, None
    if found:
        raise WeightsError(f"{folder} holds {len(found)} safetensors files but no {INDEX_NAME} to say how they belong")
    hint = ""
    if any(folder.glob("pytorch_model*.bin")):
        hint = f"; convert them once, in {folder}, if you trust them: {CONVERSION}"
    raise WeightsError(
        f"{folder} holds no safetensors file; Headway reads safetensors and GGUF, no pickled weights{hint}"
    )


def _read_index(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise WeightsError(f"{index} is not a readable index of shards ({error}); download it again") from error
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(f, str) for f in weight_map.values()):
        raise WeightsError(f"{index}: weight_map must map tensor names to file names")
    return weight_map


def _inside(folder: Path, index: Path, name: str) -> Path:
    """``folder/name``, only if ``name`` is a plain path below ``folder``: an index is untrusted input."""
    for pure in (PurePosixPath(name), PureWindowsPath(name)):
        if pure.is_absolute() or pure.drive or ".." in pure.parts or not pure.parts:
            raise WeightsError(f"{index} names {name!r}, which lies outside the model's folder")
    if not name.endswith(".safetensors"):
        raise WeightsError(f"{index} names {name!r}, which is not a safetensors file")
    return folder / name


class SafetensorsFiles:
    """All tensors of a folder, memory-mapped.

    Headers are read and checked on construction; data only as ``tensors()`` advances.

    Args:
        integers: whether there may be tensors of integers and truth values, too.
        only: name of the one file to read, without its ending; "": those of the model.

    Raises:
        WeightsError: a file is missing, corrupt or truncated, a tensor occurs twice, or index and files disagree.
        UnsupportedModelError: a tensor of another dtype than float32, float16, bfloat16.
    """

    def __init__(self, folder: Path, *, integers: bool = False, only: str = "") -> None:
        self._sizes = DTYPE_BYTES | (INTEGER_BYTES if integers else {})
        self._files, weight_map = ([folder / f"{only}.safetensors"], None) if only else weight_files(folder)
        self._file_of: dict[str, Path] = {}
        self.num_bytes = 0
        for file in self._files:
            self._read_header(file)
        for name, file_name in (weight_map or {}).items():
            if self._file_of.get(name) != folder / file_name:
                raise WeightsError(f"{folder / INDEX_NAME} puts {name} into {file_name}, which does not hold it")

    def _read_header(self, file: Path) -> None:
        with _opened(file) as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                if name in self._file_of:
                    raise WeightsError(f"{name} is both in {self._file_of[name].name} and in {file.name}")
                view = opened.get_slice(name)
                dtype = view.get_dtype()
                if dtype.startswith("I") and name.endswith(INDICES):
                    continue
                if dtype == "U8" and name.endswith(PACKED):
                    self.num_bytes += math.prod(view.get_shape())
                    self._file_of[name] = file
                    continue
                if dtype not in self._sizes:
                    raise UnsupportedModelError(
                        f"{file}: tensor {name} has dtype {dtype}; supported: {', '.join(self._sizes)}"
                    )
                self.num_bytes += math.prod(view.get_shape()) * self._sizes[dtype]
                self._file_of[name] = file

    def names(self) -> set[str]:
        return set(self._file_of)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) in file order; the tensors are views of the mapped files."""
        for file in self._files:
            with _opened(file) as opened:
                for name in opened.offset_keys():
                    if name not in self._file_of:
                        continue
                    try:
                        tensor = opened.get_tensor(name)
                    except SafetensorError as error:
                        raise WeightsError(f"{file}: cannot read {name} ({error}); download it again") from error
                    yield name, tensor


def _opened(file: Path) -> Any:
    try:
        return safe_open(str(file), framework="pt", device="cpu")
    except SafetensorError as error:
        raise WeightsError(f"{file} is corrupt or truncated ({error}); download it again") from error
    except OSError as error:
        raise WeightsError(f"cannot read {file}: {error}") from error
