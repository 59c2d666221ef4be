"""POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from headway.server.errors import named, refuse
from headway.server.messages import ASK_FREELY, for_template, media_of, tools_for_template, with_tools
from headway.server.protocol import DetokenizeRequest, TokenizeRequest
from headway.server.service import Service, until_gone
from headway.server.sse import encode
from headway.server.tools import tool_form

MAX_TOKENS: Final = 2**18
"""Ids that one request may have turned into text, or named; more where the context is longer."""


async def tokenize(service: Service, request: Request) -> Response:
    """Token ids of a text or a conversation."""
    body = await service.body.read(request, TokenizeRequest)
    service.check_model(body.model)
    service.need_tokenizer()
    return await until_gone(request.scope, request.receive, _tokenized(service, body))


async def _tokenized(service: Service, body: TokenizeRequest) -> Response:
    if (body.prompt is None) == (body.messages is None):
        raise refuse("give either prompt or messages", "prompt")
    if body.messages is not None:
        open_end = bool(body.continue_final_message)
        media = media_of(body.messages)
        service.check_media(media)
        messages, tools = for_template(body.messages), tools_for_template(body.tools)
        if not tool_form(service.settings.tool_call_parser, service.templates.tool_source).shown:
            messages, tools = with_tools(messages, tools, ASK_FREELY), None
        prompt = await service.conversation(
            messages,
            tools,
            media,
            add_generation_prompt=not open_end if body.add_generation_prompt is None else body.add_generation_prompt,
            continue_final_message=open_end,
            extra=body.chat_template_kwargs,
            parse_special=bool(body.parse_special),
        )
        special = bool(body.add_special_tokens)
    else:
        for name in ("add_generation_prompt", "continue_final_message", "tools", "chat_template_kwargs"):
            if getattr(body, name) is not None:
                raise refuse(f"{name} goes with messages", name)
        prompt, special = body.prompt or "", body.add_special_tokens is not False
        if body.parse_special is False:
            prompt = service.need_tokenizer().control_texts.as_text(body.prompt or "")
    with named({"multi_modal_data": "messages"}):
        ids = await service.llm.tokenize(prompt, special)
    if body.return_token_strs and len(ids) > MAX_TOKENS:
        raise refuse(f"return_token_strs: at most {MAX_TOKENS} tokens, the text has {len(ids)}", "return_token_strs")
    names = await service.llm.token_texts(ids) if body.return_token_strs else None
    limit = service.info.max_model_len
    content = encode({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": names})
    return Response(content, media_type="application/json")


async def detokenize(service: Service, request: Request) -> Response:
    """Text of token ids, special tokens included."""
    body = await service.body.read(request, DetokenizeRequest)
    service.check_model(body.model)
    service.need_tokenizer()
    size = service.info.vocab_size
    most = max(MAX_TOKENS, service.info.max_model_len)
    if len(body.tokens) > most:
        raise refuse(f"tokens: at most {most} in one request, got {len(body.tokens)}; send several requests", "tokens")
    for token in (min(body.tokens, default=0), max(body.tokens, default=0)):
        if not 0 <= token < size:
            raise refuse(f"token id {token} is outside of the vocabulary (0 to {size - 1})", "tokens")
    text = await until_gone(request.scope, request.receive, service.llm.decode(body.tokens, skip_special_tokens=False))
    return Response(encode({"prompt": text}), media_type="application/json")
