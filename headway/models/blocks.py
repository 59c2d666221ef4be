"""A block of a decoder: a mixer and a feed-forward block between norms, added to the residual stream.

``BlockSpec`` says what a block is, in numbers and names; ``Block`` is the module. An architecture makes the specs, see
``models.decoder``; the forms in which products run are the junctions' business.

Where the norms stand (x is the residual):

    before                 x += mixer(norm(x));  x += ffn(norm(x))                        Llama, Qwen, ...
    before and after       x += norm(mixer(norm(x)));  x += norm(ffn(norm(x)))            Gemma2, GLM-4
    after                  x += norm(mixer(x));  x += norm(ffn(x))                        OLMo2
    before, parallel       n = norm(x);  x += mixer(n) + ffn(n)                           Cohere2
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from headway.models.interface import Target
from headway.models.layers.attention import Attention, AttentionSpec
from headway.models.layers.forms import PLAIN, LayerForms, LayerProducts
from headway.models.layers.junction import ProjectIn, ProjectOut, Stream
from headway.models.layers.mlp import MLP, MLPSpec
from headway.models.layers.norm import Norm, NormSpec
from headway.state.batch import StepBatch
from headway.state.cache_pool import LayerCache


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockNames:
    """What a block's parts are called in the checkpoint; "" for norms that there are not.

    Attributes:
        before_mixer, after_mixer, before_ffn, after_ffn: the norms. A parallel block has no ``before_ffn``.
        mixer, ffn: modules.
    """

    before_mixer: str = "input_layernorm"
    mixer: str = "self_attn"
    after_mixer: str = ""
    before_ffn: str = "post_attention_layernorm"
    ffn: str = "mlp"
    after_ffn: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockSpec:
    """One block. Blocks that are equal launch the same kernels.

    Attributes:
        mixer, ffn: its two parts.
        names: the norms it has are those with a name.
        parallel: both parts read the same norm.
        residual_multiplier: of what is added to the residual.
    """

    mixer: AttentionSpec
    ffn: MLPSpec
    names: BlockNames = BlockNames()
    parallel: bool = False
    residual_multiplier: float = 1.0


class Block(nn.Module):
    """A block of ``spec``; it runs once it is linked to the norm that follows it.

    Args:
        norm: of all its norms.
        hidden: C.
        cos_sin: float32 [L, Drot], of the mixer's rope.
        group: of the layer's cache.

    Attributes:
        first_norm: the norm it begins with, None for none.
    """

    def __init__(
        self,
        spec: BlockSpec,
        norm: NormSpec,
        hidden: int,
        cos_sin: torch.Tensor,
        group: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.spec = spec
        names = spec.names

        def made(name: str) -> Norm | None:
            return norm.make(hidden, dtype=dtype, device=device) if name else None

        self.mixer = Attention(spec.mixer, norm, hidden, cos_sin, group, dtype=dtype, device=device)
        self.ffn = MLP(spec.ffn, hidden, dtype=dtype, device=device)
        self.first_norm, self.after_mixer = made(names.before_mixer), made(names.after_mixer)
        self.before_ffn = self.first_norm if spec.parallel else made(names.before_ffn)
        self.after_ffn = made(names.after_ffn)

    def link(self, next_norm: Norm | None) -> None:
        """Make the junctions; ``next_norm``: of the next block, or the model's last. Once weights are in place."""
        spec, mixer, ffn = self.spec, self.mixer, self.ffn
        scale = spec.residual_multiplier
        # Plain attributes: neither is a module.
        self.into_mixer = ProjectIn(self.first_norm, mixer.qkv)
        self.out_of_mixer = ProjectOut(mixer.out, self.before_ffn, self.after_mixer, scale)
        self.into_ffn = ProjectIn(self.before_ffn, ffn.gate_up, ffn.act)
        self.out_of_ffn = ProjectOut(ffn.down, next_norm, self.after_ffn, scale)

    @property
    def products(self) -> LayerProducts:
        """What decides on the forms."""
        if self.spec.parallel:
            return LayerProducts(None, None, None, None)
        into = self.into_mixer.product(whole_heads=self.mixer.whole_heads)
        return LayerProducts(into, self.out_of_mixer.product(), self.into_ffn.product(), self.out_of_ffn.product())

    def forward(self, stream: Stream, batch: StepBatch, cache: LayerCache, forms: LayerForms) -> Stream:
        """Add the mixer and the feed-forward block to the stream of T tokens; the layer's cache is written."""
        mixed = self.mixer.forward(self.into_mixer, stream, forms.into_mixer, batch, cache, False)
        return self._finish(mixed, stream, forms)

    def forward_last(self, stream: Stream, batch: StepBatch, cache: LayerCache, forms: LayerForms) -> Stream:
        """``forward`` that goes on, from the scores on, with each row's last token alone; gives a stream of R tokens."""
        mixed = self.mixer.forward(self.into_mixer, stream, forms.into_mixer, batch, cache, True)
        residual = stream.residual.index_select(0, batch.logit_indices)
        normed = (
            stream.normed.index_select(0, batch.logit_indices)
            if self.spec.parallel and stream.normed is not None
            else None
        )
        return self._finish(mixed, Stream(residual, normed), PLAIN)

    def _finish(self, mixed: torch.Tensor, stream: Stream, forms: LayerForms) -> Stream:
        """From the heads [T, H * D] on."""
        if self.spec.parallel:
            both = self.mixer.out.forward(mixed)
            both += self.ffn.down.forward(self.into_ffn(stream, forms.into_ffn))
            return self.out_of_ffn.add(both, stream.residual)
        stream = self.out_of_mixer(mixed, stream, forms.out_of_mixer)
        return self.out_of_ffn(self.into_ffn(stream, forms.into_ffn), stream, forms.out_of_ffn)

    def destinations(self, prefix: str) -> dict[str, Target]:
        """Checkpoint tensor name, beginning with prefix -> where it goes."""
        names = self.spec.names
        found = self.mixer.destinations(f"{prefix}{names.mixer}.") | self.ffn.destinations(f"{prefix}{names.ffn}.")
        norms = {
            names.before_mixer: self.first_norm,
            names.after_mixer: self.after_mixer,
            names.after_ffn: self.after_ffn,
        }
        if not self.spec.parallel:
            norms[names.before_ffn] = self.before_ffn
        for name, norm in norms.items():
            if norm is not None:
                found |= norm.destinations(f"{prefix}{name}.")
        return found
