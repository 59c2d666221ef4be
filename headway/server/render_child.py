"""A process that renders chat templates: ``python -m headway.server.render_child``; see ``headway.api.killable``.

Frames are msgpack: ``Boot``, then for each ``Job`` a ``Reply``. Jobs are JSON: what clients sent as JSON may hold integers of
any length, which msgpack does not write.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import msgspec

from headway.api.chat_template import ChatTemplate
from headway.api.control_text import ControlTexts, MarkedText
from headway.api.killable import serve
from headway.core.errors import InvalidRequestError


class Boot(msgspec.Struct, array_like=True):
    """First frame: the templates, by number, the special tokens they name, and what spells control tokens."""

    sources: list[str]
    special_tokens: dict[str, str]
    control_texts: list[str] = []
    ignore_case: bool = False


class Job(msgspec.Struct, array_like=True):
    """One conversation; the arguments of ``ChatTemplate.render``."""

    template: int
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    add_generation_prompt: bool
    continue_final_message: bool
    extra: dict[str, Any]
    parse_special: bool = False


class Reply(msgspec.Struct, array_like=True):
    """The text, or why there is none and which field is to blame.

    Attributes:
        mark: the text is the marked form of a MarkedText.
    """

    text: str | None
    error: str | None = None
    parameter: str | None = None
    mark: str | None = None


def render(templates: dict[int, ChatTemplate], boot: Boot, job: Job) -> Reply:
    """Do one job; every failure becomes a Reply."""
    try:
        if job.template not in templates:
            control = ControlTexts(boot.control_texts, boot.ignore_case)
            templates[job.template] = ChatTemplate(boot.sources[job.template], boot.special_tokens, control)
        text = templates[job.template].render(
            job.messages,
            job.tools,
            job.add_generation_prompt,
            job.continue_final_message,
            job.parse_special,
            **job.extra,
        )
        text.encode()
    except InvalidRequestError as error:
        return Reply(None, str(error), error.parameter)
    except (UnicodeEncodeError, TypeError) as error:
        return Reply(None, f"the chat template fails on these messages ({error})", "messages")
    except MemoryError:
        return Reply(None, "the chat template needs too much memory for these messages", "messages")
    return Reply(text.marked, mark=text.mark) if isinstance(text, MarkedText) else Reply(text)


def start(boot: bytes) -> Callable[[bytes], bytes]:
    """What does one job after the other."""
    known = msgspec.msgpack.decode(boot, type=Boot)
    templates: dict[int, ChatTemplate] = {}
    decode = msgspec.json.Decoder(Job).decode
    return lambda data: msgspec.msgpack.encode(render(templates, known, decode(data)))


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1:], start))
