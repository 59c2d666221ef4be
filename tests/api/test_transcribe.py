"""Transcribing: tokens are those of transformers, windows lie where they were cut, and options are honoured or refused."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from headway import LLM, SamplingParams
from headway.api.hearing.transcriber import Transcriber, TranscriptionOptions
from headway.api.hearing.transcript import Segment, Word, as_srt, as_vtt
from headway.api.hearing.windows import cut
from headway.api.hearing.words import timed_words
from headway.core.errors import InvalidRequestError
from headway.core.outputs import CompletionOutput
from headway.multimodal.audio.decode import RATE
from headway.multimodal.audio.mel import log_mel
from tests.api import tiny_whisper as tiny
from tests.engine.tiny_encoder_decoders import frames_of

ENGINE: dict[str, Any] = {"dtype": "float32", "device": "cpu", "kv_cache_memory_bytes": 2**22, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def hearing(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str]:
    made = tiny.make(tmp_path_factory.mktemp("whisper"))
    made[0].set_attn_implementation("eager")
    return made


@pytest.fixture(scope="module")
def llm(hearing: tuple[Any, str]) -> Any:
    with LLM(hearing[1], **ENGINE) as made:
        yield made


def prompt_of(model: Any, samples: Any, *, timed: bool, task: int = tiny.TRANSCRIBE) -> list[int]:
    start, end = cut(samples, tiny.WINDOW)[0]
    ids = [tiny.START, tiny.language_of(model, samples[start:end]), task]
    return ids if timed else [*ids, tiny.NO_TIMES]


@pytest.mark.parametrize("depth", [0, 1, 2, 4])
@pytest.mark.parametrize("timed", [True, False])
def test_tokens_are_those_of_transformers(hearing: tuple[Any, str], depth: int, timed: bool) -> None:
    model, folder = hearing
    recordings = [tiny.sounds(seconds, seed) for seed, seconds in enumerate((0.5, 2.3, 0.05))]
    options = TranscriptionOptions(timestamps=timed, max_tokens=9)
    with LLM(folder, run_ahead=depth, **ENGINE) as llm:
        found = llm.transcribe([(each, RATE) for each in recordings], options)
        read = llm.get_tokenizer().decode
    for samples, transcript in zip(recordings, found, strict=True):
        prompt = prompt_of(model, samples, timed=timed)
        assert transcript.language == ("en" if prompt[1] == tiny.EN else "de")
        assert transcript.duration == pytest.approx(len(samples) / RATE)
        expected: list[tuple[float, float, list[int]]] = []
        for start, end in cut(samples, tiny.WINDOW):
            tokens = tiny.tokens_of(model, samples[start:end], prompt, timed=timed, count=9)
            expected += pieces(tokens, start / RATE, (end - start) / RATE)
        told = [(each.start, each.end, each.tokens) for each in transcript.segments]
        spoken = [each for each in expected if read(each[2]).strip()]
        assert [each[2] for each in told] == [each[2] for each in spoken]
        np.testing.assert_allclose([each[:2] for each in told], [each[:2] for each in spoken], atol=1e-6)


@pytest.mark.parametrize("timed", [True, False])
def test_words_have_the_times_of_transformers(hearing: tuple[Any, str], llm: Any, timed: bool) -> None:
    """Two recordings at once, in several windows; the same through the server's door."""
    model, _ = hearing
    recordings = [(tiny.sounds(seconds, seed), RATE) for seed, seconds in ((7, 1.9), (8, 0.43))]
    options = TranscriptionOptions(timestamps=timed, word_timestamps=True, max_tokens=20, language="en")
    found = llm.transcribe(recordings, options)
    heads = [(layer, head) for layer in (1, 2) for head in range(4)]
    decode = llm.get_tokenizer().decode
    for (samples, _), transcript in zip(recordings, found, strict=True):
        expected = list[Word]()
        for start, end in cut(samples, tiny.WINDOW):
            task = [tiny.START, tiny.EN, tiny.TRANSCRIBE]
            prompt = task if timed else [*task, tiny.NO_TIMES]
            tokens = tiny.tokens_of(model, samples[start:end], prompt, timed=timed, count=20)
            text = [token for token in tokens if token < tiny.END]
            mel = torch.from_numpy(log_mel(samples[start:end], bins=tiny.MELS, frames=tiny.FRAMES))
            frames = frames_of(model, mel, [*task, tiny.NO_TIMES, *text, tiny.END], heads, 3, (end - start) // 320)
            times = [min((start / RATE) + frame * 0.02, end / RATE) for frame in frames]
            expected += timed_words(text, times, "en", decode)
        assert transcript.words is not None and len(expected) == len(transcript.words) > 1
        for mine, theirs in zip(transcript.words, expected, strict=True):
            assert mine.word == theirs.word
            assert (mine.start, mine.end) == pytest.approx((theirs.start, theirs.end))
        shown = "".join(each.word for each in transcript.words)
        assert "".join(shown.split()) == "".join("".join(each.text for each in transcript.segments).split())
    assert llm.transcribe(recordings, TranscriptionOptions(max_tokens=4))[0].words is None


def test_a_text_that_fills_the_context_gets_times(llm: Any) -> None:
    """What does not fit beside the prompt of the second pass has the last time."""
    samples, transcriber = tiny.sounds(0.6, 3), Transcriber(llm.model_info, llm.get_tokenizer())
    ids, options = [65] * 61, TranscriptionOptions()
    question = transcriber.alignment(ids, options, "en", len(samples))
    assert question is not None and len(question[0]) == tiny.CONTEXT - 1 and question[2].frames == tiny.OUTPUTS
    words = transcriber.timed(ids, range(58), (2.0, 2.6), "ja")
    assert len(words) == 61 and [each.start for each in words][-4:] == [2.6] * 4 and words[0].start == 2.0
    assert transcriber.alignment([tiny.TIMES], options, "en", len(samples)) is None
    [none] = llm.transcribe((np.zeros(200, np.float32), RATE), TranscriptionOptions(word_timestamps=True, max_tokens=1))
    assert none.words == []


def test_a_model_on_several_ranks_has_no_times_of_words(llm: Any) -> None:
    info = msgspec.structs.replace(
        llm.model_info, hearing=msgspec.structs.replace(llm.model_info.hearing, aligns=False)
    )
    with pytest.raises(InvalidRequestError, match="tensor_parallel_size"):
        Transcriber(info, llm.get_tokenizer()).check(TranscriptionOptions(word_timestamps=True))


def pieces(tokens: list[int], offset: float, length: float) -> list[tuple[float, float, list[int]]]:
    """By the definition: text between timestamps, which count from the window's beginning."""
    found, begins, words = [], 0.0, list[int]()
    for token in [*tokens, None]:
        if token is not None and token < tiny.TIMES:
            words.append(token)
            continue
        time = length if token is None else min((token - tiny.TIMES) * 0.02, length)
        if words:
            found.append((offset + begins, offset + time, words))
        begins, words = time, []
    return found


def test_a_window_reads_the_text_before_it(hearing: tuple[Any, str], llm: Any) -> None:
    model, _ = hearing
    samples = tiny.sounds(1.5, 4)
    options = TranscriptionOptions(
        timestamps=False, max_tokens=5, condition_on_previous_text=True, language="de", task="translate", prompt="Ab"
    )
    [found] = llm.transcribe((samples, RATE), options)
    words = list(llm.get_tokenizer().encode(" Ab", add_special_tokens=False))
    for segment, (start, end) in zip(found.segments, cut(samples, tiny.WINDOW), strict=True):
        prompt = [tiny.PREVIOUS, *words[-31:], tiny.START, tiny.DE, tiny.TRANSLATE, tiny.NO_TIMES]
        tokens = tiny.tokens_of(model, samples[start:end], prompt, timed=False, count=5)
        assert segment.tokens == tokens
        words += tokens


def test_generate_takes_recordings_in_vllms_form(llm: Any) -> None:
    samples = tiny.sounds(0.5, 3)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    audio = {"multi_modal_data": {"audio": (samples, RATE)}}
    text = "<|startoftranscript|><|en|><|transcribe|><|notimestamps|>"
    ids = [tiny.START, tiny.EN, tiny.TRANSCRIBE, tiny.NO_TIMES]
    prompts = [
        {"prompt": text, **audio},
        {"prompt_token_ids": ids, **audio},
        {"encoder_prompt": {"prompt": "", **audio}, "decoder_prompt": text},
    ]
    found = {tuple(output.outputs[0].token_ids) for output in llm.generate(prompts, params)}
    assert len(found) == 1
    [[start]] = [output.prompt_token_ids for output in llm.generate({"prompt": "", **audio}, params)]
    assert start == tiny.START


WRONG: dict[str, Any] = {
    "text": "hello",
    "tokens": [1, 2],
    "nothing to hear": {"prompt": "x"},
    "a picture": {"prompt": "x", "multi_modal_data": {"image": 1}},
    "two kinds": {"prompt": "x", "multi_modal_data": {"audio": (np.zeros(9), RATE), "image": 1}},
    "no rate": {"prompt": "x", "multi_modal_data": {"audio": np.zeros(9)}},
    "too long": {"prompt": "x", "multi_modal_data": {"audio": (np.zeros(RATE), RATE)}},
    "a field nobody knows": {"prompt": "x", "multi_modal_data": {"audio": (np.zeros(9), RATE)}, "mm": 1},
    "an encoder that reads": {"encoder_prompt": "words", "decoder_prompt": "x"},
}


@pytest.mark.parametrize("kind", WRONG)
def test_prompts_that_are_none_are_refused(llm: Any, kind: str) -> None:
    with pytest.raises(InvalidRequestError):
        llm.generate(WRONG[kind])


@pytest.mark.parametrize(
    "options",
    [{"language": "xx"}, {"task": "sing"}, {"prompt": "x" * 10**5}, {"temperature": -1.0}, {"max_tokens": 0}],
)
def test_options_that_cannot_be_honoured_are_refused(llm: Any, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        llm.transcribe((tiny.sounds(0.2), RATE), TranscriptionOptions(**options))


@pytest.mark.parametrize("audio", ["/nowhere.wav", b"", b"noise", 5, (np.zeros(0), RATE)])
def test_recordings_that_are_none_are_refused(llm: Any, audio: Any) -> None:
    with pytest.raises(InvalidRequestError):
        llm.transcribe(audio)


def test_windows_are_cut_where_it_is_quiet() -> None:
    samples = np.ones(70 * RATE, np.float32)
    for second in (27.5, 54.0):
        samples[int(second * RATE) : int((second + 0.2) * RATE)] = 0
    spans = cut(samples, 30.0)
    assert [start for start, _ in spans[1:]] == [end for _, end in spans[:-1]]
    assert spans[0][0] == 0 and spans[-1][1] == len(samples)
    assert 27.5 < spans[0][1] / RATE < 27.7 and 54.0 < spans[1][1] / RATE < 54.2
    assert cut(samples[:5], 30.0) == [(0, 5)]


def test_subtitles() -> None:
    segments = [
        Segment(0, 0.0, 1.5, " One\n\n--> two", [], 0.0, 0.0),
        Segment(1, 3661.0004, 3662.9999, "x", [], 0.0, 0.0),
    ]
    assert as_srt(segments) == ("1\n00:00:00,000 --> 00:00:01,500\nOne -> two\n\n2\n01:01:01,000 --> 01:01:03,000\nx\n")
    assert as_vtt(segments).startswith("WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nOne -> two\n")


def test_a_window_that_goes_wrong_is_asked_again_hotter(llm: Any) -> None:
    """Random weights give unlikely text at any temperature: the last one is kept, and it is told."""
    samples = tiny.sounds(2.3, 4)
    options = TranscriptionOptions(max_tokens=9, seed=5, temperature_fallback=True, language="en")
    [found] = llm.transcribe([(samples, RATE)], options)
    plain = TranscriptionOptions(max_tokens=9, seed=5, temperature=1.0, language="en")
    [last] = llm.transcribe([(samples, RATE)], plain)
    assert [each.tokens for each in found.segments] == [each.tokens for each in last.segments]
    assert {each.temperature for each in found.segments} == {1.0}


@pytest.mark.parametrize(
    ("logprob", "text", "no_speech", "temperature", "again"),
    [
        (-0.5, "fine words", None, 0.0, None), (-1.5, "fine words", None, 0.0, 0.2), (-1.5, "fine words", 0.7, 0.0, None),
        (-0.5, "again " * 40, 0.7, 0.0, 0.2), (-1.5, "fine words", 0.5, 0.5, 0.6), (-1.5, "fine words", None, 1.0, None),
    ],
)  # fmt: skip
def test_when_a_window_went_wrong(
    llm: Any, logprob: float, text: str, no_speech: float | None, temperature: float, again: float | None
) -> None:
    transcriber = Transcriber(llm.model_info, llm.get_tokenizer())
    transcriber.text = lambda ids: text  # type: ignore[method-assign]
    answer = CompletionOutput(index=0, text="", token_ids=[5, 6], cumulative_logprob=2 * logprob)
    options = TranscriptionOptions(temperature=temperature, temperature_fallback=True)
    hotter = transcriber.hotter(answer, options, no_speech)
    assert (None if hotter is None else hotter.temperature) == again
    assert transcriber.hotter(answer, TranscriptionOptions(temperature=temperature), no_speech) is None
