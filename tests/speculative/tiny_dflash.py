"""Tiny drafters of blocks, DFlash and DSpark, of random weights, and what they guess over whole texts, in plain torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from tests.engine.tiny_llama import CONFIG, HIDDEN, INTERMEDIATE, VOCAB
from tests.speculative.tiny_eagle import DRAFT_VOCAB, HEAD_DIM, HEADS, KV_HEADS

LAYERS, BLOCK_SIZE, MASK, RANK = 2, 5, 96, 6
READ = (0, 1)
"""Of the tiny Llama's two layers, counted from 0: the drafter reads behind them."""


@dataclass(frozen=True)
class Kind:
    """A drafter.

    Attributes:
        spark: DSpark; ``gated``: with a gate.
        speculators: in that library's format, with few tokens and an embedding of its own.
        from_anchor: the known token's own place guesses what follows it.
        biases: attention has some.
    """

    spark: bool = False
    gated: bool = False
    speculators: bool = False
    from_anchor: bool = False
    biases: bool = False

    @property
    def most(self) -> int:
        """Tokens it guesses at once."""
        return BLOCK_SIZE if self.from_anchor else BLOCK_SIZE - 1


KINDS: dict[str, Kind] = {
    "dflash": Kind(biases=True),
    "dflash_speculators": Kind(speculators=True),
    "dspark": Kind(spark=True, from_anchor=True, gated=True),
    "dspark_speculators": Kind(spark=True, speculators=True),
}


def config_of(kind: Kind) -> dict[str, Any]:
    """Its config.json."""
    inner: dict[str, Any] = {
        name: value for name, value in CONFIG.items() if name not in ("eos_token_id", "model_type")
    }
    inner |= {"num_hidden_layers": LAYERS, "attention_bias": kind.biases, "layer_types": ["full_attention"] * LAYERS}
    markov = {"markov_rank": RANK, "markov_head_type": "gated" if kind.gated else "vanilla"} if kind.spark else {}
    if kind.speculators:
        ids = {"aux_hidden_state_layer_ids": [layer + 1 for layer in READ], "mask_token_id": MASK}
        name = "dspark" if kind.spark else "dflash"
        more = {"block_size": BLOCK_SIZE, "draft_vocab_size": DRAFT_VOCAB, "sample_from_anchor": kind.from_anchor}
        return {"speculators_model_type": name, "transformer_layer_config": inner} | ids | more | markov
    if kind.spark:
        inner |= {"target_layer_ids": list(READ), "mask_token_id": MASK, "enable_confidence_head": True}
        return inner | {"architectures": ["Qwen3DSparkModel"], "block_size": BLOCK_SIZE} | markov
    own = {"mask_token_id": MASK, "target_layer_ids": list(READ)}
    return inner | {"architectures": ["DFlashDraftModel"], "block_size": BLOCK_SIZE, "dflash_config": own}


