"""Clusters are written into a kernel's PTX."""

from __future__ import annotations

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
    from headway.kernels.triton_cluster import clustered

    found = clustered(PTX.format(body="{ mov.u32 %r1, cluster_room; } // cluster of 4 programs"))
    assert found.index(".explicitcluster\n.reqnctapercluster 4, 1, 1\n.reqntid 128") > found.index(".entry")


def test_other_kernels_stay_as_they_are() -> None:
    from headway.kernels.triton_cluster import clustered

    assert clustered(PTX.format(body="ret;")) == PTX.format(body="ret;")


def test_one_kernel_is_for_one_size() -> None:
    from headway.kernels.triton_cluster import clustered

    with pytest.raises(ValueError, match="clusters of 2, 8 programs"):
        clustered(PTX.format(body="// cluster of 2 programs\n// cluster of 8 programs"))


def test_triton_s_memory_behind_a_room_stays_aligned() -> None:
    from headway.kernels.triton_cluster import ALIGNED, buffer_asm

    asm = getattr(buffer_asm, "fn", buffer_asm)(4 * 513, 2)
    asm = getattr(asm, "value", asm)
    assert f".align {ALIGNED} .b8 cluster_room[{3 * ALIGNED}]" in asm and "// cluster of 2 programs" in asm
