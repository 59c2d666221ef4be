"""Which kernels a forward pass launches, for every number of tokens: ``launches.txt`` has them, so that changes show as diffs.

After a change that is meant: ``python -m tests.models.test_launches`` writes the file anew.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from headway.core.chunks import most_chunks
from headway.kernels.mid_linear.tiles import mid_rows
from headway.kernels.skinny_linear.tiles import fused_rows
from headway.kernels.wide_linear.tiles import wide_tokens
from headway.models.decoder import DecoderModel
from headway.models.encoder import EncoderModel
from headway.models.interface import ALL_TOKENS, LAST_TOKENS
from headway.models.layers.forms import Rules
from headway.models.registry import model_class, read_config
from headway.state.batch import GroupBatch, StepBatch
from headway.state.cache_pool import CachePool, StateStorage

LAUNCHES = Path(__file__).with_name("launches.txt")
NOWHERE = torch.device("meta")
TOKENS = [*range(1, 20), 24, 31, 32, 33, 63, 64, 65, 128, 129, 193, 256, 257, 640, 641, 1281, 4095, 4096, 8192]
NO_KERNELS = (
    "aten.view",
    "aten.flatten",
    "aten.slice",
    "aten.select",
    "aten.t.",
    "aten.transpose",
    "aten._unsafe_view",
    "aten.unbind",
    "aten.unflatten",
    "aten.split_with_sizes",
)
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072,
        "num_attention_heads": 16, "num_key_value_heads": 8, "tie_word_embeddings": True,
    },
    "llama-8b": {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_attention_heads": 32, "num_key_value_heads": 8,
    },
    "gemma3-1b": {
        "architectures": ["Gemma3ForCausalLM"], "vocab_size": 262144, "hidden_size": 1152, "intermediate_size": 6912,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "sliding_window": 512,
        "sliding_window_pattern": 3, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
    },
    "granite-2b": {
        "architectures": ["GraniteForCausalLM"], "vocab_size": 49159, "hidden_size": 2048, "intermediate_size": 8192,
        "num_attention_heads": 32, "num_key_value_heads": 8, "residual_multiplier": 0.22, "embedding_multiplier": 12.0,
        "attention_multiplier": 0.015625, "logits_scaling": 8.0, "tie_word_embeddings": True,
    },
    "bert-base": {
        "architectures": ["BertModel"], "vocab_size": 30522, "hidden_size": 768, "intermediate_size": 3072,
        "num_attention_heads": 12, "type_vocab_size": 2,
    },
    "mamba2-780m": {
        "architectures": ["Mamba2ForCausalLM"], "vocab_size": 50288, "hidden_size": 1536, "num_heads": 48, "n_groups": 1,
        "tie_word_embeddings": True,
    },
}  # fmt: skip


class Noted(TorchDispatchMode):
    """Names of the operations that launch something, in order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if not name.startswith(NO_KERNELS):
            self.names.append(re.sub(r"^headway\.|\.default$", "", name))
        return func(*args, **kwargs or {})


def whole_model(fields: dict[str, Any]) -> tuple[DecoderModel | EncoderModel, CachePool]:
    """A model of three layers without memory, with the rules of an H200."""
    config = read_config({"num_hidden_layers": 3, "max_position_embeddings": 4096, **fields})
    model = model_class(config.architecture)(config, dtype=torch.bfloat16, device=NOWHERE, max_model_len=4096)
    assert isinstance(model, DecoderModel | EncoderModel)
    model.finalize()
    model.use_forms(Rules(fused_rows, mid_rows, wide_tokens))
    states = StateStorage(9, torch.bfloat16)
    return model, CachePool(
        model.spec.cache, num_blocks=9, block_size=16, dtype=torch.bfloat16, device=NOWHERE, states=states
    )


def batch(tokens: int, rows: int, decode_rows: int) -> StepBatch:
    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=torch.int32, device=NOWHERE)

    return StepBatch(
        input_ids=ints(tokens), positions=ints(tokens), query_start=ints(rows + 1),
        seq_lens=ints(rows), row_slots=ints(rows), logit_indices=ints(rows),
        groups=(GroupBatch(ints(4, 8), ints(tokens), ints(rows)),) * 3,
        arrivals=ints(rows, 8), num_decode_rows=decode_rows, max_query_len=tokens - decode_rows or 1,
        max_seq_len_bound=4096, chunks=ints(64), max_chunks=most_chunks(tokens, rows, tokens - decode_rows or 1),
    )  # fmt: skip


def launches() -> Iterator[str]:
    """Per shape and kind of step, ranges of tokens with the same launches."""
    for name, fields in SHAPES.items():
        model, caches = whole_model(fields)
        for kind in ("decode", "prompt", "prompt-all-logits") if isinstance(model, DecoderModel) else ("text",):
            before, start = "", 0
            for i, tokens in enumerate(TOKENS):
                step = batch(tokens, tokens, tokens) if kind == "decode" else batch(tokens, 1, 0)
                want = ALL_TOKENS if kind == "prompt-all-logits" else LAST_TOKENS
                with Noted() as noted, torch.inference_mode():
                    model.logits(model.forward(step, caches, want).hidden)
                found = " ".join(noted.names)
                if i and found != before:
                    yield f"{name} {kind} {start}..{TOKENS[i - 1]}: {before}"
                if not i or found != before:
                    before, start = found, tokens
            yield f"{name} {kind} {start}..: {before}"


def test_launches_are_those_on_file() -> None:
    wanted, found = LAUNCHES.read_text().splitlines(), list(launches())
    assert found == wanted


if __name__ == "__main__":
    LAUNCHES.write_text("\n".join(launches()) + "\n")
