"""The pretended device: values as on the CPU, waits as on a card, and what programs ask of torch.cuda."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from headway import syncs
from headway.syncs.simulate import SimTensor, SimulationProbe

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the simulation refuses a machine with CUDA")
PROBES = (SimulationProbe(),)


@pytest.fixture(autouse=True)
def pretence() -> Any:
    """CUDA, pretended."""
    with syncs.record(probes=PROBES), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of masks of bytes, of missing cuDNN
        yield


def kinds(work: Callable[[], Any]) -> list[str]:
    """The kinds of the waits in ``work``."""
    with syncs.record(probes=PROBES) as log:
        work()
    return sorted(str(finding.kind) for finding in log.findings)


def rand(*sizes: int) -> torch.Tensor:
    return torch.rand(*sizes, device="cuda")


# Values


def step(device: str) -> list[torch.Tensor]:
    """A small training step with everything on ``device``."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv1d(3, 4, 3), torch.nn.BatchNorm1d(4), torch.nn.GELU(), torch.nn.Flatten(), torch.nn.Linear(24, 5)
    )
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x, target = torch.randn(2, 3, 8).to(device), torch.tensor([1, 4]).to(device)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(x), target).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return [value.detach().cpu() for value in model.state_dict().values()]


def test_training_gives_the_values_of_the_cpu() -> None:
    for here, there in zip(step("cpu"), step("cuda"), strict=True):
        torch.testing.assert_close(here, there)


