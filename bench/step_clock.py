"""Is the step clock right on this card, and what does it cost? Self-checking; under a minute.

    python bench/step_clock.py [--json FILE]

1. Known work: kernels that spin for a known time are queued as steps. The clock must find the headway where steps overlap,
   the idle time where the host sleeps in between (as the negative distance of two events), and the work itself.
2. Cost: the host's microseconds per step for ``submit`` and ``measure``, and whether the extra event slows the device.
3. No host wait: part 1 runs under torch's sync detector in error mode.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch

from headway.device.cuda import CudaDevice
from headway.device.step_clock import StepClock, StepEvents, StepTimes

WORK_US = 2000.0
PAUSE_US = 3000.0
STEPS = 500


def spin(cycles: int) -> None:
    """Queue a kernel that does nothing for so many cycles."""
    torch.cuda._sleep(cycles)  # noqa: SLF001 - torch has no other


def cycles_per_us() -> float:
    """Calibrates the spinning kernel; the second time, when the card's clock has risen."""
    cycles = 50_000_000
    for _ in range(2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        spin(cycles)
        end.record()
        end.synchronize()
    return cycles / (start.elapsed_time(end) * 1e3)


def step(device: CudaDevice, clock: StepClock, spins: int) -> StepEvents:
    """Queue one step of ``spins`` cycles."""
    with device.main.active():
        events = clock.submit()
        assert events is not None
        spin(spins)
    events.ended.record(device.main)
    return events


def known_work(device: CudaDevice, spins: int) -> dict[str, StepTimes | None]:
    """Two steps back to back, then one after a pause with the device dry."""
    clock = StepClock(device)
    torch.cuda.set_sync_debug_mode("error")
    first, second = step(device, clock, spins), step(device, clock, spins)
    torch.cuda.set_sync_debug_mode("default")
    device.wait_idle()
    time.sleep(PAUSE_US * 1e-6)
    third = step(device, clock, spins)
    device.wait_idle()
    torch.cuda.set_sync_debug_mode("error")
    found = {"first": clock.measure(first), "overlapped": clock.measure(second), "after a pause": clock.measure(third)}
    torch.cuda.set_sync_debug_mode("default")
    return found


def problems(found: dict[str, StepTimes | None]) -> list[str]:
    """What is not as it must be."""
    wrong = [f"{name}: not measured" for name, times in found.items() if times is None]
    if wrong:
        return wrong
    first, overlapped, paused = (found[name] for name in ("first", "overlapped", "after a pause"))
    assert first and overlapped and paused
    for name, times in (("first", first), ("overlapped", overlapped), ("after a pause", paused)):
        if not 0.9 * WORK_US < times.busy < 1.2 * WORK_US:
            wrong.append(f"{name}: busy {times.busy:.0f} us, {WORK_US:.0f} expected")
    if not 0.8 * WORK_US < overlapped.headway <= 1.2 * WORK_US or overlapped.idle:
        wrong.append(f"overlapped: headway {overlapped.headway:.0f} us, about {WORK_US:.0f} expected")
    if paused.headway or paused.idle < PAUSE_US:
        wrong.append(f"after a pause: idle {paused.idle:.0f} us, at least {PAUSE_US:.0f} expected")
    return wrong


def cost(device: CudaDevice, clock: StepClock | None) -> tuple[float, float]:
    """(host us in the clock, device us) per step of four tiny kernels, in a queue that never runs dry."""
    value = torch.zeros(4096, device=device.torch_device)
    device.wait_idle()
    spent, open_steps = 0.0, []
    start, end = device.new_event(timing=True), device.new_event(timing=True)
    with device.main.active():
        spin(100_000_000)  # the host gets ahead
        start.record(device.main)
        for _ in range(STEPS):
            begun = time.perf_counter()
            events = clock.submit() if clock is not None else None
            spent += time.perf_counter() - begun
            for _ in range(4):
                value += 1
            (events.ended if events is not None else device.new_event()).record(device.main)
            if events is not None:
                open_steps.append(events)
        end.record(device.main)
    device.wait_idle()
    if clock is not None:
        begun = time.perf_counter()
        for events in open_steps:
            clock.measure(events)
        spent += time.perf_counter() - begun
    return spent / STEPS * 1e6, start.elapsed_us(end) / STEPS


def main() -> int:
    """Print, write, and say with the exit status whether the clock is right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = CudaDevice(torch.device("cuda"))
    spins = int(cycles_per_us() * WORK_US)
    known_work(device, spins)  # warm
    found = known_work(device, spins)
    wrong = problems(found)
    for name, times in found.items():
        print(f"{name:<14} {times}")
    cost(device, None)
    _, bare = cost(device, None)
    fresh = StepClock(device)
    cost(device, fresh)  # makes the events; steady state uses them again
    host, timed = cost(device, fresh)
    print(f"host {host:.2f} us a step; device {bare:.2f} us a step without, {timed:.2f} us with the clock")
    for line in wrong:
        print("WRONG", line)
    if options.json:
        result = {
            "card": torch.cuda.get_device_name(),
            "known_work": {n: None if t is None else [t.headway, t.idle, t.busy] for n, t in found.items()},
            "host_us": host,
            "device_us_without": bare,
            "device_us_with": timed,
            "wrong": wrong,
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
