"""LongCat-Flash (arXiv:2509.01322): a layer is two blocks of latent attention and a dense part, and a mixture that
reads what the first block's dense part does and is added behind the second. Some of its experts give back what goes in."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import torch

from headway.models.blocks import Block, BlockNames, BlockSpec
from headway.models.config import map_blocks
from headway.models.decoder import DecoderConfig, DecoderModel
from headway.models.fields import Fields
from headway.models.interface import Stack, Target
from headway.models.latent import latent_like
from headway.models.layers.forms import PLAIN, LayerForms, LayerProducts
from headway.models.layers.junction import Stream
from headway.models.layers.mla import MLA, MLASpec
from headway.models.layers.moe import MixtureSpec, RouterSpec
from headway.models.layers.norm import Norm, NormSpec
from headway.models.mixtures import expert_count, read_mixture
from headway.state.batch import StepBatch
from headway.state.cache_pool import LayerCache


@dataclass(frozen=True, kw_only=True, slots=True)
class ShortcutBlockSpec(BlockSpec):
    """Half of a layer.

    Attributes:
        mixture: what the first half hands on beside the residual; None: of the second half, which adds it.
    """

    mixture: MixtureSpec | None = None

    @property
    def block(self) -> type[Block]:
        """See ``BlockSpec``."""
        return ShortcutBlock


class ShortcutBlock(Block):
    """The mixture's module is ``shortcut``, and ``mlp`` in the checkpoint."""

    spec: ShortcutBlockSpec

    def _build(self, norm: NormSpec, hidden: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super()._build(norm, hidden, dtype=dtype, device=device)
        spec = self.spec
        self.shortcut = None if spec.mixture is None else spec.mixture.make(hidden, dtype=dtype, device=device)

    def link(self, next_norm: Norm | None) -> None:
        """See ``Block``: behind the second half's last product the mixture is still to be added."""
        super().link(next_norm if self.shortcut is not None else None)

    @property
    def products(self) -> LayerProducts:
        """See ``Block``: what the first half's dense part reads the mixture reads, too, so that it is normalised by itself."""
        whole = super().products
        return whole if self.shortcut is None else whole._replace(out_of_mixer=None, into_ffn=None)

    def forward(self, stream: Stream, batch: StepBatch, cache: LayerCache, forms: LayerForms) -> Stream:
        """See ``Block``."""
        return self._half(stream, batch, cache, forms, last_only=False)

    def forward_last(self, stream: Stream, batch: StepBatch, cache: LayerCache, forms: LayerForms) -> Stream:
        """See ``Block``."""
        return self._half(stream, batch, cache, forms, last_only=True)

    def _half(
        self, stream: Stream, batch: StepBatch, cache: LayerCache, forms: LayerForms, *, last_only: bool
    ) -> Stream:
        assert self.mixer is not None
        beside = stream.beside
        mixed = self.mixer.forward(self.into_mixer, stream, forms.into_mixer, batch, cache, last_only)
        if last_only:
            last, forms = batch.logit_indices, PLAIN
            stream = Stream(stream.residual.index_select(0, last))
            beside = None if beside is None else beside.index_select(0, last)
        stream = self.out_of_mixer(mixed, stream, forms.out_of_mixer)
        if self.shortcut is None:
            stream = self._feed_forward(stream, batch, forms, last_only)
            # A rehearsal runs one layer of a kind, so this half may come without the first.
            return Stream(stream.residual if beside is None else stream.residual.add_(beside))
        normed = self.into_ffn.normed(stream)
        beside = self.shortcut.forward(normed, batch.live_tokens(last_only))
        return self._feed_forward(Stream(stream.residual, normed), batch, forms, last_only)._replace(beside=beside)

    def destinations(self, prefix: str) -> dict[str, Target]:
        """See ``Block``."""
        found = super().destinations(prefix)
        return found if self.shortcut is None else found | self.shortcut.destinations(f"{prefix}mlp.")

    def stacks(self, prefix: str) -> dict[str, Stack]:
        """See ``Block``."""
        return {} if self.shortcut is None else self.shortcut.stacks(f"{prefix}mlp.")

    @property
    def token_weights(self) -> int:
        """See ``Block``."""
        own = super().token_weights
        if self.shortcut is None:
            return own
        return own - sum(parameter.numel() for parameter in self.shortcut.parameters()) + self.shortcut.token_weights


class LongcatFlashForCausalLM(DecoderModel):
    """Latents are scaled behind their norms, by what makes their variance that of hidden states."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        layers = fields.count("num_layers" if fields.get("num_layers") is not None else "num_hidden_layers")
        layers = layers if fields.get("num_layers") is not None else layers // 2
        fields = fields.with_defaults(
            ffn_hidden_size=12288, expert_ffn_hidden_size=2048, moe_topk=12, n_routed_experts=512, zero_expert_num=256,
            routed_scaling_factor=6.0, rope_theta=1e7, rms_norm_eps=1e-5, max_position_embeddings=131072, q_lora_rank=1536,
            kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        )  # fmt: skip
        for name in ("mla_scale_q_lora", "mla_scale_kv_lora"):
            if fields.with_defaults(**{name: True})[name] is not True:
                raise fields.refuse(name, "is not implemented; true is")
        if fields.with_defaults(zero_expert_type="identity")["zero_expert_type"] != "identity":
            raise fields.refuse("zero_expert_type", "is not implemented; 'identity' is")
        if fields.flag("router_bias"):
            raise fields.refuse("router_bias", "is not implemented: transformers ignores it, others add it")
        if fields.get("q_lora_rank") is None:
            raise fields.refuse("q_lora_rank", "must be a positive integer")
        inner = fields.count("ffn_hidden_size")
        config = latent_like(fields.replaced(num_hidden_layers=2 * layers, intermediate_size=inner), interleaved=True)
        experts, zeros = expert_count(fields, "n_routed_experts"), fields.whole("zero_expert_num", 0)
        router = RouterSpec(
            top_k=fields.count("moe_topk"),
            renormalise=False,
            scale=fields.number("routed_scaling_factor"),
            name="router.classifier",
            correction="router.e_score_correction_bias",
        )
        mixture = replace(read_mixture(fields, experts, router, size="expert_ffn_hidden_size"), zero_experts=zeros)

        def change(layer: int, block: BlockSpec) -> BlockSpec:
            mla, half = cast(MLASpec, block.mixer), layer % 2
            names = BlockNames(
                before_mixer=f"input_layernorm.{half}",
                mixer=f"self_attn.{half}",
                before_ffn=f"post_attention_layernorm.{half}",
                ffn=f"mlps.{half}",
            )
            scale = mla.scale * (config.hidden_size / mla.q_rank) ** 0.5  # scores are linear in the queries' latent
            own = None if half else mixture
            return ShortcutBlockSpec(mixer=replace(mla, scale=scale), ffn=block.ffn, names=names, mixture=own)

        # transformers writes matrices for experts that have none, too.
        empty = [f"layers.{i}.mlp.experts.{experts + e}." for i in range(layers) for e in range(zeros)]
        return replace(
            map_blocks(config, change), names=replace(config.names, blocks_per_layer=2), unused=("mtp.", *empty)
        )

    @torch.no_grad()
    def finalize(self) -> None:
        """See ``DecoderModel``: the scale of the latents of keys and values becomes part of their norms."""
        for block in self._layers:
            mla = cast(MLA, block.mixer)
            mla.kv_norm.weight.mul_((self.config.hidden_size / mla.spec.rank) ** 0.5)
        super().finalize()
