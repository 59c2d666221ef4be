"""Heads for tokens that lie in files of their own beside a model, as BGE-M3's do (Chen et al. 2024).

The makers' files are pickles (``sparse_linear.pt``, ``colbert_linear.pt``), which are never read. The same tensors as
``sparse_linear.safetensors`` and ``colbert_linear.safetensors`` are.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from headway.core.errors import WeightsError
from headway.weights.safetensors import TOKEN_HEADS, SafetensorsFiles

VECTORS, WEIGHTS = TOKEN_HEADS
CONVERSION: Final = (
    "python -c \"import torch, safetensors.torch as s; [s.save_file(torch.load(f + '.pt', weights_only=True), "
    "f + '.safetensors') for f in {names}]\""
)


@dataclass(frozen=True, slots=True)
class TokenHeads:
    """What lies there.

    Attributes:
        vectors: numbers of a token's vector; 0: no head gives any.
        weights: a head gives a token's weight.
        pickled: what to do about heads that are there as pickles alone; "" where there is nothing to do.
    """

    vectors: int = 0
    weights: bool = False
    pickled: str = ""

    @property
    def files(self) -> list[str]:
        """Names without endings, of those that are read."""
        return [name for name, is_there in ((VECTORS, self.vectors), (WEIGHTS, self.weights)) if is_there]


def read_token_heads(folder: Path) -> TokenHeads:
    """What lies in ``folder``. Raises WeightsError: a file is broken, or holds something else."""
    shapes = {name: _shape(folder, name) for name in TOKEN_HEADS if (folder / f"{name}.safetensors").is_file()}
    if WEIGHTS in shapes and shapes[WEIGHTS] != 1:
        raise WeightsError(
            f"{folder / WEIGHTS}.safetensors gives {shapes[WEIGHTS]} numbers a token, and a weight is one"
        )
    pickled = [name for name in TOKEN_HEADS if name not in shapes and (folder / f"{name}.pt").is_file()]
    hint = ""
    if pickled:
        listed = " and ".join(f"{name}.pt" for name in pickled)
        hint = (
            f"{listed} beside the model are pickles, which are never read; convert them once, in {folder}, if you trust "
            f"them: {CONVERSION.format(names=pickled)}"
        )
    return TokenHeads(shapes.get(VECTORS, 0), WEIGHTS in shapes, hint)


def _shape(folder: Path, name: str) -> int:
    """Rows of the matrix."""
    for tensor_name, tensor in SafetensorsFiles(folder, only=name).tensors():
        if tensor_name == "weight" and tensor.dim() == 2:
            return int(tensor.shape[0])
    raise WeightsError(f"{folder / name}.safetensors holds no matrix called weight")
