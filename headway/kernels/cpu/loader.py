"""Builds the C kernels once per machine and loads them.

The library lies in ``$XDG_CACHE_HOME/headway`` (default ``~/.cache/headway``), named by a hash of everything that
shapes it: sources, flags, compiler version, CPU features. It is written to a temporary name and renamed, so that
processes starting together never load half a file.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from importlib import resources
from pathlib import Path

from headway.core.switches import NATIVE, is_on
from headway.kernels.cpu.instructions import compiler_flags, cpu_flags

logger = logging.getLogger(__name__)

FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-shared", "-fvisibility=hidden",
         "-fno-math-errno", "-fno-trapping-math", "-pthread")  # fmt: skip
BUILD_SECONDS = 120

_POINTER, _INT64, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_DOUBLE = ctypes.c_double
_SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "headway_rms_norm": (None, [_POINTER] * 4 + [_INT64] * 2 + [_FLOAT, _INT, _INT]),
    "headway_silu_mul": (None, [_POINTER] * 2 + [_INT64] * 2 + [_INT, _INT]),
    "headway_rope_kv_write": (None, [_POINTER] * 5 + [_FLOAT] + [_POINTER] * 4 + [_INT64] * 7 + [_INT, _INT]),
    "headway_paged_attention": (
        _INT,
        [_POINTER] * 8 + [_INT64] * 9 + [_FLOAT, _INT64, _FLOAT, _INT64, _POINTER, _POINTER, _INT, _INT],
    ),
    "headway_linear": (_INT, [_POINTER] * 4 + [_INT64] * 3 + [_INT] * 4),
    "headway_add_layer_norm": (None, [_POINTER] * 5 + [_INT64] * 2 + [_FLOAT, _INT, _INT]),
    "headway_dense_attention": (_INT, [_POINTER] * 3 + [_INT64] * 5 + [_FLOAT, _INT, _INT]),
    "headway_linear_pack": (None, [_POINTER] * 2 + [_INT64] * 2 + [_INT, _INT]),
    "headway_blocks_linear": (_INT, [_POINTER] * 5 + [_INT64] * 3 + [_INT] * 3),
    "headway_blocks_pack": (None, [_POINTER] * 2 + [_INT64] * 2 + [_INT, _INT]),
    "headway_blocks_rows": (None, [_POINTER] * 3 + [_INT64] * 3 + [_INT, _INT, _INT]),
    "headway_blocks_set": (_INT, []),
    "headway_decoder_blocks": (_INT, [_POINTER, _INT64, _POINTER, _POINTER]),
    "headway_apply_edits": (None, [_POINTER] * 2 + [_INT64] * 3),
    "headway_step_unpack": (None, [_POINTER] * 14 + [_INT64] * 9),
    "headway_slot_advance": (None, [_POINTER] * 16 + [_INT64] * 11),
    "headway_count_tokens": (None, [_POINTER] * 5 + [_INT64] * 5),
    "headway_ngram_draft": (None, [_POINTER] * 4 + [_INT64] * 6),
    "headway_suffix_draft": (None, [_POINTER] * 7 + [_INT64] * 7 + [_DOUBLE] * 2),
    "headway_suffix_keep": (None, [_POINTER] * 9 + [_INT64] * 5),
    "headway_logit_bias": (None, [_POINTER] * 5 + [_INT64] * 5),
    "headway_allowed_tokens": (None, [_POINTER] * 4 + [_INT64] * 5 + [_INT]),
    "headway_min_tokens": (None, [_POINTER] * 6 + [_INT64] * 5),
    "headway_penalties": (None, [_POINTER] * 7 + [_INT64] * 4 + [_INT]),
    "headway_bad_words": (None, [_POINTER] * 8 + [_INT64] * 7),
    "headway_grammar_mask": (None, [_POINTER] * 9 + [_INT64] * 7 + [_INT, _INT]),
    "headway_grammar_advance": (None, [_POINTER] * 11 + [_INT64] * 9),
    "headway_sample": (_INT, [_POINTER] * 9 + [_INT64] * 4 + [_FLOAT, _INT, _INT, _INT]),
    "headway_gather_logprobs": (_INT, [_POINTER] * 10 + [_INT64] * 6 + [_INT, _INT]),
}


@functools.cache
def library() -> ctypes.CDLL | None:
    """The loaded kernels, or None (logged once, with the reason) when they are switched off or cannot be built.

    Raises:
        ConfigError: HEADWAY_CPU names an instruction set that this CPU does not have.
    """
    if not is_on(NATIVE):
        logger.info("native CPU kernels are off (%s=0); torch serves", NATIVE)
        return None
    try:
        return load(build(cache_folder()))
    except (OSError, RuntimeError, AttributeError, subprocess.SubprocessError) as error:
        logger.info("native CPU kernels are not available, torch serves (slower): %s", error)
        return None


def cache_folder() -> Path:
    """The folder of compiled libraries, created for its owner alone.

    Raises:
        RuntimeError: somebody else owns it or can write to it; what lies there must not be loaded.
    """
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(base) / "headway"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _refuse_foreign(folder)
    return folder


def build(folder: Path) -> Path:
    """Compile the sources into ``folder`` unless that has been done, and return the library's path.

    Raises:
        RuntimeError: there is no compiler, or it failed; the message ends with its last words.
    """
    compiler = find_compiler()
    sources = {item.name: item.read_bytes() for item in _sources()}
    target = folder / f"kernels-{_fingerprint(compiler, sources)}.so"
    if target.exists():
        _refuse_foreign(target)
        return target
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        for name, text in sources.items():
            (Path(temporary) / name).write_bytes(text)
        output = Path(temporary) / "kernels.so"
        names = sorted(name for name in sources if name.endswith(".c"))
        command = [*compiler, *compiler_flags(), *FLAGS, *names, "-o", str(output), "-lm"]
        done = subprocess.run(command, cwd=temporary, capture_output=True, text=True, timeout=BUILD_SECONDS)
        if done.returncode != 0:
            raise RuntimeError(f"{shlex.join(compiler)} failed: {done.stderr.strip()[-300:]}")
        os.replace(output, target)
    return target


def load(path: Path) -> ctypes.CDLL:
    """Load the library. Raises: OSError, AttributeError: it is not one of ours."""
    loaded = ctypes.CDLL(str(path))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


def find_compiler() -> list[str]:
    """The C compiler's command: $CC, else cc, gcc or clang.

    Raises:
        RuntimeError: none is installed.
    """
    chosen = shlex.split(os.environ.get("CC", ""))
    for command in [chosen] if chosen else [["cc"], ["gcc"], ["clang"]]:
        if shutil.which(command[0]):
            return command
    raise RuntimeError(f"no C compiler ({' '.join(chosen) or 'cc, gcc, clang'}) is installed")


def source_folder() -> Path:
    """Where the C sources lie."""
    return Path(str(resources.files(__package__))) / "csrc"


def _sources() -> list[Path]:
    return sorted(item for item in source_folder().iterdir() if item.suffix in (".c", ".h"))


def _fingerprint(compiler: list[str], sources: dict[str, bytes]) -> str:
    version = subprocess.run([*compiler, "--version"], capture_output=True, timeout=BUILD_SECONDS)
    if version.returncode != 0:
        raise RuntimeError(f"{shlex.join(compiler)} --version failed: {version.stderr.decode(errors='replace')[-300:]}")
    digest = hashlib.sha256()
    parts = [version.stdout, " ".join((*compiler, *compiler_flags(), *FLAGS)).encode(), platform.machine().encode()]
    parts += [" ".join(sorted(cpu_flags())).encode(), *(name.encode() + text for name, text in sources.items())]
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:24]


def _refuse_foreign(path: Path) -> None:
    info = path.stat()
    if info.st_uid != os.getuid() or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise RuntimeError(f"{path} can be written by others; make it yours alone (chmod go-w) or set XDG_CACHE_HOME")
