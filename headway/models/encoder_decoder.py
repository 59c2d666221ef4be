"""``EncoderDecoderModel``: a decoder whose blocks read an encoder's outputs by cross-attention (Vaswani et al. 2017).

A layer of the decoder is two blocks: self-attention without a feed-forward part, then cross-attention with one. So the
decoder is a
``DecoderModel`` like any other, and the encoder runs by itself, in ``encode``.

Shapes: N encoder outputs of all items of a step, E size of the encoder's hidden states, C of the decoder's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import nn

from headway.core.cache import CacheLayout
from headway.kernels.embed import embed
from headway.models.alignment import CrossAligner
from headway.models.decoder import DecoderConfig, DecoderModel
from headway.models.encoder import EncoderBlock, EncoderBlockSpec
from headway.models.interface import EncoderInput, EncoderSpec, ModelSpec, Target, WeightMap
from headway.models.layers.cross import CrossMixer
from headway.models.layers.mixer import parameter
from headway.models.layers.norm import Norm, NormSpec
from headway.models.position_bias import PositionBias, PositionBiasSpec
from headway.models.rope import no_rotation
from headway.state.batch import StepBatch
from headway.state.cache_pool import CachePool


@dataclass(frozen=True, kw_only=True, slots=True)
class Positions:
    """Learned positions: a table's name in the checkpoint, its rows, and the one for position 0."""

    name: str
    rows: int
    first: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StackSpec:
    """The encoder behind its front.

    Attributes:
        hidden_size: E.
        longest: most outputs of an item.
        blocks, layers: the blocks, and their name in the checkpoint.
        norm, last_norm: of all norms, and the name of the one behind all blocks, "" for none.
        bias: added to all layers' scores by distance; None: nothing.
    """

    hidden_size: int
    longest: int
    blocks: tuple[EncoderBlockSpec, ...]
    layers: str
    norm: NormSpec
    last_norm: str = ""
    bias: PositionBiasSpec | None = None


class FrontSpec(Protocol):
    """What stands before the encoder's blocks, in numbers and names."""

    @property
    def takes(self) -> EncoderSpec:
        """What it is given."""

    @property
    def shares_embedding(self) -> bool:
        """Whether it reads the decoder's embedding."""

    def make(self, model: EncoderDecoderModel, *, dtype: torch.dtype, device: torch.device) -> Front:
        """The module; ``model`` is the one it is a part of, whose embedding it may share."""


