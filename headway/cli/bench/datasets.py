"""Prompts and arrival times for ``headway bench serve``. Everything is drawn from the seed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from headway.cli.bench.serve_args import SAMPLING, ServeArgs
from headway.core.errors import ConfigError

TEXT_ATTEMPTS: Final = 10
SHAREGPT_LEAST, SHAREGPT_PROMPT, SHAREGPT_BOTH = 4, 1024, 2048
"""Tokens a turn must have, a prompt may have, and both turns together may have: vLLM's choice of conversations."""


@dataclass(frozen=True, slots=True)
class Item:
    """One request: the prompt as text or ids, its length in tokens (None: unknown), how many tokens to generate."""

    prompt: str | list[int]
    num_tokens: int | None
    output_len: int


class Vocabulary:
    """Random tokens, as ids or, with a tokenizer, as text that becomes that many tokens again."""

    def __init__(self, args: ServeArgs) -> None:
        self._tokenizer: Any = None
        self.size = args.random_vocab_size
        if args.tokenizer is not None:
            from headway.api.tokenizer import load_tokenizer

            self._tokenizer = load_tokenizer(args.tokenizer)
            self.size = self._tokenizer.vocab_size

    def ids(self, rng: random.Random, count: int) -> list[int]:
        """``count`` ids, no special ones if they are known."""
        special = self._tokenizer.special_ids if self._tokenizer is not None else frozenset()
        found: list[int] = []
        while len(found) < count:
            found += [i for i in (rng.randrange(self.size) for _ in range(count - len(found))) if i not in special]
        return found

    def item(self, rng: random.Random, ids: list[int], output_len: int) -> Item:
        """A prompt of ``ids``. As text it is retokenised and mended until the length is right, or nearly."""
        if self._tokenizer is None:
            return Item(ids, len(ids), output_len)
        length = len(ids)
        text = self._tokenizer.decode(ids)
        for _ in range(TEXT_ATTEMPTS):
            again = self._tokenizer.encode(text, add_special_tokens=False)
            if len(again) == length:
                break
            again = again[:length] + self.ids(rng, max(length - len(again), 0))
            text = self._tokenizer.decode(again)
        return Item(text, len(self._tokenizer.encode(text)), output_len)


def make_items(args: ServeArgs) -> list[Item]:
    """The requests, in the order of their arrival.

    Raises:
        ConfigError: the file of prompts cannot be used.
    """
    rng = random.Random(args.seed)
    makers: dict[str, Callable[[ServeArgs, random.Random], list[Item]]] = {
        "random": _random,
        "prefix_repetition": _prefix_repetition,
        "custom": _custom,
        "sharegpt": _sharegpt,
    }
    return makers[args.dataset_name](args, rng)


def _random(args: ServeArgs, rng: random.Random) -> list[Item]:
    vocabulary, ratio = Vocabulary(args), args.random_range_ratio
    prefix = vocabulary.ids(rng, args.random_prefix_len)

    def around(length: int) -> int:
        return rng.randint(int(length * (1 - ratio)), int(length * (1 + ratio)))

    items = []
    for _ in range(args.num_prompts):
        length = max(around(args.random_input_len), 0 if prefix else 1)
        ids = prefix + vocabulary.ids(rng, length)
        items.append(vocabulary.item(rng, ids, max(around(args.random_output_len), 1)))
    return items


def _prefix_repetition(args: ServeArgs, rng: random.Random) -> list[Item]:
    """Each prefix serves an equal share of the requests, in random order."""
    vocabulary = Vocabulary(args)
    count = args.prefix_repetition_num_prefixes
    prefixes = [vocabulary.ids(rng, args.prefix_repetition_prefix_len) for _ in range(count)]
    items = []
    for i in range(args.num_prompts):
        ids = prefixes[i % count] + vocabulary.ids(rng, args.prefix_repetition_suffix_len)
        items.append(vocabulary.item(rng, ids or vocabulary.ids(rng, 1), args.prefix_repetition_output_len))
    rng.shuffle(items)
    return items


