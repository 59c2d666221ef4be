"""Pretended CUDA tensors on a machine without CUDA: a program for device="cuda" runs on the CPU, and host reads are found.

A ``SimTensor`` claims device cuda and holds a CPU tensor. What it shows is which calls *would* wait, by the rules
below, not how long. It cannot serve what needs a real device: addresses for kernels (Triton, C++ extensions), CUDA
graphs, resizing in place. Those raise ProbeError. torch.compile runs eagerly.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any, Final, Self

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from headway.syncs.calls import CALLS, Call, label_of
from headway.syncs.copies import dense
from headway.syncs.errors import ProbeError
from headway.syncs.findings import Kind, Wait
from headway.syncs.frames import locate
from headway.syncs.probes import Counted, Sink
from headway.syncs.regions import judge, wanted
from headway.syncs.sim_cuda import fake_cuda

CUDA: Final = torch.device("cuda", 0)
META: Final = torch.device("meta")

READS: Final = frozenset({"_local_scalar_dense", "equal", "is_nonzero", "allclose"})
SIZES: Final = frozenset([
    "nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive", "bincount",
    "repeat_interleave",
])  # fmt: skip
INDEXING: Final = frozenset({"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"})
COPIES: Final = frozenset({"copy_", "_to_copy"})
BUILDERS: Final = frozenset({"tensor", "as_tensor", "asarray"})
SHOWS: Final = frozenset({"__repr__", "__format__", "__str__", "tolist", "__reversed__", "__contains__"})
MISSING: Final = frozenset({"resize_", "resize_as_", "set_", "data_ptr", "__cuda_array_interface__", "share_memory_"})


class SimTensor(torch.Tensor):
    """A tensor that claims to live on cuda:0; ``held`` keeps its values on the CPU."""

    held: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # noqa: SLF001

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Self:
        made = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=META,
            requires_grad=inner.requires_grad,
        )
        made.held = inner.detach()
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return execute(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        flag(Kind.READ, "Tensor.__repr__")
        return f"{self.held!r}[:cuda:0]"

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        return False

    def get_device(self) -> int:
        return 0

    def data_ptr(self) -> int:
        """Raises ProbeError: there is no device memory."""
        raise ProbeError("the simulation has no device memory: kernels that take a tensor's address need a real GPU")


class Pins:
    """Which CPU storages are page-locked. Pinned tensors live to the end of the run: programs keep them anyway."""

    def __init__(self) -> None:
        self._kept: dict[int, torch.Tensor] = {}

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Mark ``tensor``'s storage."""
        self._kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._kept


PINS: Final = Pins()


def flag(kind: Kind, label: str) -> None:
    """A wait: on the user's call under way on this thread, or by itself."""
    call = CALLS.outermost
    if isinstance(call, _SimCall):
        call.kind = call.kind or kind
        return
    report(kind, label)


def report(kind: Kind, label: str) -> None:
    """Send a wait to whoever watches this thread."""
    if wanted():
        site, stack = locate()
        name = threading.current_thread().name
        judge(Wait(site, kind, label, None, time.perf_counter_ns(), name, "simulation", None, stack))


class _SimCall(Call):
    __slots__ = ("kind",)

    def __init__(self, label: str) -> None:
        super().__init__(label)
        self.kind: Kind | None = None


def execute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one aten operation on the CPU values, and flag it if the device's version of it waits."""
    name = func.overloadpacket.__name__
    flat, spec = tree_flatten((args, kwargs))
    ours = [value for value in flat if isinstance(value, SimTensor)]
    made_there = kwargs.get("device") is not None and torch.device(kwargs["device"]).type in ("meta", "cuda")
    if not ours and not made_there:
        return func(*args, **kwargs)
    if name in MISSING or torch.Tag.inplace_view in func.tags:
        raise ProbeError(f"the simulation does not serve {name}")
    if name in COPIES:
        return _copy(func, name, args, kwargs)
    host = [value for value in flat if type(value) is torch.Tensor or type(value) is torch.nn.Parameter]
    _flag_operation(name, args, kwargs, host)
    by_held = {id(value.held): value for value in ours}
    plain_args, plain_kwargs = tree_unflatten([v.held if isinstance(v, SimTensor) else v for v in flat], spec)
    if "device" in plain_kwargs:
        plain_kwargs["device"] = torch.device("cpu")
    plain_kwargs.pop("pin_memory", None)
    result = func(*plain_args, **plain_kwargs)

    def wrap(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        known = by_held.get(id(value))
        return SimTensor(value) if known is None else known

    return tree_map(wrap, result)


def _flag_operation(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], host: list[torch.Tensor]) -> None:
    if name in READS:
        flag(Kind.READ, name)
    elif name in INDEXING:
        parts = [part for part in args[1] if isinstance(part, torch.Tensor)]
        if any(part.dtype in (torch.bool, torch.uint8) for part in parts):
            flag(Kind.SIZE, name)
        elif any(not isinstance(part, SimTensor) for part in parts):
            flag(Kind.UPLOAD, name)
    elif name in SIZES and not (name == "repeat_interleave" and kwargs.get("output_size") is not None):
        flag(Kind.SIZE, name)
    elif any(value.dim() > 0 for value in host):
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
        )


