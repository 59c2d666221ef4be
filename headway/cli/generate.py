"""``headway generate``: one prompt, its continuation on stdout."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated, Any

import typer

from headway.cli.options import with_options
from headway.cli.streaming import Answer, merge_params, start_engine, stream_answer
from headway.core.config import EngineArgs
from headway.core.errors import InvalidRequestError

DEFAULT_MAX_TOKENS = 256


@with_options(sampling=True)
def generate(
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Text to complete; without it, stdin.")] = None,
    stream: Annotated[bool, typer.Option("--stream/--no-stream", help="Show text as it comes.")] = True,
    chat: Annotated[
        bool | None, typer.Option("--chat/--no-chat", help="Use the chat template.", show_default="if there is one")
    ] = None,
    *,
    engine: EngineArgs,
    sampling: dict[str, Any],
) -> None:
    """Complete a prompt. Text goes to stdout, figures to stderr. At most 256 tokens unless --max-tokens."""
    text = sys.stdin.read() if prompt is None else prompt
    if not text.strip():
        raise InvalidRequestError("there is no prompt; give --prompt TEXT or text on stdin", "prompt")
    llm = start_engine(engine)
    try:
        params = merge_params(llm, sampling, max_tokens=max(DEFAULT_MAX_TOKENS, sampling.get("min_tokens", 0)))
        as_chat = llm.has_chat_template if chat is None else chat
        if as_chat:
            outputs = llm.chat([{"role": "user", "content": text}], params, delta=True)
        else:
            outputs = llm.generate(text, params, delta=True)
        answer = Answer([""] * params.n)
        show = stream and params.n == 1
        try:
            asyncio.run(stream_answer(outputs, answer, show))
        finally:
            if show:
                typer.echo()
        if not show:
            typer.echo("\n---\n".join(answer.texts))
        typer.echo(answer.line(), err=True)
    finally:
        llm.shutdown()
