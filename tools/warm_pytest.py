"""pytest in forks of a process that has imported the large libraries: a run costs what its tests cost.

Half of a short run's time is imports of torch and its like, which no change of ours touches. ``WarmTree`` holds one copy of the
tree, in which one file at a time is changed; compiled files of the others stay.
"""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import cache_from_source
from pathlib import Path

import pytest

from tools.planted_faults import copy_tree

LIBRARIES = ("torch", "numpy", "hypothesis", "tokenizers", "safetensors", "msgspec", "fastapi", "httpx", "transformers")
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}
"""As tests/conftest.py sets them before it imports any of these."""
QUIET = ("-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning")  # some libraries bring plugins


class WarmTree:
    """A copy of the tree to run tests in. Use as a context manager; one thread only."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="mutants-"))

    def __enter__(self) -> WarmTree:
        assert "headway" not in sys.modules, "the children would test this checkout"
        copy_tree(self.folder)
        os.environ.update(SETTINGS, PYTHONPATH=str(self.folder))
        for name in LIBRARIES:
            importlib.import_module(name)
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    @contextmanager
    def changed(self, file: str, text: str) -> Iterator[None]:
        """Within it, ``file`` reads ``text``."""
        target = self.folder / file
        before = target.read_text(encoding="utf-8")
        compiled = Path(cache_from_source(str(target)))
        try:
            target.write_text(text, encoding="utf-8")
            compiled.unlink(missing_ok=True)  # it is known by size and second
            yield
        finally:
            target.write_text(before, encoding="utf-8")
            compiled.unlink(missing_ok=True)

    def pytest(self, arguments: Sequence[str], seconds: float) -> tuple[bool, str]:
        """Whether tests failed, and what pytest said. Tests that are not over after ``seconds`` count as failed.

        Raises:
            RuntimeError: there are no such tests.
        """
        arguments = [each for each in arguments if not each.startswith("tests/") or self._has(each)]
        output = self.folder.with_suffix(".out")
        child = os.fork()
        if not child:
            try:
                os.setsid()
                os.chdir(self.folder)
                sys.path[0:1] = [str(self.folder)]
                said = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(said, 1)
                os.dup2(said, 2)
                status = pytest.main([*QUIET, *arguments])
            except BaseException:
                traceback.print_exc()
                status = 99
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(int(status))
        ended = self._waited(child, seconds)
        text = output.read_text(encoding="utf-8", errors="replace") if output.exists() else ""
        output.unlink(missing_ok=True)
        # A fault keeps a conftest or a test file from being imported.
        broken = "while loading conftest" in text or "ERROR collecting" in text
        if ended == pytest.ExitCode.USAGE_ERROR and not broken:
            raise RuntimeError(f"{text}\npytest was asked for what is not there")
        failed = ended not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)  # markers may leave none
        return failed, text if ended is not None else f"{text}\nTimeoutError: more than {seconds:g} s"

    def _has(self, test: str) -> bool:
        """Tests may have come since the tree was copied."""
        return (self.folder / test.partition("::")[0]).exists()

    def _waited(self, child: int, seconds: float) -> int | None:
        """The exit status; None: its time is over. What it started ends with it."""
        end = time.monotonic() + seconds
        status: int | None = None
        while status is None and time.monotonic() < end:
            done, how = os.waitpid(child, os.WNOHANG)
            if done:
                status = os.waitstatus_to_exitcode(how)
            else:
                time.sleep(0.02)
        try:
            os.killpg(child, signal.SIGKILL)
        except ProcessLookupError:
            pass
        if status is None:
            os.waitpid(child, 0)
        return status
