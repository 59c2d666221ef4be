"""A simulated asynchronous device: it runs the engine's real code on the CPU and behaves as badly as CUDA may.

    with SimDevice(seed) as device:
        core = build_engine(args, device=device)
        device.arm()
        ...

- Operations are queued and run late, in any order that streams and events allow; the seed chooses (``timeline``).
- Device tensors claim the meta device and hold CPU memory; views are made at once, all else is queued (``ops``, ``tensor``).
- Outputs, freed memory and readback buffers hold poison until the work that fills them has run; uploads read the host's
  buffer when they run (``memory``, ``transfers``).
- A host read of a device value, and a blocking call where none is allowed, raise ``HostSyncError`` with the line.
- Accesses that nothing orders raise ``RaceError`` with both lines, whatever order they ran in (``clocks``).
- The engine's promises about bounds, zombies and padding are checked on the device's true values (``invariants``).

What it cannot see: host writes through numpy views are found by comparing contents, so a rewrite with equal bytes passes;
host reads through an old numpy view see poison but raise nothing; memory that is dropped is poisoned, not handed out again.
"""

from headway.device.sim.device import SimDevice
from headway.device.sim.errors import HostSyncError, InvariantError, RaceError, SimError

__all__ = ["HostSyncError", "InvariantError", "RaceError", "SimDevice", "SimError"]
