"""The user's calls under the simulation: devices are translated, and what never reaches torch's dispatcher is served here."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from headway.syncs.calls import CALLS, label_of
from headway.syncs.findings import Kind
from headway.syncs.sim import backend, whole
from headway.syncs.sim.flags import SimCall, flag, report
from headway.syncs.sim.pins import PINS
from headway.syncs.sim.rules import LATE
from headway.syncs.sim.subclasses import move, without_shape
from headway.syncs.sim.tensor import SimTensor, is_there

Handler = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
BUILDERS: Final = frozenset({"tensor", "as_tensor", "asarray"})
SHOWS: Final = frozenset({"__repr__", "__format__", "__str__", "tolist"})
TAKE_DEVICE: Final = frozenset({"to", "new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"})


class Functions(TorchFunctionMode):
    """Each outermost call of the user's is one possible wait."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return func(*args, **(kwargs or {}))
        if func is torch.Tensor.backward or func is torch.autograd.backward:
            return func(*args, **(kwargs or {}))  # each wait inside is told by its own line
        call = SimCall(label_of(func), sys._getframe(1))
        CALLS.open.append(call)
        try:
            result = _serve(func, name, args, dict(kwargs or {}))
        finally:
            CALLS.open.pop()
        if call.kind is not None:
            if CALLS.open:
                flag(call.kind, call.label)
            else:
                report(call.kind, call.label)
        return result


