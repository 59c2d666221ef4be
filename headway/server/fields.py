"""Fields that are refused by name, and fields that are accepted because ignoring them changes nothing."""

from __future__ import annotations

from typing import Final

_STRUCTURED: Final = 'use structured_outputs: {"%s": ...}'
_TEXT_ONLY: Final = "this server makes text only"

REFUSED: Final = {
    "guided_json": _STRUCTURED % "json",
    "guided_regex": _STRUCTURED % "regex",
    "guided_choice": _STRUCTURED % "choice",
    "guided_grammar": _STRUCTURED % "grammar",
    "guided_json_object": _STRUCTURED % "json_object",
    "guided_decoding_backend": "the backend is the server's choice; leave it out",
    "guided_whitespace_pattern": "write the whitespace into structured_outputs.regex or .grammar",
    "structural_tag": 'use tools, or structured_outputs: {"grammar": ...}',
    "best_of": "use n and choose among the answers by logprobs",
    "use_beam_search": "beam search is not served; use n",
    "length_penalty": "it belongs to beam search, which is not served",
    "suffix": "filling in the middle is not served; write the model's own markers into the prompt",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "chat_template": "templates from clients are refused; the operator may start the server with --chat-template",
    "documents": "use chat_template_kwargs if the model's template reads documents",
    "priority": "requests are served in the order of their arrival; leave it out",
    "audio": _TEXT_ONLY,
    "input_audio": _TEXT_ONLY,
    "image_url": _TEXT_ONLY,
    "input_image": _TEXT_ONLY,
    "video_url": _TEXT_ONLY,
    "file": _TEXT_ONLY,
    "input_file": _TEXT_ONLY,
    "prediction": "predicted outputs are not served; leave it out",
    "reasoning_effort": "use chat_template_kwargs if the model's template has such a switch",
    "reasoning": "use chat_template_kwargs of /v1/chat/completions if the model's template has such a switch",
    "verbosity": "say in the prompt how long the answer shall be",
    "web_search_options": "this server does not search the web; leave it out",
    "truncate_prompt_tokens": "shorten the prompt before sending it (/tokenize counts)",
    "request_id": "request ids are made by the server; the header X-Request-Id of the answer has it",
    "return_token_ids": "ask for logprobs, or send the answer to /tokenize",
    "return_tokens_as_token_ids": "ask /tokenize with return_token_strs",
    "spaces_between_special_tokens": "special tokens are shown as the tokenizer joins them; leave it out",
    "detokenize": "answers are text; use the Python API for token ids",
    "mm_processor_kwargs": _TEXT_ONLY,
    "prompt_embeds": "send text or token ids",
    "logits_processors": "code from clients is refused; logit_bias, bad_words and allowed_token_ids are served",
    "kv_transfer_params": "the KV cache is not moved between servers; leave it out",
    "vllm_xargs": "there are no extensions here; leave it out",
    "conversation": "conversations are not kept; send the whole of it as input",
    "previous_response_id": "answers are not kept; send the whole conversation as input",
    "prompt": "this route takes messages or input, and no stored prompts",
    "background": "answers are not kept; wait for this one, or stream it",
    "max_tool_calls": "built-in tools are not served; leave it out",
    "prompt_cache_retention": "how long a prefix is kept is not promised; leave it out",
    "prompt_cache_options": "every prefix is cached while there is room; leave it out, or use cache_salt",
    "prompt_cache_breakpoint": "every prefix is cached while there is room; leave it out, or use cache_salt",
    "max_tokens_per_doc": "use truncate_prompt_tokens, which cuts query and document together",
    "max_chunks_per_doc": "documents are not cut into chunks here; cut them before sending",
    "rank_fields": 'send the texts that count: strings, or objects with "text"',
    "embedding_types": "use encoding_format: float or base64",
    "embed_dtype": "vectors are float32; leave it out",
    "endianness": "base64 is little-endian; leave it out",
    "task_id": "use prompt_name",
    "late_chunking": "each text has vectors of its own; leave it out",
    "moderation": "answers are not moderated; leave it out",
    "context_management": "conversations are not kept; send the whole of it as input",
}
"""Field (or kind of content) -> what to do instead, for the error message."""

ONLY_EMPTY: Final = {
    "include": "nothing more can be included; leave it out",
}
"""Fields of /v1/responses that only an empty list is taken for -> what to do instead."""

LENGTHS: Final = ("max_tokens", "max_output_tokens", "max_completion_tokens", "max_new_tokens")
"""What routes and other servers call the longest answer: whoever takes one for another meant this route's own."""

HARMLESS: Final = ("user", "metadata", "store", "safety_identifier", "prompt_cache_key", "service_tier")
"""Accepted and without effect here: they name callers or ask a hosted service to keep, route or bill something.

``store: true`` and service tiers other than "auto" and "default" are refused, for those would be promises.
"""
