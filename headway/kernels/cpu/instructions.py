"""Which instruction set the C kernels are compiled for: all that this CPU has, or fewer to compare with."""

from __future__ import annotations

import functools
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from headway.core.errors import ConfigError

VARIABLE: Final = "HEADWAY_CPU"
"""Environment variable that names one of ``SETS``; unset or "native": everything the CPU has."""


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """What a compiler is told, and what a CPU must have (flags as Linux names them) to run the result."""

    machine: str
    flags: tuple[str, ...]
    needs: frozenset[str]


_AVX2 = frozenset({"avx2", "fma", "bmi1", "bmi2", "f16c", "movbe"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
SETS: Final = {
    "baseline": InstructionSet("x86_64", ("-march=x86-64",), frozenset()),
    "avx2": InstructionSet("x86_64", ("-march=x86-64-v3",), _AVX2),
    "avx512": InstructionSet("x86_64", ("-march=x86-64-v4", "-mavx512vnni"), _AVX512 | {"avx512_vnni"}),
    "avx512_bf16": InstructionSet(
        "x86_64", ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"), _AVX512 | {"avx512_vnni", "avx512_bf16"}
    ),
    "avx512_amx": InstructionSet(
        "x86_64",
        ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
        _AVX512 | {"avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16"},
    ),
    "neon": InstructionSet("aarch64", ("-march=armv8-a",), frozenset({"asimd"})),
    "neon_dot": InstructionSet("aarch64", ("-march=armv8.2-a+dotprod",), frozenset({"asimd", "asimddp"})),
    "neon_bf16": InstructionSet(
        "aarch64", ("-march=armv8.2-a+dotprod+bf16+i8mm",), frozenset({"asimd", "asimddp", "bf16", "i8mm"})
    ),
}
"""By name, the poorer before the richer."""


def compiler_flags() -> tuple[str, ...]:
    """For the set that ``HEADWAY_CPU`` names, or for this machine.

    Raises:
        ConfigError: no such set, or this CPU cannot run it.
    """
    name = os.environ.get(VARIABLE, "native")
    if name in ("", "native"):
        return ("-march=native",)
    runs = [known for known, chosen in SETS.items() if runs_here(chosen)]
    if name not in runs:
        raise ConfigError(f"{VARIABLE}={name!r}: this CPU runs {', '.join(['native', *runs])}")
    return SETS[name].flags


def runs_here(chosen: InstructionSet) -> bool:
    """Whether this CPU can run what is compiled for the set."""
    return platform.machine() == chosen.machine and chosen.needs <= cpu_flags()


@functools.cache
def cpu_flags() -> frozenset[str]:
    """The CPU's features as Linux names them; empty elsewhere."""
    return frozenset(_cpuinfo("flags", "Features").split())


def cpu_name() -> str:
    """The processor's name as Linux gives it; the architecture elsewhere."""
    return _cpuinfo("model name").strip() or platform.machine()


def _cpuinfo(*labels: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1] for line in lines if line.startswith(labels) and ":" in line), "")
