"""Which cure fits which wait. docs/syncs.md shows each with a snippet before and after; tests run those."""

from __future__ import annotations

import dataclasses
from typing import Final


@dataclasses.dataclass(frozen=True)
class Fix:
    """A pattern that removes a wait.

    Attributes:
        name: the heading in docs/syncs.md.
        advice: one sentence.
    """

    name: str
    advice: str


FIXES: Final = (
    Fix(
        "readback ring",
        "Copy into one of a ring of pinned buffers with non_blocking=True, record an event, read it steps later.",
    ),
    Fix(
        "upper bound on the host",
        "The host rarely needs the exact number: keep a bound >= it as a Python int, and mask the rest on the device.",
    ),
    Fix(
        "torch.where",
        "Keep the shape: choose between values with torch.where instead of selecting rows by a mask.",
    ),
    Fix(
        "masked reduction",
        "Multiply or masked_fill, then reduce: the sum over a mask needs no list of its rows.",
    ),
    Fix(
        "fixed-size compaction",
        "Sort or cumsum+scatter into a buffer of the bound's size, with a count kept on the device.",
    ),
    Fix(
        "repeat_interleave output_size",
        "Pass output_size=, which the host usually knows; without it the sum of the repeats is read back.",
    ),
    Fix(
        "pinned staging",
        "Fill a pinned buffer kept for the purpose, copy with non_blocking=True, reuse it after an event.",
    ),
    Fix(
        "precomputed tables",
        "Build constants once on the device, at start-up, and index them.",
    ),
    Fix(
        "slice assignment",
        "Contiguous rows: a slice with Python ints needs no index tensor.",
    ),
    Fix(
        "index_fill_",
        "Writing one value to rows that the device knows: index_fill_ or masked_fill_ with a device index.",
    ),
    Fix(
        "create on the device",
        "torch.zeros, full, arange with device= launch a kernel; a list or CPU tensor must be copied.",
    ),
    Fix(
        "dense host side",
        "Make the host tensor contiguous and pinned before a non_blocking copy: anything else goes through a "
        "pageable temporary.",
    ),
    Fix(
        "stream order",
        "Work on one stream is ordered anyway; between streams use stream.wait_event, which the host does not "
        "wait for.",
    ),
    Fix(
        "wait later",
        "Wait only on work launched several steps ago, so that its event has passed when the host arrives.",
    ),
    Fix(
        "poll between work",
        "Query an event once per step and go on with other work; a loop around query() is a wait with a fan.",
    ),
    Fix(
        "allocate once",
        "Allocate or pin at start-up and keep it; freeing and registering memory make the driver wait.",
    ),
    Fix(
        "debug behind a flag",
        "Debug output, asserts and prints belong behind a flag, or on values read back in bulk.",
    ),
)

_BY_NAME: Final = {fix.name: fix for fix in FIXES}

_BY_CALL: Final = {
    "item": "readback ring",
    "tolist": "readback ring",
    "cpu": "readback ring",
    "__bool__": "torch.where",
    "is_nonzero": "torch.where",
    "equal": "torch.where",
    "allclose": "debug behind a flag",
    "__repr__": "debug behind a flag",
    "__format__": "debug behind a flag",
    "__index__": "upper bound on the host",
    "__int__": "upper bound on the host",
    "nonzero": "fixed-size compaction",
    "argwhere": "fixed-size compaction",
    "where": "fixed-size compaction",
    "masked_select": "masked reduction",
    "unique": "fixed-size compaction",
    "unique_consecutive": "fixed-size compaction",
    "bincount": "upper bound on the host",
    "repeat_interleave": "repeat_interleave output_size",
    "tensor": "pinned staging",
    "as_tensor": "pinned staging",
    "scalar_tensor": "create on the device",
    "full": "create on the device",
    "arange": "upper bound on the host",
    "split": "upper bound on the host",
    "tensor_split": "upper bound on the host",
    "__setitem__": "index_fill_",
}
_BY_KIND_AND_CALL: Final = {
    ("upload", "__getitem__"): "slice assignment",
    ("upload", "__setitem__"): "slice assignment",
    ("size", "__getitem__"): "torch.where",
    ("upload", "to"): "pinned staging",
}
_BY_KIND: Final = {
    "read": "readback ring",
    "size": "upper bound on the host",
    "upload": "pinned staging",
    "pageable": "dense host side",
    "event": "wait later",
    "stream": "stream order",
    "device": "stream order",
    "query": "poll between work",
    "memory": "allocate once",
    "other": "wait later",
}


def fix_for(kind: str, call: str) -> Fix:
    """The cure for a wait of ``kind`` caused by ``call`` ("Tensor.item", "cudaFree", "cudaFree after Tensor.item")."""
    name = call.partition(" ")[0].rpartition(".")[2]
    found = _BY_KIND_AND_CALL.get((kind, name))
    if found is None and kind in ("read", "size", "upload"):
        found = _BY_CALL.get(name)
    return _BY_NAME[found or _BY_KIND[kind]]
