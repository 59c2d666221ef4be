"""Clusters and rooms in shared memory are written into a kernel's PTX."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton.experimental.gluon", reason="Gluon came with Triton 3.4")

PTX = """.visible .entry kernel(
)
.reqntid 128
{{
{body}
}}
"""


def test_a_kernel_that_names_a_cluster_is_launched_as_one() -> None:
    from headway.kernels.triton_cluster import room_asm
    from headway.kernels.triton_stages import clustered

    found = clustered(PTX.format(body=room_asm.fn("shared", 64, "cluster of 4 programs")))
    assert found.index(".explicitcluster\n.reqnctapercluster 4, 1, 1\n.reqntid 128") > found.index(".entry")


def test_other_kernels_stay_as_they_are() -> None:
    from headway.kernels.triton_stages import clustered, with_rooms

    assert clustered(PTX.format(body="ret;")) == PTX.format(body="ret;")
    assert with_rooms(PTX.format(body="ret;"), 100) == (PTX.format(body="ret;"), 100)


def test_one_kernel_is_for_one_size() -> None:
    from headway.kernels.triton_stages import clustered

    with pytest.raises(ValueError, match="clusters of 2, 8 programs"):
        clustered(PTX.format(body="// cluster of 2 programs\n// cluster of 8 programs"))


def test_warps_that_never_come_by_arrive_when_they_start() -> None:
    from headway.kernels.triton_cluster import arrive_asm
    from headway.kernels.triton_stages import clustered

    body = "\t.reg .b32 \t%r<9>;\n\tadd.s32 %r1, %r2, 1;\n// cluster of 2 programs\n" + arrive_asm.fn(128)
    lines = clustered(PTX.format(body=body)).splitlines()
    declared = next(i for i, line in enumerate(lines) if "%r<9>" in line)
    assert "setp.ge.u32 other, id, 128; @other barrier.cluster.arrive" in lines[declared + 1]
    assert sum("@other" in line for line in lines) == 1


def test_rooms_lie_behind_triton_s_memory_one_behind_the_other() -> None:
    from headway.kernels.triton_cluster import room_asm
    from headway.kernels.triton_stages import with_rooms

    own, shared = room_asm.fn("own", 40, "of one program"), room_asm.fn("shared", 40, "cluster of 2 programs")
    found, size = with_rooms(f"{own}\n{shared}\n{own}", 1000)
    assert [line.split(", ")[3].split(";")[0] for line in found.splitlines()] == ["1008", "1056", "1008"]
    assert size == 1096


def test_a_compiled_kernel_s_memory_counts_its_rooms() -> None:
    from headway.kernels.triton_cluster import room_asm
    from headway.kernels.triton_stages import finish_ptx

    stages: dict[str, Any] = {"ptx": lambda source, metadata: source}
    finish_ptx(None)(None, stages, None)
    metadata = {"shared": 1024}
    ptx = stages["ptx"](PTX.format(body=room_asm.fn("shared", 64, "cluster of 4 programs")), metadata)
    assert metadata["shared"] == 1088 and "global_smem" in ptx and ", 1024;" in ptx and "4, 1, 1" in ptx


def test_compiled_kernels_are_named_by_what_finishes_them_and_by_earlier_hooks() -> None:
    """Triton 3.7 asks a hook for a key and its hash."""
    from headway.kernels.triton_stages import finish_ptx

    alone, behind = finish_ptx(None)(), finish_ptx(lambda *stages: None if stages else ("earlier", "its hash"))()
    assert behind[0] == "earlier" + alone[0]
    assert len({*alone, *behind}) == 4 and len(alone[1]) == 64
