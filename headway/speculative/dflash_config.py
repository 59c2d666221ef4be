"""Reading the config.json of drafters of blocks, DFlash and DSpark: as their authors write it, or in the ``speculators``
library's format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headway.core.errors import UnsupportedModelError
from headway.models.config import llama_like
from headway.models.decoder import DecoderConfig
from headway.models.fields import Fields
from headway.models.interface import ModelSpec

MARKOV = ("vanilla", "gated")


@dataclass(frozen=True, kw_only=True, slots=True)
class DFlashConfig:
    """A drafter of blocks (DFlash: arXiv 2602.06036).

    Attributes:
        decoder: of its blocks, and of the embedding.
        auxiliary: layers of the target behind which it reads, rising.
        target_hidden: C of the target.
        draft_vocab: tokens it can guess.
        block_size: most tokens of a block, the known one included.
        mask: the token that stands for one that is to be guessed.
        from_anchor: what follows the known token is guessed at its own place; else guesses are at the places of masks.
        markov_rank: of DSpark's bias by the token before; 0: there is none.
        markov_gated: that bias has a gate, which reads the hidden state.
    """

    decoder: DecoderConfig
    auxiliary: tuple[int, ...]
    target_hidden: int
    draft_vocab: int
    block_size: int
    mask: int
    from_anchor: bool = False
    markov_rank: int = 0
    markov_gated: bool = False

    @property
    def most(self) -> int:
        """Tokens that it can guess at once."""
        return self.block_size if self.from_anchor else self.block_size - 1


def read_dflash(config: Mapping[str, Any], *, spark: bool, target: ModelSpec) -> DFlashConfig:
    """The drafter that ``config`` describes, for ``target``.

    Args:
        spark: it is DSpark's.

    Raises:
        UnsupportedModelError: a field is missing, not implemented, or does not fit the target; names it.
    """
    outer, method = dict(config), "dspark" if spark else "dflash"
    kind, own = outer.get("speculators_model_type"), _section(outer, "dflash_config")
    if kind not in (None, method):
        raise UnsupportedModelError(f"config.json: speculators_model_type = {kind!r}; give it as method={kind!r}")
    if kind is None and ("markov_rank" in outer) != spark:
        raise UnsupportedModelError(
            f"config.json has {'no ' if spark else ''}markov_rank: it belongs to method={'dflash' if spark else 'dspark'!r}"
        )
    strange = sorted(own.keys() - {"mask_token_id", "target_layer_ids", "block_size"})
    if strange:
        raise UnsupportedModelError(f"config.json: dflash_config.{strange[0]} is not implemented")
    decoder = _decoder({**outer, **_section(outer, "transformer_layer_config")} if kind else outer, target)
    hidden = outer.get("target_hidden_size") or target.hidden_size
    if hidden != target.hidden_size or (not kind and decoder.hidden_size != hidden):
        raise UnsupportedModelError(
            f"config.json: the drafter reads hidden states of {hidden if kind else decoder.hidden_size}, the model has "
            f"{target.hidden_size}; it was trained for another model"
        )
    named = Fields({**outer, **own})
    mask = named.get("mask_token_id")
    if isinstance(mask, bool) or not isinstance(mask, int) or not 0 <= mask < target.vocab_size:
        raise UnsupportedModelError(
            f"config.json: mask_token_id must be a token of the model, 0 to {target.vocab_size - 1}; got {mask!r:.60}"
        )
    rank, gated = _markov(outer) if spark else (0, False)
    return DFlashConfig(
        decoder=decoder,
        auxiliary=_auxiliary(named, target, counts_embedding=kind is not None),
        target_hidden=hidden,
        draft_vocab=outer.get("draft_vocab_size") or decoder.vocab_size,
        block_size=named.count("block_size"),
        mask=mask,
        from_anchor=Fields({"sample_from_anchor": spark} | outer).flag("sample_from_anchor"),
        markov_rank=rank,
        markov_gated=gated,
    )


def _section(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = config.get(name) or {}
    if not isinstance(found, Mapping):
        raise UnsupportedModelError(f"config.json: {name} must be an object, got {found!r:.60}")
    return dict(found)


def _decoder(config: dict[str, Any], target: ModelSpec) -> DecoderConfig:
    config.setdefault("architectures", ["DFlash"])
    fields = Fields(config)
    if "sliding_attention" in (fields.get("layer_types") or ()):
        raise UnsupportedModelError(
            "config.json: layer_types has 'sliding_attention', which drafters of blocks do not implement; take a drafter whose "
            "layers all have full attention"
        )
    bias = fields.flag("attention_bias")
    decoder = llama_like(fields, attention_bias=bias, qk_norm="head")
    fields.refuse_unread()
    if decoder.vocab_size != target.vocab_size:
        raise UnsupportedModelError(
            f"config.json: the drafter's vocab_size={decoder.vocab_size} is not the model's {target.vocab_size}; "
            "it was trained for another model"
        )
    return decoder


def _auxiliary(named: Fields, target: ModelSpec, *, counts_embedding: bool) -> tuple[int, ...]:
    """Layers behind which it reads; the ``speculators`` library counts the embedding as 0, the authors do not."""
    name = "aux_hidden_state_layer_ids" if counts_embedding else "target_layer_ids"
    first, listed = int(counts_embedding), named.get(name) or ()
    inside = all(isinstance(layer, int) and first <= layer < target.num_layers + first for layer in listed)
    if not listed or not inside or sorted(set(listed)) != list(listed):
        raise UnsupportedModelError(
            f"config.json: {name} = {listed!r:.80} must rise and lie in {first} to {target.num_layers - 1 + first}, the "
            "model's layers"
        )
    found = tuple(layer - first for layer in listed)
    if set(found) - set(target.auxiliary_layers):
        raise UnsupportedModelError(f"{target.architecture} does not give the output of its layers to drafters")
    return found


def _markov(outer: Mapping[str, Any]) -> tuple[int, bool]:
    """DSpark's rank, and whether there is a gate."""
    fields = Fields({"markov_rank": 256, "markov_head_type": MARKOV[0]} | dict(outer))
    kind = fields["markov_head_type"]
    if kind not in MARKOV:
        raise UnsupportedModelError(
            f"config.json: markov_head_type = {kind!r:.60} is not implemented; {' and '.join(MARKOV)} are"
        )
    return int(fields.number("markov_rank", least=0)), kind == "gated"
