"""Whether a form of a product gives what float32 products give, twice the same."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from headway.kernels.linear_forms.chain import EPS, Around, Form, Stream, project_in, project_out
from headway.kernels.linear_forms.shapes import OUT, Product

ROUNDINGS = 0.02
"""Error allowed, as a part of the largest value."""
GELU = {"gelu": "none", "gelu_tanh": "tanh"}


def check(product: Product, form: Form, around: Around, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Raise if ``form`` is wrong for random rows; ``around`` gets another residual.

    Raises:
        ValueError: results differ by more than roundings, or from run to run.
        Exception: whatever a kernel that does not run raises.
    """
    generator = torch.Generator(weight.device).manual_seed(len(around.residual))
    residual, x = (torch.randn(each, dtype=torch.bfloat16, device=weight.device, generator=generator)
                   for each in (around.residual.shape, (around.rows, weight.shape[1])))  # fmt: skip
    trial = _Trial(product, form, around, residual, x, weight, bias)
    for one, other, expected in zip(trial.run(), trial.run(), trial.expected(), strict=True):
        compare(one, expected)
        if not torch.equal(one, other):  # host: a check of a measurement
            raise ValueError("two runs differ")


def compare(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Raise ValueError if ``found`` is not ``expected`` but for roundings."""
    error, largest = (found.float() - expected.float()).abs().max(), expected.float().abs().max()
    if not bool(error <= ROUNDINGS * largest):  # host: a check of a measurement
        raise ValueError(f"error {float(error):.3g} at values up to {float(largest):.3g}")


def stream_of(product: Product, op: str, x: torch.Tensor) -> Stream:
    """What a product that follows a norm is given: x [rows, K], squares if it takes them, nothing if it norms the residual."""
    if op in ("norm_linear", "norm_gate_up") or product.place == "entering":
        return Stream()
    squares = x.float().square().sum(1)[None].contiguous()
    return Stream(x, squares if op in ("mid_linear", "mid_gate_up") and product.junction != "head" else None)


class _Trial(NamedTuple):
    """A form of a product of x [rows, K], and the residual that it begins with."""

    product: Product
    form: Form
    around: Around
    residual: torch.Tensor
    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None

    def run(self) -> list[torch.Tensor]:
        """What the form gives."""
        product, form, around, weight, bias = self.product, self.form, self.around, self.weight, self.bias
        around.residual = self.residual.clone()
        if product.junction not in OUT:
            return [project_in(form, stream_of(product, form[0], self.x), around, weight, bias, product.gate)]
        stream = project_out(form, self.x, around, weight, bias, product.place)
        if not product.place:
            assert stream.x is not None
            return [stream.x]
        if stream.squares is None or stream.x is None:
            return [around.residual]
        return [around.residual, stream.x, stream.squares.sum(0)]

    def expected(self) -> list[torch.Tensor]:
        """The same in float32."""
        product, bias = self.product, None if self.bias is None else self.bias.float()
        residual, x, norm = self.residual.float(), self.x.float(), self.around.norm.float()
        if product.junction not in OUT:
            stream = stream_of(product, self.form[0], self.x)
            if stream.x is None:
                x = F.rms_norm(residual, residual.shape[1:], norm, EPS)
            elif stream.squares is not None:
                x = x * torch.rsqrt(x.square().mean(1, keepdim=True) + EPS)
        y = F.linear(x, self.weight.float(), bias)
        if product.gate:
            gate, up = y.chunk(2, dim=1)
            return [up * (F.silu(gate) if product.gate == "silu" else F.gelu(gate, approximate=GELU[product.gate]))]
        if product.place not in ("added", "behind"):
            return [y]
        total = residual + (F.rms_norm(y, y.shape[1:], norm, EPS) if product.place == "behind" else y)
        return [total, total * norm, total.square().sum(1)] if self.form[0] == "mid_add" else [total]
