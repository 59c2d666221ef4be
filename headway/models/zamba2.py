"""Zamba2 (1.2B, 2.7B, 7B): Mamba-2 layers, some of which also read what one of a few shared transformer blocks makes of the
residual and of the embeddings (Glorioso et al. 2024, arXiv:2411.15242)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn

from headway.models.blocks import Block, BlockNames, BlockSpec
from headway.models.config import llama_like
from headway.models.decoder import DecoderConfig, DecoderModel
from headway.models.fields import Fields
from headway.models.hybrid import STATE, read_mamba2
from headway.models.interface import Target, WeightMap
from headway.models.layers.activation import ACTIVATIONS
from headway.models.layers.forms import LayerForms, LayerProducts
from headway.models.layers.junction import Stream
from headway.models.layers.norm import NormSpec
from headway.models.layers.shared_block import SharedBlock, SharedSpec, SharedUse, SharedUseSpec
from headway.state.batch import StepBatch
from headway.state.cache_pool import LayerCache

HYBRID = "hybrid"
_KINDS = {STATE: STATE, "mamba": STATE, HYBRID: HYBRID}
_NAMES = BlockNames(mixer="mamba")
_HYBRID_NAMES = BlockNames(before_mixer="mamba_decoder.input_layernorm", mixer="mamba_decoder.mamba")


@dataclass(frozen=True, kw_only=True, slots=True)
class ZambaBlockSpec(BlockSpec):
    """A layer of Zamba2: it hands on the embeddings beside the residual."""

    @property
    def block(self) -> type[Block]:
        """See ``BlockSpec``."""
        return HybridBlock if isinstance(self.mixer, SharedUseSpec) else ZambaBlock


class ZambaBlock(Block):
    """A Mamba-2 layer."""

    def forward(self, stream: Stream, batch: StepBatch, cache: LayerCache, forms: LayerForms) -> Stream:
        """See ``Block``."""
        return super().forward(stream, batch, cache, forms)._replace(beside=stream.beside)


class HybridBlock(ZambaBlock):
    """A Mamba-2 layer that uses a shared block; ``shared`` is the model's."""

    shared: SharedBlock | None = None

    def _build(self, norm: NormSpec, hidden: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super()._build(norm, hidden, dtype=dtype, device=device)
        self.first_norm = None  # what the shared block gives is added first

    @property
    def use(self) -> SharedUse:
        """Its mixer."""
        assert isinstance(self.mixer, SharedUse)
        return self.mixer

    @property
    def products(self) -> LayerProducts:
        """See ``Block``: the norm before the mixer is not the residual's."""
        return super().products._replace(into_mixer=None)

    def forward(self, stream: Stream, batch: StepBatch, cache: LayerCache, forms: LayerForms) -> Stream:
        """See ``Block``."""
        x, embedded, use = stream.residual, stream.beside, self.use
        assert embedded is not None and self.before_mixer is not None and self.shared is not None
        added = use.beside(self.shared, x, embedded, batch, cache[:2])
        normed = self.before_mixer.forward(added.add_(x))
        mixed = use.mix(use.into.forward(normed), batch, cache[2:])
        return self.out_of_mixer(mixed, Stream(x), forms.out_of_mixer)._replace(beside=embedded)

    def forward_last(self, stream: Stream, batch: StepBatch, cache: LayerCache, forms: LayerForms) -> Stream:
        """See ``Block``: the state needs every token, and so does what is added before it."""
        whole = self.forward(stream, batch, cache, forms)
        return Stream(whole.residual.index_select(0, batch.logit_indices))

    def destinations(self, prefix: str) -> dict[str, Target]:
        """See ``Block``; without what lies in the shared block."""
        return super().destinations(prefix) | self.use.linear.destinations(prefix)

    @property
    def token_weights(self) -> int:
        """See ``Block``."""
        shared = () if self.shared is None else self.shared.parameters()
        return super().token_weights + sum(parameter.numel() for parameter in shared)


@dataclass(frozen=True, kw_only=True, slots=True)
class Zamba2Config(DecoderConfig):
    """A decoder whose hybrid layers use shared blocks in turn.

    Attributes:
        shared: what these are; num_shared: how many.
    """

    shared: SharedSpec
    num_shared: int

    @property
    def embeds_everywhere(self) -> bool:
        """See ``DecoderConfig``: shared blocks read the embeddings."""
        return True

    @property
    def uses(self) -> list[int]:
        """The layers that use shared blocks, in turn."""
        return [i for i, block in enumerate(self.blocks) if isinstance(block.mixer, SharedUseSpec)]


class Zamba2ForCausalLM(DecoderModel):
    """Blocks of the model's own lie beside those of its layers."""

    knows_stages = ("_enter",)

    def __init__(self, config: Zamba2Config, *, dtype: torch.dtype, device: torch.device, max_model_len: int) -> None:
        super().__init__(config, dtype=dtype, device=device, max_model_len=max_model_len)
        turns = {layer: use % config.num_shared for use, layer in enumerate(config.uses)}
        own = zip(config.own, self._layers, strict=True)
        self._users = [(turns[i], block) for i, block in own if isinstance(block, HybridBlock)]
        self.shared = nn.ModuleDict(
            {
                str(turn): SharedBlock(config.shared, config.norm, config.hidden_size, dtype=dtype, device=device)
                for turn in sorted({turn for turn, _ in self._users})
            }
        )
        for turn, block in self._users:
            vars(block)["shared"] = self.shared[str(turn)]  # a plain attribute: the model owns it
        self.spec = self._declare(self.spec.cache)

    def _enter(self, x: torch.Tensor, batch: StepBatch, block: Block, forms: LayerForms) -> Stream:
        embedded = x.clone() if self._enters else self._embedded(batch)
        return block.enter(x, forms)._replace(beside=embedded)

    def weights(self) -> WeightMap:
        """See ``DecoderModel``: tensors of a shared block are named by the first layer that uses it; others may repeat them."""
        found, uses = super().weights(), cast(Zamba2Config, self.config).uses
        own: dict[str, Target] = {}
        for turn, block in self._users:
            prefix = f"model.layers.{uses[turn]}.shared_transformer."
            own |= block.use.shared_destinations(prefix) | cast(SharedBlock, self.shared[str(turn)]).destinations(
                prefix
            )
        # Behind those that are read: of other layers, and of other stages' adapters.
        first = len(self.shared) if self.config.stage is None else 0
        others = tuple(f"layers.{layer}.shared_transformer." for layer in uses[first:])
        return replace(found, targets={**found.targets, **own}, unused=(*found.unused, *others))

    @staticmethod
    def read(fields: Fields) -> Zamba2Config:
        fields = fields.with_defaults(
            max_position_embeddings=4096, mamba_d_state=64, mamba_d_conv=4, mamba_expand=2, mamba_ngroups=1, n_mamba_heads=8,
            hidden_act="gelu", num_mem_blocks=1, adapter_rank=128, rms_norm_eps=1e-5, tie_word_embeddings=True, rope_theta=1e4,
        )  # fmt: skip
        hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
        if fields.get("intermediate_size") is None:
            fields = fields.replaced(intermediate_size=4 * hidden)
        if fields.flag("use_long_context"):
            raise fields.refuse("use_long_context", "is not implemented; releases disagree on the rotation it asks for")
        if not fields.flag("tie_word_embeddings"):
            raise fields.refuse(
                "tie_word_embeddings", "is not implemented; transformers shares blocks only where it is true"
            )
        names = ("layers_block_type", "layer_types")
        named = next((fields[name] for name in names if fields.get(name)), None)
        kinds = tuple(_KINDS.get(kind, kind) for kind in named or ())
        if len(kinds) != fields.count("num_hidden_layers") or not set(kinds) <= {STATE, HYBRID} or HYBRID not in kinds:
            raise fields.refuse(names[0], "must say 'mamba' or 'hybrid' for each layer, and 'hybrid' for one")
        size = fields.with_defaults(attention_head_dim=fields.get("head_dim") or 2 * hidden // heads)
        config = llama_like(fields.replaced(head_dim=size.count("attention_head_dim")))
        bias = fields.flag("add_bias_linear")
        attention = config.blocks[0].attention
        attention = replace(
            attention,
            scale=(attention.head_dim / 2) ** -0.5,
            rope=attention.rope if fields.flag("use_mem_rope") else None,
        )
        shared = SharedSpec(
            attention=attention,
            inner=config.blocks[0].mlp.size,
            activation=fields.choice("hidden_act", ACTIVATIONS),
            bias=bias,
            rank=fields.count("adapter_rank"),
            attention_adapters=fields.flag("use_shared_attention_adapter"),
        )
        mixer_fields = fields.replaced(
            mamba_n_heads=fields["n_mamba_heads"], mamba_n_groups=fields["mamba_ngroups"], mamba_conv_bias=True,
            mamba_d_head=fields.get("mamba_headdim"), mamba_proj_bias=bias, rms_norm_eps=1e-5,
        )  # fmt: skip
        mamba = read_mamba2(mixer_fields, inner=int(fields.number("mamba_expand") * hidden))
        plain = ZambaBlockSpec(mixer=mamba, ffn=None, names=_NAMES)
        uses = {layer: use for use, layer in enumerate(i for i, kind in enumerate(kinds) if kind == HYBRID)}
        blocks = tuple(
            plain if i not in uses
            else ZambaBlockSpec(mixer=SharedUseSpec(shared=shared, mamba=mamba, use=uses[i]), ffn=None, names=_HYBRID_NAMES)
            for i in range(len(kinds))
        )  # fmt: skip
        same: dict[str, Any] = {each.name: getattr(config, each.name) for each in dataclasses.fields(config)}
        same |= {"blocks": blocks, "names": replace(config.names, norm="model.final_layernorm")}
        return Zamba2Config(**same, shared=shared, num_shared=fields.count("num_mem_blocks"))
