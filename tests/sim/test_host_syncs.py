"""Every way in which PyTorch code makes the host wait for a GPU raises on the simulated device, naming the line."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from headway.device.sim import HostSyncError, SimDevice
from headway.device.sim.timeline import Task

Case = Callable[[torch.Tensor, SimDevice], Any]


def assign(x: torch.Tensor, index: Any, value: Any) -> None:
    x[index] = value


def mask(x: torch.Tensor) -> torch.Tensor:
    return x > 0


def host_loop(x: torch.Tensor) -> int:
    return sum(1 for _ in x)


READS: dict[str, Case] = {
    "item": lambda x, d: x[0].item(),
    "tolist": lambda x, d: x.tolist(),
    "cpu": lambda x, d: x.cpu(),
    "to cpu": lambda x, d: x.to("cpu"),
    "to cpu device": lambda x, d: x.to(device=torch.device("cpu"), dtype=torch.float64),
    "numpy": lambda x, d: x.numpy(),
    "numpy asarray": lambda x, d: np.asarray(x),
    "bool": lambda x, d: bool(x[0]),
    "if any": lambda x, d: 1 if (x > 0).any() else 2,
    "assert all": lambda x, d: not (x > 0).all(),
    "int": lambda x, d: int(x[0]),
    "float": lambda x, d: float(x[0]),
    "index": lambda x, d: [1, 2, 3][x[0].long()],
    "range": lambda x, d: range(x[0].long()),
    "size of a new tensor": lambda x, d: torch.zeros(x[0].long(), device=d.torch_device),  # type: ignore[call-overload]
    "slice end": lambda x, d: x[: x[0].long()],
    "repr": lambda x, d: repr(x),
    "str": lambda x, d: str(x),
    "f-string": lambda x, d: f"{x}",
    "format": lambda x, d: f"{x[0]:.2f}",
    "contains": lambda x, d: 3 in x,
    "iteration": lambda x, d: host_loop(x),
    "list": lambda x, d: list(x),
    "unpacking": lambda x, d: [*x],
    "equal": lambda x, d: torch.equal(x, x),
    "allclose": lambda x, d: torch.allclose(x, x),
    "is_nonzero": lambda x, d: torch.is_nonzero(x[0]),
    "data_ptr": lambda x, d: x.data_ptr(),
    "untyped_storage": lambda x, d: x.untyped_storage(),
    "deepcopy": lambda x, d: copy.deepcopy(x),
    "copy to the host": lambda x, d: torch.zeros(4).copy_(x),
    "copy to pinned, blocking": lambda x, d: d.host_ints(4).copy_(x.int()),
    "copy to pinned, another type": lambda x, d: d.host_ints(4).copy_(x, non_blocking=True),
}
DYNAMIC: dict[str, Case] = {
    "nonzero": lambda x, d: x.nonzero(),
    "where without values": lambda x, d: torch.where(x > 0),
    "argwhere": lambda x, d: torch.argwhere(x),
    "unique": lambda x, d: x.unique(),
    "unique_consecutive": lambda x, d: torch.unique_consecutive(x),
    "masked_select": lambda x, d: x.masked_select(mask(x)),
    "mask index": lambda x, d: x[mask(x)],
    "mask assignment": lambda x, d: assign(x, mask(x), 1.0),
    "mask assignment of a tensor": lambda x, d: assign(x, mask(x), x[:1]),
    "repeat_interleave": lambda x, d: x.repeat_interleave(torch.ones_like(x, dtype=torch.int64)),
    "bincount": lambda x, d: x.long().bincount(),
}
RECORDED: dict[str, Case] = {
    "masked_fill with a device number": lambda x, d: x.masked_fill(mask(x), x[0]),
    "normal with deviations": lambda x, d: torch.normal(x, x),
    "histc": lambda x, d: torch.histc(x, 4),
    "mode": lambda x, d: x.mode(),
    "linspace between device numbers": lambda x, d: torch.linspace(x[0], x[1], 3, device=d.torch_device),
    "searchsorted with a sorter": lambda x, d: torch.searchsorted(x, x, sorter=x.long()),
    "svd": lambda x, d: torch.linalg.svd(x.view(2, 2)),
    "inv": lambda x, d: torch.linalg.inv(x.view(2, 2)),
    "cholesky": lambda x, d: torch.linalg.cholesky(x.view(2, 2)),
    "isin": lambda x, d: torch.isin(x, x),
}
"""What no tag of torch's says, and the record of a card does (headway/syncs/sim/waits.json)."""
UPLOADS: dict[str, Case] = {
    "torch.tensor": lambda x, d: torch.tensor([1, 2], device=d.torch_device),
    "as_tensor of a list": lambda x, d: torch.as_tensor([1, 2], device=d.torch_device),
    "as_tensor of numpy": lambda x, d: torch.as_tensor(np.zeros(2), device=d.torch_device),
    "asarray": lambda x, d: torch.asarray([1, 2], device=d.torch_device),
    "new_tensor": lambda x, d: x.new_tensor([1.0]),
    "to": lambda x, d: torch.zeros(2).to(d.torch_device),
    "to, non_blocking but pageable": lambda x, d: torch.zeros(2).to(d.torch_device, non_blocking=True),
    "copy_ from pageable memory": lambda x, d: x.copy_(torch.zeros(4), non_blocking=True),
    "copy_ from pinned memory, blocking": lambda x, d: x.int().copy_(d.host_ints(4)),
    "copy_ from pinned memory, another type": lambda x, d: x.copy_(d.host_ints(4), non_blocking=True),
    "copy_ from pinned memory, not dense": lambda x, d: x.int().copy_(d.host_ints(8)[::2], non_blocking=True),
    "copy_ from pinned memory, broadcast": lambda x, d: x.int().copy_(d.host_ints(1), non_blocking=True),
    "list index": lambda x, d: x[[0, 1]],
    "host index": lambda x, d: x[torch.tensor([0, 1])],
    "scalar assignment": lambda x, d: assign(x, 0, 3.0),
    "scalar assignment, two-dimensional": lambda x, d: assign(x.view(2, 2), (0, 1), 3.0),
    "scalar assignment by index tensor": lambda x, d: assign(x, x.long(), 3.0),
    "index_put_ of a host value": lambda x, d: x.index_put_((x.long(),), torch.tensor(3.0)),
}
WAITS: dict[str, Case] = {
    "wait_idle": lambda x, d: d.wait_idle(),
    "event.synchronize": lambda x, d: d.new_event().synchronize(),
}


