"""A second opinion: greedy generation from the tiny Llama with nothing of the engine's. No cache, no batch, no slots.

Everything is recomputed for every token, in the plainest way the definitions allow. Depths and devices are compared with
the synchronous engine; what that engine itself gets wrong, only something that shares no code with it can tell.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from headway.core.automaton import DEAD, MAX_TOKEN_BYTES
from headway.core.messages import AddRequest
from tests.engine.harness import Answer
from tests.engine.tiny_grammars import TOKENS
from tests.engine.tiny_llama import CONFIG, HEAD_DIM, HEADS, KV_HEADS, LAYERS


class NaiveLlama:
    """The model of ``tiny_llama`` in a folder."""

    def __init__(self, folder: Path) -> None:
        self._tensors = load_file(folder / "model.safetensors")

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """[n, V] for n tokens."""
        return self.hidden(tokens) @ self._tensors["lm_head.weight"].T

    def hidden(self, tokens: list[int]) -> torch.Tensor:
        """[n, HIDDEN] after the final norm."""
        tensors = self._tensors
        x = tensors["model.embed_tokens.weight"][torch.tensor(tokens)]
        for layer in range(LAYERS):
            prefix = f"model.layers.{layer}."
            weights = {name.removeprefix(prefix): w for name, w in tensors.items() if name.startswith(prefix)}
            x = x + _attend(_norm(x, weights["input_layernorm.weight"]), weights)
            y = _norm(x, weights["post_attention_layernorm.weight"])
            gate, up = y @ weights["mlp.gate_proj.weight"].T, y @ weights["mlp.up_proj.weight"].T
            x = x + (F.silu(gate) * up) @ weights["mlp.down_proj.weight"].T
        return _norm(x, tensors["model.norm.weight"])

    def answer(self, request: AddRequest) -> Answer:
        """What the engine must say about a greedy request."""
        params, prompt, made = request.params, list(request.prompt_token_ids), Answer()
        assert params.is_greedy and params.max_tokens is not None
        while made.finish_reason is None:
            raw = self.logits(prompt + made.token_ids)
            if params.prompt_logprobs is not None and not made.token_ids:
                for position in range(1, len(prompt)):
                    row = _logprobs(raw[position - 1], prompt[position], params.prompt_logprobs, [])
                    made.prompt_logprobs.append(row)
            token = int(_edited(raw[-1].clone(), request, made.token_ids).argmax())
            if params.logprobs is not None or params.logprob_token_ids:
                row = _logprobs(raw[-1], token, params.logprobs or 0, params.logprob_token_ids or [])
                made.logprobs.append(row)
            may_stop = len(made.token_ids) >= params.min_tokens
            made.token_ids.append(token)
            if may_stop and token in request.eos_token_ids:
                made.finish_reason = "stop"
            elif may_stop and token in (params.stop_token_ids or []):
                made.finish_reason, made.stop_token_id = "stop", token
            elif len(made.token_ids) >= params.max_tokens:
                made.finish_reason = "length"
        return made


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + CONFIG["rms_norm_eps"]).sqrt() * weight


def _attend(x: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    count = len(x)
    q = _rotate((x @ weights["self_attn.q_proj.weight"].T).view(count, HEADS, HEAD_DIM))
    k = _rotate((x @ weights["self_attn.k_proj.weight"].T).view(count, KV_HEADS, HEAD_DIM))
    v = (x @ weights["self_attn.v_proj.weight"].T).view(count, KV_HEADS, HEAD_DIM)
    heads = []
    for head in range(HEADS):
        shared = head // (HEADS // KV_HEADS)
        scores = q[:, head] @ k[:, shared].T / HEAD_DIM**0.5
        future = torch.ones(count, count).triu(1).bool()
        heads.append(scores.masked_fill(future, float("-inf")).softmax(-1) @ v[:, shared])
    return torch.cat(heads, dim=-1) @ weights["self_attn.o_proj.weight"].T


def _rotate(x: torch.Tensor) -> torch.Tensor:
    half = HEAD_DIM // 2
    frequency = CONFIG["rope_theta"] ** (-torch.arange(half) / half)
    angle = (torch.arange(len(x))[:, None] * frequency)[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1)


def _edited(x: torch.Tensor, request: AddRequest, generated: list[int]) -> torch.Tensor:
    """Logits [V] after all that the request asks for."""
    params, forbidden = request.params, float("-inf")
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    if params.allowed_token_ids is not None:
        x[[token for token in range(len(x)) if token not in params.allowed_token_ids]] = forbidden
    if len(generated) < params.min_tokens:
        x[[*request.eos_token_ids, *(params.stop_token_ids or [])]] = forbidden
    for token in {*request.prompt_token_ids, *generated}:
        x[token] *= params.repetition_penalty if x[token] < 0 else 1 / params.repetition_penalty
    for token in set(generated):
        x[token] -= params.frequency_penalty * generated.count(token) + params.presence_penalty
    for *start, last in request.bad_words_token_ids:
        if generated[len(generated) - len(start) :] == start and len(start) <= len(generated):
            x[last] = forbidden
    if (automaton := request.automaton) is not None:
        written = b"".join(TOKENS[token] for token in generated)
        for token in range(len(x)):
            text = TOKENS[token]
            fits = 0 < len(text) <= MAX_TOKEN_BYTES and automaton.walk(automaton.start, written + text) != DEAD
            if not (automaton.accepts(written) if token in request.eos_token_ids else fits):
                x[token] = forbidden
    return x


def _logprobs(raw: torch.Tensor, token: int, number: int, chosen: list[int]) -> Any:
    """(ids, log-probabilities, rank) of one position."""
    ids = [token, *(chosen or raw.sort(descending=True, stable=True).indices[:number].tolist())]
    return ids, raw.log_softmax(0)[ids].tolist(), int((raw >= raw[token]).sum())
