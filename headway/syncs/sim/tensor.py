"""Tensors of the pretended device, and how an operation on them runs: on the CPU values, flagged if a card would wait."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from typing import Any, Final, Self

import torch
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headway.syncs.findings import Kind
from headway.syncs.sim import backend
from headway.syncs.sim.cells import CELLS, WIDER, widened
from headway.syncs.sim.flags import flag
from headway.syncs.sim.lent import LENT
from headway.syncs.sim.pins import PINS
from headway.syncs.sim.rules import COPIES, INDEXING, copy_wait, wait_of

IMPLICIT: Final = "CompositeImplicitAutograd"
_CPU: Final = torch.device("cpu")
COMPRESSED: Final = frozenset({torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})
"""Layouts that torch has no wrappers for: such tensors are dense ones to its C++ side (whole.py serves them)."""
_CUDA_KEYS: Final = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
_FAKE: Final = torch._C._TorchDispatchModeKey.FAKE
_EAGER: Final = torch._C.DispatchKey.CompositeExplicitAutograd
TORCHS: Final = frozenset(
    [
        "aten",
        "prim",
        "prims",
        "quantized",
        "quantized_decomposed",
        "c10d",
        "c10d_functional",
        "symm_mem",
        "fsdp",
        "inductor",
    ]
)
"""Namespaces of operations that torch brings; what it writes in Python for CUDA is no line of the program's."""
ROOM: Final = 2**50
"""Bytes that the C++ side of a tensor, which holds nothing, believes to have: resize_ may ask for any size."""


