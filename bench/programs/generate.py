"""transformers' generate on a small Qwen3 with random weights: a program that nobody of this project wrote, to look at.

headway syncs --html report.html -- python bench/programs/generate.py [new tokens] [cuda|cpu]
"""

from __future__ import annotations

import sys

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM


def main(new_tokens: int, device: str) -> None:
    """Warm up, then generate once: sampled, with top-k and top-p, as the examples do."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=512,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = Qwen3ForCausalLM(config).to(device).eval()
    prompt = torch.arange(5, 37, device=device)[None]
    mask = torch.ones_like(prompt)
    options = {"do_sample": True, "top_k": 50, "top_p": 0.9, "temperature": 0.8, "min_new_tokens": new_tokens}
    with torch.inference_mode():
        tokens = model.generate(prompt, attention_mask=mask, max_new_tokens=new_tokens, **options)
    print(tokens[0, -8:].tolist())


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 16, sys.argv[2] if len(sys.argv) > 2 else "cuda")
