"""Request fields to ``SamplingParams``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import msgspec

from headway.core.params import SamplingParams, StructuredOutputsParams
from headway.server.errors import refuse
from headway.server.protocol import ResponseFormat, Sampling, StructuredOutputs

SAME_NAME: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "disable_spec_decode",
    "n",
    "prompt_logprobs",
    "logprob_token_ids",
)


def sampling_params(defaults: SamplingParams, body: Sampling, **own: Any) -> SamplingParams:
    """The model's defaults, then what the request gives, then ``own``.

    Raises:
        InvalidRequestError: a value out of its range.
    """
    given = {name: value for name in SAME_NAME if (value := getattr(body, name, None)) is not None}
    return replace(defaults, **{**given, **own})


def structured(
    outputs: StructuredOutputs | None, response_format: ResponseFormat | None
) -> StructuredOutputsParams | None:
    """What the answer must look like, from vLLM's field or OpenAI's; both at once are refused."""
    made = _from_format(response_format)
    if outputs is None:
        return made
    if made is not None:
        raise refuse("give either structured_outputs or response_format, not both", "structured_outputs")
    given = {name: value for name, value in msgspec.structs.asdict(outputs).items() if value is not None}
    return StructuredOutputsParams(**given)


def _from_format(wanted: ResponseFormat | None) -> StructuredOutputsParams | None:
    if wanted is None:
        return None
    if (wanted.type == "json_schema") != (wanted.json_schema is not None):
        raise refuse("json_schema and type: json_schema go together", "response_format.json_schema")
    if wanted.json_schema is not None:
        return StructuredOutputsParams(json=wanted.json_schema.schema)
    return StructuredOutputsParams(json_object=True) if wanted.type == "json_object" else None
