"""Reading the config.json of encoders: what they have in common, and what they give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

from headway.core.errors import UnsupportedModelError
from headway.models.fields import Fields
from headway.models.heads import HeadLayer, HeadSpec, Outputs
from headway.pooling.spec import Kind, PoolingSpec

HeadLayers = tuple[HeadLayer, ...]
DENSE_HEADS: Final[Mapping[str, HeadLayers]] = MappingProxyType(
    {"embed": (), "classify": (HeadLayer(name="classifier", size=0),),
     "token_classify": (HeadLayer(name="classifier", size=0),)}
)  # fmt: skip
"""Layers behind hidden states by kind; the size 0 stands for the number of labels."""

SUFFIXES: Final[Mapping[str, Kind]] = MappingProxyType(
    {
        "ForSequenceClassification": "classify",
        "ForTokenClassification": "token_classify",
        "ForMaskedLM": "embed",
        "Model": "embed",
    }
)
"""Ends of encoders' architectures -> what such a model gives."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderSizes:
    """The numbers every encoder's config.json has."""

    vocab_size: int
    hidden_size: int
    inner: int
    num_layers: int
    num_heads: int
    head_dim: int
    max_position: int


def read_sizes(fields: Fields) -> EncoderSizes:
    """The numbers.

    Raises:
        UnsupportedModelError: one is missing or no positive integer, or they do not fit together.
    """
    num_heads, hidden = fields.count("num_attention_heads"), fields.count("hidden_size")
    if hidden % num_heads:
        raise UnsupportedModelError(
            f"config.json: hidden_size={hidden} is not a multiple of num_attention_heads={num_heads}"
        )
    return EncoderSizes(
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden,
        inner=fields.count("intermediate_size"),
        num_layers=fields.count("num_hidden_layers"),
        num_heads=num_heads,
        head_dim=hidden // num_heads,
        max_position=fields.count("max_position_embeddings"),
    )


def kind_of(architecture: str) -> Kind:
    """What a model gives whose architecture has this name."""
    return next((kind for suffix, kind in SUFFIXES.items() if architecture.endswith(suffix)), "embed")


def read_labels(fields: Fields) -> tuple[str, ...]:
    """Names of a classifier's labels, in order.

    Raises:
        UnsupportedModelError: they are not numbered from 0 on.
    """
    by_id, number = fields.get("id2label"), fields.get("num_labels")
    if isinstance(by_id, Mapping) and by_id:
        try:
            return tuple(str(by_id.get(str(i), by_id.get(i))) for i in range(max(int(key) for key in by_id) + 1))
        except ValueError:
            raise fields.refuse("id2label", "must map 0, 1, 2, ... to names") from None
    count = number if isinstance(number, int) and number > 0 else 2
    return tuple(f"LABEL_{i}" for i in range(count))


def read_activation(fields: Fields, num_labels: int) -> str:
    """What a classifier's scores go through: as its files say, else the sigmoid of one score, or the softmax of several.

    sentence-transformers writes a torch class, such as torch.nn.modules.linear.Identity, by two names.
    """
    own: Any = fields.get("sentence_transformers")
    named = own.get("activation_fn") if isinstance(own, Mapping) else None
    named = named or fields.get("sbert_ce_default_activation_function")
    if isinstance(named, str):
        found = {"Identity": "none", "Sigmoid": "sigmoid", "Softmax": "softmax"}.get(named.rsplit(".", 1)[-1])
        if found is None:
            raise UnsupportedModelError(
                f"config.json: the activation {named!r:.80} is not implemented; Identity, Sigmoid and Softmax are"
            )
        return found
    problem = fields.get("problem_type")
    if problem == "regression":
        return "none"
    return "sigmoid" if num_labels == 1 or problem == "multi_label_classification" else "softmax"


def read_outputs(fields: Fields, heads: Mapping[str, HeadLayers], *, method: str = "cls") -> Outputs:
    """What the model gives.

    Args:
        heads: layers by kind, see ``DENSE_HEADS``; "sparse": of a masked language model.
        method: how classifiers, and models that nothing else is said of, pool.
    """
    architecture = fields["architectures"][0]
    kind = kind_of(architecture)
    if kind == "embed":
        spec = PoolingSpec(kind="embed", methods=(method,), normalize=True)
        masked = architecture.endswith("ForMaskedLM") and "sparse" in heads
        return Outputs(pooling=spec, words=HeadSpec(layers=_spread(heads["sparse"])) if masked else None)
    labels = read_labels(fields)
    layers = tuple(layer if layer.size else replace(layer, size=len(labels)) for layer in heads[kind])
    methods = ("all",) if kind == "token_classify" else (method,)
    activation = read_activation(fields, len(labels))
    pooling = PoolingSpec(kind=kind, methods=methods, activation=activation, labels=labels)
    return Outputs(pooling=pooling, head=HeadSpec(layers=layers))


def _spread(layers: HeadLayers) -> HeadLayers:
    """With log(1 + relu(x)) behind them (Formal et al. 2021)."""
    return (*layers[:-1], replace(layers[-1], activation="log1p_relu"))
