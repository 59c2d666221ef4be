"""llama.cpp decoding one GGUF file: sequences of one batch, greedy, through the C interface of llama-cpp-python.

    PYTHON bench/llama_cpp_decode.py FILE [--rows 1,16] [--tokens 64] [--threads 2] [--repeats 3]

PYTHON is an interpreter that has llama-cpp-python, built with the machine's own flags (``CMAKE_ARGS=-DGGML_NATIVE=ON``); it
needs nothing of Headway. Prints one JSON object: rows -> tokens per second, prompt included, best of the repeats.
"""

from __future__ import annotations

import argparse
import json
import time

import llama_cpp as lib
import numpy as np

PROMPT = "Write a short story about a lighthouse keeper who finds a message in a bottle. Number {}."


def main() -> None:
    """Measure every number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file")
    parser.add_argument("--rows", default="1,16")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--processor-time", action="store_true", help="instead of the clock's: on busy machines, one thread"
    )
    options = parser.parse_args()
    model = lib.llama_model_load_from_file(options.file.encode(), lib.llama_model_default_params())
    found = {rows: measure(model, rows, options) for rows in (int(word) for word in options.rows.split(","))}
    print(json.dumps({"llama_cpp_python": lib.__version__, "tokens_per_second": found}))


def measure(model: object, rows: int, options: argparse.Namespace) -> float:
    """Tokens per second of ``rows`` sequences, each of its own prompt, in one batch."""
    settings = lib.llama_context_default_params()
    settings.n_ctx, settings.n_batch, settings.n_ubatch, settings.n_seq_max = 256 * rows, 2048, 512, rows
    settings.n_threads = settings.n_threads_batch = options.threads
    settings.kv_unified = True
    context = lib.llama_init_from_model(model, settings)
    vocab = lib.llama_model_get_vocab(model)
    size = lib.llama_vocab_n_tokens(vocab)
    prompts = [tokenized(vocab, PROMPT.format(row)) for row in range(rows)]
    batch = lib.llama_batch_init(2048, 0, rows)
    best, clock = 0.0, time.process_time if options.processor_time else time.perf_counter
    for _ in range(options.repeats):
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        start = clock()
        generate(context, batch, prompts, options.tokens, size)
        best = max(best, rows * options.tokens / (clock() - start))
    lib.llama_batch_free(batch)
    lib.llama_free(context)
    return round(best, 1)


def tokenized(vocab: object, text: str) -> list[int]:
    """Token ids of a prompt."""
    ids, encoded = (lib.llama_token * 256)(), text.encode()
    return list(ids[: lib.llama_tokenize(vocab, encoded, len(encoded), ids, 256, False, True)])


def generate(context: object, batch: object, prompts: list[list[int]], tokens: int, size: int) -> None:
    """Decode ``tokens`` tokens of every sequence; end-of-sequence tokens end nothing."""
    steps = [[(token, i, row, i == len(ids) - 1) for i, token in enumerate(ids)] for row, ids in enumerate(prompts)]
    places = decode(context, batch, [entry for step in steps for entry in step])
    for step in range(tokens):
        logits = [np.ctypeslib.as_array(lib.llama_get_logits_ith(context, at), shape=(size,)) for at in places]
        chosen = [int(row.argmax()) for row in logits]
        if step < tokens - 1:
            entries = [(token, len(prompts[row]) + step, row, True) for row, token in enumerate(chosen)]
            places = decode(context, batch, entries)


def decode(context: object, batch: object, entries: list[tuple[int, int, int, bool]]) -> list[int]:
    """One batch of (token, position, sequence, wants logits); the places that have logits."""
    for i, (token, position, sequence, wanted) in enumerate(entries):
        batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
    batch.n_tokens = len(entries)
    failed = lib.llama_decode(context, batch)
    if failed:
        raise RuntimeError(f"llama_decode returned {failed}")
    return [i for i, entry in enumerate(entries) if entry[3]]


if __name__ == "__main__":
    main()
