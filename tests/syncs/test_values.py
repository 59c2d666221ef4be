"""Whatever runs on the CPU runs under the simulation, with the same values: torch's operator database, forward and backward."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from headway import syncs
from headway.syncs.simulate import SimulationProbe

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the simulation refuses a machine with CUDA"),
]
PROBES = (SimulationProbe(),)
RANDOM = (
    "rand",
    "normal",
    "bernoulli",
    "multinomial",
    "dropout",
    "empty",
    "exponential",
    "geometric",
    "cauchy",
    "uniform",
    "rrelu",
)
"""Parts of the names of operations whose values are not comparable."""
AS_ON_A_CARD = {
    "as_strided_partial_views": "what goes up is a dense copy of the view, of other strides",
    "tensor_split": "torch wants its indices on the host",
}
"""Operations that do not give the CPU's values on a card either."""
SAMPLES = 3


def up(value: Any) -> Any:
    """The same arguments on the pretended device."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        made = tensor.detach().to("cuda")
        return made.requires_grad_(tensor.requires_grad)

    moved = tree_map_only(torch.Tensor, move, value)
    return tree_map_only(torch.device, lambda device: torch.device("cuda"), moved)


def results(operation: Any, value: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Outputs and gradients, on the host."""
    made = operation(value, *args, **kwargs)
    outputs = [out for out in tree_leaves(made) if isinstance(out, torch.Tensor)]
    inputs = [
        part for part in tree_leaves((value, args, kwargs)) if isinstance(part, torch.Tensor) and part.requires_grad
    ]
    wanted = [out for out in outputs if out.requires_grad and out.layout is torch.strided]
    grads: list[torch.Tensor] = []
    if wanted and inputs:
        total = sum((out.abs() if out.is_complex() else out).sum() for out in wanted)
        found = torch.autograd.grad(total, inputs, allow_unused=True)  # type: ignore[arg-type]
        grads = [each for each in found if each is not None]
    return [each.detach().cpu() for each in [*outputs, *grads]]


def differences(info: Any) -> list[str]:
    """What goes wrong with an operation under the simulation, and not on the CPU."""
    found: list[str] = []
    samples = info.sample_inputs("cpu", torch.float32, requires_grad=info.supports_autograd)
    for sample in itertools.islice(samples, SAMPLES):
        torch.manual_seed(0)
        try:
            expected = results(info.op, sample.input, sample.args, sample.kwargs)
        except Exception:  # not for the CPU either
            continue
        try:
            with syncs.record(probes=PROBES):
                torch.manual_seed(0)
                seen = results(info.op, *map(up, (sample.input, sample.args, sample.kwargs)))
            if not any(part in info.name for part in RANDOM):
                torch.testing.assert_close(seen, expected, rtol=1e-3, atol=1e-4, equal_nan=True)
        except Exception as error:
            found.append(" ".join(f"{type(error).__name__}: {error}".split())[:250])
    return found


@pytest.mark.timeout(1800)
def test_operations_run_with_the_values_of_the_cpu() -> None:
    pytest.importorskip("expecttest", reason="torch's operator database imports it")
    from torch.testing._internal.common_methods_invocations import op_db

    failed: dict[str, str] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for info in op_db:
            if info.formatted_name in AS_ON_A_CARD or torch.float32 not in info.dtypes:
                continue
            if wrong := differences(info):
                failed[info.formatted_name] = wrong[0]
    assert not failed, "\n".join(f"{name}: {text}" for name, text in failed.items())
