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

from headway.core.chunks import most_chunks, ring_places
from headway.core.ints import cdiv
from headway.kernels.linear_forms.bare import handover
from headway.kernels.mid_linear.tiles import mid_rows
from headway.kernels.skinny_linear.tiles import fused_rows
from headway.kernels.wide_linear.tiles import wide_tokens
from headway.models.decoder import DecoderModel
from headway.models.encoder import EncoderModel
from headway.models.interface import ALL_TOKENS, LAST_TOKENS
from headway.models.layers.forms import Rules
from headway.models.layers.mixer import StateMixer
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
    "gated-delta-net": {
        "architectures": ["Qwen3NextForCausalLM"], "vocab_size": 248320, "hidden_size": 1024, "intermediate_size": 3584,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "partial_rotary_factor": 0.25,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4, "num_experts": 0, "tie_word_embeddings": True,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    },
}  # fmt: skip
DRAFTS = 3
"""Of a row, in the steps called so of models with states, which have rings of inputs then."""


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


def whole_model(fields: dict[str, Any]) -> DecoderModel | EncoderModel:
    """A model of three layers without memory, with the rules of an H200."""
    config = read_config({"num_hidden_layers": 3, "max_position_embeddings": 4096, **fields})
    model = model_class(config.architecture)(config, dtype=torch.bfloat16, device=NOWHERE, max_model_len=4096)
    assert isinstance(model, DecoderModel | EncoderModel)
    model.finalize()
    model.use_forms(Rules(fused_rows, mid_rows, wide_tokens, handover))
    return model


def pool(model: DecoderModel | EncoderModel, drafts: int) -> CachePool:
    """What it caches, without memory."""
    states = StateStorage(9, torch.bfloat16, drafts=drafts, replays=ring_places(8, drafts + 1) if drafts else 0)
    return CachePool(model.spec.cache, num_blocks=9, block_size=16, dtype=torch.bfloat16, device=NOWHERE, states=states)


def batch(tokens: int, rows: int, decode_rows: int, drafts: int = 0) -> StepBatch:
    """``decode_rows`` of ``rows``; with ``drafts`` all have as many."""

    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=torch.int32, device=NOWHERE)

    longest = drafts + 1 if drafts else tokens - decode_rows or 1
    return StepBatch(
        input_ids=ints(tokens), positions=ints(tokens), query_start=ints(rows + 1),
        seq_lens=ints(rows), row_slots=ints(rows), logit_indices=ints(rows),
        groups=(GroupBatch(ints(4, 8), ints(tokens), ints(rows)),) * 3,
        arrivals=ints(rows, 8), num_decode_rows=decode_rows, max_query_len=longest,
        max_seq_len_bound=4096, width=drafts + 1, chunks=ints(64), max_chunks=most_chunks(tokens, rows, longest, drafts + 1),
        short=drafts + 1, stored_at=ints(rows) if drafts else None, store_at=ints(rows) if drafts else None,
    )  # fmt: skip


def launches() -> Iterator[str]:
    """Per shape and kind of step, ranges of tokens with the same launches."""
    for name, fields in SHAPES.items():
        model = whole_model(fields)
        kinds = ("decode", "prompt", "prompt-all-logits") if isinstance(model, DecoderModel) else ("text",)
        if any(isinstance(layer, StateMixer) for layer in model.modules()):
            kinds = *kinds, "drafts"
        for kind in kinds:
            caches = pool(model, DRAFTS if kind == "drafts" else 0)
            before, start = "", 0
            for i, tokens in enumerate(TOKENS):
                step = batch(tokens, tokens, tokens) if kind == "decode" else batch(tokens, 1, 0)
                if kind == "drafts":
                    step = batch(tokens, cdiv(tokens, DRAFTS + 1), 0, DRAFTS)
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
