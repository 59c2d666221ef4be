"""What follows the hidden states where nothing is generated: the layers of classifiers, reward models and projections."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import torch
import torch.nn.functional as F
from torch import nn

from headway.models.interface import Target
from headway.pooling.spec import PoolingSpec

HEAD_ACTIVATIONS: Final[Mapping[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "": lambda x: x, "tanh": torch.tanh, "relu": F.relu, "gelu": F.gelu, "silu": F.silu, "sigmoid": torch.sigmoid,
    "relu2": lambda x: F.relu(x).square(), "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "log1p_relu": lambda x: torch.log1p(F.relu(x)),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadLayer:
    """norm(activation(W x + b)).

    Attributes:
        name: of the product in the checkpoint.
        size: numbers it gives.
        activation: of ``HEAD_ACTIVATIONS``.
        norm: the layer norm's name in the checkpoint, "" for none; norm_bias, eps: its.
        rows: it has these rows alone of a matrix with ``rows_of`` rows: scores taken from an output layer's logits.
        tied: its weight is the token embedding, or ``rows`` of it.
        bias_name: where the bias lies, if not at ``name``.bias.
    """

    name: str
    size: int
    activation: str = ""
    bias: bool = True
    norm: str = ""
    norm_bias: bool = True
    eps: float = 1e-5
    rows: tuple[int, ...] = ()
    rows_of: int = 0
    tied: bool = False
    bias_name: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadSpec:
    """Layers behind the hidden states, none by default.

    Attributes:
        contrast: of two numbers the second minus the first is left: the log of how much likelier it is.
    """

    layers: tuple[HeadLayer, ...] = ()
    contrast: bool = False

    def width(self, hidden: int) -> int:
        """Numbers it gives for hidden states of so many."""
        return 1 if self.contrast else self.layers[-1].size if self.layers else hidden

    @property
    def shares_embedding(self) -> bool:
        """Whether a layer's weight is the token embedding, or rows of it."""
        return any(layer.tied for layer in self.layers)

    @property
    def beginnings(self) -> list[str]:
        """Of the names of its tensors in the checkpoint."""
        names = (name for layer in self.layers for name in (f"{layer.name}.", layer.bias_name, f"{layer.norm}."))
        return [name for name in names if name.strip(".")]


class Layer(nn.Module):
    """A ``HeadLayer`` of float32: there are few of them, and what they give is shown to users."""

    def __init__(self, spec: HeadLayer, size: int, embedding: torch.Tensor | None, device: torch.device) -> None:
        super().__init__()

        def made(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=torch.float32, device=device), requires_grad=False)

        self.spec, self._tied = spec, embedding if spec.tied else None
        self.weight = None if spec.tied and not spec.rows else made(spec.size, size)
        self.bias = made(spec.size) if spec.bias else None
        self.norm_weight = made(spec.size) if spec.norm else None
        self.norm_bias = made(spec.size) if spec.norm and spec.norm_bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """f32 [N, C] -> f32 [N, size]."""
        spec = self.spec
        if self.weight is None and self._tied is not None:  # as large as the vocabulary: it stays in the model's dtype
            x = F.linear(x.to(self._tied.dtype), self._tied).float()
            x = x if self.bias is None else x + self.bias
        else:
            assert self.weight is not None
            x = F.linear(x, self.weight, self.bias)
        x = HEAD_ACTIVATIONS[spec.activation](x)
        return (
            x if self.norm_weight is None else F.layer_norm(x, x.shape[-1:], self.norm_weight, self.norm_bias, spec.eps)
        )

    def finalize(self) -> None:
        """Called once, after loading."""
        if self._tied is not None and self.weight is not None:
            self.weight.copy_(self._tied[list(self.spec.rows)])

    def destinations(self) -> dict[str, Target]:
        """Checkpoint tensor name -> where it goes."""
        spec = self.spec
        found = {
            f"{spec.name}.weight": None if spec.tied else self.weight,
            spec.bias_name or f"{spec.name}.bias": self.bias,
            f"{spec.norm}.weight": self.norm_weight,
            f"{spec.norm}.bias": self.norm_bias,
        }
        rows, most = (torch.tensor(spec.rows), spec.rows_of) if spec.rows else (None, None)
        return {name: Target(tensor, rows, most) for name, tensor in found.items() if tensor is not None}


class Head(nn.Module):
    """The layers of ``spec`` behind hidden states of ``hidden`` numbers.

    Args:
        embedding: the token embedding, [V, C], for layers that share it.

    Attributes:
        width: numbers it gives.
    """

    def __init__(
        self, spec: HeadSpec, hidden: int, *, device: torch.device, embedding: torch.Tensor | None = None
    ) -> None:
        super().__init__()
        self.spec, self.width = spec, spec.width(hidden)
        sizes = [hidden, *(layer.size for layer in spec.layers)]
        self.layers = nn.ModuleList(
            Layer(layer, size, embedding, device) for layer, size in zip(spec.layers, sizes, strict=False)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, C] -> f32 [N, width]."""
        x = x.float()
        for layer in self.layers:
            x = layer(x)
        return x[:, 1:] - x[:, :1] if self.spec.contrast else x

    def finalize(self) -> None:
        """Called once, after loading."""
        for layer in self.layers:
            assert isinstance(layer, Layer)
            layer.finalize()

    def destinations(self) -> dict[str, Target]:
        """Checkpoint tensor name -> where it goes."""
        found: dict[str, Target] = {}
        for layer in self.layers:
            assert isinstance(layer, Layer)
            found |= layer.destinations()
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Outputs:
    """What a model gives that does not generate.

    Attributes:
        head: behind its hidden states, before pooling or behind it.
        token_heads: in the order of ``PoolingSpec.token_parts``.
        words: of a masked language model, what it says of a token: a weight of each entry of the vocabulary.
    """

    pooling: PoolingSpec
    head: HeadSpec = field(default_factory=HeadSpec)
    words: HeadSpec | None = None
    token_heads: tuple[HeadSpec, ...] = ()

    def sparse(self) -> Outputs | None:
        """The greatest weight of each entry over a text's tokens (Formal et al. 2021); None where there are no words."""
        if self.words is None:
            return None
        return Outputs(pooling=PoolingSpec(kind="sparse", methods=("max",), head_first=True), head=self.words)

    def inputs(self, hidden: int) -> int:
        """Numbers that the head takes, of hidden states of ``hidden``."""
        spec = self.pooling
        return hidden if spec.by_token or spec.head_first else hidden * len(spec.methods)
