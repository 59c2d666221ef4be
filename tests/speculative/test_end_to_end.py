"""Text in, text out, on real weights: what the front end makes of several tokens an update is what it makes of single ones."""

from __future__ import annotations

from typing import Any

import pytest

from headway import LLM, RequestOutput, SamplingParams

SIZES: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 8, "dtype": "float32", "device": "cpu"}
CONFIG = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1, "prompt_lookup_max": 4}
LIST = "one, two, three, one, two, three, one, two, three, one, two,"
ASKED: list[tuple[str, dict[str, Any]]] = [
    (LIST, {"temperature": 0.0, "max_tokens": 24, "logprobs": 1}),
    (LIST, {"temperature": 0.0, "max_tokens": 40, "stop": ["three, one"]}),
    (LIST, {"temperature": 0.0, "max_tokens": 40, "stop": ["wo, th"], "include_stop_str_in_output": True}),
    (LIST, {"temperature": 0.8, "seed": 5, "n": 3, "max_tokens": 16}),
    (LIST, {"temperature": 0.0, "max_tokens": 12, "prompt_logprobs": 0, "bad_words": [" three"]}),
]


def told(output: RequestOutput) -> list[Any]:
    """What the user sees, log-probabilities rounded."""
    rows = output.prompt_logprobs or []
    prompt = [{token: round(each.logprob, 2) for token, each in row.items()} for row in rows if row]
    found: list[Any] = [prompt]
    for each in output.outputs:
        logprobs = [{token: round(lp.logprob, 2) for token, lp in row.items()} for row in each.logprobs or []]
        found.append((each.text, each.token_ids, each.finish_reason, each.stop_reason, logprobs))
    return found


@pytest.mark.slow
def test_texts_are_those_of_plain_decoding() -> None:
    prompts, params = [prompt for prompt, _ in ASKED], [SamplingParams(**each) for _, each in ASKED]
    answers = []
    for config in (None, CONFIG):
        with LLM("smollm2", speculative_config=config, **SIZES) as llm:
            answers.append([told(output) for output in llm.generate(prompts, params)])
            stats = llm._client.stats()
    assert answers[0] == answers[1]
    assert stats.num_accepted_tokens > stats.num_drafts, "of such a list more than one draft a step is right"
    stopped = answers[1][1][1]
    assert stopped[2:4] == ("stop", "three, one") and "three, one" not in stopped[0]
