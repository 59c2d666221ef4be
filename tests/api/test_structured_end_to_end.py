"""Structured output on real weights, through every way in: ``LLM``, an engine process, ``AsyncLLM``."""

from __future__ import annotations

import asyncio
import json
import re
import runpy
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import headway
from headway import LLM, AsyncLLM, InvalidRequestError, SamplingParams, StructuredOutputsParams

PAGE = Path(__file__).parents[2] / "docs" / "structured_output.md"
SIZES = {"max_model_len": 256, "max_num_seqs": 8, "device": "cpu", "run_ahead": 2}
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["kind", "tall"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
}
PATTERN = r"[A-Z][a-z]{2,8}( [a-z]{2,8}){1,3}\."


def params(seed: int, **wanted: Any) -> SamplingParams:
    return SamplingParams(
        temperature=1.5, seed=seed, max_tokens=60, structured_outputs=StructuredOutputsParams(**wanted)
    )


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("smollm2", **SIZES) as engine:
        yield engine


def test_answers_are_what_was_asked_for(llm: LLM) -> None:
    asked = [params(seed, **wanted) for seed in range(2) for wanted in ({"json": PERSON}, {"regex": PATTERN})]
    asked.append(params(8, grammar='start: "<" start ">" | /[a-z]{2,5}/'))
    asked.append(params(9, choice=["left", "right", "straight on"]))
    outputs = llm.generate(["Write something:"] * len(asked), asked, use_tqdm=False)
    for wanted, output in zip(asked, outputs, strict=True):
        [answer] = output.outputs
        assert answer.finish_reason == "stop", answer
        kind = wanted.structured_outputs
        assert kind is not None
        if kind.json is not None:
            jsonschema.validate(json.loads(answer.text), PERSON)
        elif kind.regex is not None:
            assert re.fullmatch(PATTERN, answer.text)
        elif kind.grammar is not None:
            assert re.fullmatch("<*[a-z]{2,5}>*", answer.text) and answer.text.count("<") == answer.text.count(">")
        else:
            assert answer.text in ("left", "right", "straight on")


def test_the_example_of_the_page_runs(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    (tmp_path / "example.py").write_text(found[1], encoding="utf-8")
    monkeypatch.setattr(headway, "LLM", lambda model: nullcontext(llm))  # one engine is enough
    runpy.run_path(str(tmp_path / "example.py"))
    person = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert isinstance(person["name"], str) and 0 <= person["age"] <= 150


def test_a_cut_answer_says_length(llm: LLM) -> None:
    cut = SamplingParams(temperature=0.0, max_tokens=3, structured_outputs=StructuredOutputsParams(json=PERSON))
    [output] = llm.generate("A person:", cut, use_tqdm=False)
    assert output.outputs[0].finish_reason == "length" and output.outputs[0].text.startswith('{"name"')


def test_a_refused_grammar_names_its_reason_and_harms_nobody(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="look-around"):
        llm.generate("a", params(0, regex="(?=a)b"), use_tqdm=False)
    assert llm.generate("a", params(0, regex="ab?"), use_tqdm=False)[0].outputs[0].text in ("a", "ab")


@pytest.mark.slow
def test_completions_of_one_prompt_in_an_engine_process(llm: LLM) -> None:
    wanted = SamplingParams(
        n=2, temperature=1.2, seed=4, max_tokens=30, structured_outputs=StructuredOutputsParams(regex=PATTERN)
    )
    here = llm.generate("Tell me", wanted, use_tqdm=False)[0].outputs
    with LLM("smollm2", multiprocess=True, **SIZES) as other:
        there = other.generate("Tell me", wanted, use_tqdm=False)[0].outputs
    assert [answer.text for answer in here] == [answer.text for answer in there]
    assert all(re.fullmatch(PATTERN, answer.text) for answer in there)


def test_streaming() -> None:
    async def stream() -> str:
        async with AsyncLLM("smollm2", multiprocess=False, **SIZES) as engine:

            async def one(seed: int) -> str:
                text = ""
                async for output in engine.generate("A person:", params(seed, json=PERSON)):
                    text = output.outputs[0].text
                return text

            with pytest.raises(InvalidRequestError, match="valid JSON"):
                async for _ in engine.generate("A person:", params(0, json="{")):
                    pass
            texts = await asyncio.gather(*(one(seed) for seed in range(2)))
            for text in texts:
                jsonschema.validate(json.loads(text), PERSON)
            return texts[0]

    assert asyncio.run(stream())
