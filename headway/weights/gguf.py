"""Tensors of a GGUF file under Hugging Face names, dequantised on the way or in their blocks."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch

from headway.core.errors import UnsupportedModelError, WeightsError
from headway.weights.gguf_file import GgufHeader, GgufTensor
from headway.weights.gguf_kinds import BLOCK_NAMES, GgufKind

if TYPE_CHECKING:
    import numpy.typing as npt


class TensorType(NamedTuple):
    """A ggml tensor type: ``block`` elements take ``num_bytes`` bytes."""

    name: str
    block: int
    num_bytes: int


TENSOR_TYPES: Final = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    18: TensorType("IQ3_XXS", 256, 98),
    19: TensorType("IQ1_S", 256, 50),
    20: TensorType("IQ4_NL", 32, 18),
    21: TensorType("IQ3_S", 256, 110),
    22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136),
    29: TensorType("IQ1_M", 256, 56),
    30: TensorType("BF16", 1, 2),
    34: TensorType("TQ1_0", 256, 54),
    35: TensorType("TQ2_0", 256, 66),
    39: TensorType("MXFP4", 32, 17),
}
PLAIN: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types kept as they are; every other type becomes float32."""

TOP_NAMES: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
ROPE_FACTORS: Final = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
"""No parameters: divisors of the rotary frequencies, handed on in the configuration."""

_BLOCK: Final = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROTARY_TABLE: Final = re.compile(r"blk\.\d+\.attn_rot_embd\.weight")


def hf_name(name: str, kind: GgufKind) -> str | None:
    """The Hugging Face name of a GGUF tensor in a file of this kind; None when it has none."""
    if block := _BLOCK.fullmatch(name):
        inner = kind.names.get(block[2]) or BLOCK_NAMES.get(block[2])
        return inner and f"model.layers.{int(block[1])}.{inner}.{block[3]}"
    stem, _, part = name.rpartition(".")
    top = TOP_NAMES.get(stem)
    return f"{top}.{part}" if top and part in ("weight", "bias") else None


def tensor_type(path: Path, tensor: GgufTensor) -> TensorType:
    """The type of ``tensor``.

    Raises:
        UnsupportedModelError: a type that is not read, by name.
    """
    known = TENSOR_TYPES.get(tensor.type_id)
    if known is None:
        have = ", ".join(t.name for t in TENSOR_TYPES.values())
        raise UnsupportedModelError(
            f"{path}: tensor {tensor.name} has type {_foreign_type_name(tensor.type_id)}; supported types: {have}"
        )
    return known


def _foreign_type_name(type_id: int) -> str:
    try:
        from gguf import GGMLQuantizationType

        return str(GGMLQuantizationType(type_id).name)
    except (ImportError, ValueError):
        return f"number {type_id}"


@dataclass(frozen=True, slots=True)
class BlockTensor:
    """A matrix in the blocks of its file.

    Attributes:
        type_id: ggml's number of the type.
        rows: uint8 [N, bytes of a row], as the file has them.
    """

    type_id: int
    rows: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        """(N, K), of the values."""
        kind = TENSOR_TYPES[self.type_id]
        return torch.Size((self.rows.shape[0], self.rows.shape[1] // kind.num_bytes * kind.block))

    def dequantized(self) -> torch.Tensor:
        """float32 [N, K]."""
        return _dequantized(self.rows.numpy(), self.type_id).view(self.shape)  # host: a CPU tensor, at load time


def read_tensor(header: GgufHeader, tensor: GgufTensor, mapped: npt.NDArray[np.uint8] | None = None) -> torch.Tensor:
    """One tensor, ``tensor.shape``; float32, or float16/bfloat16 where the file has those (then a view of the file)."""
    kind = tensor_type(header.path, tensor)
    start, num_bytes = tensor.offset, stored_bytes(header.path, tensor)
    if start + num_bytes > header.file_size:
        raise WeightsError(
            f"{header.path} is truncated: {tensor.name} ends at byte {start + num_bytes}, "
            f"the file at {header.file_size}; download it again"
        )
    raw = (map_file(header.path) if mapped is None else mapped)[start : start + num_bytes]
    if kind.name in PLAIN:
        if num_bytes == 0:
            return torch.empty(tensor.shape, dtype=PLAIN[kind.name])
        item = kind.num_bytes
        if start % item:  # an alignment below the item size is legal, but torch cannot view such data
            raw = raw.copy()
        return torch.from_numpy(raw).view(PLAIN[kind.name]).view(tensor.shape)
    return _dequantized(raw.reshape(*tensor.shape[:-1], -1), tensor.type_id).view(tensor.shape)


def _dequantized(rows: npt.NDArray[np.uint8], type_id: int) -> torch.Tensor:
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError:
        raise UnsupportedModelError("reading quantised GGUF files needs the gguf package: pip install gguf") from None
    # Blocks of a damaged file may hold infinite scales; the model loader reports them, numpy need not.
    with np.errstate(all="ignore"):
        values = dequantize(rows, GGMLQuantizationType(type_id))
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))


