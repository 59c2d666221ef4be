"""POST /tokenize and /detokenize."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from headway.api.inputs import LONG_TEXT_CHARS
from headway.server.errors import refuse
from headway.server.messages import for_template, tools_for_template
from headway.server.protocol import DetokenizeRequest, TokenizeRequest
from headway.server.service import Service
from headway.server.sse import encode


async def tokenize(service: Service, request: Request) -> Response:
    """Token ids of a text or a conversation."""
    body = await service.body.read(request, TokenizeRequest)
    service.check_model(body.model)
    tokenizer = service.need_tokenizer()
    if (body.prompt is None) == (body.messages is None):
        raise refuse("give either prompt or messages", "prompt")
    if body.messages is not None:
        open_end = bool(body.continue_final_message)
        text = await service.templates.render(
            for_template(body.messages),
            tools=tools_for_template(body.tools),
            add_generation_prompt=not open_end if body.add_generation_prompt is None else body.add_generation_prompt,
            continue_final_message=open_end,
            extra=body.chat_template_kwargs,
        )
        special = bool(body.add_special_tokens)
    else:
        for name in ("add_generation_prompt", "continue_final_message", "tools", "chat_template_kwargs"):
            if getattr(body, name) is not None:
                raise refuse(f"{name} goes with messages", name)
        text, special = body.prompt or "", body.add_special_tokens is not False

    def answer() -> bytes:
        ids = tokenizer.encode(text, special)
        names = [tokenizer.token_text(token) for token in ids] if body.return_token_strs else None
        limit = service.info.max_model_len
        return encode({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": names})

    content = await asyncio.to_thread(answer) if len(text) > LONG_TEXT_CHARS else answer()
    return Response(content, media_type="application/json")


async def detokenize(service: Service, request: Request) -> Response:
    """Text of token ids, special tokens included."""
    body = await service.body.read(request, DetokenizeRequest)
    service.check_model(body.model)
    tokenizer = service.need_tokenizer()
    size = service.info.vocab_size
    for token in (min(body.tokens, default=0), max(body.tokens, default=0)):
        if not 0 <= token < size:
            raise refuse(f"token id {token} is outside of the vocabulary (0 to {size - 1})", "tokens")
    text = await asyncio.to_thread(tokenizer.decode, body.tokens, False)
    return Response(encode({"prompt": text}), media_type="application/json")
