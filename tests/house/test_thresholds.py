"""docs/thresholds.md names what there is: constants and fields that stand in their files, tests that mention them; and the
other way round, constants that sizes are compared with stand there, or here with a reason."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.house.source import ROOT

ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs" / "thresholds.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| `")
]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[1][:40])
def test_names_and_tests_exist(row: list[str]) -> None:
    [file], names, _, tests = quoted(row[0]), quoted(row[1]), row[2], quoted(row[3])
    text = (ROOT / "headway" / file).read_text(encoding="utf-8")
    missing = [
        name for name in names if not re.search(rf"^\s*([A-Z_]+, )*{name}(, [A-Z_]+)*\s*(:|=)", text, re.MULTILINE)
    ]
    assert names and not missing, f"{file} has no {missing}"
    assert tests and all((ROOT / test).exists() for test in tests)


FOLDERS_APART = ("kernels", "syncs", "cli", "device/sim")
"""Kernels are compared with their references over sizes on both sides of their tiles, ``syncs`` is a distribution of its own,
and neither the command line's benches nor the simulated device run in production."""
APART: dict[str, dict[str, str]] = {
    "what is longer or larger is refused with a message; both sides in the tests of the field": {
        "api/hearing/transcriber.py": "MAX_PROMPT_CHARS", "api/pooling/score.py": "MAX_INSTRUCTION_CHARS",
        "api/structured/compiler.py": "MAX_SPEC_BYTES", "api/structured/integers.py": "MAX_DIGITS MAX_FRACTION MAX_MULTIPLES",
        "api/structured/json_schema.py": "MAX_DEPTH", "api/structured/merge.py": "MAX_BRANCHES",
        "api/structured/nfa.py": "MAX_NFA_STATES", "api/structured/regex.py": "MAX_DEPTH",
        "api/structured/rules.py": "MAX_RULES", "core/automaton.py": "MAX_STATES", "core/cache.py": "MOST_GROUPS",
        "core/config.py": "MAX_REPLAYS MAX_RUN_AHEAD", "core/params.py": "MAX_PROMPT_NAME_CHARS",
        "engine/rank_messages.py": "MIN_SECRET_CHARS", "multimodal/audio/wav.py": "LEAST_RATE MOST_CHANNELS MOST_RATE",
        "parallel/wire.py": "LARGEST MOST_HELLO_BYTES", "server/connection.py": "MAX_HEADER_BYTES MAX_HEADER_LINES",
        "server/decode.py": "MAX_NAME_CHARS MAX_PARTS", "server/door.py": "MAX_TARGET_BYTES",
        "server/hearing/multipart.py": "MOST_FIELD_BYTES MOST_HEADER_BYTES MOST_PARTS", "server/messages.py": "MAX_TOOLS",
        "server/settings.py": "MIN_KEY_CHARS", "server/tokens.py": "MAX_TOKENS",
        "weights/gguf_file.py": "MAX_DIMS MAX_KEYS MAX_TENSORS", "weights/sentence.py": "MOST_MODULES",
    },
    "attacks and the server's tests run both sides over HTTP (docs/security.md)": {
        "server/accepting.py": "TO_REFUSE", "server/connection.py": "CHUNK_BYTES FREE_CHUNKS", "server/decode.py": "SMALL_BODY",
        "server/memory.py": "LARGE_BYTES", "server/pooling/call.py": "INLINE_FLOATS",
        "api/structured/compiler.py": "MAX_CACHED MAX_CACHED_BYTES",
    },
    "durations and waits": {
        "api/killable.py": "STUCK_SECONDS", "engine/ranks.py": "WATCH_SECONDS", "engine/world.py": "START_SECONDS",
        "engine/follower.py": "BEAT_SECONDS",
        "parallel/ring.py": "NAP_SECONDS SPIN_SECONDS", "server/health.py": "LONG_STEP_SECONDS SILENT_SECONDS WORK_SECONDS",
        "server/launch.py": "MAX_RESTART_DELAY",
        "api/structured/compiler.py": "MAX_SECONDS",
        "server/logs.py": "SELDOM_SECONDS",
        "server/metrics_source.py": "PATIENCE_SECONDS", "api/hearing/windows.py": "SEARCHED_SECONDS",
    },
    "layouts, units and tiles: no other way behind them": {
        "parallel/peer_buffers.py": "WHOLE",
        "api/token_bound.py": "CHAR_BYTES", "attention/alignment.py": "SMOOTHED", "attention/flex.py": "KEYS QUERIES",
        "core/chunks.py": "CHUNK", "multimodal/audio/mel.py": "WINDOW", "multimodal/audio/layout.py": "STRIDE",
        "state/packed_step.py": "EDIT_INTS HEADER_INTS", "models/vision/mobile.py": "ROWS",
        "runner/launch.py": "_PROMPT_WORDS", "runner/prefill_graphs.py": "_BLOCK_TOKENS _NEWCOMERS",
    },
    "sizes chosen once, at the start, from the memory that there is or from what a card computes: no step goes another way": {
        "engine/sizes.py": "CHECKPOINT_SHARE CPU_KV_MOST CPU_KV_SHARE WHOLE_PROMPT",
        "engine/sight.py": "ENCODER_CACHE_ITEMS ENCODER_CACHE_LEAST FLOPS_PER_BYTE LEAST_TOKENS",
        "models/vision/passes.py": "LEAST_TILE", "models/vision_language.py": "MOST_ROWS",
        "models/audio_language.py": "MOST_UNITS",
        "scheduler/cache/state.py": "LEAST_BLOCKS", "engine/accord.py": "LEAST_TOKENS", "engine/process.py": "MAX_IPC_PATH",
    },
    "small enough that tests with tiny models meet both sides: shapes of graphs, parts of a list, routes that are kept": {
        "runner/pooled_graphs.py": "FULL_ROWS LONG SMALL", "runner/rehearsal.py": "LONG_CONTEXT SHORT_PROMPT",
        "recurrent/scans.py": "ONE_LAUNCH", "engine/replicas.py": "MOST_PIECES REMEMBERED",
        "api/pooling/offline.py": "PARTS_AHEAD PART_TOKENS",
    },
    "what a message or a log shows of something long": {"server/logs.py": "MAX_CHARS", "models/load.py": "_LISTED"},
    "when a window of speech went wrong, by its makers' rule (tests/api/test_transcribe.py)": {
        "api/hearing/transcriber.py": "MOST_COMPRESSION SILENCE"
    },
}  # fmt: skip
"""Reason -> file -> names."""


