"""A process that renders chat templates and can be killed: ``python -m headway.server.render_child FD SECONDS``.

Frames on the socket are a 4-byte length and msgpack; see ``Boot``, ``Job`` and ``Reply``. The process ends itself when one
job takes longer than SECONDS, when its memory limit is reached, or when the other end closes.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import socket
import struct
import sys
from typing import Any, Final

import msgspec

from headway.api.chat_template import ChatTemplate
from headway.core.errors import InvalidRequestError

MAX_MEMORY: Final = 2 * 2**30
"""Address space, in bytes."""
LENGTH: Final = struct.Struct("<I")


class Boot(msgspec.Struct, array_like=True):
    """First frame: the templates, by number, and the special tokens they name."""

    sources: list[str]
    special_tokens: dict[str, str]


class Job(msgspec.Struct, array_like=True):
    """One conversation; the arguments of ``ChatTemplate.render``."""

    template: int
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    add_generation_prompt: bool
    continue_final_message: bool
    extra: dict[str, Any]


class Reply(msgspec.Struct, array_like=True):
    """The text, or why there is none and which field is to blame."""

    text: str | None
    error: str | None = None
    parameter: str | None = None


def receive(connection: socket.socket) -> bytes | None:
    """Next frame; None at the end."""
    head = _exactly(connection, LENGTH.size)
    return None if head is None else _exactly(connection, LENGTH.unpack(head)[0])


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        piece = connection.recv(min(count - len(data), 2**20))
        if not piece:
            return None
        data += piece
    return bytes(data)


def render(templates: dict[int, ChatTemplate], boot: Boot, job: Job) -> Reply:
    """Do one job; every failure becomes a Reply."""
    try:
        if job.template not in templates:
            templates[job.template] = ChatTemplate(boot.sources[job.template], boot.special_tokens)
        text = templates[job.template].render(
            job.messages, job.tools, job.add_generation_prompt, job.continue_final_message, **job.extra
        )
        text.encode()
    except InvalidRequestError as error:
        return Reply(None, str(error), error.parameter)
    except (UnicodeEncodeError, TypeError) as error:
        return Reply(None, f"the chat template fails on these messages ({error})", "messages")
    except MemoryError:
        return Reply(None, "the chat template needs too much memory for these messages", "messages")
    return Reply(text)


def main(fd: int, seconds: float) -> int:
    """Serve jobs until the other end closes; returns the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    with socket.socket(fileno=fd) as connection:
        first = receive(connection)
        if first is None:
            return 0
        boot = msgspec.msgpack.decode(first, type=Boot)
        templates: dict[int, ChatTemplate] = {}
        while (frame := receive(connection)) is not None:
            signal.setitimer(signal.ITIMER_REAL, seconds)  # SIGALRM's default action ends the process
            reply = msgspec.msgpack.encode(render(templates, boot, msgspec.msgpack.decode(frame, type=Job)))
            signal.setitimer(signal.ITIMER_REAL, 0)
            connection.sendall(LENGTH.pack(len(reply)) + reply)
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2])))
