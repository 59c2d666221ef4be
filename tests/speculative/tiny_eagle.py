"""Tiny EAGLE heads of random weights, and what they guess, computed over whole texts in plain torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from tests.engine.tiny_llama import CONFIG, HIDDEN, INTERMEDIATE, VOCAB

HEADS, KV_HEADS, HEAD_DIM, DRAFT_VOCAB = 4, 2, 8, 61
LAYERS_READ = (1, 2)
"""Of the tiny Llama's two, in the numbers of configurations."""


def save_eagle(folder: Path, *, third: bool, reduced: bool = False, speculators: bool = False) -> None:
    """Write a head for the tiny Llama.

    Args:
        reduced: it guesses few of the tokens; it also has an embedding of its own then.
        speculators: in the format of that library.
    """
    config: dict[str, Any] = {name: value for name, value in CONFIG.items() if name != "eos_token_id"}
    config |= {"num_hidden_layers": 1, "architectures": ["LlamaForCausalLMEagle3" if third else "LlamaForCausalLM"]}
    extra: dict[str, Any] = {}
    if third:
        extra |= {"eagle_aux_hidden_state_layer_ids": list(LAYERS_READ)}
        extra |= {"draft_vocab_size": DRAFT_VOCAB} if reduced else {"draft_vocab_size": VOCAB}
    if speculators:
        extra |= {
            "norm_before_residual": True,
            "speculators_model_type": "eagle3",
            "architectures": ["Eagle3Speculator"],
        }
        config = {"transformer_layer_config": config, **extra}
    else:
        config |= extra
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(11)

    def random(*shape: int, scale: float = 0.3) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    inputs = 2 * HIDDEN if third else HIDDEN
    layer = "layers.0." if speculators or not third else "midlayer."
    tensors = {
        "fc.weight": random(HIDDEN, 2 * HIDDEN),
        f"{layer}self_attn.q_proj.weight": random(HEADS * HEAD_DIM, inputs),
        f"{layer}self_attn.k_proj.weight": random(KV_HEADS * HEAD_DIM, inputs),
        f"{layer}self_attn.v_proj.weight": random(KV_HEADS * HEAD_DIM, inputs),
        f"{layer}self_attn.o_proj.weight": random(HIDDEN, HEADS * HEAD_DIM),
        f"{layer}mlp.gate_proj.weight": random(INTERMEDIATE, HIDDEN),
        f"{layer}mlp.up_proj.weight": random(INTERMEDIATE, HIDDEN),
        f"{layer}mlp.down_proj.weight": random(HIDDEN, INTERMEDIATE),
        f"{layer}post_attention_layernorm.weight": 1 + random(HIDDEN),
    }
    if third:
        tensors |= {f"{layer}{name}.weight": 1 + random(HIDDEN) for name in ("input_layernorm", "hidden_norm")}
        tensors |= {
            "norm.weight": 1 + random(HIDDEN),
            "lm_head.weight": random(DRAFT_VOCAB if reduced else VOCAB, HIDDEN),
        }
    else:
        tensors["fc.bias"] = random(HIDDEN)
    if reduced:
        tensors["embed_tokens.weight"] = random(VOCAB, HIDDEN, scale=1.0)
        ids = torch.randperm(VOCAB, generator=generator)[:DRAFT_VOCAB].sort().values
        tensors["d2t"] = ids - torch.arange(DRAFT_VOCAB)
        tensors["t2d"] = torch.isin(torch.arange(VOCAB), ids)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


class Oracle:
    """A head and its target."""

    def __init__(self, target: Path, head: Path) -> None:
        self._target = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        weights = load_file(head / "model.safetensors")
        self._w = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in weights.items()}
        config = json.loads((head / "config.json").read_text())
        self._third = "norm.weight" in self._w
        self._norm_first = bool(config.get("norm_before_residual"))
        names = ("hidden_size", "num_attention_heads", "head_dim", "rope_theta", "max_position_embeddings")
        self._rope = LlamaRotaryEmbedding(LlamaConfig(**{name: CONFIG[name] for name in names}))
        own = self._w.get("embed_tokens.weight")
        self._embed = self._target.model.embed_tokens.weight if own is None else own

    @torch.no_grad()
    def drafts(self, tokens: list[int], number: int) -> list[int]:
        """What follows ``tokens``, by the most likely token each."""
        found = self._target(torch.tensor([tokens[:-1]]), output_hidden_states=True)
        # hidden_states[i] is the residual in front of layer i; the last one is behind the last norm.
        states = [*found.hidden_states[:-1], self._residual_behind_last(tokens[:-1])]
        if self._third:
            read = torch.cat([states[i][0] for i in LAYERS_READ], 1)
            hidden = F.linear(read, self._w["fc.weight"])
        else:
            hidden = found.hidden_states[-1][0]
        text, drafts = list(tokens), []
        for _ in range(number):
            out, carried = self._pass(torch.tensor(text[1:]), hidden)
            drafts.append(self._token(out[-1]))
            text.append(drafts[-1])
            hidden = torch.cat([hidden, carried[-1:]])
        return drafts

    def _residual_behind_last(self, tokens: list[int]) -> torch.Tensor:
        kept: list[torch.Tensor] = []
        hook = self._target.model.norm.register_forward_pre_hook(lambda module, args: kept.append(args[0]))
        self._target(torch.tensor([tokens]))
        hook.remove()
        return kept[0]

    def _token(self, out: torch.Tensor) -> int:
        if not self._third:
            return int(self._target.lm_head(out).argmax())
        token = int(F.linear(out, self._w["lm_head.weight"]).argmax())
        offsets = self._w.get("d2t")
        return token if offsets is None else token + int(offsets[token])

    def _pass(self, tokens: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        w, layer = self._w, "layers.0."
        embedded = self._embed[tokens]
        if self._third:
            normed = _norm(hidden, w[f"{layer}hidden_norm.weight"])
            residual = normed if self._norm_first else hidden
            x = torch.cat([_norm(embedded, w[f"{layer}input_layernorm.weight"]), normed], 1)
        else:
            x = residual = F.linear(torch.cat([embedded, hidden], 1), w["fc.weight"], w["fc.bias"])
        residual = residual + self._attention(x, w, f"{layer}self_attn.")
        y = _norm(residual, w[f"{layer}post_attention_layernorm.weight"])
        gate, up = (F.linear(y, w[f"{layer}mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        residual = residual + F.linear(F.silu(gate) * up, w[f"{layer}mlp.down_proj.weight"])
        return (_norm(residual, w["norm.weight"]) if self._third else residual), residual

    def _attention(self, x: torch.Tensor, w: Mapping[str, torch.Tensor], prefix: str) -> torch.Tensor:
        length = len(x)
        q, k, v = (
            F.linear(x, w[f"{prefix}{name}_proj.weight"]).view(1, length, -1, HEAD_DIM).transpose(1, 2)
            for name in "qkv"
        )
        q, k = apply_rotary_pos_emb(q, k, *self._rope(x, torch.arange(length)[None]))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return F.linear(heads.transpose(1, 2).reshape(length, -1), w[f"{prefix}o_proj.weight"])


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + CONFIG["rms_norm_eps"]) * weight