def cases(*groups: dict[str, Case]) -> list[Any]:
    return [pytest.param(case, id=name) for group in groups for name, case in group.items()]


def line_of(case: Case) -> int:
    return inspect.getsourcelines(case)[1]


@pytest.mark.parametrize("scope", ["armed", "stream"])
@pytest.mark.parametrize("case", cases(READS, DYNAMIC, RECORDED, UPLOADS, WAITS))
def test_is_refused_with_its_line(lazy: SimDevice, case: Case, scope: str) -> None:
    x = torch.zeros(4, device=lazy.torch_device)
    if scope == "armed":
        lazy.arm()
        with pytest.raises(HostSyncError, match=r"tests/sim/test_host_syncs\.py:\d+ in ") as caught:
            case(x, lazy)
    else:
        with pytest.raises(HostSyncError) as caught, lazy.main.active(), torch.inference_mode():
            case(x, lazy)
    named = int(str(caught.value).split("test_host_syncs.py:")[1].split(" ")[0])
    helpers = {line_of(helper) + 1 for helper in (assign, host_loop)}  # type: ignore[arg-type]
    assert named == line_of(case) or named in helpers
    assert lazy.timeline.violations[0] is caught.value, "kept, should the caller swallow it"


@pytest.mark.parametrize("case", cases(READS, DYNAMIC, RECORDED))
def test_reads_are_refused_at_start_up_too(lazy: SimDevice, case: Case) -> None:
    with pytest.raises(HostSyncError):
        case(torch.zeros(4, device=lazy.torch_device), lazy)


@pytest.mark.parametrize("case", cases({k: v for k, v in UPLOADS.items() if "index" not in k and "scalar" not in k}))
def test_blocking_uploads_are_counted_at_start_up(lazy: SimDevice, case: Case) -> None:
    x = torch.zeros(4, device=lazy.torch_device)
    case(x, lazy)
    assert lazy.timeline.host_waits == 1
    pending = [item.name for item in lazy.timeline.default.queue if isinstance(item, Task)]
    assert set(pending) <= {"free"}, "a blocking copy waits for all that its stream was given before"


def test_of_several_errors_the_first_is_told(lazy: SimDevice) -> None:
    """What follows from an error is not its cause."""
    x = torch.zeros(4, device=lazy.torch_device)
    lazy.arm()
    for wait in (lambda: x[0].item(), lazy.wait_idle, x.tolist):
        with pytest.raises(HostSyncError):
            wait()
    assert len(lazy.timeline.violations) == 3
    with pytest.raises(HostSyncError) as caught:
        lazy.check()
    assert caught.value is lazy.timeline.violations[0]


FINE: dict[str, Case] = {
    "slice assignment": lambda x, d: assign(x, slice(0, 2), 3.0),
    "index_fill": lambda x, d: x.index_fill_(0, x.long(), 3.0),
    "masked_fill": lambda x, d: x.masked_fill_(mask(x), 3.0),
    "where": lambda x, d: torch.where(mask(x), x, 0.0),
    "index by tensor": lambda x, d: x[x.long()],
    "assignment by index tensor": lambda x, d: assign(x, x.long(), x),
    "repeat_interleave of known size": lambda x, d: x.repeat_interleave(x.long(), output_size=0),
    "host scalar operand": lambda x, d: x + torch.tensor(2.0),
    "row assignment": lambda x, d: assign(x.view(2, 2), 0, 3.0),
    "sizes": lambda x, d: (len(x), x.shape, x.numel(), x.device, x.dtype, x.stride()),
    "unbind": lambda x, d: x.unbind(),
    "another type": lambda x, d: x.to(torch.float16),
    "pinned upload": lambda x, d: x.int().copy_(d.host_ints(4), non_blocking=True),
    "pinned readback": lambda x, d: d.host_ints(4).copy_(x.int(), non_blocking=True),
    "event.query": lambda x, d: d.new_event().query(),
}


@pytest.mark.parametrize("case", cases(FINE))
def test_what_does_not_wait_is_allowed(lazy: SimDevice, case: Case) -> None:
    x = torch.zeros(4, device=lazy.torch_device)
    lazy.arm()
    with lazy.main.active():
        case(x, lazy)
    assert not lazy.timeline.violations


def test_leaving_a_device_reports_what_was_swallowed() -> None:
    def swallow() -> None:
        with SimDevice(0) as device:
            x = torch.zeros(2, device=device.torch_device)
            try:
                x.tolist()
            except RuntimeError:
                pass

    with pytest.raises(HostSyncError, match="tolist"):
        swallow()
