"""How often the arithmetic of a wider step breaks a tie: greedy tokens with drafts and without, compared.

    python bench/draft_ties.py --model headway/cli/bench/anchors/models/qwen3_06b --load-format dummy --dtype bfloat16
    python bench/draft_ties.py --model smollm2 --device cpu --dtype bfloat16 --prompts 8 --tokens 48 --json OUT

Drafts change no token by rule: each is compared with what plain decoding would draw. But a step that verifies them computes
more tokens at once, in products and attention of other shapes, so last bits differ, and where two tokens' logits are as good
as equal the other one may win. Of each prompt the positions up to the first difference count, and that one: behind it the
texts are different ones. For a difference the margin is told by which plain decoding preferred its token: logarithms of
probabilities, so a margin of a few last places is a tie and a large one a fault. Exit status 1 if a margin is above --tie.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from headway import LLM, SamplingParams

NGRAM: dict[str, Any] = {
    "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1, "adaptive": False
}  # fmt: skip
WORDS = 5000
"""Ids of the prompts: below those of control tokens."""


@dataclass
class Compared:
    """What was found.

    Attributes:
        positions: that were compared.
        differing: texts that differ somewhere, a position each.
        margins: of the differences, in the order of prompts; None: the other token is not among the best two.
    """

    positions: int = 0
    differing: int = 0
    margins: list[float | None] = field(default_factory=list)

    @property
    def share(self) -> float:
        """Of positions that differ."""
        return self.differing / self.positions if self.positions else 0.0

    def add(self, plain: list[int], drafted: list[int], best: list[dict[int, float]]) -> None:
        """Compare one prompt's tokens; ``best``: of each plain token the best two with their log-probabilities."""
        for place, (mine, other) in enumerate(zip(plain, drafted, strict=True)):
            self.positions += 1
            if mine != other:
                self.differing += 1
                known = best[place]
                self.margins.append(known[mine] - known[other] if other in known else None)
                return

    def are_ties(self, tie: float) -> bool:
        """Whether each difference is one between tokens as good as equal."""
        return all(margin is not None and abs(margin) <= tie for margin in self.margins)


def prompts(count: int, vocabulary: int) -> list[list[int]]:
    """Phrases that repeat themselves, so that there is something to draft."""
    rng = random.Random(7)
    found = []
    for _ in range(count):
        phrase = [rng.randrange(3, min(WORDS, vocabulary)) for _ in range(rng.randrange(5, 20))]
        found.append((phrase * 8)[: rng.randrange(40, 80)])
    return found


def answers(given: argparse.Namespace, drafts: dict[str, Any] | None) -> tuple[list[Any], Any]:
    """Completions of all prompts, and the engine's figures."""
    with LLM(
        given.model, load_format=given.load_format, device=given.device, dtype=given.dtype, max_model_len=given.tokens + 96,
        max_num_seqs=given.rows, enable_prefix_caching=False, skip_tokenizer_init=True, speculative_config=drafts,
        seed=given.seed,
    ) as llm:  # fmt: skip
        params = SamplingParams(
            temperature=0.0, max_tokens=given.tokens, ignore_eos=True, detokenize=False, logprobs=None if drafts else 2
        )
        asked = prompts(given.prompts, llm.model_info.vocab_size)
        outputs = llm.generate(list(asked), params, use_tqdm=False)
        return [output.outputs[0] for output in outputs], llm.stats()


def compare(given: argparse.Namespace) -> dict[str, Any]:
    """Both runs, one after the other, and what differs."""
    plain, _ = answers(given, None)
    drafted, stats = answers(given, given.speculative_config)
    found = Compared()
    for mine, other in zip(plain, drafted, strict=True):
        best = [{token: each.logprob for token, each in step.items()} for step in mine.logprobs]
        found.add(list(mine.token_ids), list(other.token_ids), best)
    return {
        "model": given.model, "dtype": given.dtype, "rows": given.rows, "speculative_config": given.speculative_config,
        "device": torch.cuda.get_device_name() if given.device.startswith("cuda") else given.device,
        "torch": torch.__version__, "drafted": stats.num_draft_tokens, "accepted": stats.num_accepted_tokens,
        "positions": found.positions, "differing": found.differing, "share": found.share, "margins": found.margins,
        "ties": found.are_ties(given.tie),
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--speculative-config", type=json.loads, default=NGRAM, help="drafts, as JSON")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rows", type=int, default=8, help="that run at once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tie", type=float, default=0.1, help="the largest margin of log-probabilities that is a tie")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    result = compare(given)
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    known = [abs(margin) for margin in result["margins"] if margin is not None]
    print(
        f"{result['differing']} of {result['positions']} positions differ ({result['share']:.2e}), margins up to "
        f"{max(known, default=0.0):.1e}; drafted {result['drafted']}, accepted {result['accepted']}"
    )
    return int(not result["ties"])


if __name__ == "__main__":
    sys.exit(main())