def is_number(node: ast.expr | None) -> bool:
    if isinstance(node, ast.BinOp):
        return is_number(node.left) and is_number(node.right)
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


def constants(tree: ast.Module) -> Iterator[str]:
    """Names of numbers that a module defines."""
    for node in tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            names, values = [target], [node.value]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                names, values = list(target.elts), list(node.value.elts)
            for name, value in zip(names, values, strict=True):
                if isinstance(name, ast.Name) and name.id.isupper() and is_number(value):
                    yield name.id


def compared(text: str) -> set[str]:
    """Constants of a module that something in it is compared with: by <, min, max, a number of parts."""
    tree = ast.parse(text)
    known, found = set(constants(tree)), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            by_size = any(isinstance(each, ast.Lt | ast.LtE | ast.Gt | ast.GtE) for each in node.ops)
        elif isinstance(node, ast.Call):
            by_size = isinstance(node.func, ast.Name) and node.func.id in ("min", "max", "cdiv")
        else:
            by_size = isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv)
        if isinstance(node, ast.arguments):  # the usual value of an argument that tests set small
            by_size = True
        if by_size:
            found |= {each.id for each in ast.walk(node) if isinstance(each, ast.Name)} & known
    return found


def listed() -> set[tuple[str, str]]:
    return {(file, name) for row in ROWS for file in quoted(row[0]) for name in quoted(row[1])}


def apart() -> set[tuple[str, str]]:
    return {(file, name) for files in APART.values() for file, names in files.items() for name in names.split()}


def test_every_threshold_is_listed() -> None:
    found = set()
    for path in sorted((ROOT / "headway").rglob("*.py")):
        file = path.relative_to(ROOT / "headway").as_posix()
        if not file.startswith(tuple(f"{folder}/" for folder in FOLDERS_APART)):
            found |= {(file, name) for name in compared(path.read_text(encoding="utf-8"))}
    missing = sorted(found - listed() - apart())
    assert not missing, f"neither in docs/thresholds.md nor in APART of this file: {missing}"
    assert not apart() - found, f"no longer compared with anything: {sorted(apart() - found)}"
    assert not apart() & listed(), f"in both: {sorted(apart() & listed())}"


def test_what_counts_as_compared() -> None:
    text = """
A, B = 4, 2**20
C: int = 7
D = 9
NAMES = ("x",)
E = 3

def f(x: int, most: int = D) -> int:
    return min(B, x) if x > A else x // C + E
"""
    assert compared(text) == {"A", "B", "C", "D"}
