"""Threads follow affinity, cores and control groups of both versions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headway.device import cpu, cpu_threads
from headway.device.cpu_threads import cpu_quota, physical_cores, usable_threads


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


V1 = {"cpu/cpu.cfs_quota_us": "150000\n", "cpu/cpu.cfs_period_us": "100000\n"}


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/\n", {}, None),
        ("0::/a/b\n", {"a/cpu.max": "50000 100000\n", "a/b/cpu.max": "max 100000\n"}, 0.5),
        ("0::/a/b\n", {"a/cpu.max": "400000 100000\n", "a/b/cpu.max": "300000 100000\n"}, 3.0),
        ("0::/host/path/that/is/not/here\n", {"cpu.max": "200000 100000\n"}, 2.0),
        ("2:cpuacct:/\n1:cpu:/\n0::/\n", V1, 1.5),
        ("4:cpu,cpuacct:/docker/f00\n", {f"cpu,cpuacct{name[3:]}": text for name, text in V1.items()}, 1.5),
        ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ("3:cpuset:/\n", V1, None),
        ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "garbage\n", "cpu/cpu.cfs_period_us": "0\n"}, None),
        ("nonsense\n\n", {"cpu.max": ""}, None),
    ],
)
def test_quota(groups: str, files: dict[str, str], expected: float | None, tmp_path: Path) -> None:
    write(tmp_path, {"membership": groups} | {f"fs/{name}": text for name, text in files.items()})
    assert cpu_quota(tmp_path / "membership", tmp_path / "fs") == expected


def test_no_control_groups_at_all(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path / "none", tmp_path) is None


def test_threads_of_a_core_count_once(tmp_path: Path) -> None:
    for cpus, siblings in ({0, 4}, "0,4"), ({1, 5}, "1,5"):
        write(tmp_path, {f"cpu{cpu}/topology/thread_siblings_list": siblings + "\n" for cpu in cpus})
    assert physical_cores({0, 1, 4, 5}, tmp_path) == 2
    assert physical_cores({0, 4}, tmp_path) == 1
    assert physical_cores({0, 1, 2}, tmp_path) == 3, "a CPU the machine says nothing about: count CPUs"


@pytest.mark.parametrize(
    ("quota", "cpus", "expected"),
    [("150000", 8, 2), ("100000", 8, 1), ("20000", 8, 1), ("max", 8, 8), ("900000", 4, 4), ("max", 1, 1)],
)
def test_quota_and_affinity_together(
    quota: str, cpus: int, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {"membership": "0::/\n", "fs/cpu.max": f"{quota} 100000\n"})
    monkeypatch.setattr(cpu_threads, "allowed_cpus", lambda: set(range(cpus)))
    places = {"membership": tmp_path / "membership", "cgroups": tmp_path / "fs", "topology": tmp_path / "none"}
    assert usable_threads(**places) == expected


def test_the_device_lowers_torch_s_threads_unless_the_user_has_said(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr(cpu, "usable_threads", lambda: 1)
    try:
        torch.set_num_threads(2)
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
        cpu.CpuDevice()
        assert torch.get_num_threads() == 2
        monkeypatch.delenv("OMP_NUM_THREADS")
        cpu.CpuDevice()
        assert torch.get_num_threads() == 1
        monkeypatch.setattr(cpu, "usable_threads", lambda: 64)
        cpu.CpuDevice()
        assert torch.get_num_threads() == 1, "never raised above what the program chose"
    finally:
        torch.set_num_threads(before)