@pytest.mark.parametrize("cell", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
def test_recurrent_cells_and_their_gradients(cell: Any) -> None:
    torch.manual_seed(0)
    net, x = cell(3, 4), torch.rand(5, 2, 3)
    grads = []
    for device in ("cpu", "cuda"):
        net.zero_grad()
        net.to(device)
        out, state = net(x.to(device))
        last = state[0] if isinstance(state, tuple) else state
        (out.sum() + (last * last).sum()).backward()
        grads.append([out.detach().cpu(), *(p.grad.cpu() for p in net.parameters())])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_a_programs_meta_tensors_stay_meta() -> None:
    with torch.device("meta"):
        model = torch.nn.Linear(3, 2)
    assert model.weight.is_meta and type(model.weight) is torch.nn.Parameter
    model = model.to_empty(device="cuda")
    model.load_state_dict({"weight": torch.ones(2, 3), "bias": torch.zeros(2)})
    assert model(torch.ones(1, 3, device="cuda")).tolist() == [[3.0, 3.0]]
    assert torch.zeros(3, device="cuda").to("meta").is_meta


def test_inference_mode_hides_nothing() -> None:
    x = rand(3, 4)
    model = torch.nn.Linear(4, 2).cuda()
    with torch.inference_mode():
        assert kinds(lambda: model(x).reshape(2, 3).to("cpu")) == ["read"]
        assert kinds(lambda: x[x > 2]) == ["size"]
        assert kinds(lambda: model(x).max().item()) == ["read"]
        view = x.view(-1)
        assert torch.equal(view.cpu(), x.cpu().view(-1))
    view.mul_(2)  # a view of a tensor from outside is no inference tensor


def test_modules_move_and_stay_the_same_objects() -> None:
    model = torch.nn.Linear(3, 2)
    weight = model.weight
    model(torch.ones(1, 3)).sum().backward()
    model.to("cuda")
    assert model.weight is weight and weight.is_cuda and weight.grad is not None and weight.grad.is_cuda
    model.cpu()
    assert model.weight is weight and not weight.is_cuda and isinstance(weight, torch.nn.Parameter)
    assert model(torch.ones(1, 3)).shape == (1, 2)


def test_data_changes_hands() -> None:
    x, y = rand(3), torch.ones(3, device="cuda")
    x.data = y
    y.add_(1)
    assert x.tolist() == [2.0, 2.0, 2.0]


def test_a_graph_replays_into_the_same_tensors() -> None:
    graph, x = torch.cuda.CUDAGraph(), torch.ones(3, device="cuda")
    with torch.cuda.graph(graph):
        assert torch.cuda.is_current_stream_capturing()
        out = (x * 2).view(3, 1).expand(3, 2).contiguous() + 1
    x.fill_(5)
    assert kinds(graph.replay) == []
    assert out.tolist() == [[11.0, 11.0]] * 3
    assert isinstance(graph, torch.cuda.CUDAGraph) and not torch.cuda.is_current_stream_capturing()


def test_saved_tensors_come_back_where_they_were() -> None:
    file, load = io.BytesIO(), torch.load  # as programs do: weights_only, of a file of their own
    state: dict[str, Any] = {"x": rand(2), "n": 3}
    assert kinds(lambda: torch.save(state, file)) == ["read"]
    for where, cuda in ((None, True), ("cpu", False), ("cuda", True), (lambda storage, at: storage, False)):
        file.seek(0)
        back = load(file, map_location=where, weights_only=True)
        assert back["x"].is_cuda is cuda and back["n"] == 3
        assert torch.equal(back["x"].cpu(), state["x"].cpu())
    rebuild, parts = state["x"].__reduce_ex__(2)
    assert torch.equal(rebuild(*parts), state["x"])


def test_copies_of_modules_are_their_own() -> None:
    model = torch.nn.Linear(2, 2).cuda()
    twin = copy.deepcopy(model)
    assert kinds(lambda: copy.deepcopy(model)) == []
    with torch.no_grad():
        twin.weight.zero_()
    assert isinstance(twin.weight, torch.nn.Parameter) and model.weight.abs().sum() > 0
    assert model.weight.data_ptr() == model.weight.view(-1).data_ptr() != twin.weight.data_ptr()


def test_in_place_views_and_old_type_names() -> None:
    x = rand(2, 3)
    assert x.unsqueeze_(0) is x and x.shape == (1, 2, 3)
    assert x.squeeze_(0).t_().shape == (3, 2) == x.cpu().shape
    old: Any = torch.cuda
    assert x.type() == "torch.cuda.FloatTensor" and isinstance(x, old.FloatTensor)
    assert old.LongTensor([1, 2]).dtype == torch.int64 and x.type(old.HalfTensor).dtype == torch.half
    assert x.to(0).is_cuda and torch.ones(2).to(0).is_cuda and torch.ones(2).cuda(0).device == torch.device("cuda:0")


# What programs ask of the device


def test_the_device_answers() -> None:
    generator = torch.Generator("cuda").manual_seed(3)
    assert isinstance(generator, torch.Generator) and generator.device.type == "cuda"
    assert isinstance(torch.Generator(), torch.Generator) and torch.Generator().device.type == "cpu"
    for absent in ("meta", "mps"):
        with pytest.raises(RuntimeError):
            torch.Generator(absent)
    again = torch.Generator(device="cuda").manual_seed(3)
    assert torch.equal(torch.rand(3, generator=generator, device="cuda"), torch.rand(3, generator=again, device="cuda"))
    assert torch.accelerator.current_accelerator() == torch.device("cuda") and torch.accelerator.is_available()
    assert torch.cuda.get_device_properties(0).multi_processor_count > 0 and torch.cuda.memory_stats()["any"] == 0
    with torch.cuda.device(0), torch.cuda.nvtx.range("x"), torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.nvtx.range_push("y")
        torch.cuda.nvtx.range_pop()
    scaler = torch.amp.GradScaler("cuda")
    assert scaler.is_enabled()
    state = torch.cuda.get_rng_state()
    first = rand(2)
    torch.cuda.set_rng_state(state)
    assert torch.equal(first, rand(2))


def test_pinned_memory_is_known_by_its_storage() -> None:
    pinned = torch.zeros(8, 4).pin_memory()
    assert pinned.is_pinned() and pinned[2:5].is_pinned() and not torch.zeros(8, 4).is_pinned()
    assert torch.empty(4, pin_memory=True).is_pinned()
    pinned = pinned[2:5]
    assert kinds(lambda: pinned.to("cuda", non_blocking=True)) == []
    pinned = torch.zeros(0)
    assert not any(torch.zeros(8, 4).is_pinned() for _ in range(20)), "memory given back is pinned no more"
    data = torch.utils.data.TensorDataset(torch.arange(6.0).view(3, 2))
    loader = torch.utils.data.DataLoader(data, batch_size=2, pin_memory=True)
    (batch,) = next(iter(loader))
    assert batch.is_pinned() and kinds(lambda: batch.to("cuda", non_blocking=True)) == []


def test_checkpointed_gradients() -> None:
    from torch.utils.checkpoint import checkpoint

    model, x = torch.nn.Linear(3, 3).cuda(), rand(2, 3)
    assert kinds(lambda: checkpoint(model, x, use_reentrant=False).sum().backward()) == []


def test_tensors_of_two_devices_do_not_meet() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        rand(3) + torch.ones(3)
    with pytest.raises(TypeError, match="numpy"):
        rand(3).numpy()


# Waits: the holes and false alarms of the first version


@pytest.mark.parametrize(
    ("name", "work", "expected"),
    [
        ("histc", lambda x: torch.histc(x, 4), "read"),
        ("histc range", lambda x: torch.histc(x, 4, 0.0, 1.0), None),
        ("inv", lambda x: torch.linalg.inv(x @ x.T + torch.eye(4, device="cuda")), "read"),
        ("inv_ex", lambda x: torch.linalg.inv_ex(x), None),
        ("to_sparse", lambda x: x.to_sparse(), "size"),
        ("fill device scalar", lambda x: x.masked_fill_(x > 0, x.max()), "read"),
        ("fill number", lambda x: x.masked_fill(x > 0, 1.0), None),
        ("normal", lambda x: torch.normal(x, x), "read"),
        ("normal number", lambda x: torch.normal(0.0, 1.0, (2,), device="cuda"), None),
        ("index number", lambda x: x.__setitem__(torch.arange(2, device="cuda"), 1.0), "upload"),
        ("element number", lambda x: x[0].__setitem__(3, 1.0), "upload"),
        ("row number", lambda x: x.__setitem__(3, 1.0), None),
        ("mask number", lambda x: x.__setitem__(x > 0, 0.0), None),
        ("mask tensor", lambda x: x.__setitem__(x > 0, x.max()), "size"),
        ("nothing", lambda x: torch.tensor([], device="cuda"), None),
        ("empty_cache", lambda x: torch.cuda.empty_cache(), "memory"),
        ("isin few", lambda x: torch.isin(x, x[0, :2]), None),
        ("isin many", lambda x: torch.isin(x[0, :2], x.repeat(9, 1)), "size"),
        ("equal", lambda x: torch.equal(x, x + 1), "read"),
        ("equal other sizes", lambda x: torch.equal(x, x[:2]), None),
        ("one_hot", lambda x: F.one_hot(x.long()), "read"),
        ("one_hot sized", lambda x: F.one_hot(x.long(), 4), None),
        ("accelerator", lambda x: torch.accelerator.synchronize(), "device"),
        ("print", lambda x: str(x), "read"),
        ("print nothing", lambda x: str(x[:0]), None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_waits(name: str, work: Callable[[torch.Tensor], Any], expected: str | None) -> None:
    x = rand(4, 4)
    assert kinds(lambda: work(x)) == ([expected] if expected else [])


def test_gradients_that_look_for_zeros() -> None:
    for function, kind in ((torch.prod, "size"), (lambda x: x.cumprod(0).sum(), "read")):
        loss = function(rand(3).requires_grad_())
        assert kinds(loss.backward) == [kind]
    assert kinds(rand(3).requires_grad_().cumsum(0).sum().backward) == []
    x = rand(4).requires_grad_()
    assert kinds(x.masked_scatter(torch.tensor([True] * 4, device="cuda"), rand(4)).sum().backward) == []
    source = rand(4).requires_grad_()
    assert kinds(rand(4).masked_scatter(torch.ones(4, dtype=torch.bool, device="cuda"), source).sum().backward) == [
        "size"
    ]


def test_the_loss_of_speech_waits() -> None:
    scores = torch.randn(6, 2, 4, device="cuda").log_softmax(2).requires_grad_()
    lengths = torch.tensor([6, 6], device="cuda"), torch.tensor([2, 2], device="cuda")
    target = torch.ones(2, 2, dtype=torch.long, device="cuda")
    assert kinds(lambda: F.ctc_loss(scores, target, *lengths)) == ["read"]


@pytest.mark.parametrize(
    ("name", "copy", "expected"),
    [
        ("cast up", lambda p, x: p.to("cuda", torch.float16, non_blocking=True), None),
        ("transposed up", lambda p, x: p.t().to("cuda", non_blocking=True), None),
        ("transposed into other order", lambda p, x: x.copy_(p.t(), non_blocking=True), "pageable"),
        ("transposed down", lambda p, x: p.copy_(x.t(), non_blocking=True), None),
        ("cast down", lambda p, x: p.copy_(x.double(), non_blocking=True), None),
        ("columns up", lambda p, x: p[:, :2].to("cuda", non_blocking=True), "pageable"),
        ("columns down", lambda p, x: p[:, :2].copy_(x[:, :2], non_blocking=True), "pageable"),
        ("to cpu", lambda p, x: x.to("cpu", non_blocking=True), None),
        ("blocking", lambda p, x: p.cuda(), "upload"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_copies_of_pinned_memory(name: str, copy: Callable[..., Any], expected: str | None) -> None:
    p, x = torch.zeros(4, 4).pin_memory(), rand(4, 4)
    assert kinds(lambda: copy(p, x)) == ([expected] if expected else [])


def test_packed_sequences_and_inverse_transforms() -> None:
    x = rand(3, 2, 4)
    pack = torch.nn.utils.rnn.pack_padded_sequence
    assert kinds(lambda: pack(x, torch.tensor([3, 2]))) == []
    assert kinds(lambda: pack(x, torch.tensor([2, 3]), enforce_sorted=False)) == ["upload"]
    wave, window = rand(400), torch.hann_window(64, device="cuda")
    spectrum = torch.stft(wave, 64, window=window, return_complex=True)
    assert kinds(lambda: torch.istft(spectrum, 64, window=window)) == ["read"]


def test_parametrizations_that_set_tensors_and_lengths_of_the_host() -> None:
    layer = torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(3, 3).cuda())
    assert kinds(lambda: layer(rand(2, 3)).sum().backward()) == []
    scores = torch.randn(6, 2, 4, device="cuda").log_softmax(2)
    target = torch.ones(2, 2, dtype=torch.long, device="cuda")
    on_host = F.ctc_loss(scores.cpu(), target.cpu(), torch.tensor([6, 6]), torch.tensor([2, 2]))
    torch.testing.assert_close(F.ctc_loss(scores, target, torch.tensor([6, 6]), torch.tensor([2, 2])).cpu(), on_host)
    x = rand(3)
    x.record_stream(torch.cuda.Stream())


def test_polling_a_stream_is_a_wait() -> None:
    stream, x = torch.cuda.current_stream(), rand(2)

    def poll() -> None:
        torch.add(x, 1)
        while not stream.query():
            pass

    assert kinds(poll) == ["query"]
    assert stream.query()


def test_the_users_tensor_is_told_from_torchs() -> None:
    assert isinstance(rand(2), SimTensor) and isinstance(rand(2), torch.Tensor)
    parameter = torch.nn.Parameter(rand(2))
    assert isinstance(parameter, torch.nn.Parameter) and parameter.is_leaf and parameter.requires_grad


# Whatever runs without the simulation runs under it: classes of faults that snippets of tests/syncs/documented showed


def test_memory_may_change_under_a_tensor() -> None:
    x, out = rand(4), torch.empty(0, device="cuda")
    assert x.resize_(3, 3).shape == (3, 3) and x.cpu().shape == (3, 3)
    torch.mm(rand(2, 3), rand(3, 4), out=out)
    assert out.shape == (2, 4) and out.sum().item() > 0
    assert torch.empty(0, device="cuda").set_(x.untyped_storage(), 0, (2, 2), (2, 1)).shape == (2, 2)


def test_classes_of_tensors_keep_their_names_and_their_device() -> None:
    class Image(torch.Tensor):
        pass

    class Weight(torch.nn.Parameter):
        pass

    image: Any = rand(3).as_subclass(Image)
    made = (image * 2).flip(0)
    assert isinstance(made, Image) and type(made).__name__ == "Image" and made.is_cuda
    assert kinds(lambda: made.sum().item()) == ["read"]
    weight = Weight(rand(3))
    (weight * 2).sum().backward()
    assert isinstance(weight, Weight) and weight.grad is not None and weight.grad.is_cuda


@pytest.mark.parametrize("late", [True, False])
def test_parameters_get_their_shape_on_the_device(late: bool) -> None:
    model = torch.nn.Sequential(torch.nn.LazyLinear(4), torch.nn.LazyLinear(2))
    if late:
        model(torch.ones(1, 3))
    assert model.cuda()(rand(5, 3)).shape == (5, 2)
    assert all(p.is_cuda and type(p.detach()) is SimTensor for p in model.parameters())


def test_hooks_move_tensors_in_the_backward_pass() -> None:
    x = rand(3).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.to("cpu"), lambda t: t.to("cuda")):
        y = x.exp().sum()
    assert kinds(y.backward) == ["upload"]
    x.register_hook(lambda gradient: gradient * torch.tensor([1.0, 2.0, 3.0], device="cuda"))
    assert kinds((x * 2).sum().backward) == ["upload"]


def test_functional_transforms() -> None:
    x, v = rand(4), rand(4)

    def of_sines(t: torch.Tensor) -> torch.Tensor:
        return t.sin().sum()

    gradient: Any = torch.func.grad(of_sines)
    tangent = torch.func.jvp(gradient, (x,), (v,))[1]
    torch.testing.assert_close(tangent.cpu(), (-x.sin() * v).cpu())
    torch.testing.assert_close(
        torch.func.jacfwd(torch.func.jacrev(lambda t: (t**3).sum()))(x).diag().cpu(), (6 * x).cpu()
    )


def test_programs_own_operations_for_cuda() -> None:
    @torch.library.custom_op("headway_tests::doubled", mutates_args=(), device_types="cuda")
    def doubled(x: torch.Tensor) -> torch.Tensor:
        assert x.is_cuda
        return x * 2

    assert doubled(torch.ones(2, device="cuda")).tolist() == [2.0, 2.0]


def test_layouts_and_hand_overs() -> None:
    matrix = torch.eye(4, device="cuda").to_sparse_csr()
    assert matrix.layout is torch.sparse_csr and matrix.is_cuda
    assert torch.equal((matrix @ torch.ones(4, 1, device="cuda")).cpu(), torch.ones(4, 1))
    x, from_dlpack = rand(3), vars(torch)["from_dlpack"]
    assert from_dlpack(x).is_cuda and torch.equal(from_dlpack(x).cpu(), x.cpu())
    nested = torch.nested.as_nested_tensor([rand(2, 3), rand(4, 3)], layout=torch.jagged)
    assert (nested * 2).to_padded_tensor(0.0).shape == (2, 4, 3)


@pytest.mark.parametrize("packet", ["_coalesce", "fake_quantize_per_channel_affine_cachemask"])
def test_waits_that_no_sample_reaches(packet: str) -> None:
    places = torch.stack([torch.tensor([0, 0, 1], device="cuda")] * 2)
    matrix = torch.sparse_coo_tensor(places, torch.ones(3, device="cuda"), (2, 2))
    zero, scale = torch.zeros(2, dtype=torch.int32, device="cuda"), torch.ones(2, device="cuda")
    x = rand(2, 3)
    calls = {
        "_coalesce": lambda: matrix.coalesce(),
        "fake_quantize_per_channel_affine_cachemask": lambda: torch.fake_quantize_per_channel_affine(
            x, scale, zero, 0, -8, 7
        ),
    }
    assert kinds(calls[packet]) == ["size" if packet == "_coalesce" else "read"]
