"""Bodies of requests. Types and unknown fields are checked while decoding, values by ``SamplingParams`` and the door of
the API floor; limits in the JSON schema repeat theirs, for the OpenAPI description only.

None always means "not given".
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta


def _range(low: float | None = None, high: float | None = None) -> Meta:
    limits = {"minimum": low, "maximum": high}
    return Meta(extra_json_schema={name: value for name, value in limits.items() if value is not None})


FUNCTION_NAME = r"^(?!.*\n)[a-zA-Z0-9_.-]{1,128}$"
"""``$`` alone would let a line break through behind the name."""
Count = Annotated[int, _range(1, 2**31 - 1)]
TokenId = Annotated[int, _range(0)]
Penalty = Annotated[float, _range(-2, 2)]


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``include_usage``: a last chunk with the usage; ``continuous_usage_stats``: in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchema(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A named schema. ``strict`` changes nothing: the schema always holds."""

    name: str
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``text``, ``json_object``, or ``json_schema`` with its schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Exactly one of these; see ``StructuredOutputsParams``."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Sampling(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What every generating route takes."""

    model: str | None = None
    stream: bool | None = None
    temperature: Annotated[float, _range(0, 100)] | None = None
    top_p: Annotated[float, Meta(extra_json_schema={"exclusiveMinimum": 0, "maximum": 1})] | None = None
    top_k: Annotated[int, _range(-1, 2**31 - 1)] | None = None
    min_p: Annotated[float, _range(0, 1)] | None = None
    seed: Annotated[int, _range(-(2**63), 2**63 - 1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(extra_json_schema={"exclusiveMinimum": 0, "maximum": 100})] | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[TokenId] | None = None
    bad_words: list[str] | None = None
    min_tokens: Annotated[int, _range(0, 2**31 - 1)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    disable_spec_decode: bool | None = None
    parse_special: bool | None = None
    cache_salt: Annotated[str, Meta(extra_json_schema={"minLength": 1, "maxLength": 1024})] | None = None
    structured_outputs: StructuredOutputs | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default"] | None = None


class PromptSampling(Sampling, kw_only=True, forbid_unknown_fields=True):
    """What completions and chat completions have in common beyond that."""

    n: Annotated[int, _range(1, 256)] | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    prompt_logprobs: Annotated[int, _range(0)] | None = None
    logprob_token_ids: list[TokenId] | None = None


class CompletionRequest(PromptSampling, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions. Several prompts give ``n`` choices each, in their order."""

    prompt: str | list[str | int | list[int]]
    max_tokens: Annotated[int, _range(0, 2**31 - 1)] | None = None
    logprobs: Annotated[int, _range(0)] | None = None
    echo: bool | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None


class ImageUrl(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Where an image is. ``detail`` is OpenAI's, and has no meaning here: each model has one way of preparing images."""

    url: str
    detail: Literal["auto", "low", "high"] | None = None


class InputAudio(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A recording: its file in base64. ``format`` is OpenAI's, and has no meaning here: the file says what it is."""

    data: str
    format: Literal["wav", "mp3", "flac", "ogg"] | None = None


class TextPart(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A piece of a message: text or, for models that take them, an image or a recording. Videos are known in order to be
    refused."""

    type: Literal["text", "input_text", "output_text", "refusal", "image_url", "input_audio", "audio_url", "video_url"]
    text: str | None = None
    image_url: ImageUrl | None = None
    input_audio: InputAudio | None = None
    audio_url: dict[str, Any] | None = None
    video_url: dict[str, Any] | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None

    @property
    def is_medium(self) -> bool:
        """Whether it is an image or a recording."""
        return self.type in ("image_url", "input_audio") or self.image_url is not None or self.input_audio is not None


class InputPart(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A piece of a message given to /v1/responses: an image's address is a field of its own here."""

    type: Literal["text", "input_text", "output_text", "refusal", "input_image", "input_audio", "input_file"]
    text: str | None = None
    image_url: str | None = None
    detail: Literal["auto", "low", "high", "original"] | None = None
    file_id: str | None = None
    input_audio: InputAudio | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class FunctionCall(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``arguments`` is a JSON object, as text."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A call the model made in an earlier turn."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One message of a conversation. "developer" is shown to the template as "system"."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None


class Function(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A function the model may call; ``parameters`` is the JSON schema of its arguments."""

    name: Annotated[str, Meta(pattern=FUNCTION_NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool; functions are the only kind served."""

    function: Function
    type: Literal["function"] = "function"


class FunctionName(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The name of one of the functions."""

    name: str


class NamedTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="function"):
    """The one tool that must be called."""

    function: FunctionName

    def name_of(self) -> str:
        return self.function.name


class ToolName(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One of the tools, by its name."""

    function: FunctionName
    type: Literal["function"] = "function"


class Allowed(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``auto``: some of these may be called; ``required``: one must be."""

    mode: Literal["auto", "required"]
    tools: list[ToolName]


class AllowedTools(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="allowed_tools"):
    """Only some of the tools may be called."""

    allowed_tools: Allowed

    def names_of(self) -> list[str]:
        return [tool.function.name for tool in self.allowed_tools.tools]

    def mode_of(self) -> str:
        return self.allowed_tools.mode


class ChatRequest(PromptSampling, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, _range(0)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


ItemStatus = Literal["in_progress", "completed", "incomplete"]


class InputItem(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One item given to /v1/responses: a message, a call the model made, or what came of one.

    Ids and states of earlier answers are read and not used. Which fields an item of each type has is checked in ``messages``.
    """

    type: Literal["message", "function_call", "function_call_output"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None
    id: str | None = None
    status: ItemStatus | None = None


class ResponsesTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """As Tool, with the function's fields on the same level."""

    name: Annotated[str, Meta(pattern=FUNCTION_NAME)]
    type: Literal["function"] = "function"
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponsesToolName(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One of the tools, by its name."""

    name: str
    type: Literal["function"] = "function"


class ResponsesNamedTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="function"):
    """The one tool that must be called."""

    name: str


class ResponsesAllowedTools(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="allowed_tools"
):
    """Only some of the tools may be called (``auto``), or one of them must be (``required``)."""

    mode: Literal["auto", "required"]
    tools: list[ResponsesToolName]


class TextFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """As ResponseFormat, with the schema's fields on the same level."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class ResponsesStreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The one that /v1/responses has."""

    include_obfuscation: bool | None = None


class TextOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The form of the answer."""

    format: TextFormat | None = None


class ResponsesRequest(Sampling, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/responses: text, images and calls of functions; nothing is stored."""

    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    text: TextOptions | None = None
    stream_options: ResponsesStreamOptions | None = None
    truncation: Literal["disabled"] | None = None
    parallel_tool_calls: bool | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponsesNamedTool | ResponsesAllowedTools | None = None
    include: Annotated[list[Any], Meta(max_length=0)] | None = None
    background: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize: either ``prompt`` or ``messages``."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize."""

    tokens: list[TokenId]
    model: str | None = None
