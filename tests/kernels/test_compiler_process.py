"""The compiler's process as its caller sees it, whatever it prints and however it ends; no Triton."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from headway.kernels import compiler_process
from headway.kernels.compiler_process import GONE, Compiled, CompilerProcess, Job

WAIT = 60.0


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompilerProcess]:
    monkeypatch.setattr(compiler_process, "CHILD", "tests.kernels.noisy_compiler")
    process = CompilerProcess()
    yield process
    process.close()


class Answer:
    """Takes one."""

    def __init__(self) -> None:
        self.done: Compiled | None = None
        self._told = threading.Event()

    def __call__(self, done: Compiled) -> None:
        self.done = done
        self._told.set()

    def wait(self) -> Compiled | None:
        assert self._told.wait(WAIT), "nobody answered"
        return self.done


def job(name: str) -> Job:
    return Job("module", name, "{}", ("cuda", 90, 32))


def test_what_is_no_answer_is_passed_over(compiler: CompilerProcess) -> None:
    answer = Answer()
    compiler.submit(job("answer"), answer)
    assert answer.wait() == Compiled(0.5)


def test_closing_gives_up_what_is_being_compiled(compiler: CompilerProcess) -> None:
    """Its forks have the pipes, too: they end with it, or whoever reads would wait for them."""
    first, hanging, late = Answer(), Answer(), Answer()
    compiler.submit(job("hang"), hanging)
    compiler.submit(job("answer"), first)
    assert first.wait() == Compiled(0.5)
    closing = threading.Thread(target=compiler.close)
    closing.start()
    closing.join(WAIT / 2)
    assert not closing.is_alive(), "the fork is waited for"
    assert hanging.wait() == GONE
    compiler.submit(job("answer"), late)
    assert late.wait() == GONE
