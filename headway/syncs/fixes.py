"""Which cure fits which wait. docs/syncs.md shows each with a snippet before and after; tests run those."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Final

from headway.syncs.places import source_line


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
        "Contiguous rows: a slice with Python ints needs no index tensor. One element: x[3].fill_(1.0), not x[3] = 1.0.",
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
    Fix(
        "log every k steps",
        "Add up on the device, and read the sum once every k steps: one wait for k.",
    ),
    Fix(
        "assert on the device",
        "torch._assert_async checks on the device and stops the program later; no host has to ask.",
    ),
    Fix(
        "one_hot num_classes",
        "Pass num_classes=; without it the greatest class is read back.",
    ),
    Fix(
        "count by scatter_add_",
        "torch.bincount reads the greatest value even with minlength=; scatter_add_ into zeros of a known size does not.",
    ),
    Fix(
        "histc with bounds",
        "Pass min= and max=; without them both are read back.",
    ),
    Fix(
        "linalg without checks",
        "inv_ex, cholesky_ex and solve_ex give an info tensor for later instead of asking the device whether it worked.",
    ),
    Fix(
        "noise that is scaled",
        "torch.normal checks on the host that no deviation is negative: scale torch.randn_like yourself.",
    ),
    Fix(
        "validate_args=False",
        "Distributions check their parameters on the host unless told not to; Distribution.set_default_validate_args(False) "
        "tells them all.",
    ),
    Fix(
        "capturable=True",
        "An optimizer with capturable=True keeps its step and its learning rate on the device.",
    ),
    Fix(
        "fused=True under a GradScaler",
        "A fused optimizer is told on the device whether to skip the step; any other makes GradScaler.step read it back.",
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
    "bincount": "count by scatter_add_",
    "one_hot": "one_hot num_classes",
    "histc": "histc with bounds",
    "normal": "noise that is scaled",
    "inv": "linalg without checks",
    "inverse": "linalg without checks",
    "linalg_inv": "linalg without checks",
    "cholesky": "linalg without checks",
    "linalg_cholesky": "linalg without checks",
    "solve": "linalg without checks",
    "linalg_solve": "linalg without checks",
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
_WITHIN: Final = (
    ("distributions.", "validate_args=False"),
    ("amp.", "fused=True under a GradScaler"),
    ("optim.lbfgs", "wait later"),
    ("optim.", "capturable=True"),
    ("nn.utils.clip_grad", "assert on the device"),
)
"""Parts of torch that wait for their caller, by the beginning of their names."""
_BY_SOURCE: Final = (
    ("read", r"\bassert\b|is_?(nan|inf|finite)\(", "assert on the device"),
    ("read", r"\b(print|log\w*|writer?|wandb|tqdm|pbar|postfix)\b.*\(", "log every k steps"),
    ("size", r"\]\s*\.\s*(sum|mean)\(", "masked reduction"),
    (
        "upload",
        r"\b(zeros|ones|full|arange|eye|linspace|rand\w*|empty)\(.*\)\s*\.\s*(to|cuda)\(",
        "create on the device",
    ),
)
"""Kind, what the source line has, cure: hints that are better than what the call alone says."""
_OWN_CURE: Final = frozenset({"one_hot", "histc", "normal", "bincount"})
"""Calls whose own cure beats what their line says."""
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


def fix_for(kind: str, call: str, within: str = "", source: str = "") -> Fix:
    """The cure for a wait.

    Args:
        call: what waited: "Tensor.item", "cudaFree", "cudaFree after Tensor.item".
        within: the part of torch that called it for the user: "distributions.normal.__init__".
        source: the user's line.
    """
    for part, cure in _WITHIN:
        if within.startswith(part):
            return _BY_NAME[cure]
    name = call.partition(" ")[0].rpartition(".")[2]
    for one, pattern, cure in _BY_SOURCE:
        if kind == one and name not in _OWN_CURE and re.search(pattern, source):
            return _BY_NAME[cure]
    found = _BY_KIND_AND_CALL.get((kind, name))
    if found is None and kind in ("read", "size", "upload"):
        found = _BY_CALL.get(name)
    return _BY_NAME[found or _BY_KIND[kind]]


def cure_of(finding: Any) -> Fix:
    """The cure for a finding."""
    return fix_for(finding.kind, finding.call, finding.within, source_line(finding.site))
