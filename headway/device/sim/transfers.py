"""Copies between host and device: which ones do not block, and when they read and write the host's memory."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from headway.device.sim.clocks import merge
from headway.device.sim.errors import RaceError, here
from headway.device.sim.memory import Access, HostBuffer, Memory, PendingRead, access, fill_with_poison
from headway.device.sim.shapes import Spec
from headway.device.sim.tensor import PinnedTensor, SimTensor
from headway.device.sim.timeline import HOST, Mark, Task, Timeline


class Transfers:
    """The part of the dispatcher that moves data between host and device.

    Attributes:
        buffers: page-locked buffers by address.
        pinned_type: class of their tensors.
    """

    timeline: Timeline
    buffers: dict[int, HostBuffer]
    pinned_type: type[PinnedTensor]

    def allocate(self, spec: Spec) -> SimTensor:
        """New device memory."""
        raise NotImplementedError

    def pinned(self, num_ints: int) -> torch.Tensor:
        """A page-locked int32 buffer."""
        with torch.inference_mode(False), _disable_current_modes():
            flat = torch.zeros(num_ints, dtype=torch.int32)
            self.buffers[flat.data_ptr()] = HostBuffer(Memory(flat, HOST, here(), is_host=True))
            return flat.as_subclass(self.pinned_type)

    def buffer_of(self, tensor: torch.Tensor) -> HostBuffer | None:
        """The page-locked buffer that a host tensor is a view of."""
        return self.buffers.get(tensor.untyped_storage().data_ptr())

    def host_access(self, tensor: torch.Tensor) -> None:
        """The host reads page-locked memory. Raises RaceError unless it has waited for the copies into it."""
        buffer = self.buffer_of(tensor)
        if buffer is not None:
            place = here()
            host = self.timeline.host
            each = access(buffer.memory, tensor, False)
            self.timeline.check_host(each, place)
            host[HOST] += 1
            buffer.memory.log.add(HOST, host[HOST], place, each.low, each.high, False)

    def transfer(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
        """Carry out ``copy_`` or ``_to_copy`` when it crosses between host and device; None when it does not."""
        if name == "_to_copy":
            source, device = args[0], kwargs.get("device")
            to_device = (device is None and isinstance(source, SimTensor)) or (device and device.type == "meta")
            if isinstance(source, SimTensor):
                if not to_device:
                    self.timeline.refuse(f"a copy from the device to the host waits at {here()}; use Readback")
                return None
            dtype = kwargs.get("dtype") or source.dtype
            made = self.allocate((tuple(source.shape), torch.empty(source.shape, device="cpu").stride(), dtype))
            self._upload(made, source, bool(kwargs.get("non_blocking")))
            return made
        target, source = args[0], args[1]
        non_blocking = bool(args[2]) if len(args) > 2 else bool(kwargs.get("non_blocking"))
        if isinstance(target, SimTensor) and not isinstance(source, SimTensor):
            if source.device.type == "meta":
                self.timeline.refuse(f"a tensor built from a list on the device is used at {here()}")
            self._upload(target, source, non_blocking)
            return target
        if not isinstance(target, SimTensor):
            self._download(target, source, non_blocking)
            return target
        return None

    def _upload(self, target: SimTensor, source: torch.Tensor, non_blocking: bool) -> None:
        buffer = self.buffer_of(source)
        direct = source.dtype == target.dtype and source.shape == target.shape and source.is_contiguous()
        asynchronous = buffer is not None and non_blocking and direct and target.is_contiguous()
        place, timeline, data = here(), self.timeline, target.data_on_device
        if not asynchronous and timeline.strict:
            why = (
                "pageable" if buffer is None else "not dense or of another type" if not direct else "non_blocking=False"
            )
            timeline.refuse(f"an upload that blocks ({why}) at {place}")
        with torch.inference_mode(False), _disable_current_modes():
            plain = source.detach().as_subclass(torch.Tensor)
            snapshot = plain.clone()
        accesses = [access(target.handle.memory, data, True)]
        task = Task("upload", lambda: None, accesses, place)
        if buffer is not None:
            self._refuse_rewrites(buffer, f"at {place} the buffer is sent again")
            accesses.append(access(buffer.memory, plain, False))
        pending: PendingRead | None = None

        def run() -> None:
            if pending is not None and pending.changed():
                raise RaceError(f"the host rewrote a staging buffer while the upload queued at {place} was pending")
            data.copy_(plain if buffer is not None else snapshot)

        task.run = run
        timeline.enqueue(task)
        if buffer is not None and timeline.capturing is None:
            pending = PendingRead(timeline.current.name, task.seq, plain, snapshot, place)
            buffer.reads.append(pending)
        if not asynchronous:
            self._wait_for_current()
        timeline.progress()

    def _refuse_rewrites(self, buffer: HostBuffer, when: str) -> None:
        """Uploads that the host cannot know to be over must find the buffer as it was."""
        host, open_reads = self.timeline.host, []
        for read in buffer.reads:
            if host.get(read.stream, 0) >= read.seq:
                continue
            if read.changed():
                self.timeline.refuse(
                    f"the host rewrote a staging buffer that the upload\n  queued at {read.place}\nmay still be reading: "
                    f"its event was not asked\n  {when}",
                    RaceError,
                )
            open_reads.append(read)
        buffer.reads = open_reads

    def check_buffers(self) -> None:
        """Raise RaceError when the host has rewritten a buffer without asking for the fence."""
        for buffer in self.buffers.values():
            self._refuse_rewrites(buffer, "and nothing waited for it until now")

    def _download(self, target: torch.Tensor, source: SimTensor, non_blocking: bool) -> None:
        buffer, timeline, place = self.buffer_of(target), self.timeline, here()
        direct = source.dtype == target.dtype and source.shape == target.shape and source.is_contiguous()
        if buffer is None or not (non_blocking and direct and target.is_contiguous()):
            timeline.refuse(f"a copy from the device to the host waits at {place}; use Readback")
        assert buffer is not None
        with torch.inference_mode(False), _disable_current_modes():
            plain = target.detach().as_subclass(torch.Tensor)
            self._refuse_rewrites(buffer, f"at {place} a readback is to overwrite it")
            written = access(buffer.memory, plain, True)
            timeline.check_host(written, place)
            fill_with_poison(plain, timeline.poison_int)
        data = source.data_on_device

        def run() -> None:
            plain.copy_(data)

        accesses: list[Access] = [written, access(source.handle.memory, data, False)]
        timeline.enqueue(Task("readback", run, accesses, place))
        timeline.progress()

    def _wait_for_current(self) -> None:
        """A blocking copy: the host waits for the current stream."""
        timeline = self.timeline
        timeline.host_waits += 1
        mark = Mark(timeline.current, dict(timeline.current.clock))
        timeline.current.queue.append(mark)
        timeline.run_until(mark)
        merge(timeline.host, mark.clock)