class SimTensor(torch.Tensor):
    """A tensor that claims to live on cuda:0; ``held`` keeps its values on the CPU.

    For torch's C++ side its device is the backend of ``sim/backend.py``; ``device`` says cuda to the program.
    """

    held: torch.Tensor
    whole = False
    """Whether torch has no wrapper for the layout: ``whole.py`` runs its calls."""
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: torch.Tensor, requires_grad: bool | None = None) -> Any:
        if requires_grad is not None or isinstance(inner, SimTensor):  # type(parameter)(...), as programs write it
            return torch.nn.Parameter(inner, requires_grad is not False)
        inner = _plain(inner)
        if torch.is_inference_mode_enabled() and not inner.is_inference():  # a view of a tensor from outside
            with torch.inference_mode(mode=False):
                return cls._made(inner)
        return cls._made(inner)

    @classmethod
    def _made(cls, inner: torch.Tensor) -> Self:
        strided = inner.layout is torch.strided and not inner.is_nested
        whole = inner.is_nested or inner.layout in COMPRESSED
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            (inner.numel(),) if inner.is_nested else inner.shape,
            strides=inner.stride() if strided else None,
            storage_offset=inner.storage_offset() if strided else None,
            storage_size=ROOM if strided else None,
            dtype=inner.dtype,
            layout=torch.strided if whole else inner.layout,
            device=backend.device(),
        )
        made.held, made.whole = inner.detach(), whole
        COUNT.made += 1
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return NotImplemented if _others(tuple(types)) else execute(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if self.numel():
            flag(Kind.READ, "Tensor.__repr__")
        text = repr(self.held)
        grad = f", grad_fn=<{self.grad_fn.name()}>" if self.grad_fn is not None else ""
        return f"{text[:-1]}, device='{self.device}'{grad or (', requires_grad=True' if self.requires_grad else '')})"

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return backend.visible()

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def layout(self) -> torch.layout:  # type: ignore[override]
        return self.held.layout

    @property
    def is_nested(self) -> bool:  # type: ignore[override]
        return self.held.is_nested

    def get_device(self) -> int:
        return backend.STATE.index

    def data_ptr(self) -> int:
        """The address of the values: an identity, as programs use it, that no kernel of a card can follow."""
        return self.held.data_ptr()

    def tolist(self) -> Any:
        if self.numel():
            flag(Kind.READ, "Tensor.tolist")
        return self.held.tolist()

    def untyped_storage(self) -> torch.UntypedStorage:
        """The values' own."""
        return self.held.untyped_storage()

    def storage(self) -> Any:
        return self.held.storage()

    def _typed_storage(self) -> Any:
        return self.held._typed_storage()

    def is_shared(self) -> bool:
        return True  # as of any CUDA tensor

    def share_memory_(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        is_parameter = isinstance(self, torch.nn.Parameter)
        if not is_parameter and not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the moment."
            )
        with torch.no_grad():
            made: Any = SimTensor(self.held.clone())
        made.requires_grad_(self.requires_grad)
        memo[id(self)] = made
        if is_parameter:  # torch.nn.Parameter copies neither its gradient nor its attributes
            made._is_param = True
            return made
        if self.grad is not None:
            made.grad = copy.deepcopy(self.grad, memo)
        own = {key: value for key, value in vars(self).items() if key not in ("held", "whole")}
        made.__dict__.update({key: copy.deepcopy(value, memo) for key, value in own.items()})
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As a CPU tensor that goes back to cuda:0 when it is loaded: what torch does for other backends."""
        if self.numel():
            flag(Kind.READ, "Tensor.__reduce_ex__")
        rebuild = torch._utils._rebuild_device_tensor_from_cpu_tensor
        return rebuild, (self.held, self.dtype, str(self.device), self.requires_grad)


def _plain(inner: torch.Tensor) -> torch.Tensor:
    """``inner`` with values of its own where it only stands for some: conjugates, negatives, zeros without memory."""
    if inner.is_complex() and inner.is_conj():
        inner = inner.resolve_conj()
    if inner.is_neg():
        inner = inner.resolve_neg()
    zeros: Any = inner
    return torch.zeros(inner.shape, dtype=inner.dtype) if zeros._is_zerotensor() else inner


class Count:
    """How many tensors the pretended device has had: none means that nothing was watched."""

    made = 0


COUNT: Final = Count()


class Tape(threading.local):
    """What a CUDA graph being captured on this thread will do again."""

    def __init__(self) -> None:
        self.steps: list[Callable[[], None]] | None = None


TAPE: Final = Tape()


def is_there(device: Any) -> bool:
    """Whether ``device``, as torch functions take it, is the pretended one."""
    if isinstance(device, torch.device):
        return device.type in ("cuda", backend.NAME)
    if isinstance(device, str):
        return device.partition(":")[0] in ("cuda", backend.NAME)
    return isinstance(device, int) and not isinstance(device, bool)


def execute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one aten operation on the CPU values, and flag it if the device's version of it waits."""
    ours: list[SimTensor] = []
    hosts: list[torch.Tensor] = []
    device = kwargs.get("device")
    made_there = device is not None and is_there(device)
    values = _unwrap(args, ours, hosts)
    named = {key: _unwrap(value, ours, hosts) for key, value in kwargs.items()} if kwargs else {}
    if not ours and not made_there:
        if named.pop("pin_memory", False) and not _is_composite(func):
            return PINS.pin(func(*args, **named))
        if func is torch.ops.aten.is_pinned.default:  # asked by torch's C++ side
            return args[0] in PINS
        return func(*args, **kwargs)
    name = func.overloadpacket.__name__
    if name in COPIES:
        return _copy(func, name, args, kwargs)
    if _is_composite(func):  # whole only under inference_mode
        with Dispatch():  # type: ignore[no-untyped-call]
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
    if func is torch.ops.aten.set_.source_Tensor and len(ours) == 2:
        ours[0].held = ours[1].held
        return _reshaped(ours[0])
    kind = wait_of(func, args, kwargs)
    if kind is not None:
        flag(kind, name)
    elif ours and hosts:
        _same_device(name, hosts)
    if name == "_pack_padded_sequence" and len(ours) > 1:
        raise RuntimeError("'lengths' argument should be a 1D CPU int64 tensor, but got 1D cuda:0 Long tensor")
    if name in INDEXING and not (len(args) > 2 and any(value is args[2] for value in hosts)):
        values = (values[0], [_mask(part) for part in values[1]], *values[2:])
    there = made_there or device is None
    if func.namespace == "c10d":
        LENT.note([each.held for each in ours])
    if _programs_own(func):
        return _as_the_program_says(func, args, kwargs)
    if made_there:
        named["device"] = _CPU
    named.pop("pin_memory", None)
    return _run(func, name, values, named, ours, there)


@functools.cache
def _others(types: tuple[type, ...]) -> bool:
    """Whether tensors of a class with a dispatch of its own are among the arguments: nested ones, and programs' wrappers."""
    plain = torch.Tensor.__torch_dispatch__
    return any(
        not issubclass(kind, SimTensor) and getattr(kind, "__torch_dispatch__", plain) is not plain for kind in types
    )


def _unwrap(value: Any, ours: list[SimTensor], hosts: list[torch.Tensor]) -> Any:
    """``value`` with the tensors' values in it; notes whose tensors it holds. Arguments of aten nest no deeper than lists."""
    if isinstance(value, SimTensor):
        ours.append(value)
        return value.held
    if isinstance(value, (tuple, list)):
        return type(value)([_unwrap(each, ours, hosts) for each in value])
    if isinstance(value, torch.Tensor):
        hosts.append(value)
    return _CPU if isinstance(value, torch.device) and is_there(value) else value


@functools.cache
def _is_composite(func: Any) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), IMPLICIT))


