"""The child of ``startup``: engine arguments as JSON on standard input, "first token" on standard output when there is one."""

from __future__ import annotations

import json
import sys
from typing import Any


def main() -> None:
    """Load, generate one token, say so."""
    given: dict[str, Any] = json.load(sys.stdin)
    from headway import LLM, SamplingParams

    with LLM(**given) as llm:
        llm.generate([[1, 2, 3, 4]], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True), use_tqdm=False)
        sys.stdout.write("first token\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
