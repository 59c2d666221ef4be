"""torch.cuda, torch.accelerator and their kin for the simulation: what programs ask of a device, and an answer to each."""

from __future__ import annotations

import collections
import contextlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
import torch.export
import torch.utils.dlpack
from torch._subclasses import fake_tensor
from torch.fx.experimental import proxy_tensor
from torch.nested._internal import ops as nested_ops
from torch.optim import optimizer
from torch.utils import _device, _foreach_utils

from headway.syncs.findings import Kind
from headway.syncs.sim import backend, calls, distributed, jagged, kernels, loading, subclasses, whole
from headway.syncs.sim.pins import PINS
from headway.syncs.sim.streams import Capture, Current, Report, SimEvent, SimGraph, SimStream
from headway.syncs.sim.tensor import COUNT, TAPE, SimTensor

MEMORY: Final = 2**36
"""Bytes that the pretended device claims to have, all free."""
MISSING: Final = (
    "CUDAPluggableAllocator",
    "change_current_allocator",
    "caching_allocator_alloc",
    "jiterator",
    "GreenContext",
)
"""Names of torch.cuda that have no meaning here."""
SETTINGS: Final = [
    "init", "reset_peak_memory_stats", "reset_accumulated_memory_stats", "reset_max_memory_allocated",
    "reset_max_memory_cached", "set_sync_debug_mode", "ipc_collect", "_lazy_init", "set_per_process_memory_fraction",
    "reset_peak_host_memory_stats", "reset_accumulated_host_memory_stats",
]  # fmt: skip
"""Names of torch.cuda that set something and say nothing."""
NUMBERS: Final = [
    "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_cached",
    "max_memory_cached", "get_sync_debug_mode", "utilization", "memory_usage", "temperature",
    "power_draw", "clock_rate", "device_memory_used",
]  # fmt: skip
"""Names of torch.cuda that answer 0."""
_TYPES: Final = {
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "LongTensor": torch.int64,
    "IntTensor": torch.int32,
    "ShortTensor": torch.int16,
    "CharTensor": torch.int8,
    "ByteTensor": torch.uint8,
    "BoolTensor": torch.bool,
}


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value  # a new function each time: Dynamo wants every name's to be its own


def _missing(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise backend.refuse(f"the simulation does not serve torch.cuda.{name}: run on a GPU, without --simulate")

    return refuse


class _Device(contextlib.AbstractContextManager[None]):
    """``torch.cuda.device`` and ``device_of``: there is one device."""

    def __init__(self, device: Any = None) -> None:
        self.idx = 0
        self.prev_idx = 0

    def __exit__(self, *error: object) -> None:
        """Nothing was changed."""


class _Properties(types.SimpleNamespace):
    """``torch.cuda.get_device_properties``: of the kind of card that the rules were measured on."""

    def __init__(self) -> None:
        super().__init__(
            name="simulated CUDA device", major=9, minor=0, total_memory=MEMORY, multi_processor_count=132, warp_size=32,
            max_threads_per_multi_processor=2048, max_threads_per_block=1024, regs_per_multiprocessor=65536,
            shared_memory_per_block=49152, shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472,
            L2_cache_size=50 * 2**20, is_integrated=0, is_multi_gpu_board=0, gcnArchName="", pci_bus_id=0,
            pci_device_id=0, pci_domain_id=0, uuid="00000000-0000-0000-0000-000000000000",
        )  # fmt: skip


class _GeneratorType(type(torch.Generator)):  # type: ignore[misc]
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, _REAL_GENERATOR)


_REAL_GENERATOR: Final = torch.Generator