def _run(
    func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], ours: list[SimTensor], there: bool
) -> Any:
    run = _runner(func)
    result = run(*args, **kwargs)
    if torch.Tag.inplace_view in func.tags:
        return _reshaped(ours[0])
    if TAPE.steps is not None:
        TAPE.steps.append(lambda: _again(run, args, kwargs, result))
    if not there:
        return result
    if name == "_pack_padded_sequence":
        return SimTensor(result[0]), result[1]  # the batch sizes are the host's
    return _wrap(result, {id(value.held): value for value in ours})


@functools.cache
def _runner(func: Any) -> Callable[..., Any]:
    """What runs on the CPU values: the operation itself, unless the CPU has none."""
    packet = func.overloadpacket.__name__
    known = CELLS.get(packet) or CELLS.get(str(func))
    return known or (widened(func) if packet in WIDER else func)


@functools.cache
def _programs_own(func: Any) -> bool:
    """Whether the program itself wrote, in Python, what the operation does on CUDA, where it may wait."""
    if func.namespace in TORCHS or func.namespace.startswith("_"):
        return False
    has, name = torch._C._dispatch_has_kernel_for_dispatch_key, func.name()
    if has(name, "CUDA") and not has(name, "CPU") and not has(name, "CompositeExplicitAutograd"):
        return True
    place = f"{func.namespace}/{name.partition('::')[2]}"
    key = "CUDA" if has(name, "CUDA") else "CompositeExplicitAutograd"
    return f"{place}/{key}" in torch.library._impls


