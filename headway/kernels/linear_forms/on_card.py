"""Times single products on a card, as the engine runs them: in a graph, started early, weights together larger than the L2."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from headway.core.ints import cdiv
from headway.kernels.compiler_process import CompilerProcess
from headway.kernels.linear_forms.alone import Work
from headway.kernels.linear_forms.chain import EPS, Around, Form, Stream, Timer, project_in, project_out
from headway.kernels.linear_forms.check import check, stream_of
from headway.kernels.linear_forms.shapes import OUT, Product
from headway.kernels.rms_norm import rms_norm
from headway.kernels.triton_precompile import compiling, hash_compiler, launches_noted

WEIGHTS_BYTES, LEAST_CALLS = 150 << 20, 20
"""What copies of a weight take at least, and the calls in a graph."""


class OnCard:
    """Products of random bfloat16 weights; those of the product that was asked for last are kept.

    Args:
        compiler: a process that compiles kernels; it is the caller's to close.
    """

    def __init__(self, device: torch.device, compiler: CompilerProcess | None) -> None:
        self._device, self._compiler = device, compiler
        self._timer = Timer(device)
        self._held: tuple[Product, list[torch.Tensor]] | None = None

    def compile(self, work: Sequence[Work]) -> int:
        """See ``Bench``; what cannot be launched is found again, and reported, where it is timed."""
        hash_compiler()
        weights: dict[tuple[int, int], torch.Tensor] = {}
        with compiling(self._compiler) as compilation:
            with launches_noted(compilation.add):
                for product, rows, form in work:
                    if product.size not in weights:
                        weights = {product.size: torch.empty(product.size, dtype=torch.bfloat16, device=self._device)}
                    try:
                        self._caller(product, form, *self._inputs(product, rows))(weights[product.size])
                    except Exception:
                        continue
            compilation.finish(on_failed=lambda error: None)
        return compilation.num_kernels

    def us(self, product: Product, rows: int, form: Form) -> float:
        """See ``Bench``."""
        weights, (around, x) = self._weights(product), self._inputs(product, rows)
        if form[1] is not None:
            check(product, form, around, weights[0], self._bias(product))
        call = self._caller(product, form, around, x)

        def all_of_them() -> None:
            for weight in weights:
                call(weight)

        rounds = cdiv(LEAST_CALLS, len(weights))
        return self._timer.spent(all_of_them, rounds) / len(weights)

    def _caller(
        self, product: Product, form: Form, around: Around, x: torch.Tensor
    ) -> Callable[[torch.Tensor], object]:
        """The product by ``form``, a function of its weight."""
        bias = self._bias(product)
        if product.junction in OUT:
            return lambda weight: project_out(form, x, around, weight, bias, product.place)
        stream = stream_of(product, form[0], x)

        def into(weight: torch.Tensor) -> torch.Tensor:
            given = stream
            if product.place == "normed" and form[1] is not None:
                given = Stream(rms_norm(around.residual, around.norm, EPS))
            return project_in(form, given, around, weight, bias, product.gate)

        return into

    def _inputs(self, product: Product, rows: int) -> tuple[Around, torch.Tensor]:
        hidden = product.outputs if product.junction in OUT else product.inputs
        return Around(self._random(rows, hidden), self._random(hidden)), self._random(rows, product.inputs)

    def _bias(self, product: Product) -> torch.Tensor | None:
        return self._random(product.outputs) if product.bias else None

    def _weights(self, product: Product) -> list[torch.Tensor]:
        if self._held is None or self._held[0] != product:
            self._held = None  # before others are made
            count = max(2, cdiv(WEIGHTS_BYTES, 2 * product.outputs * product.inputs))
            made = [self._random(*product.size) * product.inputs**-0.5 for _ in range(count)]
            self._held = product, made
        return self._held[1]

    def _random(self, *sizes: int) -> torch.Tensor:
        return torch.randn(sizes, dtype=torch.bfloat16, device=self._device)
