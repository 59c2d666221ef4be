"""Streaming one answer to the terminal, and the line of figures after it."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

from headway.core.config import EngineArgs
from headway.core.errors import RequestFailedError
from headway.core.outputs import RequestOutput

if TYPE_CHECKING:
    from headway.api.async_llm import AsyncLLM


def start_engine(engine: EngineArgs) -> AsyncLLM:
    """A streaming engine; in a thread of this process unless --multiprocess: nothing else needs this process's time."""
    from headway import AsyncLLM
    from headway.cli.options import engine_kwargs

    return AsyncLLM(**{**engine_kwargs(engine), "multiprocess": bool(engine.multiprocess)})


@dataclass(slots=True)
class Answer:
    """What came back, and how fast.

    Attributes:
        first_token: seconds from the request to the first token.
    """

    texts: list[str]
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    first_token: float | None = None
    finish_reason: str | None = None

    def line(self) -> str:
        """``128 tokens in 1.23 s (104.07 tok/s), time to first token 35.1 ms, prompt 12 tokens, finish stop``"""
        speed = self.num_tokens / max(self.seconds, 1e-9)
        first = "" if self.first_token is None else f"time to first token {self.first_token * 1e3:.1f} ms, "
        return (
            f"{self.num_tokens} tokens in {self.seconds:.2f} s ({speed:.2f} tok/s), {first}"
            f"prompt {self.num_prompt_tokens} tokens, finish {self.finish_reason}"
        )


async def stream_answer(outputs: AsyncIterator[RequestOutput], answer: Answer, show: bool) -> None:
    """Follow a delta stream into ``answer``, writing the text of the first completion to stdout as it comes.

    Raises:
        RequestFailedError: the request failed inside the engine.
    """
    start = perf_counter()
    async for output in outputs:
        answer.num_prompt_tokens = len(output.prompt_token_ids)
        for completion in output.outputs:
            if completion.token_ids and answer.first_token is None:
                answer.first_token = perf_counter() - start
            answer.num_tokens += len(completion.token_ids)
            answer.texts[completion.index] += completion.text
            answer.finish_reason = completion.finish_reason or answer.finish_reason
            if show and completion.index == 0:
                sys.stdout.write(completion.text)
                sys.stdout.flush()
        answer.seconds = perf_counter() - start
        if output.error is not None:
            raise RequestFailedError(output.error)


def merge_params(llm: AsyncLLM, given: dict[str, Any], **fallback: Any) -> Any:
    """The model's default SamplingParams, then ``fallback``, then what the user ``given``."""
    from dataclasses import replace

    return replace(llm.get_default_sampling_params(), **{**fallback, **given})
