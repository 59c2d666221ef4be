"""The junctions of a layer: a product with what stands before or behind it, in the form that suits the number of tokens.

A ``Stream`` runs through the layers. ``ProjectIn`` takes from it what a product needs, ``ProjectOut`` adds a product to it.
Which kernels do that is decided by ``models.layers.forms``, once per number of tokens; blocks and architectures do not see it.

Shapes: T tokens of the step, C hidden size, K and N inputs and outputs of a product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, cast

import torch

from headway.kernels.mid_linear import linear_parts, mid_add, mid_gate_up, mid_linear
from headway.kernels.rms_norm import add_parts_rms_norm, norm_add
from headway.kernels.skinny_linear import linear_add, norm_gate_up, norm_linear, skinny_linear
from headway.kernels.wide_linear import wide_add, wide_gate_up
from headway.models.layers.activation import Gate
from headway.models.layers.forms import In, InProduct, Out, OutProduct
from headway.models.layers.linear import Linear
from headway.models.layers.norm import Norm, RMSNorm
from headway.parallel.group import Group

Activation = Callable[[torch.Tensor], torch.Tensor]
"""[T, N] -> [T, inner]."""


class Stream(NamedTuple):
    """What runs from junction to junction.

    Attributes:
        residual: [T, C], written in place.
        normed: [T, C], the residual's norm; None: the next ``ProjectIn`` normalises it.
        squares: with these ``normed`` is the residual times the norm's weight, and they are sums of the residual's squares, f32
            [P, T], see ``mid_linear``.
        beside: [T, ...], what some architectures carry past the layers; see ``layers.per_layer``.
    """

    residual: torch.Tensor
    normed: torch.Tensor | None = None
    squares: torch.Tensor | None = None
    beside: torch.Tensor | None = None


class ProjectIn:
    """act(linear(norm(residual))).

    Args:
        norm: what stands before it; None: the residual itself goes in.
        linear: None: what comes behind the norm is no single product, and takes ``normed``.
        act: what follows.
    """

    def __init__(self, norm: Norm | None, linear: Linear | None, act: Activation | None = None) -> None:
        self.norm, self.act = norm, act
        self._linear = linear
        self._gate = act.name if isinstance(act, Gate) else ""

    @property
    def linear(self) -> Linear:
        """The product."""
        assert self._linear is not None
        return self._linear

    def product(self, *, whole_heads: bool = False) -> InProduct | None:
        """What ``forms`` needs to know of it; ``whole_heads``: ``wide_qkv`` can do it."""
        dense, norm = None if self._linear is None else self._linear.dense, self.norm
        if dense is None:
            return None
        outputs, inputs = dense.shape
        fused = isinstance(norm, RMSNorm)
        return InProduct(outputs, inputs, self.linear.bias is not None, self._gate, fused, whole_heads)

    def enter(self, residual: torch.Tensor, form: In) -> Stream:
        """The stream that begins with residual [T, C] and whose first junction this is."""
        return Stream(residual, None if form is In.NORM else self.normed(Stream(residual)))

    def normed(self, stream: Stream) -> torch.Tensor:
        """[T, C], what the product is of."""
        residual, x = stream.residual, stream.normed
        if x is not None:
            return x
        return residual if self.norm is None else self.norm.forward(residual)

    def __call__(self, stream: Stream, form: In) -> torch.Tensor:
        """[T, N] of the product, or what ``act`` makes of it."""
        linear, act, gate = self.linear, self.act, self._gate
        if form is In.PLAIN:
            y = linear.forward(self.normed(stream))
            return y if act is None else act(y)
        product = linear.weight, linear.bias
        if form is In.NORM:
            norm = cast(RMSNorm, self.norm)
            given = stream.residual, norm.weight, norm.eps, *product
            y = norm_gate_up(*given, gate) if gate else norm_linear(*given)
        elif form is In.WIDE:
            y = wide_gate_up(self.normed(stream), linear.weight, gate)
        elif form is In.SKINNY:
            x = self.normed(stream)
            y = norm_gate_up(x, None, 0.0, *product, gate) if gate else skinny_linear(x, *product)
        else:
            eps = 0.0 if self.norm is None else self.norm.eps
            early = self.normed(stream), *product, stream.squares, eps
            y = mid_gate_up(*early, gate) if gate else mid_linear(*early)
        return cast(torch.Tensor, y if act is None or gate else act(y))


class ProjectOut:
    """residual = (residual + multiplier * after(linear(x))) * scale, then the norm that the next junction begins with.

    Args:
        linear: None: what is added is no single product; ``add`` does it.
        next_norm: of the next ``ProjectIn``; None: it takes the residual itself.
        after: a norm of the product.
        multiplier: of the product, behind its norm.
        replaces: ``next_norm`` is of the sum, and becomes the residual.
        scale: [1], of the sum, where RMS norms stand behind the product; None: there is none.
    """

    def __init__(
        self,
        linear: Linear | None,
        next_norm: Norm | None,
        after: Norm | None = None,
        multiplier: float = 1.0,
        *,
        replaces: bool = False,
        scale: torch.Tensor | None = None,
    ) -> None:
        self._linear, self.next_norm, self.after, self.multiplier = linear, next_norm, after, multiplier
        self.replaces, self.scale = replaces, scale
        rms = isinstance(after, RMSNorm) and (next_norm is None or isinstance(next_norm, RMSNorm))
        self._one_kernel = rms and (next_norm is None or next_norm.eps == cast(RMSNorm, after).eps)
        assert scale is None or self._one_kernel, "have not met"

    @property
    def linear(self) -> Linear:
        """The product."""
        assert self._linear is not None
        return self._linear

    def product(self) -> OutProduct | None:
        """What ``forms`` needs to know of it."""
        dense, norm = None if self._linear is None else self._linear.dense, self.next_norm
        if dense is None:
            return None
        fused = isinstance(norm, RMSNorm) and norm.weight.dtype == dense.dtype
        alone = self.linear.group is None  # else the sum over ranks stands between the product and the residual
        added = alone and self.after is None and not self.replaces
        outputs, inputs = dense.shape
        return OutProduct(outputs, inputs, self.linear.bias is not None, added, fused, alone and self._one_kernel)

    def __call__(self, x: torch.Tensor, stream: Stream, form: Out) -> Stream:
        """Add the product of x [T, K]."""
        linear, residual, norm, factor = self.linear, stream.residual, self.next_norm, self.multiplier
        if form is Out.PLAIN:
            return self.add(linear.partial(x), residual, linear.group)
        if form is Out.ADD:
            linear_add(x, linear.weight, linear.bias, residual, factor)
            return Stream(residual)
        if form is Out.SKINNY:
            return self.add(cast(torch.Tensor, skinny_linear(x, linear.weight, linear.bias)), residual, linear.group)
        if form is Out.MID:
            y = cast(torch.Tensor, mid_linear(x, linear.weight, linear.bias, None, 0.0))
            return self.add(y, residual, linear.group)
        if form is Out.WIDE:
            wide_add(x, linear.weight, residual, factor)
            return Stream(residual, None if norm is None else norm.forward(residual))
        if form is Out.PARTS and self._one_kernel:
            return self.add(cast(torch.Tensor, linear_parts(x, linear.weight, linear.bias)), residual)
        norm = cast(RMSNorm, norm)
        if form is Out.MEET:
            return Stream(residual, *mid_add(x, linear.weight, linear.bias, residual, norm.weight, factor))
        parts = linear_parts(x, linear.weight, linear.bias)
        return Stream(residual, cast(torch.Tensor, add_parts_rms_norm(parts, residual, norm.weight, norm.eps, factor)))

    def add(self, y: torch.Tensor, residual: torch.Tensor, group: Group | None = None) -> Stream:
        """The plain end: y [T, C] is the product, or with ``group`` this rank's part of it; it may be overwritten."""
        after, norm, factor = self.after, self.next_norm, self.multiplier
        if group is not None:
            if after is None and isinstance(norm, RMSNorm) and not self.replaces:
                summed = group.add_norm(y, residual, norm.weight, norm.eps, factor)
                if summed is not None:
                    return Stream(residual, summed)
            y = group.all_reduce(y)
        if self._one_kernel:
            after = cast(RMSNorm, after)
            weights = after.weight, residual, None if norm is None else norm.weight
            normed = norm_add(y, *weights, after.eps, factor, self.scale)
            return Stream(residual, None if norm is None else cast(torch.Tensor, normed))
        if after is not None:
            y = after.forward(y)
        if norm is None:
            return Stream(residual.add_(y if factor == 1.0 else y * factor))
        normed = norm.add(y, residual, factor)
        return Stream(normed if self.replaces else residual, normed)