def _as_the_program_says(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operation by the program's own implementation, whose lines are lines of the program's."""
    from headway.syncs.sim.calls import Functions  # which needs this module

    with Functions(), Dispatch():  # type: ignore[no-untyped-call]
        return func.redispatch(_CUDA_KEYS, *args, **kwargs)


def _wrap(value: Any, known: dict[int, SimTensor]) -> Any:
    if isinstance(value, torch.Tensor):
        found = known.get(id(value))
        if found is None:
            return SimTensor(value)
        # resize_, set_ and out= may have given it another shape.
        plain = found.layout is torch.strided and not found.whole
        return _reshaped(found) if plain and found.shape != value.shape else found
    if isinstance(value, (tuple, list)):
        return type(value)([_wrap(each, known) for each in value])
    return value


def _mask(part: Any) -> Any:
    """Masks of bytes as masks: the CPU's own way to a masked_fill takes no bytes."""
    return part.bool() if part is not None and part.dtype is torch.uint8 else part


def _again(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """Replay one operation into the tensors that it made when it was captured."""
    fresh = func(*args, **kwargs)
    for old, new in zip(tree_leaves(result), tree_leaves(fresh), strict=True):
        if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
            old.copy_(new)


def _reshaped(tensor: SimTensor) -> SimTensor:
    """After ``unsqueeze_`` and its like: the tensor's own sizes follow those of its values."""
    held = tensor.held
    with torch._C._DisableTorchDispatch(), torch._C._AutoDispatchBelowADInplaceOrView():
        torch.ops.aten.as_strided_.default(tensor, held.shape, held.stride(), held.storage_offset())
    return tensor


def _same_device(name: str, hosts: list[torch.Tensor]) -> None:
    for value in hosts:
        if value.device.type == "cpu" and value.dim() and not _host_too(name):
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! "
                f"(when checking an argument of {name})"
            )


def _host_too(name: str) -> bool:
    """Operations that take a host tensor beside a device's: lengths, and the steps of optimizers."""
    return name.startswith(("_foreach", "index", "_index", "_nested")) or name in (
        "_pack_padded_sequence", "tensor_split", "_ctc_loss", "set_data", "_fused_sgd_",
    )  # fmt: skip


def _copy(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """copy_, _to_copy and their kin: the operations that cross."""
    if name == "copy_":
        target, source = args[0], args[1]
        return _copied(source, target, bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False)))
    if name.startswith("_copy_from"):
        return _copied(args[0], args[1], bool(args[2] if len(args) > 2 else False))
    source = args[0]
    device = kwargs.get("device")
    there = isinstance(source, SimTensor) if device is None else is_there(device)
    rest = {key: value for key, value in kwargs.items() if key not in ("device", "non_blocking", "pin_memory")}
    if device is not None and not there:
        rest["device"] = device
    result = func(_held(source), **rest)
    fresh = SimTensor(result) if there else result
    non_blocking = bool(kwargs.get("non_blocking", False))
    if fresh.device.type == "meta" or source.device.type == "meta":
        return fresh
    if not there and non_blocking and isinstance(source, SimTensor):
        PINS.pin(result)  # torch allocates pinned memory for device.to("cpu", non_blocking=True)
    _flag_copy(source, fresh, non_blocking)
    return fresh


def _copied(source: torch.Tensor, target: torch.Tensor, non_blocking: bool) -> torch.Tensor:
    _flag_copy(source, target, non_blocking)
    values, into = _held(source), _held(target)
    into.copy_(values)
    if TAPE.steps is not None:
        TAPE.steps.append(lambda: _again(torch.Tensor.copy_, (into, values), {}, into))
    return target


def _held(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.held if isinstance(tensor, SimTensor) else tensor


def _flag_copy(source: torch.Tensor, target: torch.Tensor, non_blocking: bool) -> None:
    host = source if isinstance(target, SimTensor) else target
    kind = copy_wait(source, target, host in PINS, non_blocking)
    if kind is not None and host not in LENT:
        flag(kind, "copy_")


class Dispatch(TorchDispatchMode):
    """Operations that create tensors on the device, where no SimTensor is among the arguments."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _others(tuple(types)) or _modes_below():
            # Wrappers, and the modes of tracers, which torch calls after this one, want the program's own tensors. What
            # they leave comes to execute by the tensors' class or by the backend's key.
            return func(*args, **(kwargs or {}))
        if isinstance(func, HigherOrderOperator):
            return func.py_kernels[_EAGER](*args, **(kwargs or {}))
        return execute(func, args, kwargs or {})


def _modes_below() -> bool:
    """Whether other modes wait for their turn; that of fake tensors, which knows no backend of ours, gets the values' own."""
    return torch._C._len_torch_dispatch_stack() > 0 and torch._C._get_dispatch_mode(_FAKE) is None
