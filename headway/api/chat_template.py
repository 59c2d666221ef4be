"""Chat templates: messages to one prompt text, with the model's own Jinja template.

The environment offers what templates on the hub expect (as transformers sets it up): trimmed blocks, ``tojson`` that
does not escape HTML, ``raise_exception``, ``strftime_now``, loop controls, ``{% generation %}`` blocks. Templates come
from the model, never from a request, and are still not trusted: the sandbox is immutable, values are plain JSON data,
and the number of messages and the length of the result are bounded. Time is not: whoever serves strangers renders in a
process that can be killed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from headway.api.control_text import ControlTexts, MarkedText, free_mark, strings
from headway.core.errors import InvalidRequestError

MAX_MESSAGES: Final = 10_000
MAX_CHARS: Final = 16_000_000
"""Longest rendered prompt, in characters."""

MAX_DEPTH: Final = 64
"""Deepest nesting of lists and objects in messages, tools and extra values."""

RESERVED: Final = ("messages", "tools", "add_generation_prompt")


class ChatTemplate:
    """One compiled template; safe to share between threads.

    Args:
        source: Jinja source from the model.
        special_tokens: "bos_token" -> text and so on; templates name them.
        control: what spells the tokenizer's control tokens. Spelled in a conversation they stay text.

    Raises:
        InvalidRequestError: the source is not a valid template.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str] | None = None, control: ControlTexts | None = None
    ) -> None:
        self.source = source
        self._control = control or ControlTexts(())
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = _environment().from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise InvalidRequestError(f"the model's chat template is not valid Jinja: {error}", "messages") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        parse_special: bool = False,
        **extra: Any,
    ) -> str:
        """The prompt for ``messages``: a MarkedText where they spell control tokens.

        Args:
            messages: {"role": ..., "content": ...}, oldest first; keys whose value is None are dropped.
            tools: JSON schemas of tools, for templates that show them.
            add_generation_prompt: end with the opening of the assistant's turn.
            continue_final_message: end inside the last message, so that the model writes on in it; excludes
                ``add_generation_prompt``.
            parse_special: control tokens that the messages spell become such; else they stay text.
            extra: further template variables (``enable_thinking``, ``documents``); they win over special tokens but
                cannot replace the parameters above.

        Raises:
            InvalidRequestError: no messages or too many, values that are not JSON, the template refuses the messages
                or fails on them, or the result is too long.
        """
        if not messages or len(messages) > MAX_MESSAGES:
            raise InvalidRequestError(f"messages must hold 1 to {MAX_MESSAGES} items; got {len(messages)}", "messages")
        if continue_final_message and add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message needs add_generation_prompt=false", "continue_final_message"
            )
        for name in extra:
            if name in RESERVED:
                raise InvalidRequestError(f"chat_template_kwargs may not set {name!r}", "chat_template_kwargs")
        given = {
            **{k: _plain(v) for k, v in extra.items()},
            "messages": [{k: v for k, v in _plain(m).items() if v is not None} for m in messages],
            "tools": None if tools is None else [_plain(t) for t in tools],
        }
        mark = None
        if not parse_special and any(self._control.find(text) for text in strings(given)):
            mark = free_mark(list(strings(given)))
            given = self._control.mark_all(given, mark)
        variables = {**self._special_tokens, **given, "add_generation_prompt": add_generation_prompt}
        try:
            text = self._joined(variables)
        except InvalidRequestError:
            raise
        except jinja2.TemplateError as error:
            raise InvalidRequestError(f"the chat template refuses these messages: {error}", "messages") from error
        # A template is code over the request's data: a missing key or a wrong type raises whatever Python raises.
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise InvalidRequestError(f"the chat template fails on these messages ({reason})", "messages") from error
        text = _left_open(text, given["messages"][-1].get("content")) if continue_final_message else text
        if mark is None:
            return text
        return MarkedText.of(text.replace(json.dumps(mark)[1:-1], mark), mark)  # a filter may have escaped it

    def _joined(self, variables: dict[str, Any]) -> str:
        pieces: list[str] = []
        length = 0
        for piece in self._template.generate(variables):
            length += len(piece)
            if length > MAX_CHARS:
                raise InvalidRequestError(f"the rendered prompt is longer than {MAX_CHARS} characters", "messages")
            pieces.append(piece)
        return "".join(pieces)


def _left_open(text: str, content: Any) -> str:
    """``text`` cut right behind the last message's content, whatever the template puts after it."""
    if isinstance(content, list):
        parts = [p["text"] for p in content if isinstance(p, dict) and isinstance(p.get("text"), str)]
        content = parts[-1] if parts else None
    at = text.rfind(content.strip()) if isinstance(content, str) else -1
    if at < 0:
        raise InvalidRequestError(
            "continue_final_message: the chat template does not show the last message's text unchanged", "messages"
        )
    # Templates may strip; trailing spaces stay only where the template kept them.
    kept = content.lstrip() if text.startswith(content.lstrip(), at) else content.strip()
    return text[: at + len(kept)]


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _PublicNamespace
    # Sandboxed as a function: the class itself would hand templates its attributes.
    environment.globals["dict"] = lambda *args, **kwargs: dict(*args, **kwargs)
    return environment


class _GenerationBlock(Extension):
    """``{% generation %}...{% endgeneration %}`` marks the assistant's text for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's protocol

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Macro) -> str:
        return caller()


class _PublicNamespace(Namespace):
    """Jinja's namespace, without names that begin with an underscore: they reach into Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, values = args[0], dict(*args[1:], **kwargs)
        for name in values:
            _refuse_private(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace may not hold {name!r}")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _plain(value: Any, depth: int = 0) -> Any:
    """``value`` rebuilt from exact JSON types, so that templates meet no object with methods of its own."""
    if depth > MAX_DEPTH:
        raise InvalidRequestError(f"messages are nested deeper than {MAX_DEPTH} levels", "messages")
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {str(_plain(k, depth + 1)): _plain(v, depth + 1) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v, depth + 1) for v in value]
    raise InvalidRequestError(f"messages must be plain JSON data; found a {type(value).__name__}", "messages")