class SimGenerator(torch.Generator, metaclass=_GeneratorType):
    """``torch.Generator("cuda")``: the CPU's numbers, told as the device's."""

    asked: torch.device

    def __new__(cls, device: Any = "cpu") -> Any:
        if torch.device(device).type != "cuda":
            return _REAL_GENERATOR(device=device)
        made: Any = super().__new__(cls, device="cpu")  # type: ignore[call-arg]
        made.asked = backend.visible()
        return made

    def __init__(self, device: Any = "cpu") -> None:
        """All was done when it was made."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.asked


class _LegacyType(type):
    dtype: torch.dtype

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, SimTensor) and value.dtype == cls.dtype

    def __call__(cls, *args: Any) -> Any:
        if args and all(isinstance(value, int) for value in args):
            return torch.empty(args, dtype=cls.dtype, device=backend.device())
        return torch.tensor(args[0] if args else [], dtype=cls.dtype, device=backend.device())


def _set_seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed) % 2**63)


def _graphed(report: Report) -> Callable[..., Any]:
    """torch.cuda.make_graphed_callables: what it would replay runs as it is; before it captures, it waits."""

    def make_graphed_callables(callables: Any, *_: Any, **__: Any) -> Any:
        report(Kind.DEVICE, "torch.cuda.make_graphed_callables")
        return callables

    return make_graphed_callables


@contextlib.contextmanager
def _nothing(*_: Any, **__: Any) -> Iterator[None]:
    yield


def _empty_cache(report: Report) -> Callable[[], None]:
    def empty_cache() -> None:
        if COUNT.made:  # what the allocator gives back to the driver, the driver waits for
            report(Kind.MEMORY, "torch.cuda.empty_cache")

    return empty_cache


def _cuda(report: Report) -> dict[str, Any]:
    current = Current()
    event = type("Event", (SimEvent,), {"report": staticmethod(report)})
    kinds: dict[str, Any] = {"report": staticmethod(report), "event": event, "current": current}
    stream_class = type("Stream", (SimStream,), kinds)
    main = stream_class()

    @contextlib.contextmanager
    def stream(chosen: SimStream | None) -> Iterator[None]:
        with chosen or main:
            yield

    def set_stream(chosen: SimStream) -> None:
        current.stack[:] = [chosen]

    def now(device: Any = None) -> SimStream:  # noqa: ARG001 - as torch's
        return current.stack[-1] if current.stack else main

    def synchronize(device: Any = None) -> None:  # noqa: ARG001
        report(Kind.DEVICE, "torch.cuda.synchronize")

    return {
        **{name: _constant(None) for name in SETTINGS},
        **{name: _constant(0) for name in NUMBERS},
        **{name: _missing(name) for name in MISSING},
        **{name: _LegacyType(name, (), {"dtype": dtype, "__module__": "torch.cuda"}) for name, dtype in _TYPES.items()},
        "Event": event,
        "Stream": stream_class,
        "ExternalStream": stream_class,
        "StreamContext": stream,
        "stream": stream,
        "set_stream": set_stream,
        "current_stream": now,
        "default_stream": lambda device=None: main,
        "synchronize": synchronize,
        "empty_cache": _empty_cache(report),
        "CUDAGraph": SimGraph,
        "graph": type("graph", (Capture,), {"report": staticmethod(report)}),
        "graph_pool_handle": _constant((0, 0)),
        "make_graphed_callables": _graphed(report),
        "MemPool": _Device,
        "use_mem_pool": _nothing,
        "device": _Device,
        "device_of": _Device,
        "is_available": _constant(True),
        "is_initialized": _constant(True),
        "is_bf16_supported": _constant(True),
        "is_tf32_supported": _constant(True),
        "is_current_stream_capturing": lambda: TAPE.steps is not None,
        "can_device_access_peer": _constant(False),
        "device_count": lambda: backend.cards(),
        "current_device": lambda: backend.STATE.index,
        "set_device": lambda device: backend.use(device),
        "get_device_name": _constant("simulated CUDA device"),
        "get_device_capability": _constant((9, 0)),
        "get_device_properties": lambda device=None: _Properties(),
        "get_arch_list": _constant(["sm_90"]),
        "get_allocator_backend": _constant("native"),
        "mem_get_info": _constant((MEMORY, MEMORY)),
        "memory_stats": lambda device=None: collections.defaultdict(int),
        "memory_summary": _constant("the simulated device keeps no account of memory"),
        "memory_snapshot": lambda *_: [],
        "host_memory_stats": lambda: collections.defaultdict(int),
        "list_gpu_processes": _constant("no processes are running"),
        "manual_seed": _set_seed,
        "manual_seed_all": _constant(None),  # torch.manual_seed calls it too, and has seeded the CPU's generator itself
        "seed": _constant(None),
        "seed_all": _constant(None),
        "initial_seed": lambda: torch.initial_seed(),
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state.cpu()),
        "set_rng_state_all": lambda states: torch.set_rng_state(states[0].cpu()),
        "default_generators": (torch.default_generator,),
        "cudart": lambda: types.SimpleNamespace(cudaProfilerStart=_constant(0), cudaProfilerStop=_constant(0)),
    }


def _accelerator(report: Report, cuda: dict[str, Any]) -> dict[str, Any]:
    same = ("device_count", "current_stream", "set_stream", "empty_cache", "is_available", "memory_stats")
    return {
        **{name: cuda[name] for name in same},
        **{name: _constant(0) for name in NUMBERS},
        "current_accelerator": _constant(torch.device("cuda")),
        "current_device_index": lambda: backend.STATE.index,
        "current_device_idx": lambda: backend.STATE.index,
        "set_device_index": lambda device: backend.use(device),
        "set_device_idx": lambda device: backend.use(device),
        "device_index": _Device,
        "get_device_capability": _constant({}),
        "get_memory_info": _constant((MEMORY, MEMORY)),
        "reset_peak_memory_stats": _constant(None),
        "reset_accumulated_memory_stats": _constant(None),
        "synchronize": lambda device=None: report(Kind.DEVICE, "torch.accelerator.synchronize"),
    }


_HISTORY: Final = {
    "_record_memory_history": _constant(None),
    "_dump_snapshot": _constant(None),
    "_snapshot": _constant({"segments": [], "device_traces": []}),
}
"""Names of torch.cuda.memory that keep an account."""


def _nvtx() -> dict[str, Any]:
    names = ("range_push", "range_pop", "range_start", "range_end", "mark")
    return {**{name: _constant(0) for name in names}, "range": _nothing}


def _pin_memory(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:  # noqa: ARG001
    if isinstance(tensor, SimTensor):
        raise RuntimeError(
            f"cannot pin '{tensor.held.type().replace('torch.', 'torch.cuda.')}' only dense CPU tensors can be pinned"
        )
    return tensor if tensor in PINS else PINS.pin(tensor.clone(memory_format=torch.contiguous_format))


def _is_pinned(tensor: torch.Tensor, device: Any = None) -> bool:  # noqa: ARG001
    return not isinstance(tensor, SimTensor) and tensor.device.type == "cpu" and tensor in PINS


def _record_stream(original: Callable[..., Any]) -> Callable[..., Any]:
    def record_stream(tensor: torch.Tensor, stream: Any) -> None:
        if not isinstance(stream, SimStream):
            original(tensor, stream)

    return record_stream


def _mirrored(original: Callable[..., Any]) -> Callable[..., Any]:
    """torch.set_autocast_enabled and its kin, for the backend too when they are told of cuda."""

    def both(*args: Any) -> Any:
        if args and args[0] == "cuda":
            original(backend.NAME, *args[1:])
        return original(*args)

    return both


def _uncompiled(model: Any = None, **_: Any) -> Any:
    """torch.compile without compiling."""
    return (lambda function: function) if model is None else model


def _as_it_is(real: Callable[..., Any]) -> Callable[..., Any]:
    """torch.jit.script, trace and freeze for programs, not for torch itself: TorchScript cannot run a backend in Python."""

    def plain(function: Any = None, *args: Any, **options: Any) -> Any:
        if str(sys._getframe(1).f_globals.get("__name__", "")).startswith("torch."):
            return real(function, *args, **options)
        return function

    return plain


def _default_type(real: Callable[..., Any]) -> Callable[..., Any]:
    """torch.set_default_tensor_type, which takes classes of torch.cuda too."""

    def set_default_tensor_type(kind: Any) -> None:
        there = isinstance(kind, _LegacyType) or "cuda" in str(kind)
        torch.set_default_device("cuda" if there else None)
        if there:
            torch.set_default_dtype(_TYPES[(kind if isinstance(kind, str) else kind.__name__).rpartition(".")[2]])
        else:
            real(kind)

    return set_default_tensor_type


class _Exported:
    """What torch.export.export gives: the module itself, to be called; its graph cannot be had."""

    def __init__(self, module: Any, *_: Any, **__: Any) -> None:
        self._module = module

    def module(self, *_: Any, **__: Any) -> Any:
        return self._module

    def __getattr__(self, name: str) -> Any:
        raise backend.refuse(
            f"the simulation does not serve torch.export's graphs ({name}): run on a GPU, without --simulate"
        )


def _on_torch(cuda: dict[str, Any]) -> dict[str, Any]:
    return {
        "compile": _uncompiled,
        "load": loading.load,
        "from_dlpack": calls.handed_over(vars(torch)["from_dlpack"]),
        **{name: calls.built(getattr(torch, name)) for name in calls.BUILDERS},
        "Generator": SimGenerator,
        "Stream": cuda["Stream"],
        "Event": cuda["Event"],
        "set_default_tensor_type": _default_type(torch.set_default_tensor_type),
        "set_autocast_enabled": _mirrored(torch.set_autocast_enabled),
        "set_autocast_dtype": _mirrored(torch.set_autocast_dtype),
    }


@contextlib.contextmanager
def fake_cuda(report: Report) -> Iterator[None]:
    """Replace names of torch and torch.cuda, process-wide, and put them back."""
    _device._device_constructors()  # which `with torch.device(...)` concerns, noted once: torch's own, not what stands for them
    cuda = _cuda(report)
    places: list[tuple[Any, dict[str, Any]]] = [
        (torch.cuda, cuda),
        (torch.accelerator, _accelerator(report, cuda)),
        (torch.cuda.nvtx, _nvtx()),
        (torch.cuda.memory, _HISTORY),
        *((module, cuda) for module in (torch.cuda.memory, torch.cuda.random, torch.cuda.streams, torch.cuda.graphs)),
        (torch.cuda.profiler, {"start": _constant(None), "stop": _constant(None)}),
        (torch, _on_torch(cuda)),
        (torch.jit, {name: _as_it_is(getattr(torch.jit, name)) for name in ("script", "trace", "freeze")}),
        (torch.export, {"export": _Exported, "export_for_training": _Exported}),
        (
            torch.utils.dlpack,
            {name: calls.handed_over(getattr(torch.utils.dlpack, name)) for name in ("from_dlpack", "to_dlpack")},
        ),
        (nested_ops, {"jagged_scaled_dot_product_attention": jagged.attention}),
        (torch.nested, {"nested_tensor": whole.nested(torch.nested.nested_tensor)}),
        (torch.overrides, {"has_torch_function": calls.overridden}),
        # What tracers take as it is; others' tensors they would take apart, and note their values as constants.
        (proxy_tensor, {"HANDLED_TYPES": (*proxy_tensor.HANDLED_TYPES, SimTensor)}),
        (fake_tensor, {"init_gpu_context": _constant(None)}),  # below all modes it would ask for a true card
        (torch.autograd, {"_engine_run_backward": calls.watched_engine(torch.autograd._engine_run_backward)}),  # type: ignore[attr-defined]
        # Builds for CUDA would flatten the weights of recurrent networks by an operation that only cuDNN has; it never waits.
        (torch.backends.cudnn, {"version": _constant(91900), "is_acceptable": _constant(False)}),
        *distributed.places(report),
    ]
    with contextlib.ExitStack() as undo:
        for owner, names in places:
            for name, value in names.items():
                if hasattr(owner, name):
                    undo.callback(setattr, owner, name, getattr(owner, name))
                    setattr(owner, name, value)
        # Optimizers take several tensors at once where all are plain, as a card's are.
        for module in (optimizer, _foreach_utils):
            plain: Any = module._foreach_supported_types
            plain.append(SimTensor)
            undo.callback(plain.remove, SimTensor)
        tensor: Any = torch.Tensor
        methods = {
            "pin_memory": _pin_memory,
            "is_pinned": _is_pinned,
            "record_stream": _record_stream(tensor.record_stream),
        }
        for name, method in methods.items():
            setattr(tensor, name, method)
            undo.callback(delattr, tensor, name)
        undo.enter_context(subclasses.served())
        undo.enter_context(kernels.served(report))
        yield
