"""What each window of a recording is asked, and what its tokens say. Knows the model's tokens; runs nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from headway.api.hearing.transcript import Segment, Word, compression
from headway.api.hearing.words import timed_words
from headway.core.errors import InvalidRequestError
from headway.core.hearing import SECONDS_PER_TIMESTAMP, Alignment, HearingInfo, SpeechRules
from headway.core.messages import ModelInfo
from headway.core.outputs import CompletionOutput
from headway.core.params import SamplingParams
from headway.multimodal.audio.decode import RATE

if TYPE_CHECKING:
    from headway.api.tokenizer import Tokenizer

MAX_PROMPT_CHARS = 8000
HOTTER = (0.2, 0.4, 0.6, 0.8, 1.0)
MOST_COMPRESSION, LEAST_LOGPROB, SILENCE = 2.4, -1.0, 0.6
"""Temperatures, and when they are tried: how much shorter a text gets where it repeats itself, the mean log-probability of
tokens, and the probability of silence from which on an unlikely text is none (Radford et al. 2022, section 4.5)."""
NAMES = {"english": "en", "german": "de", "french": "fr", "spanish": "es", "italian": "it", "chinese": "zh"}
"""Names that clients send in place of codes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TranscriptionOptions:
    """How a recording is transcribed.

    Attributes:
        language: its code, such as "en"; None: the model finds out, from the first window.
        task: "transcribe", or "translate" into English.
        prompt: text that might have come before; how it is written is imitated.
        temperature: of the draws; 0 takes the likeliest token.
        temperature_fallback: a window whose text repeats itself or is unlikely is asked again at higher temperatures. What is
            streamed comes window by window then.
        timestamps: the model says when each piece begins and ends; else a window is one piece.
        word_timestamps: each word's times are wanted; a window's text is read once more for them.
        condition_on_previous_text: a window is given the text of the one before it, and has to wait for it.
        max_tokens: of a window; None: as many as the model has room for.
        seed: of the draws.
    """

    language: str | None = None
    task: Literal["transcribe", "translate"] = "transcribe"
    prompt: str = ""
    temperature: float = 0.0
    temperature_fallback: bool = False
    timestamps: bool = True
    word_timestamps: bool = False
    condition_on_previous_text: bool = False
    max_tokens: int | None = None
    seed: int | None = None


