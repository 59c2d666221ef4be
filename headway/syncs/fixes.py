"""Which cure fits which wait. docs/syncs.md shows each with a snippet before and after; tests run those."""

from __future__ import annotations

import ast
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
        "draw on the host",
        "A random number that the host needs is drawn by the host: random, numpy and torch's CPU generator ask no device.",
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
        "index on the device",
        "An index of no dimension is read by the host; one of one dimension is not: x[i[None]], index_select, gather, take.",
    ),
    Fix(
        "slice assignment",
        "Contiguous rows: a slice with Python ints needs no index tensor. One element: x[3].fill_(1.0), not x[3] = 1.0.",
    ),
    Fix(
        "index_fill_",
        "Writing one value to rows that the device knows: index_fill_ or masked_fill_ with a device index; to one element, "
        "x[i].fill_(value). A list of rows goes up from pinned memory first.",
    ),
    Fix(
        "create on the device",
        "torch.zeros, full, arange and modules made with device= launch kernels; a list, a CPU tensor or a module made on the "
        "host must be copied.",
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
        "end a loop late",
        "Ask whether to go on every k steps, or about the step before: a loop that ends some steps late costs those steps.",
    ),
    Fix(
        "reduce on the device",
        "Python's min, max, sorted and median read every comparison: stack the tensors, and let torch compare.",
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
        "wait inside an operation",
        "It asks the device while it works, and no argument turns that off: do it every k steps, or allow it with the reason.",
    ),
    Fix(
        "rows sorted by the host",
        "Sort the batch by falling length where it is put together, and pack with enforce_sorted=True: no order travels.",
    ),
    Fix(
        "is_causal said",
        "Say is_causal= (tgt_is_causal= of a decoder), or the host compares the mask with a causal one; where rows are padded, "
        "enable_nested_tensor=False keeps them from being counted.",
    ),
    Fix(
        "noise that is scaled",
        "torch.normal checks on the host that no deviation is negative: scale torch.randn_like yourself; of a distribution, "
        "rsample() does.",
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
    Fix(
        "once at start-up",
        "It waits where something is made or loaded, not in each step: keep it before the loop, and allow it there.",
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
    "__format__": "log every k steps",
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
    "linalg_svd": "wait inside an operation",
    "linalg_svdvals": "wait inside an operation",
    "linalg_eigh": "wait inside an operation",
    "linalg_eigvalsh": "wait inside an operation",
    "linalg_eig": "wait inside an operation",
    "linalg_eigvals": "wait inside an operation",
    "linalg_lstsq": "wait inside an operation",
    "linalg_matrix_exp": "wait inside an operation",
    "ctc_loss": "wait inside an operation",
    "_ctc_loss": "wait inside an operation",
    "_ctc_loss_backward": "wait inside an operation",
    "istft": "wait inside an operation",
    "prod": "wait inside an operation",
    "cumprod": "wait inside an operation",
    "index": "torch.where",
    "index_put": "torch.where",
    "_index_put_impl_": "torch.where",
    "masked_scatter_backward": "torch.where",
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
    ("size", "__getitem__"): "torch.where",
    ("size", "__setitem__"): "torch.where",
    ("read", "__getitem__"): "index on the device",
    ("read", "__setitem__"): "index on the device",
    ("upload", "to"): "pinned staging",
}
_WITHIN: Final = (
    (r"distributions\..*sample$", "noise that is scaled"),
    (r"distributions\.", "validate_args=False"),
    (r"amp\.grad_scaler\.GradScaler\.(get_scale|state_dict)", "log every k steps"),
    (r"amp\.", "fused=True under a GradScaler"),
    (r"optim\.lbfgs", "wait later"),
    (r".*\.load_state_dict$", "once at start-up"),
    (r"optim\.", "capturable=True"),
    (r"nn\.utils\.clip_grad", "assert on the device"),
    (r"nn\.utils\.rnn\.", "rows sorted by the host"),
    (r"nn\.modules\.transformer\.", "is_causal said"),
    (r"serialization\.load$|nn\.parallel\.|nn\.modules\..*\.__init__$", "once at start-up"),
    (r"masked\.|nn\.attention\.", "wait inside an operation"),
    (r"nn\.modules\.module\.Module\.(to|cuda|_apply)$", "create on the device"),
)
"""Parts of torch that wait for their caller, by their names."""
_LOGS: Final = (
    r"(?<!torch\.)(?<!math\.)\b(print|log|logger|logging|log_(?!prob|soft|sig)\w*|writer?|wandb|tqdm|pbar|postfix)"
    r"\b(?!\(\))"
)
"""Words by which lines that show something are known; ``x.log()`` and ``torch.log`` are none."""
_DRAW: Final = (
    r"\b(int|float|bool)\(torch\.rand|\btorch\.rand\w*\(.*\)\.(item|tolist)\(|^if torch\.rand.*[<>]=?\s*[\d.]+:"
)
_NUMBERS: Final = r"[-\d.,e\s\[\]()]"
_BY_SOURCE: Final = (
    ("read", r"\bassert\b|is_?(nan|inf|finite)\(", "assert on the device"),
    ("read", rf"{_LOGS}.*\(|\+=.*(\.item\(|\b(int|float)\()", "log every k steps"),
    ("read", r"^(el)?if\b.*\n\s*raise\b", "assert on the device"),
    ("read", r"^while\b|^(el)?if\b.*\n\s*break\b", "end a loop late"),
    ("read", r"\b(median|sorted|nlargest|nsmallest)\(|(?<![.\w])(min|max)\(", "reduce on the device"),
    ("read", r"^for\b[^()]*\bin\s[^,]*\.tolist\(\):", "upper bound on the host"),
    ("read", r"\w\[\s*int\(|\bint\(.*\barg(max|min)\(", "index on the device"),
    ("read", _DRAW, "draw on the host"),
    ("read", r"\b(n|(len|num|longest|size|width|count|max_?len)\w*)\s*=\s.*\.item\(\)", "upper bound on the host"),
    ("size", r"\]\s*\.\s*(sum|mean)\(", "masked reduction"),
    (
        "upload",
        r"\b(zeros|ones|full|arange|eye|linspace|rand\w*|empty)\(.*\)\s*\.\s*(to|cuda)\(",
        "create on the device",
    ),
    ("upload", rf"\btensor\(\s*[-\[(\d]{_NUMBERS}*(,\s*(dtype|device)=|\)\s*\.\s*(to|cuda)\()", "precomputed tables"),
)
"""Kind, what the source line and the one after it have, cure: hints that are better than what the call alone says."""
_COMPARED: Final = frozenset({"__bool__", "__lt__", "__gt__"})
_OWN_CURE: Final = frozenset({"one_hot", "histc", "normal", "bincount", "__setitem__"})
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
        source: the user's line, and after a line break the one below it, if that is known.
    """
    for part, cure in _WITHIN:
        if re.match(part, within):
            return _BY_NAME[cure]
    name, line = call.partition(" ")[0].rpartition(".")[2], source.partition("\n")[0]
    for one, pattern, cure in _BY_SOURCE:
        if kind != one or name in _OWN_CURE or (cure == "reduce on the device" and name not in _COMPARED):
            continue
        if re.search(pattern, source if r"\n" in pattern else line):
            return _BY_NAME[cure]
    if (kind, name) == ("upload", "__setitem__"):
        return _BY_NAME[_number_written(line)]
    found = _BY_KIND_AND_CALL.get((kind, name))
    if found is None and kind in ("read", "size", "upload"):
        found = _BY_CALL.get(name)
    return _BY_NAME[found or _BY_KIND[kind]]


def _number_written(source: str) -> str:
    """The cure for ``x[...] = value`` that sends something up: a list of rows, or the value alone."""
    try:
        (statement,) = ast.parse(source).body
    except (SyntaxError, ValueError):
        return "index_fill_"
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    indices = [target.slice for target in targets if isinstance(target, ast.Subscript)]
    parts = [part for index in indices for part in (index.elts if isinstance(index, ast.Tuple) else [index])]
    return "slice assignment" if parts and not any(map(_named, parts)) else "index_fill_"


def _named(part: ast.expr) -> bool:
    """Whether a part of an index may be a device's tensor: a name, or what is computed; no number, list or range."""
    if isinstance(part, ast.Call):
        return not (isinstance(part.func, ast.Name) and part.func.id in ("range", "list", "slice"))
    return not isinstance(part, (ast.Constant, ast.Slice, ast.List, ast.UnaryOp))


def cure_of(finding: Any) -> Fix:
    """The cure for a finding."""
    site = finding.site
    below = source_line(dataclasses.replace(site, line=site.line + 1)) if site.line else ""
    return fix_for(finding.kind, finding.call, finding.within, f"{source_line(site)}\n{below}")
