"""Chat templates, rendered in killable processes: a template is code over the client's data, and its time is not bounded.

Clients cannot bring templates. The model's own (or the operator's) runs in an immutable sandbox, in a process with limits of
time and memory; a conversation on which it runs too long costs that process, which is replaced, and nobody else's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import weakref
from typing import TYPE_CHECKING, Any, Final

import msgspec

from headway.core.errors import InvalidRequestError
from headway.core.log import logger
from headway.server.errors import ApiError, refuse
from headway.server.render_child import LENGTH, Boot, Job, Reply

if TYPE_CHECKING:
    from headway.api.tokenizer import Tokenizer

NUM_WORKERS: Final = 2
"""So that one conversation which takes long does not hold up all others."""
BOOT_SECONDS: Final = 60.0
"""Added to a worker's first job: the process has to start."""
KEPT_ENVIRONMENT: Final = ("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
"""Keys and tokens in the environment are none of a template's business."""


class _Worker:
    """One process and the socket to it."""

    def __init__(self, boot: Boot, seconds: float) -> None:
        ours, theirs = socket.socketpair()
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        environment = {name: os.environ[name] for name in KEPT_ENVIRONMENT if name in os.environ}
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "headway.server.render_child", str(theirs.fileno()), str(seconds)],
                env={**environment, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=(theirs.fileno(),),
            )
        self._socket = ours
        self._boot = boot
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._end = weakref.finalize(self, _kill, self.process, ours)

    async def ask(self, job: Job, seconds: float) -> Reply:
        """Raises TimeoutError, or OSError and EOFError when the process died."""
        first = self._streams is None
        async with asyncio.timeout(seconds + (BOOT_SECONDS if first else 0)):
            if self._streams is None:
                self._streams = await asyncio.open_connection(sock=self._socket)
                self._write(msgspec.msgpack.encode(self._boot))
            self._write(msgspec.msgpack.encode(job))
            reader, writer = self._streams
            await writer.drain()
            head = await reader.readexactly(LENGTH.size)
            return msgspec.msgpack.decode(await reader.readexactly(LENGTH.unpack(head)[0]), type=Reply)

    def _write(self, data: bytes) -> None:
        assert self._streams is not None
        self._streams[1].write(LENGTH.pack(len(data)) + data)

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
        self._end()


def _kill(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.close()
    process.kill()
    process.wait()


class Templates:
    """Conversations to prompt texts.

    Args:
        tokenizer: its templates and special tokens are used; None: there is no chat.
        override: Jinja source used instead.
        seconds: how long one rendering may take.
    """

    def __init__(self, tokenizer: Tokenizer | None, override: str | None, seconds: float) -> None:
        plain = override if override is not None or tokenizer is None else tokenizer.pick_template()
        tools = override if override is not None or tokenizer is None else tokenizer.pick_template(has_tools=True)
        self.source = plain
        self.tool_source = tools
        special = {} if tokenizer is None else tokenizer.special_tokens
        self._boot = Boot([plain or "", tools or ""], dict(special))
        self._has_tokenizer = tokenizer is not None
        self._seconds = seconds
        self._idle: list[_Worker] = []
        self._room = asyncio.Semaphore(NUM_WORKERS)

    async def start(self) -> None:
        """Have a process up before the first request comes; a template that fails now may still serve some."""
        if self.source is None or not self._has_tokenizer:
            return
        probe = Job(0, [{"role": "user", "content": "x"}], None, True, False, {})
        try:
            await self._ask(probe)
        except ApiError as error:
            logger.warning("the chat template fails on one short message: %s", error)

    async def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        extra: dict[str, Any] | None = None,
    ) -> str:
        """The prompt, special tokens included; arguments as for ``ChatTemplate.render``.

        Raises:
            InvalidRequestError: the template refuses or fails, or there is none.
            ApiError: it took too long or too much memory.
        """
        if not self._has_tokenizer:
            raise refuse("chat needs a tokenizer, but the server runs with --skip-tokenizer-init", "messages")
        source = self.tool_source if tools else self.source
        if source is None:
            raise refuse("the model has no chat template; use /v1/completions, or ask for --chat-template", "messages")
        if tools and "tools" not in source:
            raise refuse("the model's chat template does not show tools; leave tools out", "tools")
        for name in extra or {}:
            if name in ("self", "messages", "tools", "add_generation_prompt", "continue_final_message"):
                raise refuse(f"chat_template_kwargs may not set {name!r}", "chat_template_kwargs")
        job = Job(1 if tools else 0, messages, tools, add_generation_prompt, continue_final_message, extra or {})
        reply = await self._ask(job)
        if reply.text is None:
            raise InvalidRequestError(reply.error or "the chat template fails", reply.parameter)
        return reply.text

    async def _ask(self, job: Job) -> Reply:
        async with self._room:
            worker = self._idle.pop() if self._idle else _Worker(self._boot, self._seconds + 1)
            done = False
            try:
                reply = await worker.ask(job, self._seconds)
                done = True
                return reply
            except TimeoutError:
                raise refuse(
                    f"the chat template takes longer than {self._seconds:g} seconds on these messages", "messages"
                ) from None
            except (OSError, EOFError):
                raise refuse("the chat template runs out of memory or time on these messages", "messages") from None
            finally:
                if done:
                    self._idle.append(worker)
                else:
                    worker.close()

    def close(self) -> None:
        """End the processes. Rendering afterwards starts new ones."""
        while self._idle:
            self._idle.pop().close()
