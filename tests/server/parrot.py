"""An engine that says what it is told, so that a test decides the model's answer; and the whole server over it.

The answer to a conversation is its last user message, byte by byte, one a step; a completion repeats its prompt. Words in
the prompt make it misbehave: see the constants.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Sequence
from typing import Any

from headway import AsyncLLM
from headway.api import frontend
from headway.core.automaton import Vocabulary
from headway.core.config import EngineArgs
from headway.core.log import logger
from headway.core.messages import AddRequest, EngineStats, ModelInfo, RequestUpdate, StepUpdates, TokenLogprobsRow
from headway.engine.client import EngineClient, ThreadClient
from headway.engine.process import ProcessClient
from tests.api.fakes import ByteTokenizer
from tests.engine.fake_core import EOS

FACTORY = "tests.server.parrot:build"
TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.function.name }} may be called in <tool_call>]{% endfor %}"
    "{% for m in messages %}\x06{{ m.role }}\x05{{ m.content }}"
    "{% if m.content == 'forever' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    "{% endif %}{% if m.content == 'too much' %}{% for a in range(99) %}{{ m.content * 99999999 }}{% endfor %}{% endif %}"
    "{% if m.content == 'refuse' %}{{ raise_exception('no') }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}\x06assistant\x05{% endif %}"
)
SLOW, ENDLESS, DIE, FAIL = "slow", "endless", "die", "fail"
"""A step takes 2 ms while such a prompt runs; the answer does not end by itself; the process exits; the request fails."""
MAX_LEN = 4096
SLOTS = 4


class ParrotCore:
    """Runs the first ``SLOTS`` requests, one byte each a step."""

    def __init__(self) -> None:
        self.info = ModelInfo(
            model="parrot",
            architecture="Parrot",
            dtype="float32",
            kv_cache_dtype="float32",
            device="cpu",
            vocab_size=257,
            max_model_len=MAX_LEN,
            max_num_seqs=SLOTS,
            max_logprobs=5,
            eos_token_ids=[EOS],
            generation_defaults={"temperature": 0.5},
            num_kv_tokens=1000,
            notes=[],
        )
        self._requests: dict[str, tuple[AddRequest, str, list[int]]] = {}
        self._made: dict[str, int] = {}

    def learn(self, vocabulary: Vocabulary) -> None:
        """It says what it is told, whatever a grammar wants."""

    def add(self, request: AddRequest) -> None:
        prompt = bytes(t for t in request.prompt_token_ids if 1 < t < 256).decode("utf-8", "replace")
        answer = prompt.rpartition("\x06user\x05")[2].partition("\x06")[0]
        self._requests[request.request_id] = (request, prompt, [*answer.encode(), EOS])
        self._made[request.request_id] = 0

    def abort(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def has_work(self) -> bool:
        return bool(self._requests)

    def step(self) -> StepUpdates:
        running = list(self._requests.values())[:SLOTS]
        if any(SLOW in prompt for _, prompt, _ in running):
            time.sleep(0.002)
        updates = StepUpdates()
        updates.add([self._advance(*one) for one in running])
        return updates

    def _advance(self, request: AddRequest, prompt: str, answer: list[int]) -> RequestUpdate:
        if DIE in prompt:
            os._exit(7)
        name, params = request.request_id, request.params
        update = RequestUpdate(request_id=name, new_token_ids=[], num_cached_tokens=2)
        number = self._made[name]
        self._made[name] += 1
        if FAIL in prompt and number == 2:
            update.finish_reason, update.error = "error", "failure asked for"
        else:
            said = answer[:-1] if ENDLESS in prompt else answer
            token = said[number] if number < len(said) else ord("x")
            update.new_token_ids = [token]
            if params.logprobs is not None or params.logprob_token_ids:
                others = len(params.logprob_token_ids or []) or params.logprobs or 0
                update.new_logprobs = [_row(token, others)]
            if params.prompt_logprobs is not None and number == 0:
                update.new_prompt_logprobs = [_row(t, params.prompt_logprobs) for t in request.prompt_token_ids[1:]]
            if token in request.eos_token_ids:
                update.finish_reason = "stop"
            elif token in (params.stop_token_ids or []):
                update.finish_reason, update.stop_token_id = "stop", token
            elif number + 1 == params.max_tokens:
                update.finish_reason = "length"
        if update.finish_reason is not None:
            del self._requests[name]
        return update

    def stats(self) -> EngineStats:
        running = min(len(self._requests), SLOTS)
        return EngineStats(num_running=running, num_waiting=len(self._requests) - running)

    def shutdown(self) -> None:
        self._requests.clear()


def _row(token: int, others: int) -> TokenLogprobsRow:
    ids = [token, *(i for i in range(97, 97 + others))]
    return TokenLogprobsRow(ids, [-0.25, *(-1.0 - i for i in range(others))], 1 if token == 97 else others + 1)


def build(args: EngineArgs) -> ParrotCore:
    logger.info("the parrot is awake")
    return ParrotCore()


class ParrotTokenizer(ByteTokenizer):
    """Bytes, with what the server asks beyond that."""

    has_exact_bytes = True
    added_ids = frozenset([EOS])

    def __init__(self) -> None:
        super().__init__(template=TEMPLATE)

    def token_bytes(self, token_id: int) -> bytes:
        return self.table[token_id] if token_id < len(self.table) else b""


def parrot(own_process: bool = False) -> AsyncLLM:
    """An AsyncLLM over the parrot; the patches live while it is made."""
    before = frontend.connect, frontend.load_tokenizer

    def connect(args: EngineArgs, *, own_process: bool, asynchronous: bool, seat: object = None) -> EngineClient:
        return ProcessClient(args, FACTORY) if args.multiprocess else ThreadClient(args, FACTORY)

    frontend.connect = connect
    frontend.load_tokenizer = lambda args: ParrotTokenizer()  # type: ignore[assignment,return-value]
    try:
        return AsyncLLM("parrot", multiprocess=own_process)
    finally:
        frontend.connect, frontend.load_tokenizer = before


def main(arguments: Sequence[str]) -> int:
    """``python -m tests.server.parrot '{"port": 0, ...}'``: the server, its engine in a process of its own."""
    from headway.server import launch, logs
    from headway.server.settings import ServerSettings

    given: dict[str, Any] = json.loads(arguments[0])
    if "open_files" in given:
        most = given.pop("open_files")
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    logs.set_up(given.get("log_format", "text"))

    def load() -> AsyncLLM:
        llm = parrot(own_process=True)
        client: Any = llm._hub.client
        print(f"engine process {client.pid}", file=sys.stderr, flush=True)
        return llm

    return launch.serve(load, ServerSettings(**given))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
