"""A CUDA GPU as a device."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from headway.device.base import DeviceError, Event, Graph, Stream

_SET_CAPTURE_DEPENDENCIES = 1


class CudaStream:
    """A CUDA stream of our own: graphs cannot be captured on the default one."""

    def __init__(self, device: torch.device) -> None:
        self.raw = torch.cuda.Stream(device)

    def wait_event(self, event: Event) -> None:
        """Queue a wait; the host goes on."""
        assert isinstance(event, CudaEvent)
        self.raw.wait_event(event.raw)

    def active(self) -> AbstractContextManager[object]:
        """Operations go to this stream. ``torch.cuda.stream`` does in Python what the stream itself does in C++."""
        stream_context: AbstractContextManager[object] = self.raw
        return stream_context


class CudaEvent:
    """A CUDA event. Waiting on it spins: going to sleep and waking up cost 80 to 180 us of every step (bench/host_loop.py).

    Only a busy engine waits for events, on the thread that launches; an idle one waits for messages, asleep.
    """

    def __init__(self, timing: bool) -> None:
        self.raw = torch.cuda.Event(enable_timing=timing, blocking=False)

    def record(self, stream: Stream) -> None:
        """Mark the work queued on ``stream`` so far."""
        assert isinstance(stream, CudaStream)
        self.raw.record(stream.raw)

    def query(self) -> bool:
        """Whether it has passed."""
        return bool(self.raw.query())

    def synchronize(self) -> None:
        """Block until it has passed."""
        self.raw.synchronize()

    def elapsed_us(self, later: Event) -> float:
        """Microseconds of device time between two timing events."""
        assert isinstance(later, CudaEvent)
        return float(self.raw.elapsed_time(later.raw)) * 1e3


class CudaGraph:
    """A captured CUDA graph."""

    def __init__(self, raw: torch.cuda.CUDAGraph) -> None:
        self._raw = raw

    def replay(self) -> None:
        """Launch it on the current stream."""
        self._raw.replay()

    def embed(self, stream: torch.cuda.Stream) -> None:
        """Add its work to the graph that is being captured on ``stream``, as torch cannot. It must have been kept."""
        driver, queue = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(stream.cuda_stream)
        status, ident, num_before = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_size_t()
        graph, before, node = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        found = driver.cuStreamGetCaptureInfo_v2(
            queue, *(ctypes.byref(each) for each in (status, ident, graph, before, num_before))
        )
        mine = ctypes.c_void_p(self._raw.raw_cuda_graph())
        found = found or driver.cuGraphAddChildGraphNode(ctypes.byref(node), graph, before, num_before, mine)
        found = found or driver.cuStreamUpdateCaptureDependencies(
            queue, ctypes.byref(node), ctypes.c_size_t(1), ctypes.c_uint(_SET_CAPTURE_DEPENDENCIES)
        )
        if found:
            raise DeviceError(f"a graph cannot be made part of another: CUDA error {found}")


class CudaDevice:
    """One GPU. See ``device.base.Device``.

    Args:
        torch_device: "cuda" or "cuda:N".
    """

    asynchronous = True
    captures_graphs = True
    compiles_kernels = True

    def __init__(self, torch_device: torch.device) -> None:
        index = torch_device.index if torch_device.index is not None else torch.cuda.current_device()
        self.torch_device = torch.device("cuda", index)
        self.main: Stream = CudaStream(self.torch_device)
        self.copies: Stream = CudaStream(self.torch_device)
        self.clock: Stream | None = CudaStream(self.torch_device)
        self.notes: list[str] = []
        self._graph_pool = torch.cuda.graph_pool_handle()
        self.pins_memory = self._can_pin()

    def _can_pin(self) -> bool:
        """WSL, for one, cannot: copies then block, which is slower but right."""
        try:
            torch.empty(1, pin_memory=True)
        except RuntimeError as error:
            self.notes.append(f"no pinned host memory ({str(error).splitlines()[0]}): host-device copies will block")
            return False
        return True

    def new_event(self, timing: bool = False) -> Event:
        """A CUDA event."""
        return CudaEvent(timing)

    def new_stream(self) -> Stream:
        """A CUDA stream."""
        return CudaStream(self.torch_device)

    def joined(self) -> AbstractContextManager[object]:
        """Both the card and the stream are a thread's own. Not ``main.active()``, which remembers one thread's stream."""
        assert isinstance(self.main, CudaStream)
        context: AbstractContextManager[object] = torch.cuda.stream(self.main.raw)
        return context

    def host_ints(self, num_ints: int) -> torch.Tensor:
        """Pinned memory where possible."""
        return torch.zeros(num_ints, dtype=torch.int32, pin_memory=self.pins_memory)

    def capture(self, body: Callable[[], object], *, first: Graph | None = None, reused: bool = False) -> Graph:
        """Capture on ``main``. All graphs share one memory pool, since only one runs at a time."""
        assert isinstance(self.main, CudaStream)
        raw = torch.cuda.CUDAGraph(keep_graph=reused)
        with torch.cuda.graph(raw, pool=self._graph_pool, stream=self.main.raw, capture_error_mode="thread_local"):
            if first is not None:
                assert isinstance(first, CudaGraph)
                first.embed(self.main.raw)
            body()
        if reused:
            raw.instantiate()
        return CudaGraph(raw)

    def memory_bytes(self) -> tuple[int, int]:
        """(free, total) bytes of the card."""
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return free, total

    def peak_bytes(self) -> int:
        """Peak of torch's allocator."""
        return int(torch.cuda.max_memory_allocated(self.torch_device))

    def reset_peak(self) -> None:
        """Start a new peak measurement."""
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def wait_idle(self) -> None:
        """Block until the card is idle."""
        torch.cuda.synchronize(self.torch_device)

    def close(self) -> None:
        """Nothing to undo."""
