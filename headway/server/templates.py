"""Chat templates, rendered in killable processes: a template is code over the client's data, and its time is not bounded.

Clients cannot bring templates. The model's own (or the operator's) runs in an immutable sandbox, in a process with limits of
time and memory; a conversation on which it runs too long costs that process, which is replaced, and no other.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import msgspec

from headway.api.control_text import ControlTexts, MarkedText
from headway.api.killable import Pool, TooMuchError
from headway.api.lanes import Lane
from headway.core.errors import BusyError, InvalidRequestError
from headway.core.log import logger
from headway.server.errors import ApiError, refuse
from headway.server.render_child import Boot, Job, Reply

if TYPE_CHECKING:
    from headway.api.tokenizer import Tokenizer

NUM_WORKERS: Final = 2
"""So that one conversation which takes long does not hold up all others."""
NOT_EXTRA: Final = ("self", "messages", "tools", "add_generation_prompt", "continue_final_message", "parse_special")
"""Arguments of a rendering, which ``chat_template_kwargs`` may not set."""
MAX_MEMORY_BYTES: Final = 2 * 2**30
"""Address space of a process."""
MAX_WAITING_BYTES: Final = 128 * 1024 * 1024
"""Of all conversations that wait to be rendered."""
GRACE_SECONDS: Final = 1.0
"""A rendering whose client has left may go on for so long: most end at once, and a killed process has to be replaced."""


class Templates:
    """Conversations to prompt texts.

    Args:
        tokenizer: its templates and special tokens are used; None: there is no chat.
        override: Jinja source used instead.
        seconds: processor time that one rendering may take.
    """

    def __init__(self, tokenizer: Tokenizer | None, override: str | None, seconds: float) -> None:
        plain = override if override is not None or tokenizer is None else tokenizer.pick_template()
        tools = override if override is not None or tokenizer is None else tokenizer.pick_template(has_tools=True)
        self.source = plain
        self.tool_source = tools
        special = {} if tokenizer is None else tokenizer.special_tokens
        control = ControlTexts(()) if tokenizer is None else tokenizer.control_texts
        self._boot = msgspec.msgpack.encode(
            Boot([plain or "", tools or ""], dict(special), control.texts, control.ignore_case)
        )
        self._has_tokenizer = tokenizer is not None
        self._seconds = seconds
        self._open: tuple[Pool, Lane] | None = None

    async def start(self) -> None:
        """Have a process up before the first request comes; a template that fails now may still serve some."""
        if self.source is None or not self._has_tokenizer:
            return
        probe = Job(0, [{"role": "user", "content": "x"}], None, True, False, {})
        try:
            await self._ask(probe)
        except (ApiError, BusyError) as error:
            logger.warning("the chat template fails on one short message: %s", error)

    async def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        extra: dict[str, Any] | None = None,
        parse_special: bool = False,
    ) -> str:
        """The prompt, a MarkedText where messages spell control tokens; arguments as for ``ChatTemplate.render``.

        Raises:
            InvalidRequestError: the template refuses or fails, or there is none.
            ApiError: it took too long or too much memory.
            BusyError: it could not be rendered now.
        """
        if not self._has_tokenizer:
            raise refuse("chat needs a tokenizer, but the server runs with --skip-tokenizer-init", "messages")
        source = self.tool_source if tools else self.source
        if source is None:
            raise refuse("the model has no chat template; use /v1/completions, or ask for --chat-template", "messages")
        if tools and "tools" not in source:
            raise refuse("the model's chat template does not show tools; leave tools out", "tools")
        for name in extra or {}:
            if name in NOT_EXTRA:
                raise refuse(f"chat_template_kwargs may not set {name!r}", "chat_template_kwargs")
        job = Job(
            1 if tools else 0,
            messages,
            tools,
            add_generation_prompt,
            continue_final_message,
            extra or {},
            parse_special,
        )
        reply = await self._ask(job)
        if reply.text is None:
            raise InvalidRequestError(reply.error or "the chat template fails", reply.parameter)
        return reply.text if reply.mark is None else MarkedText.of(reply.text, reply.mark)

    async def _ask(self, job: Job) -> Reply:
        try:
            data = msgspec.json.encode(job)
        except UnicodeEncodeError:
            raise refuse("the messages are not valid Unicode (lone surrogates)", "messages") from None
        if self._open is None:
            what = "rendering of a chat template"
            pool = Pool("headway.server.render_child", self._boot, NUM_WORKERS, self._seconds, MAX_MEMORY_BYTES, what)
            self._open = pool, Lane("rendering of chat templates", NUM_WORKERS, MAX_WAITING_BYTES, GRACE_SECONDS)
        pool, lane = self._open
        try:
            answer = await lane.run(lambda handle: pool.run(data, handle), len(data))
        except TooMuchError as error:
            limit = f"longer than {self._seconds:g} seconds" if error.time else "too much memory"
            raise refuse(f"the chat template takes {limit} on these messages", "messages") from None
        return msgspec.msgpack.decode(answer, type=Reply)

    async def close(self) -> None:
        """End the processes. Rendering afterwards starts new ones."""
        if self._open is not None:
            (pool, lane), self._open = self._open, None
            pool.close()
            await asyncio.to_thread(lane.close)
