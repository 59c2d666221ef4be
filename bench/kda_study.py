"""Prompts of Kimi delta attention on a card: chunks against token by token, in one operation.

    python -m bench.kda_study [--tokens 8192] [--rows 1] [--heads 32]

Heads of 128 x 128, bfloat16 inputs, float32 states. Prints microseconds of each form, and how far their outputs lie apart.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from headway.kernels.gated_delta import gated_delta


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("tokens", 8192), ("rows", 1), ("heads", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    rows, tokens, heads, size = asked.rows, asked.rows * asked.tokens, asked.heads, 128
    torch.manual_seed(0)
    made: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    q, k, v, a = (torch.randn(tokens, heads, size, **made) for _ in range(4))
    rate, bias = torch.zeros(heads, device="cuda"), torch.randn(heads, size, device="cuda")
    beta, state = torch.randn(tokens, heads, **made), torch.zeros(rows, heads, size, size, device="cuda")
    starts = torch.arange(rows + 1, dtype=torch.int32, device="cuda") * asked.tokens
    slots, lens = torch.arange(rows, dtype=torch.int32, device="cuda"), starts.diff()
    table = torch.zeros(64, dtype=torch.int32, device="cuda")  # which these forms do not read
    found = {}
    for name, short in (("chunks", 1), ("walk", asked.tokens)):
        inputs = (
            q,
            k,
            v,
            a,
            rate,
            bias,
            beta,
            1.0,
            size**-0.5,
            state,
            starts,
            slots,
            lens,
            table,
            0,
            asked.tokens,
            short,
        )
        found[name] = gated_delta(*inputs)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(5):
            gated_delta(*inputs)
        end.record()
        end.synchronize()  # host: a bench
        print(f"{name}: {begin.elapsed_time(end) * 200:.0f} us")
    apart = (found["chunks"].float() - found["walk"].float()).abs().max() / found["walk"].float().abs().max()
    print(f"apart: {float(apart):.2e} of the largest output")


if __name__ == "__main__":
    main()