def stored_bytes(path: Path, tensor: GgufTensor) -> int:
    """Bytes ``tensor`` takes in the file."""
    kind = tensor_type(path, tensor)
    if not tensor.shape or tensor.shape[-1] % kind.block:
        raise WeightsError(f"{path}: {tensor.name} has shape {tensor.shape}, not whole blocks of {kind.name}")
    return math.prod(tensor.shape) // kind.block * kind.num_bytes


def map_file(path: Path) -> npt.NDArray[np.uint8]:
    """The whole file as bytes, mapped. Copy-on-write, because torch wants writable memory under a tensor."""
    return np.memmap(path, dtype=np.uint8, mode="c")


class GgufTensors:
    """All parameters of one file.

    Args:
        header: the parsed file; every record is checked here (type, size, name), before any data is read.
        kind: its architecture.
        permuted_heads: (H, KH) when the file's q and k rows are interleaved for llama.cpp's rotary layout, else None.

    Raises:
        UnsupportedModelError: a tensor with a type or a name that is not known.
        WeightsError: the file ends before a tensor does.
    """

    def __init__(self, header: GgufHeader, kind: GgufKind, permuted_heads: tuple[int, int] | None = None) -> None:
        self._header, self._kind, self._heads = header, kind, permuted_heads
        self._records: dict[str, GgufTensor] = {}
        self.num_bytes = 0
        for tensor in header.tensors:
            if tensor.name in (ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS) or _ROTARY_TABLE.fullmatch(tensor.name):
                continue
            name = hf_name(tensor.name, kind)
            if name is None:
                raise UnsupportedModelError(
                    f"{header.path}: tensor {tensor.name} belongs to no part of a {kind.model_type} model"
                )
            size = stored_bytes(header.path, tensor)
            if tensor.offset + size > header.file_size:
                raise WeightsError(
                    f"{header.path} is truncated: {tensor.name} ends at byte {tensor.offset + size}, "
                    f"the file at {header.file_size}; download it again"
                )
            stored = tensor_type(header.path, tensor)
            width = stored.num_bytes if stored.name in PLAIN else 4
            self.num_bytes += math.prod(tensor.shape) * width
            self._records[name] = tensor

    def names(self) -> set[str]:
        return set(self._records)

    def quantized(self) -> Counter[str]:
        """Type name -> how many tensors have it; types that hold plain numbers are left out."""
        names = (TENSOR_TYPES[record.type_id].name for record in self._records.values())
        return Counter(name for name in names if name not in PLAIN)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, tensor) in file order."""
        for name, tensor in self.stored(()):
            assert isinstance(tensor, torch.Tensor)
            yield name, tensor

    def stored(self, types: Collection[int]) -> Iterator[tuple[str, torch.Tensor | BlockTensor]]:
        """(Hugging Face name, tensor) in file order, matrices of these ggml types in their blocks."""
        mapped = map_file(self._header.path)
        for name, record in sorted(self._records.items(), key=lambda item: item[1].offset):
            if record.type_id in types and len(record.shape) == 2:
                yield name, self._blocks(record, mapped)
            else:
                yield name, self._restored(record, read_tensor(self._header, record, mapped))

    def _blocks(self, record: GgufTensor, mapped: npt.NDArray[np.uint8]) -> BlockTensor:
        raw = mapped[record.offset : record.offset + stored_bytes(self._header.path, record)]
        rows = torch.from_numpy(raw).view(record.shape[0], -1)
        return BlockTensor(record.type_id, self._restored(record, rows))

    def _restored(self, record: GgufTensor, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 1 and ".ffn_gate_inp_shexp." in record.name:
            return tensor[None]  # a product with one output
        if self._kind.plus_one and record.name.endswith("norm.weight"):
            return tensor.float() - 1
        if self._heads is None or (block := _BLOCK.fullmatch(record.name)) is None:
            return tensor
        heads = {"attn_q": self._heads[0], "attn_k": self._heads[1]}.get(block[2])
        if heads is None:
            return tensor
        if tensor.shape[0] % (2 * heads):
            raise WeightsError(f"{self._header.path}: {record.name} has {tensor.shape[0]} rows for {heads} heads")
        return half_split_rows(tensor, heads)


def half_split_rows(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo llama.cpp's row order: pairs (0,1), (2,3).. of each head become (0,D/2), (1,D/2+1)..

    tensor: [num_heads*D, ...] -> same shape, contiguous.
    """
    pairs = tensor.view(num_heads, -1, 2, *tensor.shape[1:])  # [heads, D/2, 2, ...]
    return pairs.transpose(1, 2).reshape(tensor.shape)
