"""Gemma 3n (text): several residual streams of which each layer computes one and predicts the others (AltUp), a learned short
cut around attention (LAuReL), sparse activations, per-layer inputs, and upper layers that share lower layers' keys and values.

Shapes: T tokens of the step, A streams, C hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import nn

from headway.core.cache import CacheLayout
from headway.core.errors import UnsupportedModelError
from headway.models.blocks import Block, BlockSpec
from headway.models.config import FULL, layer_kinds, layer_windows, llama_like, map_blocks, read_ropes
from headway.models.fields import Fields
from headway.models.gemma import SANDWICH
from headway.models.gemma4 import Gemma4ForCausalLM, PerLayerConfig, narrow_layer, shared_layers
from headway.models.interface import ModelSpec, Target, WeightMap
from headway.models.layers.activation import ACTIVATIONS
from headway.models.layers.forms import In, LayerForms, LayerProducts
from headway.models.layers.junction import Stream
from headway.models.layers.linear import Linear
from headway.models.layers.mixer import parameter
from headway.models.layers.mlp import MLP
from headway.models.layers.norm import Norm, NormSpec
from headway.models.layers.per_layer import PerLayerGate, PerLayerSpec
from headway.parallel.group import Group
from headway.state.batch import StepBatch
from headway.state.cache_pool import LayerCache

LEAST_SQUARE = 1e-5
"""Of a stream whose magnitude is brought to another's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AltUpSpec:
    """The residual streams.

    Attributes:
        streams: A.
        active: the one that layers compute.
        scale: the computed one is scaled for the per-layer gate.
        laurel_rank: inner width of the short cut.
    """

    streams: int
    active: int
    scale: bool
    laurel_rank: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AltUpBlockSpec(BlockSpec):
    """A block over A streams.

    Attributes:
        layer: its index.
        side: size of its per-layer input.
        altup: the streams.
        sparsity: share of the gate's outputs that are cut off, as if they were normally distributed; 0: none.
    """

    layer: int
    side: int
    altup: AltUpSpec
    sparsity: float = 0.0

    def sharded(self, group: Group, peers: Group, *, whole_experts: bool) -> BlockSpec:
        """See ``BlockSpec``; what is cut off depends on all of the gate's outputs, so they are every rank's."""
        found = super(AltUpBlockSpec, self).sharded(group, peers, whole_experts=whole_experts)
        return replace(found, ffn=self.ffn) if self.sparsity else found

    @property
    def block(self) -> type[Block]:
        """See ``BlockSpec``."""
        return AltUpBlock


