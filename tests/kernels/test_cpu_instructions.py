"""The instruction set the kernels are compiled for."""

from __future__ import annotations

import itertools
import platform

import pytest

from headway.core.errors import ConfigError
from headway.kernels.cpu import instructions, loader


def test_everything_the_cpu_has_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (None, "", "native"):
        if value is None:
            monkeypatch.delenv("HEADWAY_CPU", raising=False)
        else:
            monkeypatch.setenv("HEADWAY_CPU", value)
        assert instructions.compiler_flags() == ("-march=native",)


@pytest.mark.parametrize("name", ["avx512_bf16", "sse5"])
def test_a_set_this_cpu_cannot_run_is_refused_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled for it, the first call would end the process."""
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(instructions, "cpu_flags", lambda: instructions.SETS["avx2"].needs)
    monkeypatch.setenv("HEADWAY_CPU", name)
    with pytest.raises(ConfigError, match=r"this CPU runs native, baseline, avx2$"):
        loader.library.__wrapped__()
    monkeypatch.setenv("HEADWAY_CPU", "avx2")
    assert instructions.compiler_flags() == ("-march=x86-64-v3",)


def test_each_set_of_a_machine_needs_more_than_the_one_before() -> None:
    for machine in ("x86_64", "aarch64"):
        needs = [chosen.needs for chosen in instructions.SETS.values() if chosen.machine == machine]
        assert all(poorer < richer for poorer, richer in itertools.pairwise(needs))
