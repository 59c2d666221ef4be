"""The module of a layer for multi-token prediction (``models.mtp``), built from the specs of the model that it drafts for.

Run K times a step, each pass reading what the one before made, behind the last norm: so do transformers and SGLang. (vLLM hands
on what stands in front of that norm; first drafts are the same.)

Shapes: T tokens, C hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TypedDict

import torch
from torch import nn

from headway.core.cache import CacheLayout
from headway.core.switches import FUSED_LAYERS, is_on
from headway.models.blocks import BlockSpec
from headway.models.decoder import DecoderConfig, DecoderModel, finalize_parts
from headway.models.interface import ModelSpec, WeightMap
from headway.models.layers.forms import FormTable, Rules, rules_for
from headway.models.layers.linear import Linear
from headway.models.layers.mixer import Site
from headway.models.layers.mla import MLASpec
from headway.models.mtp import MTPSpec
from headway.models.rope import rotation
from headway.speculative.agreed import whole_logits
from headway.state.batch import StepBatch
from headway.state.cache_pool import CachePool


class _Made(TypedDict):
    dtype: torch.dtype
    device: torch.device


class MTPModel(nn.Module):
    """The layer with uninitialised weights; whoever fills them calls ``finalize``. Embedding and output layer are the target's.

    Of several ranks each has a part of the block, as of the target's.

    Args:
        target: with its weights in place.
        spec: of the layer.
        config: of its block and norms: the target's, or what a checkpoint of its own says.
        max_len: positions the rotary table covers.

    Attributes:
        spec: what it declares.
        auxiliary: () - it reads the last hidden states, behind the last norm.
    """

    auxiliary: tuple[int, ...] = ()

    def __init__(
        self, target: DecoderModel, spec: MTPSpec, config: DecoderConfig, *, dtype: torch.dtype, max_len: int
    ) -> None:
        super().__init__()
        self.dtype, self.device, self._names = dtype, target.device, spec
        self._embed, self._logits = target.embedding.forward, whole_logits(target)
        hidden, made = config.hidden_size, _Made(dtype=dtype, device=target.device)
        block = _block(config, spec)
        rotated = None if block.mixer is None else block.mixer.rotated
        assert rotated is not None, "the layer attends"
        table = rotation(rotated.rope, rotated.turning, max_len, target.device)
        self.token_norm = config.norm.make(hidden, **made)
        self.hidden_norm = config.norm.make(hidden, **made)
        self.norm = config.norm.make(hidden, **made)
        self._prefix, _, name = spec.projection.rpartition(".")
        self.project = Linear(2 * hidden, {name: hidden}, bias=False, **made)
        self.block = block.make(Site(config.norm, hidden, table, 0, dtype, target.device))
        self._forms = FormTable([], None, Rules())  # until ``finalize``
        self.spec = ModelSpec(
            architecture=f"{config.architecture}'s layer for multi-token prediction",
            vocab_size=config.vocab_size,
            hidden_size=hidden,
            longest_context=max_len,
            eos_token_ids=(),
            cache=CacheLayout.of([block.cache], max_len),
            layer_kinds=(block,),
            layer_weights=self.block.token_weights,
            head_weights=config.vocab_size * hidden,
        )

    def combine(self, states: Iterable[torch.Tensor]) -> torch.Tensor:
        """The target's last hidden states [T, C], as they are."""
        return next(iter(states))

    def forward(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, batch: StepBatch, caches: CachePool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One pass; writes what the step's tokens cache. Arguments and results as of ``EagleModel.forward``."""
        parts = [self.token_norm.forward(self._embed(token_ids)), self.hidden_norm.forward(hidden)]
        x = self.project.forward(torch.cat(parts[::-1] if self._names.hidden_first else parts, dim=1))
        (form,) = self._forms.of(len(x), batch.num_decode_rows == len(x))
        stream = self.block.forward(self.block.enter(x, form), batch, caches.layers[0], form)
        normed = stream.normed if stream.squares is None else None
        out = self.norm.forward(stream.residual) if normed is None else normed
        return out, out

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, C] -> [N, V], by the target's output layer."""
        return self._logits(hidden)

    def weights(self) -> WeightMap:
        """Where each of its tensors goes; before ``finalize``."""
        names, prefix = self._names, f"{self._names.block}."
        found = self.project.destinations(f"{self._prefix}." if self._prefix else "")
        for name, norm in (
            (names.token_norm, self.token_norm),
            (names.hidden_norm, self.hidden_norm),
            (names.norm, self.norm),
        ):
            found |= norm.destinations(f"{name}.")
        found |= self.block.destinations(prefix)
        trunk = "model."
        others = (*names.shared, *self.block.elsewhere(prefix))
        unused = tuple(name.removeprefix(trunk) for name in others)
        return WeightMap(found, ("rotary_emb.inv_freq",), (trunk,), unused, stacks=self.block.stacks(prefix))

    @torch.no_grad()
    def finalize(self) -> None:
        """Called once, when the weights are in place."""
        finalize_parts(self)
        self.block.link(self.norm)
        rules = rules_for(self.device, self.dtype) if is_on(FUSED_LAYERS) else Rules()
        self._forms = FormTable([self.block.products], None, rules)


def _block(config: DecoderConfig, spec: MTPSpec) -> BlockSpec:
    """The model's block that the layer's is like, with an indexer of its own where that one shares another's."""
    block = config.blocks[spec.like]
    if isinstance(block.mixer, MLASpec) and block.mixer.index is not None:
        return replace(block, mixer=replace(block.mixer, index=replace(block.mixer.index, shared=False)))
    return block