def _copy(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """copy_ and _to_copy: the two operations that cross."""
    if name == "copy_":
        target, source = args[0], args[1]
        waiting = bool(args[2]) if len(args) > 2 else bool(kwargs.get("non_blocking", False))
        _flag_copy(source, target, target.dtype, waiting)
        _held(target).copy_(_held(source))
        return target
    source = args[0]
    device = kwargs.get("device")
    there = isinstance(source, SimTensor) if device is None else torch.device(device).type in ("meta", "cuda")
    rest = {key: value for key, value in kwargs.items() if key not in ("device", "non_blocking", "pin_memory")}
    result = func(_held(source), **rest)
    fresh = SimTensor(result) if there else result
    non_blocking = bool(kwargs.get("non_blocking", False))
    if not there and non_blocking:
        PINS.pin(result)  # torch allocates pinned memory for device.to("cpu", non_blocking=True)
    _flag_copy(source, fresh, source.dtype if there else result.dtype, non_blocking)  # an upload is cast on the device
    return fresh


def _held(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.held if isinstance(tensor, SimTensor) else tensor


def _flag_copy(source: torch.Tensor, target: torch.Tensor, dtype: torch.dtype, non_blocking: bool) -> None:
    up = isinstance(target, SimTensor)
    if isinstance(source, SimTensor) == up or target.numel() == 0:
        return
    if not non_blocking:
        flag(Kind.UPLOAD if up else Kind.READ, "copy_")
        return
    host = _held(source if up else target)
    if host not in PINS or not dense(host) or source.dtype != dtype or source.shape != target.shape:
        flag(Kind.PAGEABLE, "copy_")


class _Dispatch(TorchDispatchMode):
    """Operations that create tensors on the device, where no SimTensor is among the arguments."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return execute(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """The user's calls: device arguments become meta, and what never reaches the dispatcher is served here."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return func(*args, **(kwargs or {}))
        call = _SimCall(label_of(func))
        CALLS.open.append(call)
        try:
            result = _serve(func, name, args, dict(kwargs or {}))
        finally:
            CALLS.open.pop()
        if call.kind is not None:
            report(call.kind, call.label)
        return result


def _is_cuda(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and (value == "cuda" or value.startswith("cuda:"))


def _serve(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    first = args[0] if args else None
    if name in BUILDERS:
        return _build(func, args, kwargs)
    if name == "new_tensor" and isinstance(first, SimTensor):
        return _build(torch.tensor, args[1:], {"dtype": first.dtype, "device": CUDA} | kwargs)
    if name == "pin_memory" and type(first) is torch.Tensor:
        return PINS.pin(first.clone())
    if name == "is_pinned" and isinstance(first, torch.Tensor):
        return not isinstance(first, SimTensor) and first in PINS
    if name == "cuda" and isinstance(first, torch.Tensor):
        bools = [value for value in args[1:] if isinstance(value, bool)]
        return first.to(META, non_blocking=kwargs.get("non_blocking", bools[0] if bools else False))
    if isinstance(first, SimTensor):
        if name in SHOWS:
            flag(Kind.READ, name)
            return func(first.held, *args[1:], **kwargs)
        if name == "numpy":
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")
        if name == "record_stream":
            return None
    pin = bool(kwargs.pop("pin_memory", False)) if name != "pin_memory" else False
    device = kwargs.get("device")
    if _is_cuda(device) or (isinstance(device, int) and not isinstance(device, bool)):
        kwargs["device"] = META
    if name in ("to", "new_empty", "new_zeros", "new_ones", "new_full", "new_tensor"):
        args = tuple(META if _is_cuda(value) else value for value in args)
    result = func(*args, **kwargs)
    return PINS.pin(result) if pin and isinstance(result, torch.Tensor) else result


def _build(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch.tensor and its kin make the values on the host and copy them."""
    source = args[0] if args else kwargs.get("data")
    device = kwargs.pop("device", None)
    if isinstance(source, SimTensor):
        return source.to(**{k: v for k, v in kwargs.items() if k == "dtype"}) if kwargs.get("dtype") else source
    pin = kwargs.pop("pin_memory", False)
    made = func(*args, **kwargs)
    if device is None or not _is_cuda(device):
        return PINS.pin(made) if pin else made
    flag(Kind.UPLOAD, "tensor")
    return SimTensor(made)


class SimulationProbe:
    """Pretends CUDA on every thread that attaches. The same interface as the live probe."""

    name = "simulation"
    watches = "host reads, data-dependent sizes, blocking and pageable copies, synchronize and query calls; no times"

    def __init__(self) -> None:
        self._thread = _Stacks()
        self._fakes = contextlib.ExitStack()
        self._shared = Counted(self._up, self._down)

    def attach(self, sink: Sink) -> None:
        """Enter the pretence on this thread. The sink is always the judge, which sees this thread's regions.

        Raises:
            ProbeError: this machine has CUDA, where the real probe tells more.
        """
        del sink
        if not self._thread.stacks and torch.version.cuda is not None and torch._C._cuda_getDeviceCount() > 0:  # noqa: SLF001
            raise ProbeError("this machine has a GPU: the simulation would tell less than the live probe")
        self._shared.__enter__()
        stack = contextlib.ExitStack()
        if not self._thread.stacks:
            stack.enter_context(_Dispatch())  # type: ignore[no-untyped-call]
            stack.enter_context(_Functions())
        self._thread.stacks.append(stack)

    def detach(self) -> None:
        """Leave it again."""
        self._thread.stacks.pop().close()
        self._shared.__exit__()

    def _up(self) -> None:
        self._fakes.enter_context(fake_cuda(report))

    def _down(self) -> None:
        self._fakes.close()


class _Stacks(threading.local):
    def __init__(self) -> None:
        self.stacks: list[contextlib.ExitStack] = []
