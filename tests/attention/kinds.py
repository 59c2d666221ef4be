"""Tiny models of each kind of attention for whole engines, and what their greedy tokens are by transformers."""

from __future__ import annotations

import functools
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from headway.attention.flex import FlexRule
from headway.models.blocks import BlockSpec
from headway.models.config import llama_like, map_blocks
from headway.models.decoder import DecoderConfig, DecoderModel
from headway.models.fields import Fields
from tests.models.tiny import TINY, Tiny, hf_model, save

VOCAB = 97
KINDS = {
    "gemma3n": TINY["gemma3n-shared"],
    "gemma4": TINY["gemma4-shared"],
    "bloom": TINY["bloom"],
    "falcon-rw": TINY["falcon-rw"],
    "sinks": Tiny("Llama", {"num_hidden_layers": 3}),
    "chunks": Tiny("Llama", {"num_hidden_layers": 3}),
    "flex": Tiny("Llama", {"num_hidden_layers": 2}),
}
"""By name; the last three are Llamas whose transformers model attends by ``attend_as``."""
OWN = ("sinks", "chunks", "flex")
WINDOW, CHUNK, DOCUMENT = 12, 20, 11


def documents(slot: Any, head: Any, q: Any, kv: Any) -> torch.Tensor:
    """Every ``DOCUMENT`` positions a text begins anew for odd heads."""
    return (q // DOCUMENT == kv // DOCUMENT) | (head % 2 == 0)


def alibi(score: Any, slot: Any, head: Any, q: Any, kv: Any) -> torch.Tensor:
    return score - 2.0 ** (-1.0 - head) * (q - kv)


class KindsForCausalLM(DecoderModel):
    """A Llama with the kind of attention that "kind" in its config.json names."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        kind, config = fields["kind"], llama_like(fields)

        def change(layer: int, block: BlockSpec) -> BlockSpec:
            mixer = block.attention
            if kind == "sinks":
                mixer = replace(mixer, sinks=True, window=WINDOW if layer % 2 == 0 else 0)
            elif kind == "chunks":
                mixer = replace(mixer, chunk=CHUNK if layer != 1 else 0, rope=mixer.rope if layer != 1 else None)
            else:
                mixer = replace(mixer, flex=FlexRule(documents, alibi))
            return replace(block, mixer=mixer)

        return map_blocks(config, change)


def attend_as(kind: str) -> Any:
    """An attention function of transformers for ``kind``, in plain torch."""

    def attend(
        module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, scaling: float = 1.0, **_: Any
    ) -> tuple[torch.Tensor, None]:
        k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], dim=1) for part in (k, v))
        position, layer = torch.arange(q.shape[2]), module.layer_idx
        query, key, head = position[:, None], position[None], torch.arange(q.shape[1])[:, None, None]
        seen = key <= query
        scores = q @ k.transpose(2, 3) * scaling
        if kind == "sinks" and layer % 2 == 0:
            seen = seen & (key > query - WINDOW)
        if kind == "chunks" and layer != 1:
            seen = seen & (key // CHUNK == query // CHUNK)
        if kind == "flex":
            scores = scores - 2.0 ** (-1.0 - head) * (query - key)
            seen = seen & ((query // DOCUMENT == key // DOCUMENT) | (head % 2 == 0))
        scores = scores.masked_fill(~seen, float("-inf"))
        if kind == "sinks":
            sink = module.sinks[None, :, None, None].expand(*scores.shape[:3], 1)
            weights = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        return (weights @ v).transpose(1, 2).contiguous(), None

    return attend


@functools.cache
def oracle(name: str) -> Any:
    """The transformers model."""
    model = hf_model(replace_positions(KINDS[name]))
    if name in OWN:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        ALL_ATTENTION_FUNCTIONS.register(f"headway-{name}", attend_as(name))
        model.config._attn_implementation = f"headway-{name}"
        for i, layer in enumerate(model.model.layers):
            if name == "sinks":
                drawn = torch.randn(4, generator=torch.Generator().manual_seed(i))
                layer.self_attn.register_parameter("sinks", torch.nn.Parameter(drawn))
            if name == "chunks" and i == 1:  # without positions
                forward = layer.self_attn.forward
                layer.self_attn.forward = functools.partial(_unrotated, forward)
    return model


def _unrotated(forward: Any, *args: Any, position_embeddings: Any = None, **more: Any) -> Any:
    cos, sin = position_embeddings
    return forward(*args, position_embeddings=(torch.ones_like(cos), torch.zeros_like(sin)), **more)


def replace_positions(case: Tiny) -> Tiny:
    """With room for longer texts."""
    names = {"Bloom": "seq_length", "Mpt": "max_seq_len"}
    return replace(case, config=case.config | {names.get(case.family, "max_position_embeddings"): 160})


@functools.cache
def folder_of(name: str) -> Path:
    """The checkpoint."""
    folder = save(oracle(name), Path(tempfile.mkdtemp(prefix=f"headway-{name}-")))
    if name in OWN:
        config = json.loads((folder / "config.json").read_text())
        config |= {"architectures": ["KindsForCausalLM"], "kind": name}
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def greedy(name: str, prompt: list[int], count: int) -> list[int]:
    """What transformers says next, one token at a time and without a cache."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(oracle(name)(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]
