"""Layers by themselves: fused parts, and the packed form that CPUs get."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from headway.kernels.cpu import ops
from headway.models.layers.embedding import Embedding
from headway.models.layers.linear import Linear
from tests.models.tiny import TINY, hf_model, ours

CPU = torch.device("cpu")
native = pytest.mark.skipif(not ops.available(), reason="no native CPU kernels on this machine")
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def filled(layer: Linear | Embedding) -> None:
    for seed, parameter in enumerate(layer.parameters()):
        parameter.data.normal_(generator=torch.Generator().manual_seed(seed))


def test_parts_fill_their_rows_of_weight_and_bias() -> None:
    layer = Linear(6, {"a": 2, "b": 5}, bias=True, dtype=torch.float32, device=CPU)
    parts = layer.destinations("x.")
    assert list(parts) == ["x.a.weight", "x.a.bias", "x.b.weight", "x.b.bias"]
    for i, part in enumerate(parts.values()):
        part.tensor.fill_(i + 1)
    assert layer.weight.tolist() == [[1.0] * 6] * 2 + [[3.0] * 6] * 5
    assert layer.bias is not None
    assert layer.bias.tolist() == [2.0] * 2 + [4.0] * 5
    x = torch.ones(3, 6)
    assert layer.forward(x).tolist() == [[8.0] * 2 + [22.0] * 5] * 3


def test_tied_weight_is_loaded_by_its_owner() -> None:
    table = Embedding(7, 4, dtype=torch.float32, device=CPU)
    head = Linear(4, {"lm_head": 7}, bias=False, dtype=torch.float32, device=CPU, tied=table.weight)
    assert head.destinations("") == {}
    assert head.weight is table.weight


@native
@dtypes
@pytest.mark.parametrize("bias", [False, True])
def test_finalize_replaces_the_weight_and_keeps_the_meaning(dtype: torch.dtype, bias: bool) -> None:
    layer = Linear(40, {"a": 33, "b": 36}, bias=bias, dtype=dtype, device=CPU)
    filled(layer)
    x = torch.randn(3, 40, generator=torch.Generator().manual_seed(9)).to(dtype)
    wanted = F.linear(x.float(), layer.weight.float(), None if layer.bias is None else layer.bias.float())
    layer.finalize()
    assert not hasattr(layer, "weight"), "held twice"
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(layer.forward(x).float(), wanted, atol=tolerance, rtol=tolerance)


@native
@dtypes
def test_embedding_reads_the_tied_layers_panels(dtype: torch.dtype) -> None:
    table = Embedding(131, 24, dtype=dtype, device=CPU)
    head = Linear(24, {"lm_head": 131}, bias=False, dtype=dtype, device=CPU, tied=table.weight)
    filled(table)
    weight = table.weight.clone()
    head.finalize()
    table.share(head.packed)
    assert not hasattr(table, "weight"), "held twice"
    ids = torch.tensor([0, 130, 31, 32, 64, 64, 1], dtype=torch.int32)
    rows = table.forward(ids)
    assert torch.equal(rows, weight[ids.long()])
    rows.zero_()  # a fresh tensor: the model adds to it in place
    assert torch.equal(table.forward(ids[:2]), weight[[0, 130]])


@native
@pytest.mark.skipif(torch.cuda.is_available(), reason="models of this session are on the GPU")
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_a_packed_model_holds_its_matrices_once(name: str) -> None:
    """What is left in parameters are norms, biases and an untied table; a tied one is panels, like the rest."""
    model = ours(hf_model(TINY[name]))
    matrices = [key for key, parameter in model.named_parameters() if parameter.dim() > 1]
    assert matrices == (["embedding.weight"] if name == "llama" else [])
    panels = {buffer.data_ptr() for key, buffer in model.named_buffers() if key.endswith("panels")}
    assert len(panels) == 4 * model.spec.num_layers + 1
    tied = model.embedding.panels
    assert (tied is not None) == (name == "qwen2")
    assert tied is None or tied.data_ptr() in panels
