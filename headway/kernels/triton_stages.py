"""What Triton's compiler does not write into the PTX of a kernel: the size of its cluster, and rooms behind its shared memory.

The functions of ``triton_cluster`` leave marks there, which a hook on Triton's stages finds.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from triton import knobs

MARK = re.compile(r"// cluster of (\d+) programs")
ROOM = re.compile(r"\broom_(?:own|shared)_(\d+)\b")
ENTRY_END = re.compile(r"^\.(?:reqntid|maxntid)\b", re.MULTILINE)
OTHERS = re.compile(r"// threads from (\d+) on have arrived")
BODY = re.compile(r"^\{\n(?:[ \t]*\.reg [^\n]*\n)*", re.MULTILINE)


def clustered(ptx: str) -> str:
    """``ptx`` with the size of the cluster that its kernel names; as it was when it names none.

    Raises:
        ValueError: it names several.
    """
    sizes = set(MARK.findall(ptx))
    if not sizes:
        return ptx
    if len(sizes) > 1:
        raise ValueError(f"one kernel for clusters of {', '.join(sorted(sizes))} programs: name one size")
    ptx = ENTRY_END.sub(rf".explicitcluster\n.reqnctapercluster {sizes.pop()}, 1, 1\n\g<0>", ptx, count=1)
    others = OTHERS.search(ptx)
    if others:
        arrive = (
            "{ .reg .pred other; .reg .b32 id; mov.u32 id, %tid.x; "
            f"setp.ge.u32 other, id, {others[1]}; @other barrier.cluster.arrive.relaxed.aligned; }}\n"
        )
        ptx = BODY.sub(rf"\g<0>{arrive}", ptx, count=1)
    return ptx


def with_rooms(ptx: str, shared: int) -> tuple[str, int]:
    """``ptx`` with a place for each of its rooms behind ``shared`` bytes, and the bytes of both.

    Triton 3.6 names a compiled kernel by its source, of which this is no part: whoever changes it changes ``room_asm``, too.
    Static shared memory would lie in front of Triton's, whose buffers then were no longer aligned, and Triton does not
    count it when it asks for more than 48 KB.
    """
    places = {}
    for found in ROOM.finditer(ptx):
        if found[0] not in places:
            places[found[0]] = shared = (shared + 15) // 16 * 16
            shared += int(found[1])
    return ROOM.sub(lambda found: str(places[found[0]]), ptx), shared


def finish_ptx(before: Callable[..., Any] | None) -> Callable[..., Any]:
    """A hook for Triton's list of stages: what ``before`` does, then clusters and rooms.

    From 3.7 on Triton also calls it without arguments, for what it adds to the names of compiled kernels: a key and its hash.
    """
    key = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()

    def hook(*of_stages: Any) -> tuple[str, str] | None:
        earlier: Any = before and before(*of_stages)
        if not of_stages:
            whole = key if earlier is None else earlier[0] + key
            return whole, hashlib.sha256(whole.encode()).hexdigest()
        stages: dict[str, Any] = of_stages[1]
        if "ptx" not in stages:
            return None
        make_ptx = stages["ptx"]

        def make(source: Any, metadata: dict[str, Any]) -> str:
            ptx, metadata["shared"] = with_rooms(clustered(make_ptx(source, metadata)), metadata["shared"])
            return ptx

        stages["ptx"] = make
        return None

    return hook


# Kernels for clusters need it. From Triton 3.7 on it is part of every kernel's name: what compiles ahead imports it, too.
knobs.runtime.add_stages_inspection_hook = finish_ptx(knobs.runtime.add_stages_inspection_hook)
