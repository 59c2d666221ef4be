"""``DecoderModel``: token ids to logits. Architectures differ in their ``Family``, not in code.

Shapes: T tokens of the step, C hidden size, V vocabulary, N positions whose logits are wanted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar, cast

import torch
from torch import nn

from headway.core.switches import FUSED_LAYERS, is_on
from headway.kernels.mid_linear import mid_linear
from headway.kernels.skinny_linear import skinny_linear
from headway.kernels.wide_linear.tiles import Counts
from headway.models.config import DecoderConfig, Family
from headway.models.layers.attention import Attention
from headway.models.layers.embedding import Embedding
from headway.models.layers.few_tokens import FewTokens, FusedRows, fusing
from headway.models.layers.linear import Linear
from headway.models.layers.many_tokens import ManyTokens, WideTokens, going_wide, within
from headway.models.layers.mid_tokens import MidRows, MidTokens, Step, starting_early
from headway.models.layers.mlp import GatedMLP
from headway.models.layers.norm import RMSNorm
from headway.models.rope import cos_sin_table
from headway.state.batch import StepBatch
from headway.state.kv_pool import KVPool

LAUNCHES_SECONDS = 0.9e-3
"""What launching a layer's kernels one by one takes a slow host (0.5 to 0.9 ms, measured beside H200s)."""
FLOPS = 6e14
"""Of a large product on such a card; slower ones hide launches sooner."""


class DecoderLayer(nn.Module):
    """Attention and feed-forward block. The norm before the attention is applied by the caller, fused with the add of
    the layer below."""

    def __init__(
        self, config: DecoderConfig, layer: int, cos_sin: torch.Tensor, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self.attention = Attention(config, layer, cos_sin, dtype=dtype, device=device)
        self.post_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self.mlp = GatedMLP(config, dtype=dtype, device=device)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        batch: StepBatch,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
    ) -> torch.Tensor:
        """Add the attention to residual [T, C], whose ``input_norm`` is x [T, C]; returns the MLP's part to add."""
        attended = self.attention.forward(x, batch, k_cache, v_cache)
        return self.mlp.forward(self.post_norm.add(attended, residual))

    def destinations(self, prefix: str) -> dict[str, torch.Tensor]:
        """Checkpoint tensor name, beginning with prefix -> the view of ours it fills."""
        return {
            **self.input_norm.destinations(f"{prefix}input_layernorm."),
            **self.attention.destinations(f"{prefix}self_attn."),
            **self.post_norm.destinations(f"{prefix}post_attention_layernorm."),
            **self.mlp.destinations(f"{prefix}mlp."),
        }


