"""What happens when the program calls an operation: views at once, everything else later, host reads never."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
from torch._C import DisableTorchFunction, DispatchKey, _DisableTorchDispatch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from headway.device.sim.errors import here
from headway.device.sim.memory import Access, Handle, HostBuffer, Memory, access
from headway.device.sim.shapes import OutputShapes, Spec
from headway.device.sim.tensor import PinnedTensor, SimTensor
from headway.device.sim.timeline import Task, Timeline
from headway.device.sim.transfers import Transfers
from headway.kernels.registry import OPS
from headway.syncs.sim.rules import recorded

_ALLOCATE_ONLY = frozenset({"empty", "empty_strided", "empty_like", "empty_permuted", "new_empty", "new_empty_strided"})
_VIEWS_IN_DISGUISE = frozenset({"_unsafe_view", "lift_fresh", "_reshape_alias"})
_WHOLE = frozenset({"linear", "matmul", "einsum"})
"""Composites that are run as one operation: they make no views, and decomposing them only costs time."""
_READS = frozenset({"_local_scalar_dense", "item", "is_nonzero", "allclose", "equal", "isin"})
"""Beside what a card's record says of each overload (headway/syncs/sim/rules.py, which the detector asks too)."""
_BUILDERS = (torch.tensor, torch.as_tensor, torch.asarray)

RESULTS_AT = {"slot_advance": 13, "grammar_advance": 18}
"""Where these operations have the ring of results among their arguments."""

Observer = Callable[[tuple[Any, ...]], Callable[[], None] | None]
"""Called with an operation's CPU arguments right before it runs; what it returns is called right after."""