def save_dflash(folder: Path, kind: Kind) -> None:
    """Write a drafter for the tiny Llama."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(kind)))
    generator = torch.Generator().manual_seed(12)

    def random(*shape: int, scale: float = 0.3) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    tensors = {"fc.weight": random(HIDDEN, len(READ) * HIDDEN)}
    tensors |= {f"{name}.weight": 1 + random(HIDDEN) for name in ("hidden_norm", "norm")}
    for i in range(LAYERS):
        layer = f"layers.{i}."
        rows = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
        for name, size in rows.items():
            tensors[f"{layer}self_attn.{name}_proj.weight"] = random(size, HIDDEN)
            if kind.biases:
                tensors[f"{layer}self_attn.{name}_proj.bias"] = random(size)
        tensors[f"{layer}self_attn.o_proj.weight"] = random(HIDDEN, HEADS * HEAD_DIM)
        if kind.biases:
            tensors[f"{layer}self_attn.o_proj.bias"] = random(HIDDEN)
        tensors |= {f"{layer}self_attn.{name}_norm.weight": 1 + random(HEAD_DIM) for name in "qk"}
        tensors |= {f"{layer}mlp.{name}_proj.weight": random(INTERMEDIATE, HIDDEN) for name in ("gate", "up")}
        tensors[f"{layer}mlp.down_proj.weight"] = random(HIDDEN, INTERMEDIATE)
        tensors |= {f"{layer}{name}_layernorm.weight": 1 + random(HIDDEN) for name in ("input", "post_attention")}
    if kind.speculators:
        ids = torch.randperm(VOCAB, generator=generator)[:DRAFT_VOCAB].sort().values
        tensors |= {
            "embed_tokens.weight": random(VOCAB, HIDDEN, scale=1.0),
            "lm_head.weight": random(DRAFT_VOCAB, HIDDEN),
        }
        tensors |= {"d2t": ids - torch.arange(DRAFT_VOCAB), "t2d": torch.isin(torch.arange(VOCAB), ids)}
    if kind.spark:
        size = DRAFT_VOCAB if kind.speculators else VOCAB
        tensors["markov_head.markov_w1.weight"] = random(VOCAB, RANK, scale=1.0)
        tensors["markov_head.markov_w2.weight"] = random(size, RANK, scale=1.0)
        tensors |= {"confidence_head.proj.weight": random(1, HIDDEN + RANK), "confidence_head.proj.bias": random(1)}
    if kind.gated:
        tensors["markov_head.gate_proj.weight"] = random(RANK, HIDDEN + RANK, scale=1.0)
        tensors["markov_head.gate_proj.bias"] = random(RANK)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


class Oracle:
    """A drafter and its target, on whole texts: keys of the text from the target's states, the block both ways behind them."""

    def __init__(self, target: Path, drafter: Path, kind: Kind) -> None:
        self._target, self._kind = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32).eval(), kind
        self._w = load_file(drafter / "model.safetensors")
        names = ("hidden_size", "num_attention_heads", "head_dim", "rope_theta", "max_position_embeddings")
        self._rope = LlamaRotaryEmbedding(LlamaConfig(**{name: CONFIG[name] for name in names}))
        own = self._w.get("embed_tokens.weight")
        self._embed = self._target.model.embed_tokens.weight if own is None else own

    @torch.no_grad()
    def drafts(self, tokens: list[int], number: int) -> list[int]:
        """What follows ``tokens``, by the most likely token each."""
        w, known = self._w, len(tokens)
        context = _norm(F.linear(self._states(tokens[:-1]), w["fc.weight"]), w["hidden_norm.weight"])
        width = number if self._kind.from_anchor else number + 1
        x = self._embed[torch.tensor([tokens[-1]] + [MASK] * (width - 1))]
        for i in range(LAYERS):
            x = self._layer(x, context, f"layers.{i}.", known)
        hidden = _norm(x, w["norm.weight"])[width - number :]
        head = w.get("lm_head.weight", self._target.lm_head.weight)
        found, token = [], tokens[-1]
        for row in hidden:
            own = int((F.linear(row, head) + self._bias(token, row)).argmax())
            token = own + int(w["d2t"][own]) if self._kind.speculators else own
            found.append(token)
        return found

    def _states(self, tokens: list[int]) -> torch.Tensor:
        """[T, layers read * C], the residual behind each of them."""
        kept: dict[int, torch.Tensor] = {}

        def keep(layer: int) -> Any:
            def hook(module: Any, args: Any, out: Any) -> None:
                kept[layer] = (out[0] if isinstance(out, tuple) else out)[0]

            return hook

        hooks = [self._target.model.layers[layer].register_forward_hook(keep(layer)) for layer in READ]
        self._target(torch.tensor([tokens]))
        for hook in hooks:
            hook.remove()
        return torch.cat([kept[layer].view(len(tokens), HIDDEN) for layer in READ], 1)

    def _layer(self, x: torch.Tensor, context: torch.Tensor, layer: str, known: int) -> torch.Tensor:
        w, attention = self._w, f"{layer}self_attn."
        y = _norm(x, w[f"{layer}input_layernorm.weight"])
        read = {"q": y, "k": torch.cat([context, y]), "v": torch.cat([context, y])}
        q, k, v = (
            F.linear(rows, w[f"{attention}{name}_proj.weight"], w.get(f"{attention}{name}_proj.bias"))
            .view(1, len(rows), -1, HEAD_DIM)
            .transpose(1, 2)
            for name, rows in read.items()
        )
        q, k = _norm(q, w[f"{attention}q_norm.weight"]), _norm(k, w[f"{attention}k_norm.weight"])
        positions = torch.arange(known - 1 + len(x))[None]
        cos, sin = self._rope(x, positions)
        k = apply_rotary_pos_emb(k, k, cos, sin)[0]
        q = apply_rotary_pos_emb(q, q, cos[:, -len(x) :], sin[:, -len(x) :])[0]
        heads = F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).reshape(len(x), -1)
        x = x + F.linear(heads, w[f"{attention}o_proj.weight"], w.get(f"{attention}o_proj.bias"))
        y = _norm(x, w[f"{layer}post_attention_layernorm.weight"])
        gate, up = (F.linear(y, w[f"{layer}mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        return x + F.linear(F.silu(gate) * up, w[f"{layer}mlp.down_proj.weight"])

    def _bias(self, before: int, hidden: torch.Tensor) -> torch.Tensor | float:
        if not self._kind.spark:
            return 0.0
        w = self._w
        x = w["markov_head.markov_w1.weight"][before]
        if self._kind.gated:
            gate = F.linear(torch.cat([hidden, x]), w["markov_head.gate_proj.weight"], w["markov_head.gate_proj.bias"])
            x = x * torch.sigmoid(gate)
        return F.linear(x, w["markov_head.markov_w2.weight"])


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + CONFIG["rms_norm_eps"]) * weight