class Transcriber:
    """Requests for windows, and their answers.

    Raises:
        InvalidRequestError: the model does not hear, or has no tokenizer.
    """

    def __init__(self, info: ModelInfo, tokenizer: Tokenizer | None) -> None:
        if info.hearing is None:
            raise InvalidRequestError(f"{info.architecture} does not hear; transcribing needs a model such as Whisper")
        if tokenizer is None:
            raise InvalidRequestError("transcribing needs a tokenizer, but skip_tokenizer_init is set")
        self.hearing: HearingInfo = info.hearing
        self._info, self._tokenizer = info, tokenizer

    def check(self, options: TranscriptionOptions) -> TranscriptionOptions:
        """The options with the language's code.

        Raises:
            InvalidRequestError: the model cannot do it; names the field.
        """
        hearing, language = self.hearing, options.language
        if language is not None:
            language = NAMES.get(language.strip().lower(), language.strip().lower())
            known = hearing.languages or {"en": -1}
            if language not in known:
                listed = ", ".join(sorted(known))
                raise InvalidRequestError(
                    f"language {options.language!r:.40} is not one of the model's: {listed}", "language"
                )
        if options.task not in ("transcribe", "translate"):
            raise InvalidRequestError(f"task must be transcribe or translate, not {options.task!r:.40}", "task")
        if options.task == "translate" and "translate" not in hearing.tasks:
            raise InvalidRequestError("this model knows one language and cannot translate", "task")
        if not isinstance(options.prompt, str) or len(options.prompt) > MAX_PROMPT_CHARS:
            raise InvalidRequestError(f"prompt must be text of at most {MAX_PROMPT_CHARS} characters", "prompt")
        if options.prompt and hearing.previous < 0:
            raise InvalidRequestError("this model takes no prompt", "prompt")
        if options.timestamps and hearing.first_timestamp < 0:
            raise InvalidRequestError("this model knows no timestamps", "timestamps")
        if options.word_timestamps and not hearing.aligns:
            raise InvalidRequestError(
                "times of words need the whole model on one rank; start it with tensor_parallel_size and "
                "pipeline_parallel_size of 1, or leave them out",
                "word_timestamps",
            )
        self.params(options)
        return TranscriptionOptions(**{**_fields(options), "language": language})

    # -- what is asked ---------------------------------------------------------------------------------------------

    @property
    def detects(self) -> bool:
        """Whether there are several languages."""
        return bool(self.hearing.languages)

    @property
    def only_language(self) -> str:
        """Of a model that names none; "" where there are several."""
        return "" if self.detects else "en"

    def detection(self) -> tuple[list[int], SamplingParams]:
        """The question which language a window is in: the first token behind the start."""
        hearing = self.hearing
        told = [hearing.no_speech] if hearing.no_speech >= 0 else None
        params = SamplingParams(
            temperature=0.0, max_tokens=1, allowed_token_ids=list(hearing.languages.values()), ignore_eos=True,
            detokenize=False, logprob_token_ids=told,
        )  # fmt: skip
        return [hearing.start], params

    def detected(self, answer: CompletionOutput) -> tuple[str, float | None]:
        """The language, and the probability that nobody speaks."""
        [token] = answer.token_ids
        code = next(code for code, each in self.hearing.languages.items() if each == token)
        told = answer.logprobs[0].get(self.hearing.no_speech) if answer.logprobs else None
        return code, None if told is None else math.exp(told.logprob)

    def prompt(self, options: TranscriptionOptions, language: str, before: Sequence[int] = ()) -> list[int]:
        """What a window's transcript begins behind; ``before``: tokens of the text ahead of it."""
        hearing = self.hearing
        ids = [hearing.start]
        if hearing.languages:
            ids += [hearing.languages[language], hearing.tasks[options.task]]
        if not options.timestamps and hearing.no_timestamps >= 0:
            ids.append(hearing.no_timestamps)
        earlier = list(before)
        if options.prompt:
            text = " " + self._tokenizer.control_texts.as_text(options.prompt.strip())
            earlier = self._tokenizer.encode(text, add_special_tokens=False) + earlier
        most = self._info.max_model_len // 2 - 1
        return [hearing.previous, *earlier[-most:], *ids] if earlier and hearing.previous >= 0 and most > 0 else ids

    def params(self, options: TranscriptionOptions) -> SamplingParams:
        """How a window's tokens are drawn."""
        return SamplingParams(
            temperature=options.temperature, max_tokens=options.max_tokens, seed=options.seed, logprobs=0,
            detokenize=False,
        )  # fmt: skip

    def rules(self, options: TranscriptionOptions) -> SpeechRules:
        """What they may be."""
        return self.hearing.rules(timestamps=options.timestamps)

    def alignment(
        self, ids: Sequence[int], options: TranscriptionOptions, language: str, num_samples: int
    ) -> tuple[list[int], SamplingParams, Alignment] | None:
        """The question when the words among a window's tokens were spoken; None: there are none.

        What the model cannot read at once has the time of the last token that it can. ``num_samples``: of the window.
        """
        hearing, words = self.hearing, self.words(ids)
        begin = self.prompt(replace(options, timestamps=False, prompt=""), language)
        most = self._info.max_model_len - len(begin) - 2  # the text's end, and the token that every request draws
        frames = num_samples // round(RATE * SECONDS_PER_TIMESTAMP)
        align = Alignment(first=len(begin) - 1, frames=min(max(frames, 1), hearing.outputs))
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
        return ([*begin, *words[:most], hearing.end], params, align) if words else None

    def timed(self, ids: Sequence[int], frames: Sequence[int], span: tuple[float, float], language: str) -> list[Word]:
        """A window's words; ``frames``: the answer to ``alignment``, ``span`` as of ``segments``."""
        tokens, (start, end) = self.words(ids), span
        times = [min(start + frame * SECONDS_PER_TIMESTAMP, end) for frame in frames]
        times += times[-1:] * (len(tokens) + 1 - len(times))
        return timed_words(tokens, times, language, self._tokenizer.decode)

    def hotter(
        self, answer: CompletionOutput, options: TranscriptionOptions, no_speech: float | None = None
    ) -> TranscriptionOptions | None:
        """How a window is asked again whose ``answer`` went wrong; None: it did not, or nothing hotter is left."""
        left = [each for each in HOTTER if each > options.temperature]
        if not options.temperature_fallback or not left:
            return None
        unlikely = _average(answer) < LEAST_LOGPROB
        if unlikely and no_speech is not None and no_speech > SILENCE:
            return None
        repeats = compression(self.text(answer.token_ids)) > MOST_COMPRESSION
        return replace(options, temperature=left[0]) if repeats or unlikely else None

    # -- what is answered ------------------------------------------------------------------------------------------

    def text(self, ids: Sequence[int]) -> str:
        """Text of a window's tokens so far; those of control and time have none."""
        return self._tokenizer.decode(self.words(ids))

    def words(self, ids: Sequence[int]) -> list[int]:
        """The tokens that are text."""
        return [token for token in ids if 0 <= token < self.hearing.end]

    def segments(
        self,
        answer: CompletionOutput,
        span: tuple[float, float],
        options: TranscriptionOptions,
        first_id: int = 0,
        no_speech: float | None = None,
    ) -> list[Segment]:
        """A window's pieces.

        Args:
            span: (start, end) of the window in the recording, seconds.
        """
        start, end = span
        ids, average = answer.token_ids, _average(answer)
        found: list[Segment] = []
        for begins, ends, tokens in self._pieces(ids, end - start):
            text = self.text(tokens)
            if text.strip():
                piece = (first_id + len(found), start + begins, start + ends, text, tokens)
                found.append(Segment(*piece, options.temperature, average, no_speech))
        return found

    def _pieces(self, ids: Sequence[int], length: float) -> list[tuple[float, float, list[int]]]:
        """(start, end, tokens of text) within the window, of ``length`` seconds."""
        first = self.hearing.first_timestamp
        found: list[tuple[float, float, list[int]]] = []
        begins, tokens = 0.0, list[int]()
        for token in ids:
            if first < 0 or token < first:
                tokens += self.words([token])
                continue
            time = min((token - first) * SECONDS_PER_TIMESTAMP, length)
            if tokens:
                found.append((begins, time, tokens))
                tokens = []
            begins = time
        return [*found, (begins, length, tokens)] if tokens else found


def _average(answer: CompletionOutput) -> float:
    """Mean log-probability of its tokens."""
    chosen = answer.cumulative_logprob
    return chosen / max(len(answer.token_ids), 1) if chosen is not None else 0.0


def _fields(options: TranscriptionOptions) -> dict[str, Any]:
    return {name: getattr(options, name) for name in TranscriptionOptions.__slots__}