class Operations(Transfers):
    """The dispatcher of one device.

    Args:
        observers: by operation name ("step_unpack"); they see every execution.
    """

    def __init__(self, timeline: Timeline, observers: dict[str, list[Observer]]) -> None:
        self.timeline = timeline
        self.observers = observers
        self.mode = SimMode(self)
        self.pinned_type = cast(type[PinnedTensor], type("PinnedTensor", (PinnedTensor,), {"operations": self}))
        self.buffers: dict[int, HostBuffer] = {}
        self._shapes = OutputShapes()

    # -- the way in ------------------------------------------------------------------------------------------------

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One operation on simulated tensors, or one that makes them."""
        name = func.overloadpacket.__name__
        if name in ("copy_", "_to_copy") and (done := self.transfer(name, args, kwargs)) is not None:
            return done
        self._refuse_host_reads(func, name, args, kwargs)
        if func.namespace == "aten" and name not in _WHOLE:
            # First: reshape, flatten, to(dtype)... are views only when they can be.
            if _is_composite(func):
                with self.mode:
                    return func.decompose(*args, **kwargs)
            if func.is_view or name in _VIEWS_IN_DISGUISE:
                return self._view(func, args, kwargs)
        return self._queue(func, name, args, kwargs)

    def _refuse_host_reads(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        refuse = self.timeline.refuse
        if name in ("index", "index_put_", "_index_put_impl_", "index_put"):
            for index in args[1]:
                if isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8):
                    refuse(f"indexing with a boolean mask waits for its number of ones at {here()}")
                if isinstance(index, torch.Tensor) and not isinstance(index, SimTensor):
                    refuse(f"indexing with a list or a host tensor uploads it and waits at {here()}")
            if len(args) > 2 and not isinstance(args[2], SimTensor):
                refuse(f"index assignment of a host value uploads it and waits at {here()}")
        elif name in _READS or recorded(func, args, kwargs) is not None:
            refuse(f"{name} needs device values on the host at {here()}")

    # -- views -----------------------------------------------------------------------------------------------------

    def _view(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        base = next(each for each in args if isinstance(each, SimTensor))
        with torch.inference_mode(), _DisableTorchDispatch():
            made = func(*_map(args, _data), **kwargs)
        if isinstance(made, list | tuple):
            return type(made)(self.wrap(each, base.handle) for each in made)
        return self.wrap(made, base.handle)

    def wrap(self, data: torch.Tensor, handle: Handle) -> SimTensor:
        """A tensor over ``data``, a view of the handle's memory."""
        return SimTensor(data, handle, self)

    # -- queued operations -----------------------------------------------------------------------------------------

    def _queue(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        written = _written(func, args, kwargs)
        args, kwargs = self._freeze(args), {key: self._freeze((value,))[0] for key, value in kwargs.items()}
        specs, kind = self._shapes.of(func, args, kwargs)
        made = [self.allocate(spec) for spec in specs]
        if name not in _ALLOCATE_ONLY:
            if "device" in kwargs:
                kwargs = kwargs | {"device": torch.device("cpu")}
            run = self._body(func, name, _map(args, _data), {k: _data(v) for k, v in kwargs.items()}, made)
            accesses = _accesses(args, kwargs, written) + [_access(each, True) for each in made]
            self.timeline.enqueue(Task(name, run, _narrowed(name, args, accesses), here()))
            self.timeline.progress()
        if not kind and not made:
            return written[0] if func._schema.returns else None
        return made[0] if kind is torch.Tensor else kind(made)

    def _body(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], made: list[SimTensor]
    ) -> Callable[[], None]:
        outputs = [each.data_on_device for each in made]
        ours = func.namespace == "headway"
        function = OPS[name].reference if ours else func
        observers = self.observers.get(name, []) if ours else []

        def run() -> None:
            after = [done for observer in observers if (done := observer(args)) is not None]
            results = function(*args, **kwargs)
            for output, result in zip(outputs, _flat(results), strict=False):
                output.copy_(result)
            for done in after:
                done()

        return run

    def allocate(self, spec: Spec) -> SimTensor:
        """New, poisoned device memory."""
        size, stride, dtype = spec
        numel = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if all(size) else 0
        timeline = self.timeline
        with torch.inference_mode(False), _DisableTorchDispatch():
            flat = torch.empty(numel, dtype=dtype)
            memory = Memory(flat, timeline.current.name, here())
            memory.poison(timeline.poison_int)
            data = flat.as_strided(size, stride)
        if timeline.capturing is not None:
            memory.graph = timeline.capturing
            timeline.capturing.memories.append(memory)
        return self.wrap(data, Handle(memory, timeline))

    def _freeze(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Host scalars are read when the operation is called; other host tensors have no business here."""

        def freeze(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or isinstance(value, SimTensor):
                return value
            if value.device.type == "meta":
                self.timeline.refuse(f"a tensor built from a list on the device is used at {here()}")
            if value.dim():
                raise RuntimeError(f"an operation on device and host tensors at {here()}")
            with _disable_current_modes():
                return value.clone()

        return _map(args, freeze)

    def build(self, function: Any, args: Any, kwargs: dict[str, Any], what: str) -> torch.Tensor:
        """torch.tensor and its like: made on the host, then uploaded, which waits."""
        if self.timeline.strict:
            self.timeline.refuse(f"{what} on the device uploads from pageable memory and waits at {here()}")
        with _disable_current_modes(), DisableTorchFunction():
            made = function(*args, **(kwargs | {"device": "cpu"}))
        return cast(torch.Tensor, self.transfer("_to_copy", (made,), {"device": torch.device("meta")}))


class SimMode(TorchDispatchMode):
    """Sends every operation that touches the simulated device to it. Entered for as long as the device exists."""

    def __init__(self, operations: Operations) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = operations
        self.guard = BuildGuard(operations)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch would wrap what follows so that no compiler sees it. None does, and the wrapper costs every operation."""
        return False

    def hand_over(self, operations: Operations) -> None:
        """Another device is in use from now on."""
        self.operations = self.guard.operations = operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if any(issubclass(each, SimTensor) for each in types) or (device is not None and device.type == "meta"):
            return self.operations.call(func, args, kwargs)
        return func(*args, **kwargs)


class BuildGuard(TorchFunctionMode):
    """torch.tensor(list, device=...) reaches no dispatcher on meta: it is seen here."""

    def __init__(self, operations: Operations) -> None:
        super().__init__()
        self.operations = operations

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _BUILDERS and kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "meta":
            return self.operations.build(func, args, kwargs, f"torch.{func.__name__}(...)")
        return func(*args, **kwargs)


def _map(value: Any, function: Callable[[Any], Any]) -> Any:
    if type(value) is tuple or type(value) is list:
        return type(value)(
            [_map(each, function) if type(each) is list or type(each) is tuple else function(each) for each in value]
        )
    return function(value)


def _flat(results: Any) -> tuple[Any, ...]:
    if results is None:
        return ()
    return tuple(results) if isinstance(results, list | tuple) else (results,)


def _data(value: Any) -> Any:
    return value.data_on_device if isinstance(value, SimTensor) else value


def _access(tensor: SimTensor, is_write: bool) -> Access:
    if tensor.span is None:
        _, low, high, _ = access(tensor.handle.memory, tensor.data_on_device, False)
        tensor.span = low, high
    return Access(tensor.handle.memory, *tensor.span, is_write)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[SimTensor]:
    """The arguments that the operation writes to."""
    found = []
    for position, name in _written_arguments(func):
        value = args[position] if position < len(args) else kwargs.get(name)
        found += [each for each in _flat(value) if isinstance(each, SimTensor)]
    return found


@cache
def _written_arguments(func: Any) -> list[tuple[int, str]]:
    """Position and name."""
    arguments = enumerate(func._schema.arguments)
    return [(i, each.name) for i, each in arguments if each.alias_info is not None and each.alias_info.is_write]


@cache
def _is_composite(func: Any) -> bool:
    return bool(func.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd))


def _accesses(args: tuple[Any, ...], kwargs: dict[str, Any], written: list[SimTensor]) -> list[Access]:
    changed = {id(each) for each in written}
    found: list[Access] = []

    def visit(value: Any) -> None:
        if isinstance(value, SimTensor):
            found.append(_access(value, id(value) in changed))

    _map((*args, *kwargs.values()), visit)
    return found


def _narrowed(name: str, args: tuple[Any, ...], accesses: list[Access]) -> list[Access] | Callable[[], list[Access]]:
    """Some are given the whole ring of results, and touch the entry that packed[5] names."""
    if name not in RESULTS_AT:
        return accesses
    ring = args[RESULTS_AT[name]]
    packed, results = args[0].data_on_device, ring.data_on_device
    whole, memory = _access(ring, True), ring.handle.memory

    def narrow() -> list[Access]:
        entry = results[packed[5].clamp(0, len(results) - 1)]
        return [access(memory, entry, True) if each == whole else each for each in accesses]

    return narrow