class Front(Protocol):
    """A module: items to the first hidden states of the encoder."""

    def forward(self, inputs: Sequence[EncoderInput], starts: torch.Tensor) -> torch.Tensor:
        """[N, E], fresh; ``starts`` see ``EncodingModel.encode``."""

    def destinations(self) -> dict[str, Target]:
        """Checkpoint tensor name -> where it goes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderDecoderConfig(DecoderConfig):
    """An encoder and a decoder, every default resolved.

    Attributes:
        front, stack: the encoder.
        positions: of the decoder's embedding; None: it has none.
        embedding_norm: name of the norm of the sum, "" for none.
        logit_bias: name of what is added to the logits, [1, V] in the checkpoint; "" for nothing.
        unused: beginnings of names in the checkpoint that are not needed.
        shared: other names that some exporters write for the embedding.
    """

    front: FrontSpec
    stack: StackSpec
    positions: Positions | None = None
    embedding_norm: str = ""
    logit_bias: str = ""
    unused: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()

    @property
    def embeds_everywhere(self) -> bool:
        """See ``DecoderConfig``: each stage makes the keys and values of its layers from encoder outputs of its own."""
        return self.front.shares_embedding


class Stack(nn.Module):
    """The blocks of an encoder over items that lie one behind the other; each token sees all of its item."""

    def __init__(self, spec: StackSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec = spec
        head_dim = spec.blocks[0].mixer.head_dim
        table = no_rotation(head_dim, 1, device)
        self.blocks = nn.ModuleList(
            EncoderBlock(block, spec.norm, spec.hidden_size, table, dtype=dtype, device=device) for block in spec.blocks
        )
        self.last_norm: Norm | None = (
            spec.norm.make(spec.hidden_size, dtype=dtype, device=device) if spec.last_norm else None
        )
        self.bias = None if spec.bias is None else PositionBias(spec.bias, spec.longest, device=device)
        self._layers = [block for block in self.blocks if isinstance(block, EncoderBlock)]

    def forward(self, x: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        """[N, E], overwritten -> [N, E]."""
        bias = None if self.bias is None else self.bias.table
        begins = [block.norms[0] if block.spec.before else None for block in self._layers]
        normed = x if begins[0] is None else begins[0].forward(x)
        for block, following in zip(self._layers, [*begins[1:], self.last_norm], strict=True):
            x, normed = block.forward(x, normed, batch, bias, following)
        return normed

    def destinations(self) -> dict[str, Target]:
        """Checkpoint tensor name -> where it goes."""
        spec, found = self.spec, dict[str, Target]()
        for i, block in enumerate(self._layers):
            found |= block.destinations(f"{spec.layers}.{i}.")
        if self.last_norm is not None:
            found |= self.last_norm.destinations(f"{spec.last_norm}.")
        return found if self.bias is None else found | self.bias.destinations()

    def finalize(self) -> None:
        """Called once, after loading."""
        if self.bias is not None:
            self.bias.finalize()


class EncoderDecoderModel(DecoderModel):
    """An encoder-decoder with uninitialised weights; ``models.load`` fills them and calls ``finalize``.

    Args:
        config: checked numbers.
        dtype, device: of the weights and activations.
        max_model_len: tokens of the decoder.
    """

    config: EncoderDecoderConfig
    knows_stages = ("logits",)

    def __init__(
        self, config: EncoderDecoderConfig, *, dtype: torch.dtype, device: torch.device, max_model_len: int
    ) -> None:
        super().__init__(config, dtype=dtype, device=device, max_model_len=max_model_len)
        hidden, positions = config.hidden_size, config.positions
        rows = 0 if positions is None or not self._enters else positions.rows
        self.positions = None if positions is None else parameter(rows, hidden, dtype=dtype, device=device)
        norm = config.norm.make(hidden, dtype=dtype, device=device) if config.embedding_norm else None
        self.embedding_norm: Norm | None = norm
        biased = config.logit_bias and self._ends
        self.logit_bias = parameter(1, config.vocab_size, dtype=torch.float32, device=device) if biased else None
        self._adds_bias = False
        self.front = config.front.make(self, dtype=dtype, device=device)
        self.stack = Stack(config.stack, dtype=dtype, device=device)
        mixers = [(i, block.mixer) for i, block in zip(config.own, self._layers, strict=True)]
        self._cross = [(i, mixer) for i, mixer in mixers if isinstance(mixer, CrossMixer)]

    @property
    def cross_heads(self) -> tuple[int, int]:
        """Layers, and heads of each, whose cross-attention is here whole; none where ranks share them."""
        spec = self._cross[0][1].spec
        whole = spec.shard is None and self.config.stage is None
        return (len(self._cross), spec.num_heads) if whole else (0, 0)

    def aligner(self, heads: Sequence[tuple[int, int]]) -> CrossAligner:
        """By these (layer, head)s; see ``Aligner``."""
        return CrossAligner([(i, self._layers[i]) for i, _ in self._cross], heads)

    def _declare(self, layout: CacheLayout) -> ModelSpec:
        return replace(super()._declare(layout), encoder=self.config.front.takes)

    def _embedded(self, batch: StepBatch) -> torch.Tensor:
        x = super()._embedded(batch)
        if self.positions is not None:
            assert self.config.positions is not None
            x += embed(batch.positions + self.config.positions.first, self.positions)
        return x if self.embedding_norm is None else self.embedding_norm.forward(x)

    def encode(self, inputs: Sequence[EncoderInput], starts: torch.Tensor, caches: CachePool) -> None:
        """Encode items, and write the keys and values that the cross-attention of each layer here has of them."""
        encoded = self.stack.forward(self.front.forward(inputs, starts), items_batch(inputs, starts))
        places = torch.cat([each.places for each in inputs])
        for i, mixer in self._cross:
            mixer.write(encoded, places, caches.layers[i])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, C] hidden states -> [N, V] in the model's dtype."""
        found = super().logits(hidden)
        return found + self.logit_bias.to(found.dtype) if self._adds_bias and self.logit_bias is not None else found

    def weights(self) -> WeightMap:
        """Where each tensor of a checkpoint goes; before ``finalize``."""
        config, entry = self.config, dict[str, Target]()
        if config.positions is not None and self.positions is not None:
            entry[f"{config.positions.name}.weight"] = Target(self.positions)
        if self.embedding_norm is not None:
            entry |= self.embedding_norm.destinations(f"{config.embedding_norm}.")
        decoder = self._with_entry(super().weights(), entry)
        found = {**decoder.targets, **self.front.destinations(), **self.stack.destinations()}
        if self.logit_bias is not None:
            found[config.logit_bias] = Target(self.logit_bias)
        unused = (*decoder.unused, *([config.logit_bias] if config.logit_bias and not self._ends else []))
        computed = (*decoder.computed, *(f"{name}.weight" for name in config.shared))
        return WeightMap(found, computed, ("model.",), unused)

    @torch.no_grad()
    def finalize(self) -> None:
        """Called once, when the weights are in place; nothing may move or replace them afterwards."""
        self.stack.finalize()
        self._adds_bias = self.logit_bias is not None and bool((self.logit_bias != 0).any())  # host: start-up
        super().finalize()


def items_batch(inputs: Sequence[EncoderInput], starts: torch.Tensor) -> StepBatch:
    """What the blocks of an encoder read of a step: where items begin, and how long the longest is."""
    none = starts[:0]
    return StepBatch(
        input_ids=none,
        positions=none,
        query_start=starts,
        seq_lens=none,
        row_slots=none,
        logit_indices=none,
        groups=(),
        arrivals=none,
        num_decode_rows=0,
        max_query_len=max(each.rows for each in inputs),
        max_seq_len_bound=0,
    )