def _serve(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    handler = _HANDLERS.get(name)
    if handler is not None:
        return handler(func, args, kwargs)
    pin = bool(kwargs.pop("pin_memory", False)) and not is_there(kwargs.get("device"))
    if kwargs.get("device") is not None and is_there(kwargs["device"]):
        kwargs["device"] = backend.device()
    if name in TAKE_DEVICE:
        first = args[:1]  # of new_full, the rest may be sizes: only ``to`` takes a device as a number
        args = first + tuple(_translated(value, name == "to") for value in args[1:])
    if name not in whole.OWN and any(isinstance(value, SimTensor) and value.whole for value in args):
        return whole.call(func, args, kwargs)
    result = func(*args, **kwargs)
    if name in LATE and isinstance(result, SimTensor) and result.requires_grad:
        _flag_later(result, LATE[name], name)
    return PINS.pin(result) if pin and isinstance(result, torch.Tensor) else result


def watched_engine(real: Callable[..., Any]) -> Callable[..., Any]:
    """Autograd's engine with the mode on: hooks, checkpoints and Functions of the program's run inside it."""

    @functools.wraps(real)
    def run(*args: Any, **kwargs: Any) -> Any:
        backend.ASTRAY.error = None
        try:
            with Functions():
                return real(*args, **kwargs)
        except SystemError:
            error, backend.ASTRAY.error = backend.ASTRAY.error, None
            if error is None:
                raise
            raise error from None

    return run


def overridden(arguments: Any) -> bool:
    """torch.overrides.has_torch_function, to which the pretence itself is no override: torch's fast paths are taken."""
    plain = (torch._C._disabled_torch_function_impl, torch.Tensor.__torch_function__)
    modes = torch.overrides._get_current_function_mode_stack()
    if any(not isinstance(mode, Functions) for mode in modes):
        return True
    kinds = {type(value) for value in arguments if isinstance(value, torch.Tensor)} - {torch.Tensor, torch.nn.Parameter}
    return any(getattr(kind, "__torch_function__", plain[0]) not in plain for kind in kinds)


def built(real: Callable[..., Any]) -> Callable[..., Any]:
    """torch.tensor and its kin inside calls of torch's, where the mode is off: hooks, Functions, Python parts of torch."""

    @functools.wraps(real)
    def build(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is None or not is_there(device):
            return real(*args, **kwargs)
        with Functions():
            return real(*args, **kwargs)

    return build


def _flag_later(result: torch.Tensor, kind: Kind, name: str) -> None:
    register: Any = result.register_hook
    register(lambda gradient: flag(kind, f"{name} backward"))


def _translated(value: Any, numbers: bool) -> Any:
    if isinstance(value, int) and not numbers:
        return value
    return backend.device() if is_there(value) else value


def _data_set(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``x.data = y``: the values change hands; ``x`` stays the same object, whichever device each is on."""
    if getattr(getattr(func, "__self__", None), "__name__", "") != "data" or not isinstance(args[1], torch.Tensor):
        return func(*args, **kwargs)
    target, value = args
    if without_shape(target) and (without_shape(value) or not value.numel()):
        move(target, isinstance(value, SimTensor))
        return None
    there = isinstance(target, SimTensor)
    if there and isinstance(value, SimTensor):
        func(target, value)
        target.held = value.held
        return None
    if there == isinstance(value, SimTensor):
        return func(*args, **kwargs)
    with torch.no_grad():
        fresh = value.detach().view_as(value)
    if isinstance(target, torch.nn.Parameter):
        fresh = torch.nn.Parameter(fresh, requires_grad=target.requires_grad)
    else:
        fresh.requires_grad_(target.requires_grad)
    gradient = target.grad
    _swap(target, fresh)
    if gradient is not None:  # it must live where its tensor does; Module.to then sets the gradient's own data
        target.grad = gradient.held if isinstance(gradient, SimTensor) else SimTensor(gradient)
    return None


def _swap(one: Any, other: Any) -> None:
    """What two names stand for changes places, though a graph may still hold the first: it keeps its old values."""
    try:
        torch.utils.swap_tensors(one, other)
    except RuntimeError:
        one.__class__, other.__class__ = other.__class__, one.__class__
        one.__dict__, other.__dict__ = other.__dict__, one.__dict__
        torch._C._swap_tensor_impl(one, other)


def _build(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch.tensor and its kin make the values on the host and copy them."""
    device = kwargs.pop("device", None)
    there = device is not None and is_there(device)
    names = {"data", "obj"} & set(kwargs)
    source = args[0] if args else kwargs[names.pop()] if names else None
    if isinstance(source, torch.Tensor) and (there or isinstance(source, SimTensor)):
        asked = {"dtype": kwargs["dtype"]} if kwargs.get("dtype") is not None else {}
        if device is not None:
            asked["device"] = backend.device() if there else device
        made = source.to(**asked) if asked else source
        if func.__name__ == "tensor" or kwargs.get("copy"):
            made = made.detach().clone() if made is source else made.detach()
        return made.requires_grad_() if kwargs.get("requires_grad") else made
    pin = kwargs.pop("pin_memory", False)
    if isinstance(source, (list, tuple)):
        numbers = tree_map_only(SimTensor, lambda value: value.item() if value.dim() == 0 else value.tolist(), source)
        args = (numbers, *args[1:]) if args else args
    gradient = kwargs.pop("requires_grad", False)
    made = func(*args, **kwargs) if there or device is None else func(*args, **kwargs, device=device)
    if there:
        if made.numel():
            flag(Kind.UPLOAD, "tensor")
        made = SimTensor(made)
    made = made.requires_grad_() if gradient else made
    return PINS.pin(made) if pin and not there else made


def _new_tensor(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    first = args[0]
    if not isinstance(first, SimTensor) and not is_there(kwargs.get("device")):
        return func(*args, **kwargs)
    return _build(torch.tensor, args[1:], {"dtype": first.dtype, "device": first.device} | kwargs)


def _cuda(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ARG001
    bools = [value for value in args[1:] if isinstance(value, bool)]
    return args[0].to(backend.device(), non_blocking=kwargs.get("non_blocking", bools[0] if bools else False))


def _shown(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    first = args[0]
    if not isinstance(first, SimTensor):
        return func(*args, **kwargs)
    if getattr(func, "__name__", "") in ("__repr__", "__str__"):
        return SimTensor.__repr__(first)
    if first.numel():
        flag(Kind.READ, getattr(func, "__name__", "read"))
    return func(first.held, *args[1:], **kwargs)


def _numpy(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if isinstance(args[0], SimTensor):
        if kwargs.get("force"):
            return args[0].detach().cpu().resolve_conj().resolve_neg().numpy()
        raise TypeError(
            "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."
        )
    return func(*args, **kwargs)


def _ctc_loss(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Lengths that the host has as a tensor: torch takes them as numbers, but not where tensors are of a subclass."""

    def numbers(value: Any) -> Any:
        return value.tolist() if type(value) is torch.Tensor else value

    kwargs = {key: numbers(value) if key.endswith("lengths") else value for key, value in kwargs.items()}
    return func(*args[:2], *map(numbers, args[2:4]), *args[4:], **kwargs)


def handed_over(real: Callable[..., Any]) -> Callable[..., Any]:
    """DLPack. Between tensors of the device no copy is made; what asks for the memory itself gets the CPU's."""

    @functools.wraps(real)
    def hand_over(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return SimTensor(tensor.held) if isinstance(tensor, SimTensor) else real(tensor, *args, **kwargs)

    return hand_over


def _capsule(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(args[0].held if isinstance(args[0], SimTensor) else args[0], *args[1:], **kwargs)


def _type(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    first = args[0]
    asked = args[1] if len(args) > 1 else kwargs.get("dtype")
    if asked is None and isinstance(first, SimTensor):
        return first.held.type().replace("torch.", "torch.cuda.")
    name = asked if isinstance(asked, str) else f"{getattr(asked, '__module__', '')}.{getattr(asked, '__name__', '')}"
    if isinstance(asked, torch.dtype) or not name.startswith("torch.") or not isinstance(first, torch.Tensor):
        return func(*args, **kwargs)
    dtype = getattr(torch, name.rpartition(".")[2]).dtype
    return first.to(device=backend.device() if ".cuda." in name else torch.device("cpu"), dtype=dtype)


def _compatible(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Whether ``a.data = b`` will do: between host and device it does on CUDA, and ``_data_set`` makes it so here."""
    return any(isinstance(value, SimTensor) for value in args) or func(*args, **kwargs)


def _place(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``torch.device(0)``: a number is the accelerator's."""
    if args and type(args[0]) is int and len(args) == 1:
        return torch.device("cuda", args[0])
    return func(*args, **kwargs)


def _get_item(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if isinstance(args[0], SimTensor):
        return func(args[0], _index(args[1]))
    return func(*args, **kwargs)


def _set_item(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, index, value = args
    if not isinstance(target, SimTensor):
        return func(*args, **kwargs)
    if isinstance(value, (bool, int, float, complex)):
        value = torch.scalar_tensor(value, dtype=target.dtype)  # torch makes it on the host for CUDA tensors alone
    return func(target, _index(index), value)


def _index(index: Any) -> Any:
    """Lists and arrays become index tensors of the device, which is an upload."""
    if isinstance(index, tuple):
        return tuple(_index_part(part) for part in index)
    return _index_part(index)


def _index_part(part: Any) -> Any:
    if isinstance(part, SimTensor) and not part.dim() and part.dtype not in (torch.bool, torch.uint8):
        return part.item()  # an index of one number is read by the host
    array = type(part).__module__ == "numpy" and getattr(part, "ndim", 0) > 0
    if not array and not isinstance(part, (list, range)):
        return part
    if isinstance(part, list) and any(not isinstance(each, (bool, int, list)) for each in part):
        if not all(isinstance(each, SimTensor) and not each.dim() for each in part):
            return part  # torch says what is wrong with it
        part = [each.item() for each in part]
    made = torch.as_tensor(part if array else list(part))
    made = made if made.numel() or array else made.long()
    if made.numel():
        flag(Kind.UPLOAD, "index")
    return SimTensor(made)


_HANDLERS: Final[dict[str, Handler]] = {
    **dict.fromkeys(BUILDERS, _build),
    **dict.fromkeys(SHOWS, _shown),
    **dict.fromkeys(whole.BUILDERS, whole.built),
    "__set__": _data_set,
    "new_tensor": _new_tensor,
    "cuda": _cuda,
    "numpy": _numpy,
    "__array__": _numpy,
    "ctc_loss": _ctc_loss,
    "__dlpack__": _capsule,
    "type": _type,
    "_has_compatible_shallow_copy_type": _compatible,
    "device": _place,
    "__getitem__": _get_item,
    "__setitem__": _set_item,
}
