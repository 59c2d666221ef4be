"""torch.autocast on the pretended device: which operations are cast to what."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from headway import syncs
from headway.syncs.sim import autocast
from headway.syncs.simulate import SimulationProbe

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the simulation refuses a machine with CUDA")


@pytest.fixture(autouse=True)
def pretence() -> Any:
    """CUDA, pretended."""
    with syncs.record(probes=(SimulationProbe(),)), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def rand(*sizes: int) -> torch.Tensor:
    return torch.rand(*sizes, device="cuda")


def test_autocast_casts_as_on_a_card() -> None:
    model, x = torch.nn.Linear(4, 2).cuda(), rand(3, 4)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = model(x)
        loss = F.cross_entropy(out, torch.zeros(3, dtype=torch.long, device="cuda"))
        assert (out.dtype, loss.dtype, (x @ x.T).dtype) == (torch.bfloat16, torch.float32, torch.bfloat16)
    loss.backward()
    assert model.weight.grad is not None and model.weight.grad.dtype == torch.float32
    assert model(x).dtype == torch.float32


LOWERED = {
    "matmul": lambda x: x @ x,
    "mv": lambda x: torch.mv(x, x[0]),
    "addmm": lambda x: torch.addmm(x, x, x),
    "bmm": lambda x: torch.bmm(x[None], x[None]),
    "linear": lambda x: F.linear(x, x),
    "prelu": lambda x: F.prelu(x, x[0]),
    "conv1d": lambda x: F.conv1d(x[None], x[:, :, None]),
    "scaled_dot_product_attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
}
RAISED = {
    **{name: getattr(torch, name) for name in ("acos", "exp", "expm1", "log", "log1p", "reciprocal", "rsqrt", "tan")},
    "pow": lambda x: x**2.5,
    "softplus": F.softplus,
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "group_norm": lambda x: F.group_norm(x, 2),
    "mse_loss": lambda x: F.mse_loss(x, x),
    "nll_loss": lambda x: F.nll_loss(x, torch.zeros(4, dtype=torch.long, device="cuda")),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x),
    "logsumexp": lambda x: x.logsumexp(0),
    "rms_norm": lambda x: F.rms_norm(x, (4,)),
    "interpolate": lambda x: F.interpolate(x[None], scale_factor=2.0),
    "norm": lambda x: x.norm(),
    "matrix norm": torch.linalg.matrix_norm,
    "softmax": lambda x: x.softmax(0),
    "log_softmax": lambda x: x.log_softmax(0),
    "cumsum": lambda x: x.cumsum(0),
    "cumprod": lambda x: x.cumprod(0),
    "sum": lambda x: x.sum(),
    "sum of a dimension": lambda x: x.sum(0),
    "prod": lambda x: x.prod(),
    "prod of a dimension": lambda x: x.prod(0),
}
KEPT = {
    "add": lambda x: x + x,
    "relu": torch.relu,
    "mean": torch.mean,
    "sum of a dtype": lambda x: x.sum(dtype=x.dtype),
    "softmax of a dtype": lambda x: x.softmax(0, x.dtype),
}
"""Of torch's "Autocast Op Reference" for CUDA, some of each list."""


AUTOCAST = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
WITHOUT_KERNEL = {"_convolution.deprecated", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "einsum"}
WITHOUT_KERNEL |= {"_scaled_dot_product_flash_attention"}
"""Of fused kernels, and what is made of operations on the list."""


@pytest.mark.skipif(not AUTOCAST.exists(), reason="torch came without its headers")
@pytest.mark.parametrize(
    ("torchs", "ours"),
    [
        ("LOWER_PRECISION_FP", autocast.LOWER),
        ("FP32", autocast.FLOAT32),
        ("FP32_SET_OPT_DTYPE", autocast.WITH_DTYPE),
        ("PROMOTE", autocast.WIDEST),
    ],
)
def test_lists_of_autocast_are_torchs(torchs: str, ours: str) -> None:
    text = AUTOCAST.read_text(encoding="utf-8")
    listed = text.partition(f"#define AT_FORALL_{torchs}(_)")[2].partition("#define")[0].partition("\n\n")[0]
    names = {name.replace(", ", ".") for name in re.findall(r"_\(([^)]+)\)", listed)}
    assert len(names) > 5 and not names - {*ours.split()} - WITHOUT_KERNEL


def test_autocast_takes_the_widest_of_mixed_inputs() -> None:
    """On a card they may be mixed there, and nowhere else."""
    wide, narrow = rand(4), rand(4).bfloat16()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert torch.dot(wide, narrow).dtype == torch.addcmul(narrow, wide, narrow).dtype == torch.float32
        assert torch.dot(narrow, narrow).dtype == torch.bfloat16


@pytest.mark.parametrize(("works", "becomes"), [(LOWERED, torch.bfloat16), (RAISED, torch.float32), (KEPT, None)])
def test_autocast_casts_each_operation_as_its_list_says(works: Any, becomes: torch.dtype | None) -> None:
    for given in (torch.bfloat16, torch.float32):
        x = rand(4, 4).to(given)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            found = {name: work(x).dtype for name, work in works.items()}
        assert found == dict.fromkeys(works, becomes or given)
    whole = torch.ones(4, 4, dtype=torch.long, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert whole.sum().dtype == whole.cumsum(0).dtype == torch.long, "integers are left alone"
