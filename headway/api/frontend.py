"""What LLM and AsyncLLM share: choosing the engine client, the tokenizer, and conversations as prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headway.api.control_text import MarkedText
from headway.api.inputs import Door
from headway.api.pictures.clips import Clip
from headway.api.pictures.content import PLACE, shown, take_pictures
from headway.api.pictures.sounds import Sound
from headway.api.prompts import Prompt, TextPrompt
from headway.core.config import EngineArgs
from headway.core.errors import InvalidRequestError
from headway.core.seat import Seat
from headway.engine.client import EngineClient, InprocClient, ThreadClient

if TYPE_CHECKING:
    from headway.api.chat_template import ChatTemplate
    from headway.api.pictures.door import Pictures
    from headway.api.tokenizer import Tokenizer
    from headway.core.messages import ModelInfo

Message = Mapping[str, Any]
"""``{"role": ..., "content": ...}`` and whatever else the model's chat template reads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatOptions:
    """How conversations become text.

    Attributes:
        chat_template: Jinja source to use instead of the tokenizer's.
        add_generation_prompt: end with the opening of the assistant's turn.
        continue_final_message: leave the last message open, to be continued.
        tools: JSON schemas of functions, for templates that read them.
        parse_special: control tokens such as <|im_end|> that messages spell become such; by default they stay text.
        template_kwargs: further variables for the template.
    """

    chat_template: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: list[dict[str, Any]] | None = None
    parse_special: bool = False
    template_kwargs: dict[str, Any] = field(default_factory=dict)


def connect(args: EngineArgs, *, own_process: bool, asynchronous: bool, seat: Seat | None = None) -> EngineClient:
    """Start an engine. ``args.multiprocess`` wins over ``own_process``; raises what building the engine raises.

    Args:
        seat: of a replica that shares experts with others.
    """
    if args.data_parallel_size > 1:
        from headway.engine.replicas import ReplicaClient

        apart = args.multiprocess is not False
        return ReplicaClient(args, lambda each, seat: connect(each, own_process=apart, asynchronous=True, seat=seat))
    if args.multiprocess if args.multiprocess is not None else own_process:
        from headway.engine.process import ProcessClient

        return ProcessClient(args, seat=seat)
    return ThreadClient(args, seat=seat) if asynchronous else InprocClient(args)


def load_tokenizer(args: EngineArgs) -> Tokenizer | None:
    """The tokenizer that ``args`` name; None with skip_tokenizer_init. Raises ModelError."""
    if args.skip_tokenizer_init:
        return None
    from headway.api.tokenizer import load_tokenizer

    return load_tokenizer(args.model, tokenizer=args.tokenizer, revision=args.revision)


def load_pictures(args: EngineArgs, info: ModelInfo, tokenizer: Tokenizer | None) -> Pictures | None:
    """What prepares pictures for the engine's model; None: it sees none. Raises ConfigError."""
    if info.vision is None:
        return None
    from headway.api.pictures.door import DEFAULT_LIMITS, Pictures
    from headway.weights.source import locate

    folder = locate(args.model, revision=args.revision, weights=False).path
    folder = folder if folder.is_dir() else folder.parent
    config = json.loads((folder / "config.json").read_text("utf-8")) | (args.hf_overrides or {})
    limits = {**DEFAULT_LIMITS, **(args.limit_mm_per_prompt or {})}
    return Pictures(info.vision, info.architecture, folder, config, tokenizer, limits, info.sound)


class ChatRenderer:
    """Conversations to prompts with the tokenizer's chat template; keeps the last compiled template."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._compiled: ChatTemplate | None = None

    @property
    def has_template(self) -> bool:
        """Whether the model brings a chat template."""
        return self._tokenizer is not None and self._tokenizer.pick_template() is not None

    def render(self, messages: Sequence[Message], options: ChatOptions, *, sighted: bool = False) -> str:
        """Text of a conversation, special tokens included: tokenise it without adding any.

        Args:
            sighted: the model has sight, and contents may be lists with pictures (``pictures.content``).

        Raises:
            InvalidRequestError: no template, tools that the template would ignore, or messages it cannot render.
        """
        if self._tokenizer is None:
            raise InvalidRequestError("chat needs a tokenizer, but skip_tokenizer_init is set", "messages")
        source = options.chat_template or self._tokenizer.pick_template(has_tools=bool(options.tools))
        if source is None:
            raise InvalidRequestError("the model has no chat template; give chat_template or use generate", "messages")
        if options.tools and "tools" not in source:
            raise InvalidRequestError("the model's chat template does not show tools; leave tools out", "tools")
        if sighted:
            messages = shown(messages, source)
        compiled = self._compiled
        if compiled is None or compiled.source != source:
            from headway.api.chat_template import ChatTemplate

            compiled = self._compiled = ChatTemplate(
                source, self._tokenizer.special_tokens, self._tokenizer.control_texts
            )
        return compiled.render(
            messages,
            tools=options.tools,
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
            parse_special=options.parse_special,
            **options.template_kwargs,
        )


def chat_prompt(door: Door, renderer: ChatRenderer, talk: Sequence[Message], options: ChatOptions) -> Prompt:
    """The prompt that a conversation is, with its pictures.

    Raises:
        InvalidRequestError: there are pictures, and the model sees none; or it cannot be rendered.
    """
    messages, pictures = take_pictures(talk)
    if door.pictures is None:
        if pictures:
            raise InvalidRequestError(
                f"{door.info.architecture} sees no pictures and hears no recordings in prompts; leave them out",
                "messages",
            )
        return renderer.render(talk, options)
    text = renderer.render(messages, options, sighted=True)
    return picture_prompt(door.pictures, text, pictures) if pictures else text


def picture_prompt(door: Pictures, text: str, pictures: Sequence[object]) -> TextPrompt:
    """The prompt of a rendered conversation with pictures: places that the template left open get the model's marker."""
    if isinstance(text, MarkedText):
        text = MarkedText.of(text.marked.replace(PLACE, door.marker), text.mark)
    else:
        text = text.replace(PLACE, door.marker)
    data: dict[str, list[object]] = {}
    for each in pictures:
        kind = "video" if isinstance(each, Clip) else "audio" if isinstance(each, Sound) else "image"
        data.setdefault(kind, []).append(each)
    return {"prompt": text, "multi_modal_data": data}


def conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[list[Message]]:
    """One conversation or a list of them, as a list."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise InvalidRequestError("messages must be a non-empty list of messages, or a list of such lists", "messages")
    if all(isinstance(message, Mapping) for message in messages):
        return [list(messages)]
    for conversation in messages:
        if not isinstance(conversation, (list, tuple)) or not conversation:
            raise InvalidRequestError("each conversation must be a non-empty list of messages", "messages")
        if not all(isinstance(message, Mapping) for message in conversation):
            raise InvalidRequestError("each message must be a dictionary with a role and a content", "messages")
    return [list(conversation) for conversation in messages]
