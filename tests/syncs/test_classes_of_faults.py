"""One short test of each class of faults that the first run of ``bench/syncs_sweep.py`` showed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from headway import syncs
from headway.syncs.sim import cells, tensor
from headway.syncs.sim.lent import Lent
from headway.syncs.simulate import SimTensor, SimulationProbe

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the simulation refuses a machine with CUDA"),
    pytest.mark.filterwarnings("ignore"),
]
PROBES = (SimulationProbe(),)


@pytest.fixture(autouse=True)
def pretence() -> Any:
    """CUDA, pretended."""
    with syncs.record(probes=PROBES):
        yield


def kinds(work: Callable[[], Any]) -> list[str]:
    """The kinds of the waits in ``work``."""
    with syncs.record(probes=PROBES) as log:
        work()
    return sorted(str(finding.kind) for finding in log.findings)


def test_a_copied_parameter_has_neither_gradient_nor_attributes() -> None:
    model = nn.Linear(2, 1).cuda()
    model(torch.ones(1, 2, device="cuda")).sum().backward()
    model.weight.note = "mine"  # type: ignore[attr-defined]
    twin = copy.deepcopy(model)
    assert twin.weight.grad is None and not hasattr(twin.weight, "note")
    assert isinstance(twin.weight, nn.Parameter) and twin.weight.is_cuda and twin.weight.requires_grad


def test_the_class_of_a_parameter_makes_parameters() -> None:
    weight: Any = nn.Linear(2, 1).cuda().weight
    made: Any = type(weight)(torch.ones(2).cuda(), requires_grad=False)
    host: Any = type(weight)(torch.ones(2), requires_grad=True)
    assert isinstance(made, nn.Parameter) and made.is_cuda and not made.requires_grad
    assert isinstance(host, nn.Parameter) and not host.is_cuda and host.requires_grad


def test_super_keeps_a_programs_class_and_leaves_the_device_with_it() -> None:
    class Named(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    x: Any = torch.ones(3, device="cuda").as_subclass(Named)
    assert type(x + 1).__name__ == "Named" and (x + 1).is_cuda
    assert type(x.cpu()) is Named and x.cpu().tolist() == [1.0] * 3


def test_tracers_see_the_programs_own_tensors() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    graph: Any = make_fx(lambda t: torch.relu(t) + torch.ones(2, device="cuda"))(torch.ones(2, device="cuda"))
    names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert names == ["aten.relu.default", "aten.ones.default", "aten.add.Tensor"]
    assert graph(torch.full((2,), 3.0, device="cuda")).tolist() == [4.0, 4.0]


def test_control_flow_runs_and_reads_its_condition() -> None:
    x = torch.arange(3.0, device="cuda")
    assert kinds(lambda: torch.cond(x.sum() > 1, lambda t: t * 2, lambda t: t, (x,))) == ["read"]


def test_a_number_names_a_card() -> None:
    assert torch.device(0) == torch.device("cuda:0")
    assert torch.ones(1).to(torch.device(0)).device == torch.device("cuda:0")


def test_what_submodules_of_cuda_answer() -> None:
    torch.cuda.random.manual_seed(3)
    state = torch.cuda.random.get_rng_state()
    first = torch.rand(2, device="cuda")
    torch.cuda.random.set_rng_state(state)
    assert torch.equal(first, torch.rand(2, device="cuda"))
    assert isinstance(torch.cuda.current_stream(), torch.cuda.streams.Stream)


def test_pinned_memory_is_known_below_python() -> None:
    pinned = torch.ones(2).pin_memory()
    is_pinned: Any = torch.ops.aten.is_pinned.default
    assert is_pinned(pinned) and not is_pinned(torch.ones(2))


def test_buffers_without_a_shape_get_it_on_the_device() -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d()).cuda()
    out = model(torch.randn(4, 5, device="cuda"))
    assert out.is_cuda and all(buffer.is_cuda for buffer in model.buffers())


def test_operations_take_the_dtypes_of_cuda() -> None:
    counts = torch.histc(torch.tensor([1, 2, 2, 3], dtype=torch.int32, device="cuda"), bins=4, min=0, max=3)
    assert counts.dtype is torch.int32 and counts.tolist() == [0, 1, 2, 1]
    x = torch.ones(1, 1, 2, 2, 2, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    out = torch.nn.functional.avg_pool3d(x, 2)
    out.sum().backward()
    assert out.dtype is torch.bfloat16 and x.grad is not None and x.grad.dtype is torch.bfloat16
    one = torch.ones(2, device="cuda", requires_grad=True)
    torch.digamma(one).sum().backward()  # by polygamma, whose first argument is a number
    assert one.grad is not None and one.grad.tolist() == pytest.approx([torch.pi**2 / 6] * 2)
    assert torch.polygamma(1, one.detach().half()).dtype is torch.float16


def test_gradients_pass_through_compressed_rows() -> None:
    rows: Any = torch.sparse_csr_tensor([0, 1, 2], [1, 0], [1.0, 2.0], device="cuda")
    dense = torch.ones(2, 2, device="cuda", requires_grad=True)
    out = rows @ dense
    out.sum().backward()
    assert out.is_cuda and dense.grad is not None and dense.grad.tolist() == [[2.0, 2.0], [1.0, 1.0]]
    assert kinds(lambda: rows.to("cpu")) == ["read"] and not rows.cpu().is_cuda
    assert kinds(lambda: torch.sparse_csr_tensor([0, 1], [0], [1.0], device="cuda")) == ["upload"]


def test_nested_tensors_of_both_layouts() -> None:
    parts = [torch.ones(2, 3, device="cuda"), torch.ones(1, 3, device="cuda")]
    strided = torch.nested.nested_tensor(parts, requires_grad=True)
    assert isinstance(strided, SimTensor) and strided.is_nested and strided.is_cuda
    (strided * 2).to_padded_tensor(0.0).sum().backward()
    assert strided.grad is not None and [part.shape[0] for part in strided.grad.unbind()] == [2, 1]
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    (jagged * 2).to_padded_tensor(0.0).sum().backward()
    assert jagged.grad is not None and [part.tolist() for part in jagged.grad.unbind()] == [
        [[2.0] * 3] * 2,
        [[2.0] * 3],
    ]


def test_the_encoders_fast_path_is_taken() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1).eval()
    x, pad = torch.randn(2, 3, 8), torch.tensor([[False, False, True], [False] * 3])
    with torch.inference_mode():
        expected = model(x, src_key_padding_mask=pad)
        made = model.cuda()(x.cuda(), src_key_padding_mask=pad.cuda())
    torch.testing.assert_close(made.cpu(), expected)
    assert made[0, 2].abs().sum().item() == 0


def test_an_error_inside_a_backward_pass_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise ValueError("on purpose")

    monkeypatch.setitem(cells.CELLS, "special_i1", refuse)
    tensor._runner.cache_clear()
    x = torch.ones(2, device="cuda", requires_grad=True)
    made = torch.special.i0(x).sum()
    for _ in range(2):
        with pytest.raises(ValueError, match="on purpose"):
            made.backward(retain_graph=True)
    monkeypatch.undo()
    tensor._runner.cache_clear()
    made.backward()
    assert x.grad is not None


def test_a_programs_operations_are_watched_inside() -> None:
    library = torch.library.Library("syncs_faults", "FRAGMENT")
    library.define("either(Tensor x) -> Tensor")
    library.impl("either", lambda x: x * x.sum().item(), "CUDA")
    library.impl("either", lambda x: x + 1, "CPU")

    @torch.library.custom_op("syncs_faults::scaled", mutates_args=())
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * x.max().item()

    x = torch.full((2,), 2.0, device="cuda", requires_grad=True)
    with syncs.record(probes=PROBES) as log:
        made, other = scaled(x), torch.ops.syncs_faults.either(x.detach())
    assert made.tolist() == [4.0, 4.0] and other.tolist() == [8.0, 8.0]
    assert {finding.call for finding in log.findings} == {"Tensor.item"}
    lines = sorted((finding.site.function.rpartition(".")[2], finding.site.line) for finding in log.findings)
    first = test_a_programs_operations_are_watched_inside.__code__.co_firstlineno
    assert lines == [("<lambda>", first + 3), ("scaled", first + 8)]
    assert torch.ops.syncs_faults.either(torch.ones(1)).tolist() == [2.0]


def test_a_traced_function_keeps_its_constants_and_its_arguments_apart() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x) * x.sum()

    x = torch.tensor([0.5, -1.0, 2.0], device="cuda")
    _, linear = torch.func.linearize(f, x)
    for tangent in (torch.ones_like(x), x):
        torch.testing.assert_close(linear(tangent), torch.func.jvp(f, (x,), (tangent,))[1])


@pytest.mark.parametrize(("dtype", "kernel"), [(torch.float32, True), (torch.bfloat16, True), (torch.float64, False)])
def test_attention_over_jagged_rows(dtype: torch.dtype, kernel: bool) -> None:
    """The longest and the shortest row are read once a batch; where a card has no kernel, every length, and each time."""
    values = torch.randn(7, 2, 8, dtype=dtype, device="cuda", requires_grad=True)
    q: Any = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 2, 5, 7], device="cuda")).transpose(1, 2)

    def attend(causal: bool) -> torch.Tensor:
        out = nn.functional.scaled_dot_product_attention(q, q * 0.5, q * 2, is_causal=causal)
        return out.transpose(1, 2).values()

    def row_by_row(causal: bool) -> torch.Tensor:
        rows = [values[a:b].transpose(0, 1) for a, b in ((0, 2), (2, 5), (5, 7))]
        made = [nn.functional.scaled_dot_product_attention(x, x * 0.5, x * 2, is_causal=causal) for x in rows]
        return torch.cat([part.transpose(0, 1) for part in made])

    assert kinds(lambda: attend(False)) == ["read"]
    assert kinds(lambda: attend(False)) == ([] if kernel else ["read"])
    told = torch.nested.nested_tensor_from_jagged(values, q.offsets(), min_seqlen=2, max_seqlen=3).transpose(1, 2)
    known = kinds(lambda: nn.functional.scaled_dot_product_attention(told, told, told))
    assert known == ([] if kernel else ["read"])
    torch.testing.assert_close(attend(False), row_by_row(False))
    grads = torch.autograd.grad(attend(False).square().sum(), values)[0]
    torch.testing.assert_close(grads, torch.autograd.grad(row_by_row(False).square().sum(), values)[0])
    if kernel:
        torch.testing.assert_close(attend(True), row_by_row(True))
    else:
        with pytest.raises(RuntimeError, match="No viable backend"):
            attend(True)


def test_gradients_that_a_collective_summed_are_the_devices() -> None:
    dist: Any = torch.distributed
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        layer = nn.Linear(3, 2, device="cuda")
        replica: Any = nn.parallel.DistributedDataParallel(layer)
        loss = replica(torch.ones(2, 3, device="cuda")).sum()
        assert kinds(loss.backward) == []
        assert layer.weight.grad is not None and layer.weight.grad.is_cuda
        assert kinds(lambda: layer.weight.data.copy_(torch.zeros(2, 3))) == ["upload"]
    finally:
        dist.destroy_process_group()


def test_lent_values_are_known_while_they_live() -> None:
    lent, values, host = Lent(), torch.ones(3), torch.ones(3)
    assert values not in lent
    lent.note([values])
    assert values in lent and values[1:] in lent and host not in lent
    place = values.untyped_storage().data_ptr()
    del values
    lent.note([host])
    assert list(lent._storages) == [host.untyped_storage().data_ptr()] != [place]


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"dropout_p": 0.3}, {"enable_gqa": True}])
def test_attention_lies_as_a_kernel_leaves_it(options: dict[str, Any]) -> None:
    def attended(device: str) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(0)
        heads = 2 if options.get("enable_gqa") else 4
        query, key, value = (torch.randn(2, 5, n, 8).transpose(1, 2).to(device) for n in (4, heads, heads))
        query.requires_grad_()
        made = nn.functional.scaled_dot_product_attention(query, key, value, **options)
        drawn = nn.functional.dropout(made, 0.5)
        drawn.sum().backward()
        assert query.grad is not None
        return drawn.detach().cpu(), query.grad.cpu(), torch.tensor(made.stride())

    for there, here in zip(attended("cuda"), attended("cpu"), strict=True):
        torch.testing.assert_close(there, here)


def test_attention_with_a_mask_that_learns_takes_the_formula() -> None:
    def attended(device: str) -> tuple[int, ...]:
        query = torch.ones(1, 3, 2, 4).transpose(1, 2).to(device)
        mask = torch.zeros(3, 3, device=device, requires_grad=True)
        made = nn.functional.scaled_dot_product_attention(query, query, query, attn_mask=mask)
        made.sum().backward()
        assert mask.grad is not None and mask.grad.shape == (3, 3)
        return made.stride()

    assert attended("cuda") == attended("cpu")