def _sharegpt(args: ServeArgs, rng: random.Random) -> list[Item]:
    """The first two turns of conversations, a prompt and its answer, whose length is what is asked for."""
    from headway.api.tokenizer import load_tokenizer

    assert args.dataset_path is not None and args.tokenizer is not None
    try:
        found = json.loads(args.dataset_path.read_text(encoding="utf-8"))
        pairs = [[turn["value"] for turn in each["conversations"][:2]] for each in found]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--dataset-path {args.dataset_path} is not a list of conversations: {error!r}") from None
    pairs = [pair for pair in pairs if len(pair) == 2 and all(isinstance(text, str) for text in pair)]
    rng.shuffle(pairs)
    tokenizer, items = load_tokenizer(args.tokenizer), list[Item]()
    for prompt, answer in pairs:
        if len(items) == args.num_prompts:
            break
        length = len(tokenizer.encode(prompt))
        output_len = args.sharegpt_output_len or len(tokenizer.encode(answer))
        short = args.sharegpt_output_len is None and output_len < SHAREGPT_LEAST
        if not short and SHAREGPT_LEAST <= length <= SHAREGPT_PROMPT and length + output_len <= SHAREGPT_BOTH:
            items.append(Item(prompt, length, output_len))
    if not items:
        raise ConfigError(f"--dataset-path {args.dataset_path} holds no conversation of fitting length")
    return [items[i % len(items)] for i in range(args.num_prompts)]


def _custom(args: ServeArgs, rng: random.Random) -> list[Item]:
    """A shuffled file; used again from its start when it has fewer lines than requests are wanted."""
    assert args.dataset_path is not None
    try:
        lines = args.dataset_path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--dataset-path {args.dataset_path} cannot be read: {error}") from None
    items = [_custom_item(args, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not items:
        raise ConfigError(f"--dataset-path {args.dataset_path} holds no prompt")
    rng.shuffle(items)
    return [items[i % len(items)] for i in range(args.num_prompts)]


def _custom_item(args: ServeArgs, number: int, line: str) -> Item:
    where = f"line {number} of {args.dataset_path}"
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {error}") from None
    prompt: Any = row.get("prompt") if isinstance(row, dict) else None
    is_ids = isinstance(prompt, list) and prompt != [] and all(type(i) is int for i in prompt)
    if not (is_ids or (isinstance(prompt, str) and prompt)):
        raise ConfigError(f'{where} has no "prompt" that is text or a list of token ids')
    if is_ids and args.is_chat:
        raise ConfigError(f"{where} is token ids, and chat requests are text; use --backend openai")
    output_len = row.get("output_tokens", args.custom_output_len)
    if type(output_len) is not int or output_len < 1:
        raise ConfigError(f'{where}: "output_tokens" must be an integer >= 1')
    return Item(prompt, len(prompt) if is_ids else None, output_len)


def rates(args: ServeArgs) -> list[float]:
    """Requests per second at which each request is sent: one rate, or one that grows from request to request."""
    start, end, count = args.ramp_up_start_rps, args.ramp_up_end_rps, args.num_prompts
    if args.ramp_up_strategy is None or start is None or end is None:
        return [args.request_rate] * count
    shares = [(i + 0.5) / count for i in range(count)]
    if args.ramp_up_strategy == "linear":
        return [start + (end - start) * share for share in shares]
    return [start * (end / start) ** share for share in shares]


def arrivals(rates: list[float], burstiness: float, seed: int) -> list[float]:
    """Seconds after the start at which each request is sent.

    Gaps follow a gamma distribution of shape ``burstiness`` and mean ``1 / rate``; as in vLLM they are then scaled so that
    the last one arrives when the rates say, which keeps runs of one rate comparable whatever the seed drew.
    """
    if float("inf") in rates:
        return [0.0] * len(rates)
    rng = random.Random(f"arrivals {seed}")
    times, now = [], 0.0
    for rate in rates:
        now += rng.gammavariate(burstiness, 1.0 / (rate * burstiness))
        times.append(now)
    scale = sum(1.0 / rate for rate in rates) / now if now > 0 else 1.0
    return [time * scale for time in times]


def request_body(args: ServeArgs, model: str, item: Item) -> bytes:
    """The JSON that is posted for ``item``."""
    limit = "max_completion_tokens" if args.is_chat else "max_tokens"
    body: dict[str, Any] = {
        "model": args.served_model_name or model,
        limit: item.output_len,
        **{name: value for name in SAMPLING if (value := getattr(args, name)) is not None},
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if args.is_chat:
        body["messages"] = [{"role": "user", "content": item.prompt}]
    else:
        body["prompt"] = item.prompt
    if args.logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": args.logprobs} if args.is_chat else {"logprobs": args.logprobs}
    if args.ignore_eos:
        body["ignore_eos"] = True
    return json.dumps({**body, **args.extra()}).encode()
