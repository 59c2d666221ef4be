"""A checkpoint: configuration and named tensors, whatever files they come from."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from headway.core.errors import ModelError, WeightsError
from headway.weights.gguf import BlockTensor, GgufTensors
from headway.weights.gguf_config import build_config, build_generation_config, kind_of, permuted_heads
from headway.weights.gguf_file import read_header
from headway.weights.safetensors import SafetensorsFiles
from headway.weights.sentence import SentenceFiles, read_sentence_files
from headway.weights.source import locate
from headway.weights.token_heads import TokenHeads, read_token_heads

NO_HEADS: Final = TokenHeads()


class TensorFiles(Protocol):
    """What a file format offers: names and sizes at once, tensors one by one."""

    num_bytes: int

    def names(self) -> set[str]: ...

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]: ...


class Checkpoint:
    """An opened model: headers are read and checked, no tensor data yet.

    Attributes:
        path: the model's folder or GGUF file.
        config: in the form of a Hugging Face ``config.json``.
        generation_config: ``generation_config.json``, {} if there is none.
        sentence: what sentence-transformers wrote beside it, None for nothing.
        token_heads: what lies beside it for tokens.
        is_dummy: the weights are not to be read; fill parameters with random numbers.
        num_bytes: bytes of all tensors as ``tensors()`` gives them; 0 for a dummy.
        in_blocks: whether there is a tensor in quantised blocks; ``quantized`` counts them by the name of their type.
    """

    def __init__(
        self,
        path: Path,
        config: dict[str, Any],
        generation_config: dict[str, Any],
        files: TensorFiles | None,
        sentence: SentenceFiles | None = None,
        token_heads: TokenHeads = NO_HEADS,
    ) -> None:
        self.path, self.config, self.generation_config, self.sentence = path, config, generation_config, sentence
        self.token_heads = token_heads
        self._files = files
        self.is_dummy = files is None
        self.num_bytes = files.num_bytes if files else 0
        self.quantized = files.quantized() if isinstance(files, GgufTensors) else Counter[str]()
        self.in_blocks = bool(self.quantized)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, CPU tensor) in file order; float32, float16 or bfloat16.

        Memory-mapped where the file holds the values as they are: copy what must outlive the loop or be written to.

        Raises:
            WeightsError: a dummy checkpoint, or a file that cannot be read.
        """
        return chain(self._opened().tensors(), self._dense_tensors())

    def stored(self, types: Collection[int]) -> Iterator[tuple[str, torch.Tensor | BlockTensor]]:
        """As ``tensors()``, but matrices of these ggml types come in the blocks of their GGUF file."""
        files = self._opened()
        own = files.stored(types) if isinstance(files, GgufTensors) else files.tensors()
        return chain(own, self._dense_tensors())

    def _dense_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors of sentence-transformers' Dense modules and of heads for tokens, named from their folders or files on."""
        for dense in self.sentence.dense if self.sentence is not None else ():
            for name, tensor in SafetensorsFiles(self.path / dense.folder).tensors():
                yield f"{dense.folder}.{name}", tensor
        for file in self.token_heads.files:
            for name, tensor in SafetensorsFiles(self.path, only=file).tensors():
                yield f"{file}.{name}", tensor

    def tensor_names(self) -> set[str]:
        """Names ``tensors()`` will give. Raises WeightsError for a dummy checkpoint."""
        return self._opened().names()

    def _opened(self) -> TensorFiles:
        if self._files is None:
            raise WeightsError(f'{self.path} was opened with load_format="dummy": it has no tensors to read')
        return self._files


def open_checkpoint(
    model: str, *, revision: str | None = None, load_format: str = "auto", integers: bool = False
) -> Checkpoint:
    """Find and open ``model``.

    Args:
        model: a folder in Hugging Face form, a .gguf file or a folder with exactly one, "smollm2", or a hub name.
        revision: hub revision, pinned for every file.
        load_format: "auto"; "safetensors" or "gguf" insist; "dummy" reads the configuration only.
        integers: whether safetensors files may hold tables of integers beside the weights.

    Raises:
        ModelError: no such model, or no readable configuration.
        UnsupportedModelError: an architecture or tensor type that is not read.
        WeightsError: weight files missing, corrupt, or not of the format asked for.
    """
    source = locate(model, revision=revision, load_format=load_format)
    is_dummy = load_format == "dummy"
    if source.is_gguf:
        header = read_header(source.path)
        config = build_config(header)
        files = None if is_dummy else GgufTensors(header, kind_of(header), permuted_heads(header))
        return Checkpoint(source.path, config, source.sampling | build_generation_config(header), files)
    sentence = read_sentence_files(source.path)
    own = source.path / sentence.transformer if sentence is not None else source.path
    config = read_json(own / "config.json")
    generation_file = source.path / "generation_config.json"
    generation = read_json(generation_file) if generation_file.is_file() else {}
    opened = None if is_dummy else SafetensorsFiles(own, integers=integers)
    heads = read_token_heads(source.path) if opened is not None else NO_HEADS
    return Checkpoint(source.path, config, generation, opened, sentence, heads)


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from ``file``. Raises ModelError naming the file when it is missing or broken."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{file.parent} has no {file.name}; it is not a model in Hugging Face form") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} is not readable JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} does not hold a JSON object")
    return value