class AltUpBlock(Block):
    """The stream's residual is [T, A, C] here; products run in plain form."""

    spec: AltUpBlockSpec
    before_mixer: Norm
    after_mixer: Norm
    before_ffn: Norm
    after_ffn: Norm
    ffn: MLP

    def _build(self, norm: NormSpec, hidden: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super()._build(norm, hidden, dtype=dtype, device=device)
        spec = self.spec
        streams, rank = spec.altup.streams, spec.altup.laurel_rank

        def linear(inputs: int, name: str, outputs: int) -> Linear:
            return Linear(inputs, {name: outputs}, bias=False, dtype=dtype, device=device)

        self.router_norm = norm.make(hidden, dtype=dtype, device=device)
        self.router = linear(hidden, "modality_router", streams)
        self.predict = linear(streams, "prediction_coefs", streams * streams)
        self.correct = linear(streams, "correction_coefs", streams)
        self.output_scale = parameter(hidden, dtype=dtype, device=device)
        self.left, self.right = linear(hidden, "linear_left", rank), linear(rank, "linear_right", hidden)
        self.laurel_norm = norm.make(hidden, dtype=dtype, device=device)
        self.gate = PerLayerGate(spec.side, spec.mlp.activation, norm, hidden, dtype=dtype, device=device)
        self._cut = NormalDist().inv_cdf(spec.sparsity) if spec.sparsity else None
        self._shrink = hidden**-1.0

    @property
    def products(self) -> LayerProducts:
        """See ``Block``."""
        return LayerProducts(None, None, None, None)

    def forward(self, stream: Stream, batch: StepBatch, cache: LayerCache, forms: LayerForms) -> Stream:
        """See ``Block``."""
        return self._run(stream, batch, cache, None)

    def forward_last(self, stream: Stream, batch: StepBatch, cache: LayerCache, forms: LayerForms) -> Stream:
        """See ``Block``."""
        return self._run(stream, batch, cache, batch.logit_indices)

    def _run(self, stream: Stream, batch: StepBatch, cache: LayerCache, last: torch.Tensor | None) -> Stream:
        """``last``: int32 [R], tokens with which it goes on behind the keys and values; None: with all."""
        active, beside, mixer = self.spec.altup.active, stream.beside, self.mixer
        assert mixer is not None and beside is not None
        predicted = self._predicted(stream.residual)
        x = predicted[:, active].contiguous()
        normed = self.before_mixer.forward(x)
        mixed = mixer.forward(self.into_mixer, Stream(x, normed), In.PLAIN, batch, cache, last is not None)
        if last is not None:
            predicted, x, normed, beside = (each.index_select(0, last) for each in (predicted, x, normed, beside))
        laurel = normed + self.laurel_norm.forward(self.right.forward(self.left.forward(normed)))
        x = x + self.after_mixer.forward(mixer.out.forward(mixed))
        x = x.add_(laurel).mul_(2.0**-0.5)
        x = x + self.after_ffn.forward(self.ffn.down.forward(self._inner(self.before_ffn.forward(x))))
        corrected = self._corrected(predicted, x)
        first = corrected[:, active]
        first = first * self.output_scale if self.spec.altup.scale else first.contiguous()
        corrected[:, 1:] += self.gate.forward(first, beside[:, self.spec.layer])[:, None]
        return Stream(corrected, beside=beside)

    def _modalities(self, x: torch.Tensor) -> torch.Tensor:
        """[T, C] -> [T, A]."""
        return torch.tanh(self.router.forward(self.router_norm.forward(x) * self._shrink).float()).to(x.dtype)

    def _predicted(self, streams: torch.Tensor) -> torch.Tensor:
        """[T, A, C], each stream plus a mixture of all."""
        count = self.spec.altup.streams
        mix = self.predict.forward(self._modalities(streams[:, self.spec.altup.active].contiguous()))
        return torch.baddbmm(streams, mix.view(-1, count, count), streams)

    def _corrected(self, predicted: torch.Tensor, computed: torch.Tensor) -> torch.Tensor:
        """Predictions [T, A, C], corrected by how far the active one was off ``computed`` [T, C]."""
        share = self.correct.forward(self._modalities(computed)) + 1.0
        return torch.addcmul(predicted, share[:, :, None], (computed - predicted[:, self.spec.altup.active])[:, None])

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        """[T, C] -> [T, inner]."""
        y = self.ffn.gate_up.forward(x)
        if self._cut is not None:
            gate, up = y.chunk(2, dim=1)
            deviation = gate.float().std(dim=1, keepdim=True, unbiased=False).to(y.dtype)
            y = torch.cat([F.relu(gate - (gate.mean(dim=1, keepdim=True) + deviation * self._cut)), up], dim=1)
        return self.ffn.act(y)

    def destinations(self, prefix: str) -> dict[str, Target]:
        """See ``Block``."""
        found = super().destinations(prefix) | self.gate.destinations(prefix)
        altup, laurel = f"{prefix}altup.", f"{prefix}laurel."
        for linear in (self.router, self.predict, self.correct):
            found |= linear.destinations(altup)
        found |= self.router_norm.destinations(f"{altup}router_norm.")
        found[f"{altup}correct_output_scale"] = Target(self.output_scale)
        found |= self.left.destinations(laurel) | self.right.destinations(laurel)
        return found | self.laurel_norm.destinations(f"{laurel}post_laurel_norm.")


class Gemma3nForCausalLM(Gemma4ForCausalLM):
    """Streams are made of the embeddings before the first layer, and averaged behind the last; stages hand all of them on."""

    knows_stages: ClassVar[tuple[str, ...]] = ("_enter", "_last_norm")

    def __init__(self, config: PerLayerConfig, *, dtype: torch.dtype, device: torch.device, max_model_len: int) -> None:
        super().__init__(config, dtype=dtype, device=device, max_model_len=max_model_len)
        hidden, more = config.hidden_size, range(self._altup.streams - 1)
        names = {f"altup_projections.{i}": hidden for i in more}
        self.spread = Linear(hidden if self._enters else 0, names, bias=False, dtype=dtype, device=device)
        self.gather = nn.ModuleList(
            Linear(hidden if self._ends else 0, {name: hidden}, bias=False, dtype=dtype, device=device)
            for name in (f"altup_unembed_projections.{i}" for i in more)
        )

    @property
    def _altup(self) -> AltUpSpec:
        return cast(AltUpBlockSpec, self.config.blocks[0]).altup

    def _declare(self, layout: CacheLayout) -> ModelSpec:
        return replace(super()._declare(layout), auxiliary_layers=(), streams=self._altup.streams)

    def _enter(self, x: torch.Tensor, batch: StepBatch, block: Block, forms: LayerForms) -> Stream:
        beside = super()._enter(x, batch, block, forms).beside
        if not self._enters:
            return Stream(x.view(len(x), self._altup.streams, -1), beside=beside)
        others = self.spread.forward(x).view(len(x), -1, x.shape[1])
        return Stream(torch.cat([x[:, None], _as_loud(others, x[:, None])], dim=1), beside=beside)

    def _last_norm(self, stream: Stream) -> torch.Tensor:
        assert self.norm is not None
        first = stream.residual[:, 0]
        total = first.clone()
        for i, linear in enumerate(self.gather):
            total += _as_loud(cast(Linear, linear).forward(stream.residual[:, i + 1].contiguous()), first)
        return self.norm.forward(total.div_(stream.residual.shape[1]))

    def weights(self) -> WeightMap:
        """See ``DecoderModel``."""
        found, own = self._with_entry(super().weights(), self.spread.destinations("model.")), dict[str, Target]()
        for linear in self.gather:
            own |= cast(Linear, linear).destinations("model.")
        if not self._ends:
            return replace(found, unused=(*found.unused, *own))
        return replace(found, targets={**found.targets, **own})

    @staticmethod
    def read(fields: Fields) -> PerLayerConfig:
        fields = fields.with_defaults(
            rms_norm_eps=1e-6, hidden_activation="gelu_pytorch_tanh", tie_word_embeddings=True, head_dim=256,
            max_position_embeddings=32768, sliding_window=512, num_kv_shared_layers=15, final_logit_softcapping=30.0,
            hidden_size_per_layer_input=256, vocab_size_per_layer_input=262144, altup_num_inputs=4, altup_active_idx=0,
            altup_correct_scale=True, laurel_rank=64, num_key_value_heads=2,
        )  # fmt: skip
        gelu, sizes = fields.choice("hidden_activation", ACTIVATIONS), _by_layer(fields, "intermediate_size", None)
        fields = fields.replaced(intermediate_size=sizes[0])
        kinds = layer_kinds(fields, 5)
        windows, bias = layer_windows(fields, otherwise=kinds), fields.flag("attention_bias")
        ropes = read_ropes(fields, full_theta=1e6, sliding_theta=1e4, sliding_field="rope_local_base_freq")
        config = llama_like(
            fields, attention_bias=bias, windows=windows, names=SANDWICH, qk_norm="head", rope=ropes[FULL]
        )
        sources, first = shared_layers(fields, kinds)
        sparse = _by_layer(fields, "activation_sparsity_pattern", _sparse_layers(len(kinds)))
        altup = AltUpSpec(
            streams=fields.count("altup_num_inputs"),
            active=fields.whole("altup_active_idx", 0),
            scale=fields.flag("altup_correct_scale"),
            laurel_rank=fields.count("laurel_rank"),
        )
        if altup.active >= altup.streams:
            raise fields.refuse("altup_active_idx", f"is not one of {altup.streams} streams")
        side = fields.count("hidden_size_per_layer_input")

        def change(layer: int, block: BlockSpec) -> BlockSpec:
            source = sources[layer]
            mixer = replace(block.attention, scale=1.0, v_norm=True, rope=ropes[kinds[layer]], shared_with=source)
            if source is not None:
                mixer = replace(mixer, names=(("q_proj",), "o_proj"))
            mlp = replace(block.mlp, activation=gelu, size=int(sizes[layer]))
            return AltUpBlockSpec(
                mixer=mixer,
                ffn=mlp,
                names=block.names,
                layer=layer,
                side=side,
                altup=altup,
                sparsity=float(sparse[layer]),
            )

        config = replace(
            map_blocks(config, change),
            embedding_multiplier=config.hidden_size**0.5,
            round_multiplier=True,
            logit_soft_cap=fields.number("final_logit_softcapping", 0.0, least=0),
            narrow_from=narrow_layer(first, len(kinds)),
        )
        vocab = fields.count("vocab_size_per_layer_input")
        return PerLayerConfig.of(config, per_layer=PerLayerSpec(size=side, layers=len(kinds), vocab_size=vocab))


def _as_loud(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """x [..., C] with the root mean square of ``like``."""
    own = x.square().mean(dim=-1, keepdim=True).clamp(min=LEAST_SQUARE).sqrt()
    return x * like.square().mean(dim=-1, keepdim=True).sqrt() / own


def _sparse_layers(layers: int) -> list[float]:
    """Of the default: the first ten layers of more."""
    return [0.95] * 10 + [0.0] * (layers - 10) if layers > 10 else [0.0] * layers


def _by_layer(fields: Fields, name: str, default: list[float] | None) -> Sequence[float]:
    """A number for each layer, from a list of them or one for all.

    Raises:
        UnsupportedModelError: there are not as many, or they are no numbers in range.
    """
    value, layers = fields.get(name), fields.count("num_hidden_layers")
    value = default if value is None else value
    found: list[Any] = list(value) if isinstance(value, list | tuple) else [value] * layers
    whole = default is None
    for each in found:
        known = isinstance(each, int if whole else (int, float)) and not isinstance(each, bool)
        if not known or not (each >= 1 if whole else 0 <= each < 1):
            raise fields.refuse(name, "must have a number in range for each layer")
    if len(found) != layers:
        raise UnsupportedModelError(f"config.json: {name} has {len(found)} entries, num_hidden_layers={layers}")
    return found
