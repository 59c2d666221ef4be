"""A block of a decoder: a mixer and a feed-forward block between norms, added to the residual stream.

``BlockSpec`` says what a block is, in numbers and names; ``Block`` is the module. An architecture makes the specs, see
``models.decoder``; the forms in which products run are the junctions' business.

Where the norms stand (x is the residual):

    before                 x += mixer(norm(x));  x += ffn(norm(x))                        Llama, Qwen, ...
    before and after       x += norm(mixer(norm(x)));  x += norm(ffn(norm(x)))            Gemma2, GLM-4
    after                  x += norm(mixer(x));  x += norm(ffn(x))                        OLMo2
    before, parallel       n = norm(x);  x += mixer(n) + ffn(n)                           Cohere2
    two before, parallel   x += mixer(norm(x)) + ffn(norm(x))                             GPT-NeoX
    behind the sum         x = norm(x + mixer(x));  x = norm(x + ffn(x))                  BART
    before, no ffn         x += mixer(norm(x))                                            Mamba
    before, no mixer       x += ffn(norm(x))                                              layers of Nemotron-H
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import nn

from headway.core.cache import CacheSpec
from headway.models.interface import Stack, Target
from headway.models.layers.attention import AttentionSpec
from headway.models.layers.forms import PLAIN, LayerForms, LayerProducts, Out
from headway.models.layers.junction import ProjectIn, ProjectOut, Stream
from headway.models.layers.mixer import CutMixer, MixerSpec, Site
from headway.models.layers.mlp import MLP, MLPSpec
from headway.models.layers.moe import Mixture, MixtureSpec
from headway.models.layers.norm import Norm, NormSpec, RMSNorm
from headway.parallel.group import Group
from headway.state.batch import StepBatch
from headway.state.cache_pool import LayerCache


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockNames:
    """What a block's parts are called in the checkpoint; "" for norms that there are not.

    Attributes:
        before_mixer, after_mixer, before_ffn, after_ffn: the norms. A parallel block has no ``before_ffn``.
        mixer, ffn: modules; "": the products lie in the block itself, and a mixture has the layer's own names.
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
        mixer, ffn: its two parts; one of them may be missing.
        names: the norms it has are those with a name.
        parallel: both parts read the same norm.
        two_norms: of a parallel block: both parts read the same residual, each behind a norm of its own.
        residual_multiplier: of what is added to the residual.
        post: the norms named ``after_mixer`` and ``after_ffn`` are of the sums, which they replace.
    """

    mixer: MixerSpec | None
    ffn: MLPSpec | MixtureSpec | None
    names: BlockNames = BlockNames()
    parallel: bool = False
    two_norms: bool = False
    residual_multiplier: float = 1.0
    post: bool = False

    @property
    def attention(self) -> AttentionSpec:
        """The mixer of a block whose mixer is attention."""
        assert isinstance(self.mixer, AttentionSpec)
        return self.mixer

    @property
    def mlp(self) -> MLPSpec:
        """The feed-forward part of a block where it is no mixture."""
        assert isinstance(self.ffn, MLPSpec)
        return self.ffn

    @property
    def cache(self) -> CacheSpec | None:
        """The keys and values it caches."""
        return None if self.mixer is None else self.mixer.cache

    @property
    def state(self) -> CacheSpec | None:
        """Its state."""
        return None if self.mixer is None else self.mixer.state

    def sharded(self, group: Group, peers: Group, *, whole_experts: bool) -> BlockSpec:
        """What this rank of ``group`` has of it; ``peers``, ``whole_experts``: of ``ExpertShard``. Parts that cannot be cut are
        every rank's.

        Raises:
            UnsupportedModelError: the heads cannot be dealt out.
        """
        mixer, ffn = self.mixer, self.ffn
        if isinstance(ffn, MixtureSpec):
            ffn = ffn.sharded(group, peers, whole=whole_experts)
        if group.size == 1:
            return replace(self, ffn=ffn)
        if isinstance(mixer, CutMixer):
            mixer = mixer.sharded(group)
        return replace(self, mixer=mixer, ffn=ffn.sharded(group) if isinstance(ffn, MLPSpec) else ffn)

    def make(self, site: Site) -> Block:
        """The module."""
        return self.block(self, site)

    @property
    def block(self) -> type[Block]:
        """The kind of block that ``make`` makes."""
        return Block


class Block(nn.Module):
    """A block of ``spec``; it runs once it is linked to the norm that follows it.

    Attributes:
        first_norm: the norm it begins with, None for none.
    """

    def __init__(self, spec: BlockSpec, site: Site) -> None:
        super().__init__()
        norm, hidden, _, _, dtype, device = site
        self.spec = spec
        names = spec.names

        def made(name: str) -> Norm | None:
            return norm.make(hidden, dtype=dtype, device=device) if name else None

        mixer, ffn = spec.mixer, spec.ffn
        assert mixer is not None or ffn is not None, "a block has a mixer or a feed-forward block"
        assert not spec.parallel or (mixer is not None and ffn is not None), "side by side are two"
        self.mixer = None if mixer is None else mixer.make(site)
        self.ffn = None if ffn is None else ffn.make(hidden, dtype=dtype, device=device)
        self.before_mixer = made(names.before_mixer) if mixer is not None else None
        self.after_mixer = made(names.after_mixer) if mixer is not None else None
        own = ffn is not None and (not spec.parallel or spec.two_norms)
        self.before_ffn = made(names.before_ffn) if own else self.before_mixer if spec.parallel else None
        self.after_ffn = made(names.after_ffn) if ffn is not None else None
        self.first_norm = self.before_ffn if mixer is None else self.before_mixer
        self._build(norm, hidden, dtype=dtype, device=device)

    def _build(self, norm: NormSpec, hidden: int, *, dtype: torch.dtype, device: torch.device) -> None:
        """Make what a kind of block has besides; see ``Site``."""

    def link(self, next_norm: Norm | None) -> None:
        """Make the junctions; ``next_norm``: of the next block, or the model's last. Once weights are in place."""
        spec, mixer, ffn = self.spec, self.mixer, self.ffn
        multiplier = spec.residual_multiplier
        # Plain attributes: neither is a module.
        if spec.post:
            self._link_post()
            return
        if mixer is not None:
            self.into_mixer = ProjectIn(self.before_mixer, mixer.into)
            behind = next_norm if ffn is None else self.before_ffn
            self.out_of_mixer = ProjectOut(mixer.out, behind, self.after_mixer, multiplier)
        if ffn is not None:
            products = (ffn.gate_up, ffn.act, ffn.down) if isinstance(ffn, MLP) else (None, None, None)
            self.into_ffn = ProjectIn(self.before_ffn, *products[:2])
            last = products[2], next_norm, self.after_ffn, multiplier
            self.out_of_ffn = ProjectOut(*last, scale=self._last_scale)

    @property
    def _last_scale(self) -> torch.Tensor | None:
        """[1], what the last sum is multiplied by; None: nothing."""
        return None

    def _link_post(self) -> None:
        """Norms stand behind the sums: what comes next takes the residual as it is."""
        if self.mixer is not None:
            self.into_mixer = ProjectIn(None, self.mixer.into)
            self.out_of_mixer = ProjectOut(self.mixer.out, self.after_mixer, replaces=True)
        if self.ffn is not None:
            assert isinstance(self.ffn, MLP), "norms behind the sums and mixtures have not met"
            self.into_ffn = ProjectIn(None, self.ffn.gate_up, self.ffn.act)
            self.out_of_ffn = ProjectOut(self.ffn.down, self.after_ffn, replaces=True)

    def enter(self, x: torch.Tensor, forms: LayerForms) -> Stream:
        """The stream that begins with x [T, C] at this block."""
        if self.mixer is None:
            return self.into_ffn.enter(x, forms.into_ffn)
        return self.into_mixer.enter(x, forms.into_mixer)

    @property
    def products(self) -> LayerProducts:
        """What decides on the forms."""
        if self.spec.parallel:
            return LayerProducts(None, None, None, None)
        mixer, ffn = self.mixer, self.ffn
        return LayerProducts(
            None if mixer is None else self.into_mixer.product(whole_heads=mixer.whole_heads),
            None if mixer is None else self.out_of_mixer.product(),
            None if ffn is None else self.into_ffn.product(),
            None if ffn is None else self.out_of_ffn.product(),
            mixer is not None,
            ffn is not None,
            self._mixture_tokens,
        )

    @property
    def _mixture_tokens(self) -> int:
        """See ``LayerProducts.mixture``."""
        ffn, norm = self.ffn, self.before_ffn
        if not isinstance(ffn, Mixture) or not isinstance(norm, RMSNorm) or norm.weight.dtype != ffn.router.dtype:
            return 0
        behind = self.after_ffn is not None or self.spec.residual_multiplier != 1.0
        return 0 if behind else ffn.few_tokens

    def forward(self, stream: Stream, batch: StepBatch, cache: LayerCache, forms: LayerForms) -> Stream:
        """Add the mixer and the feed-forward block to the stream of T tokens; the layer's cache is written."""
        if self.mixer is None:
            return self._feed_forward(stream, batch, forms)
        mixed = self.mixer.forward(self.into_mixer, stream, forms.into_mixer, batch, cache, False)
        return self._finish(mixed, stream, batch, forms)

    def forward_last(self, stream: Stream, batch: StepBatch, cache: LayerCache, forms: LayerForms) -> Stream:
        """``forward`` that goes on, from the scores on, with each row's last token alone; gives a stream of R tokens."""
        last = batch.logit_indices
        if self.mixer is None:
            normed = self.into_ffn.normed(stream).index_select(0, last)
            return self._feed_forward(Stream(stream.residual.index_select(0, last), normed), batch, PLAIN, True)
        mixed = self.mixer.forward(self.into_mixer, stream, forms.into_mixer, batch, cache, True)
        residual = stream.residual.index_select(0, last)
        both = stream.normed.index_select(0, last) if self.spec.parallel and stream.normed is not None else None
        return self._finish(mixed, Stream(residual, both), batch, PLAIN, True)

    def _finish(
        self, mixed: torch.Tensor, stream: Stream, batch: StepBatch, forms: LayerForms, last_only: bool = False
    ) -> Stream:
        """From what the mixer's product out is of, [T, K], on; ``last_only``: of the rows' last tokens."""
        if self.spec.parallel:
            assert self.mixer is not None and self.ffn is not None
            both = self.mixer.out.forward(mixed)
            beside = Stream(stream.residual) if self.spec.two_norms else stream
            if isinstance(self.ffn, Mixture):
                both += self.ffn.forward(self.into_ffn.normed(beside), batch.live_tokens(last_only), batch.most_tokens)
            else:
                both += self.ffn.down.forward(self.into_ffn(beside, forms.into_ffn))
            return self.out_of_ffn.add(both, stream.residual)
        stream = self.out_of_mixer(mixed, stream, forms.out_of_mixer)
        return stream if self.ffn is None else self._feed_forward(stream, batch, forms, last_only)

    def _feed_forward(self, stream: Stream, batch: StepBatch, forms: LayerForms, last_only: bool = False) -> Stream:
        if isinstance(self.ffn, Mixture) and forms.out_of_ffn is Out.ADD:
            self.ffn.add(stream.residual, cast(RMSNorm, self.before_ffn), batch.live_tokens(last_only))
            return Stream(stream.residual)
        if isinstance(self.ffn, Mixture):
            fed, group = self.ffn.partial(self.into_ffn.normed(stream), batch.live_tokens(last_only), batch.most_tokens)
            return self.out_of_ffn.add(fed, stream.residual, group)
        return self.out_of_ffn(self.into_ffn(stream, forms.into_ffn), stream, forms.out_of_ffn)

    def destinations(self, prefix: str) -> dict[str, Target]:
        names = self.spec.names
        found: dict[str, Target] = {}
        if self.mixer is not None:
            found |= self.mixer.destinations(f"{prefix}{names.mixer}.")
        if self.ffn is not None:
            found |= self.ffn.destinations(self._ffn_prefix(prefix))
        norms = [
            (names.before_mixer, self.before_mixer),
            (names.after_mixer, self.after_mixer),
            (names.before_ffn, self.before_ffn if self.spec.two_norms or not self.spec.parallel else None),
            (names.after_ffn, self.after_ffn),
        ]
        for name, norm in norms:
            if norm is not None:
                found |= norm.destinations(f"{prefix}{name}.")
        return found

    def stacks(self, prefix: str) -> dict[str, Stack]:
        """Checkpoint tensors, by name beginning with prefix, that hold several of ``destinations``."""
        return self.ffn.stacks(self._ffn_prefix(prefix)) if isinstance(self.ffn, Mixture) else {}

    def elsewhere(self, prefix: str) -> list[str]:
        """Beginnings of checkpoint names, beginning with prefix, of what other ranks have."""
        return self.ffn.elsewhere(self._ffn_prefix(prefix)) if isinstance(self.ffn, Mixture) else []

    def _ffn_prefix(self, prefix: str) -> str:
        name = self.spec.names.ffn
        return f"{prefix}{name}." if name else prefix

    @property
    def token_weights(self) -> int:
        """Elements of parameters that a token passes."""
        own = sum(parameter.numel() for parameter in self.parameters())
        if not isinstance(self.ffn, Mixture):
            return own
        return own - sum(parameter.numel() for parameter in self.ffn.parameters()) + self.ffn.token_weights