class DecoderModel(nn.Module):
    """A decoder with uninitialised weights; ``models.load`` fills them and calls ``finalize``.

    Args:
        config: checked numbers.
        dtype, device: of the weights and activations.
        max_model_len: positions the rotary table covers.

    Attributes:
        cos_sin: float32 [max_model_len, rotary dimensions].
    """

    family: ClassVar[Family]

    def __init__(self, config: DecoderConfig, *, dtype: torch.dtype, device: torch.device, max_model_len: int) -> None:
        super().__init__()
        self.config, self.dtype, self.device, self.max_model_len = config, dtype, device, max_model_len
        hidden, vocab = config.hidden_size, config.vocab_size
        self.cos_sin = cos_sin_table(config.rope, max_model_len, device)
        self.embedding = Embedding(vocab, hidden, dtype=dtype, device=device)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer, self.cos_sin, dtype=dtype, device=device) for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(hidden, config.rms_norm_eps, dtype=dtype, device=device)
        tied = self.embedding.weight if config.tie_word_embeddings else None
        self.head = Linear(hidden, {"lm_head": vocab}, bias=False, dtype=dtype, device=device, tied=tied)
        self._chain = self._link()
        self._few: list[FewTokens] = []
        self._mid: list[MidTokens] = []
        self._many: list[ManyTokens] = []
        self._few_tokens = self._head_rows = 0  # until ``fuse``
        self._mid_tokens = self._head_mid = range(0)  # until ``start_early``
        self._many_tokens: Counts = ()  # until ``go_wide``

    def _link(self) -> list[tuple[DecoderLayer, RMSNorm]]:
        """Each layer with the norm that follows it: the next layer's first, or the final one."""
        layers = [layer for layer in self.layers if isinstance(layer, DecoderLayer)]
        return list(zip(layers, [*(layer.input_norm for layer in layers[1:]), self.norm], strict=True))

    def forward(self, batch: StepBatch, kv: KVPool, *, only_rows: bool = False) -> torch.Tensor:
        """One step. Writes the step's keys and values into ``kv``; never waits for the device.

        Args:
            only_rows: give the hidden states of each row's last token alone. Nobody needs the others' behind the last layer's
                keys and values, so the rest of that layer is not computed for them.

        Returns:
            [T, C], or [R, C], hidden states after the final norm, in the model's dtype. Rows of padding and zombies mean
            nothing.
        """
        residual = self.embedding.forward(batch.input_ids)
        num_tokens = residual.shape[0]
        only_rows = only_rows and batch.num_decode_rows < len(batch.row_slots)  # else there is a row for every token
        if num_tokens in self._mid_tokens or num_tokens <= self._few_tokens:
            hidden = self._small_step(residual, batch, kv)
            return hidden.index_select(0, batch.logit_indices) if only_rows else hidden
        decodes = batch.num_decode_rows == num_tokens  # attention then takes the projections as they are
        wide = within(self._many_tokens, num_tokens) and not decodes
        x = self._chain[0][0].input_norm.forward(residual)
        for i in range(len(self._chain) - only_rows):
            if wide:
                x = self._many[i].forward(x, residual, batch, kv.keys[i], kv.values[i])
            else:
                layer, next_norm = self._chain[i]
                x = next_norm.add(layer.forward(x, residual, batch, kv.keys[i], kv.values[i]), residual)
        return self._last_rows(x, residual, batch, kv, wide) if only_rows else x

    def _small_step(self, residual: torch.Tensor, batch: StepBatch, kv: KVPool) -> torch.Tensor:
        """All layers of a step whose number of tokens fused or early layers are for."""
        if residual.shape[0] not in self._mid_tokens:
            for few, k_cache, v_cache in zip(self._few, kv.keys, kv.values, strict=True):
                few.forward(residual, batch, k_cache, v_cache)
            return self.norm.forward(residual)
        step: Step = self._chain[0][0].input_norm.forward(residual), None
        for mid, k_cache, v_cache in zip(self._mid, kv.keys, kv.values, strict=True):
            step = mid.forward(step, residual, batch, k_cache, v_cache)
        x, squares = step
        return x if squares is None else self.norm.forward(residual)

    def _last_rows(
        self, x: torch.Tensor, residual: torch.Tensor, batch: StepBatch, kv: KVPool, wide: bool
    ) -> torch.Tensor:
        """The last layer, from its scores on for each row's last token alone."""
        (layer, norm), k_cache, v_cache = self._chain[-1], kv.keys[-1], kv.values[-1]
        attention = layer.attention
        if wide:
            q = self._many[-1].queries(x, batch, k_cache, v_cache)
        else:
            q = attention.queries(attention.qkv.forward(x), batch, k_cache, v_cache)
        heads = attention.attend.attend_last(q, batch, k_cache, v_cache)
        residual = residual.index_select(0, batch.logit_indices)
        x = layer.post_norm.add(attention.out.forward(heads), residual)
        return norm.add(layer.mlp.forward(x), residual)

    @contextmanager
    def shortened(self) -> Iterator[list[int]]:
        """Inside, ``forward`` runs only the layers of this list, one of each kind and the last, which use all kernels.

        It then needs a pool of these layers.
        """
        windows = self.config.windows or (0,) * self.config.num_layers
        first = {windows[layer]: layer for layer in reversed(range(len(windows)))}
        layers = sorted({*first.values(), len(windows) - 1})  # the last one may run for the rows' last tokens alone
        whole = self._chain, self._few, self._mid, self._many
        self._chain = [self._chain[layer] for layer in layers]
        self._few = [self._few[layer] for layer in layers] if self._few else []
        self._mid = [self._mid[layer] for layer in layers] if self._mid else []
        self._many = [self._many[layer] for layer in layers] if self._many else []
        try:
            yield layers
        finally:
            self._chain, self._few, self._mid, self._many = whole

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, C] hidden states -> [N, V] in the model's dtype."""
        if hidden.shape[0] in self._head_mid:
            return cast(torch.Tensor, mid_linear(hidden, self.head.weight, self.head.bias, None, 0.0))
        if hidden.shape[0] <= self._head_rows:
            return cast(torch.Tensor, skinny_linear(hidden, self.head.weight, self.head.bias))
        return self.head.forward(hidden)

    def launches_hidden_from(self) -> int:
        """Tokens from which on a step takes a GPU longer than launching its kernels one by one takes the host."""
        weights = sum(parameter.numel() for layer, _ in self._chain for parameter in layer.parameters())
        return int(len(self._chain) * LAUNCHES_SECONDS * FLOPS / (2 * max(weights, 1))) + 1

    def destinations(self) -> dict[str, torch.Tensor]:
        """Every checkpoint tensor the model needs -> the view of our parameters it fills."""
        found = self.embedding.destinations("model.embed_tokens.")
        for i, (layer, _) in enumerate(self._chain):
            found |= layer.destinations(f"model.layers.{i}.")
        return found | self.norm.destinations("model.norm.") | self.head.destinations("")

    @torch.no_grad()
    def finalize(self) -> None:
        """Called once, when the weights are in place; nothing may move or replace them afterwards."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.finalize()
        if self.head.tied:
            self.embedding.share(self.head.packed)
        for module in self.modules():
            # nn.Module finds parameters and submodules through a Python-level __getattr__, at 20 look-ups a layer a
            # visible part of a decode step on CPU. Plain instance attributes shadow it.
            vars(module).update(module.named_parameters(recurse=False))
            vars(module).update(module.named_children())
        if is_on(FUSED_LAYERS):
            self._share_kernels()

    def _share_kernels(self) -> None:
        """Use layers of fused kernels where they win on this device."""
        rows = fusing(self.device, self.dtype)
        if rows is not None:
            self.fuse(rows)
        mid = starting_early(self.device, self.dtype)
        if mid is not None:
            self.start_early(mid)
        wide = going_wide(self.device, self.dtype)
        if wide is not None:
            self.go_wide(wide)

    def fuse(self, rows: FusedRows) -> None:
        """Run steps of few tokens with fused linear layers, each op up to the number of rows it is given."""
        layers = [layer for layer, _ in self._chain]
        self._few = [FewTokens(x.input_norm, x.attention, x.post_norm, x.mlp, rows) for x in layers]
        self._few_tokens = min(few.max_tokens for few in self._few)
        self._head_rows = rows("skinny_linear", *self.head.weight.shape)

    def start_early(self, rows: MidRows) -> None:
        """Run steps of some tokens with linear layers that start early, each for the numbers of rows it is given.

        Where these are few enough for ``fuse`` too, they start early.
        """
        links = self._chain
        self._mid = [MidTokens(x.attention, x.post_norm, x.mlp, next_norm, rows) for x, next_norm in links]
        self._mid_tokens = self._mid[0].tokens  # all layers have the same shapes
        self._head_mid = rows("mid_linear", *self.head.weight.shape)

    def go_wide(self, used: WideTokens) -> None:
        """Run steps of many tokens with wide products, each for the numbers of tokens that it is given."""
        links = self._chain
        self._many = [ManyTokens(x.attention, x.post_norm, x.mlp, next_norm, used) for x, next_norm in links]
        self._many_tokens = self._many[0].tokens  # all layers have the same shapes
