"""The linear layers of a decoder, by their sizes. Imports no Triton."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headway.core.ints import round_up

HEAD_MULTIPLE = 8
"""The output layer's rows are padded to a multiple: then logits' rows begin at 16 bytes, which cuBLAS' fast kernels need."""

JUNCTIONS = ("qkv", "o", "gate_up", "down")
"""A layer's linear layers, in the order in which they run."""
OUT = ("o", "down")
"""Those that are added to the residual."""


@dataclass(frozen=True, slots=True)
class Product:
    """A linear layer as a start takes it.

    Attributes:
        junction: one of ``JUNCTIONS`` by its place, whatever the layer's mixer is, or "head".
        outputs, inputs: N, K.
        ops: (way, op) for each way that its layer has other than ``F.linear``, see ``winners.WAYS``.
        bias: whether it has one.
        gate: an activation of ``GATES`` that is inside the op; "": none.
        place: what stands around it. Behind it, "added": the residual is added at once; "behind": a norm, then the residual.
            Before it, "entering": the residual, that it norms itself or has normed; "normed": a norm that no op takes in.
    """

    junction: str
    outputs: int
    inputs: int
    ops: tuple[tuple[str, str], ...]
    bias: bool = False
    gate: str = ""
    place: str = ""

    @property
    def size(self) -> tuple[int, int]:
        """(N, K)."""
        return self.outputs, self.inputs


Group = tuple[Product, ...]
"""Products that take their forms together: a layer whose sums leave no norm between them, or a single one."""


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """Sizes of a decoder with gated feed-forward blocks.

    Attributes:
        hidden, inner: width of the residual and of the feed-forward block.
        heads, kv_heads, head_dim: of the attention.
        vocab: rows of the output layer.
        qkv_bias, qk_norm: whether that projection has a bias, and its heads have norms.
    """

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    qkv_bias: bool = False
    qk_norm: bool = False

    def weight(self, junction: str) -> tuple[int, int]:
        """(N, K) of one of ``JUNCTIONS``, or of "head"."""
        attended = self.heads * self.head_dim
        return {
            "qkv": (attended + 2 * self.kv_heads * self.head_dim, self.hidden),
            "o": (self.hidden, attended),
            "gate_up": (2 * self.inner, self.hidden),
            "down": (self.hidden, self.inner),
            "head": (round_up(self.vocab, HEAD_MULTIPLE), self.hidden),
        }[junction]

    def layer_bytes(self) -> int:
        """Of a layer's weights in 16 bits."""
        return sum(2 * outputs * inputs for outputs, inputs in map(self.weight, JUNCTIONS))


def decoder_shape(config: Mapping[str, Any]) -> DecoderShape:
    """The shape that a config.json describes.

    Raises:
        ValueError: it is not a decoder with gated feed-forward blocks, or a size is missing.
    """
    config = config.get("text_config") or config
    try:
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        return DecoderShape(
            hidden=hidden,
            inner=int(config["intermediate_size"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            vocab=int(config["vocab_size"]),
            qkv_bias=bool(config.get("attention_bias", config.get("model_type") == "qwen2")),
            qk_norm=str(config.get("model_type", "")).startswith(("qwen3", "gemma3")),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"config.json: no sizes of a decoder's linear layers: {error!r}") from error
