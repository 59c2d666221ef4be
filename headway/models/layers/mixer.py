"""What a block asks of its mixer, the part in which tokens of a row meet; and what all mixers with states share.

Shapes: T tokens of the step, R rows, C hidden size, N and K outputs of the product in and inputs of the product out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol, Self, runtime_checkable

import torch
from torch import nn

from headway.core.cache import CacheSpec
from headway.models.interface import Target
from headway.models.layers.forms import In
from headway.models.layers.junction import ProjectIn, Stream
from headway.models.layers.linear import Linear, SummedLinear
from headway.models.layers.norm import NormSpec
from headway.parallel.group import Group
from headway.parallel.shard import EvenShard, Taken
from headway.recurrent.base import convolve
from headway.state.batch import StepBatch
from headway.state.cache_pool import LayerCache

if TYPE_CHECKING:
    from headway.models.layers.attention import AttentionSpec


class Site(NamedTuple):
    """Where in a model a block, or its mixer, is made.

    Attributes:
        norm: what the model's norms are like.
        hidden: C.
        cos_sin: float32 [L, Drot], of the mixer's rope, shared by layers; None: it rotates nothing.
        group: of the layer's keys and values in the cache.
        dtype, device: of its parameters.
    """

    norm: NormSpec
    hidden: int
    cos_sin: torch.Tensor | None
    group: int
    dtype: torch.dtype
    device: torch.device


class Mixer(Protocol):
    """A module.

    Attributes:
        into, out: its first product, of the normalised hidden states, and its last, which is added to the residual.
        whole_heads: whether ``wide_qkv`` can do the first, with all that follows.
    """

    @property
    def into(self) -> Linear: ...
    @property
    def out(self) -> Linear: ...
    @property
    def whole_heads(self) -> bool: ...

    def forward(
        self, project: ProjectIn, stream: Stream, form: In, batch: StepBatch, cache: LayerCache, last_only: bool
    ) -> torch.Tensor:
        """What the product out is of: [T, K], or [R, K] of the rows' last tokens with ``last_only``. Writes the
        layer's cache for all tokens. ``project`` is the product in, in ``form``."""

    def destinations(self, prefix: str) -> dict[str, Target]:
        """Checkpoint tensor name, beginning with prefix -> where it goes."""


class MixerSpec(Protocol):
    """A mixer in numbers and names; hashable, equal where the mixers launch the same kernels."""

    @property
    def cache(self) -> CacheSpec | None:
        """Keys and values, in blocks."""

    @property
    def state(self) -> CacheSpec | None:
        """What belongs to the slot."""

    @property
    def rotated(self) -> AttentionSpec | None:
        """The attention whose rotary table ``make`` is given."""

    def make(self, site: Site) -> Mixer:
        """The module."""


@runtime_checkable
class CutMixer(MixerSpec, Protocol):
    """A mixer that can be cut into parts; any other is whole on every rank."""

    def sharded(self, group: Group) -> Self:
        """What this rank of ``group`` has of it.

        Raises:
            UnsupportedModelError: it cannot be dealt out.
        """


class StateSpec:
    """A ``MixerSpec`` of a layer that has a state and nothing else."""

    __slots__ = ()
    cache = rotated = None


class StateMixer(nn.Module):
    """A mixer whose tokens meet in a state: between its products stands ``mix``."""

    into: Linear
    out: Linear
    whole_heads = False

    def forward(
        self, project: ProjectIn, stream: Stream, form: In, batch: StepBatch, cache: LayerCache, last_only: bool
    ) -> torch.Tensor:
        """See ``Mixer``; the state needs every token, so only what comes behind it is done for the last ones alone."""
        mixed = self.mix(project(stream, form), batch, cache)
        return mixed.index_select(0, batch.logit_indices) if last_only else mixed

    def mix(self, x: torch.Tensor, batch: StepBatch, cache: LayerCache) -> torch.Tensor:
        """[T, N] -> [T, K]; ``cache`` are the parts of the layer's state."""
        raise NotImplementedError

    def finalize(self) -> None:
        """Called once, after loading."""


class Convolution(nn.Module):
    """A causal depthwise convolution over each row.

    Attributes:
        weight: [C, W]; the checkpoint has [C, 1, W].
        bias: [C] or None.
    """

    def __init__(self, channels: int, taps: int, *, bias: bool, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = parameter(channels, taps, dtype=dtype, device=device)
        self.bias = parameter(channels, dtype=dtype, device=device) if bias else None

    def forward(self, x: torch.Tensor, batch: StepBatch, ring: torch.Tensor, *, silu: bool = True) -> torch.Tensor:
        """[T, C] -> [T, C]; ring [S, W, C] is written."""
        return convolve(x, self.weight, self.bias, batch, ring, silu=silu)

    def destinations(self, prefix: str, taken: Taken | None = None) -> dict[str, Target]:
        """Checkpoint tensor name, beginning with prefix -> where it goes; ``taken``: of its channels these."""
        found = {f"{prefix}weight": Target.part(self.weight[:, None], taken)}
        return found if self.bias is None else found | {f"{prefix}bias": Target.part(self.bias, taken)}


def product_out(
    inputs: int,
    name: str,
    hidden: int,
    shard: EvenShard | None,
    *,
    bias: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> Linear:
    """A mixer's last product; a sum over ranks where each has ``inputs`` of more."""
    if shard is None:
        return Linear(inputs, {name: hidden}, bias=bias, dtype=dtype, device=device)
    return SummedLinear(
        inputs, {name: hidden}, group=shard.group, columns=shard.columns(inputs), bias=bias, dtype=dtype, device=device
    )


def parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """An uninitialised one that is never trained."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
