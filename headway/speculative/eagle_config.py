"""Reading the config.json of an EAGLE head: as its authors and vLLM write it, or in the ``speculators`` library's format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headway.core.errors import UnsupportedModelError
from headway.models.config import llama_like
from headway.models.decoder import DecoderConfig
from headway.models.fields import Fields
from headway.models.interface import ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class EagleConfig:
    """A head.

    Attributes:
        third: EAGLE-3 (arXiv 2503.01840), which reads several layers; else EAGLE-1 (arXiv 2401.15077), which reads the last.
        decoder: of its blocks, and of the embedding.
        auxiliary: layers of the target it reads, rising; () for EAGLE-1.
        target_hidden: C of the target.
        draft_vocab: tokens it can guess.
        norm_before_residual: EAGLE-3: the residual begins behind the norm of the hidden states.
    """

    third: bool
    decoder: DecoderConfig
    auxiliary: tuple[int, ...]
    target_hidden: int
    draft_vocab: int
    norm_before_residual: bool = False


def read_eagle(config: Mapping[str, Any], *, third: bool, target: ModelSpec) -> EagleConfig:
    """The head that ``config`` describes, for ``target``.

    Raises:
        UnsupportedModelError: a field is missing, not implemented, or does not fit the target; names it.
    """
    outer = dict(config)
    kind = outer.get("speculators_model_type")
    if kind not in (None, "eagle3") or (kind == "eagle3" and not third):
        raise UnsupportedModelError(
            f"config.json: speculators_model_type = {kind!r} is not read for this method; eagle3 is, with method='eagle3'"
        )
    inner = {**outer, **(outer.get("transformer_layer_config") or {})} if kind else outer
    inner.setdefault("architectures", ["Eagle"])
    fields = Fields(inner)
    bias = fields.flag("attention_bias")
    decoder = llama_like(fields, attention_bias=bias, mlp_bias=fields.flag("mlp_bias"))
    fields.refuse_unread()
    if third and len(decoder.blocks) != 1:
        raise UnsupportedModelError(f"config.json: EAGLE-3 heads have one layer, not {len(decoder.blocks)}")
    if decoder.vocab_size != target.vocab_size:
        raise UnsupportedModelError(
            f"config.json: the head's vocab_size={decoder.vocab_size} is not the model's {target.vocab_size}; "
            "it was trained for another model"
        )
    hidden = outer.get("target_hidden_size") or target.hidden_size
    if hidden != target.hidden_size or (not third and decoder.hidden_size != hidden):
        raise UnsupportedModelError(
            f"config.json: the head reads hidden states of {hidden if third else decoder.hidden_size}, the model has "
            f"{target.hidden_size}; it was trained for another model"
        )
    return EagleConfig(
        third=third,
        decoder=decoder,
        auxiliary=_auxiliary(outer, target) if third else (),
        target_hidden=hidden,
        draft_vocab=outer.get("draft_vocab_size") or decoder.vocab_size,
        norm_before_residual=bool(outer.get("norm_before_residual")),
    )


def _auxiliary(config: Mapping[str, Any], target: ModelSpec) -> tuple[int, ...]:
    """Layers behind which the head reads. Configurations count the embedding as 0; without a list they are an early layer, the
    middle one and a late one."""
    own = config.get("eagle_config") or {}
    listed = config.get("eagle_aux_hidden_state_layer_ids") or own.get("eagle_aux_hidden_state_layer_ids")
    layers = target.num_layers
    found = listed or (2, layers // 2, layers - 3)
    inside = all(isinstance(layer, int) and 1 <= layer <= layers for layer in found)
    if not inside or sorted(set(found)) != list(found):
        raise UnsupportedModelError(
            f"config.json: eagle_aux_hidden_state_layer_ids = {list(found)!r:.80} must rise and lie in 1 to {layers}, the "
            "model's layers"
        )
    missing = {layer - 1 for layer in found} - set(target.auxiliary_layers)
    if missing:
        raise UnsupportedModelError(f"{target.architecture} does not give the output of its layers for EAGLE-3")
    return tuple(layer - 1 for layer in found)
